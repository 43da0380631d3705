"""Charts: from frames to Altair charts. Pure: no widget, no store, no session."""

from __future__ import annotations

import html
from collections.abc import Sequence

import altair as alt
import pandas as pd

# Middle tones that read well on white and on black.
HELPS, HURTS, PLAIN = "#3b82c4", "#d9663f", "#8a97a6"
SERIES = [HELPS, "#d99a2b", "#4ea373", "#a06cc8", "#c45c8a", "#5bb0b8"]


def curve_chart(rows: pd.DataFrame, here: str = "") -> alt.LayerChart | alt.FacetChart:
    """Faithfulness against circuit size, with 95 % intervals and random circuits.

    `rows` are EVAL rows with `series` (a line's name) and `kind` (circuit or random).
    A click on a point selects it (parameter `point`).
    """
    rows = rows.assign(mark=rows["circuit_id"] == here)
    size = _size_axis(rows)
    # Random circuits come last, so that they don't take the first colour.
    names = sorted(rows["series"].unique(), key=lambda name: name.startswith("random"))
    scale = alt.Scale(domain=names, range=SERIES)
    colour = alt.Color("series:N", title=None, scale=scale, legend=_top())
    value = alt.Y("faithfulness:Q", title="faithfulness")
    base = alt.Chart(rows)
    band = base.mark_area(opacity=0.14).encode(
        size, alt.Y("faithfulness_low:Q"), alt.Y2("faithfulness_high:Q"), colour
    )
    dash = alt.StrokeDash("kind:N", legend=None, scale=_dashes())
    line = base.mark_line(strokeWidth=2).encode(size, value, colour, dash)
    point = alt.selection_point(
        name="point", fields=["circuit_id", "n_edges", "scores"]
    )
    dots = base.mark_point(filled=True, opacity=1).encode(
        size,
        value,
        colour,
        size=alt.condition("datum.mark", alt.value(210), alt.value(60)),
        shape=alt.Shape("kind:N", legend=None, scale=_shapes()),
        tooltip=[
            alt.Tooltip("series:N", title="evaluated"),
            alt.Tooltip("n_edges:Q", title="edges", format=","),
            alt.Tooltip("faithfulness:Q", format=".3f"),
            alt.Tooltip("faithfulness_low:Q", title="low", format=".3f"),
            alt.Tooltip("faithfulness_high:Q", title="high", format=".3f"),
            alt.Tooltip("kl:Q", title="KL (nats)", format=".3f"),
        ],
    )
    ends = pd.DataFrame({"y": [0.0, 1.0]})
    rule = (
        alt.Chart(ends).mark_rule(color=PLAIN, strokeDash=[2, 4]).encode(alt.Y("y:Q"))
    )
    bar = base.mark_rule(strokeWidth=1.2, opacity=0.8).encode(
        size, alt.Y("faithfulness_low:Q"), alt.Y2("faithfulness_high:Q"), colour
    )
    layers = alt.layer(rule, band, bar, line, dots.add_params(point))
    return layers.properties(height=360)


def _size_axis(rows: pd.DataFrame) -> alt.X:
    most = float(rows["n_edges"].max())
    ticks = [n * 10**e for e in range(7) for n in (1, 2, 5) if n * 10**e <= most * 1.3]
    axis = alt.Axis(values=[0, *ticks], format=",d", labelOverlap=True, grid=False)
    scale = alt.Scale(type="symlog", constant=3, domain=[0, max(4.0, most * 1.12)])
    return alt.X("n_edges:Q", title="edges kept", scale=scale, axis=axis)


def _dashes() -> alt.Scale:
    return alt.Scale(domain=["circuit", "random"], range=[[1, 0], [5, 4]])


def _shapes() -> alt.Scale:
    return alt.Scale(domain=["circuit", "random"], range=["circle", "diamond"])


def heat_chart(
    cells: pd.DataFrame,
    order: Sequence[str],
    layers: Sequence[str],
    names: tuple[str, str],
) -> alt.Chart:
    """A heat map of `score` by `layer` and `x`: blue above zero, red below, and the
    number in the tooltip. `names` say what x and the score are."""
    most = float(cells["score"].abs().max() or 1.0)
    scale = alt.Scale(
        domain=[-most, 0, most], range=[HURTS, "#8a97a622", HELPS], interpolate="rgb"
    )
    angle = 0 if max(map(len, order), default=0) <= 4 else -50
    x_axis = alt.Axis(labelAngle=angle, labelLimit=220, ticks=False, domain=False)
    return (
        alt.Chart(cells)
        .mark_rect(
            cornerRadius=2, stroke="#8a97a6", strokeOpacity=0.25, strokeWidth=0.5
        )
        .encode(
            alt.X("x:O", title=names[0], sort=list(order), axis=x_axis),
            alt.Y(
                "layer:O",
                title="layer",
                sort=list(layers),
                axis=alt.Axis(ticks=False, domain=False),
            ),
            alt.Color("score:Q", scale=scale, title=names[1]),
            tooltip=[
                "layer",
                alt.Tooltip("x:N", title=names[0]),
                alt.Tooltip("score:Q", title=names[1], format="+.4g"),
            ],
        )
        .properties(height=max(180, 30 * len(layers) + 110))
    )


