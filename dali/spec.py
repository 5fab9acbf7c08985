"""What the user says about images and views: frozen sections, without any NVIDIA import."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Paths = str | tuple[str, ...]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class DecoderSpec(Section):
    """How a GPU decodes JPEGs: load and memory, by DALI's names. The CPU's decoder has no such settings.

    Defaults: those of DALI's `fn.decoders.image`.
    """

    hw_decoder_load: Probability = Field(
        0.65, description="GPU: share of the JPEGs for its hardware decoder, where it has one; the rest are CUDA's."
    )
    preallocate_width_hint: Whole = Field(
        0, description="GPU: width for which the hardware decoder takes memory at the start; the widest image's."
    )
    preallocate_height_hint: Whole = Field(0, description="GPU: height, likewise; give both, or 0 for neither.")
    device_memory_padding: Whole = Field(
        2**24, description="GPU: bytes of its memory that each thread takes at the start; a larger image takes more."
    )
    host_memory_padding: Whole = Field(
        2**23, description="GPU: bytes of pinned memory, twice that each thread takes at the start, likewise."
    )
    hybrid_huffman_threshold: Count = Field(
        1_000_000, description="GPU: an image with more pixels is Huffman-decoded partly on the GPU, not on the CPU."
    )

    @model_validator(mode="after")
    def _both_sides(self) -> "DecoderSpec":
        if (self.preallocate_width_hint == 0) != (self.preallocate_height_hint == 0):
            raise ValueError("preallocate_width_hint and preallocate_height_hint go together; give both or none")
        return self

    def arguments(self) -> dict[str, Any]:
        """As the operator takes them."""
        return self.model_dump()


class DataSpec(Section):
    """Where the images are, and how they are read."""

    path: Paths = Field("", description="Training images: a folder or file (docs/data.md), or several, joined.")
    test_path: Paths | None = Field(
        None,
        description="Labelled test images for kNN, likewise. "
        "Not needed where `path` itself holds a test split (IDX, CIFAR).",
    )
    kind: Literal["auto", "folder", "list", "shards", "arrays", "idx", "cifar"] = Field(
        "auto", description="How every path is read; `auto` decides by looking at each."
    )
    exclude: str | None = Field(
        None, description="File with names of images to leave out, one a line, as `check-data` writes it."
    )
    max_pixels: Count = Field(
        100_000_000, description="An image file with more pixels, by its header, is a bad file; it is never decoded."
    )
    on_bad_file: Literal["fail", "skip"] = Field(
        "fail",
        description="A file that cannot be decoded: `fail` names it, saves and ends; `skip` trains on another image.",
    )
    max_bad_files: Count = Field(100, description="on_bad_file=skip ends the run when there are more than this.")
    channels: Literal[1, 3] = Field(3, description="Channels the model sees: images are converted to grey or RGB.")
    threads: Count | None = Field(
        None, description="DALI threads of each worker; null: the cores of the machine divided by its workers."
    )
    prefetch: Count = Field(2, description="Batches prepared ahead of training.")
    decoder: DecoderSpec = DecoderSpec()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths with the training images, none if not set."""
        return _several(self.path)

    @property
    def test_paths(self) -> tuple[str, ...]:
        """The paths with the test images, none if not set."""
        return _several(self.test_path or "")


def _several(paths: Paths) -> tuple[str, ...]:
    return tuple(filter(None, (paths,) if isinstance(paths, str) else paths))


class JitterSpec(Section):
    """Colour jitter in random order, as torchvision's: factors from [1 - x, 1 + x], hue from [-x, x] turns."""

    prob: Probability = Field(0.8, description="Share of views that get colour jitter.")
    brightness: Annotated[float, Field(ge=0, le=1)] = Field(0.4, description="Largest change of brightness.")
    contrast: Annotated[float, Field(ge=0, le=1)] = Field(0.4, description="Largest change of contrast.")
    saturation: Annotated[float, Field(ge=0, le=1)] = Field(0.2, description="Largest change of saturation.")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.1, description="Largest shift of hue, in turns.")


class ViewsSpec(Section):
    """The two random views of an image. Defaults: the reference recipe (arXiv:2103.03230, section 2 and appendix A)."""

    size: Annotated[int, Field(ge=8, le=1024)] = Field(224, description="Height and width of a view, in pixels.")
    crop_area: tuple[Positive, Positive] = Field((0.08, 1.0), description="Share of the image's area a crop takes.")
    crop_ratio: tuple[Positive, Positive] = Field((3 / 4, 4 / 3), description="Width / height of a crop.")
    flip: Probability = Field(0.5, description="Share of views mirrored left-right.")
    jitter: JitterSpec = Field(JitterSpec(), description="Colour jitter (no hue or saturation on 1-channel data).")
    grey: Probability = Field(0.2, description="Share of views turned grey (no effect on 1-channel data).")
    blur: tuple[Probability, Probability] = Field((1.0, 0.1), description="Share of blurred views: first, second view.")
    blur_sigma: tuple[Positive, Positive] = Field((0.1, 2.0), description="Standard deviation of the blur, in pixels.")
    solarize: tuple[Probability, Probability] = Field(
        (0.0, 0.2), description="Share of solarized views: first, second view."
    )
    mean: tuple[float, ...] = Field((0.485, 0.456, 0.406), description="Mean per channel, of pixels in [0, 1].")
    std: tuple[Positive, ...] = Field((0.229, 0.224, 0.225), description="Standard deviation per channel, likewise.")
    antialias: bool = Field(True, description="Bicubic resize with antialiasing, as PIL does it.")
    test_crop: Annotated[float, Field(gt=0, le=1)] = Field(
        224 / 256, description="Evaluation: the short side becomes size / test_crop, the centre is cut out."
    )

    @model_validator(mode="after")
    def _ranges(self) -> "ViewsSpec":
        for key in ("crop_area", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"{key}: the range {low} .. {high} is empty; write the smaller number first")
        if self.crop_area[1] > 1:
            raise ValueError(f"crop_area: {self.crop_area[1]} is more than the whole image; the most is 1")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}; give one each per channel")
        return self
