"""ui [OUT] [--port N]: MLflow's pages for a run's output folder, on this machine only."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from dali.errors import InputError
from pipeline.sender import Position, without_password

_USUAL_PORT = 5000
_LONGEST_START = 120  # seconds; 8 to 15 are usual


def run(words: list[str]) -> int:
    """Serve until Ctrl-C, then 0. With a tracking server there is nothing to serve: its address is printed."""
    parser = argparse.ArgumentParser(prog="ui", description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, help="output folder; default: the newest under outputs/")
    parser.add_argument("--port", type=int, help=f"default: {_USUAL_PORT}, or a free one when that is taken")
    arguments = parser.parse_args(words)
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if arguments.output is None and server.startswith("http"):
        print(f"MLflow is at {without_password(server)}")
        return 0
    output = _newest() if arguments.output is None else arguments.output.absolute()
    position = Position.load(output / "tracking.json")
    if position is None:
        raise InputError(f"{output}: no run was tracked here; give the output folder of a run")
    if not position.uri.startswith("sqlite:///"):
        print(f"The run {position.run_id or '(not sent yet)'} is tracked at {without_password(position.uri)}")
        return 0
    if not Path(position.uri.removeprefix("sqlite:///")).is_file():
        raise InputError(f"{position.uri}: the store is not there; sync-tracking {output} makes it from the journal")
    return _serve(position.uri, output, arguments.port)


def _newest() -> Path:
    found = sorted(Path("outputs").glob("*/tracking.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f"{Path('outputs').absolute()}: holds no tracked run; give the output folder: ui OUT")
    return found[-1].parent.absolute()


def _serve(uri: str, output: Path, port: int | None) -> int:
    port = _free_port(port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1", "--default-artifact-root", str(output / "artifacts")]
    # The job runner serves features of MLflow for language models, and costs four more processes.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **os.environ}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves through `finally`, so that no server stays behind
    # A session of its own: Ctrl-C reaches only this process, which then ends the server and all that it started.
    server = subprocess.Popen(command, env=environment, cwd=output, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_until_it_answers(server, port)
        print(f"MLflow shows {output} at http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _free_port(wanted: int | None) -> int:
    for port in (wanted or _USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
            except OSError as error:
                if wanted is not None:
                    raise InputError(f"--port: {wanted} cannot be used ({error.strerror}); choose another") from None
    raise AssertionError("the system gave no port")


def _wait_until_it_answers(server: subprocess.Popen, port: int) -> None:
    last = time.monotonic() + _LONGEST_START
    while server.poll() is None and time.monotonic() < last:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise InputError(f"ui: MLflow's server did not start on port {port}; its own words are above")


def _end(server: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(timeout=5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
