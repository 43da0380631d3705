"""Validate a circuit: is it complete, minimal, and better than chance?

Takes a circuit and gives EVAL rows: the circuit, its complement, the circuit and the
model with parts knocked out, the circuit without each edge or component, random circuits
of its size, and the circuit by edge class. All run as rows of the same passes. Rows have
four columns beside EVAL's: `subject` (what left, which class, which draw) and `change`,
how much faithfulness the circuit has over this row, with a 95 % bootstrap interval over
examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from circuitlab.ablations import Ablation
from circuitlab.backends import as_backend
from circuitlab.circuits import SCHEMA, Circuit, check_circuit
from circuitlab.errors import ArgumentError, require_count
from circuitlab.evaluate import Entry, EvalPlan, ratio_of_means
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.sites import Edge, ModelShape, fed_by, parse_edge
from circuitlab.tables import Run

if TYPE_CHECKING:
    import pandas

EDGE_CLASSES = ("qk", "v", "mlp", "logits")
"""Classes of edges by what they enter: queries and keys, values, MLPs, the logits."""

By = Literal["edges", "components"]


def edge_class(edge: Edge) -> str:
    """The class of an edge: `qk`, `v`, `mlp` or `logits`."""
    receiver = edge.receiver
    if receiver.component.kind == "logits":
        return "logits"
    if receiver.port == "in":
        return "mlp"
    return "v" if receiver.port == "v" else "qk"


@dataclass(frozen=True)
class Validation:
    """EVAL rows about one circuit, with `subject`, `change`, `change_low`, `change_high`.

    `per_example` has the columns of `PER_EXAMPLE`, row by row. Labels: `circuit`,
    `complement`, `knockout`, `knockout_model`, `without`, `random`, `only:<class>`,
    `without:<class>`.
    """

    rows: pa.Table
    per_example: pa.Table
    run: Run

    def of(self, label: str) -> pa.Table:
        """The rows with a label."""
        return self.rows.filter(pc.field("label") == label)

    @property
    def faithfulness(self) -> float:
        """The circuit's own faithfulness."""
        return self.of("circuit")["faithfulness"][0].as_py()

    @property
    def completeness(self) -> float | None:
        """Faithfulness of the complement (Marks et al. 2024): 0 where nothing of the
        behaviour is left outside the circuit."""
        return self.of("circuit")["completeness"][0].as_py()

    @cached_property
    def incompleteness(self) -> tuple[float, float]:
        """Mean and largest |F(C∖K) − F(model∖K)| over the knock-outs K (Wang et al.
        2022); NaN without knock-outs."""
        inside = self.of("knockout")["faithfulness"].to_numpy()
        outside = self.of("knockout_model")["faithfulness"].to_numpy()
        gap = np.abs(inside - outside)
        if len(gap) == 0:
            return float("nan"), float("nan")
        return float(gap.mean()), float(gap.max())

    def minimality(self) -> pa.Table:
        """Per edge or component that left: `subject`, `change` and its interval, largest
        change first. A change near zero says that the circuit does without it."""
        found = self.of("without")
        found = found.select(["subject", "change", "change_low", "change_high"])
        return found.sort_by([("change", "descending")])

    def to_pandas(self) -> pandas.DataFrame:
        """One row an evaluation."""
        return self.rows.to_pandas().dropna(axis=1, how="all")

    def _repr_html_(self) -> str:
        return self.to_pandas().to_html(index=False)


