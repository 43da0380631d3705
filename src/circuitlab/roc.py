"""ROC: circuits of several sizes or thresholds against a known one.

Runs no model. Which edges count is stated, never assumed: `n_universe`, and how many
edges of either side lay outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from circuitlab.circuits import (
    Circuit,
    check_circuit,
    check_circuits,
    overlap,
    universe_names,
)
from circuitlab.errors import ArgumentError
from circuitlab.sites import ModelShape

if TYPE_CHECKING:
    import pandas

ROC = pa.schema(
    [
        ("circuit_id", pa.string()),
        ("label", pa.string()),
        ("n_found", pa.int64()),
        ("n_both", pa.int64()),
        ("true_positive_rate", pa.float64()),
        ("false_positive_rate", pa.float64()),
        ("precision", pa.float64()),
        ("outside", pa.int64()),
    ]
)
"""One circuit a row, as in `Overlap`; `outside` counts edges beyond the universe."""


@dataclass(frozen=True)
class Roc:
    """Circuits against a known one, by rising false positive rate.

    `rows` has the schema `ROC`. `n_universe` edges could have been found, `n_known` of
    them are the known circuit's.
    """

    rows: pa.Table
    n_universe: int
    n_known: int

    @property
    def auc(self) -> float:
        """Area under the curve's upper envelope, through (0, 0) and (1, 1).

        Points that another point beats are left out, as in Conmy et al. 2023 (the Pareto
        frontier): circuits at several thresholds need not be nested.
        """
        points = zip(
            self.rows["false_positive_rate"].to_pylist(),
            self.rows["true_positive_rate"].to_pylist(),
            strict=True,
        )
        x, y = [0.0], [0.0]
        for rate, found in sorted(points):
            if found > y[-1]:
                x.append(rate)
                y.append(found)
        return float(np.trapezoid([*y, 1.0], [*x, 1.0]))

    def to_pandas(self) -> pandas.DataFrame:
        """One row a circuit."""
        return self.rows.to_pandas()

    def _repr_html_(self) -> str:
        head = (
            f"<p>{self.n_known:,} of {self.n_universe:,} edges, AUC {self.auc:.3f}</p>"
        )
        return head + self.to_pandas().to_html(index=False)


def roc(
    circuits: Sequence[Circuit],
    known: Circuit,
    *,
    universe: Circuit | ModelShape | None = None,
) -> Roc:
    """Compare circuits with a known one.

    `universe` is what could have been found: a circuit (such as ACDC's `start`), or None
    for every edge of the model. Raises ArgumentError `universe_unknown` where no shape
    says which edges there are, and `known_circuit_empty` where the known circuit holds
    none, or all, of them.
    """
    circuits = check_circuits(circuits)
    check_circuit(known, "known")
    if universe is None:
        universe = known.shape or next((c.shape for c in circuits if c.shape), None)
    if universe is None:
        raise ArgumentError(
            "universe_unknown",
            "no circuit says which edges there are; pass universe=, a circuit or the "
            "model's shape",
            value=None,
        )
    names = frozenset(universe_names(universe))
    inside = known.edges & names
    if not inside or len(inside) == len(names):
        raise ArgumentError(
            "known_circuit_empty",
            f"{len(inside)} of the universe's {len(names)} edges are in the known "
            "circuit; there is nothing to tell apart",
            value=len(inside),
            expected="some, and not all, of the universe's edges",
        )
    rows = [_row(circuit, known, universe) for circuit in circuits]
    rows.sort(key=lambda row: (row["false_positive_rate"], row["true_positive_rate"]))
    return Roc(pa.Table.from_pylist(rows, schema=ROC), len(names), len(inside))


def _row(circuit: Circuit, known: Circuit, universe: Circuit | ModelShape) -> dict:
    found = overlap(circuit, known, universe=universe)
    return {
        "circuit_id": circuit.id,
        "label": str(circuit.provenance.get("text") or circuit.name),
        "n_found": found.n_found,
        "n_both": found.n_both,
        "true_positive_rate": found.recall,
        "false_positive_rate": found.false_positive_rate,
        "precision": found.precision,
        "outside": found.outside,
    }
