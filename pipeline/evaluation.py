"""What every evaluation of a backbone starts from and leaves: labelled images, loaded weights, scores, a summary."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dali.errors import InputError
from dali.interface import Report, silent
from dali.order import steps_per_epoch
from dali.sources import Source, open_source, open_test, without_labels
from dali.subset import Subset, choose, list_bytes
from pipeline import checkpoint, knn, linear_heads, watchdog, workers
from pipeline.config import ClassifierSection, Config
from pipeline.features import Features, extract
from pipeline.file_systems import check_output
from pipeline.model import Backbone, build_seeded_backbone
from pipeline.plan import describe_workers
from pipeline.pretraining import (
    check_output_is_shared,
    check_same_list,
    facts,
    load_weights,
    mark_failed,
    placed,
    set_up_torch,
    wanted_autocast,
    write_summary,
)
from pipeline.scores import Scores, to_count
from pipeline.tracking import Tracker
from pipeline.weights import RANDOM, named

LABELS_FILE = "labels.txt"


@dataclass
class Evaluation:
    """A backbone and the images it is judged on; equal on all workers.

    Attributes:
        verb: probe, finetune or knn.
        source: the training images whose labels may be used.
        digest: of the backbone's tensors as they were loaded.
    """

    verb: str
    config: Config
    world: workers.World
    device: torch.device
    threads: int
    source: Source
    test: Source
    backbone: Backbone
    autocast: torch.dtype | None
    digest: str

    @property
    def classes(self) -> list[str]:
        assert self.test.classes is not None
        return self.test.classes

    def say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)


def section_of(config: Config, verb: str) -> ClassifierSection | None:
    """The section of a verb that trains."""
    return {"probe": config.probe, "finetune": config.finetune}.get(verb)


def check(config: Config, verb: str, report: Report = silent) -> tuple[Source, Source]:
    """Everything that can be refused before a worker starts; returns the labelled training images, and the test images.

    Raises:
        InputError: one line.
    """
    weights = named(config.model.weights)
    if weights != RANDOM and not Path(weights).is_file():
        raise InputError(f"model.weights: {weights} is not a file; give the backbone.pth of a run")
    source = open_source(config.data, "train", report)
    if source.labels is None:
        raise InputError(f"{without_labels(config.data, source)}; {verb} needs all training images labelled")
    test = open_test(config.data, source, report) or open_source(config.data, "test", report)
    section = section_of(config, verb)
    if section is not None:
        key = f"{verb}.labels"
        if section.labels != "100%":
            source = Subset(source, choose(source, section.labels, config.seed, key))
        if len(source) < section.batch:
            raise InputError(
                f"{verb}.batch: {section.batch} is more than the {len(source)} labelled images that {key}="
                f"{section.labels} gives; write {verb}.batch={len(source)} or less"
            )
    if verb == "probe" and config.probe.cached and len(config.probe.cached_rates) > 1:
        assert source.labels is not None
        if np.bincount(source.labels).max() < 2:
            raise InputError(
                "probe.held_out: one label per class leaves none to choose a rate by; give one, probe.cached_rates=[R]"
            )
    with torch.device("meta"):
        build_seeded_backbone(config.model, config.data.channels, config.views.size, config.seed)
    check_output(config.output_path)
    if not resumable(config, verb) and (config.output_path / "summary.json").exists():
        raise InputError(f"output: {config.output_path} holds a finished {verb}; write another output=FOLDER")
    return source, test


def resumable(config: Config, verb: str) -> bool:
    """Whether the work is long enough to save on the way and go on from there."""
    return verb == "finetune" or (verb == "probe" and not config.probe.cached)


def describe(
    config: Config, verb: str, source: Source, test: Source, size: int, device: str, threads: int | None
) -> str:
    """The block printed at the start and by --dry-run."""
    section = section_of(config, verb)
    rows = [
        ("verb", verb + (", on cached features" if verb == "probe" and config.probe.cached else "")),
        ("weights", str(config.model.weights) + (": random features" if config.model.weights == RANDOM else "")),
        ("model", f"{config.model.backbone}, {config.model.stem} stem, {config.data.channels} channel(s)"),
        ("labels", f"{len(source):,} training images, {len(test.classes or [])} classes"),
        ("test", f"{len(test):,} images, {config.views.size} px"),
        ("workers", describe_workers(size, device, threads)),
    ]
    if section is None:
        rows.append(("neighbours", f"k {config.knn.k}, temperature {config.knn.temperature:g}"))
    else:
        per_epoch = steps_per_epoch(len(source), section.batch)
        steps = max(1, round(section.epochs * per_epoch))
        rates = {"classifier": section.lr_classifier, "backbone": getattr(section, "lr_backbone", 0.0)}
        cached = verb == "probe" and config.probe.cached
        shown = ", ".join(f"{rate:g}" for rate in config.probe.cached_rates)
        rows += [
            ("batch", f"{section.batch} global"),
            ("steps", f"{steps:,} = {section.epochs:g} epochs x {per_epoch:,}"),
            ("rates", shown if cached else ", ".join(f"{key} {rate:g}" for key, rate in rates.items())),
            ("decay", f"{section.weight_decay:g}"),
        ]
    rows.append(("output", str(config.output_path)))
    return "\n".join(f"  {key:<10} {value}" for key, value in rows)


def prepare(config: Config, verb: str, world: workers.World) -> Evaluation:
    """Check, load, and agree; the labels that are used are then listed in OUTPUT/labels.txt.

    Raises:
        InputError: by all workers alike.
    """
    with workers.together():
        device = workers.choose_device(config.device, world.local_rank, world.local_size)
        source, test = check(config, verb)
        section = section_of(config, verb)
        if section is not None and section.batch < world.size:
            raise InputError(f"{verb}.batch: {section.batch} is fewer than the {world.size} workers")
    check_same_list(source)
    check_same_list(test)
    check_output_is_shared(config.output_path, world.rank)
    threads = set_up_torch(config, world, device)
    with workers.together():
        backbone = build_seeded_backbone(config.model, config.data.channels, config.views.size, config.seed)
        load_weights(backbone, config, world.rank)
    backbone = placed(backbone, config, device)
    digest = workers.digest(backbone)
    if len(set(workers.gather_objects(digest, "weights.digest"))) > 1:
        raise InputError(f"model.weights: {config.model.weights} differs between the hosts; give all the same file")
    if world.rank == 0 and isinstance(source, Subset):
        (config.output_path / LABELS_FILE).write_bytes(list_bytes(source))
    autocast = workers.from_rank_0(wanted_autocast(config, device), "autocast")
    return Evaluation(verb, config, world, device, threads, source, test, backbone, autocast, digest)


def start_tracker(evaluation: Evaluation, resumed_run_id: str | None = None) -> Tracker | None:
    """The record of this evaluation, on rank 0: a run of its own."""
    config, world = evaluation.config, evaluation.world
    if world.rank != 0:
        return None
    size, device = world.size, str(evaluation.device)
    print(
        describe(config, evaluation.verb, evaluation.source, evaluation.test, size, device, evaluation.threads),
        flush=True,
    )
    known = facts(evaluation) | {
        "verb": evaluation.verb,
        "weights": str(config.model.weights),
        "weights_digest": evaluation.digest,
        "labels": str(len(evaluation.source)),
        "test_digest": evaluation.test.digest,
    }
    tracker = Tracker.start(
        config,
        config.output_path,
        resume_run_id=resumed_run_id,
        new_run=config.checkpoint.resume == "never",
        facts=known,
    )
    watchdog.at_stall(partial(tracker.end, "FAILED", rank=0))
    if isinstance(evaluation.source, Subset):
        tracker.artifact(config.output_path / LABELS_FILE)
    return tracker


@contextmanager
def recorded(tracker: Tracker | None, config: Config) -> Iterator[None]:
    """A block whose failure is told in the run's record."""
    try:
        yield
    except BaseException as error:
        watchdog.enter("end")
        mark_failed(tracker, config, error)
        raise


