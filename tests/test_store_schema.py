"""Migrations: numbered, recorded, in transactions, and tested from every version."""

from __future__ import annotations

import gzip
import shutil
import tomllib
from pathlib import Path

import duckdb
import pytest
from store_tables import edges_of, start

from circuitlab import migrations as schema
from circuitlab.errors import InternalError, StoreError
from circuitlab.migrations import migrations, store_files, views
from circuitlab.store import Store

STORES = Path(__file__).parent / "data" / "stores"
VERSIONS = sorted(path.name for path in STORES.iterdir() if path.is_dir())

SECOND = """
alter table run add column colour varchar;
update run set colour = 'blue';
create or replace view v_run as
select r.* exclude (run_no, header), [] as tags, null as note
from run r anti join hidden h on h.run_id = r.run_id;
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The migrations of today, in a folder where more can be added."""
    return Path(shutil.copytree(store_files("schema"), tmp_path / "schema"))


def latest(folder: Path, sql: str) -> int:
    number = len(migrations()) + 1
    (folder / f"{number:03}_more.sql").write_text(sql)
    return number


def recorded(path: str) -> list[tuple]:
    with duckdb.connect(path, read_only=True) as con:
        query = "select version, name, circuitlab from schema_version order by version"
        return con.execute(query).fetchall()


def test_every_migration_has_a_store_of_its_version():
    assert [f"{step.version:03}" for step in migrations()] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_stores_of_every_version_are_read_and_brought_up_to_date(tmp_path, version):
    """`tests/data/stores/NNN` was written by a save and a fold when NNN was the newest schema."""
    packed = (STORES / version / "runs.duckdb.gz").read_bytes()
    (tmp_path / "runs.duckdb").write_bytes(gzip.decompress(packed))
    store = Store(tmp_path / "runs.duckdb")
    runs = store.runs()
    assert sorted(runs["kind"].to_pylist()) == [
        "act",
        "circuit",
        "edge",
        "edge",
        "eval",
    ]
    assert runs.filter(runs["seed"].to_numpy(zero_copy_only=False) == 1).num_rows > 0
    for run_id in runs["run_id"].to_pylist():
        assert store.load_record(run_id).run_id == run_id
    assert store.runs(tag="kept").num_rows == 1
    store.save(edges_of(77))
    store.fold()
    assert store.check(deep=True).problems == ()
    assert [row[0] for row in recorded(store.path)] == [
        step.version for step in migrations()
    ]


def test_a_new_store_records_its_migrations(tmp_path):
    with Store(tmp_path) as store:
        store.save(edges_of(1))
    rows = recorded(store.path)
    assert [(row[0], row[1]) for row in rows] == [
        (step.version, step.name) for step in migrations()
    ]
    assert all(row[2] for row in rows)


@pytest.mark.parametrize("first", ["read", "fold"])
def test_an_older_store_is_migrated_when_it_is_used(tmp_path, folder, first):
    with Store(tmp_path / "runs.duckdb") as old:
        old.save(edges_of(1))
    number = latest(folder, SECOND)
    store = Store(old.path, steps=migrations(folder))
    if first == "fold":
        store.fold()
    assert store.sql("select colour from v_run").to_pylist() == [{"colour": "blue"}]
    assert [row[0] for row in recorded(store.path)][-1] == number
    assert store.load_record(store.save(edges_of(1))).run_id == edges_of(1).run_id


def test_a_migration_that_fails_is_undone(tmp_path, folder):
    with Store(tmp_path / "runs.duckdb") as old:
        old.save(edges_of(1))
    latest(folder, SECOND + "select * from nowhere;")
    store = Store(old.path, steps=migrations(folder))
    with pytest.raises(StoreError) as refused:
        store.fold()
    assert refused.value.code == "migration_failed"
    assert [row[0] for row in recorded(store.path)] == [s.version for s in migrations()]
    assert "colour" not in Store(old.path).runs().column_names
    assert Store(old.path).check(deep=True).ok


def test_a_newer_store_is_refused_and_left_as_it_is(tmp_path, folder):
    number = latest(folder, SECOND)
    with Store(tmp_path / "runs.duckdb", steps=migrations(folder)) as newer:
        newer.save(edges_of(1))
    before = Path(newer.path).read_bytes()
    store = Store(newer.path)
    calls = [store.runs, store.fold, store.repair, lambda: store.save(edges_of(2))]
    for call in calls:
        with pytest.raises(StoreError) as refused:
            call()
        assert refused.value.code == "store_newer"
        assert refused.value.fields["value"] == number
    assert Path(newer.path).read_bytes() == before
    assert store.spool.entries() == ([], [])
    assert newer.runs().num_rows == 1


def test_many_processes_migrate_one_store(tmp_path, folder):
    with Store(tmp_path / "runs.duckdb") as old:
        old.save(edges_of(1))
    number = latest(folder, SECOND)
    children = [start("migrate", old.path, folder) for _ in range(4)]
    for child in children:
        out, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
        assert out.strip() == str(number)
    assert [row[0] for row in recorded(old.path)] == list(range(1, number + 1))


def test_an_older_store_that_is_held_says_so(tmp_path, folder):
    with Store(tmp_path / "runs.duckdb") as old:
        old.save(edges_of(1))
    latest(folder, SECOND)
    with duckdb.connect(old.path, read_only=True):
        store = Store(old.path, steps=migrations(folder))
        with pytest.raises(StoreError) as refused:
            store.runs()
    assert refused.value.code == "store_older"


def test_numbers_without_a_gap(folder):
    (folder / "009_far.sql").write_text("select 1;")
    with pytest.raises(InternalError) as refused:
        migrations(folder)
    assert refused.value.code == "migrations_invalid"


def test_the_last_definition_of_a_view_counts(folder):
    latest(folder, "create or replace view v_tag as select 1 as one;")
    assert views(migrations(folder))["v_tag"].strip() == "select 1 as one"


def test_the_wheel_holds_what_the_checkout_holds(tmp_path, monkeypatch):
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    package = tmp_path / "circuitlab"
    for source, target in included.items():
        if source.startswith("store/"):
            shutil.copytree(root / source, tmp_path / target)
    assert store_files("schema") == root / "store" / "schema"
    monkeypatch.setattr(schema, "__file__", str(package / "migrations.py"))
    for kind in ("schema", "queries"):
        assert store_files(kind) == package / "_store" / kind
    assert len(migrations()) == len(VERSIONS)
    shutil.rmtree(package)
    with pytest.raises(InternalError) as refused:
        store_files("schema")
    assert refused.value.code == "store_files_missing"
