"""Selectors: from edge scores to circuits, and how two circuits overlap.

Takes edge tables, gives circuits. It runs no model: whether a circuit does the work is
for `evaluate` to say.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import numpy as np

from circuitlab.circuit import SCHEMA as SCHEMA
from circuitlab.circuit import Circuit as Circuit
from circuitlab.circuit import check_circuit as check_circuit
from circuitlab.circuit import check_circuits as check_circuits
from circuitlab.circuit import common_shape as common_shape
from circuitlab.circuit import prune as prune
from circuitlab.errors import ArgumentError, require_type
from circuitlab.graph import readers
from circuitlab.ranking import (
    Band,
    Cut,
    Mass,
    Rank,
    RankedEdges,
    Request,
    Selectable,
    TopFraction,
    TopK,
    best_first,
    check_k,
    rank_edges,
)
from circuitlab.sites import ModelShape, parse_component, parse_edge
from circuitlab.tables import EdgeTable

if TYPE_CHECKING:
    from circuitlab.select import EdgeSelector, SiteSelector

Found = TypeVar("Found")


@overload
def top_k(
    edges: EdgeTable | None = None,
    k: SupportsIndex | None = None,
    *,
    by: EdgeTable | None = None,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit: ...
@overload
def top_k(
    edges: Selectable[Found] | None = None,
    k: SupportsIndex | None = None,
    *,
    by: Selectable[Found] | None = None,
    rank: str | None = None,
    pins: Iterable[str] = (),
    where: SiteSelector | str | None = None,
) -> Found: ...
def top_k(edges=None, k=None, *, by=None, prune=True, **how):
    """The `k` edges of largest key, without what dangles.

    The key is |score| (`rank="magnitude"`, the default for edges) or the support
    (`rank="support"`: −score, turned where lower is better). Only rows with status `ok`
    and a number are rankable; infinities rank. Ties break in canonical order, so
    `top_k` is nested before pruning. `pins` are always kept, and `k` counts the rest.
    `where` narrows the candidates: an EdgeSelector or its text.

    A table of sites gives its own kind of selection. Raises ArgumentError
    `k_out_of_range`, `rank_invalid`, `edge_unknown`, `selector_syntax`, or
    `by_score_invalid` (reasons `grain`, `duplicate_rows`, `by_table_empty`).
    """
    cut = TopK(k)  # type: ignore[arg-type]
    return _cut(_table(edges, by), cut, prune, how)


@overload
def top_fraction(
    edges: EdgeTable | None = None,
    fraction: float = 0.01,
    *,
    by: EdgeTable | None = None,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit: ...
@overload
def top_fraction(
    edges: Selectable[Found] | None = None,
    fraction: float = 0.01,
    *,
    by: Selectable[Found] | None = None,
    rank: str | None = None,
    pins: Iterable[str] = (),
    where: SiteSelector | str | None = None,
) -> Found: ...
def top_fraction(edges=None, fraction=0.01, *, by=None, prune=True, **how):
    """The best `fraction` of the rankable edges, rounded up; 0 gives none.

    Everything else as in `top_k`. Raises ArgumentError `fraction_out_of_range`.
    """
    return _cut(_table(edges, by), TopFraction(fraction), prune, how)


@overload
def threshold(
    edges: EdgeTable | None = None,
    above: float | None = None,
    below: float | None = None,
    *,
    by: EdgeTable | None = None,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit: ...
@overload
def threshold(
    edges: Selectable[Found] | None = None,
    above: float | None = None,
    below: float | None = None,
    *,
    by: Selectable[Found] | None = None,
    rank: str | None = None,
    pins: Iterable[str] = (),
    where: SiteSelector | str | None = None,
) -> Found: ...
def threshold(edges=None, above=None, below=None, *, by=None, prune=True, **how):
    """The edges whose key (see `top_k`) is above and below the bounds, both strict.

    Equal to `top_k` at the same cut. Raises ArgumentError `threshold_invalid` without
    a bound or for NaN; else as `top_k`.
    """
    return _cut(_table(edges, by), Band(above, below), prune, how)


def cumulative_mass(
    edges: EdgeTable,
    fraction: float,
    *,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit:
    """The fewest best edges that hold `fraction` of the sum of all positive keys.

    Edges of key zero are never taken. Everything else as in `top_k`. Raises
    ArgumentError `fraction_out_of_range`, or `mass_not_finite` for infinite scores.
    """
    how = {"rank": rank, "pins": pins, "where": where}
    return _cut(edges, Mass(fraction), prune, how)


def greedy(
    edges: EdgeTable,
    k: SupportsIndex,
    *,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit:
    """`k` edges taken from the logits backwards: each leads to the logits when taken.

    Always takes the best edge into what is reached so far; the sender of a new edge is
    reached from then on. With `where`, fewer edges may be within reach: provenance
    says `exhausted`. Options and errors as in `top_k`. Costs E log E.

    Source: EAP-IG's `apply_greedy`, whose circuits it equals where no scores tie.
    """
    ranked = rank_edges(edges, rank=rank, pins=pins, where=where)
    wanted = check_k(k, len(ranked.rows))
    taken = _from_the_logits(ranked, wanted, edges.run.model.shape)
    facts = {"selector": "greedy", "text": f"greedy(k={k}){ranked.text}", "k": wanted}
    facts |= {"exhausted": True} if len(taken) < wanted else {}
    return _chosen(ranked, taken, prune, facts)


def _from_the_logits(
    ranked: RankedEdges, k: int, shape: ModelShape | None
) -> list[int]:
    """Row indices of the `k` edges. The heap holds ranks, so ties are broken already."""
    senders: list[str] = []
    into: dict[str, list[int]] = defaultdict(list)
    read_by: dict[str, tuple[str, ...]] = {}
    for place, row in enumerate(ranked.rows.tolist()):
        sender, _, receiver = ranked.names[row].partition("->")
        senders.append(sender)
        if receiver not in read_by:
            read_by[receiver] = readers(receiver, shape)
        for component in read_by[receiver]:
            into[component].append(place)
    reached: set[str] = set()
    offered: set[int] = set()
    heap: list[int] = []
    taken: list[int] = []

    def reach(component: str) -> None:
        if component not in reached:
            reached.add(component)
            # An edge into a KV group feeds several heads, and is offered once.
            for place in set(into[component]) - offered:
                offered.add(place)
                heapq.heappush(heap, place)

    for component in ["logits", *(parse_edge(pin).sender.name for pin in ranked.pins)]:
        reach(component)
    while heap and len(taken) < k:
        place = heapq.heappop(heap)
        taken.append(int(ranked.rows[place]))
        reach(senders[place])
    return taken


def top_nodes(
    edges: EdgeTable,
    k: SupportsIndex,
    *,
    rank: Rank | None = None,
    prune: bool = True,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> Circuit:
    """The edges among the `k` best components, `input` and `logits`.

    A component's score is the sum over its outgoing edges, which is the first-order
    effect of corrupting all that it writes. `input` is always kept, and `k` counts
    the others. Options and errors as in `top_k`; pins are edges here too.
    """
    ranked = rank_edges(edges, rank=rank, pins=pins, where=where)
    signed = edges.scores if ranked.rank == "magnitude" else edges.support
    ends: dict[int, tuple[str, str]] = {}
    total: dict[str, float] = defaultdict(float)
    for row in ranked.rows.tolist():
        sender, _, receiver = ranked.names[row].partition("->")
        ends[row] = sender, receiver
        total[sender] += float(signed[row])
    nodes = sorted(total.keys() - {"input"}, key=lambda c: parse_component(c).order)
    keys = np.array([total[node] for node in nodes])
    keys = np.abs(keys) if ranked.rank == "magnitude" else keys
    best = best_first(keys, ~np.isnan(keys), np.arange(len(nodes)))
    kept = {nodes[i] for i in best[: check_k(k, len(best))]} | {"input", "logits"}
    shape = edges.run.model.shape
    receivers = {receiver for _, receiver in ends.values()}
    read = {r for r in receivers if not kept.isdisjoint(readers(r, shape))}
    rows = [row for row, (s, r) in ends.items() if s in kept and r in read]
    text = f"top_nodes(k={k}){ranked.text}"
    facts = {"selector": "top_nodes", "text": text, "k_nodes": int(k)}
    return _chosen(ranked, rows, prune, facts)


def _table(edges: Any, by: Any) -> Any:
    if (edges is None) == (by is None):
        raise ArgumentError(
            "table_needed",
            "pass one table of scores, as in top_k(edges, 50) or top_k(k=50, by=edges)",
            value=[type(edges).__name__, type(by).__name__],
        )
    return edges if by is None else by


def _cut(table: Any, cut: Cut, pruned: bool, how: Mapping[str, Any]):
    """Apply a cut to an edge table, or ask another table for its own selection."""
    if getattr(table, "kind", None) == "EDGE":
        # EDGE rows of a read table, loaded from JSON say, are an edge table's rows.
        table = table.to_edges()
    if not isinstance(table, EdgeTable) and isinstance(table, Selectable):
        pins = tuple(how.get("pins", ()))
        return table.select(Request(cut, how.get("rank"), pins, how.get("where")))
    ranked = rank_edges(table, **how)
    rows = ranked.rows[cut.take(ranked.keys[ranked.rows])]
    text = f"{cut}{ranked.text}"
    facts = {"selector": str(cut).partition("(")[0], "text": text}
    facts |= {"k": len(rows)} if isinstance(cut, TopK) else {}
    return _chosen(ranked, rows.tolist(), pruned, facts)


def _chosen(
    ranked: RankedEdges, rows: Iterable[int], pruned: bool, facts: Mapping[str, Any]
) -> Circuit:
    """The circuit of the chosen rows and the pins, pruned or not."""
    chosen = frozenset(ranked.names[row] for row in rows)
    edges = chosen | set(ranked.pins)
    run = ranked.table.run
    provenance = {
        "schema": SCHEMA,
        **ranked.provenance,
        **facts,
        "selected": len(chosen),
        "n": len(edges),
        "pruned": False,
    }
    found = Circuit(edges, run.model.shape, run, provenance)
    return prune(found, pins=ranked.pins) if pruned else found


def auroc(edges: EdgeTable, truth: Circuit, *, rank: Rank | None = None) -> float:
    """How well the scores tell a known circuit's edges from all others: 0.5 is chance.

    The chance that an edge of the circuit has the larger key (see `top_k`), ties
    counted half; the universe is the table's rankable rows. Raises ArgumentError
    `truth_invalid` where they are all in the circuit, or none is.
    """
    check_circuit(truth, "truth")
    ranked = rank_edges(edges, rank=rank)
    inside = np.array([ranked.names[row] in truth.edges for row in ranked.rows], bool)
    n_in, n_out = int(inside.sum()), int((~inside).sum())
    if not n_in or not n_out:
        raise ArgumentError(
            "truth_invalid",
            f"{n_in} of the {len(inside):,} rankable edges are in the circuit, and a curve "
            "needs some inside and some outside; score more edges, or give another circuit",
            value=n_in,
        )
    _, place, counts = np.unique(
        ranked.keys[ranked.rows], return_inverse=True, return_counts=True
    )
    # The mean rank of each group of ties, from 1 for the smallest key.
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    total = float(mean_rank[place[inside]].sum())
    return (total - n_in * (n_in + 1) / 2) / (n_in * n_out)


@dataclass(frozen=True)
class Overlap:
    """How two circuits overlap, and in which universe of edges that was counted.

    `precision` is the share of `found` that is in `published`, `recall` the share of
    `published` that was found, `false_positive_rate` the share of the universe's other
    edges that `found` holds; None where the share is of nothing.
    """

    iou: float
    weighted_iou: float | None
    precision: float | None
    recall: float | None
    false_positive_rate: float | None
    n_found: int
    n_published: int
    n_both: int
    n_universe: int | None
    outside: int


def overlap(
    found: Circuit,
    published: Circuit,
    *,
    universe: Circuit | ModelShape | None = None,
    weights: EdgeTable | Mapping[str, float] | None = None,
) -> Overlap:
    """Compare a circuit with another, such as a published one.

    `universe` (the shape of either circuit by default) is what could have been found:
    edges outside it are left out and counted in `outside`. With `weights` (|score| of
    a table, or a number per edge), `weighted_iou` is the weight of the common edges
    over that of all; edges without a weight weigh nothing. Raises ArgumentError
    `circuit_shape_mismatch` where they are of models of different shape.
    """
    for circuit in (found, published):
        check_circuit(circuit)
    shape = shape_of_all(found, published, universe)
    if universe is None:
        universe = shape
    every = None if universe is None else frozenset(universe_names(universe))
    a, b = found.edges, published.edges
    if every is not None:
        a, b = a & every, b & every
    both, either = a & b, a | b
    others = None if every is None else len(every - b)
    return Overlap(
        iou=len(both) / len(either) if either else 1.0,
        weighted_iou=_weighted_iou(both, either, weights),
        precision=_share(len(both), len(a)),
        recall=_share(len(both), len(b)),
        false_positive_rate=_share(len(a - b), others),
        n_found=len(a),
        n_published=len(b),
        n_both=len(both),
        n_universe=None if every is None else len(every),
        outside=len(found.edges | published.edges) - len(either),
    )


def shape_of_all(*parts: Circuit | ModelShape | None) -> ModelShape | None:
    """The shape that circuits (and shapes) share, if one has any. Raises ArgumentError
    `circuit_shape_mismatch`, or `universe_invalid` for anything else."""
    shape = None
    for part in parts:
        if part is not None:
            _require_universe(part)
            own = part if isinstance(part, ModelShape) else part.shape
            shape = common_shape(shape, own)
    return shape


def universe_names(universe: Circuit | ModelShape) -> Iterable[str]:
    """The edges of a universe. Raises ArgumentError `universe_invalid`."""
    _require_universe(universe)
    if isinstance(universe, ModelShape):
        return universe.edge_names
    return universe.edges


def _require_universe(universe: Circuit | ModelShape) -> None:
    remedy = "give a circuit, whose edges could have been found, or a model's shape"
    kinds = Circuit | ModelShape
    require_type("universe_invalid", "universe", universe, kinds, remedy)


def _share(part: int, whole: int | None) -> float | None:
    return part / whole if whole else None


def _weighted_iou(
    both: frozenset[str],
    either: frozenset[str],
    weights: EdgeTable | Mapping[str, float] | None,
) -> float | None:
    if weights is None:
        return None
    if isinstance(weights, EdgeTable):
        size = np.nan_to_num(np.abs(weights.scores), posinf=np.inf).tolist()
        weights = dict(zip(weights.rows["edge"].to_pylist(), size, strict=True))
    total = sum(abs(weights.get(name, 0.0)) for name in sorted(either))
    common = sum(abs(weights.get(name, 0.0)) for name in sorted(both))
    return common / total if total and np.isfinite(total) else None
