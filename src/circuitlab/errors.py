"""The errors of circuitlab: one small tree, every leaf with a stable `code`.

Branch on `error.code`, or on `error.fields`, which holds the code, the value that was
wrong and what was expected. The text says what to do instead.
"""

from __future__ import annotations


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


def _rebuild(kind: type[CircuitlabError], message: str, fields: dict):
    fields = dict(fields)
    return kind(fields.pop("code"), message, **fields)
