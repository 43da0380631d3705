"""Verbs that compute from the site's own value: they keep the autograd graph.

Those that write a value from elsewhere stand in `sourced`, those that confine or join
other verbs in `selections`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from circuitlab.donors import Labelled, Population, as_tensor, realigned, require_rows
from circuitlab.errors import ArgumentError
from circuitlab.verb import Firing, Verb, as_donor, as_number, as_seed


def scale(factor: float) -> Verb:
    """`factor · x`. `scale(0.0)` writes zeros and keeps the graph (zero gradient)."""
    return Verb("scale", lambda x, _, p: x * p["factor"], {"factor": as_number(factor)})


def add(value: Any) -> Verb:
    """`x + value`; `value` broadcasts onto the site and does not enlarge it."""
    params = {"value": as_donor(value, "added value")}
    return Verb(
        "add", lambda x, f, p: x + f.vector(p["value"], x, "added value"), params
    )


def steer(direction: Any, magnitude: float) -> Verb:
    """`x + magnitude · direction`; the direction is used as it is given."""
    found = as_donor(direction, "direction")
    require_direction(found.tensor if isinstance(found, Labelled) else found)
    params = {"direction": found, "magnitude": as_number(magnitude)}
    return Verb("steer", _steer, params)


def _steer(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    return x + params["magnitude"] * firing.vector(params["direction"], x, "direction")


def clamp(low: float | None = None, high: float | None = None) -> Verb:
    """x held between `low` and `high`. Raises ArgumentError `clamp_bounds_missing`."""
    if low is None and high is None:
        raise ArgumentError("clamp_bounds_missing", "give low, high or both")
    params = {"low": low, "high": high}
    return Verb("clamp", lambda x, _, p: x.clamp(p["low"], p["high"]), params)


def add_noise(std: float, *, seed: int) -> Verb:
    """x + Gaussian noise of standard deviation `std`, drawn with `seed`.

    A row's draw depends on the seed, the site and the row's number in the set, not on
    how the set is cut into batches or padded.
    """
    return Verb("add_noise", _add_noise, {"std": as_number(std), "seed": as_seed(seed)})


def _add_noise(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    require_rows(firing.site, "add_noise")
    draws = [g.standard_normal(x.shape[1:]) for g in firing.generators(params["seed"])]
    noise = torch.from_numpy(np.stack(draws)).to(x)
    firing.note("add_noise", seed=params["seed"])
    return x + params["std"] * packed(noise, firing)


def packed(values: Tensor, firing: Firing) -> Tensor:
    """Values laid out from each row's first real token on, moved to where it stands."""
    mask = firing.batch.mask
    if bool(mask.all()):
        return values
    packed = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1)[:, None]
    return realigned(values, firing.site, packed, mask)


def project_onto(
    basis: Any, *, over: tuple[str, ...] = ("feature",), factor: float = 1.0
) -> Verb:
    """`factor` times the part of x in the span of `basis`: one direction, or several on
    a leading axis.

    `over` names the trailing axes that are projected jointly: `("feature",)` treats
    each head alone, `("head", "feature")` all heads as one vector. Computed in float32
    or better with an orthonormal basis. Raises ArgumentError `direction_zero`,
    `basis_rank_deficient`, `basis_shape_invalid`, and `subspace_edit_unsupported` in a
    subspace.
    """
    return _projection("project_onto", basis, over, as_number(factor))


def project_out(basis: Any, *, over: tuple[str, ...] = ("feature",)) -> Verb:
    """x without its part in the span of `basis` (directional ablation); as
    `project_onto`."""
    return _projection("project_out", basis, over, 1.0)


def _projection(name: str, basis: Any, over: tuple[str, ...], factor: float) -> Verb:
    found = as_tensor(basis, "basis")
    if (
        not over
        or over[-1] != "feature"
        or found.ndim not in (len(over), len(over) + 1)
    ):
        raise ArgumentError(
            "basis_shape_invalid",
            f"a basis over {over} has {len(over)} axes, or one more for several "
            f"directions; it has shape {tuple(found.shape)}",
            shape=tuple(found.shape),
            over=over,
        )
    rows = found.reshape(1, -1) if found.ndim == len(over) else found.flatten(1)
    orthonormal(rows)
    shape = tuple(found.shape)
    params = {"basis": rows, "over": over, "shape": shape, "factor": factor}
    return Verb(name, _project, {**params, "out": name == "project_out"})


