"""Threads per worker: case 47."""

import os

from pipeline import cores


def test_workers_share_the_cores_of_their_host(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "none")
    assert [cores.threads_per_worker(local_size) for local_size in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


def test_a_containers_quota_counts(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    assert cores.usable_cores() == 3
