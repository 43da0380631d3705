"""The same functions over many processes, on an existing engine (`engines`).

A stage's work is cut into tasks: plain values that name a model, prompts and options.
Workers load the model by name and return tables; the driver combines and stores them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from circuitlab import metrics
from circuitlab.ablations import Ablation, Mean, Resample, as_ablation
from circuitlab.backends import Backend, load_model
from circuitlab.combining import combine
from circuitlab.edges import Method, edge_scores
from circuitlab.engines import RETRIES, Engine, Processes
from circuitlab.errors import (
    ArgumentError,
    InternalError,
    require_count,
    require_type,
)
from circuitlab.metrics import Metric, check_metric
from circuitlab.prompts import Prompts
from circuitlab.tables import EdgeTable


@dataclass(frozen=True)
class ModelSpec:
    """A model as workers load it: `load_model`'s arguments, as plain values."""

    spec: str
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    ungroup_kv: bool = False


@lru_cache(maxsize=1)
def worker_model(spec: ModelSpec) -> Backend:
    """The model of a spec, loaded once a process for as long as tasks ask for it."""
    return load_model(
        spec.spec,
        revision=spec.revision,
        dtype=spec.dtype,
        device=spec.device,
        ungroup_kv=spec.ungroup_kv,
    )


METRICS = ("logit_diff", "prob_diff", "answer_logprob", "kl")


def metric_named(name: str) -> Metric:
    """A metric from its name. Raises ArgumentError `metric_unknown`."""
    if name not in METRICS:
        raise ArgumentError(
            "metric_unknown",
            f"{name!r} is no metric that can be sent by name; write one of "
            f"{', '.join(METRICS)}",
            value=name,
            expected=list(METRICS),
        )
    return getattr(metrics, name)()


# --- shards of prompts ---


@dataclass(frozen=True)
class _Shard:
    """The scoring of some prompts, as a worker gets it."""

    model: ModelSpec
    prompts: Prompts
    metric: str
    method: Method | None
    ablation: Ablation
    batch_size: int | None


def _score(shard: _Shard) -> EdgeTable:
    return edge_scores(
        worker_model(shard.model),
        shard.prompts,
        metric_named(shard.metric),
        method=shard.method,
        ablation=shard.ablation,
        batch_size=shard.batch_size,
    )


def sharded_scores(
    model: ModelSpec | str,
    prompts: Prompts,
    metric: Metric,
    *,
    shards: int,
    engine: Engine | None = None,
    method: Method | None = None,
    ablation: Ablation | str = "patch",
    batch_size: int | None = None,
    retries: int = RETRIES,
    progress: Callable[[int, int], None] | None = None,
) -> EdgeTable:
    """Score edges over shards of the prompts; return the table as if scored together.

    Equal to the unsharded scores to 1e-12 in float64. `engine` None is `Processes()`.

    Raises ArgumentError `shards_out_of_range`, `model_not_a_spec` (workers load the
    model by its name), `metric_invalid`, `metric_unknown` (and they make the metric from
    its name), `ablation_not_shardable` (a mean or donors of the whole set: give
    the ablation its `reference`); InternalError `shard_failed` where a shard failed more
    often than `retries`; a shard's refusal as `edge_scores` raises it.
    """
    value = as_ablation(ablation)
    _check_shards(prompts, shards, value)
    remedy = "give a model's name or folder, or a ModelSpec"
    require_type("model_not_a_spec", "model", model, str | ModelSpec, remedy)
    check_metric(metric)
    metric_named(metric.name)
    spec = ModelSpec(model) if isinstance(model, str) else model
    parts = [
        _Shard(spec, part, metric.name, method, value, batch_size)
        for part in _cut(prompts, shards)
    ]
    tables: dict[int, EdgeTable] = {}
    engine = Processes() if engine is None else engine
    for outcome in engine.run(_score, parts, retries):
        if not outcome.ok:
            kind = InternalError if outcome.code is None else ArgumentError
            raise kind(
                outcome.code or "shard_failed",
                f"shard {outcome.index} failed {outcome.attempts} times: {outcome.error}",
                shard=outcome.index,
                attempts=outcome.attempts,
            )
        tables[outcome.index] = outcome.value
        if progress:
            progress(len(tables), len(parts))
    return combine([tables[index] for index in range(len(parts))])


def _check_shards(prompts: Prompts, shards: int, ablation: Ablation) -> None:
    require_count("shards_out_of_range", "shards", shards)
    if shards > len(prompts):
        raise ArgumentError(
            "shards_out_of_range",
            f"shards is {shards}; there are {len(prompts)} prompts",
            value=shards,
            expected=f"1..{len(prompts)}",
        )
    if isinstance(ablation, Mean | Resample) and ablation.reference is None:
        raise ArgumentError(
            "ablation_not_shardable",
            f"{type(ablation).__name__}() takes its values from the whole set, and a "
            "shard is only a part of it; give it a reference",
            value=type(ablation).__name__,
        )


def _cut(prompts: Prompts, shards: int) -> list[Prompts]:
    """Contiguous parts whose sizes differ by one at most."""
    edges = [len(prompts) * i // shards for i in range(shards + 1)]
    return [prompts[a:b] for a, b in itertools.pairwise(edges)]
