"""Numbers and names that a command cannot work with are refused before it begins."""

import pytest

from dali.errors import InputError
from pipeline.arguments import writable_file, writable_folder
from pipeline.commands import bench, check_data, exactness, faults, parity


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (faults, "--times 0", "--times: 0 is too few; at least 1"),
        (exactness, "--steps 0", "--steps: 0"),
        (exactness, "--workers 2,0", "--workers: 0"),
        (parity, "--draws 0", "--draws 0: must be 1 or more"),
        (parity, "--images -1", "--images -1: must be 1 or more"),
        (bench, "combine -np 0", "--np: 0"),
        (bench, "combine --dims 8,0", "--dims: 0"),
        (bench, "micro-batches --counts 1,0", "--counts: 0"),
        (bench, "resilience --steps 0", "--steps: 0"),
        (bench, "autocast --batch 0", "--batch: 0"),
        (bench, "loader --rounds 0", "--rounds: 0"),
        (bench, "loader-memory --epochs 0", "--epochs: 0"),
    ],
)
def test_a_number_that_is_too_small_is_named(command, words, said):
    with pytest.raises(InputError) as error:
        command.run(words.split())
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--workers 1,x", "argument --workers: invalid numbers value: '1,x'"),
        ("--dtypes float16", "argument --dtypes: 'float16' is none of float64, float32"),
        ("--optimizers lars,adam", "argument --optimizers: 'adam' is none of lars, sgd, adamw"),
        ("--combines all", "argument --combines: 'all' is none of auto, allreduce, gather, gram"),
    ],
)
def test_what_is_no_number_or_name_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        exactness.run(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [(exactness, ""), (faults, ""), (parity, ""), (check_data, "nowhere"), (bench, "combine"), (bench, "elastic")],
)
def test_what_cannot_be_written_is_refused_before_hours_of_work(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--write: .*file/below cannot be written.* another"):
        command.run([*words.split(), "--write", str(tmp_path / "file/below")])


def test_a_place_to_write_to_is_left_as_it_was(tmp_path):
    (tmp_path / "old").write_text("kept")
    assert writable_file(str(tmp_path / "old")).read_text() == "kept"
    assert not writable_file(str(tmp_path / "new")).exists()
    assert list(writable_folder(str(tmp_path / "a/b")).iterdir()) == []
