"""Which rows win: cuts as values, and one deterministic order to apply them to.

A cut takes keys (larger is better) and knows neither edges nor sites, so that edge
tables and site tables are cut by the same rules. Takes tables, gives row indices.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import numpy as np

from circuitlab.errors import ArgumentError, require_type
from circuitlab.sites import Edge, parse_edge
from circuitlab.tables import EdgeTable

if TYPE_CHECKING:
    from circuitlab.select import EdgeSelector, SiteSelector

Rank = Literal["magnitude", "support"]
Found = TypeVar("Found", covariant=True)


@dataclass(frozen=True)
class TopK:
    """The `k` best rows. Raises `k_out_of_range` where there are fewer."""

    k: int

    def take(self, keys: np.ndarray) -> slice:
        return slice(0, check_k(self.k, len(keys)))

    def __str__(self) -> str:
        return f"top_k(k={self.k})"


@dataclass(frozen=True)
class TopFraction:
    """The best `fraction` of the rows, rounded up: any positive one gives a row."""

    fraction: float

    def take(self, keys: np.ndarray) -> slice:
        fraction = check_fraction(self.fraction)
        if fraction == 0 or not len(keys):
            return slice(0, 0)
        # Rounded before the ceiling, or 0.07 of 100 would be eight.
        return slice(0, max(1, math.ceil(round(fraction * len(keys), 9))))

    def __str__(self) -> str:
        return f"top_fraction(fraction={self.fraction!r})"


@dataclass(frozen=True)
class Band:
    """The rows whose key is above and below the bounds, both strict."""

    above: float | None = None
    below: float | None = None

    def __post_init__(self):
        given = (self.above, self.below)
        bounds = [bound for bound in given if bound is not None]
        if not bounds or any(not isinstance(b, Real) or b != b for b in bounds):
            raise ArgumentError(
                "threshold_invalid",
                "a threshold needs above=, below= or both, each a number and not NaN; "
                f"they are {given}",
                value=given,
            )

    def take(self, keys: np.ndarray) -> slice:
        start = 0 if self.below is None else np.count_nonzero(keys >= self.below)
        stop = len(keys) if self.above is None else np.count_nonzero(keys > self.above)
        return slice(int(start), max(int(start), int(stop)))

    def __str__(self) -> str:
        return f"threshold(above={self.above!r}, below={self.below!r})"


@dataclass(frozen=True)
class Mass:
    """The fewest best rows that hold `fraction` of the sum of all positive keys."""

    fraction: float

    def take(self, keys: np.ndarray) -> slice:
        fraction = check_fraction(self.fraction)
        positive = keys[keys > 0]
        if not np.isfinite(positive).all():
            raise ArgumentError(
                "mass_not_finite",
                "an infinite score has no share of a total; use top_k or threshold",
                value=int(np.isinf(positive).sum()),
            )
        if fraction == 0 or not len(positive):
            return slice(0, 0)
        if fraction == 1:
            return slice(0, len(positive))
        held = np.cumsum(positive)
        # A share that is met but for rounding is met.
        wanted = fraction * held[-1] * (1 - 1e-12)
        return slice(0, int(np.searchsorted(held, wanted)) + 1)

    def __str__(self) -> str:
        return f"cumulative_mass(fraction={self.fraction!r})"


Cut = TopK | TopFraction | Band | Mass


@dataclass(frozen=True)
class Request:
    """What a caller of `top_k`, `top_fraction` or `threshold` asked of a table.

    `rank` is None where the caller left the choice to the table, whose own words for
    rankings these are.
    """

    cut: Cut
    rank: str | None = None
    pins: tuple[str, ...] = ()
    where: EdgeSelector | SiteSelector | str | None = None

    def __str__(self) -> str:
        """The request as the text that provenance records."""
        parts = [str(self.cut)]
        parts += [f"rank={self.rank}"] if self.rank else []
        parts += [f"where={str(self.where)!r}"] if self.where is not None else []
        return " ".join(parts)


@runtime_checkable
class Selectable(Protocol[Found]):
    """A table of something else than edges that can be cut, such as ACT rows."""

    def select(self, request: Request) -> Found:
        """Give the table's own kind of selection."""
        ...


