"""Calibrate edge scores: how well do they estimate what patching an edge does?

Takes a score table, patches the top edges and a random sample of the others for real,
and gives rank correlation, sign agreement and the recall of the truly strongest edges,
with intervals. It never changes a score.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from circuitlab.ablations import Ablation, as_ablation, describe, described
from circuitlab.backends import as_backend
from circuitlab.errors import ArgumentError, require_count, require_counts
from circuitlab.exact import METHOD, exact_effects
from circuitlab.metrics import Metric, check_metric
from circuitlab.prompts import Prompts
from circuitlab.ranking import check_table
from circuitlab.tables import EVAL, EdgeTable, ModelInfo, Run, now, versions

if TYPE_CHECKING:
    import pandas

STRATA = ("top", "random")

POINTS = pa.schema(
    [
        ("edge", pa.string()),
        ("stratum", pa.string()),
        ("score", pa.float64()),
        ("exact", pa.float64()),
        ("exact_stderr", pa.float64()),
    ]
)
"""One checked edge a row: its score beside its exact effect, both in the metric's units
with the same sign. `stratum` is `top` (by |score|) or `random` (of the others)."""


@dataclass(frozen=True)
class Statistic:
    """A number with its 95 % interval; NaN where it is not defined."""

    value: float
    low: float
    high: float


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation with midranks for ties; NaN where a side is constant."""
    a, b = _midranks(np.asarray(x)), _midranks(np.asarray(y))
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / size) if size else float("nan")


def _midranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def sign_agreement(scores: np.ndarray, exact: np.ndarray) -> float:
    """Share of edges whose score and exact effect have the same sign, among those with
    an effect at all; NaN where none has."""
    there = exact != 0
    if not there.any():
        return float("nan")
    return float((np.sign(scores[there]) == np.sign(exact[there])).mean())


def proportion(share: float, n: int) -> Statistic:
    """A share of n trials with its Wilson interval."""
    if n == 0 or np.isnan(share):
        return Statistic(float("nan"), float("nan"), float("nan"))
    z = 1.959963984540054
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding alone may put a bound past the share itself.
    low, high = min(middle - half, share), max(middle + half, share)
    return Statistic(float(share), float(max(low, 0)), float(min(high, 1)))


def bootstrapped(
    scores: np.ndarray, exact: np.ndarray, *, samples: int = 1000, seed: int = 0
) -> Statistic:
    """Spearman's correlation with a percentile bootstrap interval over edges."""
    n, generator = len(scores), np.random.default_rng(seed)
    found = []
    for _ in range(samples if n > 2 else 0):
        picks = generator.integers(0, n, n)
        found.append(spearman(scores[picks], exact[picks]))
    known = np.array(found)[~np.isnan(found)] if found else np.array([])
    if len(known) == 0:
        return Statistic(spearman(scores, exact), float("nan"), float("nan"))
    low, high = np.percentile(known, [2.5, 97.5])
    return Statistic(spearman(scores, exact), float(low), float(high))


