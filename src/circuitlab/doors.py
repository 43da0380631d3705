"""The doors: passes that run with edits.

`run` is a live pass, `bind` installs edits on the model for the length of a `with`,
`resume` recomputes from a block on; `capture` takes edits too. `run` and `bind` insert
no detached leaf, so gradients reach every parameter upstream of an edit that keeps the
graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuitlab.ablations import token_batch
from circuitlab.backends import (
    Backend,
    Capability,
    Site,
    Tap,
    TokenBatch,
    as_backend,
    require,
)
from circuitlab.edits import Edits, Resolved, resolve_edits
from circuitlab.errors import ArgumentError
from circuitlab.inventory import inventory
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.site_info import SiteInfo


@dataclass(frozen=True, eq=False)
class Baseline:
    """The model as it is on one batch: logits, and the metric of each example."""

    batch: TokenBatch
    logits: Tensor
    metric: Tensor | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """An edited pass. `logits` `[example, pos, d_vocab]`, `metric` `[example]`.

    `frontier` is the leaf `[example, pos, d_model]` that `resume` started from.
    """

    batch: TokenBatch
    logits: Tensor
    metric: Tensor | None
    record: list[dict[str, Any]]
    baseline: Baseline | None = None
    frontier: Tensor | None = None


def baseline(model: Any, prompts: Any, metric: Metric | None = None) -> Baseline:
    """Run the unedited model once, without gradient. Pass it to `run` again and again."""
    model = as_backend(model)
    batch = as_batch(model, prompts, metric)
    logits = model.run(batch)
    return Baseline(batch, logits, metric_of(metric, logits, batch, logits))


def as_batch(model: Backend, prompts: Any, metric: Metric | None) -> TokenBatch:
    """The clean side of prompts as one batch. Raises ArgumentError `prompts_invalid`."""
    if isinstance(prompts, TokenBatch):
        return prompts
    if isinstance(prompts, Prompts):
        if metric is not None:
            return token_batch(model, prompts, metric)
        rows = [list(row) for row in prompts.clean]
        return model.batch(rows, prompts.answers, prompts.wrong_answers)
    raise ArgumentError(
        "prompts_invalid",
        f"give Prompts or a TokenBatch, not {type(prompts).__name__}",
        value=type(prompts).__name__,
    )


def run(
    model: Any,
    prompts: Any,
    edits: Edits,
    metric: Metric | None = None,
    *,
    base: Baseline | None = None,
    grad: bool | None = None,
    offset: int = 0,
) -> Outcome:
    """Run the prompts' clean side with edits: logits, and the metric of each example.

    `prompts`: `Prompts` or a `TokenBatch`. A metric that compares with the clean run
    needs `base`, which `baseline` makes; it is not computed again. `grad` defaults to
    whether gradients are enabled; then the graph is kept from the logits to every
    parameter upstream of an edit that keeps it. Codes: those of `resolve_edits` and of
    the verbs, `edit_never_fired`.
    """
    model = as_backend(model)
    batch = base.batch if base is not None else as_batch(model, prompts, metric)
    source = prompts if isinstance(prompts, Prompts) else None
    resolved = resolve_edits(model, edits, prompts=source, metric=metric)
    resolved.begin(batch, offset=offset)
    wants = torch.is_grad_enabled() if grad is None else grad
    logits = model.run(batch, resolved.taps, grad=wants)
    resolved.check()
    clean = None if base is None else base.logits
    values = metric_of(metric, logits, batch, clean)
    return Outcome(batch, logits, values, resolved.record, base)


def metric_of(
    metric: Metric | None, logits: Tensor, batch: TokenBatch, clean: Tensor | None
) -> Tensor | None:
    """The metric of each example; `clean` `[example, pos, d_vocab]` where it compares.

    Raises ArgumentError `baseline_needed`, and what the metric raises.
    """
    if metric is None or not metric.needs_clean:
        return None if metric is None else metric(logits, batch)
    if clean is None:
        raise ArgumentError(
            "baseline_needed",
            f"the metric {metric.name} compares with the clean run; pass base=baseline(…)",
            metric=metric.name,
        )
    if metric.positions == "last":
        rows = torch.arange(len(batch), device=clean.device)
        clean = clean[rows, batch.last]
    return metric(logits, replace(batch, clean_logits=clean))


@contextmanager
def bind(
    model: Any, edits: Edits, *, prompts: Prompts | None = None
) -> Iterator[Resolved]:
    """Install edits on the model itself for the length of the `with`.

    Every forward inside is edited, also the user's own calls of the bridge, with
    gradients as they would flow anyway. Sources of donors run before the edits are in
    place. Raises `edit_never_fired` after a forward that left an edit out, and at the
    end of a `with` in which nothing ran.
    """
    model = as_backend(model)
    resolved = resolve_edits(model, edits, prompts=prompts)
    with model.bound(resolved.taps, resolved.begin, resolved.check):
        yield resolved
    resolved.check()


def resume(
    model: Any,
    prompts: Any,
    edits: Edits,
    layer: int,
    metric: Metric | None = None,
    *,
    stream: Tensor | None = None,
    base: Baseline | None = None,
) -> Outcome:
    """Recompute from block `layer` on, with edits, from cached activations.

    The block's input is the replay frontier: `stream` `[example, pos, d_model]`, or what
    one clean pass gives there. It is made a leaf that asks for gradients
    (`Outcome.frontier`), so gradients stop there and no parameter before it gets any.
    Raises ArgumentError `layer_out_of_range`, `edit_before_frontier`,
    `stream_shape_invalid`, and those of `run`.
    """
    model = as_backend(model)
    require(model, Capability.RESUME)
    if not 0 <= layer < model.shape.n_layers:
        raise ArgumentError(
            "layer_out_of_range",
            f"the model has blocks 0 to {model.shape.n_layers - 1}, not {layer}",
            value=layer,
            n_layers=model.shape.n_layers,
        )
    batch = base.batch if base is not None else as_batch(model, prompts, metric)
    source = prompts if isinstance(prompts, Prompts) else None
    resolved = resolve_edits(model, edits, prompts=source, metric=metric)
    _require_after(model, resolved.sites, layer)
    leaf = _frontier(model, batch, layer, stream)
    resolved.begin(batch, frontier=True)
    logits = model.run(batch, resolved.taps, grad=True, resume=(layer, leaf))
    resolved.check()
    values = metric_of(metric, logits, batch, None if base is None else base.logits)
    return Outcome(batch, logits, values, resolved.record, base, leaf)


def _require_after(model: Backend, sites: tuple[SiteInfo, ...], layer: int) -> None:
    rank = inventory(model).rank
    for site in sites:
        if rank[site.name] < rank[f"blocks.{layer}.hook_in"]:
            raise ArgumentError(
                "edit_before_frontier",
                f"{site.name} comes before block {layer}, where the pass resumes; resume "
                "from an earlier block, or use run",
                site=site.name,
                layer=layer,
            )


def _frontier(
    model: Backend, batch: TokenBatch, layer: int, stream: Tensor | None
) -> Tensor:
    if stream is None:
        seen: list[Tensor] = []
        model.run(batch, [Tap(Site(f"blocks.{layer}", "in"), seen.append)])
        stream = seen[0]
    expected = (*batch.tokens.shape, model.shape.d_model)
    if tuple(stream.shape) != expected or stream.dtype != model.dtype:
        raise ArgumentError(
            "stream_shape_invalid",
            f"the stream has shape {tuple(stream.shape)} and type {stream.dtype}; "
            f"{expected} and {model.dtype} were expected",
            shape=tuple(stream.shape),
            expected=expected,
        )
    return stream.detach().clone().requires_grad_(True)
