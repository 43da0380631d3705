"""The errors of circuitlab: one small tree, every leaf with a stable `code`.

Branch on `error.code`, or on `error.fields`, which holds the code, the value that was
wrong and what was expected. The text says what to do instead.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from numbers import Real
from types import UnionType


class CircuitlabError(Exception):
    """Any refusal of circuitlab.

    `code` is stable across versions; `fields` holds it too, with the facts of the case.
    """

    def __init__(self, code: str, message: str, **fields: object):
        super().__init__(message)
        self.code = code
        self.fields: dict[str, object] = {"code": code, **fields}

    def __reduce__(self):
        return _rebuild, (type(self), self.args[0], self.fields)


class ArgumentError(CircuitlabError, ValueError):
    """An argument that cannot be used: a name, a number, a shape, a combination."""


class DataError(CircuitlabError, ValueError):
    """Prompts, tables or files whose content is not what it should be."""


class ModelError(CircuitlabError, ValueError):
    """A model that cannot be loaded, or that fails a probe."""


class StoreError(CircuitlabError):
    """A store that cannot be opened, read or written."""


class ReadError(CircuitlabError, ValueError):
    """A read that cannot be answered from the trace that was given."""


class InternalError(CircuitlabError, RuntimeError):
    """An invariant of circuitlab itself that broke: please report it."""


def require_count(code: str, name: str, value: object, *, least: int = 1) -> int:
    """A whole number from `least`; raises ArgumentError with `code` for anything else."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or found < least:
        raise ArgumentError(
            code,
            f"{name} is {reprlib.repr(value)}; give a whole number from {least}",
            value=value,
            expected=f">= {least}",
            argument=name,
        )
    return found


def require_counts(
    code: str, name: str, values: object, *, least: int = 1
) -> list[int]:
    """Whole numbers from `least`, in their order; raises as `require_count` does, also
    for what is no list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ArgumentError(
            code,
            f"{name} is {reprlib.repr(values)}; give a list of whole numbers from {least}",
            value=values,
            expected=f"a list of numbers >= {least}",
            argument=name,
        )
    return [require_count(code, f"one of {name}", v, least=least) for v in values]


def require_number(
    code: str,
    name: str,
    value: object,
    fits: Callable[[float], bool] = math.isfinite,
    expected: str = "a finite number",
) -> float:
    """A number that `fits`; raises ArgumentError with `code` for anything else."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    found = float(value) if real else math.nan  # type: ignore[arg-type]
    if not real or not fits(found):
        raise ArgumentError(
            code,
            f"{name} is {reprlib.repr(value)}; give {expected}",
            value=value,
            expected=expected,
            argument=name,
        )
    return found


def require_type(
    code: str, name: str, value: object, kind: type | UnionType, remedy: str
) -> None:
    """Raise ArgumentError with `code`, and what to do, unless `value` is of the kind."""
    if not isinstance(value, kind):
        raise ArgumentError(
            code,
            f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}; {remedy}",
            value=reprlib.repr(value),
            expected=getattr(kind, "__name__", str(kind)),
            argument=name,
        )


def _rebuild(kind: type[CircuitlabError], message: str, fields: dict):
    fields = dict(fields)
    return kind(fields.pop("code"), message, **fields)
