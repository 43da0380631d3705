"""What a verb is, and what it may look at when it fires.

A verb is a value that describes one edit. The kernel (`doors`) calls it with a site's
value in its labelled view and writes what it returns; nothing is changed in place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import TokenBatch
from circuitlab.donors import Labelled, Population, as_tensor, laid, like
from circuitlab.errors import ArgumentError
from circuitlab.prompts import Prompts
from circuitlab.site_info import SiteInfo
from circuitlab.tables import digest

VerbFn = Callable[[Tensor, "Firing", Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Coordinates:
    """A subspace of a site's feature axis: `basis` `[k, feature]`, `origin` `[feature]`.

    x = origin + c·basis + (what is orthogonal to it), with c `[..., k]`.
    """

    basis: Tensor
    inverse: Tensor
    origin: Tensor | None

    def of(self, value: Tensor) -> Tensor:
        """The coordinates c of values `[..., feature]`."""
        if self.origin is not None:
            value = value - like(self.origin, value, "origin")
        return self.component(value)

    def component(self, vector: Tensor) -> Tensor:
        """The coordinates of differences `[..., feature]`: the origin plays no part."""
        return vector @ like(self.inverse, vector, "basis")

    def lifted(self, coordinates: Tensor) -> Tensor:
        return coordinates @ like(self.basis, coordinates, "basis")


@dataclass(frozen=True)
class Firing:
    """One firing of an edit: where, on which rows, and what a verb may look at.

    `offset` is the first row's number in the whole prompt set, `earlier` holds values
    of sites that fired before, `whole` the site's value where a verb sees only its
    coordinates. `notes` takes what was drawn.
    """

    site: SiteInfo
    batch: TokenBatch
    pass_index: int = 1
    offset: int = 0
    earlier: Mapping[str, Tensor] = field(default_factory=dict)
    whole: Tensor | None = None
    subspace: Coordinates | None = None
    frontier: bool = False
    notes: list[dict[str, Any]] = field(default_factory=list)

    def note(self, verb: str, **facts: Any) -> None:
        """Record a fact of this firing, once."""
        found = {"verb": verb, **facts}
        if found not in self.notes:
            self.notes.append(found)

    def point(self, donor: Tensor | Labelled, value: Tensor, what: str) -> Tensor:
        """A donor for the site's value, in coordinates where the verb works on those."""
        donor = self._own_rows(donor, value)
        if self.subspace is None or self.whole is None:
            return laid(donor, value, self.site, what)
        found = laid(donor, self.whole, self.site, what).expand_as(self.whole)
        return self.subspace.of(found)

    def vector(self, donor: Tensor | Labelled, value: Tensor, what: str) -> Tensor:
        """A difference or direction for the site, likewise."""
        donor = self._own_rows(donor, value)
        if self.subspace is None or self.whole is None:
            return laid(donor, value, self.site, what)
        found = laid(donor, self.whole, self.site, what)
        width = self.whole.shape[-1]
        return self.subspace.component(found.expand(*found.shape[:-1], width))

    def _own_rows(self, donor: Tensor | Labelled, value: Tensor) -> Tensor | Labelled:
        """Of a donor for every example of the set, those of this batch; a move to
        another device or precision is noted."""
        tensor = donor.tensor if isinstance(donor, Labelled) else donor
        if tensor.device != value.device:
            self.note("donor", moved=f"{tensor.device} to {value.device}")
        if tensor.dtype != value.dtype:
            self.note("donor", cast=f"{tensor.dtype} to {value.dtype}")
        rows = len(self.batch)
        if not isinstance(donor, Labelled) or "batch" not in donor.axes:
            return donor
        axis = donor.axes.index("batch")
        if tensor.shape[axis] < self.offset + rows:
            return donor
        return Labelled(tensor.narrow(axis, self.offset, rows), *donor.axes)

    def generators(
        self, seed: int, *, per_site: bool = True
    ) -> list[np.random.Generator]:
        """One generator a row; the row's number in the set decides it, not the batch."""
        key = self.site.key(self.pass_index) if per_site else ""
        salt = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
        rows = range(self.offset, self.offset + len(self.batch))
        return [np.random.default_rng([seed, salt, row]) for row in rows]


