"""Threads per worker: case 47."""

import os

import pytest

from pipeline import cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")


def test_workers_share_the_cores_of_their_host():
    assert [cores.threads_per_worker(local_size) for local_size in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),  # a container
        ("", {"cpu.max": "300000 100000\n"}, 3),  # which does not show its groups
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/jobs/7\n", {"jobs/cpu.max": "200000 100000", "jobs/7/cpu.max": "max 100000"}, 2),  # of the job above
        ("0::/../other\n", {"cpu.max": "300000 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/\n1:name=systemd:/x\n",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_containers_or_a_jobs_quota_counts(tmp_path, own, files, usable):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert cores.usable_cores() == usable
