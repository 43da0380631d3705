"""Checking a store, and saving what can be saved of a damaged one.

Nothing is ever deleted: what is damaged is set aside beside the store, by a rename.
What can still be read is written back into the spool, as if it were saved again, and
folded into a new file; being interrupted at any point loses nothing.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
from pyarrow import ArrowInvalid

from circuitlab.database import Database
from circuitlab.errors import CircuitlabError, StoreError
from circuitlab.folders import LocalFolder, os_errors
from circuitlab.share import said, verify
from circuitlab.spool import Spool, part_of_dataset, part_of_record, timestamp
from circuitlab.stored_rows import read_dataset, read_numbered


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `id` is a run's, or a prompt set's, where it is known."""

    code: str
    text: str
    id: str | None = None


@dataclass(frozen=True)
class Check:
    """What a check found: `problems` is empty for a sound store."""

    runs: int
    pending: int
    problems: tuple[Problem, ...] = ()
    deep: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class Repaired:
    """What a repair did: ids saved from a damaged file, ids lost, paths set aside."""

    saved: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    unreadable: list[Problem] = field(default_factory=list)


def check_parts(spool: Spool) -> list[Problem]:
    """Verify every part and event in the spool."""
    problems = []
    parts, events = spool.entries()
    for name in parts:
        try:
            for part in spool.parts([name]):
                verify(part)
        except CircuitlabError as error:
            problems.append(Problem(error.code, str(error), name.partition("=")[2]))
    for name in events:
        try:
            spool.events([name])
        except CircuitlabError as error:
            problems.append(Problem(error.code, str(error), name))
    return problems


def check_database(database: Database, deep: bool) -> tuple[int, list[Problem]]:
    """How many runs are folded, and what is wrong with them.

    Counts the rows of every run; `deep` reads them all and derives each id again.
    """
    try:
        with database.reading() as con:
            heads = _heads(con)
    except StoreError as error:
        return 0, [Problem(error.code, str(error))]
    problems, count = [], len(heads)
    while heads:
        # A database that failed hard answers nothing more: open it anew and go on.
        with contextlib.suppress(StoreError), database.reading() as con:
            while heads:
                run_id, number, head = heads.pop(0)
                found = _wrong_rows(con, run_id, number, head, deep)
                if found:
                    text = f"run {run_id[:12]}: {found.text}"
                    problems.append(Problem("store_corrupt", text, run_id))
                if found and found.hard:
                    break
    return count, problems


def _heads(con: duckdb.DuckDBPyConnection) -> list[tuple[str, int, dict]]:
    rows = con.execute("select run_id, run_no, header from run order by run_no")
    return [(run, number, json.loads(head)) for run, number, head in rows.fetchall()]


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a run's rows; `hard` where the database gave up."""

    text: str
    hard: bool = False


def _wrong_rows(
    con: duckdb.DuckDBPyConnection, run_id: str, number: int, head: dict, deep: bool
) -> Wrong | None:
    try:
        for table, facts in head["files"].items():
            query = f"select count(*) from {table} where run_no = ?"
            rows = con.execute(query, [number]).fetchall()[0][0]
            if rows != facts["rows"]:
                return Wrong(f"{rows} of {facts['rows']} {table} rows are there")
        if deep and read_numbered(con, number, head).run_id != run_id:
            return Wrong("its rows are not those that were saved")
    except (duckdb.Error, ValueError, ArrowInvalid) as error:
        return Wrong(f"its rows can't be read: {error}", hard=True)
    return None


def set_parts_aside(spool: Spool, folder: LocalFolder, report: Repaired) -> None:
    """Move damaged parts and events out of the spool, next to it."""
    for problem in check_parts(spool):
        name = _entry_of(spool, problem)
        aside = folder.root.with_name(folder.root.name + ".damaged")
        with os_errors(aside, writing=True):
            aside.mkdir(exist_ok=True)
            target = aside / f"{name}-{_stamp()}"
            (folder.root / name).rename(target)
        report.set_aside.append(str(target))
        report.lost.append(problem.id or name)


def _entry_of(spool: Spool, problem: Problem) -> str:
    parts, events = spool.entries()
    return next(
        name
        for name in [*parts, *events]
        if problem.id in (name, name.partition("=")[2])
    )


def _stamp() -> str:
    return timestamp().replace(":", "").partition(".")[0]


def rebuild(database: Database, spool: Spool, report: Repaired) -> None:
    """Save what a damaged file still gives into the spool, and set the file aside."""
    for run_id, number, head in _known_runs(database, report):
        try:
            with database.reading() as con:
                record = read_numbered(con, number, head)
            whole = record.run_id == run_id
        except (CircuitlabError, duckdb.Error, ValueError, ArrowInvalid) as error:
            report.unreadable.append(Problem("store_corrupt", str(error), run_id))
            whole, record = False, None
        if whole and record is not None:
            spool.save(*part_of_record(record, head["saved_at"]))
            report.saved.append(run_id)
        else:
            report.lost.append(run_id)
    _save_prompts_and_events(database, spool, report)
    _move_aside(database.path, report)
    _move_aside(database.path.with_name(database.path.name + ".wal"), report)
    _move_aside(database.journal_path, report)


def _known_runs(database: Database, report: Repaired) -> list[tuple[str, int, dict]]:
    """Every run that was folded: as the file tells, else as the journal does."""
    try:
        with database.reading() as con:
            return _heads(con)
    except (StoreError, duckdb.Error) as error:
        text = f"the list of runs can't be read: {error}"
        report.unreadable.append(Problem("store_corrupt", text))
    with contextlib.suppress(FileNotFoundError):
        lines = database.journal_path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [(line["head"]["id"], line["run_no"], line["head"]) for line in found]
    return []


def _save_prompts_and_events(
    database: Database, spool: Spool, report: Repaired
) -> None:
    try:
        with database.reading() as con:
            for event in said(con):
                spool.say(event)
            rows = con.execute("select dataset_digest from dataset").fetchall()
            for (digest,) in rows:
                dataset = read_dataset(con, digest)
                if dataset is not None:
                    spool.save(*part_of_dataset(dataset))
    except (StoreError, duckdb.Error) as error:
        text = f"prompts, notes or tags are lost: {error}"
        report.unreadable.append(Problem("store_corrupt", text))


def _move_aside(path: Path, report: Repaired) -> None:
    target = path.with_name(f"{path.name}.damaged-{_stamp()}")
    with os_errors(path, writing=True), contextlib.suppress(FileNotFoundError):
        path.rename(target)
        report.set_aside.append(str(target))


def check_store(database: Database | None, spool: Spool, deep: bool) -> Check:
    """Check the spool, and the database where there is one."""
    found, problems = 0, check_parts(spool)
    if database is not None and database.exists():
        found, wrong = check_database(database, deep)
        problems += wrong
    return Check(found, len(spool.entries()[0]), tuple(problems), deep)


def repair_store(database: Database, spool: Spool, folder: LocalFolder) -> Repaired:
    """Set aside what is damaged, and put what can be read back into the spool."""
    report = Repaired()
    set_parts_aside(spool, folder, report)
    if not database.exists():
        return report
    _, wrong = check_database(database, deep=True)
    codes = {problem.code for problem in wrong}
    ours = database.journal_path.exists()
    if "store_corrupt" in codes or ("store_not_duckdb" in codes and ours):
        with database.exclusive() as locked:
            rebuild(locked, spool, report)
    elif wrong:
        # Held, newer, or never a store: the error says so itself.
        with database.reading():
            pass
    return report
