"""What a sweep computes: its settings, checked before anything runs, and its cells."""

from __future__ import annotations

import hashlib
import math
import reprlib
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from circuitlab.ablations import NAMED
from circuitlab.distribute import METRICS
from circuitlab.errors import ArgumentError, DataError
from circuitlab.prompt_files import read_rows
from circuitlab.sweep_cells import METHODS
from circuitlab.tables import digest

DTYPES = ("float64", "float32", "bfloat16", "float16")
RANKS = ("magnitude", "support")
LISTS = ("models", "revisions", "tasks", "seeds", "methods")
"""The fields that are multiplied."""


@dataclass(frozen=True)
class Sweep:
    """What to compute. Lists are multiplied; everything else holds for all cells.

    `methods` are names from `METHODS`. Scores are cut at every one of `sizes` (numbers
    of edges, or fractions of all edges below 1); `acdc` and `hierarchical_acdc` run at
    every one of `thresholds` (in nats, or in `acdc_metric`'s units), `edge_mask` at
    every one of `sparsities`. `n` prompts are scored and `held` others evaluate. A task
    is a task's name or a prompt file. Raises ArgumentError `sweep_invalid`.
    """

    name: str
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    methods: tuple[str, ...] = ("eap_ig",)
    seeds: tuple[int, ...] = (0,)
    revisions: tuple[str | None, ...] = (None,)
    sizes: tuple[float, ...] = (0.01, 0.05, 0.2)
    thresholds: tuple[float, ...] = (0.01,)
    sparsities: tuple[float, ...] = (1.0,)
    n: int = 32
    held: int = 16
    metric: str = "logit_diff"
    acdc_metric: str = "kl"
    ablation: str = "patch"
    steps: int = 5
    fraction: float = 0.1
    rank: str = "magnitude"
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self):
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))

    @staticmethod
    def from_toml(path: str | Path) -> Sweep:
        """Read a sweep's fields from a TOML file; `name` defaults to the file's.

        Raises DataError `sweep_unreadable`, ArgumentError `sweep_invalid`.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(
                "sweep_unreadable",
                f"{path} can't be read as TOML: {error}",
                path=str(path),
            ) from error
        values = {"name": path.stem, **values}
        for name in values:
            if name not in _RULES:
                known = sorted(_RULES)
                raise _invalid(name, f"is no field; there are {known}", name, known)
        for name in ("models", "tasks"):
            if name not in values:
                raise _invalid(name, "is missing", None, _RULES[name].expected)
        return Sweep(**values)

    def cells(self) -> tuple[Cell, ...]:
        """The plan, model by model, so that a worker loads each as seldom as it can.

        Reads the prompt files, to know later that they are the same. Raises DataError
        `prompts_too_few`, and what unusable files raise.
        """
        contents = {task: self._content(task) for task in self.tasks if is_file(task)}
        return tuple(
            Cell(self, model, revision, task, seed, method, contents.get(task))
            for model, revision, task, seed, method in product(
                *(getattr(self, name) for name in LISTS)
            )
        )

    def _content(self, file: str) -> str:
        found = sum(1 for _ in read_rows(Path(file)))
        require_prompts(file, found, self)
        return content_of(file)

    @property
    def digest(self) -> str:
        """Identifies what is computed; not on which device."""
        return digest({**asdict(self), "device": None})[:16]


@dataclass(frozen=True)
class Cell:
    """One unit of a sweep's work.

    `content` is a digest of the prompt file, where the task is one; `state` a folder
    for the cell's own checkpoint.
    """

    sweep: Sweep
    model: str
    revision: str | None
    task: str
    seed: int
    method: str
    content: str | None = None
    state: str | None = None

    @property
    def key(self) -> str:
        """Identifies the cell within every sweep of the same settings."""
        facts = {**self.facts(), "content": self.content}
        shared = asdict(self.sweep)
        for name in (*LISTS, "name", "device"):
            del shared[name]
        return digest({**facts, **shared})[:16]

    def facts(self) -> dict[str, Any]:
        """What tells it from the other cells, as it stands in the summary."""
        return {
            "model": self.model,
            "revision": self.revision,
            "task": self.task,
            "seed": self.seed,
            "method": self.method,
        }

    def __str__(self) -> str:
        parts = [self.model, self.revision, self.task, self.method, f"seed {self.seed}"]
        return " · ".join(part for part in parts if part)


def is_file(task: str) -> bool:
    """Whether a task is a prompt file, rather than a task's name."""
    return bool(Path(task).suffix)


