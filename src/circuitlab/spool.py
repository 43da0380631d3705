"""The spool: runs and events as immutable files that appear whole or not at all.

A part is a folder named after its content, with one Parquet file a table and a
`part.json` that lists them with sizes and checksums. Locally it appears by a rename; on
object storage its `part.json` comes last. Writing needs no lock, so any number of
processes write at once. The same layout serves exports and remote stores.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from circuitlab.errors import StoreError
from circuitlab.folders import HEAD
from circuitlab.kept import KEPT, OPEN, dump_json, kept_table, original_table
from circuitlab.records import Dataset, Record
from circuitlab.tables import Run

FORMAT = 1
PREFIX = {"run": "run_id", "dataset": "dataset_digest"}


class Folder(Protocol):
    """Where parts lie: a local folder, or a prefix on object storage.

    `slow` says that reading goes over a network, and that entries never change.
    """

    slow: ClassVar[bool]

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Names of the entries directly inside; empty where there is no folder."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents by name, `part/file`; names that are gone are left out."""
        ...

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Sizes in bytes by name; names that are gone are left out."""
        ...

    def put(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Make a part of files, whole or not at all; False if it was there."""
        ...

    def put_file(self, name: str, content: bytes) -> None: ...

    def drop(self, name: str) -> None:
        """Remove an entry, at once as far as anyone sees."""
        ...

    def path(self, name: str) -> str:
        """How a database spells the file."""
        ...


@dataclass(frozen=True)
class Event:
    """One thing said about a run: `tag`, `untag`, `note`, `delete` or `restore`."""

    run_id: str
    kind: str
    value: str | None = None
    at: str = ""
    event_id: str = ""

    @staticmethod
    def now(run_id: str, kind: str, value: str | None = None) -> Event:
        return Event(run_id, kind, value, timestamp(), uuid.uuid4().hex)

    def row(self) -> dict[str, Any]:
        at = datetime.datetime.fromisoformat(self.at)
        return {
            "event_id": self.event_id,
            "said_at": at,
            "run_id": self.run_id,
            "kind": self.kind,
            "value": self.value,
        }

    @property
    def file_name(self) -> str:
        return (
            f"event-{self.at.replace(':', '').replace('.', '-')}-{self.event_id}.json"
        )


EVENT = pa.schema(
    [
        ("event_id", pa.string()),
        ("said_at", pa.timestamp("us")),
        ("run_id", pa.string()),
        ("kind", pa.string()),
        ("value", pa.string()),
    ]
)


@dataclass(frozen=True)
class Part:
    """One part as its `part.json` describes it. `kind` is `run` or `dataset`."""

    name: str
    folder: Folder = field(repr=False)
    head: Mapping[str, Any] = field(repr=False)

    @property
    def kind(self) -> str:
        return self.head["kind"]

    @property
    def id(self) -> str:
        return self.head["id"]

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """By table name: rows, bytes, sha256, and the schema the table had."""
        return self.head["files"]

    @cached_property
    def run(self) -> Run:
        return Run.from_json(self.head["run"])

    def file(self, table: str) -> str:
        return f"{self.name}/{table}.parquet"

    def path(self, table: str) -> str:
        return self.folder.path(self.file(table))

    def check_sizes(self) -> None:
        """Raise StoreError `store_part_corrupt` where a file has another size."""
        found = self.folder.sizes(self.file(table) for table in self.files)
        for table, facts in self.files.items():
            size = found.get(self.file(table))
            if size != facts["bytes"]:
                raise self._corrupt(table, size, facts["bytes"])

    def content(self) -> dict[str, bytes]:
        """The files, verified. Raises StoreError `store_part_corrupt`."""
        found = self.folder.read(self.file(table) for table in self.files)
        for table, facts in self.files.items():
            data = found.get(self.file(table))
            if data is None or len(data) != facts["bytes"]:
                size = None if data is None else len(data)
                raise self._corrupt(table, size, facts["bytes"])
            digest = hashlib.sha256(data).hexdigest()
            if digest != facts["sha256"]:
                raise self._corrupt(table, digest, facts["sha256"])
        return {table: found[self.file(table)] for table in self.files}

    def kept(self) -> dict[str, pa.Table]:
        """The tables in a store's columns, verified."""
        found = {}
        for table, data in self.content().items():
            found[table] = pq.ParquetFile(pa.BufferReader(data)).read()
        return found

    def record(self) -> Record:
        """The run and its rows as they were saved, verified."""
        tables = {}
        for name, table in self.kept().items():
            tables[name] = original_table(table, schema_of(self.files[name], name))
        return record_from(self.head, tables)

    def all_files(self) -> dict[str, bytes]:
        """Every file with its content, verified, to be put elsewhere as it is."""
        head = self.folder.read([f"{self.name}/{HEAD}"])
        found = {f"{table}.parquet": data for table, data in self.content().items()}
        return {**found, HEAD: head[f"{self.name}/{HEAD}"]}

    def dataset(self) -> Dataset:
        facts = self.head["dataset"]
        table = self.kept()["prompt"].cast(KEPT["prompt"])
        return Dataset(table, self.id, facts["name"], facts["facts"])

    def _corrupt(self, table: str, value: object, expected: object) -> StoreError:
        what = f"{self.kind} {self.id[:12]}"
        return StoreError(
            "store_part_corrupt",
            f"{what}: {table}.parquet is not what was saved; `circuitlab store repair` "
            "sets it aside and says what is lost",
            path=self.path(table),
            id=self.id,
            table=table,
            value=value,
            expected=expected,
        )


