"""Signals as wishes to stop: the step is finished, state saved, the run marked, and the exit code says what happened.

A thread waits for them, and they are blocked everywhere else, before anything is imported: a Python signal handler runs
only when the main thread returns to Python, which took 6 s when it sat in a collective.
"""

import os
import signal
import threading

SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
GO_ON, TIME_IS_UP, PREEMPTED, INTERRUPTED = range(4)
EXIT_CODES = {GO_ON: 0, TIME_IS_UP: 0, PREEMPTED: 75, INTERRUPTED: 130}
WORDS = {TIME_IS_UP: "train.max_minutes", PREEMPTED: "a signal (preempted)", INTERRUPTED: "Ctrl-C"}


def hear() -> None:
    """Undo what a parent did to the signals, or they would never arrive: a shell ignores SIGINT for a command behind
    `&`, and some job runners block them all. Both are inherited, by everything we start too.
    """
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def block() -> None:
    """Keep the signals for the thread; call it before any other thread exists."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class Wishes:
    """What this process was asked for so far. A second signal ends it at once."""

    def __init__(self) -> None:
        self.wish = GO_ON
        self._deaf = self._at_once = False
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def ignore(self) -> None:
        """From now on signals change nothing: state is saved, and the process is leaving."""
        self._deaf = True

    def end_at_once(self) -> None:
        """From now on the first signal ends the process: for work of minutes that saves nothing on the way."""
        self._at_once = True

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            if self._deaf:
                continue
            if self.wish != GO_ON or self._at_once:
                os._exit(128 + number)
            self.wish = INTERRUPTED if number == signal.SIGINT else PREEMPTED
            print(
                f"{signal.Signals(number).name}: will save after this step and end; once more ends at once", flush=True
            )
