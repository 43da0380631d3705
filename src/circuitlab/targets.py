"""Targets of a read: what is differentiated, resolved to cotangents in the graph.

A seed names a site and a direction there, and needs no value, only the site's address.
An expression is a scalar computed from a trace's live payloads. Targets that start at
the same address share a cone, and only those may share a backward: in a mixed batch a
site upstream of one target alone would get a zero where nothing flows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from circuitlab.backends import Site
from circuitlab.errors import ArgumentError, ReadError
from circuitlab.gradients import Address, address_of
from circuitlab.metrics import Metric
from circuitlab.trace import LOGITS, SiteRecord, Trace

Cotangent = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Seed:
    """A direction at a site; make one with `seed`."""

    site: str | Site
    index: tuple[Any, ...] | None = None
    cotangent: Tensor | None = None

    @property
    def per_example(self) -> bool:
        """Whether it stands for one target in every example."""
        return self.index is not None and self.index[:1] == (slice(None),)

    def __repr__(self) -> str:
        where = self.site if isinstance(self.site, str) else self.site.path
        if self.index is not None:
            spelled = ", ".join(_spell(i) for i in self.index)
            return f"seed({where!r}, index=({spelled}))"
        assert self.cotangent is not None
        return f"seed({where!r}, cotangent={tuple(self.cotangent.shape)})"


def seed(
    site: str | Site, *, index: Any = None, cotangent: Tensor | None = None
) -> Seed:
    """A target at a site's output; no payload is needed.

    `index` picks one element of the site's recorded shape `[example, pos, …]`: one
    integer per axis, negative ones from the end. `slice(None)` takes all of an axis (in
    the first: that element in every example), and `"last"` in the second each row's
    last real token. Or `cotangent`, a real finite tensor of exactly the recorded shape:
    the target is its inner product with the site. Units: the site's.

    Raises ReadError `read_target_invalid` unless exactly one of them is given.
    """
    if (index is None) == (cotangent is None):
        raise _invalid(
            f"seed({site!r}) needs either index= or cotangent=, and not both",
            reason="seed_arguments",
        )
    if index is not None:
        index = tuple(index) if isinstance(index, list | tuple) else (index,)
    return Seed(site, index, cotangent)


@dataclass(frozen=True, eq=False)
class Target:
    """One resolved target: its id, its text, and what identifies it as plain JSON."""

    id: str
    text: str
    description: Mapping[str, Any]
    cotangent: Cotangent


@dataclass(frozen=True, eq=False)
class Cone:
    """Targets that start at one address; `places` are their places in the table."""

    address: Address
    targets: tuple[Target, ...]
    places: tuple[int, ...]

    def cotangents(self, chunk: slice) -> Tensor:
        """Stacked cotangents `[target, *address.shape]`."""
        return torch.stack([t.cotangent() for t in self.targets[chunk]])


Targets = Any
"""A Seed, a scalar Tensor, a callable of the trace, a Metric, or a list of these."""


def resolve_targets(trace: Trace, target: Targets) -> tuple[Cone, ...]:
    """Resolve targets against a trace, grouped into cones.

    Ids are `t0, t1, …`; a callable with a 1-D result gives `t0[0], t0[1], …`.
    Raises ReadError `read_target_invalid`, `read_site_unaddressable`, or as
    `Trace.record`.
    """
    given = list(target) if isinstance(target, list | tuple) else [target]
    if target is None or not given:
        raise _invalid(
            "a gradient read needs a target: seed('unembed.hook_out', index=(0, -1, 7)), "
            "a scalar of a backward_ready trace, a callable of the trace, or a list",
            reason="missing",
        )
    found: list[tuple[Address, Target]] = []
    for number, one in enumerate(given):
        found += _resolve(trace, one, f"t{number}")
    grouped: dict[tuple[int, int], list[int]] = {}
    for place, (address, _) in enumerate(found):
        grouped.setdefault(address.key, []).append(place)
    return tuple(
        Cone(found[places[0]][0], tuple(found[p][1] for p in places), tuple(places))
        for places in grouped.values()
    )


def _resolve(trace: Trace, one: Any, id: str) -> list[tuple[Address, Target]]:
    if isinstance(one, Seed):
        return [_seeded(trace, one, id)]
    if isinstance(one, Metric):
        return [_metric(trace, one, id)]
    if isinstance(one, Tensor):
        return _expression(one, id, "tensor", batch=False)
    if callable(one):
        with torch.enable_grad():
            value = one(trace)
        name = getattr(one, "__qualname__", type(one).__name__)
        return _expression(value, id, name, batch=True)
    raise _invalid(
        f"{type(one).__name__} is no target; pass a seed, a connected scalar tensor, a "
        "callable of the trace, or a metric",
        reason="kind",
        value=type(one).__name__,
    )


# --- seeds ---


def _seeded(trace: Trace, one: Seed, id: str) -> tuple[Address, Target]:
    record = trace.record(one.site)
    address = _seedable(record)
    if one.index is not None:
        index = _index(trace, one.index, record)
        description = {"seed": record.key, "index": [_spell(i) for i in one.index]}
        return address, Target(
            id, repr(one), description, lambda: _one_hot(index, record, address)
        )
    assert one.cotangent is not None
    value = _checked_cotangent(one.cotangent, record)
    description = {"seed": record.key, "cotangent": tensor_digest(value)}
    ready = value.to(record.device, record.dtype).reshape(address.shape)
    return address, Target(id, repr(one), description, lambda: ready)


def _seedable(record: SiteRecord) -> Address:
    if record.address is None:
        raise ReadError(
            "read_site_unaddressable",
            f"{record.label} is on no graph ({record.reason}), so nothing can be seeded "
            "there; choose a differentiable site",
            site=record.label,
            reason=record.reason,
        )
    return record.address


def _index(trace: Trace, index: tuple[Any, ...], record: SiteRecord) -> tuple[Any, ...]:
    """The index with each entry checked against the recorded shape."""
    shape = record.shape
    if len(index) != len(shape):
        raise _invalid(
            f"the index {_texts(index)} has {len(index)} entries; {record.label} was "
            f"recorded with shape {list(shape)}",
            reason="index_rank",
            value=_texts(index),
            recorded_shape=shape,
        )
    found: list[Any] = []
    for axis, (entry, size) in enumerate(zip(index, shape, strict=True)):
        if isinstance(entry, slice) and entry == slice(None):
            found.append(torch.arange(size, device=record.device))
        elif isinstance(entry, str) and entry == "last" and axis == 1:
            found.append(None)
        elif _is_int(entry) and -size <= entry < size:
            found.append(torch.tensor([entry % size], device=record.device))
        else:
            raise _invalid(
                f"{entry!r} is no index into axis {axis} of {record.label}, recorded "
                f"with shape {list(shape)}; write an integer from {-size} to {size - 1}, "
                "slice(None), or 'last' for the positions",
                reason="index_range",
                value=repr(entry),
                recorded_shape=shape,
            )
    return _with_last(trace, found)


def _with_last(trace: Trace, index: list[Any]) -> tuple[Any, ...]:
    """Open-mesh index tensors; `last` follows the row that the first axis picks."""
    if len(index) > 1 and index[1] is None:
        index[1] = trace.batch.last[index[0]]
        lone = [index[0], index[1]]
        rest = torch.meshgrid(*index[2:], indexing="ij") if index[2:] else ()
        ones = [1] * (len(index) - 2)
        return (*(i.reshape(-1, *ones) for i in lone), *rest)
    return torch.meshgrid(*index, indexing="ij")


def _one_hot(index: tuple[Any, ...], record: SiteRecord, address: Address) -> Tensor:
    value = torch.zeros(record.shape, dtype=record.dtype, device=record.device)
    value[index] = 1
    return value.reshape(address.shape)


def _checked_cotangent(value: Tensor, record: SiteRecord) -> Tensor:
    if not isinstance(value, Tensor):
        raise _invalid(
            "a cotangent is a tensor", reason="kind", value=type(value).__name__
        )
    if tuple(value.shape) != record.shape:
        raise _invalid(
            f"the cotangent has shape {list(value.shape)}; {record.label} was recorded "
            f"with shape {list(record.shape)}",
            reason="cotangent_shape",
            value=tuple(value.shape),
            recorded_shape=record.shape,
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise _invalid(
            f"the cotangent is {value.dtype}; give real numbers",
            reason="cotangent_dtype",
            value=str(value.dtype),
        )
    if not bool(torch.isfinite(value).all()):
        raise _invalid("the cotangent holds NaN or infinities", reason="not_finite")
    return value.detach()


# --- expressions and metrics ---

_SEEDED = (
    "; or name the element instead, which needs no live payload: "
    "seed('unembed.hook_out', index=(0, -1, token))"
)


def _expression(
    value: Any, id: str, name: str, *, batch: bool
) -> list[tuple[Address, Target]]:
    _check_expression(value, batch)
    address = address_of(value)
    if address is None:
        raise _invalid(
            "the target is detached: it was not computed from live payloads; capture "
            f"with backward_ready=True{_SEEDED}",
            reason="detached",
        )
    if value.ndim == 0:
        description = {"expression": name}
        ready = torch.ones_like(value)
        return [(address, Target(id, f"{name} → scalar", description, lambda: ready))]
    eye = torch.eye(len(value), dtype=value.dtype, device=value.device)

    def one(i: int) -> Target:
        description = {"expression": name, "element": i}
        return Target(f"{id}[{i}]", f"{name}[{i}]", description, lambda: eye[i])

    return [(address, one(i)) for i in range(len(value))]


def _check_expression(value: Any, batch: bool) -> None:
    if not isinstance(value, Tensor):
        raise _invalid(
            f"the callable returned {type(value).__name__}; return a tensor",
            reason="kind",
            value=type(value).__name__,
        )
    if value.is_complex() or not value.is_floating_point():
        raise _invalid(
            f"the target is {value.dtype}; a target is real{_SEEDED}",
            reason="dtype",
            value=str(value.dtype),
        )
    if value.ndim == 1 and not batch:
        raise _invalid(
            "a bare 1-D tensor is ambiguous, and is never summed for you: wrap it in a "
            f"callable (one target per element), or sum it yourself{_SEEDED}",
            reason="bare_1d",
            value=tuple(value.shape),
        )
    if value.ndim > 1 or value.numel() == 0:
        raise _invalid(
            f"the target has shape {list(value.shape)}; reduce it to a scalar, or to one "
            f"dimension in a callable{_SEEDED}",
            reason="rank",
            value=tuple(value.shape),
        )
    if not bool(torch.isfinite(value).all()):
        raise _invalid(
            f"the target is not finite; check the run that gave it{_SEEDED}",
            reason="not_finite",
        )


def _metric(trace: Trace, metric: Metric, id: str) -> tuple[Address, Target]:
    """A metric's sum over examples, seeded with its cotangent at the logits."""
    _check_metric(metric, trace)
    record = trace.record(LOGITS)
    address = _seedable(record)
    leaf = trace.payload(record).detach().requires_grad_()
    batch = trace.batch
    if metric.needs_clean and trace.side == "clean":
        rows = torch.arange(len(batch), device=leaf.device)
        clean = leaf.detach()
        last = clean[rows, batch.last] if metric.positions == "last" else clean
        batch = replace(batch, clean_logits=last)
    with torch.enable_grad():
        total = metric(leaf, batch).sum()
    found = None
    if total.requires_grad:
        (found,) = torch.autograd.grad(total, [leaf], allow_unused=True)
    if found is None:
        raise ArgumentError(
            "metric_ignores_logits",
            "the metric does not depend on the logits (or detaches them), so every score "
            "would be zero; compute it from the logits it is given",
        )
    cotangent = found
    description = {"metric": metric.describe()}
    return address, Target(id, metric.name, description, lambda: cotangent)


