"""Many processes at one store: nobody sees a lock, nobody waits for long."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path

import duckdb
import pytest
from store_tables import SMALL, edges_of, start

from circuitlab.errors import StoreError
from circuitlab.store import Store


def finish(process: subprocess.Popen[str], seconds: float = 120) -> list[str]:
    """The lines that a child said; it must have ended well."""
    out, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors
    return out.splitlines()


def test_writers_and_readers_get_along(tmp_path):
    path, each = tmp_path / "runs.duckdb", 8
    writers = [start("save", path, 100 * n, each) for n in range(4)]
    readers = [start("read", path, 4 * each, 100) for _ in range(2)]
    said = [finish(process) for process in writers]
    for process in readers:
        queries, seen = map(int, finish(process)[-1].split())
        assert seen == 4 * each
        assert queries > 0
    ids = {run_id for lines in said for run_id in lines}
    store = Store(path)
    store.fold(wait=30)
    assert len(ids) == 4 * each
    assert set(store.runs()["run_id"].to_pylist()) == ids
    assert store.check(deep=True).problems == ()


def test_a_run_is_seen_elsewhere_when_its_save_returned(tmp_path):
    path = tmp_path / "runs.duckdb"
    writer = start("save", path, 0, 20)
    assert writer.stdout is not None
    store = Store(path)
    for line in writer.stdout:
        assert store.load(line.strip()).run_id == line.strip()
    assert finish(writer) == []
    assert store.runs().num_rows == 20


def test_two_processes_save_the_same_runs(tmp_path):
    path = tmp_path / "runs.duckdb"
    both = [start("save", path, 0, 10) for _ in range(2)]
    first, second = (finish(process) for process in both)
    assert first == second
    store = Store(path)
    store.fold(wait=30)
    assert store.sql("select count(*) as n from run").to_pylist() == [{"n": 10}]
    rows = store.sql("select count(*) as n from v_edge").to_pylist()
    assert rows == [{"n": 10 * SMALL.n_edges}]


class Shell:
    """Another process that has the file open, as a `duckdb` shell has."""

    def __init__(self, path: str | Path, mode: str):
        self.process = start("hold", path, mode, stdin=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "held"

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate("", timeout=60)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "runs.duckdb", wait=10)
    made.save(edges_of(0))
    assert made.fold().runs == 1
    assert made.database is not None
    made.database = dataclasses.replace(made.database, foreign_wait=0.2)
    return made


def test_a_shell_that_reads_only_delays_folding(store):
    with Shell(store.path, "read") as shell:
        run_id = store.save(edges_of(1))
        assert store.load(run_id).rows.equals(edges_of(1).rows)
        assert store.runs().num_rows == 2
        folded = store.fold(wait=0.1)
        assert (folded.runs, folded.pending) == (0, 1)
        assert folded.pid == shell.process.pid
    assert store.fold().runs == 1
    assert store.runs().num_rows == 2


def test_a_shell_that_writes_is_named(store):
    with Shell(store.path, "write") as shell:
        run_id = store.save(edges_of(1))
        store.close()
        with pytest.raises(StoreError) as refused:
            store.runs()
        assert refused.value.code == "store_held"
        assert refused.value.fields["pid"] == shell.process.pid
        assert str(shell.process.pid) in str(refused.value)
        assert store.fold(wait=0.1).pid == shell.process.pid
    assert store.load(run_id).run_id == run_id


def test_a_connection_in_this_process_only_delays_folding(store):
    with duckdb.connect(store.path, read_only=True) as mine:
        run_id = store.save(edges_of(1))
        assert store.load(run_id).run_id == run_id
        assert store.fold(wait=0.1).runs == 0
        assert mine.execute("select count(*) from v_run").fetchall() == [(1,)]
    assert store.fold().runs == 1


def test_no_handle_of_ours_drops_the_lock_of_a_shell_in_this_process(store):
    """On POSIX, closing any handle of a file drops all of a process's locks on it."""
    with duckdb.connect(store.path, read_only=True):
        store.runs()
        store.save(edges_of(1))
        store.check()
        other = start("hold", store.path, "write", stdin=subprocess.PIPE)
        _, errors = other.communicate("", timeout=60)
        assert "Conflicting lock" in errors


def test_waiting_readers_pass_when_a_fold_is_over(store):
    assert store.database is not None
    with store.database.writing(1.0) as con:
        assert isinstance(con, duckdb.DuckDBPyConnection)
        reader = start("read", store.path, 1, 30)
        time.sleep(1.0)
    assert finish(reader)[-1].split()[1] == "1"
