"""The tables that flow through circuitlab: Arrow schemas, runs, and edge tables.

Every stage takes and gives one of these. The store holds exactly these tables, the app
draws exactly these tables. Nothing here knows a tensor, a model or a database.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from circuitlab.errors import ArgumentError, DataError
from circuitlab.sites import ModelShape, parse_edge

if TYPE_CHECKING:
    import pandas

CONTRACT = 1
"""Version of the numerical contract: part of every policy digest."""

STATUSES = (
    "ok",
    "unreachable",
    "not_differentiable",
    "unsupported_grain",
    "unavailable",
)
Status = Literal[
    "ok", "unreachable", "not_differentiable", "unsupported_grain", "unavailable"
]

PROMPT = pa.schema(
    [
        ("prompt", pa.int32()),
        ("clean", pa.string()),
        ("corrupted", pa.string()),
        ("clean_tokens", pa.list_(pa.int32())),
        ("corrupted_tokens", pa.list_(pa.int32())),
        ("answers", pa.list_(pa.list_(pa.int32()))),
        ("wrong_answers", pa.list_(pa.list_(pa.int32()))),
        ("answer_texts", pa.list_(pa.string())),
        ("wrong_answer_texts", pa.list_(pa.string())),
        ("clean_token_texts", pa.list_(pa.string())),
        ("corrupted_token_texts", pa.list_(pa.string())),
    ]
)
"""One prompt pair a row. An answer is a list of token ids; one id for most tasks."""

EDGE = pa.schema(
    [
        ("edge", pa.string()),
        ("sender", pa.string()),
        ("receiver", pa.string()),
        ("port", pa.string()),
        ("sender_layer", pa.int32()),
        ("receiver_layer", pa.int32()),
        ("position", pa.int32()),
        ("sample_id", pa.string()),
        ("score", pa.float64()),
        ("stderr", pa.float64()),
        ("n", pa.int64()),
        ("status", pa.string()),
    ]
)
"""One edge a row (and a position or example, where the grain says so).

`score` is the signed first-order change of the metric, in the metric's units, when
that edge alone is corrupted: mean over `n` examples. `stderr` is its standard error
over examples, null for n = 1. Both are null unless `status` is `ok`.
The layer of `input` is null, and so is the layer of `logits`.
"""

ACT = pa.schema(
    [
        ("target_id", pa.string()),
        ("kind", pa.string()),
        ("address", pa.string()),
        ("site", pa.string()),
        ("pass", pa.int32()),
        ("position", pa.int32()),
        ("element", pa.string()),
        ("sample_id", pa.string()),
        ("site_key", pa.string()),
        ("alias_group", pa.string()),
        ("method", pa.string()),
        ("reduction", pa.string()),
        ("grain", pa.string()),
        ("score", pa.float64()),
        ("stderr", pa.float64()),
        ("n", pa.int64()),
        ("shape", pa.string()),
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("status", pa.string()),
        ("status_reason", pa.string()),
        ("differentiable", pa.bool_()),
        ("retention", pa.string()),
        ("capture_status", pa.string()),
        ("resolution", pa.string()),
        ("frozen_requested", pa.int64()),
        ("frozen_resolved", pa.int64()),
        ("frozen_reached", pa.int64()),
        ("policy_digest", pa.string()),
        ("detached", pa.bool_()),
        ("rescorable", pa.bool_()),
    ]
)
"""One site a row, for one target (and an example, where `sample_id` is set).

