"""The engine of a read: population, batching plan, and one backward per chunk.

Takes resolved targets and a frozen policy, gives numbers and statuses by target and
site. It builds no table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from circuitlab.errors import InternalError, ReadError
from circuitlab.frozen import Frozen, Masked, named_sites
from circuitlab.gradients import Address, frozen_at, pull
from circuitlab.reductions import Method, Reduction, reduced
from circuitlab.targets import Cone, tensor_digest
from circuitlab.trace import SiteRecord, Trace, unretained

EXCLUDED = "excluded"
"""Status of a site that an implicit population leaves out; the reason says why."""

BATCH = 32
"""Targets per backward where batching pays; more gained nothing on a CPU."""

BUDGET = 1 << 30
"""Bytes of gradients that one backward may return, when the plan is ours."""


@dataclass(frozen=True, eq=False)
class Population:
    """Which sites are read: those that were named, or all (`explicit` False)."""

    records: tuple[SiteRecord, ...]
    masks: tuple[Tensor | None, ...]
    explicit: bool

    @property
    def identity(self) -> list[list[Any]] | None:
        """Site keys, passes and mask digests; None for the implicit population."""
        if not self.explicit:
            return None
        pairs = zip(self.records, self.masks, strict=True)
        return sorted(
            [r.key, r.pass_index, None if m is None else tensor_digest(m)]
            for r, m in pairs
        )


def resolve_population(trace: Trace, within: Any, needs_payload: bool) -> Population:
    """Resolve `within=`. Raises ReadError `read_payload_unretained` for explicit sites
    without the values that the method multiplies, `read_population_empty`, or as
    `Trace.record`."""
    if within is None:
        records = trace.population
        return Population(records, (None,) * len(records), False)
    wanted: Masked = named_sites(trace, within)
    if not wanted:
        raise ReadError(
            "read_population_empty",
            "within= names no site; leave it out to read every site",
            value=repr(within),
        )
    records = tuple(record for record, _ in wanted)
    if needs_payload:
        missing = [r.label for r in records if not trace.has_payload(r)]
        if missing:
            raise unretained(missing)
    return Population(records, tuple(mask for _, mask in wanted), True)


@dataclass(frozen=True)
class BatchPlan:
    """How many targets share a backward, and why."""

    requested: int | str
    batch_size: int
    reason: str
    device: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def plan_batches(
    requested: int | Literal["auto"],
    population: Population,
    cones: Sequence[Cone],
    device: torch.device,
) -> BatchPlan:
    """Plan target batches. Raises ReadError `read_option_invalid`."""
    place = device.type
    if requested != "auto":
        valid = isinstance(requested, int) and not isinstance(requested, bool)
        if not valid or requested < 1:
            raise ReadError(
                "read_option_invalid",
                f"target_batch_size is {requested!r}; write 'auto' or a number from 1",
                option="target_batch_size",
                value=requested
                if isinstance(requested, str | int)
                else repr(requested),
                expected="'auto' or an int >= 1",
            )
        return BatchPlan(requested, requested, "explicit", place)
    if place != "cpu":
        return BatchPlan(requested, 1, "not_measured_on_this_device", place)
    unique = {r.address.key: r for r in population.records if r.address}
    item = [math.prod(r.shape) * r.dtype.itemsize for r in unique.values()]
    seeds = [math.prod(c.address.shape) * 8 for c in cones]
    most = BUDGET // max(1, sum(item) + max(seeds, default=0))
    if most < BATCH:
        return BatchPlan(requested, max(1, most), "memory_budget", place)
    return BatchPlan(requested, BATCH, "cpu_batches_measured_faster", place)


@dataclass(eq=False)
class Measured:
    """What a read found, by target and site of the population.

    `scores` float64 `[target, site, example]` (one example where the batch is folded),
    `status` and `reason` text `[target, site]`; `values` dense tensors by (target,
    site); `reached` how many frozen sites each target's backward reached.
    """

    scores: np.ndarray
    status: np.ndarray
    reason: np.ndarray
    reached: np.ndarray
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    autograd_calls: int = 0

    @property
    def excluded(self) -> dict[str, int]:
        """(target, site) pairs that were left out, by reason."""
        left_out = self.reason[self.status == EXCLUDED]
        return dict(Counter(str(reason) for reason in left_out))


@dataclass(frozen=True, eq=False)
class Measurement:
    """One read's settings; `run` carries it out."""

    trace: Trace
    population: Population
    method: Method
    reduction: Reduction | None
    per_example: bool = False

    @property
    def examples(self) -> int | None:
        return len(self.trace.batch) if self.per_example else None

    def activation(self) -> Measured:
        """Values alone; no backward."""
        found = self._empty(1)
        for s, record in enumerate(self.population.records):
            if not self._has_number(found, slice(0, 1), s, record):
                continue
            value = self.trace.payload(record).detach()[None]
            self._store(found, [0], s, value)
        return found

    def gradients(
        self, cones: Sequence[Cone], frozen: Frozen, plan: BatchPlan
    ) -> Measured:
        """One backward per chunk of targets that share a cone.

        Raises InternalError `read_engine_call_drift` or `read_suppression_leak`.
        """
        total = sum(len(cone.targets) for cone in cones)
        found = self._empty(total)
        planned = 0
        with self.trace.watch.suppressed():
            for cone in cones:
                planned += math.ceil(len(cone.targets) / plan.batch_size)
                with frozen_at(frozen.freezes) as reached:
                    self._cone(cone, plan.batch_size, found)
                found.reached[list(cone.places)] = frozen.reached(reached)
        if found.autograd_calls != planned:
            raise InternalError(
                "read_engine_call_drift",
                f"{found.autograd_calls} backward calls where {planned} were planned; "
                "please report this",
                value=found.autograd_calls,
                expected=planned,
            )
        return found

    def _empty(self, targets: int) -> Measured:
        shape = (targets, len(self.population.records))
        return Measured(
            np.full((*shape, self.examples or 1), np.nan),
            np.full(shape, "ok", dtype=object),
            np.full(shape, None, dtype=object),
            np.zeros(targets, dtype=np.int64),
        )

    def _cone(self, cone: Cone, size: int, found: Measured) -> None:
        unique: dict[tuple[int, int], Address] = {}
        sites: dict[tuple[int, int], list[int]] = {}
        for s, record in enumerate(self.population.records):
            if record.address is None:
                self._off_graph(found, cone, s, record)
                continue
            unique[record.address.key] = record.address
            sites.setdefault(record.address.key, []).append(s)
        for start in range(0, len(cone.targets), size):
            chunk = slice(start, start + size)
            places = list(cone.places[chunk])
            cotangents = cone.cotangents(chunk)
            batched = len(places) > 1
            seed = cotangents if batched else cotangents[0]
            got = pull(cone.address, seed, list(unique.values()), batched=batched)
            found.autograd_calls += 1
            for at, key in enumerate(unique):
                gradient = got[at]
                # Let go of each gradient as soon as it is reduced.
                got[at] = None
                if gradient is not None and not batched:
                    gradient = gradient[None]
                self._address(found, places, sites[key], gradient)

    def _address(
        self,
        found: Measured,
        places: list[int],
        sites: list[int],
        gradient: Tensor | None,
    ) -> None:
        """Store one address's gradient for every site that it is a name of."""
        for s in sites:
            record = self.population.records[s]
            if gradient is None:
                self._leave_out(
                    found, places, s, "unreachable", "not_upstream_of_target"
                )
            elif self._has_number(found, places, s, record):
                value = gradient.reshape(len(places), *record.shape)
                if self.method == "activation_x_grad":
                    value = value * self.trace.payload(record).detach()
                self._store(found, places, s, value)

    def _off_graph(
        self, found: Measured, cone: Cone, s: int, record: SiteRecord
    ) -> None:
        places = list(cone.places)
        self._leave_out(found, places, s, "not_differentiable", record.reason)

    def _leave_out(
        self, found: Measured, places: Any, s: int, status: str, reason: str | None
    ) -> None:
        """A site without a number: a row if it was named, else counted by reason."""
        if not self.population.explicit:
            reason = reason if status == "unreachable" else status
            status = EXCLUDED
        found.status[places, s] = status
        found.reason[places, s] = reason

    def _has_number(
        self, found: Measured, places: Any, s: int, record: SiteRecord
    ) -> bool:
        if self.method != "grad" and not self.trace.has_payload(record):
            found.status[places, s] = "unavailable"
            found.reason[places, s] = "payload_unretained"
            return False
        if self.method == "activation" and not record.dtype.is_floating_point:
            self._leave_out(found, places, s, "unavailable", "not_floating")
            return False
        if self.per_example and record.shape[:1] != (self.examples,):
            found.status[places, s] = "unsupported_grain"
            found.reason[places, s] = "no_example_axis"
            return False
        return True

    def _store(self, found: Measured, places: list[int], s: int, value: Tensor) -> None:
        mask = self.population.masks[s]
        if self.reduction is None:
            if mask is not None:
                value = value.masked_fill(~mask, 0)
            for place, one in zip(places, value, strict=True):
                found.values[place, s] = one.clone()
            return
        numbers = reduced(value, self.reduction, mask, self.examples)
        found.scores[places, s] = numbers.numpy()
