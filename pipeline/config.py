"""The configuration: frozen sections, read from YAML files and `key.path=value` words, checked before anything runs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from dali.errors import InputError
from dali.spec import Count, DataSpec, DecoderSpec, Positive, Section, ViewsSpec

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SHARED_BY_ALL = CONFIGS / "base.yaml"


class ModelSection(Section):
    backbone: str = Field("resnet50", description="A torchvision classification model by name, or `convnet4`.")
    stem: Literal["imagenet", "small"] = Field(
        "imagenet", description="`small`: a 3x3 first convolution without stride and no max-pool, for images to 64 px."
    )
    projector: tuple[Count, ...] = Field(
        (8192, 8192, 8192), min_length=1, description="Widths of the projector's layers; the last one is D."
    )
    zero_init_residual: bool = Field(False, description="Start each residual branch at zero (ResNets only).")
    weights: str | None = Field(
        None,
        description="File with backbone weights. `none`: random ones; null: random ones to pretrain from, and refused "
        "where a backbone is judged or handed over.",
    )


class LossSection(Section):
    lambd: Positive = Field(0.0051, description="Weight of the off-diagonal terms (the paper's lambda).")
    scale: Positive = Field(1.0, description="Factor on the loss, hence on every gradient.")
    combine: Literal["auto", "allreduce", "gather", "gram"] = Field(
        "allreduce", description="How the workers form c, or what the loss needs of it; same loss and gradient."
    )
    eps: NotNegative = Field(1e-5, description="Added to the variance when embeddings are normalised.")


class OptimizerSection(Section):
    name: Literal["lars", "sgd", "adamw"] = Field("lars", description="The update rule.")
    lr_weights: NotNegative = Field(0.2, description="Learning rate of weights (2 dimensions and more).")
    lr_biases: NotNegative = Field(0.0048, description="Learning rate of biases and norm parameters (1 dimension).")
    reference_batch: Count | None = Field(
        256, description="The rates are per this many samples: effective = rate x global_batch / this. null: as given."
    )
    weight_decay: NotNegative = Field(1e-6, description="Decay of weights; 1-dimensional parameters have none.")
    momentum: BelowOne | None = Field(None, description="lars and sgd only; null there means 0.9.")
    trust_coefficient: Positive | None = Field(None, description="lars only; null there means 0.001.")
    betas: tuple[BelowOne, BelowOne] | None = Field(None, description="adamw only; null there means (0.9, 0.999).")

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> "OptimizerSection":
        belongs_to = {"momentum": ("lars", "sgd"), "trust_coefficient": ("lars",), "betas": ("adamw",)}
        for key, names in belongs_to.items():
            if getattr(self, key) is not None and self.name not in names:
                raise ValueError(f"{key} has no effect with {self.name}; remove it (it belongs to {', '.join(names)})")
        return self


class ScheduleSection(Section):
    warmup_epochs: NotNegative = Field(10, description="Epochs of linear warm-up from zero.")
    final_factor: Share = Field(0.001, description="The cosine ends at this share of the effective rate.")


class TrainSection(Section):
    epochs: Positive = Field(1000, description="Length of the run, and of the schedule.")
    global_batch: Annotated[int, Field(ge=2)] = Field(2048, description="Samples in a step, over all workers together.")
    micro_batches: Count = Field(
        1, description="Cut the global batch into this many parts for the backbone; projector and loss see it whole."
    )
    stop_after_steps: Count | None = Field(None, description="Save and end after this step; the schedule stays.")
    max_minutes: Positive | None = Field(None, description="Save and end after this many minutes.")
    gradient_groups: Count = Field(2, description="Fixed groups in which gradients are summed over the workers.")
    on_non_finite: Literal["skip", "stop"] = Field(
        "skip", description="Where a loss or gradient is NaN or infinite: leave the step out, or end the run."
    )
    non_finite_in_a_row: Count | None = Field(
        None, description="`skip` only: so many left out one after another end the run too; null there means 10."
    )
    watchdog_seconds: Positive | None = Field(
        1800, description="A worker without progress for so long says where it stands and ends the run; null: none."
    )

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> "TrainSection":
        if self.non_finite_in_a_row is not None and self.on_non_finite == "stop":
            raise ValueError("non_finite_in_a_row has no effect with on_non_finite: stop; remove it")
        return self

    def check_workers(self, count: int) -> None:
        """Each worker needs a sample, of each micro-batch if there are several.

        Raises:
            InputError: there are not enough of them.
        """
        each = -(-self.global_batch // self.micro_batches)  # of the largest
        key = "train.global_batch" + (" / train.micro_batches" if self.micro_batches > 1 else "")
        if each < count:
            raise InputError(f"{key}: {each} is fewer than the {count} workers; each needs at least one sample")


class PrecisionSection(Section):
    dtype: Literal["float32", "float64"] = Field("float32", description="Type of parameters and views.")
    autocast: Literal["auto", "off", "bf16", "fp16"] = Field(
        "auto",
        description="Type of the model's matrix products; `auto`: bf16 where it is faster (off with float64).",
    )
    tf32: bool = Field(True, description="TensorFloat-32 in the model on GPUs; the loss never uses it.")
    channels_last: bool = Field(True, description="Memory order of images and convolutions.")

    @field_validator("autocast", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare off as false

    @model_validator(mode="after")
    def _one_type(self) -> "PrecisionSection":
        if self.dtype == "float64" and self.autocast not in ("auto", "off"):
            raise ValueError(f"autocast: {self.autocast} has no meaning with dtype float64; write autocast: off")
        return self


class CheckpointSection(Section):
    every_steps: Count | None = Field(None, description="Save every so many steps; null: `every_epochs` alone.")
    every_epochs: Count = Field(1, description="Save every so many epochs.")
    keep: Count = Field(3, description="How many of the latest checkpoints stay.")
    milestone_epochs: Count | None = Field(100, description="Checkpoints of every so many epochs stay for good.")
    resume: str = Field(
        "auto", description="`auto`: go on from the latest in `output`; `never`; or a file: later ones are set aside."
    )
    stop_seconds: Count = Field(
        300, description="After SIGTERM, how long the launcher lets workers save before it kills them."
    )
    commit_steps: Count = Field(
        10, description="Elastic jobs: workers keep a copy of the state in memory every so many steps."
    )
    allow_change: tuple[str, ...] = Field(
        (), description="Keys (`images` for the list of files) that may differ from the checkpoint's on resume."
    )


class KnnSection(Section):
    k: Count = Field(20, description="Neighbours that vote.")
    temperature: Positive = Field(0.07, description="A neighbour's vote is exp(cosine / temperature).")
    at_start: bool = Field(False, description="Also before the first step: what random features give.")
    every_epochs: Count | None = Field(None, description="Also during training, every so many epochs.")
    bank_size: Count | None = Field(None, description="Training images in the bank; null: all of them.")
    linear_probe: bool = Field(
        False, description="Also a linear probe on the same features (`probe.cached` and its keys), during training."
    )
    batch: Count = Field(256, description="Images a worker embeds at once.")


class ClassifierSection(Section):
    """What `probe` and `finetune` have in common."""

    labels: str = Field(
        "100%",
        description="Labels to train on: a share of each class (`1%`), a number per class (`25`), or a file that "
        "lists images, one a line.",
    )
    epochs: Positive = Field(100, description="Length of the training, and of the cosine, which a new epoch moves on.")
    batch: Count = Field(256, description="Samples in a step, over all workers together.")
    lr_classifier: NotNegative = Field(0.3, description="Learning rate of the classification layer, as given.")
    momentum: BelowOne = Field(0.9, description="Of SGD.")
    weight_decay: NotNegative = Field(1e-6, description="Decay of all that is trained, biases included.")
    crop_area: tuple[Positive, Positive] | None = Field(
        None, description="Share of the image's area a training crop takes; null: `views.crop_area`."
    )
    evaluate_every_epochs: Count = Field(1, description="Count the test images every so many epochs.")

    @field_validator("labels", mode="before")
    @classmethod
    def _number_per_class(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value  # YAML reads a bare 25 as a number

    @field_validator("crop_area")
    @classmethod
    def _range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] <= value[1] <= 1:
            raise ValueError(
                f"crop_area: {value[0]} .. {value[1]} is no range of shares; write [smaller, larger], to 1"
            )
        return value


class ProbeSection(ClassifierSection):
    """`probe`: a linear classifier on the frozen backbone. Defaults: the reference's evaluate.py."""

    cached: bool = Field(
        False, description="Embed every image once, without crop and flip, and train on the features; takes seconds."
    )
    cached_rates: tuple[Positive, ...] = Field(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        min_length=1,
        description="cached: learning rates trained at once, on features of mean 0 and deviation 1.",
    )
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="cached: share of the training labels by which the rate is chosen. Never the test images."
    )


