"""Selections of sites, or of elements within sites, ranked by an ACT table.

Takes a single-target ACT table and a request of `top_k`, `top_fraction` or `threshold`,
gives a `SiteSelection`: whole sites where the rows are by site, masks where they are by
element. It runs no model; `read(within=…)` and `read(frozen=…)` take a selection.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from circuitlab.errors import ArgumentError
from circuitlab.ranking import Request, best_first
from circuitlab.tables import Run

if TYPE_CHECKING:
    from circuitlab.read_table import ReadTable

Place = tuple[str, int]
_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class SiteSelection:
    """The sites (and, at element grain, the elements) that a table ranked best.

    `places` are (site, pass) in canonical order: that of the forward pass. `elements`
    holds flat indices into the site's recorded `shapes`, or nothing where whole sites
    were selected. `keys` are the structural keys of `places`.
    """

    places: tuple[Place, ...]
    run: Run
    keys: tuple[str, ...] = ()
    elements: Mapping[Place, np.ndarray] = field(default_factory=dict)
    shapes: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grain(self) -> str:
        return "element" if self.elements else "site"

    @property
    def sites(self) -> frozenset[str]:
        """The names of the selected sites."""
        return frozenset(site for site, _ in self.places)

    def __iter__(self) -> Iterator[str]:
        return (site for site, _ in self.places)

    def __contains__(self, site: object) -> bool:
        return site in self.sites or site in self.places

    def __len__(self) -> int:
        """How many sites; at element grain, how many elements."""
        if self.elements:
            return sum(len(found) for found in self.elements.values())
        return len(self.places)

    def mask(self, place: Place, shape: Sequence[int]) -> np.ndarray | None:
        """The selected elements of a site as a bool array; None: the whole site.

        Raises ArgumentError `by_score_invalid` (reason `by_table_index_space_mismatch`)
        where the site now has another shape than the one that was ranked.
        """
        if not self.elements:
            return None
        ranked = self.shapes[place]
        if tuple(shape) != ranked:
            refuse(
                "by_table_index_space_mismatch",
                f"elements of {place[0]} were ranked in the shape {list(ranked)}, and "
                f"here it has {list(shape)}; use prompts of the same sizes, or rank sites",
                value=list(shape),
                expected=list(ranked),
            )
        mask = np.zeros(int(np.prod(ranked)), dtype=bool)
        mask[self.elements[place]] = True
        return mask.reshape(ranked)

    def check(self, weights_digest: str, inventory_digest: str) -> None:
        """Raise `by_score_invalid` (reason `by_table_foreign`) unless it was ranked on
        a model of these weights with these sites."""
        facts = {
            "weights": (self.run.model.weights_digest, weights_digest),
            "site inventory": (
                self.run.provenance.get("inventory_digest"),
                inventory_digest,
            ),
        }
        for what, (mine, other) in facts.items():
            if mine != other:
                refuse(
                    "by_table_foreign",
                    f"the selection was ranked on a model with another {what}",
                    value=mine,
                    expected=other,
                )


def refuse(reason: str, text: str, **fields: object) -> NoReturn:
    """Refuse a table, or a selection made by one, that can't choose sites here."""
    raise ArgumentError(
        "by_score_invalid",
        f"the table cannot rank sites here: {text}",
        reason=reason,
        **fields,
    )


def select_sites(table: ReadTable, request: Request) -> SiteSelection:
    """Rank an ACT table's sites or elements and apply the cut.

    Signed unless `rank="magnitude"`. Only rows with status `ok` and a number are
    rankable, the rest is counted by reason; ties break in the order of the rows (the
    forward pass), then by flat index. Raises ArgumentError `rank_invalid`,
    `k_out_of_range`, `edge_unknown` for pins, or `by_score_invalid`.
    """
    if request.rank not in (None, "signed", "magnitude"):
        raise ArgumentError(
            "rank_invalid",
            f"rank is {request.rank!r}; sites rank signed or by magnitude",
            value=request.rank,
            expected=["signed", "magnitude"],
        )
    _check_table(table)
    candidates = _Candidates(table, request)
    rows = best_first(candidates.keys, candidates.rankable, candidates.order)
    chosen = rows[request.cut.take(candidates.keys[rows])]
    return candidates.selection(chosen, len(rows))


def _check_table(table: ReadTable) -> None:
    """Refuse what can't rank, with the reason."""
    if table.stale is not None:
        refuse("by_table_stale", f"its trace {table.stale} since the read; read again")
    if not len(table):
        refuse("by_table_empty", "it has no rows")
    if len(table.target_ids) > 1:
        refuse(
            "by_table_multi_target",
            f"it holds {len(table.target_ids)} targets; narrow it with "
            "table.target('t0'), or fold them with table.aggregate_targets(…)",
            value=list(table.target_ids),
        )
    if table.rows["sample_id"].null_count < len(table):
        refuse("grain", "its rows are by example; read without per_example")
    if len(set(table.rows["grain"].to_pylist())) > 1:
        refuse("by_table_grain_mixed", "it mixes rows by site and by element")


