"""Read tables: rows keyed by target, kind and address, with the run that made them.

A `ReadTable` holds ACT rows (a site's score for a target) or EDGE rows (an edge's), and
is what `read` gives, what JSON `read_table_v1` holds and what `top_k(by=…)` ranks. It
knows tensors only as what element-grain rows carry, and imports no torch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from circuitlab import read_json
from circuitlab.errors import ArgumentError, DataError
from circuitlab.ranking import Request
from circuitlab.read_edges import edges_from_rows, rows_from_edges
from circuitlab.site_selection import SiteSelection, refuse, select_sites
from circuitlab.tables import ACT, EdgeTable, Run

if TYPE_CHECKING:
    import pandas

Address = tuple[Any, ...]
Key = tuple[str | None, str, Address]


@dataclass(frozen=True)
class ReadRow:
    """One row: see `tables.ACT`. `value` is the dense tensor of an element-grain row,
    `address` (site, pass), with the sample id per example, or (edge name,)."""

    target_id: str | None
    kind: str
    address: Address
    site_key: str
    alias_group: str | None
    method: str
    reduction: str | None
    grain: str
    score: float | None
    value: Any
    shape: tuple[int, ...] | None
    dtype: str | None
    device: str | None
    status: str
    status_reason: str | None
    differentiable: bool | None
    retention: str | None
    capture_status: str | None
    resolution: str
    frozen_requested: int | None
    frozen_resolved: int | None
    frozen_reached: int | None
    policy_digest: str | None
    detached: bool | None
    sample_id: str | None
    rescorable: bool
    stderr: float | None = None
    n: int | None = None


@dataclass(frozen=True, eq=False)
class Binding:
    """What ties a fresh table to its trace: weakly, with the events counted so far."""

    trace: weakref.ref[Any]
    events: int

    @property
    def stale(self) -> str | None:
        """Why the trace is not what it was; None while it is, or once it is gone."""
        trace = self.trace()
        if trace is None:
            return None
        if not trace.live:
            return "was cleaned"
        return "ran backward" if trace.backward_events != self.events else None


@dataclass(frozen=True, eq=False)
class ReadTable(Mapping[Key, ReadRow]):
    """Rows keyed `(target_id, kind, address)`; immutable.

    `rows` has the schema `ACT`; `values` the dense tensors of element-grain rows by row
    number, and `masks` which of their elements count. Look a row up by its key, or by
    `table["blocks.0.hook_in"]`, `table["blocks.0.hook_in:1"]`, `table["m0->a1.h0<q>"]`
    where that is unique.
    """

    rows: pa.Table
    run: Run
    values_by_row: Mapping[int, Any] = field(default_factory=dict)
    masks_by_row: Mapping[int, Any] = field(default_factory=dict)
    binding: Binding | None = None

    schema_version = read_json.SCHEMA_VERSION
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        if self.rows.schema.names != ACT.names:
            raise DataError(
                "read_table_schema_invalid",
                f"a read table has the columns {', '.join(ACT.names)}",
                value=self.rows.schema.names,
                expected=ACT.names,
            )
        if len(self._position) < self.rows.num_rows:
            twice = Counter(self._keys).most_common(1)[0][0]
            raise DataError(
                "read_table_duplicate",
                f"two rows have the key {twice}; a key is unique",
                value=twice,
            )

    # --- the mapping ---

    @cached_property
    def _keys(self) -> list[Key]:
        names = ("target_id", "kind", "site", "pass", "sample_id", "address")
        columns = [self.rows[name].to_pylist() for name in names]
        return [
            (target, kind, _address(kind, site, number, sample, text))
            for target, kind, site, number, sample, text in zip(*columns, strict=True)
        ]

    @cached_property
    def _position(self) -> dict[Key, int]:
        return {key: i for i, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return self.rows.num_rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __getitem__(self, key: Key | str) -> ReadRow:
        """One row. Raises ArgumentError `read_table_key_unknown` (a KeyError too) or
        `read_table_key_ambiguous`."""
        if isinstance(key, tuple):
            row = self._position.get(key)
            if row is None:
                raise _Unknown("read_table_key_unknown", f"no row {key!r}", value=key)
            return self._row(row)
        return self._row(self._named(key))

    def _named(self, name: str) -> int:
        text = self.rows["address"].to_pylist()
        sites = self.rows["site"].to_pylist()
        found = [i for i, address in enumerate(text) if address == name]
        site = self._spellings.get(name, name)
        found = found or [i for i, known in enumerate(sites) if known == site]
        if len(found) == 1:
            return found[0]
        if not found:
            raise _Unknown(
                "read_table_key_unknown", f"no row is at {name!r}", value=name
            )
        raise ArgumentError(
            "read_table_key_ambiguous",
            f"{len(found)} rows are at {name!r}; use a full key such as "
            f"{self._keys[found[0]]}",
            value=name,
            expected=[self._keys[i] for i in found[:20]],
        )

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """Other names of sites, and module paths, which stand for their outputs."""
        known = dict.fromkeys(self.rows["site"].to_pylist())
        out = ".hook_out"
        found = {s.removesuffix(out): s for s in known if s and s.endswith(out)}
        spelled = self.provenance.get("spellings") or {}
        return found | {o: site for site, others in spelled.items() for o in others}

    def _row(self, row: int) -> ReadRow:
        found = self.rows.slice(row, 1).to_pylist()[0]
        names = ReadRow.__dataclass_fields__
        fields = {name: found[name] for name in names if name in found}
        fields["address"] = self._keys[row][2]
        fields["value"] = self.values_by_row.get(row)
        fields["shape"] = parse_shape(found["shape"])
        fields["rescorable"] = self.rescorable
        return ReadRow(**fields)

    # --- what it knows ---

    @property
    def kind(self) -> str:
        """`ACT` or `EDGE`; a table holds one kind."""
        return self.rows["kind"][0].as_py() if len(self) else "ACT"

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores in row order, float64; NaN where a row has none."""
        return self.rows["score"].to_numpy(zero_copy_only=False).astype(np.float64)

    @cached_property
    def target_ids(self) -> tuple[str | None, ...]:
        """Every target once, in order."""
        return tuple(dict.fromkeys(self.rows["target_id"].to_pylist()))

    @property
    def status_counts(self) -> dict[str, int]:
        return dict(Counter(self.rows["status"].to_pylist()))

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How the read went: population, freezing, batching, calls, time, bytes."""
        now = {"schema_version": self.schema_version, "rescorable": self.rescorable}
        return {**self.run.provenance, **now}

    @cached_property
    def run_id(self) -> str:
        """Raises DataError `read_table_not_portable` for a tensor-bearing table."""
        self._require_portable()
        return self.run.id_for(self.rows)

    @property
    def rescorable(self) -> bool:
        """Whether its trace is there and as it was, so that it can be read again."""
        return (
            self.binding is not None
            and self.binding.trace() is not None
            and self.binding.stale is None
        )

    @property
    def stale(self) -> str | None:
        """What happened to the trace since the read; None for fresh and loaded tables."""
        return None if self.binding is None else self.binding.stale

    @property
    def tensor_bearing(self) -> bool:
        return bool(self.values_by_row)

    def shape_of(self, row: int) -> tuple[int, ...]:
        return parse_shape(self.rows["shape"][row].as_py()) or ()

    def elements(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """An element-grain row's values (float64) and their flat indices, mask applied."""
        if row not in self.values_by_row:
            return np.zeros(0), np.zeros(0, np.int64)
        values = _numpy(self.values_by_row[row]).astype(np.float64).reshape(-1)
        index = np.arange(len(values))
        if row in self.masks_by_row:
            index = np.flatnonzero(_numpy(self.masks_by_row[row]).reshape(-1))
        return values[index], index

    # --- operations ---

    def target(self, target_id: str) -> ReadTable:
        """The rows of one target. Raises ArgumentError `read_table_target_unknown`."""
        if target_id not in self.target_ids:
            raise ArgumentError(
                "read_table_target_unknown",
                f"there is no target {target_id!r}; there are "
                f"{', '.join(map(str, self.target_ids[:20]))}",
                value=target_id,
                expected=list(self.target_ids),
            )
        targets = self.rows["target_id"].to_pylist()
        keep = [i for i, found in enumerate(targets) if found == target_id]
        return self._take(keep, target=target_id)

    def column(self, name: str) -> list[Any]:
        """A column's values in row order. Raises `read_table_column_unknown`."""
        names = [*self.rows.column_names, "value"]
        if name not in names:
            raise ArgumentError(
                "read_table_column_unknown",
                f"there is no column {name!r}; there are {', '.join(names)}",
                value=name,
                expected=names,
            )
        if name == "value":
            return [self.values_by_row.get(i) for i in range(len(self))]
        if name == "rescorable":
            return [self.rescorable] * len(self)
        if name == "shape":
            return [parse_shape(text) for text in self.rows[name].to_pylist()]
        if name == "address":
            return [address for _, _, address in self._keys]
        return self.rows[name].to_pylist()

    def to_pandas(
        self, values: Literal["omit", "object", "explode"] = "omit"
    ) -> pandas.DataFrame:
        """A frame, one row a row; provenance in `attrs`.

        `values`: leave dense tensors out, give them as a column of objects, or give one
        frame row per element (columns `element`, `score`).
        Raises ArgumentError `read_table_values_mode_invalid`.
        """
        if values not in ("omit", "object", "explode"):
            raise ArgumentError(
                "read_table_values_mode_invalid",
                f"values is {values!r}; write omit, object or explode",
                value=values,
                expected=["omit", "object", "explode"],
            )
        frame = self.rows.to_pandas()
        frame["rescorable"] = self.rescorable
        if values == "object":
            frame["value"] = self.column("value")
        if values == "explode":
            frame = self._exploded(frame)
        frame.attrs.update(self.provenance)
        return frame

    def _exploded(self, frame: pandas.DataFrame) -> pandas.DataFrame:
        counts, scores, places = [], [], []
        for row in range(len(self)):
            if row not in self.values_by_row:
                counts.append(1)
                scores.append(np.array([self.scores[row]]))
                places.append([None])
                continue
            found, index = self.elements(row)
            at = zip(*np.unravel_index(index, self.shape_of(row)), strict=True)
            counts.append(len(found))
            scores.append(found)
            places.append([",".join(map(str, place)) for place in at])
        frame = frame.loc[np.repeat(np.arange(len(self)), counts)].reset_index(
            drop=True
        )
        frame["score"] = np.concatenate(scores) if scores else []
        frame["element"] = [place for found in places for place in found]
        return frame

    def aggregate_targets(
        self, reducer: Callable[[Sequence[float]], float], *, name: str | None = None
    ) -> ReadTable:
        """Fold each site's targets into one row (`target_id` None) by a reducer.

        Nothing is summed or averaged unless you say so here: `reducer` gets a site's
        scores in target order. A site that any target could not score keeps the first
        such status, and no score. Raises ArgumentError `read_table_grain_unaggregatable`
        for element grain, `read_table_reducer_invalid`.
        """
        if self.tensor_bearing:
            raise ArgumentError(
                "read_table_grain_unaggregatable",
                "element rows can't be folded over targets; read with a reduction",
                expected="site grain",
            )
        label = name or getattr(reducer, "__name__", "custom")
        groups: dict[tuple[str, Address], list[int]] = {}
        for row, (_, kind, address) in enumerate(self._keys):
            groups.setdefault((kind, address), []).append(row)
        status = self.rows["status"].to_pylist()
        firsts, scores = [], []
        for members in groups.values():
            bad = next((row for row in members if status[row] != "ok"), None)
            firsts.append(members[0] if bad is None else bad)
            scores.append(None if bad is not None else self._fold(reducer, members))
        rows = self.rows.take(pa.array(firsts, pa.int64()))
        reduction = [f"{r}|{label}" for r in rows["reduction"].to_pylist()]
        rows = _with(rows, "target_id", [None] * len(rows))
        rows = _with(rows, "reduction", reduction)
        rows = _with(rows, "score", scores)
        rows = _with(rows, "stderr", [None] * len(rows))
        policy = {**self.run.policy, "aggregated": label}
        return replace(self, rows=rows, run=replace(self.run, policy=policy))

    def _fold(self, reducer: Callable, members: list[int]) -> float:
        found = reducer([float(self.scores[row]) for row in members])
        try:
            return float(found)
        except (TypeError, ValueError):
            raise ArgumentError(
                "read_table_reducer_invalid",
                f"the reducer returned {type(found).__name__}; return one number",
                value=type(found).__name__,
            ) from None

    def collapse_alias_groups(self) -> ReadTable:
        """Keep the first member of every alias group.

        Members are one tensor under several names. Raises DataError
        `read_alias_conflict` if their scores differ.
        """
        seen: dict[tuple[Any, ...], int] = {}
        keep: list[int] = []
        groups = self.rows["alias_group"].to_pylist()
        samples = self.rows["sample_id"].to_pylist()
        for row, (target, _, address) in enumerate(self._keys):
            group = (target, groups[row], samples[row])
            if groups[row] is None or group not in seen:
                seen[group] = row
                keep.append(row)
                continue
            first = seen[group]
            pair = self.scores[[first, row]]
            if not np.array_equal(pair[:1], pair[1:], equal_nan=True):
                raise DataError(
                    "read_alias_conflict",
                    f"{self._keys[first][2]} and {address} are one tensor, but score "
                    f"{pair[0]} and {pair[1]}",
                    value=pair.tolist(),
                )
        return self._take(keep)

    def _take(self, keep: list[int], target: str | None = None) -> ReadTable:
        rows = self.rows.take(pa.array(keep, pa.int64()))
        new = {old: i for i, old in enumerate(keep)}
        run = self.run if target is None else _narrowed(self.run, target)
        return replace(
            self,
            rows=rows,
            run=run,
            values_by_row={
                new[i]: v for i, v in self.values_by_row.items() if i in new
            },
            masks_by_row={new[i]: m for i, m in self.masks_by_row.items() if i in new},
        )

    # --- selection ---

    def select(self, request: Request) -> SiteSelection:
        """What `top_k`, `top_fraction` and `threshold` give of ACT rows: `select_sites`.

        (Of EDGE rows they make a Circuit, by `to_edges`.) Raises ArgumentError
        `by_score_invalid` (reasons `by_table_stale`, `by_table_multi_target`,
        `by_table_empty`, `by_table_grain_mixed`, `by_table_kind`, `grain`).
        """
        if self.kind == "EDGE":
            refuse(
                "by_table_kind",
                "these rows are edges; pass the table itself to top_k, or to_edges()",
            )
        return select_sites(self, request)

    # --- EDGE rows ---

    @staticmethod
    def from_edges(edges: EdgeTable) -> ReadTable:
        """An edge table as EDGE rows, keyed `("t0", "EDGE", (edge name,))`."""
        return ReadTable(rows_from_edges(edges), edges.run)

    def to_edges(self) -> EdgeTable:
        """The edge table again. Raises ArgumentError `read_table_kind` for ACT rows."""
        if self.kind != "EDGE":
            raise ArgumentError(
                "read_table_kind", "these are ACT rows, and no edges", value=self.kind
            )
        return EdgeTable(edges_from_rows(self.rows), self.run)

    # --- persistence ---

    def portable(self) -> ReadTable | EdgeTable:
        """What the store keeps of it: these rows, or for EDGE rows the edge table.

        Raises DataError `read_table_not_portable` for a tensor-bearing table.
        """
        self._require_portable()
        return self.to_edges() if self.kind == "EDGE" and len(self) else self

    def _require_portable(self) -> None:
        if self.tensor_bearing:
            raise DataError(
                "read_table_not_portable",
                "rows of element grain carry tensors, which neither JSON nor the store "
                "keeps; read with a reduction, or save the tensors yourself",
                rows=len(self.values_by_row),
            )

    def to_json(self) -> str:
        """The table as JSON `read_table_v1`. Raises `read_table_not_portable`."""
        self._require_portable()
        return read_json.dump(self)

    @staticmethod
    def from_json(text: str | bytes) -> ReadTable:
        """Read `read_table_v1`; whatever is not exactly right is refused.

        Raises DataError `read_table_artifact_invalid`.
        """
        return ReadTable(*read_json.parse(text))

    def save(self, path: str | Path) -> Path:
        """Write `to_json` to a file, whole or not at all."""
        path = Path(path)
        text = self.to_json()
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        return part.replace(path)

    @staticmethod
    def load(path: str | Path) -> ReadTable:
        """Read a file of `save`. Raises as `from_json`, also for a missing file."""
        return ReadTable.from_json(read_json.read_file(Path(path)))

    def _repr_html_(self) -> str:
        title = f"<p>{len(self):,} rows, {len(self.target_ids)} target(s)</p>"
        names = ["target_id", "address", "score", "status"]
        return title + self.rows.select(names).slice(0, 20).to_pandas().to_html()


