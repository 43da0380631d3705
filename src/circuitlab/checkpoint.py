"""Checkpoints: an append-only file of steps, so that a killed run goes on where it was.

The first line says what is being computed; each further line is one committed step. One
process has a checkpoint open at a time: it holds a lock of the operating system on a
file beside it, which dies with the process. A line that a kill cut short is dropped when
the file is opened again; a file that is no checkpoint of this computation is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from circuitlab.errors import DataError
from circuitlab.tables import canonical_json

WAIT = 5.0
"""Seconds to wait for another process to let go: one that is ending, mostly."""


@dataclass
class Checkpoint:
    """Steps on the disk. `steps` holds those that were there when it was opened."""

    path: Path
    steps: list[Any] = field(default_factory=list)

    @staticmethod
    @contextlib.contextmanager
    def opened(
        path: str | Path, head: Mapping[str, Any], is_step: Callable[[Any], bool]
    ) -> Iterator[Checkpoint]:
        """Open a checkpoint, or begin one, for one `with`; nobody else has it meanwhile.

        `head` identifies the computation, as plain JSON values; `is_step` tells whether
        a line's value can be a step of it. Raises DataError `checkpoint_mismatch` for a
        file of another computation, or of something else; `checkpoint_corrupt`,
        `checkpoint_held`, `checkpoint_unusable`. A file that is refused stays as it was.
        """
        found = Checkpoint(Path(path))
        with _lock(found.path):
            found._read(head, is_step)
            yield found

    def append(self, *steps: Any) -> None:
        """Write steps, durably: they are on the disk when this returns."""
        with _os_errors(self.path), self.path.open("ab") as file:
            file.write("".join(canonical_json(s) + "\n" for s in steps).encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self, head: Mapping[str, Any], is_step: Callable[[Any], bool]) -> None:
        own = canonical_json(head).encode()
        with _os_errors(self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        whole, end, cut = data.rpartition(b"\n")
        first, *lines = whole.split(b"\n") if end else [cut]
        # Of a kill in the very first write, a beginning of the first line is left.
        if first != own and (end or not own.startswith(cut)):
            raise self._mismatch(first, head)
        self.steps = [self._step(line, i, is_step) for i, line in enumerate(lines, 2)]
        # Only now is it known that the file is this computation's.
        if cut:
            with _os_errors(self.path):
                os.truncate(self.path, len(data) - len(cut))
        if not end:
            self.append(head)

    def _step(self, line: bytes, number: int, is_step: Callable[[Any], bool]) -> Any:
        found = _value(line)
        if not is_step(found):
            raise DataError(
                "checkpoint_corrupt",
                f"line {number} of {self.path} is no step of this computation: "
                f"{line[:60]!r}; delete the file and start again",
                path=str(self.path),
                line=number,
                value=line[:200].decode(errors="replace"),
            )
        return found

    def _mismatch(self, line: bytes, head: Mapping[str, Any]) -> DataError:
        found = _value(line)
        why = "is no checkpoint"
        if isinstance(found, dict) and "schema" in found:
            keys = sorted(k for k in {*found, *head} if found.get(k) != head.get(k))
            why = f"is of another computation (it differs in {', '.join(keys)})"
        return DataError(
            "checkpoint_mismatch",
            f"{self.path} {why}, and was left as it is; give another path",
            path=str(self.path),
            value=found,
            expected=dict(head),
        )


def _value(line: bytes) -> Any:
    """What a line holds; None where that is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep every other process, and every other opening in this one, away."""
    with _os_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path.with_name(path.name + ".lock")
        lock = filelock.FileLock(place)
        try:
            lock.acquire(timeout=WAIT)
        except filelock.Timeout:
            raise _held(path, place) from None
    try:
        with contextlib.suppress(OSError):
            place.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        lock.release()


def _held(path: Path, place: Path) -> DataError:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError):
        pid, host = place.read_text().split()[:2]
        holder = f"process {pid} on {host}"
    return DataError(
        "checkpoint_held",
        f"{holder} is at work on {path}; wait for it, or end it",
        path=str(path),
        holder=holder,
    )


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            "checkpoint_unusable",
            f"steps can't be kept in {path}: {reason}; give the path of a file that can "
            "be written",
            path=str(path),
            reason=errno.errorcode.get(error.errno or 0, type(error).__name__),
        ) from error
