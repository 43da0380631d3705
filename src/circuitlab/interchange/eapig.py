"""The JSON of EAP-IG's graphs, which MIB's circuit track takes too.

EAP-IG's users attribute minus the metric, so its positive scores help: what is written
is the support, and what is read becomes the support.

Source: hannamw/EAP-IG, `Graph.to_json` and `from_json`; hannamw/MIB-circuit-track.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from circuitlab.circuit import Circuit
from circuitlab.errors import ArgumentError
from circuitlab.interchange.grouping import group_circuit, ungroup_circuit
from circuitlab.interchange.records import (
    Imported,
    invalid,
    json_object,
    record,
    table_of,
)
from circuitlab.sites import ModelShape, parse_edge
from circuitlab.tables import EdgeTable


def eapig_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """The JSON of EAP-IG's `Graph.to_json`: every edge of the model with `in_graph`.

    Scores are supports. Without a table an edge's score is 1 in the circuit and 0
    outside, so that ranking it there gives the circuit again. `unreachable` edges get
    0, as in EAP-IG's own files. Circuits with grouped keys and values are written per
    query head; grouped *scores* can't be split and are refused.

    A key `circuitlab`, which EAP-IG ignores, holds what its format has no room for.
    Raises ArgumentError `shape_needed`, `interchange_unsupported` (a model without
    MLPs or heads that split, grouped scores), `score_not_exportable` (NaN, or another
    status).
    """
    values = _eapig(circuit, edges)
    values["circuitlab"] = {
        "shape": circuit.shape.to_json() if circuit.shape else None,
        "name": circuit.name,
        "edges": list(circuit.ordered),
        "scored": edges is not None,
    }
    return json.dumps(values)


def mib_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """As `eapig_text`, without any key that MIB's checker does not know.

    With scores it is an importance file, without them a membership file.
    """
    return json.dumps(_eapig(circuit, edges))


def write_mib(folder: str | Path, task: str, model: str, edges: EdgeTable) -> Path:
    """Write MIB's `{task}_{model}/importances.json`; returns its path.

    MIB writes `arc-easy_llama3`: underscores of the task become hyphens.
    Source: hannamw/MIB-circuit-track, README and run_evaluation.py.
    """
    place = Path(folder) / f"{task.replace('_', '-')}_{model}"
    every = Circuit(frozenset(edges.shape.edge_names), edges.shape)
    place.mkdir(parents=True, exist_ok=True)
    path = place / "importances.json"
    path.write_text(mib_text(every, edges), encoding="utf-8")
    return path


def _eapig(circuit: Circuit, edges: EdgeTable | None) -> dict[str, Any]:
    shape = circuit.shape or (None if edges is None else edges.run.model.shape)
    circuit = Circuit(circuit.edges, shape, None, {}, circuit.name)
    circuit.mask()
    assert shape is not None
    _check_expressible(shape, edges)
    wide = ungroup_circuit(circuit)
    assert wide.shape is not None
    score = None if edges is None else _eapig_scores(edges, wide.shape)
    written = {
        name: {
            "score": float(name in wide.edges) if score is None else score[name],
            "in_graph": name in wide.edges,
        }
        for name in wide.shape.edge_names
    }
    senders = {parse_edge(name).sender.name for name in wide.edges}
    nodes = {c.name: {"in_graph": c.name in senders} for c in wide.shape.senders}
    config = {
        "n_layers": shape.n_layers,
        "n_heads": shape.n_heads,
        "parallel_attn_mlp": shape.parallel,
        "d_model": shape.d_model,
    }
    nodes["logits"] = {"in_graph": True}
    return {"cfg": config, "nodes": nodes, "edges": written}


def _check_expressible(shape: ModelShape, edges: EdgeTable | None) -> None:
    reason = None
    if not shape.has_mlp or not shape.split_heads:
        reason = "it has no MLPs, or heads whose outputs can't be split"
    elif edges is not None and shape.n_kv_heads != shape.n_heads:
        reason = (
            "scores of grouped keys and values are sums over query heads; score the "
            "model loaded with ungroup_kv=True, or export the circuit without scores"
        )
    if reason:
        raise ArgumentError(
            "interchange_unsupported",
            f"EAP-IG's format cannot hold this: {reason}",
            value=shape.to_json(),
        )


def _eapig_scores(edges: EdgeTable, shape: ModelShape) -> dict[str, float]:
    names, statuses = (edges.rows[c].to_pylist() for c in ("edge", "status"))
    known = dict(zip(names, zip(statuses, edges.support, strict=True), strict=True))
    found = {}
    for name in shape.edge_names:
        status, support = known.get(name, ("no row", math.nan))
        if status == "unreachable":
            support = 0.0
        elif status != "ok" or math.isnan(support):
            raise ArgumentError(
                "score_not_exportable",
                f"{name} has no number ({status}), and EAP-IG's format needs one",
                value=name,
                status=status,
            )
        found[name] = float(support)
    return found


def read_eapig(text: str, shape: ModelShape | None = None) -> Imported:
    """Read EAP-IG's or MIB's graph JSON: the circuit, and its scores as supports.

    Raises DataError `interchange_invalid`, ArgumentError `edge_unknown`.
    """
    values = json_object(text)
    for key in ("cfg", "nodes", "edges"):
        if not isinstance(values.get(key), dict):
            raise invalid(f"EAP-IG's JSON has an object {key!r}", sorted(values))
    ours = values.get("circuitlab", {})
    if not isinstance(ours, dict):
        raise invalid("the key circuitlab is not an object", ours)
    wide = _eapig_shape(values["cfg"])
    kept, scores = _members_and_scores(values["edges"])
    provenance = {"format": "eap-ig"}
    found = Circuit(kept, wide, None, provenance, str(ours.get("name", "")))
    if ours.get("shape"):
        found = _ours(found, ours)
    elif shape is not None and shape.n_kv_heads != shape.n_heads:
        found = group_circuit(found, shape)
    elif shape is not None:
        found = replace(found, shape=shape)
    if not scores or not ours.get("scored", True):
        return Imported(found)
    rows = [
        record(name, {"score": -support, "n": 0, "status": "ok"})
        for name, support in scores.items()
    ]
    return Imported(found, table_of(rows, wide, text))


def _members_and_scores(
    edges: Mapping[str, Any],
) -> tuple[frozenset[str], dict[str, float]]:
    kept, scores = set(), {}
    for name, facts in edges.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("in_graph"), bool):
            raise invalid(f"edge {name!r} has no in_graph", facts)
        if facts["in_graph"]:
            kept.add(name)
        if isinstance(facts.get("score"), int | float):
            scores[name] = float(facts["score"])
    return frozenset(kept), scores


def _ours(found: Circuit, ours: Mapping[str, Any]) -> Circuit:
    """The circuit in the names it had before it was written in EAP-IG's."""
    try:
        shape, edges = ModelShape(**ours["shape"]), frozenset(ours["edges"])
    except (KeyError, TypeError) as error:
        raise invalid("the key circuitlab is not whole", repr(error)) from error
    return replace(found, edges=edges, shape=shape)


def _eapig_shape(config: Mapping[str, Any]) -> ModelShape:
    try:
        layers, heads = int(config["n_layers"]), int(config["n_heads"])
        width, parallel = int(config["d_model"]), bool(config["parallel_attn_mlp"])
        per_head = width // heads
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        expected = "n_layers, n_heads, d_model and parallel_attn_mlp"
        raise invalid(f"EAP-IG's cfg holds {expected}", dict(config)) from None
    return ModelShape(layers, heads, heads, width, per_head, 0, parallel)
