"""Jobs as a user starts them, watched from outside: what they show, when, and which processes they are."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.launching import PREFIX, ROOT

PATIENCE = 300.0  # seconds for anything at all


class Launch:
    """A running `./run.sh pretrain` (or `command`), whose lines are kept with the time they came."""

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str] | None = None,
        command: Sequence[str] = ("./run.sh", "pretrain"),
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._passed = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as shown:
            for line in shown:  # horovodrun, without our launcher, puts the rank before each
                self.lines.append((time.monotonic(), PREFIX.sub("", line.rstrip("\n"))))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def last_step(self) -> int:
        return max((number for _, line in self.lines if (number := step_of(line)) is not None), default=0)

    def until(self, start: str) -> float:
        """When the next line came that starts so; of lines that earlier calls have passed, none counts.

        Raises:
            RuntimeError: it did not come; the job is killed then.
        """
        return self._pass(lambda line: line.startswith(start), start)

    def step(self, at_least: int) -> float:
        """When the next step of at least that number was done. Raises as `until`."""
        return self._pass(lambda line: (step_of(line) or 0) >= at_least, f"step {at_least}")

    def _pass(self, wanted: Callable[[str], bool], name: str) -> float:
        end = time.monotonic() + PATIENCE
        while True:
            over = not self._reader.is_alive() or time.monotonic() > end
            while self._passed < len(self.lines):
                when, line = self.lines[self._passed]
                self._passed += 1
                if wanted(line):
                    return when
            if over:
                self.kill()
                raise RuntimeError(f"no line {name!r} in:\n{self.text[-3000:]}")
            time.sleep(0.02)

    def end(self, patience: float = PATIENCE) -> int:
        """The exit code.

        Raises:
            RuntimeError: it does not end; it is killed then.
        """
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"did not end:\n{self.text[-3000:]}") from None
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """End all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class ElasticLaunch(Launch):
    """The same with workers that come and go: on a list of hosts that may change while the job runs.

    `folder` is for the list and the script that prints it. All hosts are this machine, under different names.
    """

    def __init__(self, words: list[str], folder: Path, hosts: Sequence[str], most: int = 4) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = folder / "hosts"
        self.set_hosts(hosts)
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat '{self.hosts}'\n")
        script.chmod(0o755)
        elastic = ["--min-np", "1", "--max-np", str(most), "-np", str(len(hosts)), "--network-interface", "lo"]
        super().__init__([*words, *elastic, "--host-discovery-script", str(script)])

    def set_hosts(self, names: Sequence[str]) -> None:
        """From now on these are the hosts there are, `name` for one slot, or `name:slots`."""
        whole = self.hosts.with_suffix(".new")
        whole.write_text("".join(f"{name}\n" if ":" in name else f"{name}:1\n" for name in names))
        whole.rename(self.hosts)


def step_of(line: str) -> int | None:
    """The number of a step's line of progress."""
    match = re.match(r"step (\d+)/", line)
    return int(match[1]) if match else None


def workers_of(output: Path, by: str = "HOROVOD_RANK") -> dict[str, int]:
    """Process id of each worker on `output`, by its rank at the start, or by another of Horovod's variables."""
    found = subprocess.run(
        ["pgrep", "-f", "--", f"-m pipeline pretrain.*{output}"], capture_output=True, text=True
    ).stdout
    found_by = {}
    for pid in map(int, found.split()):
        with contextlib.suppress(OSError):
            environment = dict(
                pair.split(b"=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in pair
            )
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if by.encode() in environment and b"python" in program:
                found_by[environment[by.encode()].decode()] = pid
    return found_by
