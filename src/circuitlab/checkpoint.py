"""Checkpoints: an append-only file of steps, so that a killed run goes on where it was.

The first line says what is being computed; each further line is one committed step. A
line that a kill cut short is dropped when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from circuitlab.errors import DataError
from circuitlab.tables import canonical_json


class Checkpoint:
    """Steps on the disk. `steps` holds those that were there when it was opened.

    `head` identifies the computation, as plain JSON values. Raises DataError
    `checkpoint_mismatch` for a file of another computation, `checkpoint_corrupt`.
    """

    def __init__(self, path: str | Path, head: Mapping[str, Any]):
        self.path = Path(path)
        self.steps: list[Any] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            self._read(head)
        else:
            self.append(dict(head))

    def _read(self, head: Mapping[str, Any]) -> None:
        whole, _, cut = self.path.read_bytes().rpartition(b"\n")
        lines = [self._parsed(line) for line in whole.split(b"\n") if line]
        if cut:
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        if not lines:
            self.append(dict(head))
            return
        found, *self.steps = lines
        if canonical_json(found) != canonical_json(dict(head)):
            differing = sorted(
                k for k in {*found, *head} if found.get(k) != head.get(k)
            )
            raise DataError(
                "checkpoint_mismatch",
                f"{self.path} is of another computation (it differs in "
                f"{', '.join(differing)}); give another path, or delete it",
                path=str(self.path),
                value=found,
                expected=dict(head),
            )

    def _parsed(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise DataError(
                "checkpoint_corrupt",
                f"{self.path} holds a line that is no JSON: {line[:60]!r}; delete the file "
                "and start again",
                path=str(self.path),
                value=line[:200].decode(errors="replace"),
            ) from error

    def append(self, *steps: Any) -> None:
        """Write steps, durably: they are on the disk when this returns."""
        text = "".join(canonical_json(step) + "\n" for step in steps)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
