"""Donors: values from elsewhere, checked and laid onto the axes of a site.

A donor never enlarges what it is written to, is never aliased, and is never cast in
silence to something that it isn't. Where prompts are padded, a row's real tokens are
what is aligned: the first real token of a donor row goes to the first real token of the
edited one, wherever the padding stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from circuitlab.errors import ArgumentError
from circuitlab.site_info import SiteInfo

POSITIONAL = ("pos", "query", "key")


@dataclass(frozen=True, eq=False)
class Labelled:
    """A tensor whose axes are named, so that nothing is guessed from their number:
    `Labelled(value, "batch", "feature")` is one vector for each example."""

    tensor: Tensor
    axes: tuple[str, ...]

    def __init__(self, tensor: Any, *axes: str):
        is_mask = isinstance(tensor, Tensor) and tensor.dtype == torch.bool
        found = tensor.clone() if is_mask else as_tensor(tensor, "donor")
        if found.ndim != len(axes) or len(set(axes)) != len(axes):
            raise ArgumentError(
                "donor_axes_invalid",
                f"{found.ndim} different axis names are needed for shape "
                f"{tuple(found.shape)}, not {axes}",
                value=axes,
                shape=tuple(found.shape),
            )
        object.__setattr__(self, "tensor", found)
        object.__setattr__(self, "axes", axes)


@dataclass(frozen=True, eq=False)
class Population:
    """Values of one site on `n` rows: the labelled view, and which tokens are real.

    `mask` bool `[n, pos]`; None: every position is real, or there are none.
    """

    values: Tensor
    mask: Tensor | None = None

    def take(self, rows: Sequence[int]) -> Population:
        index = torch.as_tensor(list(rows), device=self.values.device)
        mask = None if self.mask is None else self.mask[index]
        return Population(self.values[index], mask)


def as_tensor(value: Any, what: str) -> Tensor:
    """A real, finite, floating tensor from a tensor, an array, a number or a list.

    Raises ArgumentError `donor_complex`, `donor_not_floating`, `donor_not_finite`,
    `donor_unreadable`.
    """
    if isinstance(value, Tensor):
        found = value
    elif isinstance(value, np.ndarray):
        found = torch.from_numpy(np.ascontiguousarray(value))
    else:
        found = _from_numbers(value, what)
    if found.is_complex():
        _refuse("donor_complex", f"the {what} is complex; give real numbers", found)
    if not found.is_floating_point():
        text = (
            f"the {what} holds {found.dtype}, not floating point; convert it yourself"
        )
        _refuse("donor_not_floating", text, found)
    if not bool(torch.isfinite(found).all()):
        _refuse("donor_not_finite", f"the {what} holds NaN or infinity", found)
    return found if found.requires_grad else found.detach().clone()


def _from_numbers(value: Any, what: str) -> Tensor:
    try:
        if isinstance(value, bool):
            raise TypeError("a bool")
        return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            "donor_unreadable",
            f"the {what} must be a tensor, an array, a number or nested lists of numbers "
            f"of equal length: {error}",
            value=type(value).__name__,
        ) from None


def _refuse(code: str, text: str, found: Tensor) -> NoReturn:
    raise ArgumentError(code, text, dtype=str(found.dtype), shape=tuple(found.shape))


def like(donor: Tensor, value: Tensor, what: str) -> Tensor:
    """A donor on the value's device and in its precision.

    Raises ArgumentError `donor_overflows` where the cast leaves the finite numbers.
    """
    cast = donor.to(value.device, value.dtype)
    if cast.dtype != donor.dtype and not bool(torch.isfinite(cast).all()):
        raise ArgumentError(
            "donor_overflows",
            f"the {what} does not fit into {value.dtype}",
            dtype=str(donor.dtype),
            expected=str(value.dtype),
        )
    return cast


def laid(donor: Tensor | Labelled, value: Tensor, site: SiteInfo, what: str) -> Tensor:
    """A donor that broadcasts onto a site's labelled view and does not enlarge it.

    Unlabelled axes are laid from the right. Raises ArgumentError `donor_shape_invalid`,
    `donor_axes_invalid`.
    """
    if isinstance(donor, Labelled):
        found = by_labels(donor, site)
    else:
        found = donor
        width = value.shape[-1]
        merged = site.layout == "merged_heads" and found.ndim > 0
        if merged and found.shape[-1] == width * (site.n_heads or 0) != width:
            found = found.unflatten(-1, (site.n_heads or 1, width))
    pairs = zip(reversed(found.shape), reversed(value.shape), strict=False)
    fits = found.ndim <= value.ndim and all(a in (1, b) for a, b in pairs)
    if not fits:
        raise ArgumentError(
            "donor_shape_invalid",
            f"at {site.name} the {what} has shape {tuple(found.shape)}, which can't be "
            f"laid onto {', '.join(site.axes)} of sizes {tuple(value.shape)} without "
            "enlarging it; name its axes with Labelled(value, …) if they are others",
            shape=tuple(found.shape),
            expected=tuple(value.shape),
            axes=site.axes,
            site=site.name,
        )
    return like(found, value, what)


def by_labels(donor: Labelled, site: SiteInfo) -> Tensor:
    unknown = [axis for axis in donor.axes if axis not in site.axes]
    if unknown:
        raise ArgumentError(
            "donor_axes_invalid",
            f"{site.name} has no axis {', '.join(unknown)}; it has {', '.join(site.axes)}",
            value=donor.axes,
            expected=site.axes,
            site=site.name,
        )
    present = [axis for axis in site.axes if axis in donor.axes]
    found = donor.tensor.permute([donor.axes.index(axis) for axis in present])
    for place, axis in enumerate(site.axes):
        if axis not in donor.axes:
            found = found.unsqueeze(place)
    return found


# --- rows and positions ---


def positions_of(mask: Tensor) -> Tensor:
    """Each place's number among its row's real tokens, −1 at padding; int64 [n, pos]."""
    return (mask.long().cumsum(1) - 1).masked_fill(~mask, -1)


def require_rows(site: SiteInfo, verb: str) -> None:
    """Refuse with `site_not_per_example` a site that all examples share."""
    if not site.axes or site.axes[0] != "batch":
        raise ArgumentError(
            "site_not_per_example",
            f"{verb} needs a value for each example, and {site.name} has axes "
            f"{', '.join(site.axes) or '(none)'}",
            site=site.name,
            axes=site.axes,
        )


def realigned(
    values: Tensor, site: SiteInfo, given: Tensor | None, wanted: Tensor
) -> Tensor:
    """Move each row's real tokens from where the mask `given` has them to where `wanted`
    has them, along every positional axis.

    Raises ArgumentError `donor_length_mismatch` naming the row.
    """
    labels = [axis for axis in site.axes if axis in POSITIONAL]
    if given is None or not labels or torch.equal(given, wanted):
        return _same_length(values, site, labels, wanted)
    lengths, expected = given.sum(1), wanted.sum(1)
    differs = (lengths != expected).nonzero()
    if len(differs):
        row = int(differs[0])
        raise ArgumentError(
            "donor_length_mismatch",
            f"at {site.name} the donor of example {row} has {int(lengths[row])} tokens "
            f"and the example {int(expected[row])}; give a donor of equal length",
            row=row,
            length=int(lengths[row]),
            expected=int(expected[row]),
            site=site.name,
        )
    start = given.long().argmax(1, keepdim=True)
    source = (positions_of(wanted).clamp_min(0) + start).clamp_max(given.shape[1] - 1)
    for label in labels:
        values = taken(values, site.axes.index(label), source)
    return values


def _same_length(
    values: Tensor, site: SiteInfo, labels: list[str], wanted: Tensor
) -> Tensor:
    for label in labels:
        size = values.shape[site.axes.index(label)]
        if size not in (1, wanted.shape[1]):
            raise ArgumentError(
                "donor_length_mismatch",
                f"at {site.name} the donor has {size} places along {label} and the batch "
                f"{wanted.shape[1]}",
                length=size,
                expected=wanted.shape[1],
                site=site.name,
            )
    return values


def taken(values: Tensor, axis: int, index: Tensor) -> Tensor:
    """Pick places along an axis, row by row: `index` int64 `[n, places]`."""
    shape = [1] * values.ndim
    shape[0], shape[axis] = index.shape
    return values.take_along_dim(index.reshape(shape), dim=axis)


def mean_over_rows(population: Population, site: SiteInfo, positional: bool) -> Tensor:
    """The mean over rows and real tokens, or over rows at each position.

    Shapes: as the site's view with a batch axis of 1, and positional axes of 1 unless
    `positional`; then row p is the mean at each row's p-th real token. Accumulated in
    float64. Raises ArgumentError `mean_positions_needed`.
    """
    labels = [axis for axis in site.axes if axis in POSITIONAL]
    if len(labels) > 1 and not positional:
        raise ArgumentError(
            "mean_positions_needed",
            f"at {site.name} a mean over queries and keys of different prompts is no "
            "attention pattern; use positional=True",
            site=site.name,
        )
    values, mask = population.values, population.mask
    if mask is not None and labels:
        packed = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1)[:, None]
        values = realigned(values, site, mask, packed)
        mask = packed
    total = values.double()
    weight = torch.ones_like(total[..., :1])
    for label in labels if mask is not None else ():
        assert mask is not None
        shape = [1] * total.ndim
        shape[0], shape[site.axes.index(label)] = mask.shape
        weight = weight * mask.reshape(shape)
    over = [0] if positional else [0, *(site.axes.index(label) for label in labels)]
    summed = (total * weight).sum(over, keepdim=True)
    return (summed / weight.sum(over, keepdim=True).clamp_min(1)).to(values.dtype)
