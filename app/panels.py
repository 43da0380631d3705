"""The panels beside a circuit: what is selected, and what the whole is."""

from __future__ import annotations

import contextlib
import functools

import data
import numpy as np
import pandas as pd
import streamlit as st
import ui
from view import Ranked, Selection, View

from circuitlab.errors import CircuitlabError
from circuitlab.interchange import WRITERS
from circuitlab.sites import parse_edge


def details(path: str, stamp: str, ranked: Ranked, view: View, kept: Selection) -> None:
    """What is known of the selected component or edge, or of the circuit."""
    if "->" in view.selected:
        edge_details(path, stamp, ranked, view.selected)
    elif view.selected:
        component_details(ranked, view.selected, kept)
    else:
        circuit_details(ranked, view, kept)


def circuit_details(ranked: Ranked, view: View, kept: Selection) -> None:
    """The circuit as numbers, and its strongest edges."""
    rows = [ranked.place[name] for name in kept.kept]
    keys = np.maximum(ranked.keys, 0)
    total = float(keys.sum())
    share = float(keys[rows].sum()) / total if total and np.isfinite(total) else None
    left, right = st.columns(2)
    left.metric("Edges", f"{len(kept.kept):,}", border=True)
    right.metric(
        "Share of strength",
        "–" if share is None else f"{share:.0%}",
        border=True,
        help="Of the sum of all positive keys. It is not faithfulness: validate.",
    )
    facts = []
    if kept.dangling:
        facts.append(f"{kept.dangling:,} edges dangle and are pruned")
    if kept.hidden:
        facts.append(f"{kept.hidden:,} are hidden")
    facts += [f"{n:,} not ranked: {why}" for why, n in ranked.excluded.items()]
    if facts:
        st.caption(ui.plain("; ".join(facts) + "."))
    st.dataframe(edge_frame(ranked, kept.kept[:200]), hide_index=True, height=330)


def component_details(ranked: Ranked, name: str, kept: Selection) -> None:
    """A component's neighbours in the circuit, strongest first."""
    st.markdown(f"**{ui.plain(name)}**")
    edges = [(edge, parse_edge(edge)) for edge in kept.kept]
    into = [n for n, e in edges if e.receiver.component.name == name]
    out = [n for n, e in edges if e.sender.name == name]
    supports = ranked.supports
    left, right = st.columns(2)
    for column, label, names in ((left, "In", into), (right, "Out", out)):
        total = float(np.nansum([supports[ranked.place[n]] for n in names]))
        column.metric(f"{label}, support", f"{total:+.3g}", border=True)
    for label, names in (("Edges in", into), ("Edges out", out)):
        st.caption(f"{label}: {len(names):,} in this circuit")
        if names:
            frame = edge_frame(ranked, names[:200])
            st.dataframe(frame, hide_index=True, height=min(36 * len(frame) + 38, 220))


def edge_details(path: str, stamp: str, ranked: Ranked, name: str) -> None:
    """An edge's numbers, here and in other runs."""
    st.markdown(f"**{ui.plain(name)}**")
    place = ranked.place.get(name)
    if place is None:
        st.caption("This edge is not among the ranked edges of this run.")
    else:
        score, stderr = ranked.scores[place], ranked.stderrs[place]
        left, right = st.columns(2)
        spread = f"± {stderr:.2g}" if np.isfinite(stderr) else "no error bar"
        left.metric("Score", f"{score:+.3g}", spread, border=True, delta_color="off")
        right.metric(
            "Rank",
            f"{place + 1:,}",
            f"of {len(ranked.names):,}",
            border=True,
            delta_color="off",
        )
    exact = data.exact_effect(path, stamp, name, ranked.scores_run)
    known = "not measured" if exact is None else f"{exact:+.3g}"
    st.caption(f"Exact effect of corrupting this edge alone: {ui.plain(known)}")
    others = data.edge_elsewhere(path, stamp, name, ranked.scores_run)
    if others.empty:
        return
    others["run"] = others["run_id"].str[:8]
    columns = ["run", "model", "task", "method", "score", "rank", "status"]
    st.caption("The same edge in other runs on this architecture")
    st.dataframe(
        others[columns], hide_index=True, height=min(36 * len(others) + 38, 260)
    )


FORMATS = {
    "JSON": ("json", "json", "with everything: it loads back"),
    "EAP-IG JSON": ("eap-ig", "json", "as EAP-IG's graphs"),
    "GraphML": ("graphml", "graphml", "for Gephi, yEd, networkx"),
    "DOT": ("dot", "dot", "for Graphviz"),
    "CSV": ("csv", "csv", "one edge a row"),
}


def exports(path: str, ranked: Ranked, view: View, kept: Selection) -> None:
    """Download the circuit on the screen; PNG, SVG and PDF are by the picture."""

    def text(format: str) -> str:
        table = None
        with contextlib.suppress(CircuitlabError, KeyError):
            table = data.edge_table(path, ranked.scores_run)
        return WRITERS[format](kept.circuit(ranked, view), table)

    for label, (format, ending, about) in FORMATS.items():
        st.download_button(
            f"{label}: {about}",
            functools.partial(text, format),
            f"circuit-{ui.short(view.run)}-{kept.k}.{ending}",
            key=f"export-{format}",
            on_click="ignore",
            width="stretch",
        )
    st.caption("PNG, SVG and PDF of the picture are above it.")


def edge_frame(ranked: Ranked, names: tuple[str, ...] | list[str]) -> pd.DataFrame:
    """Edges with their scores, in rank order."""
    rows = [ranked.place[name] for name in names]
    return pd.DataFrame(
        {
            "rank": [row + 1 for row in rows],
            "edge": list(names),
            "score": ranked.scores[rows],
            "stderr": ranked.stderrs[rows],
        }
    )
