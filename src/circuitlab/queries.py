"""Queries: one read-only statement at a time, typed in or from `store/queries/`.

A named query is a SQL file. Its first comment says what it answers; lines of the form
`-- $name: meaning [= default]` declare its parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import duckdb
import pyarrow as pa

from circuitlab.errors import ArgumentError, StoreError
from circuitlab.migrations import means_damage, store_files

_READS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_PARAMETER = re.compile(r"--\s*\$(\w+):\s*(.*?)(?:\s+=\s+(\S.*))?")


@dataclass(frozen=True)
class Parameter:
    """What a named query asks for; `default` is None where it must be given."""

    name: str
    meaning: str
    default: object = None
    required: bool = True

    def read(self, value: object) -> object:
        """A value as the query wants it: text becomes a number where one is due.

        Raises ArgumentError `query_parameter_invalid`.
        """
        if not isinstance(self.default, (int, float)) or not isinstance(value, str):
            return value
        try:
            return type(self.default)(value)
        except ValueError:
            raise ArgumentError(
                "query_parameter_invalid",
                f"{self.name}={value!r} is no number; it means: {self.meaning}",
                value=value,
                expected=type(self.default).__name__,
            ) from None


@dataclass(frozen=True)
class NamedQuery:
    """A query from a file: `about` says what it answers."""

    name: str
    about: str
    sql: str
    parameters: tuple[Parameter, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    def bind(
        self, given: Mapping[str, object], resolve: Callable[[str], str]
    ) -> dict[str, object]:
        """All parameters' values; run ids may be beginnings, which `resolve` completes.

        Raises ArgumentError `query_parameter_unknown`, `query_parameter_missing`.
        """
        wrong = sorted(given.keys() - set(self.names))
        if wrong:
            raise ArgumentError(
                "query_parameter_unknown",
                f"@{self.name} has no parameter {wrong[0]!r}; it has "
                f"{', '.join(self.names) or 'none'}",
                value=wrong[0],
                expected=list(self.names),
            )
        found = {}
        for parameter in self.parameters:
            value = given.get(parameter.name, parameter.default)
            if value is None and parameter.required:
                raise ArgumentError(
                    "query_parameter_missing",
                    f"@{self.name} needs {parameter.name}: {parameter.meaning}",
                    value=parameter.name,
                )
            if _is_run(parameter.name) and isinstance(value, str):
                value = resolve(value)
            found[parameter.name] = parameter.read(value)
        return found


def _is_run(parameter: str) -> bool:
    return parameter == "run" or parameter.startswith("run_")


def named_queries(folder: Path | None = None) -> dict[str, NamedQuery]:
    """Every named query, by name."""
    folder = store_files("queries") if folder is None else folder
    paths = sorted(folder.glob("*.sql"))
    return {path.stem: _parse(path) for path in paths}


def named_query(name: str) -> NamedQuery:
    """One named query, with or without its `@`. Raises ArgumentError `query_unknown`."""
    folder = store_files("queries")
    path = folder / f"{name.removeprefix('@').replace('-', '_')}.sql"
    if path.parent != folder or not path.is_file():
        known = named_queries()
        raise ArgumentError(
            "query_unknown",
            f"no query @{name.removeprefix('@')}; there are "
            f"{', '.join('@' + other for other in known)}",
            value=name,
            expected=list(known),
        )
    return _parse(path)


def _parse(path: Path) -> NamedQuery:
    about, parameters = [], []
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        match = _PARAMETER.fullmatch(line.strip())
        if match:
            name, meaning, default = match.groups()
            value = None if default is None else json.loads(default)
            parameters.append(Parameter(name, meaning, value, default is None))
        elif line.startswith("--") and not parameters:
            about.append(line[2:].strip())
        elif line.strip() and not line.startswith("--"):
            break
    body = "\n".join(line for line in lines if not line.startswith("--")).strip()
    return NamedQuery(path.stem, " ".join(about), body, tuple(parameters))


def run_query(
    con: duckdb.DuckDBPyConnection,
    query: str,
    params: Sequence | Mapping | None = None,
) -> pa.Table:
    """Run one reading statement; returns its rows.

    Raises StoreError `sql_not_read_only` for anything but one SELECT (or EXPLAIN), and
    `sql_failed` with DuckDB's own words.
    """
    try:
        statements = con.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in _READS:
            raise _not_read_only(query, statements)
        found = con.sql(query, params=params or None)
        return found.to_arrow_table()
    except duckdb.Error as error:
        if means_damage(error) or isinstance(error, duckdb.IOException):
            raise
        raise StoreError(
            "sql_failed", f"the query failed: {error}", query=query, reason=str(error)
        ) from error


def _not_read_only(query: str, statements: Sequence) -> StoreError:
    kinds = [statement.type.name for statement in statements]
    return StoreError(
        "sql_not_read_only",
        "a store answers one SELECT at a time and changes nothing; write to your own "
        "database by reading from this one",
        query=query,
        value=kinds,
        expected=["SELECT"],
    )
