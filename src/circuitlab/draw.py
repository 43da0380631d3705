"""A circuit as a layered drawing: self-contained SVG text, ready for a page or a paper.

Layers run from left to right, heads from top to bottom with the MLP below them. Width
is |score|, colour the sign of the support, and the dash of a line the port it enters
by, so that nothing rests on colour alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from circuitlab.errors import ArgumentError
from circuitlab.sites import Component, Edge, ModelShape, Receiver, parse_edge
from circuitlab.tables import EdgeTable, Run

HELPS, HURTS, PLAIN = "#1f5fa8", "#c4472b", "#5a6676"
INK, MUTED, FAINT, BAND = "#1d2733", "#6b7785", "#cfd6df", "#f6f8fa"
NARROWEST = 640.0
DASHES = {"q": "", "k": "6 3", "v": "1.2 3", "in": ""}
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"


class Drawn(Protocol):
    """What can be drawn: a Circuit, or anything with edges and perhaps a shape."""

    @property
    def edges(self) -> frozenset[str]: ...
    @property
    def shape(self) -> ModelShape | None: ...
    @property
    def run(self) -> Run | None: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Drawing:
    """An SVG that notebooks show. `str` gives the text, `save` writes it."""

    svg: str

    def __str__(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the file, and return its path."""
        path = Path(path)
        path.write_text(self.svg, encoding="utf-8")
        return path


@dataclass(frozen=True)
class _Line:
    edge: Edge
    support: float | None
    note: str

    @property
    def size(self) -> float:
        return 0.0 if self.support is None else abs(self.support)


def circuit_svg(
    circuit: Drawn | EdgeTable,
    scores: EdgeTable | Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    max_edges: int = 1500,
    background: str | None = "white",
) -> str:
    """Draw a circuit, or the scored edges of a table, as SVG text.

    `scores` (a table, or supports by edge name: positive helps) set width and colour;
    without them every line is alike. Beyond `max_edges` the weakest are left out, and
    the drawing says how many. Raises ArgumentError `max_edges_invalid`.
    """
    if isinstance(max_edges, bool) or max_edges < 1:
        raise ArgumentError(
            "max_edges_invalid",
            f"max_edges is {max_edges}; write a whole number from 1 up",
            value=max_edges,
        )
    if isinstance(circuit, EdgeTable):
        scores = scores if scores is not None else circuit
        names: Iterable[str] = _supports(circuit)
        heading, shape = circuit.run.dataset, circuit.run.model.shape
    else:
        names, heading, shape = circuit.edges, circuit.name, circuit.shape
    every = list(names)
    lines = _lines(every, scores, max_edges)
    heading = heading if title is None else title
    grid = _grid(shape or _inferred(lines), lines)
    if not heading and circuit.run is None:
        grid = replace(grid, top=60.0)
    scale = _Scale.of(lines)
    active = _active(lines)
    body = [
        *_bands(grid),
        *_ghosts(grid, active),
        *_groups(grid, active),
        '<g fill="none" stroke-linecap="round">',
        *(_path(line, grid, scale) for line in lines),
        "</g>",
        *(_node(component, active[component], grid) for component in active),
        *_heading(heading, circuit.run),
        *_legend(grid, scale, len(lines), len(every)),
    ]
    return _document(body, grid, heading or "circuit", background)


def _supports(table: EdgeTable) -> dict[str, float]:
    names = table.rows["edge"].to_pylist()
    pairs = zip(names, table.support.tolist(), strict=True)
    return {name: value for name, value in pairs if not math.isnan(value)}


def _lines(
    names: list[str], scores: EdgeTable | Mapping[str, float] | None, most: int
) -> list[_Line]:
    """The strongest lines from weak to strong, ties in canonical order."""
    raw: dict[str, float | None] = {}
    if isinstance(scores, EdgeTable):
        columns = (scores.rows[c].to_pylist() for c in ("edge", "score"))
        raw = dict(zip(*columns, strict=True))
        scores = _supports(scores)
    found = []
    for name in _strongest(names, scores or {}, most):
        score = raw.get(name)
        note = name if score is None else f"{name}  score {score:+.4g}"
        support = (scores or {}).get(name)
        found.append(_Line(parse_edge(name), support, note))
    return sorted(found, key=lambda line: (line.size, [-n for n in line.edge.order]))


