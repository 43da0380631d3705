"""Run many sets of edits on the same prompts: one baseline, several sets in a pass.

Sets are rows of one forward where the model allows it, which changes no number: an edit
sees its own copy of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from circuitlab.backends import Backend, Capability, Site, Tap, as_backend
from circuitlab.doors import Baseline, Outcome, baseline, metric_of
from circuitlab.edits import Edits, Resolved, resolve_edits
from circuitlab.errors import ArgumentError
from circuitlab.metrics import Metric
from circuitlab.plans import Plan, plan
from circuitlab.prompts import Prompts

INTERVENTION = pa.schema(
    [
        ("edits", pa.string()),
        ("example", pa.int64()),
        ("metric", pa.float64()),
        ("metric_baseline", pa.float64()),
        ("change", pa.float64()),
    ]
)
"""One example under one set of edits a row; `change` is edited minus baseline."""


def run_each(
    model: Any,
    prompts: Any,
    sets: Sequence[Edits],
    metric: Metric | None = None,
    *,
    base: Baseline | None = None,
    sets_per_pass: int = 8,
    offset: int = 0,
    grad: bool | None = None,
) -> list[Outcome]:
    """`run` for each set of edits, up to `sets_per_pass` of them as rows of one forward.

    Without ROW_BATCHING, and at sites that all examples share, sets run one by one.
    Raises ArgumentError `sets_per_pass_invalid`, and what `run` raises.
    """
    if sets_per_pass < 1:
        raise ArgumentError(
            "sets_per_pass_invalid",
            f"at least one set runs in a pass, not {sets_per_pass}",
            value=sets_per_pass,
        )
    model = as_backend(model)
    base = baseline(model, prompts, metric) if base is None else base
    source = prompts if isinstance(prompts, Prompts) else None
    wants = torch.is_grad_enabled() if grad is None else grad
    found: list[Outcome] = []
    for chunk in _chunks(model, sets, source, metric, sets_per_pass):
        logits = _run_rows(model, chunk, base, offset, wants)
        for resolved, values in zip(chunk, logits, strict=True):
            resolved.check()
            measured = metric_of(metric, values, base.batch, base.logits)
            found.append(Outcome(base.batch, values, measured, resolved.record, base))
    return found


def _chunks(
    model: Backend,
    sets: Sequence[Edits],
    prompts: Prompts | None,
    metric: Metric | None,
    size: int,
) -> Iterator[list[Resolved]]:
    """The sets in order, as many together as may share a pass."""
    waiting: list[Resolved] = []
    for edits in sets:
        resolved = resolve_edits(model, edits, prompts=prompts, metric=metric)
        alone = Capability.ROW_BATCHING not in model.capabilities
        alone |= any(site.axes[:1] != ("batch",) for site in resolved.sites)
        if waiting and (alone or len(waiting) == size):
            yield waiting
            waiting = []
        if alone:
            yield [resolved]
        else:
            waiting.append(resolved)
    if waiting:
        yield waiting


def _run_rows(
    model: Backend, chunk: list[Resolved], base: Baseline, offset: int, grad: bool
) -> list[Tensor]:
    for resolved in chunk:
        resolved.begin(base.batch, offset=offset)
    if len(chunk) == 1:
        return [model.run(base.batch, chunk[0].taps, grad=grad)]
    sites = dict.fromkeys(tap.site for resolved in chunk for tap in resolved.taps)
    taps = [_for_all(site, chunk, len(base.batch)) for site in sites]
    logits = model.run(base.batch.repeat(len(chunk)), taps, grad=grad)
    return list(logits.split(len(base.batch)))


def _for_all(site: Site, chunk: list[Resolved], rows: int) -> Tap:
    """One tap that gives each set its own rows."""
    functions: list[list[Callable[[Tensor], Tensor | None]]] = [
        [tap.fn for tap in resolved.taps if tap.site == site] for resolved in chunk
    ]

    def fn(value: Tensor) -> Tensor:
        parts = []
        for part, own in zip(value.split(rows), functions, strict=True):
            for function in own:
                new = function(part)
                part = part if new is None else new
            parts.append(part)
        return torch.cat(parts)

    return Tap(site, fn)


@dataclass(frozen=True, eq=False)
class Interventions:
    """What sets of edits did to a set of prompts.

    `rows`: INTERVENTION, set by set and example by example; logits float `[example,
    d_vocab]` at each row's last real token, in the order of the prompts.
    """

    rows: pa.Table
    baseline_logits: Tensor
    logits: Mapping[str, Tensor]
    plans: Mapping[str, Plan]
    record: Mapping[str, list[dict[str, Any]]]


def intervene(
    model: Any,
    prompts: Prompts,
    payloads: Mapping[str, Any] | Plan,
    metric: Metric,
    *,
    batch_size: int = 32,
    **options: Any,
) -> Interventions:
    """Run payloads over prompts: logits and metric, with and without the edits.

    `payloads` and `options` (`config=`, `mode=`, …) are those of `plan`. The baseline is
    computed once a batch. Raises what `plan` and `run` raise.
    """
    named = {"edits": payloads}
    return intervene_each(
        model, prompts, named, metric, batch_size=batch_size, **options
    )


def intervene_each(
    model: Any,
    prompts: Prompts,
    sets: Mapping[str, Any],
    metric: Metric,
    *,
    batch_size: int = 32,
    sets_per_pass: int = 8,
    **options: Any,
) -> Interventions:
    """`intervene` for several named sets of payloads, on one baseline for each batch."""
    model = as_backend(model)
    plans = {
        name: found if isinstance(found, Plan) else plan(model, found, **options)
        for name, found in sets.items()
    }
    parts: list[tuple[Baseline, list[Outcome]]] = []
    for start in range(0, len(prompts), batch_size):
        some = prompts[start : start + batch_size]
        base = baseline(model, some, metric)
        edits = [found.edits for found in plans.values()]
        outcomes = run_each(
            model,
            some,
            edits,
            metric,
            base=base,
            sets_per_pass=sets_per_pass,
            offset=start,
            grad=False,
        )
        parts.append((base, outcomes))
    return _collected(parts, plans)


def _collected(
    parts: list[tuple[Baseline, list[Outcome]]], plans: Mapping[str, Plan]
) -> Interventions:
    before = torch.cat([_metric(base) for base, _ in parts])
    tables, logits, record = [], {}, {}
    for i, name in enumerate(plans):
        outcomes = [found[i] for _, found in parts]
        after = torch.cat([_metric(outcome) for outcome in outcomes])
        columns = {
            "edits": pa.array([name] * len(after)),
            "example": pa.array(range(len(after)), pa.int64()),
            "metric": pa.array(after.numpy()),
            "metric_baseline": pa.array(before.numpy()),
            "change": pa.array((after - before).numpy()),
        }
        tables.append(pa.table(columns, schema=INTERVENTION))
        logits[name] = torch.cat([_last(outcome) for outcome in outcomes])
        record[name] = outcomes[0].record
        for outcome in outcomes[1:]:
            for entry, more in zip(record[name], outcome.record, strict=True):
                entry["notes"] = [*entry["notes"], *more["notes"]]
    base = torch.cat([_last(base) for base, _ in parts])
    return Interventions(pa.concat_tables(tables), base, logits, plans, record)


def _metric(found: Baseline | Outcome) -> Tensor:
    assert found.metric is not None
    return found.metric.detach().double().cpu()


def _last(found: Baseline | Outcome) -> Tensor:
    rows = torch.arange(len(found.batch), device=found.logits.device)
    return found.logits[rows, found.batch.last].detach()
