"""Verbs that confine or join other verbs: positions, heads, units, subspaces, order.

A selection edits only what it selects, so the rest of the site keeps its value and its
graph. `keep_grad` demands of an edit that what it writes keeps the graph too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuitlab.donors import Labelled, as_tensor, laid
from circuitlab.errors import ArgumentError
from circuitlab.notices import warn_once
from circuitlab.sourced import FIXED, INTERCHANGE, ZEROS
from circuitlab.verb import Coordinates, Firing, Verb, as_verb

FRONTIER = "keep_grad_replay_frontier"
SELECTIONS = ("at_positions", "at_heads", "units")


@dataclass(frozen=True)
class PerExample:
    """Positions that differ by example: one, or a tuple of them, for each row.

    Raises ArgumentError `positions_invalid`.
    """

    rows: tuple[tuple[int, ...], ...]

    def __init__(self, rows: Sequence[int | Sequence[int]]):
        listed = rows if isinstance(rows, Iterable) else [rows]
        found = [tuple(row) if isinstance(row, Iterable) else (row,) for row in listed]
        if listed is not rows or any(type(p) is not int for row in found for p in row):
            raise _bad_positions(rows)
        object.__setattr__(self, "rows", tuple(found))


@dataclass(frozen=True)
class Door:
    """Confines any edit: call it with a verb, or put it in an `Edit` in a site's place."""

    site: str | None
    confine: Callable[[Verb], Verb]

    def __call__(self, edit: Any) -> Verb:
        return self.confine(as_verb(edit))


# --- order ---


def compose(*edits: Any) -> Verb:
    """The edits one after the other, each on what the one before wrote.

    Raises ArgumentError `compose_empty`.
    """
    if not edits:
        raise ArgumentError("compose_empty", "compose needs at least one edit")
    verbs = tuple(as_verb(edit) for edit in edits)
    keeps = all(verb.keeps for verb in verbs)
    hint = next((verb.instead for verb in verbs if not verb.keeps), "")
    return Verb("compose", _compose, {"edits": verbs}, keeps=keeps, instead=hint)