`score` is in the target's units (times the site's, for `grad`), reduced as `reduction`
says; `stderr` its standard error over `n` examples where it is their mean. Both are null
unless `status` is `ok`. `address` is the text `site:pass`, with `#sample` per example.
"""

EVAL = pa.schema(
    [
        ("circuit_id", pa.string()),
        ("label", pa.string()),
        ("rank", pa.string()),
        ("ablation", pa.string()),
        ("metric_name", pa.string()),
        ("k", pa.int64()),
        ("n_edges", pa.int64()),
        ("n", pa.int64()),
        ("faithfulness", pa.float64()),
        ("faithfulness_low", pa.float64()),
        ("faithfulness_high", pa.float64()),
        ("completeness", pa.float64()),
        ("metric", pa.float64()),
        ("metric_full", pa.float64()),
        ("metric_ablated", pa.float64()),
        ("kl", pa.float64()),
        ("accuracy", pa.float64()),
        ("prompts_overlap", pa.bool_()),
    ]
)
"""One evaluated circuit a row. Metrics are means over `n` examples, in the metric's
units; `faithfulness` is a ratio of means, its bounds a 95 % bootstrap interval over
examples. `label` says what was evaluated: `circuit`, `complement`, `random`, …"""

PER_EXAMPLE = pa.schema(
    [
        ("circuit_id", pa.string()),
        ("label", pa.string()),
        ("k", pa.int64()),
        ("prompt", pa.int32()),
        ("metric", pa.float64()),
        ("metric_full", pa.float64()),
        ("metric_ablated", pa.float64()),
        ("kl", pa.float64()),
    ]
)
"""One example of one evaluated circuit a row, in the order of the prompts."""


def canonical_json(value: object) -> str:
    """JSON text that is equal exactly where values are equal (sorted keys)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(*values: object) -> str:
    """SHA-256 (hex) over the canonical JSON of the values."""
    return hashlib.sha256(canonical_json(list(values)).encode()).hexdigest()


def digest_table(table: pa.Table) -> str:
    """SHA-256 over a table's columns, equal however the rows are chunked.

    Floats count by their bits, so that −0.0, infinities and NaN are told apart; null is
    no number. Integer widths, float widths and string encodings make no difference.
    """
    found = hashlib.sha256()
    for name in table.column_names:
        kind, parts = _column_bytes(pa.concat_arrays(_chunks(table[name])))
        head = canonical_json([name, kind, table.num_rows, [len(p) for p in parts]])
        found.update(head.encode())
        for part in parts:
            found.update(part)
    return found.hexdigest()


def _chunks(column: pa.ChunkedArray) -> list[pa.Array]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.chunks or [pa.nulls(0, column.type)]


def _column_bytes(column: pa.Array) -> tuple[str, list[bytes]]:
    """A column's kind and its content as bytes; nulls are a mask of their own."""
    mask = column.is_valid().to_numpy(zero_copy_only=False)
    valid = [np.packbits(mask).tobytes()] if column.null_count else []
    kind = column.type
    if pa.types.is_floating(kind):
        values = column.to_numpy(zero_copy_only=False).astype("<f8")
        return "float", [np.where(mask, values, 0.0).tobytes(), *valid]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        values = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return "integer", [values.astype("<i8").tobytes(), *valid]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # In order of first appearance, so equal columns have equal dictionaries.
        coded = column.dictionary_encode()
        places = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        _, ends, words = coded.dictionary.cast(pa.large_string()).buffers()
        size = len(coded.dictionary) + 1
        ends = np.frombuffer(ends, "<i8", size) if ends else np.zeros(1, "<i8")
        text = words.to_pybytes()[: ends[-1]] if words else b""
        return "string", [ends.tobytes(), text, places.astype("<i4").tobytes()]
    return "other", [canonical_json(column.to_pylist()).encode()]


@dataclass(frozen=True)
class ModelInfo:
    """Which weights ran, and how they were loaded."""

    name: str
    architecture: str
    weights_digest: str
    dtype: str
    backend: str
    shape: ModelShape | None
    processing: str = "raw"
    device: str = "cpu"

    def identity(self) -> dict[str, object]:
        """What makes it the same model; where it ran is not part of it."""
        shape = self.shape.to_json() if self.shape else None
        return {
            "architecture": self.architecture,
            "weights": self.weights_digest,
            "dtype": self.dtype,
            "processing": self.processing,
            "backend": self.backend,
            "shape": shape,
        }

    def differences(self, other: ModelInfo) -> list[str]:
        """Which parts of two models' identities differ, by name; none for one model."""
        mine, others = self.identity(), other.identity()
        return sorted(key for key in mine if mine[key] != others[key])