def validate(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    circuit: Circuit,
    *,
    ablation: Ablation | str = "patch",
    minimality: By | None = "edges",
    knockouts: int = 10,
    random: int = 10,
    scored: Prompts | None = None,
    samples: int = 1000,
    seed: int = 0,
    **chunking: Any,
) -> Validation:
    """Evaluate a circuit from every side; return a `Validation`.

    `minimality` takes out one edge (or component) after another, or None; `knockouts`
    sets of components, drawn with `seed`, leave the circuit and the model; `random`
    circuits of as many edges are drawn from the whole model. `scored` and `chunking` as
    in `evaluate`.

    Raises ArgumentError `minimality_invalid`, `knockouts_invalid`, `random_invalid`,
    `edge_unknown`; DataError
    `faithfulness_undefined`; else as `evaluate` does.
    """
    knockouts = require_count("knockouts_invalid", "knockouts", knockouts, least=0)
    random = require_count("random_invalid", "random", random, least=0)
    check_circuit(circuit)
    model = as_backend(model)
    plan = EvalPlan(model, prompts, metric, ablation, scored, samples, seed, chunking)
    circuit = replace(circuit, shape=model.shape)
    subjects: list[str | None] = [None, None]
    entries = [Entry(circuit), Entry(circuit.complement(), "complement")]
    for subject, entry in _entries(circuit, minimality, knockouts, random, seed):
        subjects.append(subject)
        entries.append(entry)
    rows, per_example, run = plan.evaluate(entries)
    rows = _with_changes(rows, per_example, subjects, samples, seed)
    options = {"minimality": minimality, "knockouts": knockouts, "random": random}
    policy = {**run.policy, "method": "validate", "method_options": options}
    run = replace(run, policy={**policy, "circuit": circuit.id})
    return Validation(rows, per_example, run)


def _entries(
    circuit: Circuit, by: By | None, knockouts: int, random: int, seed: int
) -> Iterator[tuple[str, Entry]]:
    generator = np.random.default_rng(seed)
    for parts, inside, outside in knocked_out(circuit, knockouts, generator):
        yield parts, Entry(inside, "knockout")
        yield parts, Entry(outside, "knockout_model")
    for part, rest in without_each(circuit, by):
        yield part, Entry(rest, "without")
    for draw, other in enumerate(random_circuits(circuit, random, generator)):
        yield f"draw {draw}", Entry(other, "random")
    for name, only, without in by_class(circuit):
        yield name, Entry(only, f"only:{name}")
        yield name, Entry(without, f"without:{name}")


def without_each(circuit: Circuit, by: By | None) -> Iterator[tuple[str, Circuit]]:
    """The circuit without each of its edges, or components, in canonical order.

    A component leaves with every edge that enters or leaves it. Raises ArgumentError
    `minimality_invalid`.
    """
    if by not in ("edges", "components", None):
        raise ArgumentError(
            "minimality_invalid",
            f"minimality is 'edges', 'components' or None, not {by!r}",
            value=by,
            expected=["edges", "components", None],
        )
    if by == "edges":
        for edge in circuit.ordered:
            yield edge, _part(circuit, circuit.edges - {edge}, edge)
    elif by == "components":
        for name in inner_components(circuit):
            yield name, _without_components(circuit, [name])


def knocked_out(
    circuit: Circuit, count: int, generator: np.random.Generator
) -> Iterator[tuple[str, Circuit, Circuit]]:
    """Sets of the circuit's components, drawn at random: the names, the circuit without
    them, and the model without them.

    Source: Wang et al. 2022, completeness with random knock-outs.
    """
    parts = inner_components(circuit)
    shape = circuit.shape
    assert shape is not None
    everything = Circuit(frozenset(shape.edge_names), shape)
    for _ in range(count if parts else 0):
        size = int(generator.integers(1, len(parts) + 1))
        drawn = generator.choice(len(parts), size, replace=False)
        names = [parts[i] for i in sorted(drawn)]
        inside = _without_components(circuit, names)
        yield ",".join(names), inside, _without_components(everything, names)


def random_circuits(
    circuit: Circuit, count: int, generator: np.random.Generator
) -> Iterator[Circuit]:
    """Circuits of as many edges, drawn from the whole model without replacement."""
    shape = circuit.shape
    assert shape is not None
    for draw in range(count):
        picked = generator.choice(shape.n_edges, len(circuit), replace=False)
        edges = frozenset(shape.edge_names[i] for i in picked)
        provenance = {"schema": SCHEMA, "selector": "random", "draw": draw}
        yield Circuit(edges, shape, None, {**provenance, "n": len(edges)})


