"""From what a read measured to ACT rows, their run and its provenance.

Everything here is plain values: a batch's graph can be let go before its rows are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from circuitlab.errors import ReadError
from circuitlab.frozen import Frozen
from circuitlab.measure import EXCLUDED, BatchPlan, Measured, Measurement
from circuitlab.prompts import Prompts
from circuitlab.read_json import address_text
from circuitlab.read_table import ReadTable, shape_text
from circuitlab.tables import (
    ACT,
    CONTRACT,
    STATUSES,
    ModelInfo,
    Run,
    digest,
    now,
    versions,
)
from circuitlab.targets import Cone
from circuitlab.trace import SiteRecord, Trace

MEAN = "mean_examples"


@dataclass(frozen=True, eq=False)
class ReadFacts:
    """One read, apart from its graph.

    `sites` has a list per column, one entry per site of the population; `targets` is
    (id, text, description) in order; `policy` the run's policy; `provenance` what is
    known of how it went.
    """

    model: ModelInfo
    prompts: Prompts
    sites: Mapping[str, list[Any]]
    targets: tuple[tuple[str | None, str, Mapping[str, Any]], ...]
    measured: Measured
    samples: range
    policy: Mapping[str, Any]
    provenance: Mapping[str, Any]
    masks: Mapping[int, Any]
    frozen: tuple[int, int]

    @property
    def per_example(self) -> bool:
        return bool(self.policy["per_example"])


def facts_of(
    measurement: Measurement,
    cones: Sequence[Cone],
    frozen: Frozen,
    plan: BatchPlan | None,
    measured: Measured,
    samples: range,
    warnings: Sequence[str],
) -> ReadFacts:
    """Gather a read's facts while its trace is alive."""
    trace, population = measurement.trace, measurement.population
    found = {p: t for c in cones for p, t in zip(c.places, c.targets, strict=True)}
    targets: list[tuple[str | None, str, Mapping[str, Any]]]
    targets = [
        (found[p].id, found[p].text, found[p].description) for p in sorted(found)
    ]
    masks = {s: m for s, m in enumerate(population.masks) if m is not None}
    return ReadFacts(
        model=trace.info,
        prompts=trace.prompts,
        sites=_site_columns(trace, population.records),
        targets=tuple(targets or [(None, "activation", {})]),
        measured=measured,
        samples=samples,
        policy=_policy(measurement, targets, frozen),
        provenance=_provenance(measurement, targets, frozen, plan, measured, warnings),
        masks=masks,
        frozen=(frozen.requested, frozen.resolved),
    )


def _policy(
    measurement: Measurement, targets: Sequence[tuple], frozen: Frozen
) -> dict[str, Any]:
    """What defines the numbers, as plain values."""
    trace = measurement.trace
    found: dict[str, Any] = {
        "method": measurement.method,
        "reduction": measurement.reduction,
        "grain": "element" if measurement.reduction is None else "site",
        "per_example": measurement.per_example,
        "targets": {id: dict(description) for id, _, description in targets},
        "frozen": frozen.description,
        "within": measurement.population.identity,
        "side": trace.side,
        "norms": trace.norms,
    }
    return found | ({"edits": trace.edits} if trace.edits else {})


def _provenance(
    measurement: Measurement,
    targets: Sequence[tuple],
    frozen: Frozen,
    plan: BatchPlan | None,
    measured: Measured,
    warnings: Sequence[str],
) -> dict[str, Any]:
    trace, population = measurement.trace, measurement.population
    groups = _alias_groups(population.records)
    values = measured.values.values()
    return {
        "trace_label": f"{trace.prompts.name} ({trace.side})",
        "capture_outcome": "backward_ready" if trace.backward_ready else "detached",
        "target_reprs": {id: text for id, text, _ in targets},
        "within_digest": digest(population.identity) if population.explicit else None,
        "population_size": len(population.records),
        "excluded_counts": measured.excluded,
        "frozen_policy": frozen.name,
        "frozen_digest": "none"
        if measurement.method == "activation"
        else frozen.digest,
        "frozen_requested_count": frozen.requested,
        "frozen_resolved_count": frozen.resolved,
        "frozen_fired_count": int(measured.reached.max(initial=0)),
        "frozen_alias_groups": [list(group) for group in frozen.groups],
        "alias_group_count": len(groups),
        "aliased_site_count": sum(map(len, groups.values())),
        "batching_plan": plan.to_json() if plan else None,
        "autograd_calls": measured.autograd_calls,
        "result_bytes": sum(v.numel() * v.element_size() for v in values),
        "sample_count": len(trace.batch),
        "inventory_digest": trace.inventory_digest,
        "spellings": _spellings(trace, population.records),
        "warnings": list(warnings),
    }


