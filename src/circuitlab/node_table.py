"""Node scores with the run that made them: a table that a store keeps.

The rows are ACT rows, so that one query reads what sites and what components do; `site`
is the component's place in the stream of blocks, `component` its name in edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from circuitlab.tables import ACT, Run

NODE = pa.schema([*ACT, ("component", pa.string()), ("neuron", pa.int32())])
"""ACT rows of kind `NODE`: one component a row, or one feature (`neuron`) of what a
component adds to the stream. `score` as in `nodes.node_scores`."""


@dataclass(frozen=True)
class NodeTable:
    """Rows of the schema `NODE`, in canonical order, and their run (of kind `act`)."""

    rows: pa.Table
    run: Run

    def __len__(self) -> int:
        return self.rows.num_rows

    @cached_property
    def run_id(self) -> str:
        return self.run.id_for(self.rows)

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores in row order, float64."""
        return self.rows["score"].to_numpy(zero_copy_only=False).astype(np.float64)

    @property
    def neurons(self) -> bool:
        """Whether a row is one feature, and not a whole component."""
        return self.run.policy["grain"] == "neuron"

    @staticmethod
    def of(scores: pa.Table, run: Run) -> NodeTable:
        """The table that `nodes.node_scores` gave, as rows of a run."""
        found = scores.to_pylist()
        shared = {
            "target_id": run.policy["metric"]["name"],
            "kind": "NODE",
            "pass": 0,
            "method": run.policy["method"],
            "reduction": run.policy["reduction"],
            "grain": run.policy["grain"],
            "status": "ok",
            "policy_digest": run.policy_digest,
        }
        rows = [{**shared, **_place(row)} for row in found]
        return NodeTable(pa.Table.from_pylist(rows, schema=NODE), run)


def _place(row: dict[str, Any]) -> dict[str, Any]:
    name, neuron = row["component"], row["neuron"]
    site = name
    if row["layer"] is not None:
        part = "mlp" if row["kind"] == "mlp" else f"attn.h{row['head']}"
        site = f"blocks.{row['layer']}.{part}"
    return {
        "address": name if neuron is None else f"{name}[{neuron}]",
        "site": site,
        "component": name,
        "neuron": neuron,
        **{key: row[key] for key in ("score", "stderr", "n")},
    }
