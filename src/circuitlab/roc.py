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
    shape_of_all,
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
    def auc(self) -> float | None:
        """Area under the curve's upper envelope, through (0, 0) and (1, 1).

        Points that another point beats are left out, as in Conmy et al. 2023 (the Pareto
        frontier): circuits at several thresholds need not be nested. None where the known
        circuit holds none, or all, of the universe: one of the rates is of nothing.
        """
        if not 0 < self.n_known < self.n_universe:
            return None
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
        area = "no AUC" if self.auc is None else f"AUC {self.auc:.3f}"
        head = f"<p>{self.n_known:,} of {self.n_universe:,} edges, {area}</p>"
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
    says which edges there are, `circuit_shape_mismatch` for circuits of models of
    different shape, and `known_circuit_empty` where the known circuit holds none, or all,
    of the universe.
    """
    found = compared(circuits, known, universe=universe)
    if found.auc is None:
        raise ArgumentError(
            "known_circuit_empty",
            f"{found.n_known} of the universe's {found.n_universe} edges are in the known "
            "circuit, so there is nothing to tell apart; give a universe with edges inside "
            "it and edges outside, or compare with overlap()",
            value=found.n_known,
            expected="some, and not all, of the universe's edges",
        )
    return found


def compared(
    circuits: Sequence[Circuit],
    known: Circuit,
    *,
    universe: Circuit | ModelShape | None = None,
) -> Roc:
    """As `roc`, also where a rate, and so the area, is of nothing and None."""
    circuits = check_circuits(circuits)
    check_circuit(known, "known")
    shape = shape_of_all(known, *circuits, universe)
    if universe is None:
        universe = shape
    if universe is None:
        raise ArgumentError(
            "universe_unknown",
            "no circuit says which edges there are; pass universe=, a circuit or the "
            "model's shape",
            value=None,
        )
    names = frozenset(universe_names(universe))
    inside = known.edges & names
    rows = [_row(circuit, known, universe) for circuit in circuits]
    rows.sort(
        key=lambda r: (r["false_positive_rate"] or 0, r["true_positive_rate"] or 0)
    )
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