def _spellings(trace: Trace, records: Sequence[SiteRecord]) -> dict[str, list[str]]:
    """What else the sites are called, so that a loaded table knows it too."""
    names = trace.inventory.names
    known = [names[r.site] for r in records if r.site in names]
    return {i.name: list(i.spellings[1:]) for i in known if len(i.spellings) > 1}


def _alias_groups(records: Sequence[SiteRecord]) -> dict[tuple[int, int], list[int]]:
    """Sites that are one tensor, as places in the population, by address."""
    found: dict[tuple[int, int], list[int]] = {}
    for s, record in enumerate(records):
        if record.address is not None:
            found.setdefault(record.address.key, []).append(s)
    return {key: members for key, members in found.items() if len(members) > 1}


def _site_columns(trace: Trace, records: Sequence[SiteRecord]) -> dict[str, list[Any]]:
    alias: list[str | None] = [None] * len(records)
    for members in _alias_groups(records).values():
        for s in members:
            # Named by its first member, so that the name holds across captures.
            alias[s] = records[members[0]].key
    retained = [trace.has_payload(r) for r in records]
    detached = not trace.backward_ready
    return {
        "site": [r.site for r in records],
        "pass": [r.pass_index for r in records],
        "site_key": [r.key for r in records],
        "alias_group": alias,
        "shape": [shape_text(r.shape) for r in records],
        "dtype": [str(r.dtype).removeprefix("torch.") for r in records],
        "device": [str(r.device) for r in records],
        "differentiable": [r.address is not None for r in records],
        "retention": ["retained" if kept else "unretained" for kept in retained],
        "capture_status": ["captured"] * len(records),
        "detached": [detached if kept else None for kept in retained],
    }


def table_of(
    facts: ReadFacts, started_at: str, seconds: float, **more: Any
) -> ReadTable:
    """The table of one read."""
    measured = facts.measured
    keep = np.argwhere(measured.status != EXCLUDED)
    samples = [str(i) for i in facts.samples] if facts.per_example else [None]
    t, s = np.repeat(keep, len(samples), axis=0).T
    e = np.tile(np.arange(len(samples)), len(keep))
    numbers = {
        "score": measured.scores[t, s, e] if len(t) else np.zeros(0),
        "status": measured.status[t, s],
        "status_reason": measured.reason[t, s],
        "stderr": None,
        "n": np.full(
            len(t), 1 if facts.per_example else facts.provenance["sample_count"]
        ),
    }
    rows = _rows(facts, t, s, [samples[i] for i in e], numbers)
    at = {(int(a), int(b)): row for row, (a, b) in enumerate(keep)}
    values = {at[place]: value for place, value in measured.values.items()}
    masks = {row: facts.masks[s] for (_, s), row in at.items() if s in facts.masks}
    run = _run(facts, started_at, seconds)
    return ReadTable(rows, run, values, masks if values else {}, **more)


def _rows(
    facts: ReadFacts, t: Any, s: Any, samples: list[str | None], numbers: Mapping
) -> pa.Table:
    """ACT rows for pairs of a target and a site (and an example)."""
    count = len(t)
    policy, element = facts.policy, facts.policy["grain"] == "element"
    ok = numbers["status"] == "ok"
    columns: dict[str, Any] = {
        name: pa.array(values, ACT.field(name).type).take(pa.array(s))
        for name, values in facts.sites.items()
    }
    sites = zip(columns["site"].to_pylist(), columns["pass"].to_pylist(), samples)
    columns["address"] = pa.array(
        [address_text(*place) for place in sites], pa.string()
    )
    columns["sample_id"] = pa.array(samples, pa.string())
    per_target = {
        "target_id": [id for id, _, _ in facts.targets],
        "policy_digest": [_row_digest(policy, d) for _, _, d in facts.targets],
        "frozen_reached": facts.measured.reached,
    }
    for name, values in per_target.items():
        columns[name] = pa.array(values, ACT.field(name).type).take(pa.array(t))
    # One NaN: its bits count in the run's id, and text has only one.
    score = np.where(np.isnan(numbers["score"]), np.nan, numbers["score"])
    columns["score"] = pa.array(
        score, pa.float64(), mask=~ok | element, from_pandas=False
    )
    if numbers["stderr"] is not None:
        missing = ~ok | np.isnan(numbers["stderr"])
        columns["stderr"] = pa.array(numbers["stderr"], pa.float64(), mask=missing)
    for name in ("status", "status_reason", "n"):
        columns[name] = pa.array(numbers[name], ACT.field(name).type)
    constants = {
        "kind": "ACT",
        "method": policy["method"],
        "reduction": policy["reduction"],
        "grain": policy["grain"],
        "resolution": "exact",
        "frozen_requested": facts.frozen[0],
        "frozen_resolved": facts.frozen[1],
        "rescorable": True,
    }
    for name, value in constants.items():
        columns[name] = pa.array([value] * count, ACT.field(name).type)
    found = [columns.get(f.name, pa.nulls(count, f.type)) for f in ACT]
    return pa.table(found, schema=ACT)


