"""EDGE rows of a read table: an edge table's rows in the columns of ACT, and back.

The strings that are fixed for an edge (grain, resolution, and so on) stand here.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pyarrow as pa

from circuitlab.errors import ArgumentError
from circuitlab.sites import parse_edge
from circuitlab.tables import ACT, EDGE, EdgeTable

_EDGE_FIXED: dict[str, Any] = {
    "target_id": "t0",
    "kind": "EDGE",
    "grain": "site",
    "differentiable": True,
    "retention": "retained",
    "capture_status": "captured",
    "resolution": "exact",
    "frozen_requested": 0,
    "frozen_resolved": 0,
    "frozen_reached": 0,
    "detached": False,
    "rescorable": False,
}


def rows_from_edges(edges: EdgeTable) -> pa.Table:
    """An edge table's rows as ACT-schema rows of kind EDGE, in the same order."""
    for column in ("position", "sample_id"):
        if edges.rows[column].null_count < len(edges):
            _refuse_grain(column)
    count, policy = len(edges), edges.run.policy
    fixed = {
        **_EDGE_FIXED,
        "method": policy.get("method"),
        "reduction": policy.get("reduction"),
        "dtype": edges.run.model.dtype,
        "device": edges.run.model.device,
        "policy_digest": edges.run.policy_digest,
    }
    keys = [parse_edge(name).key for name in edges.rows["edge"].to_pylist()]
    columns = {name: pa.array([value] * count) for name, value in fixed.items()}
    columns |= {name: edges.rows[name] for name in ("score", "stderr", "n", "status")}
    columns |= {"address": edges.rows["edge"], "site_key": pa.array(keys, pa.string())}
    found = [
        columns[f.name].cast(f.type) if f.name in columns else pa.nulls(count, f.type)
        for f in ACT
    ]
    return pa.table(found, schema=ACT)


def _refuse_grain(column: str) -> NoReturn:
    raise ArgumentError(
        "read_table_grain",
        f"edge rows by {column} have no key here; average them over it first",
        value=column,
    )


def edges_from_rows(rows: pa.Table) -> pa.Table:
    """The EDGE-schema rows that `rows_from_edges` was given."""
    edges = [parse_edge(name) for name in rows["address"].to_pylist()]
    columns: dict[str, Any] = {
        "edge": [e.name for e in edges],
        "sender": [e.sender.name for e in edges],
        "receiver": [e.receiver.component.name for e in edges],
        "port": [e.receiver.port for e in edges],
        "sender_layer": [e.sender.layer for e in edges],
        "receiver_layer": [e.receiver.component.layer for e in edges],
        "position": [None] * len(edges),
        "sample_id": [None] * len(edges),
    }
    arrays = {name: pa.array(v, EDGE.field(name).type) for name, v in columns.items()}
    arrays |= {name: rows[name] for name in ("score", "stderr", "n", "status")}
    return pa.table([arrays[name] for name in EDGE.names], schema=EDGE)
