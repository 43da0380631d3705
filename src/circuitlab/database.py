"""The database file: opened for one operation at a time, and never held.

A DuckDB file that one process has open for writing can't be opened by any other, not
even for reading, and the refusal is immediate. So everybody here opens late, closes
early and waits a little. One lock file orders them: who folds holds it, and who reads
holds it while opening, so that readers queue behind a fold instead of racing it and a
fold isn't kept out by an endless stream of readers.

Two rules that are easy to break: the file is never opened by other means than
`duckdb.connect` on its absolute path (on POSIX, closing any other handle of it would
drop this process's lock), and errors are typed here and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import filelock

from circuitlab.errors import StoreError
from circuitlab.folders import os_errors
from circuitlab.migrations import (
    Migration,
    check_version,
    means_damage,
    means_no_room,
    migrate,
    schema_version,
)
from circuitlab.spool import wait_until

STORAGE = "v1.5.0"
"""Files are written so that DuckDB 1.5 and later read them."""

HEADER, BLOCK = 3 * 4096, 262_144
"""Sizes of a DuckDB file's header and of its blocks, in bytes."""

_HOLDER = re.compile(r"lock is held in (?P<program>.+?) \(PID (?P<pid>\d+)\)")
_READ_ONLY_HOLDER = "able to open this database in read-only mode"
_LOCKED = "Could not set lock on file"
_SAME_PROCESS = "different configuration than existing"


@dataclass(frozen=True)
class Held:
    """Who has the file open: `pid` is None for this process itself."""

    pid: int | None
    program: str
    writes: bool

    @staticmethod
    def by(error: duckdb.Error) -> Held | None:
        """Who, as DuckDB's refusal tells; None for another error."""
        text = str(error)
        if _SAME_PROCESS in text:
            return Held(None, "this process", True)
        if _LOCKED not in text:
            return None
        found = _HOLDER.search(text)
        pid = int(found["pid"]) if found else None
        program = found["program"] if found else "another process"
        return Held(pid, program, _READ_ONLY_HOLDER not in text)


