"""Typed and named queries on a store, kept to reading, in time and in size."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import duckdb
import pandas as pd
import streamlit as st
import ui

from circuitlab.errors import StoreError
from circuitlab.queries import NamedQuery, Parameter, named_queries, run_query
from circuitlab.store import Store

OWN = "your own"
EXAMPLE = """select kind, model, task, method, count(*) as runs
from v_run
group by all
order by runs desc"""


@st.cache_data(show_spinner=False)
def _named() -> dict[str, NamedQuery]:
    return named_queries()


def named() -> dict[str, NamedQuery]:
    """The queries that circuitlab brings, by name."""
    return _named()


@st.cache_data(show_spinner=False, max_entries=8)
def views(path: str, stamp: str) -> pd.DataFrame:
    """Every readable view with its columns."""
    query = """
        select table_name as view, string_agg(column_name, ', ' order by column_index)
            as columns
        from duckdb_columns()
        where starts_with(table_name, 'v_') group by table_name order by table_name
    """
    return answer(path, stamp, query, {}, 100, 10)[0].drop_duplicates("view")


def parameters(query: NamedQuery, runs: pd.DataFrame) -> dict[str, object]:
    """Ask for a named query's parameters; runs are chosen from a list."""
    return {p.name: _parameter(query, p, runs) for p in query.parameters}


def _parameter(query: NamedQuery, parameter: Parameter, runs: pd.DataFrame) -> object:
    key = f"p-{parameter.name}"
    if parameter.name == "run" or parameter.name.startswith("run_"):
        wanted = "circuit" if "circuit" in parameter.meaning else "edge"
        first = runs.sort_values("kind", key=lambda k: k != wanted, kind="stable")
        return ui.run_choice(first, parameter.meaning, key)
    default = parameter.default
    label = ui.plain(f"{parameter.name}: {parameter.meaning}")
    if isinstance(default, bool):
        return st.checkbox(label, default, key=key, bind="query-params")
    if isinstance(default, int | float):
        return st.number_input(label, value=default, key=key, bind="query-params")
    text = st.text_input(label, value=default or "", key=key, bind="query-params")
    return text or default


@st.cache_data(show_spinner=False, max_entries=16)
def answer(
    path: str,
    stamp: str,
    text: str,
    params: Mapping[str, object],
    limit: int,
    seconds: int,
) -> tuple[pd.DataFrame, float]:
    """The first `limit` rows of one SELECT, and how many seconds it took.

    The query reads the store and no other file. Raises StoreError `sql_not_read_only`,
    `sql_failed`, or `sql_too_slow` where it is not done in `seconds`.
    """
    store = Store(path)
    started = time.monotonic()
    with store.connect() as con:
        _close_in(con, store)
        bell = threading.Timer(seconds, con.interrupt)
        bell.start()
        try:
            query = _limited(con, text.strip().rstrip(";"), limit)
            found = run_query(con, query, params or None)
        except duckdb.InterruptException as error:
            raise _too_slow(seconds) from error
        except StoreError as error:
            if isinstance(error.__cause__, duckdb.InterruptException):
                raise _too_slow(seconds) from error
            raise
        finally:
            bell.cancel()
    return found.to_pandas(), time.monotonic() - started


def _limited(con: duckdb.DuckDBPyConnection, query: str, limit: int) -> str:
    """The query cut to its first rows; what is no SELECT stays, to be refused."""
    try:
        kinds = [statement.type for statement in con.extract_statements(query)]
    except duckdb.Error:
        return query
    if kinds != [duckdb.StatementType.SELECT]:
        return query
    return f"from (\n{query}\n) limit {limit}"


def _too_slow(seconds: int) -> StoreError:
    return StoreError(
        "sql_too_slow",
        f"the query was stopped after {seconds} s; raise the limit, or ask for less",
        value=seconds,
    )


def _close_in(con: duckdb.DuckDBPyConnection, store: Store) -> None:
    """Let a query read the store's own files and nothing else on this machine."""
    if store.database is None:
        return
    spool = f"{store.path}.spool/".replace("'", "''")
    con.execute(f"set allowed_directories = ['{spool}']")
    con.execute("set enable_external_access = false")
    con.execute("set lock_configuration = true")
