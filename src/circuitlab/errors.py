"""The errors of circuitlab: one small tree, every leaf with a stable `code`.

Branch on `error.code`, or on `error.fields`, which holds the code, the value that was
wrong and what was expected. The text says what to do instead.
"""

from __future__ import annotations

import operator


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


def require_count(code: str, name: str, value: object) -> int:
    """A whole number from 1; raises ArgumentError with `code` for anything else."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = 0
    if found < 1:
        raise ArgumentError(
            code,
            f"{name} is {value!r}; give a whole number from 1",
            value=value,
            expected=">= 1",
        )
    return found


def _rebuild(kind: type[CircuitlabError], message: str, fields: dict):
    fields = dict(fields)
    return kind(fields.pop("code"), message, **fields)