def record_from(head: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> Record:
    """The record that a head describes, with these tables."""
    run = Run.from_json(head["run"])
    return Record(run, tables, head.get("type") or "", head.get("extra") or {})


def schema_of(facts: Mapping[str, Any], name: str) -> pa.Schema:
    """The schema a table had when it was saved."""
    if not facts.get("schema"):
        return KEPT[name]
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(facts["schema"])))


def timestamp() -> str:
    """The time, UTC, to the microsecond, without a zone: text that sorts."""
    at = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return at.isoformat(timespec="microseconds")


def part_of_record(
    record: Record, saved_at: str | None = None
) -> tuple[str, dict[str, bytes]]:
    """The name and the files of a run's part; `saved_at` is now unless given."""
    if not record.tables:
        raise StoreError("record_empty", "a run needs at least one table", value=0)
    files, facts = {}, {}
    for name, table in record.tables.items():
        files[f"{name}.parquet"], facts[name] = _file(name, table)
    head = {
        "format": FORMAT,
        "kind": "run",
        "id": record.run_id,
        "type": record.type,
        "saved_at": saved_at or timestamp(),
        "policy_digest": record.run.policy_digest,
        "params_digest": record.run.params_digest,
        "run": record.run.to_json(),
        "extra": dict(record.extra),
        "files": facts,
    }
    files[HEAD] = dump_json(head).encode()
    return f"run_id={record.run_id}", files


def part_of_dataset(dataset: Dataset) -> tuple[str, dict[str, bytes]]:
    """The name and the files of a prompt set's part."""
    data, facts = _file("prompt", dataset.table)
    head = {
        "format": FORMAT,
        "kind": "dataset",
        "id": dataset.digest,
        "saved_at": timestamp(),
        "dataset": {"name": dataset.name, "facts": dict(dataset.facts)},
        "files": {"prompt": facts},
    }
    files = {"prompt.parquet": data, HEAD: dump_json(head).encode()}
    return f"dataset_digest={dataset.digest}", files


def _file(name: str, table: pa.Table) -> tuple[bytes, dict[str, Any]]:
    data = to_parquet(kept_table(name, table), name)
    # Only a table in other columns than the store's needs its schema told.
    schema = table.schema.remove_metadata()
    told = name in OPEN and schema != KEPT[name]
    return data, {
        "rows": table.num_rows,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "schema": base64.b64encode(schema.serialize()).decode() if told else None,
    }