def _row_digest(policy: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    """What defined a row's number: the policy with its own target alone, whatever else
    was read beside it."""
    apart = ("targets", "within")
    own = {name: value for name, value in policy.items() if name not in apart}
    return digest({"contract": CONTRACT, **own, "target": dict(description)})


def _run(facts: ReadFacts, started_at: str, seconds: float, **more: Any) -> Run:
    return Run(
        kind="act",
        model=facts.model,
        dataset=facts.prompts.name,
        dataset_digest=facts.prompts.digest,
        n=facts.provenance["sample_count"],
        policy=dict(facts.policy),
        provenance={**facts.provenance, "timing_s": seconds, **more},
        seed=facts.prompts.seed,
        started_at=started_at or now(),
        seconds=seconds,
        versions=versions(),
    )


# --- over a dataset ---


def combine_reads(
    parts: Sequence[ReadFacts], prompts: Prompts, per_example: bool, seconds: float
) -> ReadTable:
    """Reads of consecutive batches as one table: means over examples, or every example.

    Each part is per example. Raises ReadError `read_dataset_inconsistent` where batches
    disagree on sites or targets.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.sites["site_key"] != first.sites["site_key"] or len(
            part.targets
        ) != len(first.targets):
            raise ReadError(
                "read_dataset_inconsistent",
                "batches of this dataset have other sites or numbers of targets, so "
                "there is nothing to average; name the sites with within=",
                expected=len(first.sites["site_key"]),
                value=len(part.sites["site_key"]),
            )
    whole = _joined(parts, prompts)
    if per_example:
        return table_of(whole, "", seconds)
    return _mean_table(whole, seconds)


def _joined(parts: Sequence[ReadFacts], prompts: Prompts) -> ReadFacts:
    """The batches as one read of all examples; a pair's worst status counts."""
    first = parts[0]
    order = {status: i for i, status in enumerate((*STATUSES, EXCLUDED))}
    status, reason = first.measured.status.copy(), first.measured.reason.copy()
    excluded: Counter[str] = Counter()
    for part in parts:
        excluded.update(part.measured.excluded)
        worse = np.vectorize(order.__getitem__)(part.measured.status) > np.vectorize(
            order.__getitem__
        )(status)
        status[worse] = part.measured.status[worse]
        reason[worse] = part.measured.reason[worse]
    measured = Measured(
        np.concatenate([part.measured.scores for part in parts], axis=2),
        status,
        reason,
        np.max([part.measured.reached for part in parts], axis=0),
        autograd_calls=sum(part.measured.autograd_calls for part in parts),
    )
    shapes = zip(*(part.sites["shape"] for part in parts), strict=True)
    shape = [found[0] if len(set(found)) == 1 else None for found in shapes]
    count = sum(len(part.samples) for part in parts)
    warnings = [text for part in parts for text in part.provenance["warnings"]]
    provenance = {
        **first.provenance,
        "sample_count": count,
        "autograd_calls": measured.autograd_calls,
        "excluded_counts": dict(excluded),
        "warnings": list(dict.fromkeys(warnings)),
        "batches": len(parts),
    }
    return replace(
        first,
        prompts=prompts,
        sites={**first.sites, "shape": shape},
        measured=measured,
        samples=range(count),
        provenance=provenance,
    )


def _mean_table(facts: ReadFacts, seconds: float) -> ReadTable:
    scores = facts.measured.scores
    count = scores.shape[2]
    stderr = np.full(scores.shape[:2], np.nan)
    if count > 1:
        stderr = scores.std(axis=2, ddof=1) / np.sqrt(count)
    reduction = f"{facts.policy['reduction']}|{MEAN}"
    policy = {**facts.policy, "reduction": reduction, "per_example": False}
    facts = replace(facts, policy=policy)
    keep = np.argwhere(facts.measured.status != EXCLUDED)
    t, s = keep.T
    numbers = {
        "score": scores.mean(axis=2)[t, s],
        "status": facts.measured.status[t, s],
        "status_reason": facts.measured.reason[t, s],
        "stderr": stderr[t, s],
        "n": np.full(len(keep), count),
    }
    rows = _rows(facts, t, s, [None] * len(keep), numbers)
    return ReadTable(rows, _run(facts, "", seconds))
