"""Engines: run a function over tasks, here, in local processes, or on a Ray cluster.

An engine replaces a worker that dies, tries its task again a bounded number of times,
and gives every task's outcome exactly once. It knows nothing of models or tables.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Protocol

from circuitlab.errors import (
    ArgumentError,
    CircuitlabError,
    require_count,
    require_number,
)

RETRIES = 2
"""How often a task is tried again after its worker died or it raised."""

GRACE = 5.0
"""Seconds that a worker has to leave by itself, when it is told to."""


@dataclass(frozen=True)
class Outcome:
    """What became of one task: its `value`, or the `error` of its last attempt.

    `code` is the error's code, where it has one; refusals (a CircuitlabError) are not
    tried again, since they would be refused again.
    """

    index: int
    value: Any = None
    error: str | None = None
    code: str | None = None
    attempts: int = 1

    @property
    def ok(self) -> bool:
        return self.error is None


class Engine(Protocol):
    """Runs a function over tasks; outcomes come as they finish, each once."""

    def run(
        self, fn: Callable[[Any], Any], tasks: Sequence[Any], retries: int = RETRIES
    ) -> Iterator[Outcome]: ...


def _attempt(fn: Callable[[Any], Any], index: int, task: Any) -> Outcome:
    """Call a task's function here; what it raises becomes an outcome."""
    try:
        return Outcome(index, fn(task))
    except Exception as error:  # noqa: BLE001
        # The border between a task and its engine: one task must not end the others.
        code = error.code if isinstance(error, CircuitlabError) else None
        text = "".join(traceback.format_exception_only(error)).strip()
        return Outcome(index, error=text, code=code)


@dataclass(frozen=True)
class Serial:
    """One task after another, in this process."""

    def run(
        self, fn: Callable[[Any], Any], tasks: Sequence[Any], retries: int = RETRIES
    ) -> Iterator[Outcome]:
        for index, task in enumerate(tasks):
            book = _Book(retries)
            outcome = None
            while outcome is None:
                outcome = book.settle(_attempt(fn, index, task))
            yield outcome


@dataclass
class _Book:
    """How often each task was tried, and whether it may be again.

    Raises ArgumentError `retries_out_of_range`.
    """

    retries: int
    attempts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        require_count("retries_out_of_range", "retries", self.retries, least=0)

    def settle(self, outcome: Outcome) -> Outcome | None:
        """The outcome with its attempts, or None where the task is to be tried again."""
        tried = self.attempts[outcome.index] = self.attempts.get(outcome.index, 0) + 1
        if not outcome.ok and outcome.code is None and tried <= self.retries:
            return None
        return Outcome(outcome.index, outcome.value, outcome.error, outcome.code, tried)


# --- local processes ---


@dataclass(frozen=True)
class Processes:
    """Local worker processes, one task each at a time.

    `threads` is how many threads torch may use in each. The function and the tasks must
    be importable and picklable: no lambdas, no loaded models. Workers end with the
    process that started them, also where that is killed in the middle of a task.

    Raises ArgumentError `workers_out_of_range`, `threads_out_of_range`.
    """

    workers: int = 2
    threads: int = 1

    def __post_init__(self):
        require_count("workers_out_of_range", "workers", self.workers)
        require_count("threads_out_of_range", "threads", self.threads)

    def run(
        self, fn: Callable[[Any], Any], tasks: Sequence[Any], retries: int = RETRIES
    ) -> Iterator[Outcome]:
        waiting, book = deque(range(len(tasks))), _Book(retries)
        crew: list[_Worker] = []
        try:
            while waiting or any(worker.busy for worker in crew):
                # One that died in the middle of a task still has to say so.
                crew = [worker for worker in crew if worker.busy or worker.alive]
                while len(crew) < min(self.workers, len(waiting) + len(crew)):
                    crew.append(_Worker(fn, self.threads))
                for worker in crew:
                    if waiting and not worker.busy:
                        index = waiting.popleft()
                        worker.give(index, tasks[index])
                for found in _finished(crew):
                    outcome = book.settle(found)
                    if outcome is None:
                        waiting.append(found.index)
                    else:
                        yield outcome
        finally:
            for worker in crew:
                worker.dismiss()
            for worker in crew:
                worker.leave()