def _compose(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    for verb in params["edits"]:
        x = verb(x, firing)
    return x


# --- selections ---


def at_positions(positions: Any, edit: Any, *, axis: str | None = None) -> Verb:
    """The edit at some positions only.

    `positions`: `"all"`, `"last"` (each row's last real token), a number, a list of
    numbers (the same for every row), or `PerExample([…])`. Numbers count a row's real
    tokens, negative ones from its end, so padding on either side changes nothing. At
    attention patterns they are queries, or keys with `axis="key"`. Raises ArgumentError
    `positions_invalid`, `position_out_of_range` naming the row, `site_axis_unknown`.
    """
    verb = as_verb(edit)
    params = {"positions": _as_positions(positions), "axis": axis, "edit": verb}
    return Verb("at_positions", _at_positions, params, (), verb.keeps, verb.instead)


def _as_positions(positions: Any) -> Any:
    match positions:
        case "all" | "last" | PerExample():
            return positions
        case bool():
            pass
        case int():
            return (positions,)
        case list() | tuple() | range():
            found = tuple(positions)
            if found and all(type(p) is int for p in found):
                return found
    raise _bad_positions(positions)


def _bad_positions(positions: Any) -> ArgumentError:
    return ArgumentError(
        "positions_invalid",
        "positions are 'all', 'last', a number, a list of numbers, or PerExample([…]), "
        f"not {positions!r}",
        value=str(positions),
    )


def _at_positions(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    new = params["edit"](x, firing)
    if params["positions"] == "all":
        return new
    site, label = firing.site, params["axis"]
    if label is None:
        label = "pos" if "pos" in site.axes else "query"
    axis = site.axis(label)
    if axis is None or label not in ("pos", "query", "key"):
        raise _no_axis(site.name, label, site.axes)
    rows = resolve_positions(params["positions"], firing)
    firing.note("at_positions", axis=label, positions=[list(row) for row in rows])
    places = _places(rows, firing)
    if site.axes[0] != "batch":
        if not bool((places == places[:1]).all()):
            raise _no_axis(site.name, "batch", site.axes)
        places = places[:1]
    shape = [1] * x.ndim
    shape[0], shape[axis] = places.shape
    return torch.where(places.reshape(shape), new, x)


def _no_axis(site: str, label: str, axes: tuple[str, ...]) -> ArgumentError:
    return ArgumentError(
        "site_axis_unknown",
        f"{site} has no axis {label!r}; it has {', '.join(axes) or 'none'}",
        value=label,
        expected=axes,
        site=site,
    )


def resolve_positions(positions: Any, firing: Firing) -> list[tuple[int, ...]]:
    """The positions of each row, from 0, among its real tokens."""
    lengths = firing.batch.mask.sum(1).tolist()
    if positions == "last":
        return [(length - 1,) for length in lengths]
    if isinstance(positions, PerExample):
        rows = list(positions.rows)[firing.offset : firing.offset + len(lengths)]
        if len(rows) != len(lengths):
            raise ArgumentError(
                "positions_invalid",
                f"PerExample names {len(positions.rows)} rows; the prompts are "
                f"{firing.offset + len(lengths)} or more",
                value=len(positions.rows),
                expected=firing.offset + len(lengths),
            )
    else:
        rows = [positions] * len(lengths)
    found = []
    for row, (wanted, length) in enumerate(zip(rows, lengths, strict=True)):
        resolved = tuple(p if p >= 0 else length + p for p in wanted)
        if any(not 0 <= p < length for p in resolved):
            raise ArgumentError(
                "position_out_of_range",
                f"example {firing.offset + row} has {length} tokens; positions {wanted} "
                "lie outside",
                row=firing.offset + row,
                value=list(wanted),
                length=length,
            )
        found.append(resolved)
    return found


def _places(rows: list[tuple[int, ...]], firing: Firing) -> Tensor:
    """Which places of the padded batch the positions are, bool `[n, pos]`."""
    mask = firing.batch.mask
    start = mask.long().argmax(1).tolist()
    places = torch.zeros_like(mask)
    for row, wanted in enumerate(rows):
        places[row, [start[row] + p for p in wanted]] = True
    return places


def at_heads(heads: int | Sequence[int], edit: Any) -> Verb:
    """The edit at some heads only, negative numbers from the end; at keys and values of
    grouped-query attention these are the KV heads.

    Raises ArgumentError `heads_invalid`, `head_out_of_range`, `site_has_no_heads`.
    """
    found = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    if not found or any(type(head) is not int for head in found):
        raise ArgumentError(
            "heads_invalid",
            f"heads are a number or a list of numbers, not {heads!r}",
            value=str(heads),
        )
    verb = as_verb(edit)
    params = {"heads": found, "edit": verb}
    return Verb("at_heads", _at_heads, params, (), verb.keeps, verb.instead)


def _at_heads(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    site = firing.site
    axis = site.axis("head")
    if axis is None:
        raise ArgumentError(
            "site_has_no_heads",
            f"{site.name} has axes {', '.join(site.axes)} and no heads",
            site=site.name,
            axes=site.axes,
        )
    count = x.shape[axis]
    bad = [head for head in params["heads"] if not -count <= head < count]
    if bad:
        raise ArgumentError(
            "head_out_of_range",
            f"{site.name} has {count} heads; {bad} lie outside",
            value=bad,
            n_heads=count,
            site=site.name,
        )
    chosen = torch.zeros(count, dtype=torch.bool, device=x.device)
    chosen[list(params["heads"])] = True
    shape = [1] * x.ndim
    shape[axis] = count
    return torch.where(chosen.reshape(shape), params["edit"](x, firing), x)


def units(mask: Any, *, site: str | None = None) -> Door:
    """A door to the elements of a site where a bool mask is true.

    The mask broadcasts onto the site (`Labelled` names its axes) and does not enlarge
    it. Raises ArgumentError `mask_not_bool`, `selection_empty`, `donor_shape_invalid`.
    """
    found = mask.tensor if isinstance(mask, Labelled) else torch.as_tensor(mask)
    if found.dtype != torch.bool:
        raise ArgumentError(
            "mask_not_bool",
            f"units takes a bool mask, not {found.dtype}; for gates between 0 and 1 use "
            "interpolate(source, alpha)",
            value=str(found.dtype),
        )
    if not bool(found.any()):
        raise ArgumentError("selection_empty", "the mask selects nothing", n=0)
    kept = mask if isinstance(mask, Labelled) else found.detach().clone()

    def confine(verb: Verb) -> Verb:
        params = {"mask": kept, "edit": verb}
        return Verb("units", _units, params, (), verb.keeps, verb.instead)

    return Door(site, confine)


def _units(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    if firing.subspace is not None:
        raise _unsupported(firing, "units")
    chosen = laid(params["mask"], x, firing.site, "mask") > 0.5
    return torch.where(chosen, params["edit"](x, firing), x)


def subspace(site: str | None, basis: Any, *, origin: Any = None) -> Door:
    """A door to a site's coordinates in the span of `basis` `[k, feature]` (or one
    direction `[feature]`), counted from `origin` `[feature]`.

    Verbs that compute from the site act on the coordinates; those that write a value
    write its component; tensors are always given in the site's own space. What is
    orthogonal to the span keeps its value and its graph, so `patch_from` here is the
    interchange that trains. Projections are refused (`subspace_edit_unsupported`);
    `set_affine_coordinates` works only here. Other codes: `direction_zero`,
    `basis_rank_deficient`, `basis_shape_invalid`, `origin_shape_invalid`.
    """
    from circuitlab.verbs import orthonormal

    rows = as_tensor(basis, "basis")
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise ArgumentError(
            "basis_shape_invalid",
            f"a basis is [k, feature], not {tuple(rows.shape)}",
            shape=tuple(rows.shape),
        )
    orthonormal(rows.detach())
    start = None if origin is None else as_tensor(origin, "origin")
    if start is not None and start.shape != rows.shape[1:]:
        raise ArgumentError(
            "origin_shape_invalid",
            f"the origin has shape {tuple(start.shape)}, the basis {tuple(rows.shape)}",
            shape=tuple(start.shape),
            expected=tuple(rows.shape[1:]),
        )

    def confine(verb: Verb) -> Verb:
        bare = _without_keep(verb)
        if bare is not verb:
            return keep_grad(confine(bare))
        params = {"basis": rows, "origin": start, "edit": verb}
        return Verb("subspace", _in_subspace, params)

    return Door(site, confine)


def _without_keep(verb: Verb) -> Verb:
    """The verb unchecked: in a subspace what counts is the whole value it gives."""
    if verb.name == "keep_grad":
        return verb.parts[0]
    if verb.name not in SELECTIONS:
        return verb
    inner = _without_keep(verb.parts[0])
    return verb if inner is verb.parts[0] else verb.with_parts((inner,))


def _in_subspace(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    if firing.subspace is not None:
        raise _unsupported(firing, "a subspace of a subspace")
    basis = params["basis"]
    if firing.site.axes[-1:] != ("feature",) or basis.shape[1] != x.shape[-1]:
        raise ArgumentError(
            "basis_shape_invalid",
            f"{firing.site.name} has axes {firing.site.axes} of sizes {tuple(x.shape)}; "
            f"a basis of shape {tuple(basis.shape)} doesn't fit",
            shape=tuple(basis.shape),
            expected=tuple(x.shape[-1:]),
            site=firing.site.name,
        )
    space = Coordinates(basis, torch.linalg.pinv(basis.double()), params["origin"])
    old = space.of(x)
    new = params["edit"](old, replace(firing, subspace=space, whole=x))
    if not isinstance(new, Tensor) or new.shape != old.shape:
        raise ArgumentError(
            "edit_result_invalid",
            f"at {firing.site.name} the edit of {tuple(old.shape)} coordinates gave "
            f"{tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__}",
            expected=tuple(old.shape),
            site=firing.site.name,
        )
    return x + space.lifted(new - old)


def _unsupported(firing: Firing, what: str) -> ArgumentError:
    return ArgumentError(
        "subspace_edit_unsupported",
        f"at {firing.site.name}: {what} has no meaning on subspace coordinates",
        site=firing.site.name,
    )


# --- the gradient contract ---


def keep_grad(edit: Any) -> Verb:
    """The same edit, checked when it fires: what it writes must keep the graph.

    Raises ArgumentError `edit_detached_from_graph` with the site, a spelling that keeps
    the graph, and a reason: `edit_cuts` (what is written is no function of the site),
    `site_has_no_graph`, or `grad_disabled`. Inside a selection the selected elements
    are what is checked. Under `resume` an edit that keeps the graph passes and warns
    once (`keep_grad_replay_frontier`): gradients stop at the resumed block's input.
    """
    verb = as_verb(edit)
    if verb.name == "keep_grad":
        return verb
    if verb.name in SELECTIONS:
        return verb.with_parts((keep_grad(verb.parts[0]),))
    return Verb("keep_grad", _keep, {"edit": verb}, (), verb.keeps, verb.instead)


def _keep(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    verb: Verb = params["edit"]
    if not torch.is_grad_enabled():
        raise _detached(firing, verb, "grad_disabled", "gradients are disabled here")
    if not x.requires_grad:
        text = "the site's value has no graph to keep (nothing before it asks for gradients)"
        raise _detached(firing, verb, "site_has_no_graph", text)
    new = verb(x, firing)
    if not _reaches(new, x):
        text = "it writes a value that is no function of the site, which cuts the graph"
        raise _detached(firing, verb, "edit_cuts", text)
    if firing.frontier:
        warn_once(
            FRONTIER,
            f"keep_grad at {firing.site.name}: the edit stays connected inside the "
            "resumed computation, but parameters before the resumed block get no "
            "gradient; run(model, prompts, edits) or bind(model, edits) reaches them",
        )
    return new


def _reaches(new: Tensor, x: Tensor) -> bool:
    """Whether a written value depends on the site's, by autograd itself."""
    if not new.requires_grad:
        return False
    if new is x:
        return True
    (found,) = torch.autograd.grad(
        new, x, torch.zeros_like(new), retain_graph=True, allow_unused=True
    )
    return found is not None


def _detached(firing: Firing, verb: Verb, reason: str, text: str) -> ArgumentError:
    spelled = verb.instead or f"{ZEROS}, {FIXED} or {INTERCHANGE}"
    remedy = f"; a spelling that keeps it: {spelled}"
    if reason == "grad_disabled":
        remedy = "; enable gradients (grad=True, outside torch.no_grad())"
    elif reason == "site_has_no_graph":
        remedy = (
            "; let a parameter before the site ask for gradients, or drop keep_grad"
        )
    return ArgumentError(
        "edit_detached_from_graph",
        f"{verb.name} at {firing.site.name}: {text}{remedy}",
        reason=reason,
        site=firing.site.name,
        verb=verb.name,
        spelling=spelled,
    )
