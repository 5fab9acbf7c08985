"""Every mistake in a config is one line that names the key, the value and the remedy."""

import pytest
import torch
import yaml

from dali.errors import InputError
from pipeline import config, loading
from pipeline.config import dump, load
from pipeline.resuming import shaping

MISTAKES = {
    "optimizer.lr_weight=3": "optimizer.lr_weight: unknown key; did you mean lr_weights?",
    "colour=1": "colour: unknown key",
    "train.global_batch=-3": "train.global_batch: -3 is refused: Input should be greater than or equal to 2",
    "train.global_batch=many": "train.global_batch: 'many' is refused",
    "train.epochs=0": "train.epochs: 0 is refused: Input should be greater than 0",
    "optimizer.lr_weights=-0.1": "optimizer.lr_weights: -0.1 is refused",
    "optimizer.lr_weights=.nan": "optimizer.lr_weights: nan is refused: Input should be a finite number",
    "views.flip=1.5": "views.flip: 1.5 is refused: Input should be less than or equal to 1",
    "views.size=0": "views.size: 0 is refused",
    "views.crop_area=[1.0, 0.5]": "crop_area: the range 1.0 .. 0.5 is empty",
    "views.crop_area=[0.5, 2.0]": "crop_area: 2.0 is more than the whole image",
    "views.mean=[0.5]": "mean has 1 values and std 3",
    "data.channels=1": "views.mean: 3 values for data.channels=1",
    "data.channels=2": "data.channels: 2 is refused",
    "data.decoder.hw_decoder_load=1.5": "data.decoder.hw_decoder_load: 1.5 is refused: Input should be less than or",
    "data.decoder.preallocate_width_hint=500": "preallocate_width_hint and preallocate_height_hint go together",
    "data.decoder.hybrid_huffman_threshold=-1": "data.decoder.hybrid_huffman_threshold: -1 is refused",
    "device=tpu": "device: 'tpu' is refused",
    "loss.combine=average": "loss.combine: 'average' is refused",
    "schedule.warmup_epochs=2000": "schedule.warmup_epochs: 2000 is more than train.epochs=1000",
    "train.micro_batches=4096": "train.micro_batches: 4096 is more than train.global_batch=2048",
    "model.stem=small": "model.stem: small is for views up to 64 px; views.size is 224",
    "model.projector=[]": "model.projector",
    "precision={dtype: float64, autocast: bf16}": "autocast: bf16 has no meaning with dtype float64",
    "optimizer={name: adamw, momentum: 0.9}": "momentum has no effect with adamw",
    "optimizer.betas=[0.9, 0.99]": "betas has no effect with lars",
    "views=3": "views: 3 is refused",
    "name=a/b": "name: 'a/b' is refused",
    "seed=-1": "seed: -1 is refused",
    "probe.crop_area=[0.5, 0.2]": "crop_area: 0.5 .. 0.2 is no range of shares",
    "probe.held_out=0": "probe.held_out: 0 is refused",
    "probe.lr_backbone=0.1": "probe.lr_backbone: unknown key",
    "finetune.cached=true": "finetune.cached: unknown key",
    "learning_rate": "learning_rate: is not key.path=value",
    "a.b=[1": "the value is not YAML",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_one_line(word):
    with pytest.raises(InputError) as caught:
        load(None, [word])
    assert MISTAKES[word] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_how_a_gpu_decodes_is_refused_where_it_has_no_effect_and_reaches_the_loader():
    words = ["data.decoder.hw_decoder_load=0.9", "data.decoder={preallocate_width_hint: 8, preallocate_height_hint: 9}"]
    with pytest.raises(InputError, match=r"^data\.decoder: .* no effect with device: cpu; remove it"):
        load(None, [*words, "device=cpu"])
    made = load(None, words)
    assert loading.settings(made, torch.device("cuda:0"), 1)["decoder"].arguments() == {
        "hw_decoder_load": 0.9,
        "preallocate_width_hint": 8,
        "preallocate_height_hint": 9,
        "device_memory_padding": 2**24,
        "host_memory_padding": 2**23,
        "hybrid_huffman_threshold": 1_000_000,
    }
    assert shaping(made) == shaping(load(None)), "a run may go on with others"


def test_every_mistake_is_named_at_once():
    with pytest.raises(InputError) as caught:
        load(None, ["views.flip=2", "train.epoch=3"])
    assert "views.flip" in str(caught.value) and "did you mean epochs?" in str(caught.value)


def test_a_file_may_say_how_it_differs_from_another(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "one.yaml").write_text("name: one\noptimizer: {lr_weights: 1, weight_decay: 2}\n")
    (tmp_path / "below" / "two.yaml").write_text("extends: ../one.yaml\nname: two\noptimizer: {weight_decay: 3}\n")
    found = load(tmp_path / "below" / "two.yaml", ["seed=4"])
    assert (found.name, found.optimizer.lr_weights, found.optimizer.weight_decay, found.seed) == ("two", 1, 3, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("extends: one.yaml", "one.yaml: extends itself"),
        ("extends: [a]", "is not the name of a file"),
    ],
)
def test_a_file_that_extends_nothing_is_refused(tmp_path, text, message):
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load(tmp_path / "one.yaml")


