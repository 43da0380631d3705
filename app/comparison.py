"""What the Compare page computes from ranked edges and selections. No widget here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt
import charts
import numpy as np
import pandas as pd
from view import CAP, Ranked, Selection, View, components, picture

Pair = tuple[Ranked, Ranked]
Chosen = tuple[Selection, Selection]


def names(runs: pd.DataFrame, ids: Sequence[str]) -> list[str]:
    """A short name for each run, by what differs between them."""
    rows = runs.set_index("run_id").loc[list(ids)]
    columns = [
        c for c in ("model", "task", "method", "kind", "seed") if rows[c].nunique() > 1
    ]
    found = [
        " ".join(str(row[c]) for c in columns if pd.notna(row[c]))
        for _, row in rows.iterrows()
    ]
    count = Counter(found)
    return [
        name if name and count[name] == 1 else f"{name} {run_id[:6]}".strip()
        for name, run_id in zip(found, ids, strict=True)
    ]


def overlaps(
    names: Sequence[str], ranked: Sequence[Ranked], chosen: Sequence[Selection]
) -> pd.DataFrame:
    """Every pair: common edges, their share of all (IoU), and the correlation of the
    scores' ranks over all common edges (Spearman)."""
    rows = []
    sets = [set(found.kept) for found in chosen]
    for i in range(len(names)):
        for j in range(i + 1, len(names)):
            either = len(sets[i] | sets[j])
            rows.append(
                {
                    "first": names[i],
                    "second": names[j],
                    "edges": len(sets[i]),
                    "edges of second": len(sets[j]),
                    "in both": len(sets[i] & sets[j]),
                    "IoU": len(sets[i] & sets[j]) / either if either else 1.0,
                    "rank correlation": _spearman(ranked[i], ranked[j]),
                }
            )
    return pd.DataFrame(rows)


def _spearman(a: Ranked, b: Ranked) -> float | None:
    common = [name for name in a.names if name in b.place]
    if len(common) < 3:
        return None
    left = pd.Series(a.scores[[a.place[n] for n in common]])
    right = pd.Series(b.scores[[b.place[n] for n in common]])
    return float(left.rank().corr(right.rank()))


def changes(
    ranked: Pair, chosen: Chosen
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Edges gained (only in the second), lost (only in the first), and common."""
    first, second = set(chosen[0].kept), set(chosen[1].kept)
    return (
        _frame(ranked, [n for n in chosen[1].kept if n not in first]),
        _frame(ranked, [n for n in chosen[0].kept if n not in second]),
        _frame(ranked, [n for n in chosen[0].kept if n in second]),
    )


def _frame(ranked: Pair, edges: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(
        {"edge": list(edges)}
        | {f"score {i + 1}": _scores(one, edges) for i, one in enumerate(ranked)}
        | {f"rank {i + 1}": _places(one, edges) for i, one in enumerate(ranked)}
    )


def _scores(ranked: Ranked, edges: Sequence[str]) -> list[float]:
    return [
        float(ranked.scores[ranked.place[n]]) if n in ranked.place else float("nan")
        for n in edges
    ]


def _places(ranked: Ranked, edges: Sequence[str]) -> pd.Series:
    found = [ranked.place[n] + 1 if n in ranked.place else None for n in edges]
    return pd.Series(found, dtype="Int64")


def union_picture(
    ranked: Pair, chosen: Chosen, labels: tuple[str, str]
) -> dict[str, Any]:
    """Both circuits on one picture, each edge on the side it belongs to."""
    first, second = set(chosen[0].kept), set(chosen[1].kept)
    edges = [*chosen[0].kept, *(n for n in chosen[1].kept if n not in first)]
    size = [max(_strength(one, name) for one in ranked) for name in edges]
    order = np.argsort(-np.array(size), kind="stable")[:CAP]
    kept = Selection(tuple(edges[i] for i in order), len(edges), 0, 0)
    both = _merged(ranked, kept.kept)
    drawn = picture(both, View(k=len(kept.kept)), kept)
    side = [
        1 if n in first and n in second else 0 if n in first else 2 for n in kept.kept
    ]
    return {
        **drawn,
        "id": "-".join(labels),
        "exact": True,
        "kept": len(edges),
        "side": side,
        "labels": [f"only {labels[0]}", f"only {labels[1]}", "both"],
        "v": [size[i] if np.isfinite(size[i]) else None for i in order.tolist()],
    }


def _strength(ranked: Ranked, name: str) -> float:
    score = (
        abs(float(ranked.scores[ranked.place[name]])) if name in ranked.place else 0.0
    )
    return score if np.isfinite(score) else 0.0


def _merged(ranked: Pair, edges: tuple[str, ...]) -> Ranked:
    """The union as something that can be drawn, in this order."""
    nothing = np.full(len(edges), np.nan)
    first = ranked[0]
    assert components(first.shape) == components(ranked[1].shape)
    return Ranked(
        "circuit",
        first.run,
        first.shape,
        edges,
        np.zeros(len(edges)),
        nothing,
        nothing,
        (),
        {},
        first.higher_is_better,
    )


def scatter(
    ranked: Pair, chosen: Chosen, labels: tuple[str, str]
) -> alt.LayerChart | alt.FacetChart:
    """The scores of the edges that either circuit has, and of a sample of the others."""
    first, second = set(chosen[0].kept), set(chosen[1].kept)
    either = first | second
    rest = [
        n for n in ranked[0].names[:4000] if n in ranked[1].place and n not in either
    ]
    edges = [*sorted(either), *rest[:: max(1, len(rest) // 500)]][:2500]
    where = [
        ["neither", f"only {labels[0]}", f"only {labels[1]}", "both"][
            (n in first) + 2 * (n in second)
        ]
        for n in edges
    ]
    rows = pd.DataFrame(
        {
            "edge": edges,
            "a": _scores(ranked[0], edges),
            "b": _scores(ranked[1], edges),
            "where": where,
        }
    ).dropna()
    return charts.scatter_chart(rows, *labels)
