"""Conditions over the columns of a table, read by two interpreters: SQL and a mask.

Two-valued: a null or NaN meets no condition, and everything else meets its negation.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Sql = tuple[str, list[object]]
Columns = Mapping[str, pa.ChunkedArray]

OPERATORS = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Within:
    """The column holds one of the values."""

    column: str
    values: tuple[str, ...] | tuple[int, ...]

    def sql(self) -> Sql:
        if not self.values:
            return "false", []
        kind = "varchar" if isinstance(self.values[0], str) else "bigint"
        text = f"coalesce({self.column} in (select unnest(?::{kind}[])), false)"
        return text, [list(self.values)]

    def mask(self, columns: Columns) -> np.ndarray:
        column = columns[self.column]
        values = pa.array(self.values, column.type)
        found = pc.call_function("is_in", [column], pc.SetLookupOptions(values))
        return found.to_numpy(zero_copy_only=False).astype(bool)


@dataclass(frozen=True)
class Compare:
    """A number, its absolute value or its negative, against a constant."""

    column: str
    op: str
    value: float
    absolute: bool = False
    negated: bool = False

    def sql(self) -> Sql:
        number = f"{self.column}::double"
        shown = f"abs({number})" if self.absolute else number
        shown = f"(-{shown})" if self.negated else shown
        op = "<>" if self.op == "!=" else self.op
        # DuckDB orders NaN above every number.
        text = f"coalesce({shown} {op} ? and not isnan({number}), false)"
        return text, [float(self.value)]

    def mask(self, columns: Columns) -> np.ndarray:
        column = pc.cast(columns[self.column], pa.float64())
        numbers = column.to_numpy(zero_copy_only=False)
        shown = np.abs(numbers) if self.absolute else numbers
        shown = -shown if self.negated else shown
        return OPERATORS[self.op](shown, self.value) & ~np.isnan(numbers)


@dataclass(frozen=True)
class Stride:
    """A whole number in `range(start, stop, step)`; `stop` None has no end."""

    column: str
    start: int
    stop: int | None
    step: int

    def sql(self) -> Sql:
        name, values = self.column, [self.start, self.start, self.step]
        text = f"{name} >= ? and ({name} - ?) % ? = 0"
        if self.stop is not None:
            text, values = f"{text} and {name} < ?", [*values, self.stop]
        return f"coalesce({text}, false)", list(values)

    def mask(self, columns: Columns) -> np.ndarray:
        column = pc.cast(columns[self.column], pa.float64())
        numbers = column.to_numpy(zero_copy_only=False)
        stop = np.inf if self.stop is None else self.stop
        inside = (numbers >= self.start) & (numbers < stop)
        return inside & (np.mod(numbers - self.start, self.step) == 0)


@dataclass(frozen=True)
class Not:
    inner: Condition

    def sql(self) -> Sql:
        text, values = self.inner.sql()
        return f"not ({text})", values

    def mask(self, columns: Columns) -> np.ndarray:
        return ~self.inner.mask(columns)


@dataclass(frozen=True)
class All:
    """Every part holds; without parts, always."""

    parts: tuple[Condition, ...]

    def sql(self) -> Sql:
        return _joined(self.parts, " and ", "true")

    def mask(self, columns: Columns) -> np.ndarray:
        found = np.ones(_length(columns), dtype=bool)
        for part in self.parts:
            found &= part.mask(columns)
        return found


@dataclass(frozen=True)
class Any:
    """One part holds; without parts, never."""

    parts: tuple[Condition, ...]

    def sql(self) -> Sql:
        return _joined(self.parts, " or ", "false")

    def mask(self, columns: Columns) -> np.ndarray:
        found = np.zeros(_length(columns), dtype=bool)
        for part in self.parts:
            found |= part.mask(columns)
        return found


Condition = Within | Compare | Stride | Not | All | Any


def _joined(parts: Sequence[Condition], word: str, empty: str) -> Sql:
    if not parts:
        return empty, []
    compiled = [part.sql() for part in parts]
    text = word.join(text if len(parts) == 1 else f"({text})" for text, _ in compiled)
    return text, [value for _, values in compiled for value in values]


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values())))
