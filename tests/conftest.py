"""One Horovod job for the whole pytest process: of one worker, or of as many as horovodrun started."""

import os

import pytest

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # read when Horovod starts

from pipeline import workers  # noqa: E402


@pytest.fixture(autouse=True)
def tracking_settings_stay():
    """A test that leaves MLflow's settings behind would send later tests' runs to another store."""
    before = {key: value for key, value in os.environ.items() if key.startswith("MLFLOW_TRACKING")}
    yield
    after = {key: value for key, value in os.environ.items() if key.startswith("MLFLOW_TRACKING")}
    for key in after:
        del os.environ[key]
    os.environ.update(before)
    assert after == before


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A SQLite store with MLflow's tables, which take it 7 s to make; to be copied."""
    import mlflow

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def world() -> workers.World:
    return workers.start()


@pytest.fixture(scope="session")
def halves(world):
    """The workers cut into two jobs side by side: this worker's half (its ranks, its process set)."""
    if world.size == 1:
        return [0], workers.everyone
    import horovod.torch as hvd

    ranks = list(range(world.size))
    parts = [ranks[: world.size // 2], ranks[world.size // 2 :]]
    sets = [hvd.add_process_set(part) for part in parts]  # by all workers, in the same order
    mine = 0 if world.rank in parts[0] else 1
    return parts[mine], sets[mine]
