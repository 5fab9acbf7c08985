import json
import logging
import os
import resource
import threading

from pipeline.journal import Journal, number, read


def test_records_come_back_with_attempt_and_place(tmp_path):
    path = tmp_path / "journal.jsonl"
    for steps in ((5, 6, 7), (6, 7)):
        journal = Journal(path)
        for step in steps:
            journal.append("metrics", step=step, metrics={"loss": 1 / step})
        journal.close()
    records = list(read(path))
    assert [(r.attempt, r.body["step"]) for r in records] == [(1, 5), (1, 6), (1, 7), (2, 6), (2, 7)]
    assert [r.body["metrics"]["loss"] for r in records[:2]] == [1 / 5, 1 / 6]
    assert [r.end for r in records[:-1]] == [r.start for r in records[1:]]
    assert records[-1].end == path.stat().st_size
    assert [r.body["step"] for r in read(path, records[2].end)] == [6, 7]


def test_torn_last_line_is_cut_and_the_rest_kept(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append("metrics", step=1, metrics={})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-5])
    assert [r.body["step"] for r in read(path)] == [1]  # a reader beside the writer waits for the rest
    journal = Journal(path)
    assert path.read_bytes() == whole
    journal.append("metrics", step=2, metrics={})
    assert [r.body["step"] for r in read(path)] == [1, 2]


def test_file_of_nothing_but_a_long_torn_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 200_000)
    Journal(path).append("end")
    assert [r.kind for r in read(path)] == ["end"]


def test_damaged_line_in_the_middle_is_named_and_passed(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind":"a","attempt":3,"time":1}\n\0\0\0\n[1]\n{"kind":"b","attempt":3,"time":2}\n')
    assert [r.kind for r in read(path)] == ["a", "damaged", "damaged", "b"]
    assert Journal(path).attempt == 4


def test_no_number_that_json_lacks_gets_into_the_file(tmp_path):
    assert [number(v) for v in (1, 0.5, float("nan"), float("inf"), -float("inf"))] == [1.0, 0.5, "nan", "inf", "-inf"]
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("metrics", step=1, metrics={"loss": number(float("nan"))})
    strict = json.loads((tmp_path / "journal.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert strict["metrics"] == {"loss": "nan"}


def test_threads_do_not_mix_their_lines(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")

    def write(kind):
        for step in range(200):
            journal.append(kind, step=step, text="x" * 300)

    threads = [threading.Thread(target=write, args=(kind,)) for kind in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(read(journal.path))
    for kind in "abcd":
        assert [r.body["step"] for r in records if r.kind == kind] == list(range(200))


def test_full_disk_loses_nothing_and_warns_once(tmp_path, caplog):
    journal = Journal(tmp_path / "journal.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        # A limit on the file's size fails as a full disk does, in the middle of a line.
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
        try:
            for step in range(100):
                journal.append("metrics", step=step, metrics={"loss": 1.0})
            size = os.path.getsize(journal.path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert size <= 5_000
    assert len(caplog.records) == 1
    assert len(list(read(journal.path))) < 100
    journal.append("metrics", step=100, metrics={})
    assert [r.body["step"] for r in read(journal.path)] == list(range(101))