def finish(
    evaluation: Evaluation, tracker: Tracker | None, scores: Scores, step: int, more: dict[str, Any], seconds: float
) -> None:
    """Publish the scores, write the summary, end the record; on rank 0. `more` may say that it is not finished."""
    if tracker is None:
        return
    output = evaluation.config.output_path
    scores.publish(step, evaluation.classes, output, tracker)
    metrics = scores.metrics()
    ended = {"finished": True, "stopped_by": None} | more
    summary = {
        "verb": evaluation.verb,
        **metrics,
        "test_images": scores.counted,
        "labels": len(evaluation.source),
        "weights": str(evaluation.config.model.weights),
        "weights_digest": evaluation.digest,
        "step": step,
        **ended,
        "seconds": round(seconds, 1),
        "run_id": tracker.run_id,
        "output": str(output),
    }
    tracker.tag("finished", ended["finished"])
    write_summary(output, summary)
    tracker.artifact(output / "summary.json")
    shown = ", ".join(f"{key.replace('top', 'top-')} {value:.2f} %" for key, value in metrics.items())
    print(f"{evaluation.verb}: {shown} of {scores.counted:,} test images; {output}", flush=True)


def embedded(evaluation: Evaluation, chosen: Any = None) -> tuple[Features, Features]:
    """This worker's slices of the training features (all, or those of `chosen`) and of the test features."""
    watchdog.enter("evaluate")
    say = evaluation.say
    made = []
    for name, source, indices in (("training", evaluation.source, chosen), ("test", evaluation.test, None)):
        started = time.monotonic()
        found = extract(
            evaluation.backbone,
            source,
            evaluation.config,
            evaluation.world.shard,
            evaluation.device,
            evaluation.threads,
            indices,
        )
        count = len(source) if indices is None else len(indices)
        say(f"embedded {count:,} {name} images in {time.monotonic() - started:.1f} s")
        made.append(found)
    return made[0], made[1]


