"""What a long run shows: step of total, loss terms, images/s, share of time waiting for data, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher and doctor draw the bar too, and must start where Horovod is broken
    from pipeline.plan import Plan

BAR_WIDTH = 24


class Progress:
    """Rates since the last look. Reading the loss waits for the device, so look only every so many steps."""

    def __init__(self, plan: Plan, global_batch: int, step: int) -> None:
        self.plan, self.global_batch = plan, global_batch
        self._begin(step)

    def _begin(self, step: int) -> None:
        self.step, self.waited, self.since = step, 0.0, time.monotonic()

    def add(self, waited: float) -> None:
        """Count a step that waited so many seconds for its batch."""
        self.waited += waited

    def measure(self, step: int, terms: Mapping[str, Any], optimizer: Any) -> dict[str, float]:
        """Metrics at `step`, with rates since the last call; the clock starts anew."""
        values = {name: float(term) for name, term in terms.items()}
        seconds = max(time.monotonic() - self.since, 1e-9)
        steps = max(step - self.step, 1)
        values |= {f"lr_{group['name']}": float(group["lr"]) for group in optimizer.param_groups}
        values |= {
            "images_per_second": steps * self.global_batch / seconds,
            "step_seconds": seconds / steps,
            "data_wait_percent": 100 * self.waited / seconds,
            "epoch": self.plan.epoch(step),
        }
        self._begin(step)
        return values


def show(plan: Plan, step: int, values: dict[str, float]) -> None:
    """One line a look; on a terminal it is a bar that stays in its place."""
    left = (plan.stop_step - step) * values["step_seconds"]
    terms = f" (on {values['on_diag']:.4g}, off {values['off_diag']:.4g})" if "on_diag" in values else ""
    text = (
        f"step {step}/{plan.stop_step}  epoch {values['epoch']:.2f}  loss {values['loss']:.4g}{terms}  "
        f"{values['images_per_second']:.0f} images/s  "
        f"data wait {values['data_wait_percent']:.0f} %  ETA {duration(left)}"
    )
    if sys.stdout.isatty():
        print(bar(step, plan.stop_step, text), end="", flush=True)
    else:
        print(text, flush=True)


class Counter:
    """Shows how far a pass over `total` images is: a bar on a terminal, else a line every 10 s and at the end."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.began = self.shown = time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if self.done < self.total and now - self.shown < (0.2 if terminal else 10):
            return
        self.shown = now
        rate = self.done / max(now - self.began, 1e-9)
        left = duration((self.total - self.done) / rate)
        text = f"{self.what} {self.done:,}/{self.total:,}  {rate:.0f} images/s  ETA {left}"
        print(bar(self.done, self.total, text) if terminal else text, end="" if terminal else "\n", flush=True)


def bar(step: int, total: int, text: str) -> str:
    """`text` behind a bar that overwrites the terminal's line; the last one ends it."""
    filled = round(BAR_WIDTH * step / total)
    return f"\r\033[K[{'=' * filled}{' ' * (BAR_WIDTH - filled)}] {text}" + ("\n" if step == total else "")


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def report(text: str, done: int, total: int | None) -> None:
    """How far something long has come, on standard error: a bar on a terminal, else a line now and then."""
    global _next_line
    end = done == total
    if sys.stderr.isatty():
        shown = f"{text}: {done:,}" + (f" of {total:,}" if total else "")
        print(bar(done, total, shown) if total else f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)
    elif time.monotonic() >= _next_line or (end and done >= LARGE):
        print(f"{text}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)
        _next_line = time.monotonic() + LINE_SECONDS


LINE_SECONDS, LARGE = 10.0, 10_000
_next_line = time.monotonic() + LINE_SECONDS