def _strongest(names: list[str], supports: Mapping[str, float], most: int) -> list[str]:
    """At most `most` of the names, by |support|, ties in canonical order."""
    if len(names) <= most:
        return names
    sizes = np.abs([supports.get(name, 0.0) for name in names])
    cut = np.partition(sizes, -most)[-most]
    kept = [name for name, size in zip(names, sizes, strict=True) if size > cut]
    tied = [name for name, size in zip(names, sizes, strict=True) if size == cut]
    tied.sort(key=lambda name: parse_edge(name).order)
    return kept + tied[: most - len(kept)]


@dataclass(frozen=True)
class _Scale:
    """From a line's support to its width and opacity."""

    most: float
    thin: float
    thick: float
    faint: float

    @staticmethod
    def of(lines: list[_Line]) -> _Scale:
        sizes = [line.size for line in lines if math.isfinite(line.size)]
        count = len(lines)
        faint = 0.6 if count <= 60 else 0.3 if count <= 400 else 0.16
        thin, thick = (0.9, 4.6) if count <= 60 else (0.6, 4.0)
        return _Scale(max(sizes, default=0.0), thin, thick, faint)

    def strength(self, line: _Line) -> float:
        if not self.most:
            return 0.35
        return min(1.0, math.sqrt(line.size / self.most))

    def style(self, line: _Line) -> tuple[str, float, float]:
        """Colour, width and opacity."""
        strength = self.strength(line)
        colour = HELPS if line.size == line.support else HURTS
        colour = colour if line.support else PLAIN
        width = self.thin + (self.thick - self.thin) * strength
        return colour, width, self.faint + (0.92 - self.faint) * strength


@dataclass(frozen=True)
class _Grid:
    """Where everything stands. Lengths are in SVG units."""

    n_layers: int
    n_heads: int
    n_kv: int
    joined: bool
    column: float
    row: float
    swing: float
    left: float
    top: float = 104.0

    @property
    def box(self) -> tuple[float, float]:
        share = 0.38 if self.grouped else 0.4
        return min(42.0, self.column * share), min(20.0, self.row * 0.66)

    @property
    def rows(self) -> int:
        return self.n_heads + self.joined

    @property
    def mlp_y(self) -> float:
        return self.top + (self.rows + 0.45) * self.row

    @property
    def bottom(self) -> float:
        return self.mlp_y + self.row * 0.5 + self.swing

    @property
    def width(self) -> float:
        return max(self.x(self.n_layers) - self.column * 0.5 + self.left, NARROWEST)

    @property
    def height(self) -> float:
        return self.bottom + 66.0

    @property
    def middle(self) -> float:
        return self.top + (self.rows - 1) * self.row / 2

    @property
    def grouped(self) -> bool:
        return self.n_kv != self.n_heads

    def arc(self, layers: float) -> float:
        """How far a line that passes `layers` columns in its own row swings out."""
        return min(12.0 + 5.0 * layers, 1.6 * self.row)

    def x(self, layer: float) -> float:
        return self.left + layer * self.column + self.column * 0.5

    def y(self, head: float) -> float:
        return self.top + head * self.row

    def at(self, component: Component) -> tuple[float, float]:
        """The middle of a component's box."""
        layer, head = component.layer or 0, component.head or 0
        match component.kind:
            case "input":
                return self.left - 60, self.middle
            case "logits":
                return self.x(self.n_layers) - self.column * 0.5 + 60, self.middle
            case "mlp":
                return self.x(layer) + self.column * 0.25, self.mlp_y
            case "attention":
                return self._heads_x(layer), self.y(self.n_heads)
            case "kv":
                per_group = self.n_heads / self.n_kv
                middle = head * per_group + (per_group - 1) / 2
                return self._heads_x(layer) - self.box[0] / 2 - 6, self.y(middle)
            case _:
                return self._heads_x(layer), self.y(head)

    def _heads_x(self, layer: int) -> float:
        return self.x(layer) - self.column * (0.21 if self.grouped else 0.25)

    def out(self, component: Component) -> tuple[float, float]:
        x, y = self.at(component)
        wide = 23.0 if component.kind == "input" else self.box[0] / 2
        return x + wide, y

    def into(self, receiver: Receiver) -> tuple[float, float]:
        x, y = self.at(receiver.component)
        if receiver.component.kind == "kv":
            return x - 2.5, y + (-0.25 if receiver.port == "k" else 0.25) * self.row
        wide = 26.0 if receiver.component.kind == "logits" else self.box[0] / 2
        step = self.box[1] * 0.32
        return x - wide, y + {"q": -step, "v": step}.get(receiver.port, 0.0)


