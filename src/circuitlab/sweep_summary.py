"""A sweep's summary: one row a circuit, as a table, a CSV file and a plot."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    import pandas

SUMMARY = pa.schema(
    [
        ("model", pa.string()),
        ("revision", pa.string()),
        ("task", pa.string()),
        ("method", pa.string()),
        ("seed", pa.int64()),
        ("setting", pa.string()),
        ("value", pa.float64()),
        ("n_edges", pa.int64()),
        ("faithfulness", pa.float64()),
        ("faithfulness_low", pa.float64()),
        ("faithfulness_high", pa.float64()),
        ("metric", pa.float64()),
        ("kl", pa.float64()),
        ("accuracy", pa.float64()),
        ("seconds", pa.float64()),
        ("circuit_id", pa.string()),
    ]
)
"""One circuit a row: what it was found with (`setting` is size, threshold or sparsity,
and `value` that setting's) and what it does on the held-out prompts."""

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#b83280", "#6b46c1", "#975a16", "#285e61")
WIDTH, HEIGHT, MARGIN = 560, 320, 48


@dataclass(frozen=True)
class Summary:
    """The rows of a sweep, with the schema `SUMMARY`."""

    rows: pa.Table
    name: str

    def to_pandas(self) -> pandas.DataFrame:
        """One row a circuit."""
        return self.rows.to_pandas().dropna(axis=1, how="all")

    def write(self, folder: Path) -> None:
        """Write `summary.csv` and `summary.svg`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.rows.to_pandas().to_csv(folder / "summary.csv", index=False)
        (folder / "summary.svg").write_text(self.svg(), encoding="utf-8")

    def svg(self) -> str:
        """Faithfulness over circuit size: a line for each model, task and method, the
        mean over seeds and revisions at each setting."""
        lines = _lines(self.rows.to_pylist())
        sizes = [x for points in lines.values() for x, _ in points]
        values = [y for points in lines.values() for _, y in points]
        axes = _Axes(
            log10(min(sizes, default=1)),
            log10(max(sizes, default=10)),
            min([0.0, *values]),
            max([1.0, *values]),
        )
        height = HEIGHT + 16 * len(lines) + 8
        parts = ['<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"']
        parts.append(f' font-size="11" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">')
        parts += axes.frame()
        for number, (label, points) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            parts += _line(axes, points, colour)
            y = HEIGHT + 16 * number + 8
            parts.append(f'<rect x="{MARGIN}" y="{y - 8}" width="10" height="10" ')
            parts.append(f'fill="{colour}"/><text x="{MARGIN + 16}" y="{y + 1}">')
            parts.append(f"{html.escape(label)}</text>")
        return "".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        return self.svg() + self.to_pandas().to_html(index=False)


def _lines(rows: list[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["faithfulness"] is None or not row["n_edges"]:
            continue
        label = f"{row['model']} · {row['task']} · {row['method']}"
        point = (float(row["n_edges"]), float(row["faithfulness"]))
        found.setdefault(label, {}).setdefault(row["value"], []).append(point)
    return {
        label: sorted(_mean(points) for points in settings.values())
        for label, settings in found.items()
    }


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*points, strict=True)
    return sum(xs) / len(xs), sum(ys) / len(ys)


@dataclass(frozen=True)
class _Axes:
    left: float
    right: float
    bottom: float
    top: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - self.left) / max(self.right - self.left, 1e-9)
        up = (y - self.bottom) / (self.top - self.bottom)
        inner = WIDTH - 2 * MARGIN
        tall = HEIGHT - 2 * MARGIN
        return round(MARGIN + across * inner, 1), round(HEIGHT - MARGIN - up * tall, 1)

    def frame(self) -> list[str]:
        parts = []
        for value in (0.0, 0.5, 1.0):
            x, y = self.at(10**self.left, value)
            parts.append(f'<path d="M{x} {y}H{WIDTH - MARGIN}" stroke="#ddd"/>')
            parts.append(
                f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
            )
        base = HEIGHT - MARGIN + 16
        for power in (self.left, self.right):
            x, _ = self.at(10**power, 0)
            parts.append(f'<text x="{x}" y="{base}" text-anchor="middle">')
            parts.append(f"{round(10**power):,}</text>")
        parts.append(
            f'<text x="{WIDTH / 2}" y="{base}" text-anchor="middle">edges</text>'
        )
        parts.append(f'<text x="{MARGIN}" y="{MARGIN - 14}">faithfulness</text>')
        return parts


def _line(axes: _Axes, points: list[tuple[float, float]], colour: str) -> list[str]:
    places = [axes.at(x, y) for x, y in points]
    path = "L".join(f"{x} {y}" for x, y in places)
    drawn = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    drawn += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>' for x, y in places]
    return drawn
