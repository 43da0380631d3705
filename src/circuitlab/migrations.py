"""The schema of a store's database: numbered SQL files, applied and recorded in order.

Each file is applied in one transaction with its own record, so a store is always at a
version that existed. The readable views are defined in the same files; the last
definition of a view counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import duckdb

from circuitlab.errors import InternalError, StoreError

_FILE = re.compile(r"(\d{3})_(\w+)\.sql")
_VIEW = re.compile(
    r"create\s+or\s+replace\s+view\s+(\w+)\s+as\s+(.*)", re.IGNORECASE | re.DOTALL
)
_DAMAGED = (
    "orrupt",
    "checksum",
    "deserialize",
    "invalidated",
    "Failed to load",
    "read enough bytes",
)
_NO_ROOM = ("No space left", "File too large", "Disk quota")
RECORD = """
create table if not exists schema_version (
    version integer not null,
    name varchar not null,
    applied_at timestamp not null,
    circuitlab varchar
)
"""


@dataclass(frozen=True)
class Migration:
    """One numbered step of the schema."""

    version: int
    name: str
    sql: str


def store_files(kind: str) -> Path:
    """The folder `schema` or `queries`: in the wheel, or in a source checkout."""
    package = Path(__file__).parent
    places = [package / "_store" / kind, package.parents[1] / "store" / kind]
    for place in places:
        if place.is_dir():
            return place
    raise InternalError(
        "store_files_missing",
        f"circuitlab's own folder store/{kind} is missing; install it again",
        value=[str(place) for place in places],
    )


def migrations(folder: Path | None = None) -> tuple[Migration, ...]:
    """Every migration in order, from 1 on without a gap."""
    folder = store_files("schema") if folder is None else folder
    found = []
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match:
            text = path.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), match[2], text))
    numbers = [step.version for step in found]
    if not found or numbers != list(range(1, len(found) + 1)):
        raise InternalError(
            "migrations_invalid",
            f"migrations must be numbered 001, 002, …; found {numbers}",
            value=numbers,
        )
    return tuple(found)


@lru_cache(maxsize=8)
def views(steps: tuple[Migration, ...]) -> dict[str, str]:
    """The select of every view, by name, in the order of definition."""
    found: dict[str, str] = {}
    for step in steps:
        for statement in duckdb.extract_statements(step.sql):
            text = re.sub(r"--[^\n]*", "", statement.query).strip().rstrip(";")
            match = _VIEW.fullmatch(text)
            if match:
                found[match[1]] = match[2]
    return found


def schema_version(con: duckdb.DuckDBPyConnection) -> int:
    """The version a database is at; 0 for an empty one.

    Raises StoreError `store_foreign` for a DuckDB database that is no store.
    """
    tables = con.execute(
        "select table_name from duckdb_tables() "
        "where database_name = current_database() and not internal"
    ).fetchall()
    names = {name for (name,) in tables}
    if not names:
        return 0
    if not {"schema_version", "run"} <= names:
        raise StoreError(
            "store_foreign",
            "this is a DuckDB database, but no store of circuitlab; choose another "
            "file (--store, CIRCUITLAB_STORE)",
            value=sorted(names)[:10],
            expected="a table schema_version",
        )
    rows = con.execute("select version from schema_version").fetchall()
    return max((version for (version,) in rows), default=0)


def check_version(version: int, steps: tuple[Migration, ...], path: str) -> None:
    """Raise StoreError `store_newer` for a database of a newer circuitlab."""
    if version > len(steps):
        raise StoreError(
            "store_newer",
            f"{path} was written by a newer circuitlab (schema {version}, this one "
            f"knows {len(steps)}); update circuitlab, the store was left as it is",
            path=path,
            value=version,
            expected=len(steps),
        )


def migrate(
    con: duckdb.DuckDBPyConnection,
    steps: tuple[Migration, ...],
    version: Callable[[], str],
) -> list[int]:
    """Apply what is missing, each step in a transaction; the versions applied.

    `version` tells the version of circuitlab for the record. Raises StoreError
    `migration_failed`, with the database at the last version that worked.
    """
    at = schema_version(con)
    applied = []
    for step in steps[at:]:
        con.execute("begin")
        try:
            con.execute(RECORD)
            con.execute(step.sql)
            con.execute(
                "insert into schema_version values (?, ?, now()::timestamp, ?)",
                [step.version, step.name, version()],
            )
            con.execute("commit")
        except duckdb.Error as error:
            undo(con)
            if means_no_room(error) or means_damage(error):
                raise
            raise StoreError(
                "migration_failed",
                f"migration {step.version:03} ({step.name}) failed and was undone: "
                f"{error}; the store is at version {step.version - 1}",
                value=step.version,
                reason=str(error),
            ) from error
        applied.append(step.version)
    return applied


def undo(con: duckdb.DuckDBPyConnection) -> None:
    """Roll back, where there is anything left to roll back."""
    try:
        con.execute("rollback")
    except duckdb.Error:
        # A database that failed hard has no transaction any more.
        return


def means_damage(error: duckdb.Error) -> bool:
    """Whether DuckDB's words are those for a file that is not what it wrote."""
    hard = (
        duckdb.FatalException,
        duckdb.InternalException,
        duckdb.SerializationException,
    )
    return isinstance(error, hard) or any(word in str(error) for word in _DAMAGED)


def means_no_room(error: duckdb.Error) -> bool:
    """Whether DuckDB's words are those for a disk that is full."""
    return any(word in str(error) for word in _NO_ROOM)
