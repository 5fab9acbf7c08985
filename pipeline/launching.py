"""From one command line to workers on one or several hosts: checks first, then horovodrun, whose output is filtered."""

import argparse
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dali.errors import InputError
from pipeline import failures, jobs, lease
from pipeline.config import Config, dump
from pipeline.cores import threads_per_worker
from pipeline.progress import bar
from pipeline.stopping import EXIT_CODES, PREEMPTED, SIGNALS

PREFIX = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<(stdout|stderr)>)?:")
# glibc gives every large tensor back to the system at once, and the next step faults its pages in again: on a CPU that
# was 5,000 page faults a step of convnet4.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
LOST = re.compile(r"^Process (\d+) exit with status code (\d+)\.")  # horovodrun's own line
PROGRESS = re.compile(r"^step (\d+)/(\d+)  ")
# Only rank 0 says these. In an elastic job that may be a worker which horovodrun still calls by the rank it began with
LEADS = re.compile(r"^step \d+/\d+  |^elastic: \d+ workers")
ROOT = Path(__file__).resolve().parent.parent
LIBC = ctypes.CDLL(None)  # loaded here: after a fork only simple calls are safe
PR_SET_PDEATHSIG = 1


def parse(args: list[str]) -> argparse.Namespace:
    """The words of ./run.sh VERB, which passes `--verb VERB` first; options of a verb become config keys."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--verb", choices=jobs.VERBS, default="pretrain")
    verb = first.parse_known_args(args[:2])[0].verb
    parser = argparse.ArgumentParser(prog=f"./run.sh {verb}", description=jobs.DESCRIPTIONS[verb])
    parser.add_argument("--verb", default=verb, help=argparse.SUPPRESS)
    if verb in ("probe", "finetune"):
        parser.add_argument("--labels", metavar="1%|25|FILE", help="share of each class, number per class, or a list")
    if verb == "probe":
        parser.add_argument("--cached", action="store_true", help="embed each image once; several rates in seconds")
    parser.add_argument("words", nargs="*", metavar="CONFIG | key.path=value", help="YAML file, then single keys")
    parser.add_argument("-np", type=int, metavar="N", help="workers; default: one a GPU, or one on the CPU")
    parser.add_argument("-H", "--hosts", metavar="a:4,b:4", help="hosts with their slots; default: this machine")
    parser.add_argument("--hostfile", help="file with a line `host slots=N` for each host")
    parser.add_argument("--network-interface", metavar="NAME[,NAME]", help="interface that the workers talk over")
    parser.add_argument("--ssh-port", type=int, help="port of sshd on the hosts")
    parser.add_argument("--ssh-identity-file", help="key for the hosts")
    elastic = parser.add_argument_group("workers that come and go (pretrain)")
    elastic.add_argument("--min-np", type=int, metavar="N", help="go on as long as so many workers are left")
    elastic.add_argument("--max-np", type=int, metavar="N", help="take no more than so many")
    elastic.add_argument(
        "--host-discovery-script", metavar="FILE", help="prints a line `host:slots` for each host there is now"
    )
    elastic.add_argument("--reset-limit", type=int, metavar="N", help="give up after so many changes of workers")
    elastic.add_argument(
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds until a host whose worker died may come back; default: never",
    )
    parser.add_argument("--start-timeout", type=int, metavar="SECONDS", help="how long workers may take to appear")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and what it means, and stop")
    parser.add_argument("--print", action="store_true", dest="show", help="print the horovodrun line, and stop")
    options = parser.parse_intermixed_args(args)
    options.config = next((word for word in options.words if "=" not in word), None)
    options.overrides = [word for word in options.words if word != options.config]
    if getattr(options, "labels", None) is not None:
        options.overrides.append(f"{verb}.labels={json.dumps(options.labels)}")  # a file's name may mean more in YAML
    if getattr(options, "cached", False):
        options.overrides.append("probe.cached=true")
    stray = [word for word in options.overrides if "=" not in word]
    only_elastic = (
        options.max_np,
        options.host_discovery_script,
        options.reset_limit,
        options.blacklist_cooldown_range,
    )
    if any(only_elastic) and options.min_np is None:
        raise InputError("--min-np: is needed where workers may come and go; give the fewest to go on with")
    if options.min_np is not None and verb != "pretrain":
        raise InputError(f"--min-np: only workers of pretrain may come and go; leave it out for {verb}")
    if stray:
        raise InputError(f"{stray[0]}: a second config file; give one, and single keys as key.path=value")
    return options


def slots(hosts: str | None, hostfile: str | None) -> dict[str, int] | None:
    """Slots a host, as -H or --hostfile say, or None for this machine.

    Raises:
        InputError: the word or line that cannot be read.
    """
    if hostfile is not None:
        try:
            lines = [line.split("#")[0].split() for line in Path(hostfile).read_text().splitlines()]
        except OSError as error:
            raise InputError(f"--hostfile: {hostfile} cannot be read ({error.strerror})") from None
        pairs = [(words[0], words[1].removeprefix("slots=") if len(words) > 1 else "1") for words in lines if words]
    elif hosts is not None:
        pairs = [(host, count or "1") for host, _, count in (word.partition(":") for word in hosts.split(","))]
    else:
        return None
    for host, count in pairs:
        if not host or not count.isdigit() or int(count) < 1:
            raise InputError(f"{host or '(no name)'}:{count}: is not host:slots, for example -H a:4,b:4")
    return {host: int(count) for host, count in pairs}


def workers_wanted(options: argparse.Namespace, config: Config) -> int:
    """How many workers to start.

    Raises:
        InputError: more than the hosts have slots, this machine has GPUs, or the batch has samples.
    """
    if options.min_np is not None:
        return _elastic_workers(options, config)
    by_host = slots(options.hosts, options.hostfile)
    here = by_host is None
    if by_host is not None:
        wanted = options.np or sum(by_host.values())
        if wanted > sum(by_host.values()):
            raise InputError(f"-np {wanted}: the hosts have {sum(by_host.values())} slots; give more, or fewer workers")
    else:
        wanted = options.np if options.np is not None else max(1, _gpus(config))
    if wanted < 1:
        raise InputError(f"-np {wanted}: at least one worker is needed")
    jobs.check_workers(options.verb, config, wanted)
    if here and (config.device == "cuda" or _gpus(config)):
        from pipeline.workers import choose_device

        choose_device(config.device, wanted - 1, wanted)
    return wanted


def _gpus(config: Config) -> int:
    """How many GPUs the job may use on this machine. torch, slow to import, is asked only where a driver is."""
    if config.device == "cpu":
        return 0
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count()


def _elastic_workers(options: argparse.Namespace, config: Config) -> int:
    """How many workers an elastic job starts with.

    Raises:
        InputError: the numbers contradict each other, or the script cannot be run.
    """
    fewest, most = options.min_np, options.max_np or options.np or options.min_np
    if not 1 <= fewest <= (options.np or fewest) <= most:
        raise InputError(f"--min-np {fewest}, -np {options.np or fewest}, --max-np {most}: must rise, from 1")
    try:
        config.train.check_workers(most)
    except InputError as error:
        raise InputError(f"--max-np {most}: {error}") from None
    script = options.host_discovery_script
    if script is not None and not os.access(script, os.X_OK):
        raise InputError(f"--host-discovery-script: {script} cannot be run; give an executable file (chmod +x)")
    if script is None and options.hosts is None:
        raise InputError("--min-np: needs to know where workers may run: --host-discovery-script FILE, or -H a:4,b:4")
    return options.np or fewest


def horovodrun(options: argparse.Namespace, count: int) -> list[str]:
    """The command that starts the workers."""
    words = starter(count)
    for flag in (
        *("hosts", "hostfile", "network_interface", "ssh_port", "ssh_identity_file", "start_timeout"),
        *("min_np", "max_np", "host_discovery_script", "reset_limit", "blacklist_cooldown_range"),
    ):
        value = getattr(options, flag)
        if value is not None:
            words += [f"--{flag.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return [*words, sys.executable, "-m", "pipeline", *worker_words(options)]


def starter(count: int) -> list[str]:
    """The words before a program that start `count` workers of it.

    Without MPI in this Horovod they say so: horovodrun would ask for it, and import torch for that (5 s).
    """
    built = Path(sys.prefix) / "horovod-build.json"
    only_gloo = built.exists() and json.loads(built.read_text())["mpi"] is None
    return [str(Path(sys.executable).parent / "horovodrun"), *(["--gloo"] if only_gloo else []), "-np", str(count)]


def asking_new_hosts(options: argparse.Namespace, memory: Path) -> str:
    """`reachable_hosts` around the discovery script, as horovodrun gives it to a shell."""
    ssh = ["-p", str(options.ssh_port)] if options.ssh_port else []
    ssh += ["-i", options.ssh_identity_file] if options.ssh_identity_file else []
    program = ROOT / "pipeline" / "reachable_hosts.py"
    words = [sys.executable, "-P", str(program), str(memory), str(Path(options.host_discovery_script).absolute()), *ssh]
    return shlex.join(words)


def worker_words(options: argparse.Namespace) -> list[str]:
    return [options.verb, *([options.config] if options.config else []), *options.overrides]


def launch(args: list[str]) -> int:
    """Check, start the workers, wait; returns the exit code of the worker that failed first, or 0."""
    with _nothing_lost_yet():
        return _launch(parse(args))


@contextmanager
def _nothing_lost_yet() -> Iterator[None]:
    """A block in which the signals that preempt end us with the code for it: there is nothing to save before workers
    work."""

    def leave(number: int, frame: Any) -> None:
        print(f"{signal.Signals(number).name}: ended before a worker began; nothing is lost", file=sys.stderr)
        raise SystemExit(EXIT_CODES[PREEMPTED])

    before = {number: signal.signal(number, leave) for number in SIGNALS - {signal.SIGINT}}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launch(options: argparse.Namespace) -> int:
    config = jobs.load_for(options.verb, options.config, options.overrides)
    count = workers_wanted(options, config)
    if options.show:
        print(shlex.join(horovodrun(options, count)))
        return 0
    here = options.hosts is None and options.hostfile is None and options.min_np is None
    if here and options.verb == "pretrain" and not options.dry_run:
        jobs.check_without_torch(config)
    else:
        described = _described(options, config, count, here)
        if options.dry_run:
            print(dump(config))
            print(described)
            return 0
    output = config.output_path
    lease.refuse_if_owned(output)
    failures.forget(output)
    environment = environment_of_job(config)
    if options.min_np is not None:
        # How long workers wait for a newcomer that starts, or never comes; 30 s are few for one that imports torch
        environment.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "50")
    if here and count == 1:
        command = [sys.executable, "-m", "pipeline", *worker_words(options)]
        process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_us)
        with _signals_passed_to(process, kill_after=config.checkpoint.stop_seconds):
            return _ended_alone(process.wait(), output)
    if options.host_discovery_script is None:
        return run_filtered(horovodrun(options, count), environment, output)
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        options.host_discovery_script = asking_new_hosts(options, Path(folder) / "asked.json")
        return run_filtered(horovodrun(options, count), environment, output)


def _ended_alone(code: int, output: Path) -> int:
    """The exit code of a job of one worker, which is a process of ours; what it did not say of its end is said."""
    if code < 0:
        print(f"error: the worker was ended by {_signal_named(-code)}", file=sys.stderr)
        return 128 - code
    if code == failures.ERROR and (found := failures.found(output)):
        print(_last_line(found[0], output), file=sys.stderr)
    return code


def _signal_named(number: int) -> str:
    name = signal.Signals(number).name
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name


def _last_line(failure: failures.Failure, output: Path) -> str:
    after = "" if failure.step is None else f" after step {failure.step}"
    return (
        f"error: rank {failure.rank} on {failure.host}{after}: {failure.message} "
        f"(traceback in {output / failures.FOLDER / f'rank{failure.rank}.json'})"
    )


def _described(options: argparse.Namespace, config: Config, count: int, here: bool) -> str:
    """Check all that needs no worker, and say what the config means."""
    from pipeline.workers import choose_device

    device = choose_device(config.device, 0, count) if here else config.device
    threads = config.data.threads or (threads_per_worker(count) if here else None)
    return jobs.described(options.verb, config, count, str(device), threads)


def environment_of_job(config: Config) -> dict[str, str]:
    """What horovodrun and its workers see: ours, and how long workers may take to save and say how the run ended."""
    return {
        **KEEP_MEMORY,
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": _path(),
        lease.JOB: uuid.uuid4().hex,
        "HOROVOD_GRACEFUL_TERMINATION_SECONDS": str(config.checkpoint.stop_seconds),
    }


def run_filtered(command: list[str], environment: dict[str, str], output: Path) -> int:
    """Run horovodrun for a run in `output`; returns the code of the worker that failed first, and shows why it did."""
    ended = _run(command, environment)
    if ended.code == 0:
        return 0
    found, in_order = failures.found(output), failures.exit_code(output)
    if in_order is not None and (not found or found[0].consequence):
        return 130 if ended.interrupted else in_order
    if not found and ended.signalled and not ended.spoke:
        return 130 if ended.interrupted else EXIT_CODES[PREEMPTED]
    # The first that ended; later ones were ended by horovodrun
    lost = next((match for line in ended.own_words if (match := LOST.match(line))), None)
    if lost is not None and int(lost[2]) > 128 and (not found or found[0].consequence):
        said = f"; what the others then saw is in {output / failures.FOLDER}" if found else ""
        print(f"error: rank {lost[1]} was ended by {_signal_named(int(lost[2]) - 128)}{said}", file=sys.stderr)
        return 1
    if not found:
        sys.stderr.writelines(ended.own_words[-40:])
        print(f"error: horovodrun ended with {ended.code} before a worker could say why", file=sys.stderr)
        return 1
    failure = found[0]
    if failure.exit_code == failures.MISTAKE:
        if not any(other.rank == 0 for other in found):  # rank 0 says it itself
            print(f"error: {failure.message}", file=sys.stderr)
    else:
        print(_last_line(failure, output), file=sys.stderr)
    return failure.exit_code


def run_again_with_workers(count: int, words: list[str], environment: dict[str, str]) -> int:
    """Run `python -m pipeline` with these words as a job of `count` workers of one thread each, without an output
    folder; returns 0 or 1.
    """
    program = [sys.executable, "-m", "pipeline", *words]
    ours = {"PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    ended = _run([*starter(count), *program], KEEP_MEMORY | os.environ | environment | ours)
    if ended.code != 0:
        sys.stderr.writelines(ended.own_words[-5:])
    return min(ended.code, 1)


def _end_with_us() -> None:
    """In a process of ours, before its program starts: if we are killed, Linux sends it the SIGTERM that we cannot."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class _Ended(NamedTuple):
    """How horovodrun ended: its code, its own lines, whether a worker said anything, and whether a signal or Ctrl-C
    came to us."""

    code: int
    own_words: list[str]
    spoke: bool
    signalled: bool
    interrupted: bool