def by_class(circuit: Circuit) -> Iterator[tuple[str, Circuit, Circuit]]:
    """For each edge class: its name, the circuit with all edges of the other classes
    (so that only this class is cut to the circuit), and the circuit without the class."""
    shape = circuit.shape
    assert shape is not None
    classes = {name: edge_class(parse_edge(name)) for name in shape.edge_names}
    for name in EDGE_CLASSES:
        others = {edge for edge, found in classes.items() if found != name}
        only = _part(circuit, circuit.edges | others, f"only {name}")
        yield name, only, _part(circuit, circuit.edges & others, f"no {name}")


def inner_components(circuit: Circuit) -> list[str]:
    """The circuit's components but `input`, `logits` and KV groups, in canonical order:
    what can be knocked out."""
    shape = circuit.shape
    assert shape is not None
    index, found = shape.sender_index, set()
    for name in circuit.edges:
        edge = parse_edge(name)
        found.add(edge.sender.name)
        found |= {component.name for component in fed_by(edge.receiver, shape)}
    return sorted(found - {"input"}, key=index.__getitem__)


def _without_components(circuit: Circuit, names: Sequence[str]) -> Circuit:
    """The circuit without edges that leave these components or feed nothing else."""
    shape = circuit.shape
    assert shape is not None
    gone = set(names)
    kept = [e for e in circuit.edges if not _touches(parse_edge(e), gone, shape)]
    return _part(circuit, kept, ",".join(names))


def _touches(edge: Edge, gone: set[str], shape: ModelShape) -> bool:
    if edge.sender.name in gone:
        return True
    fed = {component.name for component in fed_by(edge.receiver, shape)}
    return bool(fed) and fed <= gone


def _part(circuit: Circuit, edges: Iterable[str], what: str) -> Circuit:
    found = frozenset(edges)
    provenance = {"schema": SCHEMA, "selector": "part", "of": [circuit.id]}
    return Circuit(
        found, circuit.shape, None, {**provenance, "part": what, "n": len(found)}
    )


def _with_changes(
    rows: pa.Table,
    per_example: pa.Table,
    subjects: Sequence[str | None],
    samples: int,
    seed: int,
) -> pa.Table:
    """Add `subject`, `change` with its interval, and the circuit's completeness."""
    count = rows.num_rows
    columns = ("metric", "metric_full", "metric_ablated")
    metric, full, ablated = (
        per_example[name].to_numpy().reshape(count, -1) for name in columns
    )
    own = rows["faithfulness"][0].as_py()
    change = own - rows["faithfulness"].to_numpy()
    low, high = _intervals(metric, full[0], ablated[0], samples, seed)
    completeness = [rows["faithfulness"][1].as_py(), *[None] * (count - 1)]
    place = rows.schema.get_field_index("completeness")
    rows = rows.set_column(place, "completeness", pa.array(completeness, pa.float64()))
    for name, values in (
        ("subject", pa.array(subjects, pa.string())),
        ("change", pa.array(change, pa.float64())),
        ("change_low", pa.array(low, pa.float64(), mask=np.isnan(low))),
        ("change_high", pa.array(high, pa.float64(), mask=np.isnan(high))),
    ):
        rows = rows.append_column(name, values)
    return rows


def _intervals(
    metric: np.ndarray,
    full: np.ndarray,
    ablated: np.ndarray,
    samples: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap intervals of F(first row) − F(row), resampling examples alike."""
    count, n = metric.shape
    if n < 2 or samples < 1:
        return np.full(count, np.nan), np.full(count, np.nan)
    picks = np.random.default_rng(seed).integers(0, n, (samples, n))
    base = ratio_of_means(metric[0][picks], full[picks], ablated[picks])
    low, high = np.empty(count), np.empty(count)
    for row in range(count):
        found = base - ratio_of_means(metric[row][picks], full[picks], ablated[picks])
        found = found[np.isfinite(found)]
        low[row], high[row] = np.percentile(found, [2.5, 97.5])
    return low, high