def scatter_chart(
    rows: pd.DataFrame, a: str, b: str
) -> alt.LayerChart | alt.FacetChart:
    """Two runs' scores of the same edges, and where they would be equal."""
    low = float(rows[["a", "b"]].min().min())
    high = float(rows[["a", "b"]].max().max())
    equal = alt.Chart(pd.DataFrame({"v": [low, high]})).mark_line(
        color=PLAIN, strokeDash=[4, 4]
    )
    dots = alt.Chart(rows).mark_point(filled=True, size=34, opacity=0.75)
    return alt.layer(
        equal.encode(alt.X("v:Q", title=""), alt.Y("v:Q", title="")),
        dots.encode(
            alt.X("a:Q", title=f"score in {a}"),
            alt.Y("b:Q", title=f"score in {b}"),
            alt.Color("where:N", title=None, scale=_where(a, b), legend=_top()),
            alt.Shape("where:N", title=None),
            tooltip=["edge", alt.Tooltip("a:Q", title=a), alt.Tooltip("b:Q", title=b)],
        ),
    ).properties(height=380)


def _where(a: str, b: str) -> alt.Scale:
    return alt.Scale(
        domain=["both", f"only {a}", f"only {b}", "neither"],
        range=["#4ea373", HELPS, HURTS, PLAIN],
    )


def _top() -> alt.Legend:
    return alt.Legend(
        orient="top", symbolOpacity=1, symbolType="circle", labelLimit=400
    )


def pareto_chart(rows: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Size against faithfulness of every evaluated circuit, and the front: those that
    no smaller circuit equals. A click on a point selects it (parameter `point`)."""
    size = _size_axis(rows)
    value = alt.Y("faithfulness:Q", title="faithfulness")
    front = alt.Chart(rows[rows["front"]]).mark_line(
        interpolate="step-after", color=PLAIN, strokeWidth=1.5
    )
    point = alt.selection_point(
        name="point", fields=["circuit_id", "n_edges", "scores"]
    )
    dots = alt.Chart(rows).mark_point(filled=True, opacity=0.9)
    dots = dots.encode(
        size,
        value,
        alt.Color("series:N", title=None, scale=alt.Scale(range=SERIES), legend=_top()),
        alt.Shape("series:N", legend=None),
        size=alt.condition("datum.front", alt.value(130), alt.value(45)),
        tooltip=[
            "series",
            alt.Tooltip("n_edges:Q", title="edges", format=","),
            alt.Tooltip("faithfulness:Q", format=".3f"),
            "ablation",
            "scores",
        ],
    )
    ends = pd.DataFrame({"y": [0.0, 1.0]})
    rule = (
        alt.Chart(ends).mark_rule(color=PLAIN, strokeDash=[2, 4]).encode(alt.Y("y:Q"))
    )
    layers = alt.layer(rule, front.encode(size, value), dots.add_params(point))
    return layers.properties(height=440)


def front_of(rows: pd.DataFrame) -> pd.Series:
    """Which circuits are on the front: more faithful (nearer to 1) than all smaller."""
    miss = (1 - rows["faithfulness"]).abs()
    order = rows.assign(miss=miss).sort_values(["n_edges", "miss"])
    best = order["miss"].cummin().shift(fill_value=float("inf"))
    return (order["miss"] < best).reindex(rows.index)


def tokens_html(
    tokens: Sequence[str], other: Sequence[str], strengths: Sequence[float | None]
) -> str:
    """Tokens as HTML: tinted by strength in [−1, 1], underlined where the corrupted
    prompt has another token, which stands below."""
    cells = []
    for i, token in enumerate(tokens):
        strength = strengths[i] if i < len(strengths) else None
        against = other[i] if i < len(other) else None
        differs = against is not None and against != token
        below = f"<small>{_shown(against)}</small>" if differs and against else ""
        edge = "border-bottom:2px solid currentColor;" if differs else ""
        cells.append(
            f'<span style="display:inline-flex;flex-direction:column;padding:1px 2px;'
            f'border-radius:3px;{edge}{_tint(strength)}">{_shown(token)}{below}</span>'
        )
    return f'<span style="font-family:monospace;font-size:13px">{"".join(cells)}</span>'


def _shown(token: str) -> str:
    text = html.escape(token).replace("\n", "⏎").replace("\t", "⇥")
    return text.replace(" ", "&nbsp;")


def _tint(strength: float | None) -> str:
    if strength is None:
        return ""
    red, green, blue = (59, 130, 196) if strength >= 0 else (217, 102, 63)
    alpha = min(1.0, abs(strength)) * 0.6
    return f"background:rgba({red},{green},{blue},{alpha:.2f});"
