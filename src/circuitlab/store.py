"""The store: runs that many processes save and anyone can query.

Takes and gives the tables of the other stages. A save writes immutable files into a
spool, without a lock, and is durable when it returns; whoever finds the time folds the
spool into one DuckDB file; readers open that file for one query at a time and see the
spool beside it. The store knows no model and no algorithm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from circuitlab.database import Database, Held
from circuitlab.errors import ArgumentError, StoreError
from circuitlab.folders import TEMPORARY, LocalFolder, RemoteFolder, os_errors
from circuitlab.folding import Folded, fold_spool
from circuitlab.migrations import Migration, migrate, migrations, views
from circuitlab.overlay import lay_over
from circuitlab.queries import named_query, run_query
from circuitlab.records import (
    Record,
    Savable,
    dataset_of,
    prompts_of,
    record_of,
    thing_of,
)
from circuitlab.repair import Check, Repaired, check_store, repair_store
from circuitlab.share import copy_runs, export_runs, import_parts
from circuitlab.spool import Event, Folder, Spool, part_of_dataset, part_of_record
from circuitlab.stored_rows import read_dataset, read_record

log = logging.getLogger(__name__)

FILE = "circuitlab.duckdb"
FOLD_AT, FOLD_ALWAYS = 8, 64
"""A save folds when so many parts wait, but rests in between unless it is very many.
Closing folds whatever is left."""
FOLD_SECONDS = 1.0
REST = 2.0
"""How many times the length of its last fold a store rests."""
CLOSE_SECONDS = 5.0


class Store:
    """A place for runs: a DuckDB file with a spool beside it, or a remote prefix.

    `path` is the file, or a folder for `circuitlab.duckdb` in it; None is
    `$CIRCUITLAB_STORE`, else `./store/circuitlab.duckdb`. A URL such as
    `s3://bucket/prefix` is a remote store: the same files, read through fsspec. Nothing
    is created before the first save. `wait` is how many seconds to wait for other
    processes before giving up; `steps` replaces the migrations (in tests).

    No connection is held between calls, so a Store can be kept for as long as you like
    and be used by several threads.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        wait: float = 30.0,
        steps: tuple[Migration, ...] | None = None,
    ):
        where = os.fspath(path or os.environ.get("CIRCUITLAB_STORE") or f"store/{FILE}")
        self._steps = migrations() if steps is None else steps
        self._saved = False
        self._probed = False
        self._current = False
        self._rests_until = 0.0
        self.database: Database | None = None
        folder: Folder
        if "://" in where:
            folder = RemoteFolder.of(where)
            self.path = folder.url
        else:
            file = Path(where).expanduser().absolute()
            with os_errors(file, writing=False):
                file = file / FILE if file.is_dir() else file
            folder = LocalFolder(file.with_name(file.name + ".spool"))
            self.database = Database(file, self._steps, wait)
            self.path = str(file)
        self.spool = Spool(folder)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    def close(self) -> None:
        """Fold what this store saved, if the file is free; it stays usable."""
        if self._saved:
            self._saved = False
            self._try_to_fold(CLOSE_SECONDS)

    # --- writing ---

    def save(self, thing: Savable, prompts: Any = None) -> str:
        """Save a run, with the prompts it ran on if given; returns its run id.

        The id is a digest of parameters, model, data and rows: saving the same run
        again changes nothing (and brings it back, if it was deleted). When this returns
        the run is on the disk, and every reader sees it. See `Savable` for what can be
        saved; Raises StoreError `store_disk_full`, `store_not_writable`,
        `store_not_duckdb`, `store_foreign`, `store_newer`.
        """
        record = record_of(thing)
        name, files = part_of_record(record)
        if prompts is not None:
            self._put(*part_of_dataset(dataset_of(prompts)))
        if not self._put(name, files):
            self.spool.say(Event.now(record.run_id, "restore"))
        waiting = 0 if self.database is None else len(self.spool.folder.names())
        rested = time.monotonic() >= self._rests_until
        if waiting >= FOLD_ALWAYS or (waiting >= FOLD_AT and rested):
            self._try_to_fold(FOLD_SECONDS)
        return record.run_id

    def require_writable(self) -> None:
        """Raise now what a save would raise later, where the store can't be used.

        For who computes for long before the first save. Raises as `save` does.
        """
        self._probe()
        name = f"{TEMPORARY}{uuid.uuid4().hex}"
        self.spool.folder.put_file(name, b"")
        self.spool.folder.drop(name)

    def save_prompts(self, prompts: Any) -> str:
        """Save a set of prompts; returns its digest, which runs refer to."""
        dataset = dataset_of(prompts)
        self._put(*part_of_dataset(dataset))
        return dataset.digest

    def tag(self, run_id: str, *tags: str) -> None:
        """Give a run tags. Raises StoreError `run_unknown`, `run_ambiguous`."""
        self._say(run_id, "tag", tags)

    def untag(self, run_id: str, *tags: str) -> None:
        """Take tags from a run."""
        self._say(run_id, "untag", tags)

    def note(self, run_id: str, text: str) -> None:
        """Write a note on a run. All notes are kept; `runs` shows the latest."""
        self._say(run_id, "note", [text])

    def delete(self, run_id: str) -> None:
        """Hide a run from every view; `restore` brings it back."""
        self._say(run_id, "delete", [None])

    def restore(self, run_id: str) -> None:
        """Bring a deleted run back."""
        self._say(run_id, "restore", [None], deleted=True)

    def fold(self, seconds: float | None = None, wait: float = 1.0) -> Folded:
        """Move what is in the spool into the DuckDB file, for at most `seconds`.

        Waits at most `wait` seconds for others who have the file open; `held_by` says
        who they are, if they did not let go. Safe to call at any time, from anywhere.
        """
        if self.database is None:
            return Folded(pending=len(self.spool.entries()[0]))
        parts, said = self.spool.entries()
        if not (parts or said or self.database.exists()):
            return Folded()
        with self.database.writing(wait) as con:
            if isinstance(con, Held):
                return Folded(pending=len(parts), held_by=con.program, pid=con.pid)
            found = fold_spool(con, self.spool, seconds, self.database.journal_path)
        if isinstance(self.spool.folder, LocalFolder):
            self.spool.folder.sweep()
        return found

    # --- reading ---

    @contextlib.contextmanager
    def connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A read-only DuckDB connection to everything saved, for one `with`.

        Keep it short: while it is open, nobody folds. Raises StoreError
        `store_missing`, and what `sql` raises.
        """
        with contextlib.ExitStack() as stack:
            # Listed before the database is opened: whatever is folded in between is
            # found in both, and counts once.
            there = self._has_database()
            parts, said = self.spool.entries()
            if parts and not there and self.database is not None:
                # With no database to open, the lock is what keeps folders out.
                stack.enter_context(self.database.unfolded())
                there = self._has_database()
                if there:
                    stack.close()
                parts, said = self.spool.entries()
            if not (there or parts or said):
                raise StoreError(
                    "store_missing",
                    f"there is no store at {self.path} yet; the first save makes it",
                    path=self.path,
                )
            con = stack.enter_context(self._base(there))
            found = self.spool.parts(parts)
            if not self.spool.folder.slow:
                for part in found:
                    part.check_sizes()
            lay_over(con, self._views, found, self.spool.events(said))
            yield con

    def sql(self, query: str, params: Sequence | Mapping | None = None) -> pa.Table:
        """Run one SQL query on everything saved; returns its rows.

        `params` fill `?` (a list) or `$name` (a mapping). See docs/sql.md for the
        views. Raises StoreError `sql_failed`, `sql_not_read_only`, `store_missing`,
        `store_held`, `store_corrupt`, `store_part_corrupt`.
        """
        with self.connect() as con:
            return run_query(con, query, params)

    def query(self, name: str, /, **params: object) -> pa.Table:
        """Run one of the named queries (`circuitlab.queries.named_queries`).

        Raises ArgumentError `query_unknown`, `query_parameter_missing`,
        `query_parameter_unknown`, and what `sql` raises.
        """
        query = named_query(name)
        with self.connect() as con:
            values = query.bind(params, lambda prefix: self._resolve(con, prefix))
            return run_query(con, query.sql, values)

    def runs(self, limit: int | None = None, **equal: object) -> pa.Table:
        """The runs, newest first: one row each, the columns of `v_run`.

        `equal` filters by columns, as in `runs(kind="edge", task="ioi")`; `tag="x"`
        keeps runs with that tag. Raises ArgumentError `run_column_unknown`.
        """
        with self.connect() as con:
            columns = [row[0] for row in con.execute("describe v_run").fetchall()]
            wrong = sorted(equal.keys() - {*columns, "tag"})
            if wrong:
                raise ArgumentError(
                    "run_column_unknown",
                    f"runs have no column {wrong[0]!r}; filter by tag, or by one of "
                    f"{', '.join(columns)}",
                    value=wrong[0],
                    expected=columns,
                )
            tests = [
                "list_contains(tags, $tag)" if c == "tag" else f'"{c}" = ${c}'
                for c in equal
            ]
            where = f"where {' and '.join(tests)}" if tests else ""
            cut = f"limit {int(limit)}" if limit is not None else ""
            query = f"from v_run {where} order by saved_at desc, run_id {cut}"
            return run_query(con, query, equal)

    def load(self, run_id: str) -> Any:
        """Load what was saved: the same dataclass, equal rows, floats bit for bit.

        `run_id` may be a unique beginning of six or more characters. Raises StoreError
        `run_unknown`, `run_ambiguous`, `run_id_too_short`.
        """
        return thing_of(self.load_record(run_id))

    def load_record(self, run_id: str) -> Record:
        """Load a run as a Record: the run and its tables by name. Errors as `load`."""
        with self.connect() as con:
            found = self._resolve(con, run_id)
            record = read_record(con, found)
            if record is None:
                part = self.spool.parts([f"run_id={found}"])
                record = part[0].record()
            return record

    def load_prompts(self, digest: str) -> Any:
        """Load a set of prompts by its digest. Raises StoreError `prompts_unknown`."""
        with self.connect() as con:
            found = read_dataset(con, digest)
            if found is None:
                parts = self.spool.parts([f"dataset_digest={digest}"])
                found = parts[0].dataset() if parts else None
        if found is None:
            raise StoreError(
                "prompts_unknown",
                f"no prompts {digest[:12]} in {self.path}; runs keep them when saved "
                "with prompts=",
                value=digest,
            )
        return prompts_of(found)

    def resolve(self, run_id: str) -> str:
        """The full run id for a unique beginning of it. Errors as `load`."""
        with self.connect() as con:
            return self._resolve(con, run_id)

    # --- sharing, checking ---

    def export(self, run_ids: Iterable[str] | None, folder: str | Path) -> list[str]:
        """Write runs (None: all) as Parquet with a manifest; their ids.

        `folder` is a path or a URL. Prompts, tags and notes go along. Raises StoreError
        `run_unknown`, and what writing raises.
        """
        return export_runs(self, self._chosen(run_ids), folder)

    def import_(self, folder: str | Path) -> list[str]:
        """Take in an export, or another store's remote folder; the ids of its runs.

        Every run is verified against its id; what is here already stays as it is.
        Raises DataError `export_invalid`, `export_incomplete`, StoreError
        `store_part_corrupt`.
        """
        self._probe()
        self._saved = True
        parts = [part for part, _ in import_parts(self.spool, folder)]
        self._try_to_fold(CLOSE_SECONDS)
        return [part.id for part in parts if part.kind == "run"]

    def merge(self, other: Store | str | Path) -> list[str]:
        """Take in every run of another store; their ids."""
        source = other if isinstance(other, Store) else Store(other)
        self._probe()
        self._saved = True
        parts = copy_runs(source, source._chosen(None), self.spool)
        self._try_to_fold(CLOSE_SECONDS)
        return [part.id for part in parts if part.kind == "run"]

    def check(self, *, deep: bool = False) -> Check:
        """Look for damage. `deep` reads every row and derives every id again."""
        return check_store(self.database, self.spool, deep)

    def repair(self) -> Repaired:
        """Set damaged parts and a damaged file aside, and save what they still give.

        Nothing is deleted. Says which runs were saved and which are lost. Raises
        StoreError `store_not_duckdb` for a file that was never a store.
        """
        if self.database is None or not isinstance(self.spool.folder, LocalFolder):
            raise StoreError(
                "remote_not_repaired",
                f"{self.path}: repair a copy (circuitlab export), then put it back",
                path=self.path,
            )
        report = repair_store(self.database, self.spool, self.spool.folder)
        self.fold(None)
        return report

    # --- inside ---

    def _views(self) -> dict[str, str]:
        return views(self._steps)

    def _has_database(self) -> bool:
        return self.database is not None and self.database.exists()

    def _chosen(self, run_ids: Iterable[str] | None) -> list[str]:
        with self.connect() as con:
            if run_ids is None:
                query = "select run_id from live order by run_id"
                return [run for (run,) in con.execute(query).fetchall()]
            return [self._resolve(con, run_id) for run_id in run_ids]

    @contextlib.contextmanager
    def _base(self, there: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        if there and self.database is not None:
            self._bring_up_to_date()
            with self.database.reading() as con:
                yield con
            return
        con = duckdb.connect()
        try:
            if isinstance(self.spool.folder, RemoteFolder):
                con.register_filesystem(self.spool.folder.fs)
            migrate(con, self._steps, lambda: "")
            yield con
        finally:
            con.close()

    def _put(self, name: str, files: Mapping[str, bytes]) -> bool:
        self._probe()
        self._saved = True
        return self.spool.save(name, files)

    def _probe(self) -> None:
        """Before the first write: refuse files that are no store of this version."""
        if not self._probed and self.database is not None and self.database.exists():
            try:
                self._probed = self.database.probe()
            except StoreError as error:
                # A damaged file takes nothing from a save: it goes into the spool.
                if error.code != "store_corrupt":
                    raise

    def _say(
        self,
        run_id: str,
        kind: str,
        values: Sequence[str | None],
        deleted: bool = False,
    ) -> None:
        with self.connect() as con:
            found = self._resolve(con, run_id, deleted=deleted)
        self._probe()
        self._saved = True
        for value in values:
            self.spool.say(Event.now(found, kind, value))

    def _resolve(
        self, con: duckdb.DuckDBPyConnection, prefix: str, *, deleted: bool = False
    ) -> str:
        if not isinstance(prefix, str) or len(prefix) < 6:
            raise StoreError(
                "run_id_too_short",
                f"{prefix!r} is too short for a run id; give six or more characters",
                value=prefix,
                expected=6,
            )
        runs = "run" if deleted else "live"
        query = f"select run_id from {runs} where starts_with(run_id, ?) limit 10"
        found = sorted(row[0] for row in con.execute(query, [prefix]).fetchall())
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError(
                "run_unknown",
                f"no run {prefix} in {self.path}; `circuitlab runs` lists them",
                value=prefix,
                path=self.path,
            )
        raise StoreError(
            "run_ambiguous",
            f"{prefix} is the beginning of {len(found)} or more runs: "
            f"{', '.join(found[:4])}; give more characters",
            value=prefix,
            expected=found,
        )

    def _try_to_fold(self, seconds: float) -> None:
        started = time.monotonic()
        try:
            found = self.fold(seconds, wait=0.1)
        except StoreError as error:
            # The save is done and safe in the spool; folding is for another time.
            log.warning("not folded: %s", error)
        else:
            if found.pid:
                log.info("%s (pid %s) has the store open", found.held_by, found.pid)
        ended = time.monotonic()
        self._rests_until = ended + REST * (ended - started)

    def _bring_up_to_date(self) -> None:
        """Apply migrations before the first read, where this process may write."""
        assert self.database is not None
        if not self._current:
            with contextlib.suppress(StoreError):
                if self.database.outdated():
                    self.fold(FOLD_SECONDS)
            self._current = True
