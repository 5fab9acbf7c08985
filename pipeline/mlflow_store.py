"""One run in MLflow, as the sender sees it; and a backbone as an MLflow model.

The only module that imports mlflow, and in training only in the sender's thread: the import takes 3 s, a new SQLite
store 7 s.
"""

import json
import logging
import os
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from dali.errors import InputError
from pipeline import file_systems
from pipeline.journal import Record, read
from pipeline.sender import FileRefused, Point, Refused, without_password

if TYPE_CHECKING:
    import torch

_LONGEST_VALUE = 500  # characters of a parameter or tag; config.yaml is stored whole
MODEL_FILE = Path("data/model.pt2")  # the graph in a saved model
_ENTITIES = 100  # parameters or tags that MLflow takes in a request
_ENVIRONMENT = {
    # By default one call to a dead server blocks for 247 s. The sender does the repeating; a value of the user's wins.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # MLflow reports its use to a server of its own, with a thread and an exit hook that wait for the network.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as dotted keys and short texts, as parameters and tags are shown."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = json.dumps(value) if isinstance(value, list | tuple) else str(value)
            flat[f"{prefix}{key}"] = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
    return flat


class MlflowStore:
    """`pipeline.sender.Store` on MLflow's client. Made and used in the sender's thread."""

    def __init__(self, uri: str, output: Path, journal: Path, begin: int) -> None:
        self._output = output
        self._client, self._experiment = _connect(uri, output, next(read(journal, begin)).body["experiment"])

    def is_live(self, run_id: str) -> bool:
        return _is_live(self._client, run_id)

    def find_run(self, job: str) -> str | None:
        found = self._client.search_runs([self._experiment], f"tags.job = '{job}'", max_results=1)
        return found[0].info.run_id if found else None

    def create_run(self, start: Record, continues: str | None) -> str:
        tags = {"job": start.body["job"]} | ({"continues": continues} if continues else {})
        run = self._client.create_run(
            self._experiment, start_time=start.body["began"], tags=tags, run_name=start.body["name"]
        )
        return run.info.run_id

    def highest_steps(self, run_id: str) -> dict[str, int]:
        keys = self._client.get_run(run_id).data.metrics
        return {key: max(m.step for m in self._client.get_metric_history(run_id, key)) for key in keys}

    def begin(self, run_id: str, start: Record) -> None:
        from mlflow.entities import Param, RunTag

        present = self._client.get_run(run_id).data
        self._client.update_run(run_id, status="RUNNING")
        for key in ("error", "error.rank"):  # an earlier attempt's
            if key in present.tags:
                self._client.delete_tag(run_id, key)
        params, tags = start.body["params"], dict(start.body["tags"])
        if commit := tags.get("git_commit"):
            tags["mlflow.source.git.commit"] = commit  # where MLflow's page looks for it
        # MLflow refuses to change a parameter.
        for key, old in present.params.items():
            if key in params and params[key] != old:
                tags |= flatten({f"changed.{key}": f"{old} -> {params[key]}"})
        new = [Param(key, value) for key, value in params.items() if key not in present.params]
        all_tags = [RunTag(key, value) for key, value in tags.items()]
        for first in range(0, max(len(new), len(all_tags)), _ENTITIES):
            part = slice(first, first + _ENTITIES)
            with self._refusals(run_id):
                self._client.log_batch(run_id, params=new[part], tags=all_tags[part])

    def metrics(self, run_id: str, points: list[Point]) -> None:
        from mlflow.entities import Metric

        with self._refusals(run_id):
            self._client.log_batch(run_id, metrics=[Metric(p.key, p.value, p.time, p.step) for p in points])

    def tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        with self._refusals(run_id):
            self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def image(self, run_id: str, record: Record) -> None:
        # As MlflowClient.log_image names the two files that its page shows as a picture with a step slider, but
        # with an id that follows from the record: a repeated upload then replaces the files instead of adding two.
        key, step, stamp = record.body["key"], record.body["step"], record.time
        unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{run_id} {key} {step} {stamp}")
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{stamp}+{unique}"
        with tempfile.TemporaryDirectory() as folder:
            full, small = Path(folder, f"{name}.png"), Path(folder, f"{name}+compressed.webp")
            try:
                shutil.copyfile(self._output / record.body["file"], full)
                with Image.open(full) as picture:
                    picture.thumbnail((256, 256))
                    picture.save(small)
            except OSError as error:
                raise Refused(str(error)) from None
            for file in (full, small):
                self._store_file(run_id, file, "images")
        self.tags(run_id, {"mlflow.loggedImages": "True"})

    def artifact(self, run_id: str, record: Record) -> None:
        path = self._output / record.body["file"]
        if not path.is_file():
            raise Refused(f"{path} is not there")
        self._store_file(run_id, path, record.body["artifact_path"])

    def finish(self, run_id: str, status: str, time: int) -> None:
        if self.is_live(run_id):
            self._client.set_terminated(run_id, status, time)

    def _store_file(self, run_id: str, path: Path, artifact_path: str | None) -> None:
        try:
            self._client.log_artifact(run_id, str(path), artifact_path)
        except Exception as error:  # each artifact store has its own
            self._client.get_run(run_id)  # raises when it is the server that is away
            raise FileRefused(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from None

    @contextmanager
    def _refusals(self, run_id: str) -> Iterator[None]:
        """Tell a record that is refused from a store that does not answer or has lost the run."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") and self.is_live(run_id):
                raise Refused(" ".join(str(error).split())[:300]) from None
            raise


# --- A backbone as a model ------------------------------------------------------------------------------------------


def save_model(
    model: "torch.nn.Module", folder: Path, images: np.ndarray, features: np.ndarray, facts: Mapping[str, Any]
) -> None:
    """Write an MLflow model, a torch.export graph inside, with a signature for any batch and `facts` as metadata.

    Nothing in it is pickled code, and loading it needs torch and MLflow alone.

    Args:
        folder: must not exist.
        images, features: an example, (2, C, S, S) and (2, F) float32; a batch of 1 would become the only size.
    """
    _set_environment()
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(array: np.ndarray) -> Schema:
        return Schema([TensorSpec(np.dtype(np.float32), (-1, *array.shape[1:]))])

    mlflow.pytorch.save_model(
        model,
        str(folder),
        signature=ModelSignature(inputs=schema(images), outputs=schema(features)),
        input_example=images,
        pip_requirements=[f"{name}=={version(name)}" for name in ("torch", "mlflow", "numpy")],
        metadata=dict(facts),
        serialization_format="pt2",
    )


def load_model(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """An MLflow model as a function of images, checked against its signature."""
    _set_environment()
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(folder)).predict


def register_model(folder: Path, name: str, uri: str, output: Path, experiment: str, run_id: str | None) -> int:
    """Upload an MLflow model to its run, or to a new one if that is gone, and register it; returns the version.

    Raises:
        InputError: the store does not answer or refuses.
    """
    try:
        client, experiment_id = _connect(uri, output, experiment)
        if run_id is None or not _is_live(client, run_id):
            run_id = client.create_run(experiment_id, run_name=f"export of {name}").info.run_id
            client.set_terminated(run_id)
        # A place of its own: stores refer to the files, and an earlier version must keep its own
        place = f"{folder.name}-{uuid.uuid4().hex[:8]}"
        client.log_artifacts(run_id, str(folder), place)
        try:
            client.create_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{client.get_run(run_id).info.artifact_uri}/{place}"
        return int(client.create_model_version(name, source, run_id).version)
    except Exception as error:  # each store has its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"--register: {without_password(uri)} did not take {name} ({reason})") from None


# --- What was recorded ----------------------------------------------------------------------------------------------


class RecordedRun(NamedTuple):
    """A run as a store has it: texts by dotted key, each metric's last value, and of some metrics every (step, value).

    `status` is RUNNING, FINISHED, FAILED or KILLED; `began` is in ms since 1970.
    """

    run_id: str
    name: str
    status: str
    began: int
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    courses: dict[str, list[tuple[int, float]]]


def read_runs(
    uri: str, courses: Sequence[str], experiment: str | None = None, run_ids: Sequence[str] = ()
) -> list[RecordedRun]:
    """All runs of an experiment, or those of the given ids; with every value of the metrics `courses`, by step.

    Raises:
        InputError: the store is not there or does not answer, or has no such experiment or run.
    """
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise InputError(f"{uri}: there is no such file")  # MLflow would make it
    try:
        client = _client(uri)
        runs = [client.get_run(run_id) for run_id in run_ids] if experiment is None else _runs_of(client, experiment)
        return [_recorded(client, run, courses) for run in runs]
    except InputError:
        raise
    except Exception as error:  # each store has its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{without_password(uri)}: cannot be read ({reason})") from None


def _runs_of(client: Any, experiment: str) -> list[Any]:
    found = client.get_experiment_by_name(experiment)
    if found is None:
        there = ", ".join(sorted(e.name for e in client.search_experiments()))
        raise InputError(f"--experiment: {experiment} is not in MLflow; there are {there}")
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs([found.experiment_id], page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


def _recorded(client: Any, run: Any, courses: Sequence[str]) -> RecordedRun:
    info, data = run.info, run.data
    values = {
        key: sorted((m.step, m.value) for m in client.get_metric_history(info.run_id, key))
        for key in courses
        if key in data.metrics
    }
    params, tags, metrics = dict(data.params), dict(data.tags), dict(data.metrics)
    return RecordedRun(info.run_id, info.run_name, info.status, info.start_time, params, tags, metrics, values)


# --- Stores ---------------------------------------------------------------------------------------------------------


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _connect(uri: str, output: Path, experiment: str) -> tuple[Any, str]:
    """A client, and the id of the experiment of that name, made if need be."""
    with _only_one_creates(uri):
        client = _client(uri)
        return client, _experiment_id(client, experiment, uri, output)


def _client(uri: str) -> Any:
    _set_environment()
    if uri.startswith("http"):
        _check_answers(uri)
    import mlflow

    return mlflow.MlflowClient(uri)


def _experiment_id(client: Any, name: str, uri: str, output: Path) -> str:
    from mlflow.exceptions import MlflowException

    existing = client.get_experiment_by_name(name)
    if existing is None:
        location = None if uri.startswith(("http", "databricks")) else str(_artifact_folder(uri, output))
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            existing = client.get_experiment_by_name(name)  # another job was quicker
    assert existing is not None
    if existing.lifecycle_stage != "active":
        raise RuntimeError(f"the experiment {name} was deleted; restore it, or set tracking.experiment")
    return existing.experiment_id


def _is_live(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _artifact_folder(uri: str, output: Path) -> Path:
    """Beside the database: where several jobs share one, its experiments share the folder."""
    return (
        Path(uri.removeprefix("sqlite:///")).parent / "artifacts"
        if uri.startswith("sqlite:///")
        else output / "artifacts"
    )


def _check_answers(uri: str) -> None:
    """Raise unless something answers at `uri` within 3 s.

    Cheaper to repeat than a call through MLflow, and said before its import, which can take 10 s beside training.
    """
    try:
        urllib.request.urlopen(without_password(uri).rstrip("/") + "/health", timeout=3).close()
    except urllib.error.HTTPError:
        pass  # a proxy or a login page: MLflow's own call will tell
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # MLflow may know the certificate
            raise


@contextmanager
def _only_one_creates(uri: str) -> Iterator[None]:
    """Keep other jobs out while a SQLite file gets its tables: two at once leave a broken store."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_name(f"{database.name}.lock"), "w") as file:
        file_systems.lock(file.fileno(), wait=True)  # without locks, two at once are not kept apart
        if not database.exists():
            _create(database)
        yield


def _create(database: Path) -> None:
    """A SQLite store, under another name until it is whole: MLflow never takes what a killed process left half made."""
    _set_environment()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for name in ("mlflow.store.db.utils", "alembic"):  # they tell of each table
        logging.getLogger(name).setLevel(logging.WARNING)
    for leftover in database.parent.glob(f"{database.name}.new-*"):
        leftover.unlink()
    half = database.with_name(f"{database.name}.new-{uuid.uuid4().hex}")  # MLflow keeps its connections by name
    store = SqlAlchemyStore(f"sqlite:///{half}", str(database.parent / "artifacts"))
    store.engine.dispose()
    half.rename(database)
