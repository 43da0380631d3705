"""Files that are not what they should be: typed errors, and repairs that say what is
lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from store_tables import GROUPED, edges_of, prompts_of, start

from circuitlab.errors import StoreError
from circuitlab.store import Store


def code_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(StoreError) as refused:
        call(*arguments)
    assert refused.value.code == refused.value.fields["code"]
    assert "\n" not in str(refused.value)
    return refused.value.code


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.duckdb")


def part_file(store: Store, run_id: str, name: str) -> Path:
    return Path(store.path + ".spool") / f"run_id={run_id}" / name


def flip(path: Path, place: int, count: int = 32) -> None:
    data = bytearray(path.read_bytes())
    for i in range(place, min(place + count, len(data))):
        data[i] ^= 0xFF
    path.write_bytes(bytes(data))


# --- parts ---


@pytest.mark.parametrize("file", ["edge.parquet", "part.json"])
def test_a_truncated_part_is_named_and_set_aside(store, file):
    kept, lost = store.save(edges_of(1)), store.save(edges_of(2))
    path = part_file(store, lost, file)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError) as refused:
        store.runs()
    assert refused.value.code == "store_part_corrupt"
    assert refused.value.fields["id"] == lost
    folded = store.fold()
    assert (folded.runs, len(folded.damaged)) == (1, 1)
    assert [problem.id for problem in store.check().problems] == [lost]
    report = store.repair()
    assert report.lost == [lost]
    assert all(Path(place).exists() for place in report.set_aside)
    assert store.runs()["run_id"].to_pylist() == [kept]
    assert store.check(deep=True).ok


def test_a_flipped_bit_in_a_part_is_never_folded(store):
    store.save(edges_of(1))
    lost = store.save(edges_of(2))
    path = part_file(store, lost, "edge.parquet")
    flip(path, path.stat().st_size // 2, 1)
    assert code_of(store.load, lost) == "store_part_corrupt"
    assert len(store.fold().damaged) == 1
    assert store.repair().lost == [lost]
    assert store.runs().num_rows == 1
    assert store.save(edges_of(2)) == lost
    assert store.load(lost).rows.equals(edges_of(2).rows)


def test_a_part_whose_rows_were_exchanged_is_found(store):
    """Sizes and checksums agree, but the rows do not give the id."""
    first, second = store.save(edges_of(1)), store.save(edges_of(2))
    for name in ("edge.parquet", "part.json"):
        shutil.copy(part_file(store, second, name), part_file(store, first, name))
    head = part_file(store, first, "part.json")
    head.write_text(head.read_text().replace(second, first))
    assert [problem.id for problem in store.check().problems] == [first]


def test_a_garbled_event_is_set_aside(store):
    run_id = store.save(edges_of(1))
    store.tag(run_id, "good")
    spool = Path(store.path + ".spool")
    event = next(spool.glob("event-*.json"))
    event.write_text("{")
    assert code_of(store.runs) == "store_part_corrupt"
    assert len(store.repair().set_aside) == 1
    assert store.runs()["tags"].to_pylist() == [[]]


# --- the database ---

OF_RUN = "run_no = (select run_no from run where run_id = ?)"


@pytest.fixture
def filled(store: Store) -> tuple[Store, list[str]]:
    """A store with 30 small runs and a few larger ones, folded and closed."""
    prompts = prompts_of()
    ids = [store.save(edges_of(seed), prompts=prompts) for seed in range(12)]
    ids += [store.save(edges_of(seed, GROUPED)) for seed in range(4)]
    store.tag(ids[0], "first")
    store.fold()
    return store, ids


def damage(store: Store, kind: str) -> None:
    path = Path(store.path)
    size = path.stat().st_size
    if kind == "half":
        os.truncate(path, size // 2)
    elif kind == "one byte":
        os.truncate(path, size - 1)
    elif kind == "header":
        flip(path, 0, 4096)
    else:
        for place in range(8192 * 3, size, 65_536):
            flip(path, place, 16)


@pytest.mark.parametrize("kind", ["half", "one byte", "header", "flips"])
def test_a_damaged_database_is_told_and_rebuilt(filled, kind):
    store, ids = filled
    damage(store, kind)
    saved = store.save(edges_of(500))
    found = store.check(deep=True)
    assert not found.ok
    assert {p.code for p in found.problems} <= {"store_corrupt", "store_not_duckdb"}
    report = store.repair()
    assert set(report.saved) | set(report.lost) == set(ids)
    assert not set(report.saved) & set(report.lost)
    assert any("damaged" in place for place in report.set_aside)
    after = set(store.runs()["run_id"].to_pylist())
    assert after == {*report.saved, saved}
    assert store.check(deep=True).ok
    store.save(edges_of(501))
    assert store.fold().runs == 1


def test_what_can_be_read_of_a_damaged_database_is_saved(filled, monkeypatch):
    """One run's rows are unreadable: the others, the tags and prompts are saved."""
    from circuitlab import repair

    store, ids = filled
    real = repair.read_numbered

    def read_numbered(con, number, head):
        if head["id"] == ids[3]:
            raise duckdb.IOException("Corrupt database file: computed checksum")
        return real(con, number, head)

    monkeypatch.setattr(repair, "read_numbered", read_numbered)
    report = store.repair()
    monkeypatch.undo()
    assert report.lost == [ids[3]]
    assert set(report.saved) == {*ids} - {ids[3]}
    assert store.runs(tag="first").num_rows == 1
    assert store.load(ids[-1]).rows.equals(edges_of(3, GROUPED).rows)
    assert len(store.load_prompts(prompts_of().digest)) == 3
    assert store.check(deep=True).ok