def _inferred(lines: list[_Line]) -> ModelShape:
    """The smallest shape that holds the lines, where the model's is not known."""
    parts = [line.edge.sender for line in lines]
    parts += [line.edge.receiver.component for line in lines]

    def count(*kinds: str) -> int:
        numbers = [part.head or 0 for part in parts if part.kind in kinds]
        return 1 + max(numbers, default=-1)

    layers = 1 + max((part.layer or 0 for part in parts), default=0)
    groups = count("kv")
    heads = max(count("head"), groups, 1)
    split = not any(part.kind == "attention" for part in parts)
    return ModelShape(layers, heads, groups or heads, 0, 0, 0, split_heads=split)


def _grid(shape: ModelShape, lines: list[_Line]) -> _Grid:
    layers, heads = shape.n_layers, shape.n_heads
    groups, joined = shape.n_kv_heads, not shape.split_heads
    narrowest = 54.0 if groups == heads else 62.0
    column = min(150.0, max(narrowest, 1180.0 / (layers + 1)))
    row = min(44.0, max(25.0, 460.0 / (heads + 2)))
    left = max(112.0, (NARROWEST - layers * column) / 2)
    swing = max((_passed(line.edge) for line in lines), default=0.0)
    grid = _Grid(layers, heads, groups, joined, column, row, 0.0, left)
    return replace(grid, swing=grid.arc(swing) if swing >= 2 else 0.0)


def _passed(edge: Edge) -> int:
    """How many layers a line along the row of MLPs passes; 0 for any other."""
    ends = (edge.sender, edge.receiver.component)
    if any(end.kind != "mlp" for end in ends):
        return 0
    return (ends[1].layer or 0) - (ends[0].layer or 0)


def _active(lines: list[_Line]) -> dict[Component, set[str]]:
    """Every component that a line touches, with the ports that lines enter by."""
    found: dict[Component, set[str]] = {}
    for line in lines:
        found.setdefault(line.edge.sender, set())
        receiver = line.edge.receiver
        found.setdefault(receiver.component, set()).add(receiver.port)
    return dict(sorted(found.items(), key=lambda item: item[0].order))


def _bands(grid: _Grid) -> list[str]:
    """Alternate layers shaded, with their numbers above and the rows' names beside."""
    found = []
    top, height = grid.top - 26, grid.bottom - grid.top + 26
    for layer in range(grid.n_layers):
        x = grid.x(layer) - grid.column / 2
        if layer % 2 == 0:
            found.append(_rect(x, top, grid.column, height, fill=BAND))
        found.append(_text(grid.x(layer), top - 8, str(layer), 10.5, MUTED))
    found.append(_text(grid.left - 8, top - 8, "layer", 10.5, MUTED, "end"))
    return found


def _ghosts(grid: _Grid, active: Mapping[Component, object]) -> list[str]:
    """Dots for the components that no line touches."""
    every = [
        Component("head", layer, head)
        for layer in range(grid.n_layers)
        for head in range(grid.n_heads)
    ]
    every += [Component("mlp", layer) for layer in range(grid.n_layers)]
    found = []
    for component in every:
        if component not in active:
            x, y = grid.at(component)
            found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{FAINT}"/>')
    return found


def _groups(grid: _Grid, active: Mapping[Component, set[str]]) -> list[str]:
    """A bar beside the query heads of every KV group that a line enters."""
    found = []
    for component in active:
        if component.kind == "kv":
            x, y = grid.at(component)
            high = (grid.n_heads / grid.n_kv - 1) * grid.row + grid.box[1]
            bar = _rect(x - 2.5, y - high / 2, 5, high, fill="#aab6c5", rounded=2.5)
            found.append(bar)
    return found


def _path(line: _Line, grid: _Grid, scale: _Scale) -> str:
    x0, y0 = grid.out(line.edge.sender)
    x1, y1 = grid.into(line.edge.receiver)
    reach = max(14.0, (x1 - x0) * 0.45)
    bow = _bow(line.edge, grid, abs(y1 - y0), x1 - x0)
    colour, width, opacity = scale.style(line)
    dash = DASHES[line.edge.receiver.port]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    curve = (
        f"M{x0:.1f} {y0:.1f}C{x0 + reach:.1f} {y0 + bow:.1f} "
        f"{x1 - reach:.1f} {y1 + bow:.1f} {x1:.1f} {y1:.1f}"
    )
    return (
        f'<path d="{curve}" stroke="{colour}" stroke-width="{width:.2f}" '
        f'stroke-opacity="{opacity:.2f}"{dashes}>'
        f"<title>{_clean(line.note)}</title></path>"
    )


