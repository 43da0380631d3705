"""Tables of edge scores, put together and summed by node.

Takes EDGE tables and gives EDGE tables or node scores; it runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from circuitlab.errors import ArgumentError
from circuitlab.prompts import joined_name
from circuitlab.sites import Component, ModelShape, parse_component
from circuitlab.tables import EdgeTable, digest, edge_rows


def moments(
    total: np.ndarray, squares: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean and standard error from sums; no standard error for n = 1."""
    mean = total / n
    if n == 1:
        return mean, None
    variance = (squares - n * mean**2).clip(0) / (n - 1)
    return mean, np.sqrt(variance / n)


def combine(tables: Sequence[EdgeTable]) -> EdgeTable:
    """Combine tables of disjoint prompts into one, as if scored together.

    Counts, means and sums of squares combine exactly (to rounding in float64). Raises
    ArgumentError `combine_empty`, `combine_mismatch` where policy, model or edges
    differ, `combine_repeated` for a table given twice, and `mean_reference_needed` for
    tables that were each ablated with the mean over their own prompts.
    """
    if not tables:
        raise ArgumentError("combine_empty", "there are no tables to combine", value=0)
    first = tables[0]
    if len(tables) == 1:
        return first
    _require_distinct(tables)
    for table in tables:
        _require_same(first, table)
    total = sum(_total(table) for table in tables)
    squares = sum(_squares(table) for table in tables)
    n = sum(table.run.n for table in tables)
    mean, stderr = moments(np.asarray(total), np.asarray(squares), n)
    rows = _with_numbers(first, mean, stderr, n)
    digests = [table.run.dataset_digest for table in tables]
    provenance = {**first.run.provenance, "sample_count": n, "shards": len(tables)}
    if "donors" in provenance:
        provenance["donors"] = [
            donor for table in tables for donor in table.run.provenance["donors"]
        ]
    for name in ("completeness_error", "metric_clean", "metric_ablated"):
        known = [
            table for table in tables if table.run.provenance.get(name) is not None
        ]
        if len(known) == len(tables):
            weighted = [t.run.provenance[name] * t.run.n for t in known]
            provenance[name] = sum(weighted) / n
    run = replace(
        first.run,
        dataset=joined_name(table.run.dataset for table in tables),
        dataset_digest=digest(*digests),
        n=n,
        seed=first.run.seed if len({t.run.seed for t in tables}) == 1 else None,
        provenance=provenance,
        seconds=sum(table.run.seconds for table in tables),
    )
    return EdgeTable(rows, run)


def _with_numbers(table: EdgeTable, mean, stderr, n: int) -> pa.Table:
    """The rows of a table (of all edges, or of some) with other numbers."""
    shape = table.shape
    places = np.array(
        [shape.edge_index[name] for name in table.rows["edge"].to_pylist()]
    )
    score, error = np.zeros(shape.n_edges), np.full(shape.n_edges, np.nan)
    status = ["unavailable"] * shape.n_edges
    score[places] = mean
    for place, one in zip(places, table.rows["status"].to_pylist(), strict=True):
        status[place] = one
    if stderr is not None:
        error[places] = stderr
    return edge_rows(shape, score, error, n, status).take(pa.array(places))


def _require_distinct(tables: Sequence[EdgeTable]) -> None:
    seen = {(table.run_id, table.run.started_at) for table in tables}
    if len(seen) < len(tables):
        raise ArgumentError(
            "combine_repeated",
            "a table is given more than once, and its examples would count twice; give each "
            "once",
            value=len(tables),
            expected=len(seen),
        )
    ablation = tables[0].run.policy["ablation"]
    if ablation["name"].startswith("mean") and not ablation["reference"]:
        raise ArgumentError(
            "mean_reference_needed",
            "these tables were each ablated with the mean over their own prompts, so they "
            "are not parts of one computation; score all the prompts in one run, or each "
            "part with Mean(reference=prompts)",
            value=None,
            expected="Mean(reference=...)",
        )


def _require_same(first: EdgeTable, table: EdgeTable) -> None:
    same_policy = first.run.policy_digest == table.run.policy_digest
    same_model = first.run.model.identity() == table.run.model.identity()
    same_rows = first.rows.select(["edge", "status"]).equals(
        table.rows.select(["edge", "status"])
    )
    if same_policy and same_model and same_rows and first.run.policy["grain"] == "site":
        return
    what = "policy" if not same_policy else "model" if not same_model else "rows"
    raise ArgumentError(
        "combine_mismatch",
        f"the tables differ in their {what}: only tables of the same computation at grain "
        "site, on other prompts, can be combined",
        policies=[first.run.policy_digest, table.run.policy_digest],
        differs=what,
    )


def _total(table: EdgeTable) -> np.ndarray:
    return np.nan_to_num(table.scores) * table.run.n


def _squares(table: EdgeTable) -> np.ndarray:
    n = table.run.n
    mean = np.nan_to_num(table.scores)
    stderr = table.rows["stderr"].to_numpy(zero_copy_only=False).astype(np.float64)
    return np.nan_to_num(stderr) ** 2 * n * (n - 1) + n * mean**2


def scores_by_node(edges: EdgeTable) -> pa.Table:
    """Node scores of senders: Σ of the scores of the edges that leave them.

    That is Δ(sender) · ∂M/∂(sender's output), the node attribution patching score, in
    the metric's units, mean over examples at every grain. Returns columns component,
    kind, layer, head, score, in canonical order; a component whose edges are all
    unreachable has a null score.
    """
    rows = _counted_once(edges).select(["sender", "score"])
    found = rows.group_by("sender", use_threads=False).aggregate([("score", "sum")])
    per_example = edges.run.policy.get("grain") == "example"
    divisor = edges.run.n if per_example else 1
    scores = dict(
        zip(found["sender"].to_pylist(), found["score_sum"].to_pylist(), strict=True)
    )
    scores = {
        name: None if total is None else total / divisor
        for name, total in scores.items()
    }
    parts = [parse_component(name) for name in scores]
    parts.sort(key=lambda part: part.order)
    return pa.table(
        {
            "component": [part.name for part in parts],
            "kind": [part.kind for part in parts],
            "layer": pa.array([part.layer for part in parts], pa.int32()),
            "head": pa.array([part.head for part in parts], pa.int32()),
            "score": pa.array([scores[part.name] for part in parts], pa.float64()),
        }
    )


def _counted_once(edges: EdgeTable) -> pa.Table:
    """The rows, without those whose score repeats another's (`receivers="head"`)."""
    if edges.run.policy.get("receivers") != "head":
        return edges.rows
    names = ["sender", "receiver", "score", "position", "sample_id"]
    kept, seen = [], set()
    for i, row in enumerate(edges.rows.select(names).to_pylist()):
        unit = _tied_unit(parse_component(row["receiver"]), edges.shape)
        key = (row["sender"], unit, row["position"], row["sample_id"])
        if row["score"] is None or key not in seen:
            kept.append(i)
        if row["score"] is not None:
            seen.add(key)
    return edges.rows.take(pa.array(kept, pa.int64()))


def _tied_unit(component: Component, shape: ModelShape) -> tuple[int | None, object]:
    """What shares one score at `receivers="head"`: a head, or a KV group's heads."""
    if component.kind == "head":
        assert component.head is not None
        return component.layer, component.head // (shape.n_heads // shape.n_kv_heads)
    if component.kind == "kv":
        return component.layer, component.head
    return component.layer, component.kind