class _Unknown(ArgumentError, KeyError):
    """An address that a table does not have: a KeyError, as a mapping's users expect."""

    __str__ = Exception.__str__


def _address(
    kind: str, site: str | None, number: int | None, sample: str | None, text: str
) -> Address:
    if kind == "EDGE":
        return (text,)
    return (site, number) if sample is None else (site, number, sample)


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """`"2x5x32"` as a shape; the empty text is a scalar's."""
    if text is None:
        return None
    return tuple(int(part) for part in text.split("x") if part)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _numpy(value: Any) -> np.ndarray:
    """A tensor's numbers, whatever its device and dtype."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
        return value.numpy()
    return np.asarray(value)


def _with(rows: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    at = rows.schema.get_field_index(name)
    column = pa.array(values, rows.schema.field(name).type)
    return rows.set_column(at, rows.schema.field(name), column)


def _narrowed(run: Run, target: str) -> Run:
    """The run of one target's rows: its policy and texts without the others."""
    policy, provenance = dict(run.policy), dict(run.provenance)
    for facts, name in ((policy, "targets"), (provenance, "target_reprs")):
        if isinstance(facts.get(name), dict):
            facts[name] = {k: v for k, v in facts[name].items() if k == target}
    return replace(run, policy=policy, provenance=provenance)
