"""A discovery script around the user's: hosts where no ssh answers are left out until one does.

horovodrun gives a new host a rank before it tries to reach it, and all workers then wait for a worker that never comes.

    python reachable_hosts.py MEMORY SCRIPT [SSH-OPTION ...]

MEMORY is a file in which hosts that answered, and those that did not, are remembered. Run by file name every second, so
it imports little.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ASK_AGAIN_SECONDS = 10.0  # a host that did not answer
PATIENCE = 5  # seconds for an answer


def reachable(hosts: list[str], memory: Path, options: list[str]) -> set[str]:
    """Those of `hosts` that are this machine, or have ever answered; others are asked now and then."""
    known: dict[str, float] = {}  # when a host failed to answer; 0: it has answered
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(memory.read_text())
    due = [host for host in hosts if known.get(host) != 0 and time.time() - known.get(host, 0) > ASK_AGAIN_SECONDS]
    if due:
        with ThreadPoolExecutor(min(32, len(due))) as pool:
            for host, answered in zip(due, pool.map(lambda host: _answers(host, options), due), strict=True):
                if not answered and host not in known:
                    print(f"hosts: {host} does not answer ssh; it is left out until it does", file=sys.stderr)
                elif answered and known.get(host, 0) > 0:
                    print(f"hosts: {host} answers ssh now", file=sys.stderr)
                known[host] = 0.0 if answered else time.time()
        whole = memory.with_suffix(".new")
        whole.write_text(json.dumps(known))
        whole.rename(memory)
    return {host for host in hosts if known[host] == 0}


def _answers(host: str, options: list[str]) -> bool:
    return _is_here(host) or (
        subprocess.run(
            ["ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
            + ["-o", f"ConnectTimeout={PATIENCE}", *options, host, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
        == 0
    )


def _is_here(host: str) -> bool:
    """Whether horovodrun starts this host's workers without ssh."""
    ours = {a.address for those in psutil.net_if_addrs().values() for a in those if a.family == socket.AF_INET}
    try:
        return socket.gethostbyname(host) in ours
    except OSError:
        return False


def main(memory: str, script: str, *options: str) -> int:
    listed = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=False)
    lines = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    there = reachable(list(dict.fromkeys(line.split(":")[0] for line in lines)), Path(memory), list(options))
    print("\n".join(line for line in lines if line.split(":")[0] in there))
    return listed.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