def test_a_run_with_rows_missing_is_found_without_reading_all(filled):
    store, ids = filled
    with duckdb.connect(store.path) as con:
        con.execute(f"delete from edge where {OF_RUN} and row = 5", [ids[1]])
    found = store.check()
    assert [problem.id for problem in found.problems] == [ids[1]]
    assert found.runs == 16


def test_a_number_that_was_changed_is_found_by_a_deep_check(filled):
    store, ids = filled
    with duckdb.connect(store.path) as con:
        con.execute(
            f"update edge set score = 0.125 where {OF_RUN} and row = 5", [ids[2]]
        )
    assert store.check().ok
    assert [p.id for p in store.check(deep=True).problems] == [ids[2]]


def test_repairing_a_sound_store_changes_nothing(filled):
    store, _ = filled
    before = Path(store.path).read_bytes()
    report = store.repair()
    assert (report.saved, report.lost, report.set_aside) == ([], [], [])
    assert Path(store.path).read_bytes() == before


# --- files that are no store ---


def foreign(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("hello\n" * 1000)
    elif kind == "empty":
        path.touch()
    elif kind == "sqlite":
        with sqlite3.connect(path) as con:
            con.execute("create table t (a)")
    else:
        with duckdb.connect(str(path)) as con:
            con.execute("create table mine (a int)")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("text", "store_not_duckdb"),
        ("empty", "store_not_duckdb"),
        ("sqlite", "store_not_duckdb"),
        ("duckdb", "store_foreign"),
    ],
)
def test_foreign_files_are_refused_and_left_alone(tmp_path, kind, code):
    path = tmp_path / "other.duckdb"
    foreign(path, kind)
    before = path.read_bytes()
    store = Store(path)
    assert code_of(store.save, edges_of(1)) == code
    assert code_of(store.runs) == code
    assert code_of(store.fold) == code
    assert code_of(store.repair) == code
    assert path.read_bytes() == before
    assert not Path(f"{path}.spool").exists()


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / "runs.duckdb")
    assert code_of(store.save, edges_of(1)) == "store_path_invalid"


# --- rights ---


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are for one user only."""
    folder = Path(tempfile.mkdtemp(prefix="circuitlab-store-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def unprivileged(path: Path, what: str) -> list[str]:
    """What another user gets; needs root to become one, which CI is."""
    process = start("unprivileged", path, what)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.split()


root_only = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can become someone else"
)


@root_only
def test_a_user_without_rights_can_read_but_not_save(open_folder):
    path = open_folder / "runs.duckdb"
    with Store(path) as store:
        store.save(edges_of(1))
    store.save(edges_of(2))
    assert unprivileged(path, "read") == ["read", "2"]
    assert unprivileged(path, "save") == ["refused", "store_not_writable"]
    assert store.runs().num_rows == 2


@root_only
def test_a_folder_without_rights(open_folder):
    assert unprivileged(open_folder / "new.duckdb", "save") == [
        "refused",
        "store_not_writable",
    ]
    hidden = open_folder / "hidden"
    hidden.mkdir(mode=0o700)
    with Store(hidden / "runs.duckdb") as store:
        store.save(edges_of(1))
    for what in ("read", "save"):
        said = unprivileged(hidden / "runs.duckdb", what)
        assert said[0] == "refused"
        assert said[1] in ("store_not_readable", "store_not_writable")


@root_only
def test_a_file_without_rights(open_folder):
    path = open_folder / "runs.duckdb"
    with Store(path) as store:
        store.save(edges_of(1))
    path.chmod(0o600)
    assert unprivileged(path, "read") == ["refused", "store_not_readable"]
