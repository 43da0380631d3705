"""Exact edge effects: patch each edge for real, and measure.

    effect(u→v) = M(edge u→v ablated) − M(clean),   everything else left to run

the number that an edge score estimates, with the same sign and units. Edges into
receivers of one layer run as rows of one batched pass, which starts at that layer from
the clean run's stream; edges whose sender is its own ablated value have no effect and
no pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import Ablation, AblationSource, Rows, as_ablation
from circuitlab.backends import (
    Backend,
    Capability,
    Site,
    Tap,
    TokenBatch,
    as_backend,
    require,
)
from circuitlab.checkpoint import Checkpoint
from circuitlab.errors import require_count
from circuitlab.metrics import Metric, with_clean_logits
from circuitlab.prompts import Prompts
from circuitlab.senders import Collector, expand
from circuitlab.tables import EdgeTable, Run, edge_rows, now, versions

MEMORY_BUDGET = 1 << 30
"""Bytes that one pass's rows may take, by default."""

METHOD = "exact"


def exact_effects(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    edges: Iterable[str] | None = None,
    *,
    ablation: Ablation | str = "patch",
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EdgeTable:
    """Patch edges one by one; return EDGE rows whose `score` is the exact effect.

    `edges` are names, or None for every edge; only these have rows, in canonical order.
    `score` is the mean over examples, in the metric's units, `stderr` its standard
    error. `checkpoint` names a file that a killed run continues from. `progress(done,
    total)` counts edges (times chunks of examples).

    Raises ArgumentError `edge_unknown`, `ablation_unknown`, `capability_missing`;
    DataError `prompt_lengths_differ`, `metric_not_finite`, and `acdc`'s codes for a
    checkpoint.
    """
    model = as_backend(model)
    require(model, Capability.RESUME, Capability.ROW_BATCHING)
    shape = model.shape
    asked = shape.edge_mask if edges is None else shape.mask_of(list(edges))
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    code = "memory_budget_invalid"
    memory_budget = require_count(code, "memory_budget", memory_budget)
    started, clock = now(), time.perf_counter()
    size = _chunk(model, prompts, memory_budget) if batch_size is None else batch_size
    size = require_count("batch_size_invalid", "batch_size", size)
    run = Run(
        kind="edge",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy={
            "method": METHOD,
            "metric": metric.describe(),
            "ablation": source.record,
            "reduction": "sum_positions_mean_examples",
            "grain": "site",
            "frozen": None,
        },
        seed=prompts.seed,
        versions=versions(),
    )
    total = int(asked.sum()) * -(-len(prompts) // size)
    with _log(checkpoint, run, size) as log:
        sums = _Sums(asked, log)
        for rows in source.chunks(size):
            patcher = Patcher(model, rows, metric, memory_budget)
            sums.add(patcher, lambda done: progress and progress(done, total))
    run = replace(
        run,
        provenance={
            "sample_count": len(prompts),
            "passes": sums.passes,
            "evaluations": sums.evaluations,
            "batch_size": size,
        },
        started_at=started,
        seconds=time.perf_counter() - clock,
    )
    return EdgeTable(sums.rows(model, len(prompts)), run)


def _chunk(model: Backend, prompts: Prompts, budget: int) -> int:
    """Examples per chunk, so that every sender's change fits the budget."""
    width = max(len(row) for row in prompts.clean) * model.shape.d_model
    one = (len(model.shape.senders) + 16) * width * model.dtype.itemsize
    return max(1, min(len(prompts), budget // one))


def _log(path: str | Path | None, run: Run, size: int) -> Any:
    """The step log, for a `with`; None without a checkpoint."""
    if path is None:
        return nullcontext()
    head = {"schema": "circuitlab_exact_v1", "params": run.params_digest}
    return Checkpoint.opened(path, {**head, "batch_size": size}, _is_step)


def _is_step(value: Any) -> bool:
    """One receiver's effects in one chunk: a total and a sum of squares per sender."""
    if not isinstance(value, dict):
        return False
    lists: list[Any] = [value.get(key) for key in ("senders", "total", "squares")]
    if not all(isinstance(one, list) for one in lists):
        return False
    senders, total, squares = lists
    integers = [value.get("start"), value.get("receiver"), *senders]
    fit = len(senders) == len(total) == len(squares)
    whole = all(type(x) is int for x in integers)
    return fit and whole and all(type(x) is float for x in [*total, *squares])


class _Sums:
    """Sums and sums of squares of per-example effects, float64 `[sender, receiver]`."""

    def __init__(self, asked: np.ndarray, log: Checkpoint | None):
        self.asked = asked
        self.log = log
        self.total = np.zeros(asked.shape)
        self.squares = np.zeros(asked.shape)
        self.passes = 0
        self.evaluations = 0
        self.done = 0
        self._kept = {
            (step["start"], step["receiver"]): step
            for step in ([] if log is None else log.steps)
        }

    def add(self, patcher: Patcher, report: Callable[[int], Any]) -> None:
        for column in np.flatnonzero(self.asked.any(0)).tolist():
            senders = np.flatnonzero(self.asked[:, column])
            step = self._kept.get((patcher.start, column))
            if step is None or step["senders"] != senders.tolist():
                step = self._measured(patcher, column, senders)
            self.total[senders, column] += step["total"]
            self.squares[senders, column] += step["squares"]
            self.done += len(senders)
            report(self.done)

    def _measured(self, patcher: Patcher, column: int, senders: np.ndarray):
        before = patcher.passes
        effects = patcher.effects(column, senders)
        self.passes += patcher.passes - before
        self.evaluations += len(senders)
        step = {
            "start": patcher.start,
            "receiver": column,
            "senders": senders.tolist(),
            "total": effects.sum(1).tolist(),
            "squares": np.square(effects).sum(1).tolist(),
        }
        if self.log is not None:
            self.log.append(step)
        return step

    def rows(self, model: Backend, n: int):
        """EDGE rows of the edges that were asked for."""
        senders, receivers = model.shape.edge_indices
        mean = self.total[senders, receivers] / n
        stderr = None
        if n > 1:
            squares = self.squares[senders, receivers]
            variance = (squares - n * mean**2).clip(0) / (n - 1)
            stderr = np.sqrt(variance / n)
        table = edge_rows(model.shape, mean, stderr, n)
        return table.filter(self.asked[senders, receivers]).combine_chunks()


@dataclass(frozen=True)
class _Clean:
    """What patched passes start from: block inputs and receivers' pre-norm inputs."""

    blocks: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]
    mlp: tuple[Tensor | None, ...]
    final: Tensor


class Patcher:
    """One chunk of examples, ready to have edges patched."""

    @torch.no_grad()
    def __init__(self, model: Backend, rows: Rows, metric: Metric, budget: int):
        self.model = model
        self.metric = metric
        self.start = rows.start
        self.passes = 0
        batch = rows.clean
        self.positions = batch.last if metric.positions == "last" else None
        seen: dict[Any, Tensor] = {}
        collector = Collector(model)
        taps = [*_looks(model, seen), *collector.taps()]
        logits = model.run(batch, taps, positions=self.positions)
        self.batch = with_clean_logits(batch, logits, metric)
        self.full = self._metric(logits, self.batch)
        self.clean = _clean(model, seen)
        clean = collector.values()
        if rows.ablated is None:
            change = clean.map(torch.neg)
        else:
            change = rows.ablated.minus(clean)
        change = change.masked(batch.mask)
        self.change = expand(model, change, 0, len(model.shape.senders))
        one = 16 * clean.stream.numel() * model.dtype.itemsize
        self.widest = max(1, budget // one)

    def _metric(self, logits: Tensor, batch: TokenBatch) -> np.ndarray:
        return self.metric(logits, batch).double().cpu().numpy()

    @torch.no_grad()
    def effects(self, column: int, senders: np.ndarray) -> np.ndarray:
        """M(edge ablated) − M(clean) per example, `[sender, example]`, float64."""
        found = np.zeros((len(senders), len(self.batch)))
        index = torch.from_numpy(senders).to(self.change.device)
        moved = self.change[index].flatten(1).any(1).cpu().numpy()
        where = np.flatnonzero(moved)
        for start in range(0, len(where), self.widest):
            some = where[start : start + self.widest]
            found[some] = self._patched(column, senders[some]) - self.full
        return found

    def _patched(self, column: int, senders: np.ndarray) -> np.ndarray:
        """M per example with one edge ablated in each copy of the rows."""
        copies = len(senders)
        index = torch.from_numpy(senders).to(self.change.device)
        x = (self._input(column) + self.change[index]).flatten(0, 1)
        batch = self.batch.repeat(copies)
        positions = self.positions
        if positions is not None:
            positions = positions.repeat(copies)
        taps, resume = self._taps(column, x, copies)
        logits = self.model.run(batch, taps, positions=positions, resume=resume)
        self.passes += 1
        return self._metric(logits, batch).reshape(copies, -1)

    def _input(self, column: int) -> Tensor:
        receiver = self.model.shape.receivers[column]
        layer = receiver.component.layer
        if layer is None:
            return self.clean.final
        found = self.clean.attention[layer]
        if receiver.port == "in":
            found = self.clean.mlp[layer]
        assert found is not None
        return found

    def _taps(self, column: int, x: Tensor, copies: int):
        """The taps that give one receiver its input, and where the pass starts."""
        model = self.model
        receiver = model.shape.receivers[column]
        layer = receiver.component.layer
        if layer is None:
            skipped = [model.bypass(i) for i in range(model.shape.n_layers)]
            return [*skipped, Tap(model.final_stream, lambda _: x)], None
        stream = self.clean.blocks[layer].repeat(copies, 1, 1)
        sites = model.layers[layer]
        if receiver.port == "in":
            assert sites.mlp_in is not None
            normed = model.norm(layer, "mlp")(x)
            return [Tap(sites.mlp_in, lambda _: normed)], (layer, stream)
        columns = model.shape.columns(layer, receiver.port)
        head = int(np.searchsorted(columns, column))
        new = self._project(layer, receiver.port, head, x)

        def put(value: Tensor) -> Tensor:
            heads = value.unflatten(-1, (len(columns), -1)).clone()
            heads[:, :, head] = new
            return heads.flatten(2)

        return [Tap(getattr(sites, receiver.port), put)], (layer, stream)

    def _project(self, layer: int, port: str, head: int, x: Tensor) -> Tensor:
        weight, bias = self.model.projection(layer, port)
        out = self.model.norm(layer, "attention")(x) @ weight[head].t()
        return out if bias is None else out + bias[head]


def _looks(model: Backend, seen: dict[Any, Tensor]) -> Iterator[Tap]:
    """Taps that keep block inputs and receivers' pre-norm inputs."""

    def keep(key: Any) -> Callable[[Tensor], None]:
        def fn(value: Tensor) -> None:
            seen[key] = value

        return fn

    for layer, sites in enumerate(model.layers):
        yield Tap(Site(f"blocks.{layer}", "in"), keep(("block", layer)))
        yield Tap(sites.attention_stream, keep(("attention", layer)))
        if sites.mlp_stream is not None:
            yield Tap(sites.mlp_stream, keep(("mlp", layer)))
    yield Tap(model.final_stream, keep("final"))


def _clean(model: Backend, seen: dict[Any, Tensor]) -> _Clean:
    layers = range(model.shape.n_layers)
    return _Clean(
        tuple(seen["block", i] for i in layers),
        tuple(seen["attention", i] for i in layers),
        tuple(seen.get(("mlp", i)) for i in layers),
        seen["final"],
    )