def run_knn(config: Config, world: workers.World) -> None:
    """`knn`: what the nearest training images say of each test image."""
    evaluation = prepare(config, "knn", world)
    tracker = start_tracker(evaluation)
    began = time.monotonic()
    with recorded(tracker, config):
        bank, queries = embedded(evaluation, knn.bank_indices(config, len(evaluation.source)))
        scores = knn.judge(
            bank.of_unit_length(),
            queries.of_unit_length(),
            to_count(evaluation.test),
            len(evaluation.classes),
            config,
            world,
            evaluation.device,
        )
        if tracker is not None:
            tracker.log(0, {"knn_accuracy": scores.top1})
        more = {"k": config.knn.k, "temperature": config.knn.temperature}
        finish(evaluation, tracker, scores, 0, more, time.monotonic() - began)
    _end(tracker)


def run_cached_probe(config: Config, world: workers.World) -> None:
    """`probe --cached`: features once, then linear classifiers on them."""
    evaluation = prepare(config, "probe", world)
    tracker = start_tracker(evaluation)
    began = time.monotonic()
    with recorded(tracker, config):
        train, test = embedded(evaluation)
        outcome = linear_heads.fit_and_judge(
            train,
            test,
            to_count(evaluation.test),
            len(evaluation.classes),
            config.probe,
            config.seed,
            world,
            evaluation.device,
            evaluation.say,
        )
        if tracker is not None:
            for place, accuracy in enumerate(outcome.held_out.values()):
                tracker.log(place, {"held_out_top1": accuracy})
            tracker.log(0, outcome.scores.metrics() | {"rate": outcome.rate})
            state = head_state(evaluation.backbone, outcome.weight, outcome.bias)
            save_classifier(config.output_path / "classifier.pth", evaluation.backbone, state)
        held_out = {f"{rate:g}": accuracy for rate, accuracy in outcome.held_out.items() if accuracy == accuracy}
        more = {"cached": True, "rate": outcome.rate, "held_out_top1": held_out}
        finish(evaluation, tracker, outcome.scores, 0, more, time.monotonic() - began)
    _end(tracker)


def _end(tracker: Tracker | None) -> None:
    watchdog.enter("end")
    if tracker is not None:
        tracker.end("FINISHED")
    workers.barrier("end")


def head_state(backbone: Backbone, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """A classifier's tensors under the names of torchvision's own last layer."""
    return {f"{backbone.head_name}.weight": weight, f"{backbone.head_name}.bias": bias}


def save_classifier(path: Path, backbone: Backbone, head: dict[str, torch.Tensor]) -> None:
    """Backbone and classification layer as one state dict with torchvision's keys."""
    tensors = {**backbone.state_dict(), **head}
    checkpoint.save_file(
        path, {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
    )
