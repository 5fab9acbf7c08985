"""What files of weights hold, by kind of file; no code from a file is run."""

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dali.errors import InputError

# torch.export's numbers for element types (torch/_export/serde/schema.py, ScalarType).
_PT2_TYPES = {5: torch.int64, 6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}
# All that a pickle of NumPy arrays names: Python's own, and NumPy's under its old and its new name.
_NUMPY_NAMES = re.compile(r"numpy(\._?core)?(\.multiarray|\.numeric)? (_reconstruct|_frombuffer|ndarray|dtype|scalar)")


def read(path: str | Path) -> Any:
    """The content of a weights file: tensors under names, in whatever containers the file has around them.

    Kinds: PyTorch's, safetensors, ONNX, torch.export's `.pt2`, detectron2's pickles (their names become torchvision's).

    Raises:
        InputError: the file cannot be read, is damaged, or is none of these.
    """
    kind = Path(path).suffix
    reader = _READERS.get(kind, _read_torch)
    if kind == ".pkl" and zipfile.is_zipfile(path):
        reader = _read_torch  # torch.save does not mind the suffix
    try:
        with open(path, "rb"):
            return reader(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check model.weights") from None
    except InputError:
        raise
    except Exception as error:  # each library names a damaged file in a way of its own
        if reader is _read_torch:
            reason = "is damaged or no PyTorch weights file; write it anew with torch.save(model.state_dict(), ...)"
        else:
            reason = f"is damaged or no {kind} file of weights ({' '.join(str(error).split())[:100]})"
        raise InputError(f"{path}: {reason}") from None


class _Ignored:
    """Stands in for whatever else a training checkpoint holds, such as the reference's `exclude_bias_and_norm`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _read_torch(path: str | Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    stand_ins: list[Any] = [(type(name, (_Ignored,), {}), name) for name in names]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_onnx(path: str | Path) -> dict[str, Tensor]:
    import onnx

    graph = onnx.load(path).graph
    return {item.name: torch.from_numpy(onnx.numpy_helper.to_array(item).copy()) for item in graph.initializer}


def _read_pt2(path: str | Path) -> dict[str, Tensor]:
    # Not torch.export.load, which unpickles the example inputs.
    with zipfile.ZipFile(path) as archive:
        entries = [name for name in archive.namelist() if name.endswith("/weights/model_weights_config.json")]
        folder = entries[0].rpartition("/")[0]
        tensors = {}
        for key, entry in json.loads(archive.read(entries[0]))["config"].items():
            if entry["use_pickle"]:
                raise InputError(
                    f"{path}: holds {key} as a pickle, which is not read; give a .pth or .safetensors file"
                )
            meta = entry["tensor_meta"]
            shape = [size["as_int"] for size in meta["sizes"]]
            strides = [stride["as_int"] for stride in meta["strides"]]
            flat = torch.frombuffer(
                bytearray(archive.read(f"{folder}/{entry['path_name']}")), dtype=_PT2_TYPES[meta["dtype"]]
            )
            tensors[key] = flat.as_strided(shape, strides) if math.prod(shape) else flat.reshape(shape)
    return tensors


class _OnlyArrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("_codecs", "encode") and not _NUMPY_NAMES.fullmatch(f"{module} {name}"):
            raise pickle.UnpicklingError(f"{module}.{name} is neither an array nor a plain value")
        return super().find_class(module, name)


def _read_detectron2(path: str | Path) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        content = _OnlyArrays(file).load()
    model = content.get("model", content)
    return {from_detectron2(key): torch.tensor(value) for key, value in model.items() if hasattr(value, "dtype")}


_READERS: dict[str, Callable[[str | Path], Any]] = {
    ".safetensors": _read_safetensors,
    ".onnx": _read_onnx,
    ".pt2": _read_pt2,
    ".pkl": _read_detectron2,
}


# --- detectron2's names of a ResNet's tensors (its tools/convert-torchvision-to-d2.py) --------------------------------


def to_detectron2(key: str) -> str:
    """A torchvision ResNet's key as detectron2 calls it: `layer1.0.bn2.bias` is `res2.0.conv2.norm.bias`."""
    key = re.sub(r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}", key) if "layer" in key else f"stem.{key}"
    key = re.sub(r"\bbn(\d)", r"conv\1.norm", key)
    return key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


def from_detectron2(key: str) -> str:
    """The inverse; a key may have a prefix, such as `backbone.bottom_up.`, which stays."""
    key = re.sub(r"\bres(\d)", lambda found: f"layer{int(found[1]) - 1}", key).replace("stem.", "")
    key = re.sub(r"\bconv(\d)\.norm", r"bn\1", key)
    return key.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")
