"""The table of runs: its columns, filters, order, and what can be done to runs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import data
import pandas as pd
import streamlit as st
import ui

RUN_COLUMNS = [
    "run",
    "kind",
    "model",
    "task",
    "method",
    "metric",
    "ablation",
    "n",
    "curve",
    "faithfulness",
    "tags",
    "note",
    "saved_at",
]


def run_table(runs: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """The runs with the faithfulness of their circuits over sizes, as a small curve."""
    table = runs.copy()
    table["run"] = table["run_id"].str[:8]
    table["note"] = table["note"].fillna("")
    own = curves[curves["label"] == "circuit"] if len(curves) else curves
    by_run: dict[str, list[float]] = {}
    for column in ("scores", "eval_run"):
        if len(own):
            grouped = own.dropna(subset=["faithfulness"]).groupby(column)
            by_run |= {str(run): part["faithfulness"].tolist() for run, part in grouped}
    table["curve"] = [by_run.get(run, []) for run in table["run_id"]]
    table["faithfulness"] = [
        max(by_run.get(run, [float("nan")])) for run in table["run_id"]
    ]
    return table


def filtered(
    table: pd.DataFrame,
    equal: Mapping[str, Sequence[str]],
    tags: Sequence[str],
    text: str,
    days: int | None,
    now: datetime.datetime,
) -> pd.DataFrame:
    """The rows that meet all filters; an empty filter asks for nothing."""
    keep = pd.Series(data=True, index=table.index)
    for column, values in equal.items():
        if values:
            keep &= table[column].isin(values)
    if tags:
        tagged = [not set(tags).isdisjoint(own) for own in table["tags"]]
        keep &= pd.Series(tagged, index=table.index, dtype=bool)
    if days is not None:
        saved = pd.to_datetime(table["saved_at"], utc=True)
        keep &= saved > now - datetime.timedelta(days=days)
    if text:
        columns = ["run_id", "model", "task", "method", "metric", "note", "kind"]
        joined = table[columns].fillna("").astype(str).agg(" ".join, axis=1)
        joined += " " + table["tags"].map(" ".join)
        for word in text.split():
            keep &= joined.str.contains(word, case=False, regex=False)
    return table[keep]


def sorted_by(table: pd.DataFrame, sort: str) -> pd.DataFrame:
    """The rows in an order that a reader asked for; newest first among equals."""
    column, up = {
        "newest": ("saved_at", False),
        "oldest": ("saved_at", True),
        "prompts": ("n", False),
        "faithfulness": ("faithfulness", False),
    }.get(sort, (sort, True))
    return table.sort_values(column, ascending=up, kind="stable", na_position="last")


def rows_of(table: pd.DataFrame, ids: Sequence[str]) -> list[int]:
    return [int(row) for row in table.index[table["run_id"].isin(ids)]]


def run_columns() -> dict[str, Any]:
    """How the columns look."""
    config = st.column_config
    return {
        "run": config.TextColumn("Run", width=84),
        "kind": config.TextColumn("Kind", width=64),
        "model": config.TextColumn("Model"),
        "task": config.TextColumn("Task"),
        "method": config.TextColumn("Method"),
        "metric": config.TextColumn("Metric"),
        "ablation": config.TextColumn("Ablation", width=80),
        "n": config.NumberColumn("Prompts", width=76),
        "curve": config.LineChartColumn(
            "Curve", y_min=0, y_max=1.2, help="Faithfulness over circuit sizes."
        ),
        "faithfulness": config.NumberColumn(
            "Best",
            format="%.2f",
            width=64,
            help="The best faithfulness of its circuits.",
        ),
        "tags": config.ListColumn("Tags"),
        "note": config.TextColumn("Note"),
        "saved_at": config.DatetimeColumn("Saved (UTC)", format="YYYY-MM-DD HH:mm"),
    }


def actions(path: str, chosen: pd.DataFrame) -> None:
    """What can be done to the ticked runs."""
    ids = chosen["run_id"].tolist()
    with st.container(horizontal=True, vertical_alignment="center"):
        _links(chosen)
        with st.popover("Tag", icon=":material/sell:"):
            _tags(path, chosen)
        with st.popover("Note", icon=":material/edit_note:"):
            _note(path, chosen)
        if st.button("Delete", icon=":material/delete:", key="delete"):
            for run_id in ids:
                data.say(path, "delete", run_id)
            st.query_params["deleted"] = ",".join(ids)
            del st.query_params["chosen"]
            st.rerun()


def _links(chosen: pd.DataFrame) -> None:
    first = chosen.iloc[0]
    pages = {
        "edge": ("pages/circuit.py", "Open the circuit", ":material/hub:"),
        "circuit": ("pages/circuit.py", "Open the circuit", ":material/hub:"),
        "eval": ("pages/validate.py", "Open the evaluation", ":material/verified:"),
        "act": ("pages/reads.py", "Open the reads", ":material/grid_on:"),
    }
    if len(chosen) == 1 and first["kind"] in pages:
        page, label, icon = pages[first["kind"]]
        query = {"run": first["run_id"]}
        st.page_link(page, label=label, icon=icon, query_params=query)
    shown = chosen[chosen["kind"].isin(["edge", "circuit"])]["run_id"].tolist()
    if len(shown) > 1:
        query = {"runs": ",".join(shown)}
        icon = ":material/compare_arrows:"
        st.page_link("pages/compare.py", label="Compare", icon=icon, query_params=query)


def _tags(path: str, chosen: pd.DataFrame) -> None:
    with st.form("tags", border=False, clear_on_submit=True):
        words = st.text_input("Tags, with commas", key="new-tags")
        add = st.form_submit_button("Add")
        remove = st.form_submit_button("Remove")
    tags = [word.strip() for word in words.split(",") if word.strip()]
    if (add or remove) and tags:
        for run_id in chosen["run_id"]:
            data.say(path, "tag" if add else "untag", run_id, *tags)
        st.rerun()


def _note(path: str, chosen: pd.DataFrame) -> None:
    old = chosen.iloc[0]["note"] if len(chosen) == 1 else ""
    with st.form("note", border=False):
        text = st.text_area("Note", value=old if isinstance(old, str) else "")
        if st.form_submit_button("Save"):
            for run_id in chosen["run_id"]:
                data.say(path, "note", run_id, text)
            st.rerun()


def deleted_banner(path: str, stamp: str) -> None:
    """What was just deleted, and the way back."""
    ids = [i for i in st.query_params.get("deleted", "").split(",") if i]
    if not ids or not stamp:
        return
    gone = set(data.sql(path, stamp, "select run_id from v_tombstone")["run_id"])
    ids = [run_id for run_id in ids if run_id in gone]
    if not ids:
        return
    with st.container(horizontal=True, vertical_alignment="center", border=True):
        names = ", ".join(map(ui.short, ids))
        st.markdown(f"Deleted {ui.plain(names)}.")
        if st.button("Undo", icon=":material/undo:", key="undo"):
            for run_id in ids:
                data.say(path, "restore", run_id)
            del st.query_params["deleted"]
            st.rerun()