@dataclass(frozen=True)
class Run:
    """One recorded computation, whatever its rows are.

    `policy` is everything that defines what was computed, as plain JSON values: method,
    reduction, metric, ablation, grain. `provenance` is how it went: counts, warnings.
    `kind` is `edge`, `act`, `eval` or `circuit`.
    """

    kind: str
    model: ModelInfo
    dataset: str
    dataset_digest: str
    n: int
    policy: Mapping[str, Any]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    started_at: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None

    @cached_property
    def policy_digest(self) -> str:
        """Portable identity of *what was computed*; never session labels."""
        return digest({"contract": CONTRACT, **self.policy})

    @cached_property
    def params_digest(self) -> str:
        """Groups repeats: policy, model and data, without the numbers that came out."""
        identity = self.model.identity()
        return digest(self.kind, self.policy_digest, identity, self.dataset_digest)

    def id_for(self, *tables: pa.Table) -> str:
        """The content-derived run id: parameters, model, data and rows."""
        rows = [digest_table(table) for table in tables]
        return digest(self.params_digest, *rows)[:32]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Run.from_json` reads them back."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shape = self.model.shape
        model = {**asdict(replace(self.model, shape=None))}
        model["shape"] = shape.to_json() if shape else None
        return {**found, "model": model, "policy": dict(self.policy)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Run:
        values = dict(values)
        model = dict(values.pop("model"))
        shape = model.pop("shape")
        info = ModelInfo(**model, shape=ModelShape(**shape) if shape else None)
        return Run(model=info, **values)


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of circuitlab and of what its numbers depend on.

    `git_commit` is there where circuitlab runs from a checkout.
    """
    found = {"python": platform.python_version()}
    for name in ("circuitlab", "torch", "transformer-lens", "transformers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = git_commit(Path(__file__).parents[2])
    return {**found, "git_commit": commit} if commit else found


def git_commit(checkout: Path) -> str | None:
    """The commit that a git checkout is at; None if it is no checkout."""
    git = checkout / ".git"
    try:
        if git.is_file():
            git = checkout / git.read_text().partition("gitdir:")[2].strip()
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.exists() else git
        head = (git / "HEAD").read_text().strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head
        for place in (git / name, shared / name):
            if place.exists():
                return place.read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line[:40] for line in packed if line.endswith(f" {name}")), None)


@dataclass(frozen=True)
class EdgeRow:
    """One edge's score: see `EDGE` for units and sign."""

    edge: str
    score: float | None
    stderr: float | None
    n: int
    status: str


@dataclass(frozen=True)
class EdgeTable:
    """EDGE rows with the run that made them.

    `rows` has the schema `EDGE`. `shape` gives the universe of edges. With `moments`
    (float64, sums and sums of squares per edge) tables of shards combine exactly.
    """

    rows: pa.Table
    run: Run

    def __post_init__(self):
        if self.rows.schema.names != EDGE.names:
            raise DataError(
                "edge_table_schema_invalid",
                f"an edge table has the columns {EDGE.names}",
                value=self.rows.schema.names,
                expected=EDGE.names,
            )

    def __len__(self) -> int:
        return self.rows.num_rows

    def __iter__(self) -> Iterator[EdgeRow]:
        names = ["edge", "score", "stderr", "n", "status"]
        for row in self.rows.select(names).to_pylist():
            yield EdgeRow(**row)

    @property
    def shape(self) -> ModelShape:
        """The model's shape: the universe that the edges are from."""
        assert self.run.model.shape is not None
        return self.run.model.shape

    @property
    def higher_is_better(self) -> bool:
        return bool(self.run.policy["metric"]["higher_is_better"])

    @cached_property
    def run_id(self) -> str:
        return self.run.id_for(self.rows)

    @cached_property
    def _position(self) -> dict[str, int]:
        names = self.rows["edge"].to_pylist()
        return {name: i for i, name in enumerate(names)}

    def __getitem__(self, edge: str) -> EdgeRow:
        """One edge's row. Raises ArgumentError `edge_unknown`."""
        position = self._position.get(edge)
        if position is None:
            parse_edge(edge)
            raise ArgumentError(
                "edge_unknown", f"this table has no edge {edge!r}", value=edge
            )
        row = self.rows.select(["edge", "score", "stderr", "n", "status"])
        return EdgeRow(**row.slice(position, 1).to_pylist()[0])

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores in row order, float64; NaN where a row has none."""
        return self.rows["score"].to_numpy(zero_copy_only=False).astype(np.float64)

    @cached_property
    def support(self) -> np.ndarray:
        """−score, sign turned for metrics where lower is better: positive helps."""
        return -self.scores if self.higher_is_better else self.scores.copy()

    def to_pandas(self) -> pandas.DataFrame:
        """A frame of the columns that hold anything, one row an edge."""
        rows = self.rows
        optional = ("position", "sample_id")
        empty = [c for c in optional if rows[c].null_count == rows.num_rows]
        return rows.drop_columns(empty).to_pandas()

    def _repr_html_(self) -> str:
        top = np.argsort(-np.nan_to_num(np.abs(self.scores)), kind="stable")[:10]
        head = f"<p>{len(self):,} edges, {self.run.dataset}, {self.run.model.name}</p>"
        return head + self.to_pandas().iloc[top].to_html(index=False)


def edge_rows(
    shape: ModelShape,
    score: np.ndarray,
    stderr: np.ndarray | None,
    n: int,
    status: Sequence[str] | str = "ok",
) -> pa.Table:
    """Build EDGE rows for every edge of a shape, in canonical order.

    `score` and `stderr` are float64, one per edge. Where a status is not `ok` the
    numbers are dropped.
    """
    count = shape.n_edges
    statuses = np.full(count, status) if isinstance(status, str) else np.asarray(status)
    missing = statuses != "ok"
    errors = np.full(count, np.nan) if stderr is None else stderr
    no_error = missing | np.isnan(errors)
    columns = {
        **_name_columns(shape),
        "position": pa.nulls(count, pa.int32()),
        "sample_id": pa.nulls(count, pa.string()),
        "score": pa.array(score, pa.float64(), mask=missing),
        "stderr": pa.array(errors, pa.float64(), mask=no_error),
        "n": pa.array(np.full(count, n), pa.int64()),
        "status": pa.array(statuses.tolist(), pa.string()),
    }
    return pa.table([columns[name] for name in EDGE.names], schema=EDGE)


@lru_cache(maxsize=8)
def _name_columns(shape: ModelShape) -> dict[str, pa.Array]:
    senders, receivers = shape.edge_indices
    sender = pa.array([c.name for c in shape.senders])
    reader = pa.array([r.component.name for r in shape.receivers])
    port = pa.array([r.port for r in shape.receivers])
    sender_layer = pa.array([c.layer for c in shape.senders], pa.int32())
    reader_layer = pa.array([r.component.layer for r in shape.receivers], pa.int32())
    receiver = pa.array([r.name for r in shape.receivers])
    of_sender, of_receiver = pa.array(senders), pa.array(receivers)
    join: Any = pc.binary_join_element_wise  # pyright: ignore[reportAttributeAccessIssue]
    name = join(sender.take(of_sender), receiver.take(of_receiver), "->")
    return {
        "edge": name,
        "sender": sender.take(of_sender),
        "receiver": reader.take(of_receiver),
        "port": port.take(of_receiver),
        "sender_layer": sender_layer.take(of_sender),
        "receiver_layer": reader_layer.take(of_receiver),
    }
