"""Warnings that are given once: the library's only state that outlives a call."""

from __future__ import annotations

import warnings

_SEEN: set[str] = set()


class CircuitlabWarning(UserWarning):
    """A warning of circuitlab; `code` is stable."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


def warn_once(code: str, message: str) -> None:
    """Warn, unless a warning with this code was given before in this process."""
    if code in _SEEN:
        return
    _SEEN.add(code)
    warnings.warn(CircuitlabWarning(code, message), stacklevel=3)


def forget_notices() -> None:
    """Let every once-only warning be given again: for tests."""
    _SEEN.clear()