@dataclass(frozen=True)
class Database:
    """A store's DuckDB file.

    `wait` is the patience for our own processes and `foreign_wait` that for others, in
    seconds. `locked` says that this process holds the fold lock already.
    """

    path: Path
    steps: tuple[Migration, ...]
    wait: float = 30.0
    foreign_wait: float = 5.0
    locked: bool = False

    def exists(self) -> bool:
        with os_errors(self.path, writing=False):
            return self.path.exists()

    @property
    def journal_path(self) -> Path:
        """The heads of all folded runs, a line each: what a repair goes by."""
        return self.path.with_name(self.path.name + ".runs.jsonl")

    @property
    def lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def refuse_foreign(self) -> None:
        """Raise StoreError `store_not_duckdb` for a file that DuckDB didn't write.

        DuckDB would ask the network for an extension when shown a SQLite file. The
        file is opened only if its size isn't a DuckDB file's, because of the locks.
        """
        with os_errors(self.path, writing=False):
            if self.path.stat().st_size % BLOCK == HEADER:
                return
            with self.path.open("rb") as file:
                start = file.read(12)
        if start[8:] != b"DUCK":
            raise self._not_duckdb("it does not begin like one")

    @contextlib.contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open for reading, for the length of the `with`.

        Raises StoreError `store_held`, `store_busy`, `store_not_duckdb`,
        `store_foreign`, `store_newer`, `store_older`, `store_corrupt`,
        `store_not_readable`.
        """
        con = self._open_to_read()
        try:
            with self.errors():
                self._check_readable(con)
                yield con
        finally:
            con.close()

    def probe(self) -> bool:
        """Look once, without waiting, whether this is a store; False if it is held.

        Raises what `reading` raises for a file that is no store, or a newer one.
        """
        self.refuse_foreign()
        try:
            con = _connect(self.path, read_only=True)
        except duckdb.Error as error:
            if Held.by(error) is not None:
                return False
            raise self._typed(error) or error from error
        try:
            with self.errors():
                check_version(schema_version(con), self.steps, str(self.path))
        finally:
            con.close()
        return True

    def outdated(self) -> bool:
        """Whether migrations are missing; False where that can't be seen now."""
        self.refuse_foreign()
        try:
            con = _connect(self.path, read_only=True)
        except duckdb.Error:
            return False
        try:
            return schema_version(con) < len(self.steps)
        finally:
            con.close()

    @contextlib.contextmanager
    def writing(self, patience: float) -> Iterator[duckdb.DuckDBPyConnection | Held]:
        """Open for writing, at the newest schema; or who is in the way.

        Waits at most `patience` seconds. Makes the file if there is none.
        """
        deadline = time.monotonic() + patience
        lock = self._lock()
        try:
            with os_errors(self.lock_path, writing=True):
                lock.acquire(timeout=max(patience, 0.05), poll_interval=0.005)
        except filelock.Timeout:
            yield Held(None, "another fold", True)
            return
        try:
            if not self.exists():
                self._create()
            self.refuse_foreign()
            found = self._open_to_write(deadline)
            if isinstance(found, Held):
                yield found
                return
            try:
                with self.errors():
                    check_version(schema_version(found), self.steps, str(self.path))
                    migrate(found, self.steps, own_version)
                    yield found
            finally:
                with self.errors():
                    found.close()
        finally:
            lock.release()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn DuckDB's errors about the file into StoreErrors with a remedy."""
        try:
            yield
        except duckdb.Error as error:
            found = self._typed(error)
            if found is None:
                raise
            raise found from error

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Database]:
        """Keep everybody from folding, for the length of the `with`.

        Raises StoreError `store_busy` after `wait` seconds.
        """
        lock = self._lock()
        try:
            with os_errors(self.lock_path, writing=True):
                lock.acquire(timeout=self.wait, poll_interval=0.01)
        except filelock.Timeout:
            raise StoreError(
                "store_busy",
                f"another process has folded {self.path} for {self.wait:.0f} s; wait "
                "for it, or end it",
                path=str(self.path),
            ) from None
        try:
            yield replace(self, locked=True)
        finally:
            lock.release()

    @contextlib.contextmanager
    def unfolded(self) -> Iterator[None]:
        """As `exclusive`, but only as far as this process may lock at all."""
        lock = self._lock()
        with contextlib.suppress(OSError, filelock.Timeout):
            lock.acquire(timeout=self.wait, poll_interval=0.01)
        try:
            yield
        finally:
            lock.release()

    def _lock(self) -> filelock.BaseFileLock:
        return filelock.FileLock(self.lock_path)

    def _open_to_read(self) -> duckdb.DuckDBPyConnection:
        self.refuse_foreign()
        started = time.monotonic()
        held_since = None
        while True:
            with self._turn(started + self.wait) as nobody_folds:
                try:
                    return _connect(self.path, read_only=True)
                except duckdb.Error as error:
                    held = Held.by(error)
                    if held is None:
                        raise self._typed(error) or error from error
            held_since = held_since or time.monotonic()
            foreign = held_since + self.foreign_wait
            if not wait_until(foreign if nobody_folds else started + self.wait):
                raise self._held(held)

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[bool]:
        """Queue behind a fold and keep the next one out while opening.

        Gives False where this process can't have the lock: it may read only.
        """
        lock = self._lock()
        try:
            if not self.locked:
                patience = max(0.0, deadline - time.monotonic())
                lock.acquire(timeout=patience, poll_interval=0.005)
        except (OSError, filelock.Timeout):
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _open_to_write(self, deadline: float) -> duckdb.DuckDBPyConnection | Held:
        while True:
            try:
                return _connect(self.path)
            except duckdb.Error as error:
                held = Held.by(error)
                if held is None:
                    raise self._typed(error) or error from error
            if not wait_until(deadline):
                return held

    def _create(self) -> None:
        """Make an empty store beside the place, and rename it into the place."""
        made = self.path.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex}.duckdb")
        with os_errors(self.path, writing=True):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self.errors(), new_database(made) as con:
                    migrate(con, self.steps, own_version)
                    # Closing would write the file too, but keeps quiet if it can't.
                    con.execute("checkpoint")
                made.rename(self.path)
            finally:
                made.unlink(missing_ok=True)
                made.with_name(made.name + ".wal").unlink(missing_ok=True)

    def _check_readable(self, con: duckdb.DuckDBPyConnection) -> None:
        version = schema_version(con)
        check_version(version, self.steps, str(self.path))
        if version < len(self.steps):
            raise StoreError(
                "store_older",
                f"{self.path} is at schema {version} and this circuitlab reads "
                f"{len(self.steps)}; `circuitlab store fold` brings it up to date",
                path=str(self.path),
                value=version,
                expected=len(self.steps),
            )

    def _held(self, held: Held) -> StoreError:
        who = f"process {held.pid} ({held.program})" if held.pid else held.program
        return StoreError(
            "store_held",
            f"{self.path} is open for writing in {who}, and DuckDB lets nobody else in "
            "meanwhile; close it there, or open it read-only (duckdb -readonly)",
            path=str(self.path),
            pid=held.pid,
            program=held.program,
        )

    def _not_duckdb(self, reason: str) -> StoreError:
        return StoreError(
            "store_not_duckdb",
            f"{self.path} is no DuckDB file, so no store; choose another path (--store, "
            "CIRCUITLAB_STORE)",
            path=str(self.path),
            reason=reason,
        )

    def _typed(self, error: duckdb.Error) -> StoreError | None:
        text, path = str(error), str(self.path)
        facts = {"path": path, "reason": text.splitlines()[0] if text else ""}
        held = Held.by(error)
        if held is not None:
            return self._held(held)
        if "not a valid DuckDB" in text:
            return self._not_duckdb(facts["reason"])
        if "newer version of DuckDB" in text or "version number" in text:
            return StoreError(
                "store_newer_duckdb",
                f"{path} was written by a newer DuckDB; pip install -U duckdb",
                **facts,
            )
        if means_no_room(error):
            return StoreError(
                "store_disk_full",
                f"no room to write {path}; what was saved is unharmed and stays in "
                f"{path}.spool. Free some space, then `circuitlab store fold`",
                **facts,
            )
        if "Permission denied" in text or "Read-only file system" in text:
            return StoreError(
                "store_not_readable",
                f"{path} can't be opened: {facts['reason']}; change its rights",
                **facts,
            )
        if means_damage(error):
            return StoreError(
                "store_corrupt",
                f"{path} is damaged ({facts['reason']}); `circuitlab store check` says "
                "what is lost, `circuitlab store repair` saves the rest",
                **facts,
            )
        if isinstance(error, duckdb.IOException):
            return StoreError(
                "store_io_failed",
                f"{path} could not be read or written: {facts['reason']}",
                **facts,
            )
        return None


# Threads that open one file share DuckDB's instance, and a second one may get hold of it
# before the first has finished setting it up ("python_arrow_scan does not exist").
_OPENING = threading.Lock()


def _connect(path: Path, *, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    with _OPENING:
        return duckdb.connect(str(path), read_only=read_only)


def own_version() -> str:
    """The version of circuitlab that is installed."""
    try:
        return importlib.metadata.version("circuitlab")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def new_database(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A new, empty DuckDB file in the storage version of stores."""
    con = duckdb.connect(str(path), config={"storage_compatibility_version": STORAGE})
    try:
        yield con
    finally:
        con.close()