def _bow(edge: Edge, grid: _Grid, rise: float, run: float) -> float:
    """Lift a line that would run through the boxes of its own row."""
    passed = run / grid.column
    if rise > grid.row * 0.5 or passed < 0.9:
        return 0.0
    # Of a cubic's control offset three quarters show.
    swing = grid.arc(passed) * 4 / 3
    return swing if edge.sender.kind == "mlp" else -swing * 0.6


def _node(component: Component, ports: set[str], grid: _Grid) -> str:
    if component.kind == "kv":
        return ""
    x, y = grid.at(component)
    wide, high = grid.box
    end = component.kind in ("input", "logits")
    if end:
        wide, high = (46.0, 24.0) if component.kind == "input" else (52.0, 24.0)
    fill, stroke, ink = {
        "head": ("#ffffff", "#4b5b6e", INK),
        "mlp": ("#fdf6e7", "#a0843f", "#4d3d12"),
        "attention": ("#eef2f7", "#4b5b6e", INK),
    }.get(component.kind, (INK, INK, "#ffffff"))
    letters = [
        _text(x - wide / 2 + 4.6, y + shift * high * 0.32 + 1.9, port, 5.6, MUTED)
        for port, shift in (("q", -1), ("k", 0), ("v", 1))
        # With grouped keys and values, a head's only own input is its query.
        if port in ports and not grid.grouped
    ]
    label = {"head": f"{component.layer}.{component.head}"}.get(
        component.kind, component.name
    )
    shift = 2.2 if component.kind == "head" and not grid.grouped else 0.0
    size = 11.0 if end else min(9.5, wide * (0.36 if grid.grouped else 0.32))
    box = _rect(
        x - wide / 2, y - high / 2, wide, high, fill=fill, rounded=5, stroke=stroke
    )
    text = _text(x + shift, y + size * 0.36, label, size, ink)
    return (
        f"<g><title>{_clean(component.name)}</title>{box}{''.join(letters)}{text}</g>"
    )


def _heading(title: str, run: Run | None) -> list[str]:
    found = [_text(24, 28, title, 15, INK, "start", "600")] if title else []
    if run is not None:
        method = run.policy.get("method")
        facts = [run.model.name, run.dataset, method if isinstance(method, str) else ""]
        shown = "  ·  ".join(fact for fact in facts if fact and fact != title)
        found.append(_text(24, 46 if title else 28, shown, 10.5, MUTED, "start"))
    return found


def _legend(grid: _Grid, scale: _Scale, drawn: int, total: int) -> list[str]:
    y = grid.height - 24
    found = [
        f'<line x1="24" x2="{grid.width - 24:.1f}" y1="{y - 20:.1f}" y2="{y - 20:.1f}" stroke="{FAINT}"/>'
    ]
    x = 24.0
    entries: list[tuple[str, str, float, str]] = []
    if scale.most:
        entries += [("helps", HELPS, 3.0, ""), ("hurts", HURTS, 3.0, "")]
    ports = {"query": "q", "key": "k", "value": "v"}
    entries += [(name, PLAIN, 1.6, DASHES[port]) for name, port in ports.items()]
    for label, colour, width, dash in entries:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        found.append(
            f'<line x1="{x:.1f}" x2="{x + 26:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" '
            f'stroke-width="{width}" stroke-linecap="round"{dashes}/>'
        )
        found.append(_text(x + 32, y + 3.6, label, 10.5, INK, "start"))
        x += 48 + 5.6 * len(label)
    if scale.most:
        note = f"width: |score|, to {scale.most:.3g}"
        found.append(_text(x + 4, y + 3.6, note, 10.5, MUTED, "start"))
    count = (
        f"{total:,} edges" if drawn == total else f"{drawn:,} of {total:,} edges drawn"
    )
    found.append(_text(grid.width - 24, y + 3.6, count, 10.5, MUTED, "end"))
    return found


def _document(body: list[str], grid: _Grid, label: str, background: str | None) -> str:
    width, height = grid.width, grid.height
    back = [_rect(0, 0, width, height, fill=background)] if background else []
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label={quoteattr(_clean(label))} font-family={quoteattr(FONT)}>'
    )
    return "\n".join([head, *back, *body, "</svg>\n"])


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    rounded: float = 0,
    stroke: str = "none",
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{rounded}" fill={quoteattr(fill)} stroke="{stroke}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    colour: str,
    anchor: str = "middle",
    weight: str = "400",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" fill="{colour}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{_clean(text)}</text>'
    )


def _clean(text: str) -> str:
    """Escaped, and without the control characters that XML does not allow."""
    return escape(
        re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
    )
