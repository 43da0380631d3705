"""Payloads: edits as plain records, for scripts, files and the command line.

A payload says what is done at the sites of a pattern: replace, add, project or scale.
How several payloads go to several sites is said by a wrapper (`ForAll`, `OneEach`,
`BySite`, `InOrder`) and never guessed from the length of a list. Every setting is
recorded with where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from circuitlab.donors import Labelled
from circuitlab.errors import ArgumentError
from circuitlab.selections import PerExample, at_heads, at_positions
from circuitlab.sourced import replace_with
from circuitlab.verb import Verb, as_donor, as_number, plain
from circuitlab.verbs import add, project_onto, project_out, scale

MODES = ("replace", "add", "project", "scale")
SETTINGS = ("mode", "scale_factor", "project", "positions", "heads", "over")
DEFAULTS: Mapping[str, Any] = {
    "mode": "replace",
    "scale_factor": 1.0,
    "project": "onto",
    "positions": "last",
    "heads": None,
    "over": ("feature",),
}


@dataclass(frozen=True, eq=False)
class Payload:
    """One edit as a record; what is None is decided by the call, its config or a default.

    `mode`: `"replace"` writes `tensor`; `"add"` adds `tensor · scale_factor`;
    `"project"` keeps only (`project="onto"`, times `scale_factor`) or removes
    (`project="out"`) the part in the span of `tensor`; `"scale"` multiplies by
    `scale_factor`. `positions` default to each row's last real token; `heads` to all.

    Raises ArgumentError `payload_mode_unknown`, `payload_setting_invalid`, and the codes
    of donors (`donor_not_finite`, …).
    """

    tensor: Tensor | Labelled | None = None
    mode: str | None = None
    scale_factor: float | None = None
    project: str | None = None
    positions: Any = None
    heads: tuple[int, ...] | None = None
    over: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.tensor is not None:
            self._set("tensor", as_donor(self.tensor, "payload's tensor"))
        if self.mode is not None and self.mode not in MODES:
            raise ArgumentError(
                "payload_mode_unknown",
                f"{self.mode!r} is no mode; write one of {', '.join(MODES)}",
                value=self.mode,
                expected=list(MODES),
            )
        if self.scale_factor is not None:
            self._set("scale_factor", as_number(self.scale_factor))
        if self.project not in (None, "onto", "out"):
            raise _invalid("project", self.project, "'onto' or 'out'")
        if self.heads is not None:
            heads = (self.heads,) if type(self.heads) is int else self.heads
            self._set("heads", tuple(heads))
            at_heads(self.heads, scale(1.0))
        if self.positions is not None:
            at_positions(self.positions, scale(1.0))
        if self.over is not None:
            self._set("over", tuple(self.over))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ForAll:
    """The same payload at every site that the pattern matches."""

    payload: Any


@dataclass(frozen=True)
class OneEach:
    """One payload for each matched site, in order of depth; their counts must agree."""

    payloads: tuple[Any, ...]

    def __init__(self, payloads: Sequence[Any]):
        object.__setattr__(self, "payloads", tuple(payloads))


@dataclass(frozen=True)
class BySite:
    """One payload for each matched site, by its name (any spelling)."""

    payloads: Mapping[str, Any]


@dataclass(frozen=True)
class InOrder:
    """Several payloads at each site, one after the other."""

    payloads: tuple[Any, ...]

    def __init__(self, payloads: Sequence[Any]):
        object.__setattr__(self, "payloads", tuple(payloads))


@dataclass(frozen=True, eq=False)
class Settled:
    """A payload with every setting decided, and the origin of each: `payload`,
    `argument`, `config` or `default`."""

    payload: Payload
    origins: Mapping[str, str]

    @cached_property
    def verb(self) -> Verb:
        """The edit. Raises ArgumentError `payload_tensor_missing`,
        `payload_tensor_unused`, `payload_scale_unused`, `payload_scale_missing`."""
        found = self.payload
        _check_mode(found, self.origins)
        verb = _acting(found)
        if found.heads is not None:
            verb = at_heads(found.heads, verb)
        return at_positions(found.positions, verb)

    def describe(self) -> dict[str, Any]:
        found = {f.name: getattr(self.payload, f.name) for f in fields(Payload)}
        if isinstance(self.payload.positions, PerExample):
            found["positions"] = {"per_example": self.payload.positions.rows}
        return {name: plain(value) for name, value in found.items()}


def _acting(found: Payload) -> Verb:
    factor = found.scale_factor
    assert factor is not None
    if found.mode == "scale":
        return scale(factor)
    tensor = found.tensor
    assert tensor is not None
    if found.mode == "replace":
        return replace_with(tensor)
    if found.mode == "add":
        return _scaled_add(tensor, factor)
    assert not isinstance(tensor, Labelled)
    over = found.over or ("feature",)
    if found.project == "out":
        return project_out(tensor, over=over)
    return project_onto(tensor, over=over, factor=factor)


def _scaled_add(tensor: Tensor | Labelled, factor: float) -> Verb:
    if isinstance(tensor, Labelled):
        return add(Labelled(tensor.tensor * factor, *tensor.axes))
    return add(tensor * factor)


def _check_mode(found: Payload, origins: Mapping[str, str]) -> None:
    """Refuse what a mode would leave unused, and what it lacks."""
    mode = found.mode
    if mode == "scale" and found.tensor is not None:
        raise _mode_error("payload_tensor_unused", "mode 'scale' takes no tensor", mode)
    if mode != "scale" and found.tensor is None:
        raise _mode_error(
            "payload_tensor_missing", f"mode {mode!r} needs a tensor", mode
        )
    if mode == "scale" and origins["scale_factor"] == "default":
        raise _mode_error(
            "payload_scale_missing", "mode 'scale' needs a scale_factor", mode
        )
    ignores = mode == "replace" or (mode == "project" and found.project == "out")
    if ignores and found.scale_factor != 1.0:
        text = f"mode {mode!r} ({found.project}) has no use for a scale_factor"
        raise _mode_error("payload_scale_unused", text, mode)
    if mode == "project" and isinstance(found.tensor, Labelled):
        raise _mode_error(
            "payload_setting_invalid",
            "a projection's basis takes `over`, no labels",
            mode,
        )


def _mode_error(code: str, text: str, mode: str | None) -> ArgumentError:
    return ArgumentError(code, text, mode=mode)


def _invalid(name: str, value: object, expected: str) -> ArgumentError:
    return ArgumentError(
        "payload_setting_invalid",
        f"{name} is {value!r}; {expected} was expected",
        setting=name,
        value=str(value),
        expected=expected,
    )


def as_payload(value: Any) -> Payload:
    """A payload from a `Payload`, a tensor or array, or a mapping of its fields.

    Raises ArgumentError `payload_list_ambiguous`, `payload_unknown_key`,
    `payload_invalid`, `reversed_projection_unsupported`.
    """
    match value:
        case Payload():
            return value
        case Tensor() | np.ndarray() | Labelled():
            return Payload(value)  # type: ignore[arg-type]
        case Mapping():
            known = [field.name for field in fields(Payload)]
            if "use_intervention_tensor_as_basis" in value:
                raise reversed_projection()
            unknown = [str(name) for name in value if name not in known]
            if unknown:
                raise unknown_key(unknown, known, "payloads")
            return Payload(**value)
        case list() | tuple():
            raise ArgumentError(
                "payload_list_ambiguous",
                "a list of payloads can mean one for each site or several at each; write "
                "OneEach([…]) or InOrder([…])",
                n=len(value),
            )
    raise ArgumentError(
        "payload_invalid",
        f"a payload is a Payload, a tensor or a mapping of its fields, not "
        f"{type(value).__name__}",
        value=type(value).__name__,
    )


def reversed_projection() -> ArgumentError:
    return ArgumentError(
        "reversed_projection_unsupported",
        "use_intervention_tensor_as_basis is left out on purpose: projecting the tensor "
        "onto the activation keeps only the activation's direction, which answers no "
        "question about circuits. Leave the key out: the tensor is the basis",
        value="use_intervention_tensor_as_basis",
        reason="reversed_projection_left_out",
    )


def unknown_key(unknown: list[str], known: Sequence[str], where: str) -> ArgumentError:
    return ArgumentError(
        "payload_unknown_key",
        f"{where} have no {', '.join(map(repr, unknown))}; known: {', '.join(known)}",
        value=unknown,
        expected=list(known),
    )