def _check_metric(metric: Metric, trace: Trace) -> None:
    if metric.stationary_at_clean:
        raise ArgumentError(
            "metric_stationary_at_clean",
            f"the gradient of {metric.name} is zero at the clean run, so every score "
            "would be zero; read a metric such as logit_diff",
            metric=metric.name,
            expected="logit_diff",
        )
    longest = max((len(a) for row in trace.batch.answers for a in row), default=1)
    if metric.appends_answers and longest > 1:
        raise _invalid(
            f"{metric.name} reads answers of several tokens from rows that end in them, "
            "and a capture runs the prompts alone; use answers of one token, or append "
            "the answers to the prompts and seed their positions",
            reason="answers_not_appended",
            value=longest,
        )


# --- small things ---


def tensor_digest(value: Tensor) -> str:
    """SHA-256 of a tensor's shape and its numbers as float64 (or bits)."""
    value = value.detach().cpu()
    plain = value.to(torch.uint8 if value.dtype == torch.bool else torch.float64)
    found = hashlib.sha256(str(tuple(value.shape)).encode())
    found.update(plain.contiguous().numpy().tobytes())
    return found.hexdigest()


def _is_int(entry: Any) -> TypeGuard[int]:
    if isinstance(entry, bool):
        return False
    return isinstance(entry, int) or hasattr(entry, "__index__")


def _spell(entry: Any) -> str:
    return ":" if isinstance(entry, slice) else str(entry)


def _texts(index: Sequence[Any]) -> tuple[str, ...]:
    return tuple(_spell(entry) for entry in index)


def _invalid(text: str, **fields: object) -> ReadError:
    return ReadError("read_target_invalid", text, **fields)
