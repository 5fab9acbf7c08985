"""`reference`: docs/configuration.md, made from the config sections; with --check, exit 1 if it is out of date."""

import typing
from typing import Any

import annotated_types
from pydantic_core import PydanticUndefined

from dali.spec import Section
from pipeline.config import Config
from pipeline.launching import ROOT

TARGET = ROOT / "docs" / "configuration.md"
HEADER = """# Configuration

Made from the sections in `pipeline/config.py` and `dali/spec.py` by `./run.sh python -m pipeline reference`.

A run's values are, the later winning: the defaults below, `configs/base.yaml`, the YAML file named on the command line
(over the file that its key `extends` names, if it has one), and words like `optimizer.lr_weights=0.3`. Unknown keys and
impossible values are refused by name. Durations in epochs become steps once, at the start; `--dry-run` prints the
result.
"""


def run(args: list[str]) -> int:
    text = HEADER + "\n".join(_section(Config, ""))
    if "--check" in args:
        current = TARGET.is_file() and TARGET.read_text() == text
        print(
            f"{TARGET.name} is {'up to date' if current else 'out of date; run: ./run.sh python -m pipeline reference'}"
        )
        return 0 if current else 1
    TARGET.write_text(text)
    print(f"wrote {TARGET}")
    return 0


def _section(section: type[Section], prefix: str) -> list[str]:
    lines, nested = [], []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            nested.append((field.annotation, f"{prefix}{name}."))
            if field.description is None:
                continue
        default = field.get_default(call_default_factory=True)
        shown = "the sections below" if isinstance(default, Section) else f"`{_plain(default)}`"
        lines.append(f"| `{prefix}{name}` | {_allowed(field)} | {shown} | {field.description} |")
    table = [
        "",
        f"## {prefix.rstrip('.') or 'The run'}",
        "",
        "| key | allowed | default | |",
        "|---|---|---|---|",
        *lines,
    ]
    out = table if lines else []
    for inner, path in nested:
        out += _section(inner, path)
    return out if prefix else [*out, ""]


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(v) for v in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if value != "" and value is not PydanticUndefined else '""'


def _allowed(field: Any) -> str:
    bounds = [_bound(item) for item in field.metadata]
    return " ".join([_type(field.annotation), *filter(None, bounds)]).strip()


def _bound(item: Any) -> str:
    signs = {annotated_types.Ge: "ge", annotated_types.Gt: "gt", annotated_types.Le: "le", annotated_types.Lt: "lt"}
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    key = signs.get(type(item))
    return f"{words[key]} {getattr(item, key)}" if key else ""


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is typing.Annotated:
        return " ".join(filter(None, [_type(args[0]), *(_bound(m) for m in _metadata(args[1:]))]))
    if origin is tuple:
        inner = [_type(arg) for arg in args if arg is not Ellipsis]
        return f"list of {inner[0]}" + ("" if Ellipsis in args else f" ({len(args)})")
    if args:
        return " or ".join("null" if arg is type(None) else _type(arg) for arg in args)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {"int": "integer", "float": "number", "str": "text", "bool": "true, false"}.get(annotation.__name__, "")


def _metadata(items: tuple[Any, ...]) -> list[Any]:
    return [m for item in items for m in (getattr(item, "metadata", None) or [item])]