class _Worker:
    """One spawned process and the pipe to it."""

    def __init__(self, fn: Callable[[Any], Any], threads: int):
        # Spawned, not forked: torch's threads don't survive a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, fn, threads), daemon=True
        )
        with _without_interrupts():
            self.process.start()
        theirs.close()
        self.index: int | None = None

    @property
    def alive(self) -> bool:
        return self.process.is_alive() and not self.pipe.closed

    @property
    def busy(self) -> bool:
        return self.index is not None

    def give(self, index: int, task: Any) -> None:
        self.index = index
        try:
            self.pipe.send((index, task))
        except (BrokenPipeError, ConnectionResetError):
            # It died while idle; `take` will see that.
            return

    def take(self) -> Outcome:
        """The outcome of its task, once there is one or the process has died."""
        index, self.index = self.index, None
        assert index is not None
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.pipe.close()
            self.process.join()
            why = f"the worker died (exit code {self.process.exitcode})"
            return Outcome(index, error=why)

    def dismiss(self) -> None:
        """Tell it to end: now, if nobody waits for its task any more."""
        if self.busy and self.process.is_alive():
            self.process.terminate()
        self.pipe.close()

    def leave(self) -> None:
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start a process that Ctrl-C doesn't reach: its driver tells it when to end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _finished(crew: Sequence[_Worker]) -> list[Outcome]:
    """Wait until a busy worker has an outcome, or has died."""
    busy = {worker.pipe: worker for worker in crew if worker.busy}
    return [busy[pipe].take() for pipe in connection.wait(list(busy))]  # type: ignore[index]


def _serve(pipe: Any, fn: Callable[[Any], Any], threads: int) -> None:
    """A worker's life: take a task, send its outcome, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An exit, and no death: what the task has open is closed and let go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_driver, daemon=True).start()
    # Before the task's function imports torch, which reads these once.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    # EOFError or OSError: the driver has closed the pipe, or is gone.
    with contextlib.suppress(EOFError, OSError):
        while True:
            index, task = pipe.recv()
            pipe.send(_attempt(fn, index, task))


def _end_with_driver() -> None:
    """Wait for the driver to end, and end this process, whatever it is doing."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


# --- Ray ---


@dataclass(frozen=True)
class Ray:
    """Tasks on a Ray cluster (the extra `ray`).

    `address` as in `ray.init`: None uses the cluster of `$RAY_ADDRESS`, else starts a
    local one with `workers` CPUs; `cpus` and `gpus` are what one task needs. A cluster
    that is already connected is used as it is.

    Raises ArgumentError `workers_out_of_range`, `resources_out_of_range`.
    """

    address: str | None = None
    workers: int | None = None
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self):
        if self.workers is not None:
            require_count("workers_out_of_range", "workers", self.workers)
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            require_number(
                "resources_out_of_range",
                name,
                value,
                lambda amount: math.isfinite(amount) and amount >= 0,
                "a finite number, zero or more",
            )

    def run(
        self, fn: Callable[[Any], Any], tasks: Sequence[Any], retries: int = RETRIES
    ) -> Iterator[Outcome]:
        ray = _import_ray()
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)(
            _attempt
        )
        book, running = _Book(retries), {}
        try:
            function = ray.put(fn)
            for index, task in enumerate(tasks):
                running[remote.remote(function, index, task)] = index
            while running:
                done, _ = ray.wait(list(running), num_returns=1)
                index = running.pop(done[0])
                outcome = book.settle(_fetched(ray, done[0], index))
                if outcome is None:
                    running[remote.remote(function, index, tasks[index])] = index
                else:
                    yield outcome
        finally:
            for pending in running:
                ray.cancel(pending, force=True)
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, log_to_driver=False)
            return
        ray.init(num_cpus=self.workers, include_dashboard=False, log_to_driver=False)


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "extra_missing",
            "Ray is not installed; pip install 'circuitlab[ray]'",
            extra="ray",
        ) from error
    return ray


def _fetched(ray: Any, reference: Any, index: int) -> Outcome:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        why = f"the worker died ({type(error).__name__}: {lines[0] if lines else ''})"
        return Outcome(index, error=why)
