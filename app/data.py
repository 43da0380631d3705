"""What the pages read: cached queries on one store. Data is cached, never a connection.

What can change is cached under a stamp of the store's files; a run's rows never change,
and are cached under its id.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import streamlit as st
from view import Ranked, Selection, View, rank_circuit, rank_table, select

from circuitlab.circuits import Circuit
from circuitlab.errors import CircuitlabError, StoreError
from circuitlab.ranking import Rank
from circuitlab.store import Store
from circuitlab.tables import EdgeTable, Run

FOLD_SECONDS = 0.3


def store_path() -> str:
    """The store that the app was started on: its argument, else the default."""
    given = sys.argv[1:] if Path(sys.argv[0]).name == "main.py" else []
    return Store(given[0] if given else None).path


def stamp(path: str) -> str:
    """A text that changes when the store does; empty where there is none."""
    store = Store(path)
    parts, said = store.spool.entries()
    found = [*map(str, parts), *map(str, said)]
    if store.database is not None:
        with contextlib.suppress(OSError):
            facts = store.database.path.stat()
            found.append(f"{facts.st_mtime_ns}:{facts.st_size}:{facts.st_ino}")
    return "|".join(found)


def fold(path: str) -> None:
    """Fold what waits in the spool, if the file is free and this process may."""
    store = Store(path)
    if any(store.spool.entries()):
        with contextlib.suppress(StoreError):
            store.fold(FOLD_SECONDS, wait=0.05)


@st.cache_data(show_spinner=False, max_entries=8)
def runs(path: str, stamp: str) -> pd.DataFrame:
    """Every run, newest first; empty where there is no store yet."""
    if not stamp:
        return pd.DataFrame()
    return Store(path).runs().to_pandas()


@st.cache_data(show_spinner=False, max_entries=64)
def sql(path: str, stamp: str, query: str, params: tuple = ()) -> pd.DataFrame:
    """The rows of one query. Raises as `Store.sql` does."""
    return Store(path).sql(query, list(params) or None).to_pandas()


@st.cache_data(show_spinner=False, max_entries=8)
def curves(path: str, stamp: str) -> pd.DataFrame:
    """Evaluations with the run whose scores chose the circuits (`scores`), by size."""
    query = """
        select coalesce(c.parent, r.parent) as scores, r.parent, r.run_id as eval_run,
            r.model, r.task, r.dataset_digest, r.saved_at,
            e.more ->> '$.subject' as subject,
            try_cast(e.more ->> '$.change' as double) as change,
            try_cast(e.more ->> '$.change_low' as double) as change_low,
            try_cast(e.more ->> '$.change_high' as double) as change_high,
            e.* exclude (run_id, more)
        from v_eval e
        join v_run r on r.run_id = e.run_id
        left join v_run c on c.run_id = r.parent and c.kind = 'circuit'
        order by r.saved_at, e.k
    """
    return sql(path, stamp, query) if stamp else pd.DataFrame()


@st.cache_resource(show_spinner=False, max_entries=8)
def edge_table(path: str, run_id: str) -> EdgeTable:
    """A run's EDGE rows. They are immutable, so all sessions share them."""
    record = Store(path).load_record(run_id)
    return EdgeTable(record.tables["edge"], record.run)


@st.cache_resource(show_spinner=False, max_entries=32)
def stored_circuit(path: str, run_id: str) -> tuple[Circuit, Run]:
    """A stored circuit and its run."""
    store = Store(path)
    return store.load(run_id), store.load_record(run_id).run


@st.cache_resource(show_spinner=False, max_entries=24)
def ranked(
    path: str, run_id: str, kind: str, rank: Rank, where: str, pins: tuple[str, ...]
) -> Ranked:
    """A run's edges best first. Raises what the selector's text deserves."""
    if kind == "edge":
        table = edge_table(path, run_id)
        return rank_table(table, rank=rank, where=where, pins=pins, run_id=run_id)
    circuit, run = stored_circuit(path, run_id)
    table = None
    if run.parent:
        with contextlib.suppress(CircuitlabError, KeyError):
            table = edge_table(path, run.parent)
    return rank_circuit(circuit, table, rank, run.parent or "")


def ranked_for(path: str, kind: str, view: View) -> Ranked:
    """A view's run, ranked as the view says."""
    return ranked(path, view.run, kind, view.rank, view.where, view.edge_pins)


@st.cache_resource(show_spinner=False, max_entries=48)
def _selection(path: str, kind: str, view: View) -> Selection:
    return select(ranked_for(path, kind, view), view)


def selection(path: str, kind: str, view: View) -> Selection:
    """What a view keeps of its run."""
    return _selection(path, kind, view.edges_only)


@st.cache_data(show_spinner=False, max_entries=64)
def edge_elsewhere(path: str, stamp: str, edge: str, run_id: str) -> pd.DataFrame:
    """One edge in the newest runs on models of the same architecture: score and rank."""
    query = """
        with mine as (select * from v_run where run_id = ?),
        others as (
            select r.run_id, r.model, r.task, r.method
            from v_run r, mine m
            where r.kind = 'edge' and r.architecture = m.architecture
                and r.n_layers = m.n_layers and r.n_heads = m.n_heads
            order by r.run_id = m.run_id desc, r.saved_at desc limit 12
        ),
        this as (
            select o.*, e.score, e.stderr, e.status
            from v_edge e join others o using (run_id) where e.edge = ?
        )
        select t.*, 1 + count(*) filter (where abs(e.score) > abs(t.score)) as rank,
            count(*) as edges, t.run_id = ? as own
        from this t join v_edge e using (run_id)
        group by all order by own desc, rank
    """
    return sql(path, stamp, query, (run_id, edge, run_id))


@st.cache_data(show_spinner=False, max_entries=64)
def exact_effect(path: str, stamp: str, edge: str, run_id: str) -> float | None:
    """The exact effect of patching an edge, from a run of method `exact` on the same
    model, prompts and metric; None where nobody measured it."""
    query = """
        select e.score from v_edge e
        join v_run r using (run_id)
        join v_run m on m.run_id = ? and m.weights_digest = r.weights_digest
            and m.dataset_digest = r.dataset_digest
            and m.metric is not distinct from r.metric
        where r.method = 'exact' and e.edge = ? and e.score is not null
        order by r.saved_at desc limit 1
    """
    found = sql(path, stamp, query, (run_id, edge))
    return None if found.empty else float(found["score"][0])


@st.cache_data(show_spinner=False, max_entries=8)
def act_rows(path: str, stamp: str, run_id: str) -> pd.DataFrame:
    """A run's ACT rows."""
    return sql(path, stamp, "select * from v_act where run_id = ?", (run_id,))


@st.cache_data(show_spinner=False, max_entries=16)
def prompts(path: str, stamp: str, digest: str) -> pa.Table | None:
    """A run's prompts, where they were saved with it."""
    query = "select * from v_prompt where dataset_digest = ? order by prompt"
    found = Store(path).sql(query, [digest])
    return found if found.num_rows else None


def say(path: str, verb: str, run_id: str, *values: Any) -> None:
    """Tag, untag, note, delete or restore a run."""
    getattr(Store(path), verb)(run_id, *values)
    fold(path)