class _Candidates:
    """Keys of everything that could be selected, row by row, element by element."""

    def __init__(self, table: ReadTable, request: Request):
        self.table = table
        self.request = request
        self.rows = table.rows
        self.places: list[Place] = list(
            zip(self.rows["site"].to_pylist(), self.rows["pass"].to_pylist())
        )
        self.free, self.excluded = self._free()
        self.by_element = self.rows["grain"][0].as_py() == "element"
        spans = [self._span(i) for i in range(len(self.rows))]
        self.row = np.concatenate(
            [np.full(len(k), i) for i, (_, k) in enumerate(spans)]
        )
        self.flat = np.concatenate([index for index, _ in spans])
        self.keys = np.concatenate([keys for _, keys in spans])
        nan = np.isnan(self.keys)
        self.excluded["nan"] += int(nan.sum())
        self.rankable = ~nan
        self.order = np.arange(len(self.keys))

    def _free(self) -> tuple[np.ndarray, Counter[str]]:
        """Which rows may win, and why the others may not."""
        status = self.rows["status"].to_numpy(zero_copy_only=False).astype(object)
        reasons = np.where(status == "ok", "", status)
        where = self.request.where
        if where is not None:
            from circuitlab.select import parse_site_selector

            selector = parse_site_selector(where) if isinstance(where, str) else where
            reasons = np.where(_matches(self.table, selector), reasons, "where")
        pinned = np.isin(
            np.array([site for site, _ in self.places], dtype=object),
            [*self._pins()],
        )
        free = (reasons == "") & ~pinned
        return free, Counter(str(r) for r in reasons if r)

    def _pins(self) -> frozenset[str]:
        known = {site for site, _ in self.places}
        for pin in self.request.pins:
            if pin not in known:
                raise ArgumentError(
                    "site_unknown", f"the table has no site {pin!r}", value=pin
                )
        return frozenset(self.request.pins)

    def _span(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Flat indices and keys of one row: one for a site, many for its elements."""
        if not self.free[row]:
            return np.zeros(0, np.int64), np.zeros(0)
        if self.by_element:
            values, index = self.table.elements(row)
        else:
            values = np.array([self.table.scores[row]])
            index = np.zeros(1, np.int64)
        return index, np.abs(values) if self.request.rank == "magnitude" else values

    def selection(self, chosen: np.ndarray, rankable: int) -> SiteSelection:
        pins = [i for i, (site, _) in enumerate(self.places) if site in self._pins()]
        rows = sorted({*self.row[chosen].tolist(), *pins})
        places = tuple(self.places[row] for row in rows)
        keys = self.rows["site_key"].to_pylist()
        elements, shapes = {}, {}
        if self.by_element:
            for row in rows:
                mine = chosen[self.row[chosen] == row]
                flat = np.sort(self.flat[mine])
                whole = self.table.elements(row)[1] if row in pins else flat
                elements[self.places[row]] = whole
                shapes[self.places[row]] = self.table.shape_of(row)
        return SiteSelection(
            places,
            self.table.run,
            tuple(keys[row] for row in rows),
            elements,
            shapes,
            self._provenance(len(chosen), rankable),
        )

    def _provenance(self, selected: int, rankable: int) -> dict[str, Any]:
        policy = self.table.run.policy
        return {
            "schema": self.table.schema_version,
            "run_id": None if self.by_element else self.table.run_id,
            "policy_digest": self.table.run.policy_digest,
            "method": policy.get("method"),
            "reduction": policy.get("reduction"),
            "target": self.table.provenance.get("target_reprs"),
            "frozen_digest": self.table.provenance.get("frozen_digest"),
            "rank": self.request.rank or "signed",
            "selector": str(self.request.cut).partition("(")[0],
            "text": str(self.request),
            "rankable": rankable,
            "selected": selected,
            "excluded": {
                **dict(self.table.provenance.get("excluded_counts") or {}),
                **{reason: n for reason, n in self.excluded.items() if n},
            },
            "pins": list(self.request.pins),
        }


def _matches(table: ReadTable, selector: Any) -> np.ndarray:
    """The rows that a site selector matches, bool [row]."""
    shape = table.run.model.shape
    if shape is None:
        raise ArgumentError(
            "shape_needed", "the table doesn't know its model's shape; leave out where="
        )
    layers = [_LAYER.search(site) for site in table.rows["site"].to_pylist()]
    column = pa.array([int(m[1]) if m else None for m in layers], pa.int32())
    rows = table.rows.append_column("layer", column)
    return selector.mask(rows, n_layers=shape.n_layers, n_heads=shape.n_heads)
