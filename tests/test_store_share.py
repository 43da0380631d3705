"""Export, import and merge; stores on object storage."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest
from store_tables import GROUPED, edges_of, prompts_of

from circuitlab.circuits import top_k
from circuitlab.errors import DataError, StoreError
from circuitlab.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "here" / "runs.duckdb")


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "there" / "runs.duckdb")


def fill(store: Store) -> list[str]:
    """One folded run with prompts, tag and note, and two that are not folded."""
    prompts = prompts_of()
    edges = edges_of(1, dataset_digest=prompts.digest)
    ids = [store.save(edges, prompts=prompts)]
    store.tag(ids[0], "paper")
    store.note(ids[0], "the one in the figure")
    store.fold()
    ids.append(store.save(edges_of(2, GROUPED)))
    ids.append(store.save(top_k(edges, 9)))
    return ids


def same(store: Store, other: Store, ids: list[str]) -> None:
    for run_id in ids:
        one, two = store.load_record(run_id), other.load_record(run_id)
        assert one.run == two.run
        assert one.tables.keys() == two.tables.keys()
        for name, table in one.tables.items():
            assert table.equals(two.tables[name])


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_an_export_is_taken_in_elsewhere(store, other, tmp_path, kind):
    ids = fill(store)
    url = f"memory://export-{uuid.uuid4().hex}"
    folder = tmp_path / "export" if kind == "path" else url
    assert sorted(store.export(None, folder)) == sorted(ids)
    assert sorted(other.import_(folder)) == sorted(ids)
    same(store, other, ids)
    row = other.runs(tag="paper").to_pylist()[0]
    assert (row["run_id"], row["note"]) == (ids[0], "the one in the figure")
    assert len(other.load_prompts(prompts_of().digest)) == 3
    assert other.check(deep=True).ok
    assert sorted(other.import_(folder)) == sorted(ids)
    assert other.runs().num_rows == 3
    assert other.sql("select count(*) as n from v_note").to_pylist() == [{"n": 1}]


def test_an_export_is_plain_parquet_with_a_manifest(store, tmp_path):
    ids = fill(store)
    assert store.export([ids[1][:8]], tmp_path / "export") == [ids[1]]
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    part = manifest["parts"][f"run_id={ids[1]}"]
    assert part["files"]["edge.parquet"]["rows"] == GROUPED.n_edges
    file = tmp_path / "export" / f"run_id={ids[1]}" / "edge.parquet"
    frame = pandas.read_parquet(file, partitioning=None)
    assert frame["score"].equals(edges_of(2, GROUPED).to_pandas()["score"])
    assert len(manifest["parts"]) == 1


def test_an_export_opens_as_a_store(store, tmp_path):
    ids = fill(store)
    store.export(None, tmp_path / "export")
    opened = Store(f"file://{tmp_path}/export")
    same(store, opened, ids)
    assert opened.query("top_edges", run=ids[0], k=3).num_rows == 3


def test_a_changed_export_is_refused(store, other, tmp_path):
    ids = fill(store)
    folder = tmp_path / "export"
    store.export(None, folder)
    file = folder / f"run_id={ids[0]}" / "edge.parquet"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(StoreError) as refused:
        other.import_(folder)
    assert refused.value.code == "store_part_corrupt"
    file.write_bytes(good)
    shutil.rmtree(folder / f"run_id={ids[1]}")
    with pytest.raises(DataError) as incomplete:
        other.import_(folder)
    assert incomplete.value.code == "export_incomplete"
    (folder / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(DataError) as invalid:
        other.import_(folder)
    assert invalid.value.code == "export_invalid"
    with pytest.raises(DataError) as nothing:
        other.import_(tmp_path / "nowhere")
    assert nothing.value.code == "export_invalid"


def test_rows_under_another_id_are_refused(store, other, tmp_path):
    """Sizes and checksums can be forged; the id is derived from the rows."""
    first = store.save(edges_of(1))
    second = store.save(edges_of(2))
    folder = tmp_path / "export"
    store.export([second], folder)
    (folder / f"run_id={second}").rename(folder / f"run_id={first}")
    for file in (folder / f"run_id={first}" / "part.json", folder / "manifest.json"):
        file.write_text(file.read_text().replace(second, first))
    with pytest.raises(StoreError) as refused:
        other.import_(folder)
    assert refused.value.code == "store_part_corrupt"
    assert refused.value.fields["expected"] == first


def test_merging_two_stores(store, other):
    ids = fill(store)
    own = other.save(edges_of(50))
    both = other.save(edges_of(1, dataset_digest=prompts_of().digest))
    assert both == ids[0]
    gone = store.save(edges_of(60))
    store.delete(gone)
    assert sorted(other.merge(store)) == sorted(ids)
    assert set(other.runs()["run_id"].to_pylist()) == {own, *ids}
    assert other.runs(tag="paper")["run_id"].to_pylist() == [ids[0]]
    same(store, other, ids)
    assert sorted(other.merge(store.path)) == sorted(ids)
    assert other.runs().num_rows == 4
    assert other.check(deep=True).ok


# --- object storage ---


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket on a local S3-compatible server."""
    import boto3
    from fsspec.config import conf
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setitem(conf, "s3", {"client_kwargs": {"endpoint_url": url}})
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.create_bucket(Bucket="runs")
        yield "s3://runs"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> str:
    base = (
        "memory://runs" if request.param == "memory" else request.getfixturevalue("s3")
    )
    return f"{base}/{uuid.uuid4().hex}"


def test_a_remote_store_is_a_store(remote, store):
    with Store(remote) as away:
        with pytest.raises(StoreError) as refused:
            away.runs()
        assert refused.value.code == "store_missing"
        ids = fill(away)
        assert ids == fill(store)
    again = Store(remote)
    same(store, again, ids)
    for view in ("v_edge", "v_circuit_edge", "v_prompt", "v_tag"):
        query = f"select * from {view} order by all"
        if view == "v_tag":
            query = "select run_id, tag from v_tag"
        assert again.sql(query).to_pylist() == store.sql(query).to_pylist(), view
    top = [one.query("top_edges", run=ids[0]).to_pylist() for one in (again, store)]
    assert top[0] == top[1]
    again.delete(ids[1])
    assert Store(remote).runs().num_rows == 2
    again.save(edges_of(2, GROUPED))
    assert Store(remote).runs().num_rows == 3
    assert again.fold().runs == 0
    assert again.check(deep=True).ok


def test_runs_move_to_and_from_a_remote_store(remote, store, other):
    ids = fill(store)
    away = Store(remote)
    assert sorted(away.merge(store)) == sorted(ids)
    assert sorted(other.import_(remote)) == sorted(ids)
    same(store, other, ids)
    assert other.runs(tag="paper").num_rows == 1


def test_a_part_without_its_head_is_not_there_yet(remote):
    """On object storage the head is uploaded last: until then there is no run."""
    away = Store(remote)
    kept = away.save(edges_of(1))
    away.spool.folder.put_file("run_id=" + "a" * 32 + "/edge.parquet", b"half")
    assert Store(remote).runs()["run_id"].to_pylist() == [kept]


def test_remote_stores_that_are_not_there(s3):
    with pytest.raises(StoreError) as refused:
        Store("carrier-pigeon://coop")
    assert refused.value.code == "remote_unknown"
    with pytest.raises(StoreError) as refused:
        Store(s3.replace("runs", "no-such-bucket") + "/x").save(edges_of(1))
    assert refused.value.code == "remote_unreachable"
    with pytest.raises(StoreError) as refused:
        Store(s3 + "/y").repair()
    assert refused.value.code == "remote_not_repaired"