def content_of(file: str) -> str:
    """A digest of a file's bytes. Raises DataError `prompts_file_unreadable`."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            "prompts_file_unreadable",
            f"{file} can't be read: {error.strerror}",
            value=file,
        ) from error


def require_prompts(task: str, found: int, sweep: Sweep) -> None:
    """Raise DataError `prompts_too_few` unless there are `n` prompts and `held` more."""
    if found < sweep.n + sweep.held:
        raise DataError(
            "prompts_too_few",
            f"{task} has {found} prompts, and a sweep of n = {sweep.n} and held = "
            f"{sweep.held} needs {sweep.n + sweep.held}; lower n or held, or give more",
            value=found,
            expected=sweep.n + sweep.held,
            task=task,
        )


# --- what a setting may be ---


@dataclass(frozen=True)
class _Rule:
    """What values a field takes; `made` brings different spellings of one together."""

    expected: str
    right: Callable[[Any], bool]
    made: Callable[[Any], Any] = lambda value: value
    many: bool = False

    def checked(self, name: str, value: Any) -> Any:
        if not self.many:
            return self._one(name, value)
        values = value if isinstance(value, list | tuple) else [value]
        if not values:
            raise _invalid(name, "is empty; give at least one", (), self.expected)
        made = tuple(self._one(name, one) for one in values)
        twice = [one for one in made if made.count(one) > 1]
        if twice:
            raise _invalid(name, f"names {twice[0]!r} twice", value, "each once")
        return made

    def _one(self, name: str, value: Any) -> Any:
        if not self.right(value):
            verb = "holds" if self.many else "is"
            why = f"{verb} {reprlib.repr(value)}; give {self.expected}"
            raise _invalid(name, why, value, self.expected)
        return self.made(value)


def _invalid(name: str, why: str, value: object, expected: object) -> ArgumentError:
    return ArgumentError(
        "sweep_invalid", f"{name} {why}", field=name, value=value, expected=expected
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _names_a_folder(value: Any) -> bool:
    plain = _is_text(value) and value.isprintable() and len(value) <= 100
    return plain and value not in (".", "..") and not set(value) & set("/\\")


def _is_method(value: Any) -> bool:
    return isinstance(value, str) and _spelled(value) in METHODS


def _spelled(method: str) -> str:
    return method.replace("-", "_")


def _is_number(value: Any) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (value < 1 or value == int(value))


def _whole(least: int) -> tuple[str, Callable[[Any], bool], Callable[[Any], Any]]:
    def right(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and int(value) >= least

    return f"a whole number from {least}", right, int


def _one_of(*known: str) -> tuple[str, Callable[[Any], bool]]:
    expected = f"one of {', '.join(known)}"
    return expected, lambda value: isinstance(value, str) and value in known


_FROM_ZERO = ("a finite number from 0", lambda x: _is_number(x) and x >= 0, float)
_SHARE = ("a number above 0, up to 1", lambda x: _is_number(x) and 0 < x <= 1, float)

_RULES = {
    "name": _Rule("a name that a folder can have, such as 'first'", _names_a_folder),
    "models": _Rule("names of models, as texts", _is_text, many=True),
    "tasks": _Rule("names of tasks or prompt files, as texts", _is_text, many=True),
    "methods": _Rule(f"of {', '.join(METHODS)}", _is_method, _spelled, many=True),
    "seeds": _Rule(*_whole(0), many=True),
    "revisions": _Rule("texts", lambda x: x is None or _is_text(x), many=True),
    "sizes": _Rule(
        "whole numbers of edges, or fractions below 1", _is_size, float, many=True
    ),
    "thresholds": _Rule(*_FROM_ZERO, many=True),
    "sparsities": _Rule(*_FROM_ZERO, many=True),
    "n": _Rule(*_whole(1)),
    "held": _Rule(*_whole(1)),
    "metric": _Rule(*_one_of(*METRICS)),
    "acdc_metric": _Rule(*_one_of(*METRICS)),
    "ablation": _Rule(*_one_of(*NAMED)),
    "steps": _Rule(*_whole(1)),
    "fraction": _Rule(*_SHARE),
    "rank": _Rule(*_one_of(*RANKS)),
    "dtype": _Rule(
        f"one of {', '.join(DTYPES)}", lambda x: x is None or _one_of(*DTYPES)[1](x)
    ),
    "device": _Rule("a device's name, as cuda:0", lambda x: x is None or _is_text(x)),
}