def _run(command: list[str], environment: dict[str, str]) -> _Ended:
    """Show rank 0's lines bare and other ranks' with their number."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        start_new_session=True,  # a terminal's Ctrl-C reaches us alone; the workers are told by one way only
        preexec_fn=_end_with_us,
    )
    assert process.stdout is not None
    own_words, leader, spoke = [], "0", False
    with process.stdout, _signals_passed_to(process) as seen:
        for line in process.stdout:
            match = PREFIX.match(line)
            if match is None:
                own_words.append(line)
                if line.startswith("hosts: "):  # of reachable_hosts
                    show("0", line.rstrip("\n"), sys.stderr)
            else:
                spoke = True
                text = line[match.end() :].rstrip("\n")
                if LEADS.match(text):
                    leader = match[1]
                shown_as = "0" if match[1] == leader else match[1]
                show(shown_as, text, sys.stdout if match[2] != "stderr" else sys.stderr)
        return _Ended(process.wait(), own_words, spoke, bool(seen), signal.SIGINT in seen)


@contextmanager
def _signals_passed_to(process: subprocess.Popen[Any], kill_after: float | None = None) -> Iterator[list[int]]:
    """A block in which signals to us go to `process`; yields the list of those that came.

    horovodrun passes SIGTERM to its workers, and ends at once by any other; a second signal of ours kills it, at which
    its workers' guardians send them SIGTERM again. A worker, told by `kill_after`, gets signals as they are, and has so
    many seconds to end.
    """
    seen: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        seen.append(number)
        if kill_after is None:
            process.send_signal(signal.SIGTERM if len(seen) == 1 else signal.SIGKILL)
            return
        process.send_signal(number)
        if len(seen) == 1:
            late.start()

    late = threading.Timer(kill_after or 0.0, process.kill)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield seen
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def show(rank: str, text: str, stream: TextIO) -> None:
    match = PROGRESS.match(text)
    if rank == "0" and match and stream.isatty():
        print(bar(int(match[1]), int(match[2]), text), end="", file=stream, flush=True)
    else:
        print(text if rank == "0" else f"[rank {rank}] {text}", file=stream, flush=True)


def _path() -> str:
    """PYTHONPATH by which workers find this checkout from any working directory."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
