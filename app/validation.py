"""What the Validate page shows of evaluations: lines, points, examples."""

from __future__ import annotations

import charts
import data
import pandas as pd
import streamlit as st
import ui
from view import View

from circuitlab.store import Store

ABLATIONS = {
    "patch": "patch: the corrupted prompt's values (patch_from)",
    "mean": "mean over the corrupted prompts (mean_ablate)",
    "mean_positional": "mean at each position (mean_ablate)",
    "zero": "zero (zero_ablate)",
    "resample": "another corrupted prompt's values (resample)",
}
METRICS = ["as scored", "logit_diff", "prob_diff", "answer_logprob", "kl"]
COLUMNS = [
    "label",
    "n_edges",
    "faithfulness",
    "faithfulness_low",
    "faithfulness_high",
    "completeness",
    "metric",
    "metric_full",
    "metric_ablated",
    "kl",
    "accuracy",
    "ablation",
    "metric_name",
    "n",
    "prompts_overlap",
]


def saved_circuit(path: str, kind: str, view: View) -> str:
    """The run id of the circuit on the screen, saved if it is new."""
    ranked = data.ranked_for(path, kind, view)
    chosen = data.selection(path, kind, view)
    if kind == "circuit" and len(chosen.kept) == len(ranked.names):
        return view.run
    return Store(path).save(chosen.circuit(ranked, view))


def options(path: str, key: str) -> list[str]:
    """The form's choices, as options of the command line."""
    left, middle, right = st.columns(3)
    ablation = left.selectbox(
        "Other edges carry",
        list(ABLATIONS),
        format_func=ABLATIONS.get,
        key=f"{key}-abl",
    )
    metric = middle.selectbox("Metric", METRICS, key=f"{key}-metric")
    on = right.selectbox("Prompts", ["held-out", "scored"], key=f"{key}-on")
    found = ["--ablation", ablation, "--on", on]
    return found if metric == METRICS[0] else [*found, "--metric", metric]


def with_series(rows: pd.DataFrame) -> pd.DataFrame:
    """EVAL rows of curves, with the line that each belongs to."""
    kept = rows[rows["label"].isin(["circuit", "random"])].dropna(
        subset=["faithfulness", "n_edges"]
    )
    random = kept["label"] == "random"
    rank = kept["rank"].fillna("circuits by hand").mask(random, "random circuits")
    series = rank + ", " + kept["metric_name"] + ", " + kept["ablation"]
    return kept.assign(series=series, kind=kept["label"])


def curve(rows: pd.DataFrame, here: str) -> pd.Series | None:
    """Draw the curve; returns the row of a clicked point."""
    shown = with_series(rows)
    if shown.empty:
        return None
    columns = [c for c in shown.columns if c not in ("saved_at", "tags")]
    event = st.altair_chart(
        charts.curve_chart(shown[columns], here),
        on_select="rerun",
        selection_mode="point",
        key="curve",
    )
    picked = (event or {}).get("selection", {}).get("point", [])
    if not picked:
        return None
    match = shown[shown["circuit_id"] == picked[0].get("circuit_id")]
    return None if match.empty else match.iloc[0]


def table(rows: pd.DataFrame) -> None:
    """Every evaluation as a row."""
    columns = [c for c in COLUMNS if rows[c].notna().any()]
    newest = rows.sort_values("saved_at", ascending=False, kind="stable")
    numbers = {
        c: st.column_config.NumberColumn(format="%.3f")
        for c in columns
        if rows[c].dtype.kind == "f"
    }
    st.dataframe(newest[columns], hide_index=True, column_config=numbers, height=260)


def completeness(rows: pd.DataFrame) -> None:
    """Faithfulness of the complement, and what leaves when an edge leaves."""
    others = rows[~rows["label"].isin(["circuit", "random"])]
    known = rows.dropna(subset=["completeness"])
    left, right = st.columns(2)
    complement = others[others["label"] == "complement"]
    value = None
    if len(known):
        value = float(known["completeness"].iloc[-1])
    elif len(complement):
        value = float(complement["faithfulness"].iloc[-1])
    left.metric(
        "Completeness",
        "–" if value is None else f"{value:.3f}",
        border=True,
        help="Faithfulness of all edges outside the circuit: near 0 where it is whole.",
    )
    minimal = others[others["label"].str.startswith("minimality")]
    worst = None if minimal.empty else float(minimal["faithfulness"].min())
    right.metric(
        "Minimality",
        "–" if worst is None else f"{worst:.3f}",
        border=True,
        help="The least change of faithfulness when one edge leaves the circuit.",
    )


def examples(path: str, stamp: str, row: pd.Series) -> None:
    """One evaluation's prompts: tokens tinted by how much of the effect is kept."""
    query = """
        select prompt, metric, metric_full, metric_ablated, kl from v_per_example
        where run_id = ? and circuit_id = ? and label = ? and k is not distinct from ?
        order by prompt
    """
    k = None if pd.isna(row["k"]) else int(row["k"])
    key = (row["eval_run"], row["circuit_id"], row["label"], k)
    found = data.sql(path, stamp, query, key)
    if found.empty:
        st.caption("This evaluation has no numbers by example.")
        return
    gap = found["metric_full"] - found["metric_ablated"]
    found["kept"] = (found["metric"] - found["metric_ablated"]) / gap.where(gap != 0)
    prompts = data.prompts(path, stamp, row["dataset_digest"])
    if prompts is not None:
        ui.prompt_table(prompts.to_pylist(), found)
    with st.expander("Numbers by example", expanded=prompts is None):
        st.dataframe(found, hide_index=True)
