"""Evaluate circuits: do the kept edges carry the behaviour?

On the clean prompts every edge outside the circuit carries its ablated value, and the
metric M is measured:

    faithfulness = (M(C) − M(∅)) / (M(full) − M(∅))        (Marks et al. 2024)

a ratio of means over examples; ∅ is the run with every edge ablated. Intervals resample
the examples of that ratio. This stage takes a model, prompts and circuits, and gives
EVAL rows; it never chooses edges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from circuitlab.ablated_side import ablated_side
from circuitlab.ablations import Ablation, AblationSource, Rows, as_ablation
from circuitlab.backends import Backend, TokenBatch, as_backend
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_run import run_circuits
from circuitlab.circuits import Circuit, check_circuits, top_k
from circuitlab.errors import (
    ArgumentError,
    DataError,
    require_count,
    require_counts,
)
from circuitlab.metrics import Metric, accuracy, at_last, kl, with_clean_logits
from circuitlab.prompts import Prompts, check_prompts
from circuitlab.ranking import check_table
from circuitlab.tables import EVAL, PER_EXAMPLE, EdgeTable, Run, now, versions

if TYPE_CHECKING:
    import pandas

MEMORY_BUDGET = 1 << 30
"""Bytes that a pass's stream differences may take, by default."""

CPU_TOKENS = 192
"""Tokens, over circuits and examples, that one pass takes on a CPU. Products are as fast
from there on, and a pass of fewer circuits skips what none of them keeps."""

MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The circuit sizes of the MIB benchmark, as fractions of all edges."""


@dataclass(frozen=True)
class Measured:
    """Per-example numbers of K circuits on n prompts, float64.

    `metric`, `kl` and `accuracy` are `[circuit, example]` (accuracy NaN where prompts
    have no answers to compare); `full` and `ablated` `[example]`. `rounding` `[example]`
    is how far two ways to compute `ablated` differ, where there are two.
    """

    metric: np.ndarray
    kl: np.ndarray
    accuracy: np.ndarray
    full: np.ndarray
    ablated: np.ndarray
    rounding: np.ndarray

    def faithfulness(self, row: int) -> float:
        """Ratio of means of one circuit. Raises `faithfulness_undefined`."""
        return float(ratio_of_means(self.metric[row], self.full, self.ablated))


def ratio_of_means(
    metric: np.ndarray, full: np.ndarray, ablated: np.ndarray
) -> np.ndarray:
    """(mean M(C) − mean M(∅)) / (mean M(full) − mean M(∅)) over the last axis."""
    low = ablated.mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (metric.mean(-1) - low) / (full.mean(-1) - low)


def interval(
    metric: np.ndarray,
    full: np.ndarray,
    ablated: np.ndarray,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the faithfulness, resampling examples.

    NaN for fewer than two examples.
    """
    n = len(metric)
    if n < 2 or samples < 1:
        return float("nan"), float("nan")
    picks = np.random.default_rng(seed).integers(0, n, (samples, n))
    found = ratio_of_means(metric[picks], full[picks], ablated[picks])
    found = found[np.isfinite(found)]
    if not len(found):
        return float("nan"), float("nan")
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def measure(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    circuits: Sequence[Circuit],
    *,
    ablation: Ablation | str = "patch",
    configs_per_pass: int | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Run K circuits on every prompt; return per-example numbers.

    Circuits run as rows of one batch, `configs_per_pass` at a time, examples
    `batch_size` at a time (both from `memory_budget` unless given); neither changes a
    number. Raises as `evaluate` does.
    """
    circuits = check_circuits(circuits)
    code = "memory_budget_invalid"
    memory_budget = require_count(code, "memory_budget", memory_budget)
    model = as_backend(model)
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    masks = [model.shape.mask_of(circuit.edges) for circuit in circuits]
    size, at_once = _chunking(model, prompts, metric, masks, memory_budget)
    size = size if batch_size is None else batch_size
    if configs_per_pass is not None:
        code = "configs_per_pass_invalid"
        at_once = require_count(code, "configs_per_pass", configs_per_pass)
    parts = []
    for rows in source.chunks(size):
        parts.append(_measure_rows(model, rows, metric, masks, at_once))
        if progress:
            progress(min(rows.start + size, len(prompts)), len(prompts))
    joined = [np.concatenate(found, axis=-1) for found in zip(*parts, strict=True)]
    return Measured(*joined)


def _chunking(
    model: Backend, prompts: Prompts, metric: Metric, masks, budget: int
) -> tuple[int, int]:
    """Examples per chunk and circuits per pass whose differences fit the budget."""
    widest = max((int(mask.any(1).sum()) for mask in masks), default=1)
    longest = max(len(row) for row in prompts.clean)
    width = model.shape.d_model * longest
    # Differences of the active senders, one layer's assembled receiver inputs, logits.
    one = (widest + 6 * model.shape.n_heads + 8) * width
    one += 2 * model.shape.d_vocab * (1 if metric.positions == "last" else longest)
    one *= torch.finfo(model.dtype).bits // 8
    size = max(1, min(len(prompts), budget // one))
    at_once = max(1, budget // (one * size))
    if model.device.type == "cpu":
        at_once = min(at_once, max(1, CPU_TOKENS // (size * longest)))
    return size, at_once


@torch.no_grad()
def _measure_rows(model: Backend, rows: Rows, metric: Metric, masks, at_once: int):
    batch = rows.clean
    positions = batch.last if metric.positions == "last" else None
    full = model.run(batch, positions=positions)
    batch = with_clean_logits(batch, full, metric)
    chunk = Chunk(batch, ablated_side(model, rows), positions)
    empty = np.zeros(model.shape.edge_mask.shape, dtype=bool)
    ablated = run_circuits(model, chunk, [empty])[0]
    found = []
    for start in range(0, len(masks), at_once):
        group = masks[start : start + at_once]
        logits = run_circuits(model, chunk, group)
        found += [_numbers(one, batch, metric) for one in logits]
    columns = [np.stack(column) for column in zip(*found, strict=True)]
    columns = columns or [np.zeros((0, len(batch)))] * 3
    low = _array(metric(ablated, batch))
    rounding = np.zeros_like(low)
    if rows.donors is not None and rows.ablated_logits is not None:
        # The donors' own run and the empty circuit differ by rounding alone.
        donors = replace(rows.donors, clean_logits=batch.clean_logits)
        rounding = np.abs(_array(metric(rows.ablated_logits, donors)) - low)
    return (*columns, _array(metric(full, batch)), low, rounding)


def _numbers(logits: Tensor, batch: TokenBatch, metric: Metric):
    last = at_last(logits, batch)
    correct = np.full(len(batch), np.nan)
    if _comparable(batch):
        correct = _array(accuracy()(last, batch))
    return _array(metric(logits, batch)), _array(kl()(last, batch)), correct


def _comparable(batch: TokenBatch) -> bool:
    sets = (*batch.answers, *batch.wrong_answers)
    single = all(len(answer) == 1 for found in sets for answer in found)
    return (
        bool(batch.answers and batch.wrong_answers) and single and all(map(len, sets))
    )


def _array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


# --- evaluations as tables ---


@dataclass(frozen=True)
class Evaluation:
    """One circuit's evaluation: an EVAL row, and the per-example numbers.

    `per_example` has the columns of `PER_EXAMPLE`, in the order of the prompts.
    """

    rows: pa.Table
    per_example: pa.Table
    run: Run
    circuit: Circuit

    def __getattr__(self, name: str) -> Any:
        if name in EVAL.names:
            return self.rows[name][0].as_py()
        raise AttributeError(name)

    def to_pandas(self) -> pandas.DataFrame:
        """The EVAL row as a frame."""
        return self.rows.to_pandas()

    def _repr_html_(self) -> str:
        return self.to_pandas().dropna(axis=1).to_html(index=False)


def evaluate(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    circuit: Circuit,
    *,
    ablation: Ablation | str = "patch",
    label: str = "circuit",
    scored: Prompts | None = None,
    samples: int = 1000,
    seed: int = 0,
    **chunking: Any,
) -> Evaluation:
    """Run one circuit and measure it; return an `Evaluation`.

    `.faithfulness` (with `.faithfulness_low` and `_high`), `.metric`, `.metric_full`,
    `.metric_ablated` (means, in the metric's units), `.kl` (nats, from the full model's
    clean run), `.accuracy`. Give `scored`, the prompts that the scores came from, to
    record whether these overlap them. `chunking` is `measure`'s.

    Raises ArgumentError `edge_unknown`, `ablation_unknown`, `circuit_invalid`,
    `metric_invalid`, `prompts_invalid`, `samples_invalid`, `seed_invalid`,
    `batch_size_invalid`, `configs_per_pass_invalid`, `memory_budget_invalid`; DataError
    `faithfulness_undefined` (the full and the fully ablated metric are equal),
    `prompt_lengths_differ`, `metric_not_finite`.
    """
    plan = EvalPlan(model, prompts, metric, ablation, scored, samples, seed, chunking)
    rows, per_example, run = plan.evaluate([Entry(circuit, label)])
    return Evaluation(rows, per_example, run, circuit)


@dataclass(frozen=True)
class Entry:
    """One circuit to evaluate: what it is, how it was ranked, how many were asked for."""

    circuit: Circuit
    label: str = "circuit"
    rank: str | None = None
    k: int | None = None


@dataclass(frozen=True)
class EvalPlan:
    """What a set of evaluations shares."""

    model: Any
    prompts: Prompts
    metric: Metric
    ablation: Ablation | str = "patch"
    scored: Prompts | None = None
    samples: int = 1000
    seed: int = 0
    chunking: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        require_count("samples_invalid", "samples", self.samples, least=0)
        require_count("seed_invalid", "seed", self.seed, least=0)
        if self.scored is not None:
            check_prompts(self.scored, "scored")

    def evaluate(self, entries: Sequence[Entry]) -> tuple[pa.Table, pa.Table, Run]:
        """EVAL rows, PER_EXAMPLE rows and the run, one row per entry."""
        model = as_backend(self.model)
        started, clock = now(), time.perf_counter()
        measured = measure(
            model,
            self.prompts,
            self.metric,
            [entry.circuit for entry in entries],
            ablation=self.ablation,
            **self.chunking,
        )
        _refuse_degenerate(measured, self.metric)
        rows = [self._row(entry, measured, i) for i, entry in enumerate(entries)]
        table = pa.Table.from_pylist(rows, schema=EVAL)
        return table, _per_example(entries, measured), self._run(model, started, clock)

    def _row(self, entry: Entry, measured: Measured, i: int) -> dict[str, Any]:
        metric = measured.metric[i]
        low, high = interval(
            metric,
            measured.full,
            measured.ablated,
            samples=self.samples,
            seed=self.seed,
        )
        correct = measured.accuracy[i]
        overlap = self.scored and self.prompts.overlaps(self.scored) > 0
        asked = entry.circuit.n_requested if entry.k is None else entry.k
        return {
            "circuit_id": entry.circuit.id,
            "label": entry.label,
            "rank": entry.rank,
            "ablation": describe_name(self.ablation),
            "metric_name": self.metric.name,
            "k": asked,
            "n_edges": len(entry.circuit),
            "n": len(metric),
            "faithfulness": measured.faithfulness(i),
            "faithfulness_low": _known(low),
            "faithfulness_high": _known(high),
            "metric": float(metric.mean()),
            "metric_full": float(measured.full.mean()),
            "metric_ablated": float(measured.ablated.mean()),
            "kl": float(measured.kl[i].mean()),
            "accuracy": _known(float(correct.mean())),
            "prompts_overlap": overlap,
        }

    def _run(self, model: Backend, started: str, clock: float) -> Run:
        from circuitlab.ablations import describe

        return Run(
            kind="eval",
            model=model.info,
            dataset=self.prompts.name,
            dataset_digest=self.prompts.digest,
            n=len(self.prompts),
            policy={
                "method": "circuit_run",
                "metric": self.metric.describe(),
                "ablation": describe(as_ablation(self.ablation)),
                "interval": {"samples": self.samples, "seed": self.seed},
            },
            seed=self.seed,
            started_at=started,
            seconds=time.perf_counter() - clock,
            versions=versions(),
        )


def describe_name(ablation: Ablation | str) -> str:
    """An ablation's name, as it stands in EVAL rows."""
    from circuitlab.ablations import describe

    return str(describe(as_ablation(ablation))["name"])


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _refuse_degenerate(measured: Measured, metric: Metric) -> None:
    full, ablated = measured.full.mean(), measured.ablated.mean()
    scale = max(abs(full), abs(ablated), 1e-12)
    if abs(full - ablated) <= max(1e-6 * scale, 2 * measured.rounding.mean()):
        raise DataError(
            "faithfulness_undefined",
            f"{metric.name} is {full:.4g} both for the full model and with every edge "
            "ablated: faithfulness is 0/0. Use prompts or an ablation that change it",
            metric_full=float(full),
            metric_ablated=float(ablated),
        )


def _per_example(entries: Sequence[Entry], measured: Measured) -> pa.Table:
    count = len(measured.full)
    parts = [
        pa.table(
            {
                "circuit_id": [entry.circuit.id] * count,
                "label": [entry.label] * count,
                "k": [entry.circuit.n_requested if entry.k is None else entry.k]
                * count,
                "prompt": list(range(count)),
                "metric": measured.metric[i],
                "metric_full": measured.full,
                "metric_ablated": measured.ablated,
                "kl": measured.kl[i],
            },
            schema=PER_EXAMPLE,
        )
        for i, entry in enumerate(entries)
    ]
    return pa.concat_tables(parts)


# --- curves ---


@dataclass(frozen=True)
class Curve:
    """Evaluations over circuit sizes: EVAL rows with `k` (asked) and `n_edges` (kept)."""

    rows: pa.Table
    per_example: pa.Table
    run: Run
    circuits: tuple[Circuit, ...]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a size."""
        return self.rows.to_pandas().dropna(axis=1, how="all")

    @cached_property
    def cpr(self) -> float | None:
        """MIB's CPR: the area under faithfulness over the ten fractions, circuits ranked
        by support. None unless the curve was made with `sizes="mib"`."""
        return self._area("support", lambda f: f)

    @cached_property
    def cmd(self) -> float | None:
        """MIB's CMD: the area under |1 − faithfulness|, ranked by magnitude."""
        return self._area("magnitude", lambda f: np.abs(1 - f))

    def _area(self, rank: str, of: Callable[[np.ndarray], np.ndarray]) -> float | None:
        rows = [row for row in self.rows.to_pylist() if row["rank"] == rank]
        rows = [row for row in rows if row["label"] == "circuit"]
        universe = self.run.model.shape.n_edges if self.run.model.shape else 0
        asked = {row["k"]: row["faithfulness"] for row in rows}
        wanted = [int(fraction * universe) for fraction in MIB_FRACTIONS]
        if not all(k in asked for k in wanted):
            return None
        values = of(np.array([asked[k] for k in wanted]))
        return float(np.trapezoid(values, MIB_FRACTIONS))

    def _repr_html_(self) -> str:
        return self.to_pandas().to_html(index=False)


def curve(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    edges: EdgeTable,
    *,
    sizes: Iterable[int] | Literal["mib"] | None = None,
    rank: Literal["magnitude", "support"] = "magnitude",
    ablation: Ablation | str = "patch",
    prune: bool = True,
    scored: Prompts | None = None,
    samples: int = 1000,
    seed: int = 0,
    **chunking: Any,
) -> Curve:
    """Evaluate the top-k circuits of a score table over sizes.

    `sizes` are numbers of edges; None takes a geometric ladder; `"mib"` the ten fractions
    of MIB, by support and by magnitude, which give `.cpr` and `.cmd`. Faithfulness above
    1 is overshoot, and is left as it is. Raises ArgumentError `sizes_invalid`,
    `edge_table_invalid`, and as `evaluate` and `top_k` do.
    """
    check_table(edges)
    universe = edges.shape.n_edges
    ranks: tuple[Any, ...] = (rank,)
    if isinstance(sizes, str) and sizes == "mib":
        asked = [int(fraction * universe) for fraction in MIB_FRACTIONS]
        ranks = ("support", "magnitude")
    else:
        asked = _sizes(sizes, universe)
    entries = [
        Entry(top_k(edges, k, rank=by, prune=prune), "circuit", by, k)
        for by in ranks
        for k in asked
    ]
    plan = EvalPlan(model, prompts, metric, ablation, scored, samples, seed, chunking)
    rows, per_example, run = plan.evaluate(entries)
    run = replace(run, parent=edges.run_id)
    return Curve(rows, per_example, run, tuple(entry.circuit for entry in entries))


def _sizes(sizes: Iterable[int] | str | None, universe: int) -> list[int]:
    if sizes is None:
        return ladder(universe)
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ArgumentError(
            "sizes_invalid",
            f"{sizes!r} is no list of sizes; write numbers of edges, or 'mib'",
            value=sizes,
            expected="numbers of edges, 'mib' or None",
        )
    asked = sorted(set(require_counts("k_out_of_range", "sizes", sizes, least=0)))
    if not asked:
        raise ArgumentError(
            "sizes_invalid",
            "sizes is empty; write at least one number of edges, or leave it out",
            value=[],
            expected="numbers of edges, 'mib' or None",
        )
    return asked


def ladder(universe: int, steps: int = 10) -> list[int]:
    """About `steps` circuit sizes, evenly spaced in the logarithm, up to every edge."""
    first = max(1, universe // 1000)
    return sorted({round(float(k)) for k in np.geomspace(first, universe, steps)})
