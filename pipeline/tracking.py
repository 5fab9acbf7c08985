"""What a run leaves behind: `Tracker` writes a journal and returns at once; a sender thread brings it to MLflow."""

import logging
import os
import shlex
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from dali.errors import InputError
from pipeline.config import Config, dump
from pipeline.file_systems import network_file_system
from pipeline.host_metrics import HostMetrics
from pipeline.journal import Journal, number, read
from pipeline.mlflow_store import MlflowStore, flatten
from pipeline.sender import Position, Sender, without_password

_log = logging.getLogger(__name__)


class Tracker:
    """The run's record: everything goes to `OUT/journal.jsonl`, and from there to one MLflow run per job.

    Held by rank 0; the others hold None. No method waits for the network, and none raises for what the disk or the
    store does. Use `start`, and call `end` exactly once.

    Attributes:
        uri: of the store.
    """

    def __init__(self, output: Path, journal: Journal, sender: Sender, began: int) -> None:
        self.uri = sender.position.uri
        self._output = output
        self._journal = journal
        self._sender = sender
        self._began = began
        self._ended = threading.Event()

    @classmethod
    def start(
        cls,
        config: Config,
        output: Path,
        *,
        resume_run_id: str | None = None,
        new_run: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> "Tracker":
        """Begin an attempt: continue the run that this folder has, else `resume_run_id`, else create one.

        A run that no longer exists is replaced by a new one, tagged `continues: OLD_ID`.

        Args:
            config: its parameters, name and experiment. Parameters that changed since become tags `changed.KEY`.
            output: the job's folder; must exist.
            resume_run_id: from the checkpoint; matters where the folder has no run in this store.
            new_run: do not continue the folder's run but mark it KILLED; for a job that starts from nothing again.
            facts: tags of this attempt, for example `{"world_size": 4}`; nested mappings become dotted keys.

        Raises:
            InputError: the URI is no store MLflow takes, or the folder cannot be written.
        """
        uri = tracking_uri(config, output)
        _warn_of_network(uri)
        try:
            journal = Journal(output / "journal.jsonl")
            (output / "config.yaml").write_text(dump(config))
        except OSError as error:
            raise InputError(f"output: {output} cannot be written ({error.strerror}); choose another folder") from None
        history = None if new_run else _last_job(journal.path)
        position = Position.load(output / "tracking.json")
        replaces = position.run_id if new_run and position and position.uri == uri else None
        if history is None:
            history = {"job": uuid.uuid4().hex, "began": int(time.time() * 1000), "begin": journal.size}
            position = None
        if position is None or position.uri != uri:
            begin = history["begin"]
            position = Position(uri, resume_run_id, begin, offset=begin, sent=None if resume_run_id else {})
        position.offset = min(position.offset, journal.size)  # the disk may have lost what was sent
        position.save(output / "tracking.json")
        journal.append(
            "start",
            job=history["job"],
            began=history["began"],
            name=config.name,
            experiment=config.tracking.experiment,
            params=flatten(config.model_dump(mode="json")),
            tags=flatten({"attempt": journal.attempt, **(facts or {})}),
            replaces=replaces,
        )
        sender = _sender(journal.path, position, output)
        tracker = cls(output, journal, sender, history["began"])
        sender.start()
        tracker.artifact(output / "config.yaml")
        if config.tracking.system_metrics:
            threading.Thread(
                target=tracker._sample_host, args=(config.tracking.system_metrics_seconds,), daemon=True
            ).start()
        return tracker

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has answered."""
        return self._sender.position.run_id

    @property
    def unsent(self) -> int:
        """Bytes of the journal that have not reached MLflow yet."""
        return self._journal.size - self._sender.position.offset

    @property
    def attempt(self) -> int:
        """How many processes have written to this folder's journal, this one included."""
        return self._journal.attempt

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values at `step`, now. NaN and infinities are kept as text, and counted in MLflow as `non_finite`."""
        self._append("metrics", step=int(step), metrics={key: number(value) for key, value in metrics.items()})

    def image(self, step: int, key: str, image: "np.ndarray | Image.Image") -> None:
        """Save a picture as `OUT/images/KEY/step_XXXXXXXX.png` and queue it.

        Args:
            key: letters, digits, `_-./ `.
            image: (H, W), (H, W, 1) or (H, W, 3) uint8, or a PIL image.
        """
        path = self._output / "images" / key / f"step_{step:08d}.png"
        picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image).squeeze())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
        except OSError as error:
            _log.warning("%s: not saved (%s)", path, error)
            return
        self._append("image", step=int(step), key=key, file=self._relative(path))

    def artifact(self, path: Path, artifact_path: str | None = None) -> None:
        """Queue a file, as it will be when it is sent, for the run's folder `artifact_path`."""
        self._append("artifact", file=self._relative(path), artifact_path=artifact_path)

    def tag(self, key: str, value: object) -> None:
        """Set a tag of the run."""
        self._append("tags", tags=flatten({key: value}))

    def sync(self) -> None:
        """Force the journal to the disk; for checkpoints."""
        self._journal.sync()

    def end(self, status: str, error: str | None = None, rank: int | None = None, timeout: float | None = None) -> None:
        """Say how the run ended and send what is left, for at most `timeout` seconds. What then remains is on disk.

        By default 20 s for a server, and 90 s for a file beside the outputs: there it is only a question of time.

        Args:
            status: FINISHED, FAILED or KILLED (interrupted or preempted).
            error, rank: what failed and where; become the tags `error` and `error.rank`.
        """
        assert status in ("FINISHED", "FAILED", "KILLED"), status
        facts = {"error": error, "error.rank": rank}
        self._append("end", status=status, tags=flatten({k: v for k, v in facts.items() if v is not None}))
        self.close(timeout if timeout is not None else 90.0 if self.uri.startswith("sqlite:") else 20.0)

    def close(self, timeout: float = 20.0) -> None:
        """Stop without a word on how the run ended: for a process that hands the run over to another one."""
        self._ended.set()
        self._journal.sync()
        if not self._sender.close(timeout):
            self._sender.abandon()
            _log.warning(
                "tracking: not everything reached %s; it is in %s. Send it later with: ./run.sh sync-tracking %s",
                without_password(self.uri),
                self._journal.path,
                shlex.quote(str(self._output)),
            )

    def _append(self, kind: str, **body: Any) -> None:
        self._journal.append(kind, **body)
        self._sender.notify()

    def _relative(self, path: Path) -> str:
        """Inside the output folder relative to it, so that the folder may move before the rest is sent."""
        path = path.absolute()
        return str(path.relative_to(self._output) if path.is_relative_to(self._output) else path)

    def _sample_host(self, seconds: float) -> None:
        # Not MLflow's own sampler: it sends from its thread and knows nothing of a journal. Its step counter would
        # start again on resume; seconds since the run began go on.
        host = HostMetrics(self._output)
        while not self._ended.wait(seconds):
            self.log((int(time.time() * 1000) - self._began) // 1000, host.sample())


def sync(output: Path, patience: float = 30.0) -> bool:
    """Send what the journal in `output` holds beyond what was sent. True when nothing is left.

    Gives up after `patience` seconds without progress.

    Raises:
        InputError: there is no journal.
    """
    output = output.absolute()
    path = output / "journal.jsonl"
    history = _last_job(path)
    if history is None:
        raise InputError(f"{path}: no run was recorded here; give the output folder of a run")
    position = Position.load(output / "tracking.json")
    if position is None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or _local_uri(output)
        position = Position(uri, begin=history["begin"], offset=history["begin"])
    sender = _sender(path, position, output)
    sender.start()
    while True:
        before = sender.position.offset
        if sender.close(patience):
            return True
        if sender.finished or sender.position.offset == before:
            sender.abandon()
            return False


def mark_killed(output: Path, why: str) -> bool:
    """Note in the journal that its last attempt died without a word, for MLflow to be told with the rest.

    Only for who knows that it is dead: the lease's new owner. False: there is none, or it said how it ended.
    """
    path = output / "journal.jsonl"
    last = None
    for record in read(path):
        if record.kind in ("start", "end"):
            last = record
    if last is None or last.kind == "end":
        return False
    journal = Journal(path)
    journal.attempt = last.attempt
    journal.append("end", status="KILLED", tags={"error": why})
    journal.close()
    return True


def _warn_of_network(uri: str) -> None:
    if not uri.startswith("sqlite:///"):
        return
    folder = Path(uri.removeprefix("sqlite:///")).parent
    kind = network_file_system(folder)
    if kind is not None:
        print(
            f"warning: tracking.uri: {uri} is on a network file system ({kind}), where SQLite's locks do not hold "
            "between hosts: use it from one host at a time, or give a server's http://HOST:PORT",
            flush=True,
        )


def tracking_uri(config: Config, output: Path) -> str:
    """The store's URI: `tracking.uri`, else MLFLOW_TRACKING_URI, else a SQLite file in `output`.

    Raises:
        InputError: it names a folder, which MLflow no longer takes.
    """
    key = "tracking.uri" if config.tracking.uri else "MLFLOW_TRACKING_URI"
    return checked_uri(key, config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or _local_uri(output))


def checked_uri(key: str, uri: str) -> str:
    """A store's URI as MLflow takes it; `key` gave it.

    Raises:
        InputError: it names a folder.
    """
    if urlsplit(uri).scheme in ("", "file") and uri != "databricks":
        raise InputError(f"{key}: {uri} is a folder; MLflow needs a server (http://HOST:PORT) or sqlite:////PATH.db")
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def _local_uri(output: Path) -> str:
    return f"sqlite:///{output.absolute()}/mlflow.db"


def _sender(journal: Path, position: Position, output: Path) -> Sender:
    return Sender(journal, position, output, lambda: MlflowStore(position.uri, output, journal, position.begin))


def _last_job(journal: Path) -> dict[str, Any] | None:
    """Of the newest job in a journal: its id, when it began (ms) and at which byte; None without any."""
    found: dict[str, Any] | None = None
    for record in read(journal):
        if record.kind == "start" and (found is None or found["job"] != record.body["job"]):
            found = {"job": record.body["job"], "began": record.body["began"], "begin": record.start}
    return found
