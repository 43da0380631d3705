"""Reads: one backward, and a table of how much each site matters to a target.

    activation_x_grad   Σ site · ∂target/∂site      grad   Σ ∂target/∂site

The gradient at a site is the total one over all its consumers, less what the frozen
policy stops. Takes a trace and targets, gives ACT rows. It runs no model and leaves the
trace, its hooks and `.grad` as they were.

Source: activation × gradient as Captum's LayerGradientXActivation computes it
(`frozen=None`); the MLP-output linearisation of attribution graphs (circuit-tracer).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from circuitlab.backends import as_backend
from circuitlab.errors import ReadError
from circuitlab.frozen import DEFAULT, WARNING, Frozen, resolve_frozen
from circuitlab.measure import (
    BatchPlan,
    Measured,
    Measurement,
    Population,
    plan_batches,
    resolve_population,
)
from circuitlab.metrics import Metric
from circuitlab.notices import warn_once
from circuitlab.read_rows import ReadFacts, combine_reads, facts_of, table_of
from circuitlab.read_table import Binding, ReadTable
from circuitlab.reductions import (
    METHODS,
    REDUCTIONS,
    Method,
    Reduction,
    check_choice,
)
from circuitlab.tables import now
from circuitlab.targets import Cone, Seed, Targets, resolve_targets
from circuitlab.targets import seed as seed
from circuitlab.trace import LOGITS, Norms, Trace, as_prompts, capture


def read(
    trace: Trace,
    target: Targets = None,
    within: Any = None,
    frozen: Any = DEFAULT,
    method: Method = "activation_x_grad",
    reduce: Reduction | None = "sum",
    target_batch_size: int | Literal["auto"] = "auto",
    *,
    per_example: bool = False,
) -> ReadTable:
    """Read every site's score for each target; return ACT rows in firing order.

    `score`: the reduction of site · gradient (or of one of them, see `method`) over all
    elements of the site, in the target's units (for `grad` per unit of the site), float64.
    `reduce=None` gives element grain: the dense tensor rides on the row.
    With `per_example` each example has its row (`sample_id`); only targets that are
    sums over examples then mean what they seem to.

    `within`: sites, globs, a mapping from sites to bool masks, or a SiteSelection; None
    reads all sites upstream of the target, and counts the others by reason.
    `frozen`: DEFAULT stops gradients at MLP outputs, None nowhere, explicit sites or
    masks replace the default. Targets that start at one site share a backward, at most
    `target_batch_size` of them ("auto": by device; the plan is in the provenance).

    Raises ReadError `read_option_invalid`, `read_target_invalid`,
    `read_site_unaddressable`, `read_addressing_unavailable`, `read_payload_unretained`,
    `read_population_empty`, `read_mask_invalid`, `default_frozen_sites_underivable`,
    `read_frozen_selection_invalid`, `read_frozen_policy_invalid`,
    `batched_attribution_unsupported`; ArgumentError as `Trace.record`.
    """
    started, clock = now(), time.perf_counter()
    facts = _facts(
        trace,
        target,
        within,
        frozen,
        method,
        reduce,
        target_batch_size,
        per_example=per_example,
        samples=range(len(trace.batch)),
    )
    if WARNING in facts.provenance["warnings"]:
        warn_once(WARNING.partition(":")[0], WARNING)
    binding = Binding(weakref.ref(trace), trace.backward_events)
    return table_of(facts, started, time.perf_counter() - clock, binding=binding)


def _facts(
    trace: Trace,
    target: Targets,
    within: Any,
    frozen: Any,
    method: Method,
    reduce: Reduction | None,
    target_batch_size: int | Literal["auto"],
    *,
    per_example: bool,
    samples: range,
) -> ReadFacts:
    """Check, resolve, measure; give what the rows are made of."""
    _check(method, reduce, target, frozen, per_example)
    if method != "activation" or trace.dead == "cleaned":
        trace.require_live()
    population = resolve_population(trace, within, method != "grad")
    measurement = Measurement(trace, population, method, reduce, per_example)
    cones, policy, plan, measured = _measure(
        measurement, target, frozen, target_batch_size
    )
    warned = _warnings(frozen, policy, method)
    return facts_of(measurement, cones, policy, plan, measured, samples, warned)


def _measure(
    measurement: Measurement,
    target: Targets,
    frozen: Any,
    target_batch_size: int | Literal["auto"],
) -> tuple[tuple[Cone, ...], Frozen, BatchPlan | None, Measured]:
    if measurement.method == "activation":
        return (), Frozen("none"), None, measurement.activation()
    trace = measurement.trace
    cones = resolve_targets(trace, target)
    policy = resolve_frozen(trace, frozen)
    device = trace.batch.tokens.device
    plan = plan_batches(target_batch_size, measurement.population, cones, device)
    return cones, policy, plan, measurement.gradients(cones, policy, plan)


def _check(
    method: Any, reduce: Any, target: Any, frozen: Any, per_example: bool
) -> None:
    check_choice("method", method, METHODS)
    check_choice("reduce", reduce, (*REDUCTIONS, None))
    if per_example and reduce is None:
        raise ReadError(
            "read_option_invalid",
            "element rows hold every example already; leave per_example out",
            option="per_example",
            value=True,
            expected=False,
        )
    if method != "activation":
        return
    if target is not None or not (frozen is DEFAULT or frozen is None):
        given = "target" if target is not None else "frozen"
        raise ReadError(
            "read_option_invalid",
            f"method='activation' runs no backward, so it takes no {given}; leave it out",
            option=given,
            value=repr(target if given == "target" else frozen),
            expected=None,
        )


def _warnings(frozen: Any, policy: Frozen, method: Method) -> tuple[str, ...]:
    """Disclosures that stand in the table."""
    found: list[str] = []
    if method == "activation":
        return ()
    if frozen is DEFAULT and policy.freezes:
        found.append(WARNING)
    if frozen is DEFAULT and not policy.freezes:
        found.append("the default freezes nothing here: the model has no MLPs")
    together = "frozen together, being one tensor: "
    found += [together + ", ".join(group) for group in policy.groups]
    return tuple(found)


# --- over a dataset ---


def read_dataset(
    model: Any,
    prompts: Any,
    target: Targets = None,
    *,
    batch_size: int = 8,
    within: Any = None,
    frozen: Any = DEFAULT,
    method: Method = "activation_x_grad",
    reduce: Reduction = "sum",
    target_batch_size: int | Literal["auto"] = "auto",
    per_example: bool = False,
    side: Literal["clean", "corrupted"] = "clean",
    norms: Norms = "model",
    progress: Callable[[int, int], None] | None = None,
) -> ReadTable:
    """Read sites over many batches of prompts, captured and let go one by one.

    Each example's score is reduced on its own; the rows hold the mean over examples,
    with `stderr` and `n` (reduction `sum|mean_examples`), so that the batch size changes
    nothing. `per_example` gives every example's rows instead. A target must be one
    number per example: a metric, a seed with `slice(None)` as its first index (and
    `"last"` for each row's last real token), or a callable that sums such numbers.

    Raises as `read` and `capture`; ReadError `read_target_invalid` (reason
    `one_example`) and `read_dataset_inconsistent`.
    """
    check_choice("reduce", reduce, REDUCTIONS)
    model = as_backend(model)
    found = as_prompts(prompts, model)
    _check_per_example(target)
    save = _saves(target, within, method)
    options: dict[str, Any] = {"side": side, "norms": norms}
    options["backward_ready"] = _needs_payloads(target)
    parts: list[ReadFacts] = []
    clock, done = time.perf_counter(), 0
    for batch in found.batches(batch_size):
        samples = range(done, done + len(batch))
        with capture(model, batch, save, **options) as trace:
            parts.append(
                _facts(
                    trace,
                    target,
                    within,
                    frozen,
                    method,
                    reduce,
                    target_batch_size,
                    per_example=True,
                    samples=samples,
                )
            )
        done += len(batch)
        if progress:
            progress(done, len(found))
    if WARNING in parts[0].provenance["warnings"]:
        warn_once(WARNING.partition(":")[0], WARNING)
    return combine_reads(parts, found, per_example, time.perf_counter() - clock)


def _listed(target: Targets) -> Iterator[Any]:
    yield from target if isinstance(target, list | tuple) else [target]


def _check_per_example(target: Targets) -> None:
    for one in _listed(target):
        if isinstance(one, torch.Tensor) or (
            isinstance(one, Seed) and not one.per_example
        ):
            raise ReadError(
                "read_target_invalid",
                f"{one!r} is a target of one batch; over a dataset write "
                "seed(site, index=(slice(None), 'last', token)), a metric, or a callable",
                reason="one_example",
                value=repr(one)[:80],
            )


def _needs_payloads(target: Targets) -> bool:
    """Whether a target is a callable of the trace, which may look at any value."""
    return any(callable(t) and not isinstance(t, Metric) for t in _listed(target))


def _saves(target: Targets, within: Any, method: Method) -> Any:
    """What each batch's capture must keep."""
    if _needs_payloads(target):
        return "all"
    found = [LOGITS] if any(isinstance(t, Metric) for t in _listed(target)) else []
    if method == "grad":
        return found
    if within is None:
        return "all"
    alone = isinstance(within, str) or not hasattr(within, "__iter__")
    return [*found, *([within] if alone else within)]


__all__ = ["DEFAULT", "Population", "read", "read_dataset", "seed"]