def recall_at(
    scores: np.ndarray, exact: np.ndarray, k: int, checks: Sequence[int]
) -> list[Statistic]:
    """Which share of the k edges of largest |exact| is found by checking the `checks`
    edges of largest |score|, with Wilson intervals over the k.

    Needs the exact effect of every edge that counts as a candidate. Raises ArgumentError
    `k_out_of_range`.
    """
    if not 1 <= k <= len(exact):
        raise ArgumentError(
            "k_out_of_range",
            f"k is {k}; there are {len(exact)} edges with an exact effect",
            value=k,
            expected=f"1..{len(exact)}",
        )
    best = np.argsort(-np.abs(exact), kind="stable")[:k]
    order = np.argsort(-np.abs(scores), kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return [proportion(float((place[best] < m).mean()), k) for m in checks]


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    `points` has the schema `POINTS`; `rows` are EVAL rows with label `calibration` and
    the further columns `statistic`, `stratum`, `value`, `low`, `high`, `k`, `checks`.
    """

    rows: pa.Table
    run: Run
    points: pa.Table | None = None
    exact: EdgeTable | None = None

    def statistic(self, name: str, stratum: str = "all") -> Statistic:
        """One statistic: `spearman` or `sign_agreement`. Raises `statistic_unknown`."""
        for row in self.rows.to_pylist():
            if row["statistic"] == name and row["stratum"] == stratum:
                numbers = (row[key] for key in ("value", "low", "high"))
                return Statistic(*(float("nan") if n is None else n for n in numbers))
        known = sorted({row["statistic"] for row in self.rows.to_pylist()})
        raise ArgumentError(
            "statistic_unknown",
            f"no statistic {name!r} of stratum {stratum!r}; there are {', '.join(known)}",
            value=name,
            expected=known,
        )

    @property
    def spearman(self) -> Statistic:
        """Rank correlation of score and exact effect over all checked edges."""
        return self.statistic("spearman")

    @property
    def sign_agreement(self) -> Statistic:
        """Share of equal signs over all checked edges."""
        return self.statistic("sign_agreement")

    def recall(self) -> pa.Table:
        """Rows of recall: `k`, `checks`, `value`, `low`, `high`; empty unless every edge
        was checked."""
        table = self.rows.filter(pc.field("statistic") == "recall")
        return table.select(["k", "checks", "value", "low", "high"])

    @cached_property
    def svg(self) -> str:
        """A scatter plot: exact effect over score, top edges filled."""
        return "" if self.points is None else scatter(self.points)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a statistic."""
        columns = ["statistic", "stratum", "k", "checks", "value", "low", "high"]
        return self.rows.select(columns).to_pandas()

    def _repr_html_(self) -> str:
        return self.svg + self.to_pandas().to_html(index=False)


def calibrate(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    edges: EdgeTable,
    *,
    top: int = 50,
    random: int = 50,
    recall_of: Iterable[int] = (10, 50),
    exact: EdgeTable | None = None,
    ablation: Ablation | str | None = None,
    samples: int = 1000,
    seed: int = 0,
    **options: Any,
) -> Calibration:
    """Patch the `top` edges by |score|, and `random` of the others; return how well the
    scores agree with the exact effects.

    The ablation is the scores'; give it where it has a reference other than `prompts`,
    of which a table knows the digest alone. `exact`, a table of exact effects, saves the
    patching (and may come from other prompts). Recall of the truly strongest edges needs
    every edge checked: give `top` as large as the model, or such a table. `options` are
    `exact_effects`'s.

    Raises ArgumentError `table_foreign` for scores or effects of another metric, ablation
    or model; `ablation_reference_needed`, `calibration_empty`, `top_invalid`,
    `random_invalid`, `samples_invalid`, `seed_invalid`, `k_out_of_range`,
    `edge_table_invalid`; else as `exact_effects` does.
    """
    started, clock = now(), time.perf_counter()
    recall_of = require_counts("k_out_of_range", "recall_of", recall_of)
    samples = require_count("samples_invalid", "samples", samples, least=0)
    check_table(edges)
    _check_metric(edges, metric)
    top_rows, random_rows = _sample(edges.scores, top, random, seed)
    if exact is None:
        model = as_backend(model)
        _check_model(edges, model.info)
        options["ablation"] = _ablation(edges, ablation, prompts)
        names = edges.rows["edge"].to_pylist()
        wanted = [names[row] for row in (*top_rows, *random_rows)]
        exact = exact_effects(model, prompts, metric, wanted, **options)
    _check_exact(edges, exact)
    points = _points(edges, exact, top_rows, random_rows)
    statistics = _statistics(points, samples, seed)
    statistics += _recalls(points, edges, recall_of)
    run = replace(
        exact.run,
        kind="eval",
        policy={
            **exact.run.policy,
            "method": "calibrate",
            "scores": edges.run.policy_digest,
            "method_options": {"top": top, "random": random, "samples": samples},
        },
        provenance={"exact": exact.run_id, "checked": points.num_rows},
        parent=edges.run_id,
        seed=seed,
        started_at=started,
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )
    return Calibration(_rows(statistics, run, metric), run, points, exact)


def _check_metric(edges: EdgeTable, metric: Metric) -> None:
    check_metric(metric)
    _require_same("metric", metric.describe(), edges.run.policy.get("metric"))


def _check_exact(edges: EdgeTable, exact: EdgeTable) -> None:
    """Exact effects of what the scores are of."""
    check_table(exact, "exact")
    _check_model(edges, exact.run.model)
    policy = exact.run.policy
    _require_same("metric", policy.get("metric"), edges.run.policy.get("metric"))
    _require_same("ablation", _record(exact), _record(edges))
    if policy.get("method") != METHOD:
        raise ArgumentError(
            "table_foreign",
            f"exact is a table of {policy.get('method')} scores, and no exact effects; "
            "make them with exact_effects(…), or leave exact out",
            value=policy.get("method"),
            expected=METHOD,
        )


def _check_model(edges: EdgeTable, model: ModelInfo) -> None:
    different = edges.run.model.differences(model)
    if different:
        raise ArgumentError(
            "table_foreign",
            f"the scores are of {edges.run.model.name}, the exact effects of {model.name}: "
            f"{', '.join(different)} differ; use the model that was scored, loaded alike",
            value=model.name,
            expected=edges.run.model.name,
            different=different,
        )


def _ablation(
    edges: EdgeTable, asked: Ablation | str | None, prompts: Prompts
) -> Ablation:
    """The ablation of the scores, as a value; what was asked for must be that one."""
    record = _record(edges)
    found = described(record, prompts) if asked is None else as_ablation(asked)
    _require_same("ablation", describe(found), record)
    return found


def _record(edges: EdgeTable) -> dict[str, Any]:
    """What identifies a table's ablation; the donors that it drew follow from it."""
    record = edges.run.policy.get("ablation")
    if not isinstance(record, Mapping):
        raise ArgumentError(
            "table_foreign",
            "the table does not say with which ablation it was made, so that nothing can "
            "be set beside it; score the edges again",
            value=record,
            expected="an ablation",
        )
    return {name: value for name, value in record.items() if name != "donors"}


def _require_same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ArgumentError(
            "table_foreign",
            f"the scores are of the {what} {expected}, the exact effects of {found}; both "
            f"must be of one {what}",
            value=found,
            expected=expected,
        )


def _sample(
    scores: np.ndarray, top: int, random: int, seed: int
) -> tuple[list[int], list[int]]:
    """Row indices of the top edges and of a random sample of the others."""
    top = require_count("top_invalid", "top", top, least=0)
    random = require_count("random_invalid", "random", random, least=0)
    seed = require_count("seed_invalid", "seed", seed, least=0)
    rankable = np.flatnonzero(~np.isnan(scores))
    order = rankable[np.argsort(-np.abs(scores[rankable]), kind="stable")]
    rest = order[top:]
    generator = np.random.default_rng(seed)
    drawn = generator.choice(rest, min(random, len(rest)), replace=False)
    if not len(rankable) or not top + random:
        raise ArgumentError(
            "calibration_empty",
            f"there is nothing to check: top is {top}, random {random}, and {len(rankable)} "
            "edges have a score; ask for one edge or more",
            value=[top, random],
            n_scored=len(rankable),
        )
    return order[:top].tolist(), sorted(drawn.tolist())


def _points(
    edges: EdgeTable, exact: EdgeTable, top: list[int], random: list[int]
) -> pa.Table:
    names, scores = edges.rows["edge"].to_pylist(), edges.scores
    known = {row.edge: row for row in exact}
    rows = []
    for stratum, which in zip(STRATA, (top, random), strict=True):
        for row in which:
            found = known.get(names[row])
            if found is None or found.score is None:
                raise ArgumentError(
                    "table_foreign",
                    f"the table of exact effects has none for {names[row]}",
                    value=names[row],
                )
            rows.append(
                {
                    "edge": names[row],
                    "stratum": stratum,
                    "score": float(scores[row]),
                    "exact": found.score,
                    "exact_stderr": found.stderr,
                }
            )
    return pa.Table.from_pylist(rows, schema=POINTS)


def _statistics(points: pa.Table, samples: int, seed: int) -> list[dict[str, Any]]:
    scores, exact = points["score"].to_numpy(), points["exact"].to_numpy()
    strata = np.array(points["stratum"].to_pylist())
    found = []
    for stratum in ("all", *STRATA):
        which = np.full(len(strata), True) if stratum == "all" else strata == stratum
        if not which.any():
            continue
        x, y = scores[which], exact[which]
        ranks = bootstrapped(x, y, samples=samples, seed=seed)
        signs = proportion(sign_agreement(x, y), int((y != 0).sum()))
        found += [
            _row("spearman", stratum, ranks),
            _row("sign_agreement", stratum, signs),
        ]
    return found


def _recalls(
    points: pa.Table, edges: EdgeTable, recall_of: Iterable[int]
) -> list[dict[str, Any]]:
    """Recall at checks of k, 2k, 4k, … edges, where every edge was checked."""
    if points.num_rows < int((~np.isnan(edges.scores)).sum()):
        return []
    scores, exact = points["score"].to_numpy(), points["exact"].to_numpy()
    found = []
    for k in recall_of:
        if k > len(exact):
            continue
        checks = [min(k << i, len(exact)) for i in range(5)]
        for m, value in zip(checks, recall_at(scores, exact, k, checks), strict=True):
            found.append({**_row("recall", "all", value), "k": k, "checks": m})
    return found


def _row(statistic: str, stratum: str, found: Statistic) -> dict[str, Any]:
    numbers = {"value": found.value, "low": found.low, "high": found.high}
    known = {k: None if np.isnan(v) else v for k, v in numbers.items()}
    return {"statistic": statistic, "stratum": stratum, **known}


def _rows(statistics: list[dict[str, Any]], run: Run, metric: Metric) -> pa.Table:
    head = {
        "label": "calibration",
        "ablation": run.policy["ablation"]["name"],
        "metric_name": metric.name,
        "n": run.n,
    }
    more = [("statistic", pa.string()), ("stratum", pa.string())]
    more += [(name, pa.float64()) for name in ("value", "low", "high")]
    schema = pa.schema([*EVAL, *more, ("checks", pa.int64())])
    return pa.Table.from_pylist([{**head, **row} for row in statistics], schema=schema)


def scatter(points: pa.Table, size: int = 360) -> str:
    """An SVG scatter of exact effect over score, on symmetric axes of one scale."""
    x, y = points["score"].to_numpy(), points["exact"].to_numpy()
    widest = float(max(np.abs(x).max(), np.abs(y).max(), 1e-12)) * 1.08

    def at(value: float) -> float:
        return round(size / 2 * (1 + value / widest), 2)

    half, end = size / 2, size
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"'
    ]
    parts += [f' viewBox="0 0 {size} {size + 22}" width="{size}">']
    axes = f"M0 {half}H{end}M{half} 0V{end}M0 {end}L{end} 0"
    parts += [f'<path d="{axes}" stroke="#bbb" fill="none" stroke-width="0.7"/>']
    strata = points["stratum"].to_pylist()
    for edge, stratum, a, b in zip(
        points["edge"].to_pylist(), strata, x, y, strict=True
    ):
        fill = "#2b6cb0" if stratum == "top" else "none"
        parts.append(
            f'<circle cx="{at(a)}" cy="{round(end - at(b), 2)}" r="3" fill="{fill}" '
            f'stroke="#2b6cb0"><title>{_escaped(edge)}: score {a:.4g}, exact {b:.4g}'
            "</title></circle>"
        )
    label = f"score (±{widest:.3g}) against exact effect; filled: top by |score|"
    parts.append(f'<text x="{half}" y="{end + 15}" text-anchor="middle">{label}</text>')
    return "".join([*parts, "</svg>"])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
