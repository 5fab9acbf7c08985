"""Hosts that a discovery script names, and no ssh answers on."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import reachable_hosts

NOWHERE = "127.0.0.9"  # this machine too, but not an address that it says it has; nothing listens there


@pytest.fixture
def program(tmp_path):
    script = tmp_path / "hosts with a blank.sh"
    script.write_text(f"#!/bin/sh\nprintf 'localhost:2\\n\\n{NOWHERE}:1\\nlocalhost\\n'\n")
    script.chmod(0o755)
    file = Path(reachable_hosts.__file__)
    return [sys.executable, "-P", str(file), str(tmp_path / "asked.json"), str(script), "-p", "1"]


def test_only_hosts_that_answer_are_named_and_the_others_once(program):
    first, second = (subprocess.run(program, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout == second.stdout == "localhost:2\nlocalhost\n"
    assert first.stderr == f"hosts: {NOWHERE} does not answer ssh; it is left out until it does\n"
    assert second.stderr == ""


def test_a_script_that_fails_is_not_an_empty_list(program):
    Path(program[4]).write_text("#!/bin/sh\nexit 3\n")
    assert subprocess.run(program, capture_output=True, check=False).returncode == 3


def test_a_host_is_asked_again_and_stays_once_it_answered(tmp_path, monkeypatch, capsys):
    answers, asked, now = {"a": True, "b": False}, [], [1000.0]

    def answer(host, options):
        asked.append(host)
        return answers[host]

    monkeypatch.setattr(reachable_hosts, "_answers", answer)
    monkeypatch.setattr(reachable_hosts.time, "time", lambda: now[0])

    def there():
        return reachable_hosts.reachable(["a", "b"], tmp_path / "asked.json", [])

    assert there() == {"a"} and there() == {"a"} and asked == ["a", "b"]
    now[0] += reachable_hosts.ASK_AGAIN_SECONDS + 1
    assert there() == {"a"} and asked.count("b") == 2
    assert capsys.readouterr().err.count("b does not answer") == 1, "it is said once"
    now[0] += reachable_hosts.ASK_AGAIN_SECONDS + 1
    answers |= {"a": False, "b": True}  # a host in use whose ssh is busy keeps its workers
    assert there() == {"a", "b"} and asked == ["a", "b", "b", "b"]
    assert capsys.readouterr().err.splitlines()[-1] == "hosts: b answers ssh now"
