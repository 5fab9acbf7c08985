"""Who may import whom: the rules that keep the parts apart."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("dali/**/*.py")])
ONLY_IN = {
    "horovod": {"pipeline/workers.py", "pipeline/elastic.py"},
    "mlflow": {"pipeline/mlflow_store.py"},
    "nvidia": {f"dali/{name}.py" for name in ("graphs", "views", "loader")},
}


def imports(file):
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_keep_the_rules(file):
    name = str(file.relative_to(ROOT))
    for module in imports(file):
        top = module.split(".")[0]
        assert name in ONLY_IN.get(top, {name}), f"{name} imports {module}"
        if name.startswith("dali/"):
            assert top != "pipeline", f"dali/ is a library of its own; {name} imports {module}"
        if module.startswith("pipeline.commands"):
            assert name == "pipeline/__main__.py", f"nothing imports commands; {name} does"


def test_the_config_needs_neither_torch_nor_dali(tmp_path):
    heavy = "{'torch', 'nvidia', 'horovod', 'mlflow'}"
    code = f"import sys; import pipeline.config; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_pins_are_exact_and_stand_once():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    assert all("==" in pin for pin in pins), [pin for pin in pins if "==" not in pin]
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))
