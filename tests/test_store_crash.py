"""Being killed at any instant, and having no room: what was saved is there, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_tables import SMALL, edges_of, start

from circuitlab.errors import StoreError
from circuitlab.store import Store

LEAST, MOST, SECONDS = 20, 200, 25
"""How often each of two parents kills, and for how long at most beyond the least."""


@pytest.mark.slow
def test_writers_that_are_killed_at_random_instants_lose_nothing(tmp_path):
    """400 writers (fewer on a slow machine) die in the write, the rename, the ingest,
    the checkpoint."""
    path = tmp_path / "runs.duckdb"
    pairs = [
        start("killed_while_saving", path, n * 100_000, LEAST, MOST, SECONDS)
        for n in range(2)
    ]
    saved, kills = set(), 0
    for process in pairs:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        lines = out.splitlines()
        kills += int(lines[-1].removeprefix("kills "))
        saved |= {line for line in lines if len(line) == 32}
    store = Store(path)
    before = store.runs()["run_id"].to_pylist()
    assert kills >= 2 * LEAST
    assert len(saved) > LEAST
    assert len(before) == len(set(before))
    # Every save that returned; and of the others at most one a life, if it was whole.
    assert saved <= set(before)
    assert len(before) - len(saved) <= kills
    folded = store.fold(wait=30)
    assert (folded.pending, folded.damaged) == (0, ())
    assert set(store.runs()["run_id"].to_pylist()) == set(before)
    assert store.check(deep=True).problems == ()
    counts = store.sql(
        "select count(*) as n, count(distinct run_id) as runs from v_edge"
    ).to_pylist()
    assert counts == [{"n": len(before) * SMALL.n_edges, "runs": len(before)}]
    left = [name for name in store.spool.folder.names() if not name.startswith(".tmp-")]
    assert left == []


def test_what_dead_writers_left_is_swept_once_it_is_old(tmp_path):
    import os

    store = Store(tmp_path / "runs.duckdb")
    store.save(edges_of(1))
    spool = Path(str(store.path) + ".spool")
    for name, age in [("old", 7200), ("young", 60)]:
        folder = spool / f".tmp-1-{name}"
        folder.mkdir()
        stamp = folder.stat().st_mtime - age
        os.utime(folder, (stamp, stamp))
    store.fold()
    assert [path.name for path in spool.iterdir()] == [".tmp-1-young"]


def lines_of(*arguments: object) -> list[list[str]]:
    process = start(*arguments)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [line.split() for line in out.splitlines()]


def test_no_room_for_a_part_is_a_refusal_that_leaves_nothing(tmp_path):
    path = tmp_path / "runs.duckdb"
    said = lines_of("limited", path, 1024, 0, 2)
    assert said[:2] == [["refused", "store_disk_full"]] * 2
    store = Store(path)
    with pytest.raises(StoreError) as refused:
        store.runs()
    assert refused.value.code == "store_missing"
    assert list(Path(f"{path}.spool").iterdir()) == []


def test_no_room_to_fold_keeps_what_was_saved(tmp_path):
    """The part is durable when `save` returns, whatever becomes of the fold."""
    for size in (9_000, 14_000, 40_000, 120_000, 600_000):
        path = tmp_path / f"runs{size}.duckdb"
        said = lines_of("limited", path, size, 0, 12)
        saved = [words[1] for words in said if words[0] == "saved"]
        assert len(saved) == 12
        assert said[-1] == ["refused", "store_disk_full"] or said[-1][0] == "folded"
        store = Store(path)
        assert set(store.runs()["run_id"].to_pylist()) == set(saved)
        store.fold()
        assert store.spool.entries() == ([], [])
        assert store.runs().num_rows == 12
        assert store.check(deep=True).problems == ()
        stray = [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]
        assert stray == []


def test_no_room_while_growing_keeps_the_database_sound(tmp_path):
    path = tmp_path / "runs.duckdb"
    store = Store(path)
    first = [store.save(edges_of(seed)) for seed in range(1000, 1003)]
    store.fold()
    size = path.stat().st_size
    said = lines_of("limited", path, size, 0, 30)
    saved = [words[1] for words in said if words[0] == "saved"]
    assert len(saved) == 30
    assert set(store.runs()["run_id"].to_pylist()) == {*first, *saved}
    store.fold()
    assert store.check(deep=True).problems == ()
    assert store.runs().num_rows == 33