def _project(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    if firing.subspace is not None:
        raise ArgumentError(
            "subspace_edit_unsupported",
            f"at {firing.site.name} a projection makes no sense on subspace coordinates; "
            "project the site itself",
            site=firing.site.name,
        )
    over, basis = params["over"], params["basis"]
    if firing.site.axes[-len(over) :] != over or basis.shape[-1] != math.prod(
        x.shape[-len(over) :]
    ):
        raise ArgumentError(
            "basis_shape_invalid",
            f"{firing.site.name} has axes {firing.site.axes} of sizes {tuple(x.shape)}; "
            f"a basis of {basis.shape[-1]} numbers over {over} doesn't fit",
            shape=params["shape"],
            over=over,
            site=firing.site.name,
        )
    work = x if x.dtype == torch.float64 else x.to(torch.float32)
    flat = work.flatten(-len(over)) if len(over) > 1 else work
    unit = orthonormal(basis).to(flat)
    part = (flat @ unit.T) @ unit
    found = flat - part if params["out"] else params["factor"] * part
    return found.reshape(x.shape).to(x.dtype)


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis `[k, d]` of the span of `rows` `[k, d]`, in float64.

    Rows are normalised first, so a short direction is as good as a long one. Raises
    ArgumentError `direction_zero`, `basis_rank_deficient`.
    """
    for row in rows:
        require_direction(row)
    unit = rows.double()
    unit = unit / unit.abs().amax(1, keepdim=True)
    unit = unit / unit.norm(dim=1, keepdim=True)
    if len(unit) == 1:
        return unit
    triangle = torch.linalg.qr(unit.T)
    if len(unit) > unit.shape[1] or bool((triangle.R.diagonal().abs() < 1e-8).any()):
        raise ArgumentError(
            "basis_rank_deficient",
            f"the {len(unit)} directions are not independent",
            n=len(unit),
            width=unit.shape[1],
        )
    return triangle.Q.T


def require_direction(direction: Tensor) -> None:
    if not bool((direction != 0).any()):
        raise ArgumentError("direction_zero", "a direction is zero; it points nowhere")


def permute_batch(permutation: Any = None, *, seed: int | None = None) -> Verb:
    """Each example gets the value of another of this pass: `permutation`, or drawn with
    `seed` (then it depends on the batch; the identity can be drawn, and is recorded).

    The examples must have equal lengths. Raises ArgumentError `permutation_invalid`,
    `permutation_source_invalid`, `donor_length_mismatch`.
    """
    if (permutation is None) == (seed is None):
        raise ArgumentError(
            "permutation_source_invalid", "give either a permutation or a seed"
        )
    found = None if permutation is None else tuple(int(i) for i in permutation)
    if found is not None and sorted(found) != list(range(len(found))):
        raise ArgumentError(
            "permutation_invalid", f"{found} is no permutation of its rows", value=found
        )
    params = {"permutation": found, "seed": None if seed is None else as_seed(seed)}
    return Verb("permute_batch", _permute, params)


def _permute(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    require_rows(firing.site, "permute_batch")
    rows = params["permutation"]
    if rows is None:
        generator = np.random.default_rng(params["seed"])
        rows = tuple(int(i) for i in generator.permutation(len(x)))
    if len(rows) != len(x):
        raise ArgumentError(
            "permutation_invalid",
            f"the permutation has {len(rows)} rows and the batch {len(x)}",
            value=rows,
            expected=len(x),
        )
    firing.note("permute_batch", rows=list(rows))
    mask = firing.batch.mask
    moved = Population(x, mask).take(rows)
    return realigned(moved.values, firing.site, moved.mask, mask)


def splice_module(module: nn.Module) -> Verb:
    """`module(x)` on the labelled view: the module must keep the shape."""
    return Verb("splice_module", lambda x, _, p: p["module"](x), {"module": module})


def freeze() -> Verb:
    """x with its gradient stopped: the same value, cut."""
    hint = "leave the site unedited"
    return Verb("freeze", lambda x, _, p: x.detach(), keeps=False, instead=hint)


def self_mean(dim: str | int | tuple[str | int, ...]) -> Verb:
    """The site's own mean along labelled axes, over real tokens; see `mean_ablate`."""
    found = dim if isinstance(dim, tuple) else (dim,)
    return Verb("mean_ablate", _self_mean, {"dim": found})


def _self_mean(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    axes = firing.site.axes
    over = []
    for dim in params["dim"]:
        place = axes.index(dim) if dim in axes else dim
        if not isinstance(place, int) or not -x.ndim <= place < x.ndim:
            raise ArgumentError(
                "site_axis_unknown",
                f"{firing.site.name} has no axis {dim!r}; it has {', '.join(axes)}",
                value=dim,
                expected=axes,
                site=firing.site.name,
            )
        over.append(place % x.ndim)
    weight = torch.ones_like(x)
    if "pos" in axes and axes[0] == "batch" and axes.index("pos") in over:
        shape = [1] * x.ndim
        shape[0], shape[axes.index("pos")] = firing.batch.mask.shape
        weight = weight * firing.batch.mask.reshape(shape)
    total = (x * weight).sum(over, keepdim=True)
    return (total / weight.sum(over, keepdim=True).clamp_min(1)).expand_as(x)


def self_scramble(seed: int) -> Verb:
    """Elements drawn from the row's own, with replacement; see `scramble_elements`."""
    return Verb("scramble_elements", _self_scramble, {"seed": as_seed(seed)})


def _self_scramble(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    require_rows(firing.site, "scramble_elements")
    mixed = []
    real = _real_elements(x, firing)
    for row, generator in enumerate(firing.generators(params["seed"])):
        pool = x[row].reshape(-1)[real[row]]
        index = generator.integers(len(pool), size=x[row].numel())
        picked = torch.from_numpy(index).to(x.device)
        mixed.append(pool[picked].reshape(x.shape[1:]))
    firing.note("scramble_elements", seed=params["seed"])
    return packed(torch.stack(mixed), firing)


def _real_elements(x: Tensor, firing: Firing) -> Tensor:
    """Which elements of each row stand at real tokens, bool `[n, elements]`."""
    axis = firing.site.axis("pos")
    if axis is None:
        return torch.ones(len(x), x[0].numel(), dtype=torch.bool, device=x.device)
    shape = [1] * x.ndim
    shape[0], shape[axis] = firing.batch.mask.shape
    return firing.batch.mask.reshape(shape).expand_as(x).flatten(1)