def test_labels_are_read_as_a_share_a_number_or_a_file():
    for text in ("1%", "25", "25 per class", "lists/some.txt"):
        assert load(None, [f"probe.labels={text}"]).probe.labels == text


def test_the_later_wins_and_numbers_are_read_laxly(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {lr_weights: 1e-3, weight_decay: 1e-6}\nname: one\n")
    found = load(file, ["optimizer.lr_weights=2e-3", "name=two"])
    assert (found.optimizer.lr_weights, found.optimizer.weight_decay, found.name) == (2e-3, 1e-6, "two")


def test_a_bare_off_is_off(tmp_path):
    """YAML 1.1 reads it as false."""
    assert load(None, ["precision.autocast=off"]).precision.autocast == "off"


def test_base_yaml_comes_first(tmp_path, monkeypatch):
    base = tmp_path / "base.yaml"
    base.write_text("seed: 7\nname: site\n")
    monkeypatch.setattr(config, "SHARED_BY_ALL", base)
    file = tmp_path / "run.yaml"
    file.write_text("name: run\n")
    assert (load(file).seed, load(file).name) == (7, "run")


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [1\n", "just words\n"])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match="odd.yaml"):
        load(file)


def test_a_missing_file_is_named_with_those_that_exist():
    with pytest.raises(InputError, match="nowhere.yaml: cannot be read .*configs/quickstart.yaml"):
        load("nowhere.yaml")


def test_sections_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        load().optimizer.lr_weights = 1.0


@pytest.mark.parametrize("file", sorted(config.CONFIGS.glob("**/*.yaml")), ids=lambda f: f.name)
def test_shipped_configs_load_and_print_what_loads_again(file, tmp_path):
    found = load(file)
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump(found))
    assert load(printed) == found
    assert set(yaml.safe_load(dump(found))) == set(type(found).model_fields)


def test_defaults_are_the_reference_recipe():
    """arXiv:2103.03230, section 2.2 and appendix A; facebookresearch/barlowtwins, main.py."""
    found = load()
    assert found.model.backbone == "resnet50" and found.model.projector == (8192, 8192, 8192)
    assert (found.loss.lambd, found.train.epochs, found.train.global_batch) == (0.0051, 1000, 2048)
    assert (found.optimizer.name, found.optimizer.lr_weights, found.optimizer.lr_biases) == ("lars", 0.2, 0.0048)
    assert (found.optimizer.weight_decay, found.optimizer.reference_batch) == (1e-6, 256)
    assert (found.schedule.warmup_epochs, found.schedule.final_factor) == (10, 0.001)
    views = found.views
    assert (views.size, views.crop_area, views.flip, views.grey) == (224, (0.08, 1.0), 0.5, 0.2)
    assert (views.blur, views.solarize, views.blur_sigma) == ((1.0, 0.1), (0.0, 0.2), (0.1, 2.0))
    jitter = views.jitter
    assert (jitter.prob, jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.8, 0.4, 0.4, 0.2, 0.1)


def test_the_configuration_page_is_up_to_date():
    from pipeline.commands import reference

    assert reference.run(["--check"]) == 0