def to_parquet(table: pa.Table, name: str) -> bytes:
    """Parquet text of a table, written for speed: see scripts/bench_store.py."""
    kinds = {f.name: f.type for f in table.schema}
    floats = [c for c, kind in kinds.items() if pa.types.is_floating(kind)]
    # Edge names differ in every row, and neighbours share their beginning.
    encoding = dict.fromkeys(floats, "BYTE_STREAM_SPLIT")
    if "edge" in kinds:
        encoding["edge"] = "DELTA_BYTE_ARRAY"
    nested = any(pa.types.is_nested(kind) for kind in kinds.values())
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {} if nested else {"column_encoding": encoding}
    if not nested:
        options["use_dictionary"] = [c for c in kinds if c not in encoding]
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=1,
        store_schema=False,
        **options,
    )
    return sink.getvalue().to_pybytes()


@dataclass
class Spool:
    """The parts and events of one folder.

    Where reading is slow, heads and events are kept once read: there they never change.
    """

    folder: Folder
    heads: dict[str, Part] = field(default_factory=dict, repr=False)
    said: dict[str, Event] = field(default_factory=dict, repr=False)

    def save(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Make a part; durable when it returns. False if it was there already."""
        return self.folder.put(name, files)

    def say(self, event: Event) -> None:
        content = dump_json(event.__dict__).encode()
        self.folder.put_file(event.file_name, content)

    def entries(self) -> tuple[list[str], list[str]]:
        """Names of the parts and of the events, oldest event first."""
        names = self.folder.names()
        parts = [n for n in names if n.partition("=")[0] in PREFIX.values()]
        events = [n for n in names if n.startswith("event-") and n.endswith(".json")]
        return sorted(parts), sorted(events)

    def parts(self, names: Iterable[str] | None = None) -> list[Part]:
        """The parts, but for those that are gone by now.

        Raises StoreError `store_part_corrupt` or `store_newer`.
        """
        names = self.entries()[0] if names is None else list(names)
        found = {name: self.heads[name] for name in names if name in self.heads}
        unknown = {f"{name}/{HEAD}": name for name in names if name not in found}
        for path, data in self.folder.read(unknown).items():
            found[unknown[path]] = self._part(unknown[path], data)
        if self.folder.slow:
            self.heads |= found
        return [found[name] for name in names if name in found]

    def events(self, names: Iterable[str] | None = None) -> list[Event]:
        """The events, oldest first, but for those that are gone by now."""
        names = self.entries()[1] if names is None else list(names)
        found = {name: self.said[name] for name in names if name in self.said}
        unknown = [name for name in names if name not in found]
        for name, data in self.folder.read(unknown).items():
            found[name] = self._event(name, data)
        if self.folder.slow:
            self.said |= found
        return [found[name] for name in names if name in found]

    def _part(self, name: str, data: bytes) -> Part:
        try:
            head = json.loads(data)
            newer = head["format"] > FORMAT
            part = Part(name, self.folder, head)
            whole = name == f"{PREFIX[part.kind]}={part.id}" and part.files is not None
        except (ValueError, KeyError, TypeError, AttributeError):
            newer = whole = False
        if newer:
            raise StoreError(
                "store_newer",
                f"{self.folder.url} holds runs of a newer circuitlab; update it "
                "(pip install -U circuitlab)",
                path=self.folder.path(name),
            )
        if not whole:
            raise _corrupt_entry(self.folder.path(name), name)
        return part  # type: ignore[possibly-undefined]

    def _event(self, name: str, data: bytes) -> Event:
        try:
            return Event(**json.loads(data))
        except (ValueError, TypeError):
            raise _corrupt_entry(self.folder.path(name), name) from None


def _corrupt_entry(path: str, name: str) -> StoreError:
    return StoreError(
        "store_part_corrupt",
        f"{path} is not what was saved; `circuitlab store repair` sets it aside and "
        "says what is lost",
        path=path,
        id=name.partition("=")[2] or name,
    )


def wait_until(deadline: float, pause: float = 0.01) -> bool:
    """Sleep a moment; False once the deadline (of `time.monotonic`) is over."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    time.sleep(min(pause, left))
    return True