def best_first(keys: np.ndarray, rankable: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Indices of the rankable rows, largest key first.

    `keys` float64 [row], `rankable` bool [row], `order` int [row]: the canonical order,
    which breaks ties; rows of equal order keep their place in the table.
    """
    rows = np.flatnonzero(rankable)
    return rows[np.lexsort((rows, order[rows], -keys[rows]))]


@dataclass(frozen=True)
class RankedEdges:
    """An edge table's rankable rows, best first, with what was left out and why.

    `rows` are row indices; `keys` float64 [row] for every row of the table. Pins are
    canonical names, and stand in no row of `rows`.
    """

    table: EdgeTable
    names: list[str]
    keys: np.ndarray
    rows: np.ndarray
    rank: Rank
    excluded: Mapping[str, int]
    pins: tuple[str, ...]
    where: str | None

    @property
    def text(self) -> str:
        """Ranking and filter, as they stand in a selection's text."""
        where = "" if self.where is None else f" where={self.where!r}"
        return f" rank={self.rank}{where}"

    @property
    def provenance(self) -> dict[str, Any]:
        """What is known before a cut: plain JSON values."""
        policy = self.table.run.policy
        return {
            "run_id": self.table.run_id,
            "policy_digest": self.table.run.policy_digest,
            "method": policy.get("method"),
            "reduction": policy.get("reduction"),
            "target": policy.get("metric"),
            "rank": self.rank,
            "where": self.where,
            "rankable": len(self.rows),
            "excluded": dict(self.excluded),
            "pins": list(self.pins),
        }


def rank_edges(
    table: EdgeTable,
    *,
    rank: Rank | None = None,
    pins: Iterable[str] = (),
    where: EdgeSelector | str | None = None,
) -> RankedEdges:
    """Rank an edge table's rows by |score| (the default) or by support.

    Rankable are rows with status `ok` and a number that `where` matches; the others
    are counted by reason: their status, `nan`, or `where`. Raises as `top_k` does.
    """
    check_table(table)
    if rank not in ("magnitude", "support", None):
        raise ArgumentError(
            "rank_invalid",
            f"rank is {rank!r}; write magnitude or support",
            value=rank,
            expected=["magnitude", "support"],
        )
    names = _rankable_names(table)
    scores = table.scores
    keys = table.support if rank == "support" else np.abs(scores)
    selector = _selector(where)
    named = check_names(pins, "pins")
    pinned = _pinned(table, {*named, *(selector.pinned if selector else ())})
    reasons = _reasons(table, selector)
    excluded = Counter(reason for reason in reasons if reason)
    free = np.array([not reason for reason in reasons], dtype=bool)
    if pinned:
        free &= ~np.isin(np.array(names, dtype=object), pinned)
    rows = best_first(keys, free, _canonical_order(table, names))
    text = None if selector is None else str(selector)
    return RankedEdges(
        table, names, keys, rows, rank or "magnitude", excluded, pinned, text
    )


def _rankable_names(table: EdgeTable) -> list[str]:
    """The rows' edge names. Raises `by_score_invalid` unless there is one row an edge."""
    if not len(table):
        _refuse("by_table_empty", "the table has no rows")
    for column in ("position", "sample_id"):
        if table.rows[column].null_count < len(table):
            _refuse(
                "grain",
                f"the rows are by {column}; sum or average them over it first",
            )
    names = table.rows["edge"].to_pylist()
    if len(set(names)) < len(names):
        _refuse("duplicate_rows", "an edge has several rows; combine them first")
    return names


def _refuse(reason: str, text: str) -> NoReturn:
    message = f"the table cannot rank edges: {text}"
    raise ArgumentError("by_score_invalid", message, reason=reason)


def _selector(where: EdgeSelector | str | None) -> EdgeSelector | None:
    if where is None:
        return None
    from circuitlab.select import EdgeSelector, parse_edge_selector

    remedy = (
        "write a selector's text, as 'a5-9.*<q> & |score|>0.01', or an EdgeSelector"
    )
    require_type("where_invalid", "where", where, str | EdgeSelector, remedy)
    return parse_edge_selector(where) if isinstance(where, str) else where


def _pinned(table: EdgeTable, pins: set[str]) -> tuple[str, ...]:
    """Pins in canonical spelling and order. Raises `edge_unknown`."""
    edges = sorted((parse_edge(pin) for pin in pins), key=lambda edge: edge.order)
    shape = table.run.model.shape
    if shape is not None and edges:
        shape.mask_of([edge.name for edge in edges])
    return tuple(edge.name for edge in edges)


def _reasons(table: EdgeTable, selector: EdgeSelector | None) -> list[str]:
    """Why each row is not rankable; empty where it is."""
    reasons = table.rows["status"].to_numpy(zero_copy_only=False).astype(object)
    missing = (reasons == "ok") & np.isnan(table.scores)
    reasons = np.where(missing, "nan", np.where(reasons == "ok", "", reasons))
    if selector is not None:
        reasons = np.where(selector.mask(table), reasons, "where")
    return reasons.tolist()


def _canonical_order(table: EdgeTable, names: Sequence[str]) -> np.ndarray:
    shape = table.run.model.shape
    # Rows of a fresh table are in canonical order already.
    if shape is not None and tuple(names) == shape.edge_names:
        return np.arange(len(names))
    known = shape.edge_index if shape is not None else {}
    if all(name in known for name in names):
        return np.array([known[name] for name in names])
    order = [parse_edge(name).order for name in names]
    places = {key: place for place, key in enumerate(sorted(set(order)))}
    return np.array([places[key] for key in order])


def check_table(edges: object, name: str = "edges") -> None:
    """Raise ArgumentError `edge_table_invalid` for anything but a table of edge scores."""
    remedy = "give a table of edge scores, as edge_scores(…) returns it"
    require_type("edge_table_invalid", name, edges, EdgeTable, remedy)


def check_names(edges: object, name: str = "edges") -> list[str]:
    """Names of edges, from names or Edges. Raises ArgumentError `edges_invalid` for what
    is no list, and `edge_name_invalid` for what stands in it and is neither."""
    if isinstance(edges, str) or not isinstance(edges, Iterable):
        raise ArgumentError(
            "edges_invalid",
            f"{name} is {edges!r}; write a list of edge names, ['input->m0']",
            value=edges,
        )
    names = [edge.name if isinstance(edge, Edge) else edge for edge in edges]
    remedy = "write sender->receiver, as in m0->a1.h0<q>"
    for each in names:
        require_type("edge_name_invalid", f"one of {name}", each, str, remedy)
    return names


def check_k(k: object, most: int) -> int:
    """`k` as an int. Raises ArgumentError `k_out_of_range` unless 0 <= k <= most."""
    try:
        number = -1 if isinstance(k, bool | np.bool_) else operator.index(k)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise ArgumentError(
            "k_out_of_range",
            f"k is {k!r}; write a whole number from 0 to {most:,}, the rankable rows",
            value=k if isinstance(k, int | float | str) else repr(k),
            expected=[0, most],
        )
    return number


def check_fraction(fraction: float) -> float:
    """The fraction. Raises ArgumentError `fraction_out_of_range` unless in [0, 1]."""
    valid = isinstance(fraction, int | float | np.number)
    if not valid or isinstance(fraction, bool) or not 0 <= fraction <= 1:
        raise ArgumentError(
            "fraction_out_of_range",
            f"the fraction is {fraction!r}; write a number from 0 to 1",
            value=fraction if valid else repr(fraction),
            expected=[0, 1],
        )
    return float(fraction)
