"""What makes two runs the same one, and the checkpoint from which a run goes on."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch

from dali.errors import InputError
from dali.interface import Source
from pipeline import checkpoint, workers
from pipeline.config import Config

# Changing these changes how a run is watched, not what it computes; anything else shapes the run.
NOT_SHAPING = {"name", "output", "device", "tracking", "checkpoint", "knn", "probe", "finetune"}
NOT_SHAPING_KEYS = {
    "data.path",  # the images themselves are compared, by the digest of their list
    "data.test_path",
    "data.kind",
    "data.exclude",
    "data.on_bad_file",  # a run without bad files is the same by both, and one with some can go on by `skip`
    "data.max_bad_files",
    "data.threads",
    "data.prefetch",
    "data.decoder",
    "train.stop_after_steps",
    "train.max_minutes",
    "train.on_non_finite",
    "train.non_finite_in_a_row",
    "train.watchdog_seconds",
    "model.weights",
}


def shaping(config: Config) -> dict[str, Any]:
    """The values that shape what pretraining computes, by dotted key."""
    values = config.model_dump(mode="json")
    return flat({key: value for key, value in values.items() if key not in NOT_SHAPING})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections as one mapping of dotted keys, without those that shape nothing."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if (name := f"{prefix}{key}") in NOT_SHAPING_KEYS:
            continue
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def find_state(
    config: Config, rank: int, now: dict[str, Any], digest: str, stop_step: int, epochs: str = "train.epochs"
) -> dict[str, Any] | None:
    """The content of the checkpoint that rank 0 takes for `checkpoint.resume`, if there is one; on all workers.

    `now` are the run's shaping values, `digest` that of its images, `epochs` the key that sets its length.

    Raises:
        InputError: images or shaping values are not those of the checkpoint, each difference listed; or it is complete:
            the last step is done, and what follows it.
    """
    chosen = None
    with workers.together():
        if rank == 0:
            chosen = checkpoint.find(config.output_path, config.checkpoint.resume)
    chosen = workers.from_rank_0(chosen, "resume.path")
    if chosen is None:
        return None
    with workers.together():
        state = checkpoint.load(chosen)
        before = state["facts"]["shaping"] | {"images": state["facts"]["digest"]}
        now = now | {"images": digest}
        changed = [
            f"{key} was {before.get(key)}, is {now.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in config.checkpoint.allow_change
        ]
        if changed:
            raise InputError(
                f"{chosen}: belongs to another run: {'; '.join(changed)}; write another output, "
                "or accept with checkpoint.allow_change=[KEY, ...]"
            )
        if state["step"] > stop_step or ended_at(config.output_path) == state["step"] == stop_step:
            raise InputError(
                f"output: the run in {config.output_path} is complete (step {state['step']}); write another, or go on "
                f"with a larger {epochs} and checkpoint.allow_change=[{epochs}]"
            )
        if rank == 0 and config.checkpoint.resume != "auto":
            try:
                checkpoint.rewind(config.output_path, chosen, state)
            except OSError as error:
                raise InputError(
                    f"checkpoint.resume: later checkpoints in {config.output_path} cannot be set aside "
                    f"({error.strerror}); make room, or write another output"
                ) from None
    if rank == 0:
        print(f"resuming at step {state['step']} from {chosen}", flush=True)
    return state


def ended_at(output: Path) -> int | None:
    """The step at which the last attempt of the run in `output` ended in order, all done that follows training; None
    where it did not: then the end is done again."""
    summary = output / "summary.json"
    return json.loads(summary.read_text())["step"] if summary.exists() else None


def begin_attempt(output: Path) -> None:
    """What an earlier attempt said of the outcome no longer holds. On rank 0."""
    (output / "summary.json").unlink(missing_ok=True)


class Resumable(Protocol):
    """What a checkpoint is put back into."""

    step: int
    resumed_run_id: str | None
    bad_files: dict[int, str]

    @property
    def source(self) -> Source: ...

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def scaler(self) -> torch.amp.GradScaler: ...


def restore(run: Resumable, state: dict[str, Any]) -> None:
    """Put the content of a checkpoint into a run that was built anew."""
    run.model.load_state_dict(state["model"])
    # Base rates, decay and momentum are the config's: a checkpoint that brought its own would undo an allowed change
    groups = zip(run.optimizer.state_dict()["param_groups"], state["optimizer"]["param_groups"], strict=True)
    groups_now = [{**now, "params": before["params"], "lr": before["lr"]} for now, before in groups]
    run.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups_now})
    if run.scaler.is_enabled() and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.step, run.resumed_run_id = state["step"], state["run_id"]
    # Those found to be bad before have other indices where the images are others
    same = state["facts"]["digest"] == run.source.digest
    run.bad_files = {int(index): reason for index, reason in state["bad_files"].items()} if same else {}
