"""What README and docs/ say exists: files, verbs, tests, tables. And the claims of theirs that no other test covers."""

import ast
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from pipeline.__main__ import VERBS
from pipeline.commands import gradient
from pipeline.config import OptimizerSection

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# A path below a folder of ours, or a script or page by its name.
NAMED_PATH = re.compile(
    r"(?<![\w./-])((?:configs|dali|docs|pipeline|scripts|tests)/(?:[\w./-]*\w)?|run\.sh|[A-Z]+\.md)(?![\w/])"
)
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
PIPELINE_VERB = re.compile(r"-m pipeline[ \t]+([a-z][\w-]*)")


@by_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@by_page
def test_files_that_are_named_exist(page):
    for name in NAMED_PATH.findall(page.read_text()):
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name} names {name}"


@by_page
def test_verbs_that_are_named_exist(page):
    text = page.read_text()
    script = (ROOT / "run.sh").read_text()
    of_run = set(re.findall(r"^ {2}([a-z][a-z-]*) ", script, re.MULTILINE))  # those that ./run.sh lists
    assert {"quickstart", "pretrain", "test"} <= of_run
    for verb in re.findall(r"\./run\.sh[ \t]+([a-z][a-z-]*)", text):
        assert verb in of_run, f"{page.name} says ./run.sh {verb}"
    for verb in PIPELINE_VERB.findall(text):
        assert verb in VERBS, f"{page.name} says python -m pipeline {verb}"


@by_page
def test_tests_that_are_named_exist(page):
    for file, name in NAMED_TEST.findall(page.read_text()):
        defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{page.name} names {file}::{name}"


def test_every_answer_of_the_faq_names_a_test():
    answers = (ROOT / "docs/faq.md").read_text().split("\n## ")[1:]
    assert len(answers) >= 10
    for answer in answers:
        assert NAMED_TEST.search(answer), answer.splitlines()[0]


@by_page
def test_no_heading_stands_twice(page):
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings)), headings


@by_page
def test_no_figure_is_missing(page):
    """FIGURES marks a place for a number that was still to be measured."""
    assert "FIGURES" not in page.read_text()


def test_the_tables_of_the_gradient_page_are_what_the_command_prints():
    page = (ROOT / "docs/gradient.md").read_text()
    for table in (gradient.table_of_ways(), gradient.table_of_optimizers()):
        assert "\n".join(table) in page, "\n".join(table)


def test_only_a_sum_of_contributions_is_the_true_gradient():
    """The claim of the first table: one way is exact, one a multiple, the others point elsewhere."""
    for unlike in (False, True):
        ours, averaged, *others = (gradient.compare(way, unlike) for way in gradient.WAYS)
        assert ours.multiple == pytest.approx(1, abs=1e-12) and ours.astray < 1e-12
        assert averaged.multiple == pytest.approx(1 / gradient.WORKERS, abs=1e-12) and averaged.astray < 1e-12
        assert all(other.astray > 0.1 for other in others)


@pytest.mark.parametrize("scale", [0.0625, 3.0])
def test_a_loss_scale_under_lars_is_a_bias_rate_and_a_decay(scale):
    scaled = gradient.update(OptimizerSection(weight_decay=0.01), scale)
    other = gradient.update(OptimizerSection(weight_decay=0.01 / scale, lr_biases=0.0048 * scale), 1.0)
    for kind in ("weights", "biases"):
        torch.testing.assert_close(scaled[kind], other[kind], rtol=1e-9, atol=0)
    without = gradient.update(OptimizerSection(weight_decay=0.01), 1.0)
    assert not torch.allclose(scaled["weights"], without["weights"], rtol=1e-4), "the decay must be felt"


def test_off_diag_of_unrelated_features_is_about_d_squared_over_b():
    batch, dim = 256, 512
    z1, z2 = (gradient.normalise(torch.randn(batch, dim, generator=torch.Generator().manual_seed(s))) for s in (0, 1))
    c = z1.T @ z2 / batch
    off_diag = (c.square().sum() - c.diagonal().square().sum()).item()
    assert off_diag == pytest.approx(dim * (dim - 1) / batch, rel=0.02)


@pytest.mark.parametrize("name", ["views.png", "parity.jpg", "mlflow.png"])
def test_pictures_are_pictures_and_small(name):
    file = ROOT / "docs/pictures" / name
    assert file.stat().st_size < 400_000
    with Image.open(file) as picture:
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").resize((64, 64)).getcolors(64 * 64)) > 50, "nearly one colour"
