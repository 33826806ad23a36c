"""Processes that work through numbers; one that dies, hangs or grows too large is replaced.

A task is a function ``(number, folder) -> dict``, whose folder is the process's own and empty. Its
answers are JSON-able. Processes are forked from this one, so what it has imported they have, too.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Task = Callable[[int, Path], Answer]

RENEWED_AFTER = 500
"""Tasks of one process: what it leaks does not add up."""
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Done:
    """One task that came to an end.

    Attributes:
        number: of the task.
        answer: of the task; empty if it has none.
        seconds: that it took.
        peak_bytes: resident memory of its process, at most.
        death: how its process ended; empty if it lives.
    """

    number: int
    answer: Answer
    seconds: float
    peak_bytes: int
    death: str = ""


@dataclass(frozen=True)
class Limits:
    """What ends a process.

    Attributes:
        seconds: of one task, by the clock; what a task takes of the processor is judged elsewhere.
        bytes: of memory; allocations beyond it fail in the process.
    """

    seconds: float = 120.0
    bytes: int = 2 << 30


class Worker:
    """One process, and the task that it is at."""

    def __init__(self, task: Task, limits: Limits, folder: Path) -> None:
        self.connection, theirs = _FORK.Pipe()
        self.folder = folder
        self.process = _FORK.Process(target=_work, args=(theirs, task, limits, folder), daemon=True)
        self.process.start()
        theirs.close()
        self.number: int | None = None
        self.begun = 0.0
        self.tasks = 0

    def begin(self, number: int) -> None:
        self.number, self.begun = number, time.monotonic()
        self.tasks += 1
        self.connection.send(number)

    def answered(self) -> Done:
        """What it says, or how it died."""
        number, seconds = self.number, time.monotonic() - self.begun
        assert number is not None
        self.number = None
        try:
            answer, peak = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Done(number, {}, seconds, 0, f"the process died: {how}")
        return Done(number, answer, seconds, peak)

    def killed(self) -> Done:
        """Ends a process that does not answer."""
        assert self.number is not None
        seconds = time.monotonic() - self.begun
        done = Done(self.number, {}, seconds, 0, f"no answer after {seconds:.0f} s")
        self.number = None
        self.process.kill()
        self.process.join()  # before it is asked whether it lives
        return done

    def end(self) -> None:
        if self.process.is_alive():
            with suppress(OSError):
                self.connection.send(None)
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """Processes for one kind of task."""

    def __init__(self, task: Task, jobs: int, limits: Limits, folder: Path) -> None:
        self.task, self.limits, self.folder = task, limits, folder
        self.jobs, self.made = jobs, 0
        self.workers: list[Worker] = []

    @property
    def busy(self) -> dict[Connection, Worker]:
        return {each.connection: each for each in self.workers if each.number is not None}

    def renew(self) -> None:
        """Replaces what is dead or old."""
        for worker in list(self.workers):
            old = worker.tasks >= RENEWED_AFTER or not worker.process.is_alive()
            if worker.number is None and old:
                worker.end()
                self.workers.remove(worker)
        while len(self.workers) < self.jobs:
            own = self.folder / str(self.made)
            self.workers.append(Worker(self.task, self.limits, own))
            self.made += 1

    def hand_out(self, numbers: Iterator[int]) -> None:
        """Gives the next number to whoever has none."""
        for worker in self.workers:
            if worker.number is None:
                number = next(numbers, None)
                if number is not None:
                    worker.begin(number)

    def ended(self) -> Iterator[Done]:
        """Waits a moment; what has ended since."""
        busy = self.busy
        ready = wait(list(busy), timeout=min(1.0, self.limits.seconds / 4))
        for connection, worker in busy.items():
            if connection in ready:
                yield worker.answered()
            elif time.monotonic() - worker.begun > self.limits.seconds:
                yield worker.killed()

    def end(self) -> None:
        for worker in self.workers:
            if worker.number is not None:
                worker.process.kill()
            worker.end()


def work(
    task: Task, numbers: Iterable[int], jobs: int, seconds: float, limits: Limits
) -> Iterator[Done]:
    """Gives numbers to processes, in order, until there are no more or time is up.

    Args:
        task: what to do.
        numbers: what to do it with.
        jobs: processes.
        seconds: after which no task begins.
        limits: of each process.
    """
    end = time.monotonic() + seconds
    left = iter(numbers)
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(task, jobs, limits, Path(folder))
        try:
            while True:
                pool.renew()
                if time.monotonic() < end:
                    pool.hand_out(left)
                if not pool.busy:
                    return
                yield from pool.ended()
        finally:
            pool.end()


def _work(orders: Connection, task: Task, limits: Limits, folder: Path) -> None:
    """Runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    resource.setrlimit(resource.RLIMIT_DATA, (limits.bytes, limits.bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = os.getppid()
    while True:
        while not orders.poll(5):
            if os.getppid() != parent:
                return
        number = orders.recv()
        if number is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _forget_peak()
        try:
            answer = task(number, folder)
        except MemoryError:
            answer = {"problems": ["memory: not enough"]}
        except Exception:
            answer = {"problems": [f"exception: {traceback.format_exc()[-3000:]}"]}
        orders.send((answer, peak_bytes()))


def _forget_peak() -> None:
    """Lets the kernel measure the peak anew, where it can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Resident memory of this process, at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
