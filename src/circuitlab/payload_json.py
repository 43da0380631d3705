"""Payloads from JSON: strict about keys, types, duplicates and numbers.

    {"edits": {"blocks.*.attn.hook_z": {"mode": "scale", "scale_factor": 0, "heads": [0]},
               "blocks.1.hook_mlp_out": {"in_order": [{"mode": "add",
                   "intervention_tensor": [0.1, …]}, {"mode": "scale", "scale_factor": 2}]}},
     "config": {"positions": "all"}}

The wrappers are `for_all`, `one_each`, `by_site` and `in_order`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from circuitlab.donors import Labelled
from circuitlab.errors import ArgumentError, DataError
from circuitlab.payloads import (
    BySite,
    ForAll,
    InOrder,
    OneEach,
    Payload,
    reversed_projection,
)
from circuitlab.selections import PerExample

KEYS = (
    "intervention_tensor",
    "axes",
    "mode",
    "scale_factor",
    "project",
    "positions",
    "heads",
    "over",
)
CONFIG = KEYS[2:]
WRAPPERS = ("for_all", "one_each", "by_site", "in_order")


@dataclass(frozen=True, eq=False)
class PayloadFile:
    """What a JSON file of edits holds: `payloads` by pattern, and the run's `config`."""

    payloads: Mapping[str, Any]
    config: Mapping[str, Any]


def load_payloads(path: str | Path) -> PayloadFile:
    """Read a file of edits. Raises DataError `edits_file_missing`, `edits_json_invalid`
    and the codes of payloads."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "edits_file_missing", f"{path} can't be read: {error}", path=str(path)
        ) from None
    return parse_payloads(text)


def parse_payloads(text: str) -> PayloadFile:
    """Read edits from JSON text; as `load_payloads`."""
    try:
        found = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            "edits_json_invalid", f"the edits are no JSON: {error}"
        ) from None
    top = _object(found, ("edits", "config"), "the file")
    edits = top.get("edits")
    if not isinstance(edits, dict) or not edits:
        _refuse("edits", edits, "an object from names of sites to payloads")
    config = _object(top.get("config", {}), CONFIG, "config")
    return PayloadFile(
        {pattern: _wrapped(value, pattern) for pattern, value in edits.items()},
        _fields(config, "config"),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            "edits_json_invalid", f"the key {twice!r} stands twice", value=twice
        )
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise DataError(
        "edits_json_invalid", f"{name} is no number of JSON, and no edit", value=name
    )


def _refuse(where: str, value: object, expected: str) -> NoReturn:
    raise DataError(
        "edits_json_invalid",
        f"{where} is {str(value)[:60]!r}; {expected} was expected",
        where=where,
        value=str(value)[:60],
        expected=expected,
    )


def _object(value: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    if "use_intervention_tensor_as_basis" in value:
        raise reversed_projection()
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ArgumentError(
            "payload_unknown_key",
            f"{where} has no {', '.join(map(repr, unknown))}; known: {', '.join(known)}",
            value=unknown,
            expected=list(known),
            where=where,
        )
    return value


def _wrapped(value: Any, where: str) -> Any:
    if not isinstance(value, dict) or not set(value) & set(WRAPPERS):
        return _ordered(value, where)
    found = _object(value, WRAPPERS, where)
    if len(found) != 1:
        _refuse(where, sorted(found), "one wrapper")
    ((name, inner),) = found.items()
    match name:
        case "for_all":
            return ForAll(_ordered(inner, where))
        case "one_each":
            return OneEach([_ordered(item, where) for item in _list(inner, where)])
        case "by_site":
            if not isinstance(inner, dict):
                _refuse(where, inner, "an object from names of sites to payloads")
            return BySite({k: _ordered(v, f"{where}: {k}") for k, v in inner.items()})
        case _:
            return _ordered(value, where)


def _ordered(value: Any, where: str) -> Any:
    if isinstance(value, dict) and "in_order" in value:
        found = _object(value, ("in_order",), where)
        return InOrder(
            [_payload(item, where) for item in _list(found["in_order"], where)]
        )
    return _payload(value, where)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        _refuse(where, value, "a list of payloads")
    return value


def _payload(value: Any, where: str) -> Payload:
    if isinstance(value, list):
        raise ArgumentError(
            "payload_list_ambiguous",
            f"{where}: a list of payloads can mean one for each site or several at each; "
            'write {"one_each": […]} or {"in_order": […]}',
            where=where,
        )
    found = _object(value, KEYS, where)
    fields = _fields({k: v for k, v in found.items() if k in CONFIG}, where)
    tensor = found.get("intervention_tensor")
    if "axes" in found:
        axes = found["axes"]
        if not isinstance(axes, list) or not all(isinstance(a, str) for a in axes):
            _refuse(f"{where}: axes", axes, "a list of names")
        tensor = Labelled(tensor, *axes)
    return Payload(tensor, **fields)


def _fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings with the types that JSON leaves open; null is no value."""
    found = dict(values)
    for name in ("mode", "project"):
        if name in found and not isinstance(found[name], str):
            _refuse(f"{where}: {name}", found[name], "a text")
    factor = found.get("scale_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        _refuse(f"{where}: scale_factor", factor, "a number")
    if "heads" in found:
        found["heads"] = _numbers(found["heads"], f"{where}: heads")
    if "over" in found:
        over = found["over"]
        if not isinstance(over, list) or not all(isinstance(a, str) for a in over):
            _refuse(f"{where}: over", over, "a list of names of axes")
        found["over"] = tuple(over)
    if "positions" in found:
        found["positions"] = _positions(found["positions"], f"{where}: positions")
    return found


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or any(type(item) is not int for item in listed):
        _refuse(where, value, "a whole number or a list of them")
    return tuple(listed)


def _positions(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        rows = _object(value, ("per_example",), where).get("per_example")
        if not isinstance(rows, list):
            _refuse(where, rows, "a list with the positions of each example")
        return PerExample([_numbers(row, where) for row in rows])
    return _numbers(value, where)
