"""A run whose workers come and go: Horovod's elastic mode around the same steps.

After every `checkpoint.commit_steps` each worker keeps a copy of the state in memory. When a worker is lost, the others
go back to it; when hosts come or leave in order, nothing is lost. Then all take up the state of rank 0, which Horovod
always gives to a worker that was there before, and go on at its step. A step's images, views and update are functions
of the step, so nobody needs to be told what was seen: the surviving weights saw every step once, with the same global
batch and learning rate.

Everything that talks to other workers happens in `sync` or after it: a newcomer's first word is a survivor's next.
"""

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
from horovod.common.elastic import State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from dali.errors import InputError
from dali.sources import open_test
from pipeline import checkpoint, failures, pretraining, stopping, watchdog, workers
from pipeline.config import Config
from pipeline.lease import Lease
from pipeline.training import Run

# A signal that not all workers have had after so many seconds is for this host alone: it is going. horovodrun reaches
# all its workers within one or two.
_UNTIL_ALL_HAVE_IT = 5.0


def is_elastic() -> bool:
    """Whether horovodrun started this process as a worker that others may join."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def meet(last_words: Callable[[], None] = lambda: None) -> None:
    """Join the workers there are now; says its last words and ends the process if its host is no longer one of them."""
    while True:
        try:
            hvd.init()
            return
        except ValueError:  # a newcomer did not come; horovodrun then makes other groups
            if _rank_given() == -1:
                last_words()
                os._exit(0)
            print("elastic: a worker that should have come did not; trying again without it", flush=True)
            hvd.shutdown()


def pretrain(config: Config, wishes: stopping.Wishes) -> int:
    """As `pretraining.pretrain`, from `hvd.init` to the last word, for a worker of an elastic job."""
    job = _Job(config, wishes)
    threading.Thread(target=job.leave_when_told, name="leaving", daemon=True).start()
    try:
        return int(run_fn(_round, job.meet_again)(job))
    finally:
        if job.lease is not None:
            job.lease.release()


def _round(job: "_Job") -> int:
    """From one change of workers to the next, or to the end. Horovod calls it again after each."""
    run = job.run
    assert run is not None
    job.at_work = True
    try:
        duties = job.take_up(run)
        verdict = pretraining.go_on(run, duties, job.wishes, job.after_step)
        pretraining.leave(run, duties, verdict)
        return verdict
    except (HorovodInternalError, HostsUpdatedInterrupt):
        job.at_work = False
        raise
    except BaseException as error:
        if job.duties is not None:
            job.duties.failed(run, error)
        raise


class _Vote(workers.Vote):
    """Something happens only if all want it; tells until when the others are known not to have wanted it with us."""

    def __init__(self) -> None:
        super().__init__(unanimous=True)
        self.refused_at: float | None = None
        self._wanted_at: float | None = None

    def cast(self, value: int) -> int:
        outcome = super().cast(value)
        if outcome == stopping.GO_ON and self._wanted_at is not None:
            self.refused_at = self._wanted_at
        self._wanted_at = None if value == stopping.GO_ON else time.monotonic()
        return outcome


class _Job(State):
    """What Horovod keeps, takes back and spreads: the run's state, and the step it belongs to."""

    def __init__(self, config: Config, wishes: stopping.Wishes) -> None:
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.config, self.wishes = config, wishes
        self.run: Run | None = None
        self.duties: pretraining.Duties | None = None
        self.resets = 0
        self.at_work = False
        self.lease: Lease | None = None  # of the output folder, where rank 0 is or was
        self._kept: dict[str, Any] = {}
        self._told_at: float | None = None
        self._vote = _Vote()

    def save(self) -> None:
        """Keep a copy of the state in this process's memory."""
        run = self.run
        assert run is not None
        self._kept = {
            "step": run.step,
            "model": checkpoint.snapshot(run.model.state_dict()),
            "optimizer": checkpoint.snapshot(run.optimizer.state_dict()),
            "scaler": run.scaler.state_dict(),
            "bad_files": dict(run.bad_files),
        }

    def restore(self) -> None:
        """Take back the state of the last `save`; without one, all begin again from the newest checkpoint."""
        run = self.run
        if run is None or not self._kept:
            self.run = None
            return
        run.model.load_state_dict(self._kept["model"])
        run.optimizer.load_state_dict(checkpoint.snapshot(self._kept["optimizer"]))
        run.scaler.load_state_dict(self._kept["scaler"])
        run.step, run.bad_files = self._kept["step"], dict(self._kept["bad_files"])

    def meet_again(self) -> None:
        """Join the workers there are now."""
        watchdog.enter("start")
        hvd.shutdown()
        meet(self._hand_over)

    def _hand_over(self) -> None:
        if self.duties is not None and self.duties.tracker is not None:
            self.duties.tracker.close()
        if self.lease is not None:
            self.lease.release()

    def reset(self) -> None:
        """After `hvd.init` among other workers: forget what was on its way to the former ones."""
        self.resets += 1
        run = self.run
        if run is None:
            return
        run.gradients.forget()
        run.world = workers.place()
        run.threads = pretraining.set_up_torch(self.config, run.world, run.device)

    def sync(self) -> None:
        """All workers, old and new, hold rank 0's state afterwards.

        Raises:
            InputError: on a newcomer that has other images or another output folder. It ends; the others go on.
        """
        steps = workers.gather_objects(self._kept.get("step"), "elastic.steps")
        if steps[0] is None:  # at the start, or a worker was lost before all had a state
            self.run = pretraining.prepare(self.config, workers.place())
        else:
            try:
                self._join()
            except InputError as error:
                print(f"error: {socket.gethostname()} cannot join: {error}", file=sys.stderr, flush=True)
                raise
        self.save()

    def _join(self) -> None:
        newcomer = self.run is None
        if self.run is None:
            world = workers.place()
            device = workers.choose_device(self.config.device, world.local_rank, world.local_size)
            source, plan = pretraining.check(self.config)
            open_test(self.config.data, source)
            self.run = pretraining.build(self.config, world, device, source, plan)
        run = self.run
        known = {
            "digest": run.source.digest,
            "step": run.step,
            "scaler": run.scaler.state_dict(),
            "autocast": run.autocast,
            "bad_files": run.bad_files,
            "run_id": self._run_id(),
            "resets": self.resets,
        }
        told = workers.from_rank_0(known, "elastic.told")
        if told["digest"] != run.source.digest:
            raise InputError(f"data.path: {self.config.data.path} lists other images here than on the other hosts")
        if newcomer and not (self.config.output_path / "journal.jsonl").exists():
            raise InputError(f"output: {self.config.output_path} is not the folder rank 0 writes to; share it")
        run.step, run.autocast, run.resumed_run_id = told["step"], told["autocast"], told["run_id"]
        self.resets, run.bad_files = told["resets"], told["bad_files"]
        run.scaler.load_state_dict(told["scaler"])
        workers.share_state(run.model, run.optimizer)

    def _run_id(self) -> str | None:
        if self.duties is not None and self.duties.tracker is not None:
            return self.duties.tracker.run_id
        return self.run.resumed_run_id if self.run is not None else None

    def take_up(self, run: Run) -> pretraining.Duties:
        """What is due besides training, and a new attempt of the record: steps after a commit may come again."""
        run.world = run.world._replace(hosts=workers.host_names())
        run.vote = self._vote = _Vote()
        known = {}
        if self.duties is not None:
            known = self.duties.knn
            if self.duties.writer is not None:
                self.duties.writer.join()
            if self.duties.tracker is not None:
                self.duties.tracker.close()
        with workers.together():
            if run.world.rank == 0 and self.lease is None:
                self.lease, _ = pretraining.take_lease(run.config.output_path)
            if run.world.rank == 0:  # what was survived must not decide how the job ends
                failures.forget(run.config.output_path)
        self.duties = pretraining.take_up(run)
        self.duties.knn.update(known)
        if run.world.rank == 0 and self.resets:
            print(f"elastic: {run.world.size} workers from step {run.step} on (change {self.resets})", flush=True)
        if self.duties.tracker is not None:
            self.duties.tracker.log(run.step, {"world_size": run.world.size, "elastic_resets": self.resets})
        return self.duties

    def after_step(self, run: Run) -> None:
        """Commit when it is due; then a host that is going may go, since the others lose nothing."""
        if run.step % self.config.checkpoint.commit_steps == 0:
            self.save()
            refused_at = self._vote.refused_at
            if self._told_at is not None and refused_at is not None and refused_at - self._told_at > _UNTIL_ALL_HAVE_IT:
                self._go()
            self.check_host_updates()

    def leave_when_told(self) -> None:
        """A thread: a signal that all have stops the job, by vote; alone, or while it waits, a worker just goes."""
        while self.wishes.wish == stopping.GO_ON:
            time.sleep(0.2)
        self._told_at = time.monotonic()
        waiting_since = None
        while True:
            time.sleep(0.2)
            waiting_since = None if self.at_work else waiting_since or time.monotonic()
            if waiting_since is not None and time.monotonic() - waiting_since > _UNTIL_ALL_HAVE_IT:
                self._save_what_is_kept()
                self._go()

    def _save_what_is_kept(self) -> None:
        """Between two groups of workers, where no vote can be held: the last commit becomes a checkpoint. If others go
        on without this worker, they find it of no harm."""
        if workers.last_rank() != 0:
            return
        run, duties = self.run, self.duties
        if run is not None and duties is not None and duties.tracker is not None and duties.writer is not None:
            duties.writer.join()
            duties.writer.save(pretraining.file_content(run, self._kept, duties.tracker.run_id), milestone=False)
            duties.writer.join()
            pretraining.mark_ended(duties.tracker, stopping.PREEMPTED)
        failures.leave(self.config.output_path, stopping.EXIT_CODES[stopping.PREEMPTED])

    def _go(self) -> None:
        if self.duties is not None and self.duties.writer is not None:
            self.duties.writer.join()
        os._exit(stopping.EXIT_CODES[stopping.PREEMPTED])


def _rank_given() -> int:
    """The rank that horovodrun last gave to this worker: Horovod sets it in C, past `os.environ`."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return int(getenv(b"HOROVOD_RANK") or 0)
