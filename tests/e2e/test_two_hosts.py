"""Jobs over two hosts: two network namespaces on this machine, each with its own host name, /etc/hosts and sshd.

As on Debian, each host's own name is 127.0.1.1 to itself. Horovod as released dies of that ("connect [127.0.0.1]:
Connection refused"); and a SIGTERM to its launcher ends the ssh to the other host, not the worker there.
scripts/horovod.patch mends both. To see these tests fail, build without those parts of the patch:

    mkdir /tmp/plain && cp -r scripts requirements.txt /tmp/plain
    # delete the section of gloo_context.cc, or of gloo_run.py, from /tmp/plain/scripts/horovod.patch, then
    python3 -m venv --without-pip /tmp/plain/.venv
    realpath .venv/lib/python3.11/site-packages > /tmp/plain/.venv/lib/python3.11/site-packages/main.pth
    HOROVOD_BUILD=cpu /tmp/plain/scripts/build_horovod.sh
    PYTHONPATH=/tmp/plain/.venv/lib/python3.11/site-packages .venv/bin/python -m pytest tests/e2e/test_two_hosts.py
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PORT = 2222
SEARCH = os.environ["PATH"] + ":/usr/sbin:/sbin"


class Host(NamedTuple):
    name: str
    address: str


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "sshd", "ssh", "ssh-keygen", "unshare") if not shutil.which(tool, path=SEARCH)]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 openssh-server openssh-client util-linux)"
    probe = f"probe-{secrets.token_hex(3)}"
    if run("ip", "netns", "add", probe, check=False).returncode:
        return "may not make network namespaces here (in a container: CAP_SYS_ADMIN)"
    run("ip", "netns", "del", probe)
    return ""


def run(*command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    env = os.environ | {"PATH": SEARCH}
    return subprocess.run(command, check=check, env=env, capture_output=True, text=True, timeout=120, **options)


def inside(host: Host, *command: str) -> list[str]:
    """The command, run on that host: its network, its /etc/hosts, its host name."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name]
    return ["ip", "netns", "exec", host.name, *named, *command]


def make_network(hosts: list[Host]) -> None:
    # One cable between the two is enough; nothing is made in the machine's own namespace.
    for host in hosts:
        run("ip", "netns", "add", host.name)
        folder = Path("/etc/netns", host.name)  # `ip netns exec` mounts its files over /etc
        folder.mkdir()
        others = [f"{other.address} {other.name}" for other in hosts if other != host]
        folder.joinpath("hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others, ""]))
    first, second = hosts
    run("ip", "-n", first.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.name)
    for host in hosts:
        run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", host.name, "link", "set", "eth0", "up")
        run("ip", "-n", host.name, "link", "set", "lo", "up")


def remove_network(hosts: list[Host]) -> None:
    for host in hosts:
        for pid in run("ip", "netns", "pids", host.name, check=False).stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended meanwhile
        run("ip", "netns", "del", host.name, check=False)
        shutil.rmtree(f"/etc/netns/{host.name}", ignore_errors=True)


def write_ssh_files(folder: Path) -> None:
    """Host key, user key, sshd and ssh settings, and an `ssh` that leaves ~/.ssh alone."""
    for key in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    settings = [f"Port {PORT}", f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/authorized_keys"]
    settings += ["StrictModes no", "PidFile none", "PermitRootLogin yes", "UsePAM no"]
    folder.joinpath("sshd_config").write_text("\n".join([*settings, ""]))
    folder.joinpath("ssh_config").write_text("UserKnownHostsFile /dev/null\nLogLevel ERROR\nIdentitiesOnly yes\n")
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=SEARCH)} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)


def start_sshd(host: Host, folder: Path) -> subprocess.Popen:
    sshd = shutil.which("sshd", path=SEARCH)
    assert sshd
    log = folder / f"{host.name}.log"
    process = subprocess.Popen(inside(host, sshd, "-D", "-f", f"{folder}/sshd_config", "-E", str(log)))
    deadline = time.monotonic() + 10
    while not (log.exists() and "listening" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"sshd of {host.name} does not start: {log}"
        time.sleep(0.05)
    return process


@pytest.fixture
def hosts(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    tag = secrets.token_hex(3)
    pair = [Host(f"hosta-{tag}", "10.77.0.1"), Host(f"hostb-{tag}", "10.77.0.2")]
    # sshd refuses to start without the first (init makes it where sshd is a service); `ip` looks in the second.
    made = [folder for folder in (Path("/run/sshd"), Path("/etc/netns")) if not folder.exists()]
    for folder in made:
        folder.mkdir(mode=0o755)
    daemons = []
    try:
        make_network(pair)
        write_ssh_files(tmp_path)
        for host in pair:
            daemons.append(start_sshd(host, tmp_path))
        yield pair
    finally:
        remove_network(pair)
        for daemon in daemons:
            daemon.wait(10)
        for folder in made:
            folder.rmdir()


def launch(hosts: list[Host], folder: Path, slots: list[int], script: str, **env: str) -> subprocess.Popen:
    """horovodrun, started on the first host, with so many workers on each."""
    command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(sum(slots))]
    command += ["--disable-cache", "--start-timeout", "120"]
    command += ["-H", ",".join(f"{host.name}:{number}" for host, number in zip(hosts, slots, strict=True))]
    command += ["--ssh-port", str(PORT), "--ssh-identity-file", str(folder / "user_key")]
    command += [sys.executable, str(HERE / script)]
    env = os.environ | env | {"PATH": f"{folder}/bin:{SEARCH}", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    output = folder.joinpath("output").open("w")
    return subprocess.Popen(inside(hosts[0], *command), env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


def said(folder: Path) -> list[str]:
    """What the ranks printed, without Horovod's own words."""
    return sorted(re.findall(r"<stdout>:(rank .*)", folder.joinpath("output").read_text()))


def test_process_sets_over_two_hosts(hosts, tmp_path):
    first, second = hosts
    assert launch(hosts, tmp_path, [2, 1], "process_sets.py").wait(300) == 0, tmp_path.joinpath("output").read_text()
    assert said(tmp_path) == [
        f"rank 0 on {first.name}: all 7, set 5",
        f"rank 1 on {first.name}: all 7, set 2",
        f"rank 2 on {second.name}: all 7, set 5",
    ]


def test_sigterm_reaches_the_other_host(hosts, tmp_path):
    job = launch(hosts, tmp_path, [1, 1], "stop_together.py", HOROVOD_GRACEFUL_TERMINATION_SECONDS="60")
    deadline = time.monotonic() + 300
    while len(said(tmp_path)) < 2:
        assert job.poll() is None and time.monotonic() < deadline, tmp_path.joinpath("output").read_text()
        time.sleep(0.1)
    job.terminate()
    job.wait(120)
    saved = [line for line in said(tmp_path) if "saved" in line]
    assert saved == ["rank 0 saved, got SIGTERM: 1", "rank 1 saved, got SIGTERM: 1"], (tmp_path / "output").read_text()
