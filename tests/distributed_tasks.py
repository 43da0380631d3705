"""Functions that the tests of engines send to workers; they must be importable there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from circuitlab.errors import ArgumentError


def squared(task: int) -> int:
    return task * task


def dies_once(task: tuple[int, str]) -> int:
    """Kill the worker in the middle of task 2, the first time; leave a trace of every
    completed call."""
    number, folder = task
    marker = Path(folder) / "died"
    if number == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    with (Path(folder) / "done").open("a") as file:
        file.write(f"{number}\n")
    return number * 10


def always_dies(task: int) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def dies_later(task: int) -> int:
    """Task 1 kills its worker after a while; the others are done at once."""
    if task == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def sleeps(folder: str) -> None:
    """Say which process this is, and stay busy."""
    (Path(folder) / str(os.getpid())).touch()
    multiprocessing.RLock()  # as tqdm makes one: left behind, it would be warned of
    time.sleep(60)


def raises(task: tuple[int, str]) -> int:
    """Task 0 is refused; task 1 fails twice, then works; the others work."""
    number, folder = task
    if number == 0:
        raise ArgumentError("refused", "task 0 is refused", value=0)
    if number == 1:
        with (Path(folder) / "tries").open("a") as file:
            file.write("x")
        if len((Path(folder) / "tries").read_text()) < 3:
            raise OSError("not yet")
    return number


def dying_cell(marker: str, cell: Any) -> Any:
    """As `run_cell`, but the worker is killed in the middle of its first cell."""
    from circuitlab.sweep import run_cell

    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_cell(cell)