class FinetuneSection(ClassifierSection):
    """`finetune`: backbone and classifier. Defaults: the reference's semi-supervised command (its README)."""

    epochs: Positive = Field(20, description="Length of the training, and of the cosine, which a new epoch moves on.")
    lr_backbone: NotNegative = Field(0.002, description="Learning rate of the backbone, as given.")
    lr_classifier: NotNegative = Field(0.5, description="Learning rate of the classification layer, as given.")
    weight_decay: NotNegative = Field(0.0, description="Decay of all that is trained, biases included.")


class TrackingSection(Section):
    experiment: str = Field("barlow-twins", min_length=1, description="MLflow experiment.")
    uri: str | None = Field(
        None, description="MLflow server; null: MLFLOW_TRACKING_URI, else a SQLite file in `output`."
    )
    log_every_steps: Count = Field(50, description="Metrics and progress lines every so many steps.")
    images_every_epochs: Count = Field(
        10, description="Pictures of c and of the spectrum, and figures of collapse, every so many epochs."
    )
    system_metrics: bool = Field(True, description="CPU, memory, disk, network and GPU of rank 0's host.")
    system_metrics_seconds: Positive = Field(10, description="Seconds between two samples of those.")


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = Field(
        "pretrain", description="Name of the run; letters, digits, `.`, `_`, `-`."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Of weights, order and views.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: a GPU for each local rank, else CPU.")
    output: str = Field("", description="Folder for everything the run writes; empty: outputs/NAME.")
    data: DataSpec = DataSpec()
    views: ViewsSpec = ViewsSpec()
    model: ModelSection = ModelSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    knn: KnnSection = KnnSection()
    probe: ProbeSection = ProbeSection()
    finetune: FinetuneSection = FinetuneSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _across_sections(self) -> "Config":
        if len(self.views.mean) != self.data.channels:
            raise ValueError(
                f"views.mean: {len(self.views.mean)} values for data.channels={self.data.channels}; give one each"
            )
        if self.device == "cpu" and self.data.decoder != DecoderSpec():
            raise ValueError("data.decoder: is how a GPU decodes and has no effect with device: cpu; remove it")
        if self.schedule.warmup_epochs > self.train.epochs:
            raise ValueError(
                f"schedule.warmup_epochs: {self.schedule.warmup_epochs:g} is more than "
                f"train.epochs={self.train.epochs:g}; warm-up must fit into the run"
            )
        if self.train.micro_batches > self.train.global_batch:
            raise ValueError(
                f"train.micro_batches: {self.train.micro_batches} is more than "
                f"train.global_batch={self.train.global_batch}"
            )
        if self.model.stem == "small" and self.views.size > 64:
            raise ValueError(f"model.stem: small is for views up to 64 px; views.size is {self.views.size}")
        return self

    @property
    def output_path(self) -> Path:
        """The output folder, absolute."""
        return Path(self.output or f"outputs/{self.name}").expanduser().absolute()


def load(file: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read base.yaml, then `file` (after the one it `extends`), then `key.path=value` words; the later wins.

    Raises:
        InputError: naming the key or file, the value and what is allowed.
    """
    values = _read_yaml(SHARED_BY_ALL)
    sources = [str(SHARED_BY_ALL)]
    if file is not None:
        _merge(values, _read_with_base(Path(file), ()))
        sources.append(str(file))
    for word in overrides:
        _merge(values, _parse_override(word))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise InputError(_explain(error, " + ".join(sources + list(overrides)))) from None


def dump(config: Config) -> str:
    """The resolved config as YAML that `load` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_with_base(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file's values, over those of the file that its key `extends` names, relative to itself."""
    path = path.expanduser()
    if path.resolve() in above:
        raise InputError(f"{path}: extends itself, by way of {above[-1].name}; remove one of the two")
    own = _read_yaml(path)
    base = own.pop("extends", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise InputError(f"{path}: extends: {base!r} is not the name of a file")
    values = _read_with_base(path.parent / base, (*above, path.resolve()))
    _merge(values, own)
    return values


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        shipped = ", ".join(sorted(f"configs/{p.name}" for p in CONFIGS.glob("*.yaml")))
        raise InputError(f"{path}: cannot be read ({error.strerror}); shipped are {shipped}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds {type(values).__name__}; a config is a mapping of keys to values")
    return values


def _parse_override(word: str) -> dict[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise InputError(f"{word}: is not key.path=value, for example optimizer.lr_weights=0.3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"{word}: the value is not YAML; put it in quotes") from None
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _explain(error: ValidationError, sources: str) -> str:
    """Every error of a validation in one line: dotted key, value, what is allowed."""
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"] if part != "tuple")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key; {_near(item['loc'])}"
        elif item["type"] == "value_error":
            key = key if key and "." not in message.split(":")[0] else ""
        else:
            message = f"{item['input']!r} is refused: {message}"
        parts.append(f"{key}: {message}" if key else message)
    return f"{'; '.join(parts)}  [{sources}]"


def _near(loc: tuple[int | str, ...]) -> str:
    """The keys that exist where an unknown one was written."""
    section: Any = Config
    for part in loc[:-1]:
        section = section.model_fields[part].annotation
    import difflib

    names = list(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
