"""How a worker that fails says so: OUTPUT/errors/rank<k>.json, from which the launcher learns what went wrong first.

horovodrun exits 1 whatever the workers' codes were, and may blame the wrong rank.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dali.errors import InputError

DONE, ERROR, MISTAKE, STALLED = 0, 1, 2, 76
FOLDER = "errors"
EXIT_CODE = ".exit-code"
_output: Path | None = None
_step: int | None = None


class Failure(NamedTuple):
    time: float
    rank: int
    host: str
    message: str
    exit_code: int
    step: int | None  # steps done by then
    consequence: bool  # of the loss of another worker


def record_in(output: Path) -> None:
    """From now on a failure of this process is written below `output`."""
    global _output
    _output = output


def reached(step: int) -> None:
    """So many steps are done: a failure from now on comes after them."""
    global _step
    _step = step


@contextmanager
def recorded(rank_now: Callable[[], int]) -> Iterator[None]:
    """A block whose exception is written down before it goes on, under the rank that this worker then has."""
    try:
        yield
    except Exception as error:
        mistake, rank = isinstance(error, InputError), rank_now()
        message = str(error) if mistake else " ".join("".join(traceback.format_exception_only(error)).split())[:500]
        write(rank, message, MISTAKE if mistake else ERROR, traceback.format_exc(), is_consequence(error))
        raise


def is_consequence(error: BaseException) -> bool:
    """Whether it only says that another worker is gone, as Horovod's own does."""
    return type(error).__name__ == "HorovodInternalError"


def write(rank: int, message: str, exit_code: int, stack: str, consequence: bool = False) -> None:
    """Note a failure of this process, if it knows where."""
    if _output is None:
        return
    failure = Failure(time.time(), rank, socket.gethostname(), message, exit_code, _step, consequence)
    folder = _output / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(failure._asdict() | {"traceback": stack}, indent=2)
        (folder / f".rank{rank}.tmp").write_text(text + "\n")
        os.replace(folder / f".rank{rank}.tmp", folder / f"rank{rank}.json")
    except OSError as error:  # a full disk: what failed is worth more than this
        print(f"warning: {folder} cannot be written ({error.strerror}); rank {rank}: {message}", file=sys.stderr)


def found(output: Path) -> list[Failure]:
    """The failures of the last launch, the earliest first; those that another one caused come last."""
    values = [json.loads(file.read_text()) for file in (output / FOLDER).glob("rank*.json")]
    failures = [Failure(*(value[key] for key in Failure._fields)) for value in values]
    return sorted(failures, key=lambda failure: (failure.consequence, failure.time))


def leave(output: Path, code: int) -> None:
    """Note the exit code with which all workers leave in order."""
    (output / EXIT_CODE).write_text(f"{code}\n")


def exit_code(output: Path) -> int | None:
    """The code of a launch whose workers left in order, or None."""
    file = output / EXIT_CODE
    return int(file.read_text()) if file.exists() else None


def forget(output: Path) -> None:
    """Remove what an earlier launch, or an earlier group of an elastic job's workers, left of these."""
    for file in [*(output / FOLDER).glob("rank*.json"), output / EXIT_CODE]:
        file.unlink(missing_ok=True)
