"""Verbs that write a value computed elsewhere: they cut the autograd graph.

A source is prompts (their clean ones are run), a batch of tokens, `"corrupted"` or
`"clean"` (those of the prompts being edited), a tensor of site values, or a mapping from
site names to tensors. Sources are run once, before the edited pass, without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import TokenBatch
from circuitlab.donors import (
    Labelled,
    Population,
    as_tensor,
    like,
    mean_over_rows,
    positions_of,
    realigned,
    require_rows,
    taken,
)
from circuitlab.errors import ArgumentError
from circuitlab.prompts import Prompts
from circuitlab.verb import Firing, Verb, as_donor, as_number, as_seed
from circuitlab.verbs import packed, require_direction, self_mean, self_scramble

ZEROS = "keep_grad(scale(0.0))"
FIXED = "keep_grad(compose(scale(0.0), add(value)))"
INTERCHANGE = "Edit(subspace(site, basis), keep_grad(patch_from(source)))"


def zero_ablate() -> Verb:
    """Zeros, cut from the graph; `scale(0.0)` writes the same and keeps it."""
    return Verb("zero_ablate", lambda x, f, _: _zeros(x, f), keeps=False, instead=ZEROS)


def _zeros(x: Tensor, firing: Firing) -> Tensor:
    return torch.zeros_like(x)


def replace_with(value: Any) -> Verb:
    """`value`, broadcast onto the site without enlarging it; the site's graph is cut.

    A tensor that asks for gradients itself gets them (to train what is written).
    """
    params = {"value": as_donor(value, "replacement")}
    return Verb("replace_with", _replace, params, keeps=False, instead=FIXED)


def _replace(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    return firing.point(params["value"], x, "replacement").expand_as(x).clone()


def swap_with(site: str) -> Verb:
    """The value that another site has in this same pass, detached; that site must fire
    earlier and have the same shape. Raises ArgumentError `swap_site_later`."""
    if not isinstance(site, str):
        raise ArgumentError(
            "swap_site_invalid",
            "swap_with takes the name of a site; replace_with takes a value",
            value=type(site).__name__,
        )
    return Verb("swap_with", _swap, {"site": site}, keeps=False, instead=INTERCHANGE)


def _swap(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    found = firing.earlier.get(params["site"])
    if found is None:
        raise ArgumentError(
            "swap_site_later",
            f"{params['site']} has not fired when {firing.site.name} does; name a site "
            "that comes earlier in the pass",
            value=params["site"],
            site=firing.site.name,
        )
    return firing.point(found.detach(), x, "swapped value").expand_as(x).clone()


def patch_from(source: Any = "corrupted", *, rows: Sequence[int] | None = None) -> Verb:
    """The site's value on another run, example by example (interchange); detached.

    `rows` picks the donor row of each example. Raises `donor_length_mismatch` where a
    donor and its example differ in length, `donor_rows_mismatch`.
    """
    found = None if rows is None else tuple(int(row) for row in rows)
    params = {"source": as_source(source), "rows": found}
    return Verb("patch_from", _patch, params, ("source",), False, INTERCHANGE)


def _patch(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    donor = donor_rows(params["source"], params["rows"], x, firing, "patch_from")
    return firing.point(donor.detach(), x, "donor").expand_as(x).clone()


def donor_rows(
    source: Population,
    rows: Sequence[int] | None,
    x: Tensor,
    firing: Firing,
    verb: str,
) -> Tensor:
    """One donor row for each example, its real tokens where the example has them."""
    if rows is not None:
        require_rows(firing.site, verb)
        high = len(source.values)
        bad = [row for row in rows if not 0 <= row < high]
        if bad or len(rows) != len(x):
            raise ArgumentError(
                "donor_rows_mismatch",
                f"{verb} names {len(rows)} donor rows among {high} for {len(x)} examples",
                value=list(rows),
                expected=len(x),
                n_donors=high,
            )
        source = source.take(rows)
        firing.note(verb, donors=list(rows))
    elif source.mask is not None and len(source.values) not in (1, len(x)):
        raise ArgumentError(
            "donor_rows_mismatch",
            f"{verb} has {len(source.values)} donors for {len(x)} examples; choose with "
            "rows=[…]",
            value=len(source.values),
            expected=len(x),
        )
    if source.mask is None:
        return source.values
    return realigned(source.values, firing.site, source.mask, firing.batch.mask)


def resample_rows_from(source: Any = "corrupted", *, seed: int) -> Verb:
    """The value on a row of `source` drawn for each example, with replacement, among
    those of equal length; the donors are recorded.

    An example's donor depends on the seed and its number in the set, so all sites of an
    edit and all batch sizes agree. Raises `resample_donor_missing`.
    """
    params = {"source": as_source(source), "seed": as_seed(seed)}
    return Verb(
        "resample_rows_from", _resample, params, ("source",), False, INTERCHANGE
    )


def _resample(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    require_rows(firing.site, "resample_rows_from")
    source: Population = params["source"]
    wanted = firing.batch.mask.sum(1).tolist()
    lengths = [source.values.shape[1]] * len(source.values)
    if source.mask is not None:
        lengths = source.mask.sum(1).tolist()
    rows = []
    generators = firing.generators(params["seed"], per_site=False)
    for row, (length, generator) in enumerate(zip(wanted, generators, strict=True)):
        fitting = [i for i, found in enumerate(lengths) if found == length]
        if source.mask is None:
            fitting = list(range(len(lengths)))
        if not fitting:
            raise ArgumentError(
                "resample_donor_missing",
                f"example {row} has {length} tokens and no donor has",
                row=row,
                length=length,
            )
        rows.append(fitting[int(generator.integers(len(fitting)))])
    donor = donor_rows(source, rows, x, firing, "resample_rows_from")
    return firing.point(donor.detach(), x, "donor").expand_as(x).clone()


def mean_ablate(
    source: Any = None, *, positional: bool = False, dim: Any = None
) -> Verb:
    """The mean of the site: the field's mean ablation with `source`, or its own.

    - `mean_ablate(source)`: the mean over a reference set's real tokens, pooled over
      positions, or per position with `positional=True` (the p-th real token of every
      prompt). It is a constant: the graph is cut.
    - `mean_ablate(dim="pos")`: the mean of the site's own value along labelled axes of
      this pass. It is a function of the site: the graph is kept.

    A bare `mean_ablate()` is refused (`mean_source_needed`). Other codes:
    `mean_positions_needed`, `mean_positions_missing`, `site_axis_unknown`.
    """
    if (source is None) == (dim is None):
        raise ArgumentError(
            "mean_source_needed",
            "say of what the mean is: mean_ablate(source) for a reference set, or "
            "mean_ablate(dim='pos') for the site's own values",
        )
    if source is None:
        return self_mean(dim)
    params = {"source": as_source(source), "positional": bool(positional)}
    hint = "keep_grad(mean_ablate(dim='pos'))"
    return Verb("mean_ablate", _mean, params, ("source",), False, hint)


def _mean(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    positional = params["positional"]
    mean = mean_over_rows(params["source"], firing.site, positional).detach()
    if positional:
        mean = _at_positions(mean.to(x.device), firing)
    return firing.point(mean, x, "mean").expand_as(x).clone()


def _at_positions(mean: Tensor, firing: Firing) -> Tensor:
    """A mean per real token, laid out as the batch's tokens stand."""
    place = positions_of(firing.batch.mask)
    for label in ("pos", "query", "key"):
        axis = firing.site.axis(label)
        if axis is None:
            continue
        longest = int(place.max()) + 1
        if longest > mean.shape[axis]:
            raise ArgumentError(
                "mean_positions_missing",
                f"the reference has no prompt of {longest} tokens, so there is no mean "
                f"at the last positions of {firing.site.name}",
                longest=longest,
                expected=mean.shape[axis],
                site=firing.site.name,
            )
        mean = taken(mean, axis, place.clamp_min(0).clamp_max(mean.shape[axis] - 1))
    return mean


