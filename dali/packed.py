"""Data sets packed into a few files: MNIST's IDX format, CIFAR's Python batches, NumPy's .npy and .npz."""

import gzip
import pickle
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.interface import number_labels

Split = Literal["train", "test"]
ARRAY_SUFFIXES = (".npy", ".npz")
Labelled = tuple[NDArray[np.uint8], NDArray[Any], list[str]]  # images, labels, names of the classes

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # where Debian's package dataset-fashion-mnist puts it
FASHION_REMEDY = (
    f"for Fashion-MNIST, `apt-get install dataset-fashion-mnist` puts it into {FASHION_MNIST}, "
    "or give a folder with the four IDX files, data.path=FOLDER"
)


def idx_file(root: Path, stem: str) -> Path | None:
    """`train-images` as train-images-idx3-ubyte, train-images.idx3-ubyte, either with .gz; None if there is none."""
    digit = 3 if stem.endswith("images") else 1
    names = (f"{stem}{dot}idx{digit}-ubyte{end}" for dot in "-." for end in ("", ".gz"))
    return next((root / name for name in names if (root / name).is_file()), None)


def read_idx_split(root: Path, split: Split, key: str) -> Labelled:
    """MNIST's format: big-endian header, then bytes. Both splits lie in one folder."""
    stem = {"train": "train", "test": "t10k"}[split]
    images, labels = idx_file(root, f"{stem}-images"), idx_file(root, f"{stem}-labels")
    if images is None or labels is None:
        wanted = f"{stem}-images-idx3-ubyte" if images is None else f"{stem}-labels-idx1-ubyte"
        raise InputError(f"{key}: {root} holds no {wanted} (or .gz); {FASHION_REMEDY}")
    pixels, numbers = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise InputError(f"{key}: {images} holds {len(pixels)} images, {labels} {len(numbers)} labels; get both again")
    return pixels, numbers, [str(number) for number in range(int(numbers.max()) + 1)]


def _read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: cannot be read ({error}); get the file again") from None
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4").astype(int)
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) - start != shape.prod() or not shape.all():
        raise InputError(f"{file}: is no IDX file of bytes in {dimensions} dimensions, or is cut; get the file again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def cifar_folder(root: Path) -> Path | None:
    """The folder with the Python-version batches of CIFAR-10 or CIFAR-100: `root` or the archive's folder below it."""
    for folder in (root, root / "cifar-10-batches-py", root / "cifar-100-python"):
        if (folder / "data_batch_1").is_file() or ((folder / "train").is_file() and (folder / "meta").is_file()):
            return folder
    return None


def read_cifar_split(root: Path, split: Split, key: str) -> Labelled:
    """CIFAR-10 or CIFAR-100 (fine labels), as unpacked from the Python version. Both splits lie in one folder."""
    folder = cifar_folder(root)
    if folder is None:
        raise InputError(
            f"{key}: {root} holds no CIFAR batches (data_batch_1 .. 5, or train and meta); "
            "unpack cifar-10-python.tar.gz or cifar-100-python.tar.gz there"
        )
    ten = (folder / "data_batch_1").is_file()
    train = [f"data_batch_{number}" for number in range(1, 6)] if ten else ["train"]
    batches = [
        _read_pickle(folder / name) for name in (train if split == "train" else ["test_batch" if ten else "test"])
    ]
    names = _read_pickle(folder / ("batches.meta" if ten else "meta"))
    try:
        pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.concatenate([batch[b"labels" if ten else b"fine_labels"] for batch in batches])
        classes = [name.decode() for name in names[b"label_names" if ten else b"fine_label_names"]]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{key}: {folder} holds no CIFAR batches ({error!r}); unpack the archive again") from None
    return np.ascontiguousarray(pixels), labels, classes


class _ArraysOnly(pickle.Unpickler):
    """Reads plain containers and NumPy arrays: a pickle may otherwise run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in it")


def _read_pickle(file: Path) -> dict[bytes, Any]:
    try:
        with file.open("rb") as stream:
            return _ArraysOnly(stream, encoding="bytes").load()
    except Exception as error:  # a damaged pickle fails in any way
        raise InputError(f"{file}: is no readable CIFAR batch ({error}); unpack the archive again") from None


def read_arrays(file: Path, key: str) -> tuple[NDArray[np.uint8], NDArray[Any] | None, list[str] | None]:
    """`images` and, if there are any, `labels` of a .npz; or a .npy, and its namesake with labels for images.

    Images are (N, H, W) or (N, H, W, C) bytes, C 1 or 3.
    """
    try:
        if file.suffix.lower() == ".npz":
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
                if "images" not in found.files:
                    raise ValueError(f"holds no `images` but {', '.join(found.files) or 'nothing'}")
                images, labels = found["images"], found["labels"] if "labels" in found.files else None
        else:
            images = np.load(file, mmap_mode="r", allow_pickle=False)
            beside = file.with_name(file.name.replace("images", "labels"))
            labels = np.load(beside, allow_pickle=False) if beside != file and beside.is_file() else None
    except Exception as error:  # zipfile and NumPy fail at damage in any way
        raise InputError(
            f"{key}: {file}: cannot be read ({error}); save plain arrays, np.save(FILE, images) or "
            "np.savez(FILE, images=..., labels=...)"
        ) from None
    deep = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    if images.dtype != np.uint8 or not deep or 0 in images.shape:
        raise InputError(
            f"{key}: {file}: images are {images.dtype} {images.shape}; save uint8, (N, H, W) or (N, H, W, 1 or 3)"
        )
    if labels is None:
        return images, None, None
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iuU":
        raise InputError(
            f"{key}: {file}: labels are {labels.dtype} {labels.shape} for {len(images)} images; "
            "save one whole number or name each"
        )
    return images, *number_labels(map(str, labels.tolist()))
