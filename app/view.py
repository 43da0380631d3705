"""What the Circuit page shows: a view, as its URL says, and the circuit it means.

Takes query parameters and ranked edges, gives a circuit and the arrays that the browser
draws. It knows no widget and no store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from circuitlab.circuits import Circuit
from circuitlab.errors import CircuitlabError
from circuitlab.graph import connected_edges
from circuitlab.ranking import Rank, RankedEdges, rank_edges
from circuitlab.sites import (
    Component,
    ModelShape,
    fed_by,
    parse_component,
    parse_edge,
)
from circuitlab.tables import EdgeTable, Run

CAP = 1500
"""The most edges that are drawn at once."""

FIRST_SIZE = 100
"""How many edges a view shows before anyone chose a size."""


@dataclass(frozen=True)
class View:
    """One state of the Circuit page. Names that are neither component nor edge are
    dropped, so that a mangled link still shows something."""

    run: str = ""
    k: int | None = None
    rank: Rank = "magnitude"
    where: str = ""
    prune: bool = True
    hide: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    selected: str = ""
    through: bool = False

    @staticmethod
    def of(params: Mapping[str, str]) -> View:
        """Read a view from query parameters."""
        k = params.get("k", "")
        selected = params.get("sel", "")
        return View(
            run=params.get("run", ""),
            k=int(k) if k.isdecimal() and len(k) < 10 else None,
            rank="support" if params.get("rank") == "support" else "magnitude",
            where=params.get("where", "").strip(),
            prune=params.get("prune", "true") != "false",
            hide=_names(params.get("hide", "")),
            pins=_names(params.get("pins", "")),
            groups=_groups(params.get("groups", "")),
            selected=selected if is_name(selected) else "",
            through=params.get("through") == "1",
        )

    def params(self) -> dict[str, str]:
        """The query parameters that give this view; defaults are left out."""
        groups = ";".join(f"{name}:{','.join(parts)}" for name, parts in self.groups)
        found = {
            "run": self.run,
            "k": "" if self.k is None else str(self.k),
            "rank": "" if self.rank == "magnitude" else self.rank,
            "where": self.where,
            "prune": "" if self.prune else "false",
            "hide": ",".join(self.hide),
            "pins": ",".join(self.pins),
            "groups": groups,
            "sel": self.selected,
            "through": "1" if self.through else "",
        }
        return {name: value for name, value in found.items() if value}

    def state(self, k: int) -> dict[str, Any]:
        """What the browser holds of a view; `changed` reads it back."""
        return {
            "k": k,
            "rank": self.rank,
            "prune": self.prune,
            "hide": list(self.hide),
            "pins": list(self.pins),
            "groups": {name: list(parts) for name, parts in self.groups},
            "sel": self.selected,
            "through": self.through,
        }

    @property
    def edges_only(self) -> View:
        """The view without what doesn't decide its edges: a key for caches."""
        return replace(self, groups=(), selected="", through=False)

    def changed(self, text: str) -> View:
        """The view after what the browser reports, as JSON text."""
        try:
            said = json.loads(text)
            groups = ";".join(f"{n}:{','.join(p)}" for n, p in said["groups"].items())
            return replace(
                self,
                k=int(said["k"]),
                hide=_names(",".join(said["hide"])),
                pins=_names(",".join(said["pins"])),
                groups=_groups(groups),
                selected=said["sel"] if is_name(said["sel"]) else "",
                through=bool(said["through"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return self

    @property
    def edge_pins(self) -> tuple[str, ...]:
        """The pinned edges: a pinned component only marks what runs through it."""
        return tuple(name for name in self.pins if "->" in name)


def is_name(text: str) -> bool:
    """Whether a text is the name of a component or an edge."""
    try:
        _ = parse_edge(text) if "->" in text else parse_component(text)
    except CircuitlabError:
        return False
    return True


def _names(text: str) -> tuple[str, ...]:
    parts = (part.strip() for part in text.split(","))
    return tuple(dict.fromkeys(part for part in parts if is_name(part)))


def _groups(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(";"):
        name, _, members = part.partition(":")
        kept = tuple(m for m in _names(members) if "->" not in m)
        if name.strip() and len(kept) > 1:
            found[name.strip()[:40]] = kept
    return tuple(found.items())


@dataclass(frozen=True)
class Ranked:
    """Edges best first, with what is known of each: float64 arrays in that order.

    `pins` stand before all others and are always kept; `excluded` counts what could
    not be ranked, by reason. `run` is that of the scores, where it is known.
    """

    kind: Literal["edge", "circuit"]
    run: Run | None
    shape: ModelShape
    names: tuple[str, ...]
    keys: np.ndarray
    scores: np.ndarray
    stderrs: np.ndarray
    pins: tuple[str, ...]
    excluded: Mapping[str, int]
    higher_is_better: bool
    scores_run: str = ""

    @cached_property
    def place(self) -> dict[str, int]:
        """Rank of every edge, from 0."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def supports(self) -> np.ndarray:
        """−score, turned where lower is better: positive helps."""
        return -self.scores if self.higher_is_better else self.scores

    def default_k(self) -> int:
        return len(self.names) if self.kind == "circuit" else FIRST_SIZE

    def size(self, view: View) -> int:
        """The `k` that a view means here."""
        asked = self.default_k() if view.k is None else view.k
        return max(0, min(asked, len(self.names)))


def rank_table(
    table: EdgeTable, *, rank: Rank, where: str, pins: Iterable[str], run_id: str
) -> Ranked:
    """Rank a run's edges. Raises as `circuitlab.ranking.rank_edges` does."""
    known = set(table.shape.edge_index)
    pins = [pin for pin in pins if pin in known]
    found = rank_edges(table, rank=rank, where=where or None, pins=pins)
    return _ranked(found, table, run_id)


def _ranked(found: RankedEdges, table: EdgeTable, run_id: str) -> Ranked:
    pinned = [found.names.index(pin) for pin in found.pins]
    rows = np.concatenate([np.array(pinned, dtype=np.int64), found.rows])
    stderrs = table.rows["stderr"].to_numpy(zero_copy_only=False).astype(np.float64)
    return Ranked(
        "edge",
        table.run,
        table.shape,
        tuple(found.names[row] for row in rows.tolist()),
        found.keys[rows],
        table.scores[rows],
        stderrs[rows],
        found.pins,
        dict(found.excluded),
        table.higher_is_better,
        run_id,
    )


def rank_circuit(
    circuit: Circuit, table: EdgeTable | None, rank: Rank, run_id: str
) -> Ranked:
    """Rank a stored circuit's edges by the scores that chose them, where those are
    known; else in canonical order and without numbers."""
    names = list(circuit.ordered)
    scores = np.full(len(names), np.nan)
    stderrs = np.full(len(names), np.nan)
    better = True
    if table is not None:
        index = {name: i for i, name in enumerate(table.rows["edge"].to_pylist())}
        rows = [index.get(name, -1) for name in names]
        known = np.array([row >= 0 for row in rows], dtype=bool)
        taken = np.array([row for row in rows if row >= 0], dtype=np.int64)
        scores[known] = table.scores[taken]
        errors = table.rows["stderr"].to_numpy(zero_copy_only=False)
        stderrs[known] = errors.astype(np.float64)[taken]
        better = table.higher_is_better
    support = -scores if better else scores
    keys = np.nan_to_num(support if rank == "support" else np.abs(scores))
    order = np.argsort(-keys, kind="stable")
    shape = circuit.shape or shape_of(names)
    return Ranked(
        "circuit",
        circuit.run,
        shape,
        tuple(names[i] for i in order),
        keys[order],
        scores[order],
        stderrs[order],
        (),
        {},
        better,
        run_id,
    )


def shape_of(edges: Iterable[str]) -> ModelShape:
    """The smallest shape that has these edges, for a circuit that came without one."""
    parts = [parse_edge(name) for name in edges]
    found = {e.sender for e in parts} | {e.receiver.component for e in parts}
    layers = 1 + max((c.layer or 0 for c in found), default=0)
    heads = 1 + max((c.head or 0 for c in found if c.kind == "head"), default=0)
    return ModelShape(layers, heads, heads, 1, 1, 1)


@dataclass(frozen=True)
class Selection:
    """What a view keeps: edges in rank order, of `k` asked, before what is hidden."""

    kept: tuple[str, ...]
    k: int
    dangling: int
    hidden: int

    def circuit(self, ranked: Ranked, view: View) -> Circuit:
        """The circuit on the screen, with how it came about."""
        text = f"{view.rank} k={self.k}" + (
            f" where={view.where}" if view.where else ""
        )
        provenance = {
            "selector": "top_k",
            "text": f"top_k(k={self.k}) rank={text}",
            "run_id": ranked.scores_run,
            "k": self.k,
            "n": len(self.kept),
            "pins": list(ranked.pins),
            "hidden": list(view.hide),
            "pruned": view.prune,
            "dangling": self.dangling,
        }
        return Circuit(frozenset(self.kept), ranked.shape, ranked.run, provenance)


def select(ranked: Ranked, view: View) -> Selection:
    """The edges that a view keeps: the pins and the `k` best of the others, without
    what is hidden, and without what then dangles."""
    k = ranked.size(view)
    first = len(ranked.pins)
    taken = ranked.names[: min(first + k, len(ranked.names))]
    hidden = set(view.hide)
    kept = tuple(n for n in taken if not _is_hidden(n, hidden)) if hidden else taken
    count = len(kept)
    if view.prune:
        good = connected_edges(kept, ranked.shape)
        pins = set(ranked.pins)
        kept = tuple(name for name in kept if name in good or name in pins)
    return Selection(kept, k, count - len(kept), len(taken) - count)


def _is_hidden(name: str, hidden: set[str]) -> bool:
    if name in hidden:
        return True
    edge = parse_edge(name)
    return edge.sender.name in hidden or edge.receiver.component.name in hidden


def components(shape: ModelShape) -> tuple[Component, ...]:
    """Everything that is drawn: senders, what only receives, and the logits."""
    receiving = dict.fromkeys(receiver.component for receiver in shape.receivers)
    return tuple(dict.fromkeys([*shape.senders, *receiving]))


def picture(ranked: Ranked, view: View, chosen: Selection) -> dict[str, Any]:
    """What the browser draws, as compact arrays: never more than `CAP` edges.

    Up to `CAP` edges the browser holds the best ones and cuts, hides and prunes on its
    own while a slider moves (`exact` is false, candidates); beyond, it gets the
    strongest of what is kept (`exact` is true).
    """
    beyond = chosen.k > CAP
    names = chosen.kept[:CAP] if beyond else ranked.names[: CAP + len(ranked.pins)]
    parts = components(ranked.shape)
    index = {part.name: i for i, part in enumerate(parts)}
    edges = [parse_edge(name) for name in names]
    rows = np.array([ranked.place[name] for name in names], dtype=np.int64)
    return {
        "kinds": [part.kind for part in parts],
        "names": [part.name for part in parts],
        "layers": [part.layer for part in parts],
        "heads": [part.head for part in parts],
        "fed": _fed(parts, index, ranked.shape),
        "n_layers": ranked.shape.n_layers,
        "n_heads": ranked.shape.n_heads,
        "s": [index[edge.sender.name] for edge in edges],
        "t": [index[edge.receiver.component.name] for edge in edges],
        "p": ["iqkv".index(edge.receiver.port[0]) for edge in edges],
        "v": _rounded(ranked.supports[rows]),
        "e": _rounded(ranked.stderrs[rows]),
        "rank": rows.tolist(),
        "n_pins": len(ranked.pins),
        "exact": beyond,
        "n": len(ranked.names) - len(ranked.pins),
        "kept": len(chosen.kept),
        "keys": _key_curve(ranked),
        "cap": CAP,
        "higher": ranked.higher_is_better,
    }


def _fed(
    parts: tuple[Component, ...], index: Mapping[str, int], shape: ModelShape
) -> dict[str, list[int]]:
    """Which senders a receiving component feeds, where that isn't just itself."""
    found = {}
    receivers = {r.component: r for r in shape.receivers}
    for part in parts:
        if part in receivers and part.kind != "logits":
            fed = [index[c.name] for c in fed_by(receivers[part], shape)]
            if fed != [index[part.name]]:
                found[str(index[part.name])] = fed
    return found


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values.tolist()]


def _key_curve(ranked: Ranked) -> list[list[float | None]]:
    """The key at sizes along the ranking, for the threshold slider."""
    keys = ranked.keys[len(ranked.pins) :]
    if not len(keys):
        return []
    sizes = np.unique(np.geomspace(1, len(keys), 240).round().astype(int))
    values = _rounded(keys[sizes - 1])
    return [[int(k), value] for k, value in zip(sizes, values, strict=True)]
