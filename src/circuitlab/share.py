"""Sharing runs: export to a folder, import from one, merge two stores.

An export is the spool's own layout, one folder a run with a Parquet file a table, and a
`manifest.json` that lists all of it. It lies on a disk or on object storage, anyone
reads its Parquet files, and `Store("file:///that/folder")` opens it as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from circuitlab.database import own_version
from circuitlab.errors import DataError, StoreError
from circuitlab.folders import LocalFolder, RemoteFolder
from circuitlab.spool import (
    Event,
    Folder,
    Part,
    Spool,
    part_of_dataset,
    part_of_record,
    timestamp,
)
from circuitlab.stored_rows import read_dataset, read_record

if TYPE_CHECKING:
    import duckdb

    from circuitlab.store import Store

MANIFEST = "manifest.json"
FORMAT = "circuitlab_export_v1"


def folder_at(where: str | Path) -> Folder:
    """A folder to export to or import from: a path, or a URL that fsspec knows."""
    if "://" in str(where):
        return RemoteFolder.of(str(where))
    return LocalFolder(Path(where).expanduser().absolute())


def copy_runs(source: Store, run_ids: Iterable[str], target: Spool) -> list[Part]:
    """Copy runs with their prompts, tags and notes into a spool; the parts there."""
    names: list[str] = []
    sets: set[str] = set()
    for run_id in run_ids:
        with source.connect() as con:
            name, files, dataset = _run_part(source, con, run_id)
            events = said(con, run_id)
            new = bool(dataset) and dataset not in sets
            prompts = _prompts_part(source, con, dataset) if new else None
        sets.add(dataset)
        if prompts is not None:
            target.save(*prompts)
            names.append(prompts[0])
        target.save(name, files)
        names.append(name)
        for event in events:
            target.say(event)
    return target.parts(names)


def _run_part(
    source: Store, con: duckdb.DuckDBPyConnection, run_id: str
) -> tuple[str, dict[str, bytes], str]:
    """Name and files of a run's part, and the digest of its prompts."""
    record = read_record(con, run_id)
    if record is None:
        part = source.spool.parts([f"run_id={run_id}"])[0]
        return part.name, part.all_files(), part.run.dataset_digest
    saved = con.execute("select saved_at from run where run_id = ?", [run_id])
    at = saved.fetchall()[0][0].isoformat(timespec="microseconds")
    return *part_of_record(record, at), record.run.dataset_digest


def _prompts_part(
    source: Store, con: duckdb.DuckDBPyConnection, digest: str
) -> tuple[str, dict[str, bytes]] | None:
    dataset = read_dataset(con, digest)
    if dataset is not None:
        return part_of_dataset(dataset)
    parts = source.spool.parts([f"dataset_digest={digest}"])
    return (parts[0].name, parts[0].all_files()) if parts else None


def said(con: duckdb.DuckDBPyConnection, run_id: str | None = None) -> list[Event]:
    """What was said: all of it, or the tags and notes of one run."""
    where = "where run_id = ? and kind in ('tag', 'untag', 'note')" if run_id else ""
    rows = con.execute(
        f"select run_id, kind, value, said_at, event_id from event {where} "
        "order by said_at",
        [run_id] if run_id else [],
    ).fetchall()
    return [
        Event(run, kind, value, at.isoformat(timespec="microseconds"), event_id)
        for run, kind, value, at, event_id in rows
    ]


def export_runs(source: Store, run_ids: Iterable[str], where: str | Path) -> list[str]:
    """Write runs to a folder, the manifest last; their ids."""
    folder = folder_at(where)
    parts = copy_runs(source, run_ids, Spool(folder))
    manifest = {
        "format": FORMAT,
        "circuitlab": own_version(),
        "exported_at": timestamp(),
        "parts": {
            part.name: {
                "kind": part.kind,
                "id": part.id,
                "files": {
                    f"{table}.parquet": {k: facts[k] for k in ("rows", "sha256")}
                    for table, facts in part.files.items()
                },
            }
            for part in parts
        },
    }
    content = json.dumps(manifest, indent=1, sort_keys=True).encode()
    folder.put_file(MANIFEST, content)
    return [part.id for part in parts if part.kind == "run"]


def import_parts(target: Spool, where: str | Path) -> Iterator[tuple[Part, bool]]:
    """Copy an export into a spool; each part of it, and whether it was new there.

    Each run is verified against its content-derived id first. Raises DataError
    `export_invalid`, `export_incomplete`, StoreError `store_part_corrupt`.
    """
    source = Spool(folder_at(where))
    names, events = source.entries()
    _check_manifest(source, set(names), str(where))
    for part in source.parts(names):
        verify(part)
        yield part, target.save(part.name, part.all_files())
    for event in source.events(events):
        target.say(event)


def _check_manifest(source: Spool, names: set[str], where: str) -> None:
    data = source.folder.read([MANIFEST]).get(MANIFEST)
    if data is None and not names:
        raise DataError(
            "export_invalid",
            f"{where} holds no runs of circuitlab; `circuitlab export` makes such a "
            "folder",
            value=where,
            expected=MANIFEST,
        )
    try:
        manifest = json.loads(data or b'{"parts": {}}')
        listed = set(manifest["parts"])
        known = data is None or manifest["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        listed, known = set(), False
    if not known:
        raise DataError(
            "export_invalid",
            f"{where}/{MANIFEST} is no manifest that this circuitlab reads",
            value=where,
            expected=FORMAT,
        )
    if missing := sorted(listed - names):
        raise DataError(
            "export_incomplete",
            f"{where}: {len(missing)} of {len(listed)} parts are missing, {missing[0]} "
            "first; copy the whole folder",
            value=missing,
        )


def verify(part: Part) -> None:
    """Check a part's files, and that its id is the one its content gives.

    Raises StoreError `store_part_corrupt`.
    """
    if part.kind == "dataset":
        part.dataset()
        return
    found = part.record().run_id
    if found != part.id:
        raise StoreError(
            "store_part_corrupt",
            f"run {part.id[:12]}: its rows give the id {found[:12]}, so they are not "
            "the rows that were saved",
            id=part.id,
            value=found,
            expected=part.id,
        )