@dataclass(frozen=True, eq=False)
class Verb:
    """One edit as a value: make one with the functions of `circuitlab.interventions`.

    `sources` names the params that hold values from elsewhere, still to be found;
    `keeps`: what is written is a function of the site's value; `instead` spells an edit
    that writes the same and keeps the graph. Two verbs with equal names and params
    (tensors by content) are equal.
    """

    name: str
    fn: VerbFn = field(repr=False)
    params: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    keeps: bool = True
    instead: str = ""

    def __post_init__(self):
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    def __call__(self, value: Tensor, firing: Firing) -> Tensor:
        """What to write: the shape, dtype and device of `value`, which is unchanged."""
        return self.fn(value, firing, self.params)

    @property
    def parts(self) -> tuple[Verb, ...]:
        """The verbs that this one confines or joins."""
        inner = self.params.get("edits", self.params.get("edit", ()))
        return inner if isinstance(inner, tuple) else (inner,)

    def with_parts(self, parts: tuple[Verb, ...]) -> Verb:
        if not parts:
            return self
        name = "edits" if "edits" in self.params else "edit"
        inner = parts if name == "edits" else parts[0]
        return replace(self, params={**self.params, name: inner})

    def walk(self) -> list[Verb]:
        """This verb and all inside it."""
        return [self, *(verb for part in self.parts for verb in part.walk())]

    def found(self, find: Callable[[Any], Population]) -> Verb:
        """The same verb with every source replaced by its values."""
        changed = {
            name: find(self.params[name])
            for name in self.sources
            if self.params[name] is not None
        }
        parts = tuple(part.found(find) for part in self.parts)
        verb = replace(self, params={**self.params, **changed})
        return verb.with_parts(parts)

    def describe(self) -> dict[str, Any]:
        """Plain values that identify the verb; tensors by digest, prompts by theirs."""
        return {"verb": self.name, **{k: plain(v) for k, v in self.params.items()}}

    @cached_property
    def digest(self) -> str:
        return digest(self.describe())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Verb) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def plain(value: Any) -> Any:
    """A verb's parameter as JSON-able values that identify it."""
    match value:
        case None | bool() | int() | str() | float():
            return value
        case Tensor():
            return {"shape": list(value.shape), "sha256": _bits(value)}
        case Labelled():
            return {"axes": list(value.axes), **plain(value.tensor)}
        case Population():
            return {"population": plain(value.values), "mask": plain(value.mask)}
        case TokenBatch():
            return {"tokens": plain(value.tokens), "mask": plain(value.mask)}
        case Prompts():
            return {"prompts": value.digest}
        case Verb():
            return value.describe()
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case _:
            return f"{type(value).__name__}:{getattr(value, '__qualname__', id(value))}"


def _bits(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    found = hashlib.sha256(str(flat.dtype).encode())
    found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()[:32]


def as_verb(edit: Any) -> Verb:
    """A verb, or a plain callable `(value, site) -> value` as one.

    The callable gets the labelled view and the `SiteInfo`, and must return a new value.
    Raises ArgumentError `edit_not_a_verb`.
    """
    if isinstance(edit, Verb):
        return edit
    if isinstance(edit, type) or not callable(edit):
        raise ArgumentError(
            "edit_not_a_verb",
            f"{edit!r} is no edit; give a verb, as zero_ablate(), or a function "
            "(value, site) -> value",
            value=type(edit).__name__,
        )
    return Verb("callable", _call, {"fn": edit}, instead="compute from `value`")


def _call(value: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    return params["fn"](value, firing.site)


# --- arguments ---


def as_donor(value: Any, what: str) -> Tensor | Labelled:
    if not isinstance(value, Labelled):
        return as_tensor(value, what)
    as_tensor(value.tensor, what)
    return value


def as_seed(seed: Any) -> int:
    """A seed; raises ArgumentError `seed_needed`: nothing is drawn unrepeatably."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ArgumentError(
            "seed_needed",
            f"a seed is an integer from 0 on, not {seed!r}",
            value=str(seed),
        )
    return seed


def as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(
            "number_invalid",
            f"a finite number is needed, not {value!r}",
            value=str(value),
        )
    if not math.isfinite(value):
        raise ArgumentError(
            "number_invalid",
            f"a finite number is needed, not {value}",
            value=str(value),
        )
    return float(value)
