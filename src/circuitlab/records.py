"""Records: a run with its rows, as a store keeps it.

Takes the things that the stages make (edge tables, read tables, circuits, evaluations)
apart into a run and Arrow tables, and puts them together again. It knows no database
and no file.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from circuitlab.errors import ArgumentError, DataError
from circuitlab.kept import CIRCUIT, dump_json
from circuitlab.sites import ModelShape
from circuitlab.tables import ModelInfo, Run

_TYPES = {
    "edge": "circuitlab.tables:EdgeTable",
    "act": "circuitlab.read_table:ReadTable",
    "circuit": "circuitlab.circuits:Circuit",
}


@runtime_checkable
class Savable(Protocol):
    """What a store can save: a run, and attributes that say which rows it has.

    - `rows`: an Arrow table of EDGE, ACT or EVAL rows, as `run.kind` says. Beside it,
      `per_example` may hold PER_EXAMPLE rows, and `circuit` a circuit. Loading calls
      the same class with `rows=`, `run=` and, if they were there, the other two.
    - or `edges`, a set of edge names, with `shape`, `provenance` and `name`: a circuit.
      Its `run` may be None, or the run whose scores chose it.
    - or `to_record() -> Record`, with the class method `from_record(record)`.
    """

    @property
    def run(self) -> Run | None: ...


@dataclass(frozen=True)
class Record:
    """A run with its rows by table name (the names of `KEPT`).

    `type` is where the class lives that the rows came from, `module:name`. `extra` is
    what else that class needs, as JSON values; it is no part of the run's identity.
    """

    run: Run
    tables: Mapping[str, pa.Table]
    type: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def run_id(self) -> str:
        """The content-derived id: parameters, model, data and rows."""
        return self.run.id_for(*(self.tables[name] for name in sorted(self.tables)))


@dataclass(frozen=True)
class Dataset:
    """Prompts as a store keeps them: `table` has the schema PROMPT."""

    table: pa.Table
    digest: str
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def record_of(thing: Any) -> Record:
    """Take a savable thing apart. See `Savable` for what can be saved.

    Raises ArgumentError `not_savable`, DataError `run_missing`.
    """
    if isinstance(thing, Record):
        return thing
    if hasattr(thing, "portable"):
        # A read table refuses here if it bears tensors; EDGE rows become an edge table.
        thing = thing.portable()
    made = type(thing)
    where = f"{made.__module__}:{made.__qualname__}"
    if hasattr(thing, "to_record"):
        found = thing.to_record()
        return replace(found, type=found.type or where)
    if _is_circuit(thing):
        return _circuit_record(thing, where)
    rows, run = getattr(thing, "rows", None), getattr(thing, "run", None)
    if not isinstance(rows, pa.Table):
        raise ArgumentError(
            "not_savable",
            f"a store can't save a {made.__name__}; it saves edge tables, read tables, "
            "circuits and evaluations",
            value=made.__name__,
        )
    if not isinstance(run, Run):
        raise DataError(
            "run_missing",
            f"this {made.__name__} has no run, so nobody could tell where its numbers "
            "are from; make it with a Run",
            value=made.__name__,
        )
    tables, extra = {run.kind: rows}, {}
    if isinstance(getattr(thing, "per_example", None), pa.Table):
        tables["per_example"] = thing.per_example
    if _is_circuit(getattr(thing, "circuit", None)):
        more, extra = _circuit_tables(thing.circuit)
        tables |= more
    return Record(run, tables, where, extra)


def thing_of(record: Record) -> Any:
    """Put a record together again: the dataclass that was saved.

    A record whose class is not part of this installation comes back as the Record.
    """
    where = record.type or _TYPES.get(record.run.kind, "")
    made = _class_at(where)
    if made is None:
        return record
    if hasattr(made, "from_record"):
        return made.from_record(record)
    if record.run.kind == "circuit":
        return made(**_circuit_fields(record))
    fields = {"rows": record.tables[record.run.kind], "run": record.run}
    if "per_example" in record.tables:
        fields["per_example"] = record.tables["per_example"]
    if "circuit" in record.tables:
        circuit = _class_at(_TYPES["circuit"])
        fields["circuit"] = circuit(**_circuit_fields(record))
    return made(**fields)


def _class_at(where: str) -> Any:
    module, _, name = where.partition(":")
    # A part may come from a stranger: nothing outside this package is imported.
    if not module.startswith("circuitlab.") or not name.isidentifier():
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def dataset_of(prompts: Any) -> Dataset:
    """Take prompts apart. Raises ArgumentError `not_savable`."""
    if isinstance(prompts, Dataset):
        return prompts
    table, digest = getattr(prompts, "table", None), getattr(prompts, "digest", None)
    if not isinstance(table, pa.Table) or not isinstance(digest, str):
        raise ArgumentError(
            "not_savable",
            f"{type(prompts).__name__} holds no prompts; pass a Prompts",
            value=type(prompts).__name__,
        )
    names = ("seed", "prepend_bos", "tokenizer", "dropped")
    facts = {name: getattr(prompts, name, None) for name in names}
    return Dataset(table, digest, prompts.name, facts)


def prompts_of(dataset: Dataset) -> Any:
    """Put prompts together again."""
    made = _class_at("circuitlab.prompts:Prompts")
    if made is None:
        return dataset
    facts = {**dataset.facts, "name": dataset.name}
    facts["dropped"] = tuple(tuple(pair) for pair in facts.get("dropped") or ())
    facts["prepend_bos"] = bool(facts.get("prepend_bos"))
    return made(table=dataset.table, **facts)


def _is_circuit(thing: object) -> bool:
    return isinstance(getattr(thing, "edges", None), frozenset)


def _circuit_record(circuit: Any, where: str) -> Record:
    scores: Run | None = circuit.run
    provenance = dict(circuit.provenance)
    run = Run(
        kind="circuit",
        model=scores.model if scores else _no_model(circuit.shape),
        dataset=scores.dataset if scores else "",
        dataset_digest=scores.dataset_digest if scores else "",
        n=scores.n if scores else 0,
        policy={
            "selector": provenance.get("text") or provenance.get("selector") or "edges",
            "scores": scores.policy_digest if scores else None,
            **_shared_policy(scores),
        },
        seed=scores.seed if scores else None,
        started_at=scores.started_at if scores else "",
        versions=dict(scores.versions) if scores else {},
        parent=provenance.get("run_id"),
    )
    tables, extra = _circuit_tables(circuit)
    return Record(run, tables, where, extra)


def _circuit_tables(circuit: Any) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """A circuit's two tables, and beside them the run whose scores chose it."""
    provenance = dict(circuit.provenance)
    row = {
        "circuit_id": circuit.id,
        "name": circuit.name,
        "n_edges": len(circuit.edges),
        "selector": str(provenance.get("selector") or "edges"),
        "provenance": dump_json(provenance),
    }
    tables = {
        "circuit": pa.Table.from_pylist([row], schema=CIRCUIT),
        "circuit_edge": pa.table({"edge": pa.array(circuit.ordered, pa.string())}),
    }
    shape = circuit.shape.to_json() if circuit.shape else None
    scores = circuit.run.to_json() if circuit.run else None
    return tables, {"circuit_shape": shape, "scores_run": scores}


def _shared_policy(run: Run | None) -> dict[str, Any]:
    names = ("metric", "method", "ablation")
    return {name: run.policy[name] for name in names if run and name in run.policy}


def _no_model(shape: ModelShape | None) -> ModelInfo:
    return ModelInfo("", "", "", "", "", shape)


def _circuit_fields(record: Record) -> dict[str, Any]:
    row = record.tables["circuit"].to_pylist()[0]
    scores = record.extra.get("scores_run")
    shape = record.extra.get("circuit_shape")
    return {
        "edges": frozenset(record.tables["circuit_edge"]["edge"].to_pylist()),
        "shape": ModelShape(**shape) if shape else None,
        "run": Run.from_json(scores) if scores else None,
        "provenance": json.loads(row["provenance"]),
        "name": row["name"],
    }
