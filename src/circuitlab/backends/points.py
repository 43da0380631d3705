"""The named tensors of a bridge: its hook points, grouped by identity.

A bridge knows one hook point by several names. What names the same tensor is a fact
about objects, so it is read from them and never from a table of synonyms.
"""

from __future__ import annotations

from typing import Any

from circuitlab.backends import Point

# Hook points that fire only after a setter was called: the suffix, and the setter's flag.
_GATES = (
    ("attn.hook_result", "use_attn_result"),
    ("hook_q_input", "use_split_qkv_input"),
    ("hook_k_input", "use_split_qkv_input"),
    ("hook_v_input", "use_split_qkv_input"),
    ("hook_mlp_in", "use_hook_mlp_in"),
    ("hook_attn_in", "use_attn_in"),
)


def hook_points(bridge: Any) -> tuple[Point, ...]:
    """Every hook point of a bridge, once, in the bridge's own order."""
    groups: dict[int, list[str]] = {}
    points: dict[int, Any] = {}
    for name, point in bridge.hook_dict.items():
        groups.setdefault(id(point), []).append(name)
        points[id(point)] = point
    return tuple(_point(points[key], names, bridge) for key, names in groups.items())


def flags(bridge: Any) -> tuple[bool, ...]:
    """The state of every flag that decides which hook points fire."""
    names = sorted({flag for _, flag in _GATES})
    return tuple(bool(getattr(bridge.cfg, name, False)) for name in names)


def _point(point: Any, names: list[str], bridge: Any) -> Point:
    name = point.name if point.name in names else names[0]
    spellings = (name, *(other for other in names if other != name))
    flag = next((flag for suffix, flag in _GATES if name.endswith(suffix)), None)
    closed = flag is not None and not getattr(bridge.cfg, flag, False)
    gate = f"set_{flag}(True)" if closed else None
    return Point(name, spellings, gate, _inside_bare_norm(bridge, name))


def _inside_bare_norm(bridge: Any, name: str) -> bool:
    """Whether a norm without a weight would fail to rebuild its output from an edit."""
    path, _, last = name.rpartition(".")
    if last not in ("hook_scale", "hook_normalized"):
        return False
    found: Any = bridge
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return getattr(found.original_component, "weight", None) is None