def scramble_elements(source: Any = None, *, seed: int) -> Verb:
    """Elements drawn with replacement: from the row's own (the graph is kept) or, with
    `source`, from all of a reference set's (cut). A control: it keeps only the
    distribution of single numbers."""
    if source is None:
        return self_scramble(seed)
    params = {"source": as_source(source), "seed": as_seed(seed)}
    hint = "keep_grad(scramble_elements(seed=…))"
    return Verb("scramble_elements", _scramble, params, ("source",), False, hint)


def _scramble(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    require_rows(firing.site, "scramble_elements")
    source: Population = params["source"]
    axis = firing.site.axis("pos")
    values = source.values
    if source.mask is not None and axis == 1:
        values = values[source.mask]
    if firing.subspace is not None:
        values = firing.subspace.of(like(values, x, "source"))
    pool = values.detach().reshape(-1)
    draws = []
    for row, generator in enumerate(firing.generators(params["seed"])):
        index = torch.from_numpy(generator.integers(len(pool), size=x[row].numel()))
        draws.append(pool[index.to(pool.device)].reshape(x.shape[1:]))
    firing.note("scramble_elements", seed=params["seed"])
    return packed(like(torch.stack(draws), x, "source"), firing)


def interpolate(source: Any = "corrupted", alpha: Any = 0.5) -> Verb:
    """`x + alpha · (donor − x)`: 0 leaves the site, 1 patches it.

    `alpha` is a number, or a tensor that broadcasts onto the site (a soft mask; one that
    asks for gradients gets them). The graph is kept with the factor 1 − alpha.
    """
    found = as_number(alpha) if isinstance(alpha, int | float) else None
    params = {
        "source": as_source(source),
        "alpha": as_donor(alpha, "alpha") if found is None else found,
    }
    return Verb("interpolate", _interpolate, params, ("source",))


def _interpolate(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    donor = donor_rows(params["source"], None, x, firing, "interpolate")
    alpha = params["alpha"]
    if not isinstance(alpha, float):
        if firing.subspace is not None:
            raise _unsupported(firing, "interpolate with a tensor alpha")
        alpha = firing.point(alpha, x, "alpha")
    return x + alpha * (firing.point(donor.detach(), x, "donor") - x)


def set_direction_mean(direction: Any, mean: Any) -> Verb:
    """x with its coefficient along a direction set to a mean, the rest left as it is.

    u is the unit direction; the result is `x − (x·u)u + c·u`, with c a number or, from a
    source, the mean of x·u over its real tokens. The graph is kept through the
    orthogonal part. Raises ArgumentError `direction_zero`, `direction_shape_invalid`.
    """
    found = as_tensor(direction, "direction")
    require_direction(found)
    if found.ndim != 1:
        raise ArgumentError(
            "direction_shape_invalid",
            f"the direction has shape {tuple(found.shape)}; give one vector [feature]",
            shape=tuple(found.shape),
        )
    if isinstance(mean, int | float):
        params = {"direction": found, "mean": as_number(mean), "source": None}
    else:
        params = {"direction": found, "mean": None, "source": as_source(mean)}
    return Verb("set_direction_mean", _direction_mean, params, ("source",))


def _direction_mean(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    along = firing.vector(params["direction"], x, "direction")
    norm = along.norm()
    if float(norm.detach()) == 0.0:
        raise ArgumentError(
            "direction_zero",
            f"at {firing.site.name} the direction has no part in the subspace",
            site=firing.site.name,
        )
    unit = along / norm
    mean = params["mean"]
    if mean is None:
        pooled = mean_over_rows(params["source"], firing.site, False).detach()
        mean = (firing.point(pooled, x, "mean") * unit).sum(-1, keepdim=True)
    return x - (x * unit).sum(-1, keepdim=True) * unit + mean * unit


def set_affine_coordinates(weight: Any, bias: Any = None) -> Verb:
    """In a subspace of k directions: new coordinates `W·x + b` of the site's value x.

    `weight` `[k, feature]`, `bias` `[k]`. They are a function of the site, so the graph
    is kept. Elsewhere refused with `affine_source_needs_subspace`.
    """
    params = {
        "weight": as_tensor(weight, "weight"),
        "bias": None if bias is None else as_tensor(bias, "bias"),
    }
    return Verb("set_affine_coordinates", _affine, params)


def _affine(x: Tensor, firing: Firing, params: Mapping[str, Any]) -> Tensor:
    if firing.subspace is None or firing.whole is None:
        raise ArgumentError(
            "affine_source_needs_subspace",
            f"at {firing.site.name}: set_affine_coordinates sets coordinates, so it needs "
            "a subspace: Edit(subspace(site, basis), set_affine_coordinates(W, b))",
            site=firing.site.name,
        )
    weight, bias = params["weight"], params["bias"]
    expected = (x.shape[-1], firing.whole.shape[-1])
    if tuple(weight.shape) != expected or (
        bias is not None and bias.shape != (expected[0],)
    ):
        raise ArgumentError(
            "affine_shape_invalid",
            f"the weight has shape {tuple(weight.shape)}; {expected} was expected, and "
            f"({expected[0]},) of the bias",
            shape=tuple(weight.shape),
            expected=expected,
        )
    found = firing.whole @ like(weight, x, "weight").T
    return found if bias is None else found + like(bias, x, "bias")


def _unsupported(firing: Firing, what: str) -> ArgumentError:
    return ArgumentError(
        "subspace_edit_unsupported",
        f"at {firing.site.name}: {what} has no meaning on subspace coordinates",
        site=firing.site.name,
    )


def as_source(source: Any) -> Any:
    """A source, checked. Raises ArgumentError `source_invalid` and the donors' codes."""
    match source:
        case (
            "corrupted" | "clean" | TokenBatch() | Prompts() | Population() | Labelled()
        ):
            return source
        case Tensor() | np.ndarray():
            return as_tensor(source, "source")
        case Mapping():
            return {
                str(name): as_donor(value, "source") for name, value in source.items()
            }
    raise ArgumentError(
        "source_invalid",
        "a source is 'corrupted', 'clean', Prompts, a TokenBatch, a tensor of site values "
        f"or a mapping from site names to tensors, not {source!r}",
        value=str(source) if isinstance(source, str) else type(source).__name__,
    )
