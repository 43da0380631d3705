"""Validation: completeness, minimality, random circuits and edge classes, as EVAL rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import circuitlab as cl
from circuitlab.errors import CircuitlabError
from circuitlab.evaluate import evaluate
from circuitlab.sites import parse_edge
from circuitlab.store import Store
from circuitlab.tables import EVAL
from circuitlab.validate import EDGE_CLASSES, edge_class, inner_components, validate
from tests import read_models
from tests.hand_models import HandModel, ioi_model
from tests.test_acdc import pairs


@pytest.fixture(scope="module")
def hand() -> tuple[HandModel, object]:
    found = ioi_model(n=8)
    return found, cl.load_model(found.model)


def test_a_known_circuit_is_complete_minimal_and_better_than_chance(hand):
    known, model = hand
    circuit = cl.Circuit.from_edges(known.carries, model.shape)
    found = validate(model, known.prompts, cl.logit_diff(), circuit, seed=1)
    assert found.faithfulness == pytest.approx(1, abs=1e-3)
    assert found.completeness == pytest.approx(0, abs=1e-3)
    # Without S-inhibition the movers look at S2 too, whose value edges now carry
    # something: only knock-outs show that those belong to the circuit.
    assert max(found.incompleteness) > 0.1
    wired = cl.Circuit.from_edges(known.wired, model.shape)
    whole = validate(
        model, known.prompts, cl.logit_diff(), wired, minimality=None, random=0, seed=1
    )
    assert max(whole.incompleteness) < 1e-3
    # The movers share the work, so that an edge of one alone is worth about half.
    changes = dict(
        zip(
            *found.minimality().select(["subject", "change"]).to_pydict().values(),
            strict=True,
        )
    )
    assert set(changes) == known.carries
    assert changes["a0.h0->a1.h0<v>"] == pytest.approx(1, abs=1e-2)
    assert changes["a2.h0->logits"] > 0.3
    assert changes["a2.h2->logits"] < -0.1
    random = found.of("random")["faithfulness"].to_numpy()
    assert len(random) == 10
    assert np.abs(random).max() < 0.5


def test_rows_are_those_of_evaluate(hand):
    known, model = hand
    metric, prompts = cl.logit_diff(), known.prompts
    edges = sorted(known.carries)[3:]
    circuit = cl.Circuit.from_edges(edges, model.shape)
    found = validate(model, prompts, metric, circuit, knockouts=2, random=2)
    assert found.rows.schema.names[: len(EVAL.names)] == EVAL.names
    alone = evaluate(model, prompts, metric, circuit)
    row = found.of("circuit").to_pylist()[0]
    assert row["faithfulness"] == pytest.approx(alone.faithfulness, abs=1e-6)
    rest = evaluate(model, prompts, metric, circuit.complement())
    assert row["completeness"] == pytest.approx(rest.faithfulness, abs=1e-6)
    first = found.of("without").to_pylist()[0]
    less = cl.Circuit.from_edges(set(edges) - {first["subject"]}, model.shape)
    want = alone.faithfulness - evaluate(model, prompts, metric, less).faithfulness
    assert first["circuit_id"] == less.id
    assert first["change"] == pytest.approx(want, abs=1e-6)
    assert first["change_low"] <= first["change"] <= first["change_high"]
    assert found.per_example.num_rows == found.rows.num_rows * len(prompts)


def test_components_leave_with_all_their_edges():
    model, prompts = read_models.model("llama"), pairs()
    circuit = cl.Circuit(frozenset(model.shape.edge_names), model.shape)
    found = validate(
        model,
        prompts,
        cl.logit_diff(),
        circuit,
        minimality="components",
        knockouts=3,
        random=0,
    )
    left = found.of("without")["subject"].to_pylist()
    assert left == inner_components(circuit)
    assert left == [sender.name for sender in model.shape.senders[1:]]
    # The circuit is the model, so that whatever is knocked out, both lose the same.
    assert max(found.incompleteness) == pytest.approx(0, abs=1e-9)
    assert found.faithfulness == pytest.approx(1, abs=1e-9)


def test_knock_outs_show_what_a_circuit_lacks(hand):
    known, model = hand
    half = {edge for edge in known.carries if "a2.h1" not in edge}
    circuit = cl.Circuit.from_edges(half, model.shape)
    found = validate(
        model, known.prompts, cl.logit_diff(), circuit, minimality=None, random=0
    )
    assert found.of("without").num_rows == 0
    assert max(found.incompleteness) > 0.2


def test_edge_classes_split_the_edges(hand):
    known, model = hand
    circuit = cl.Circuit.from_edges(known.carries, model.shape)
    found = validate(
        model, known.prompts, cl.logit_diff(), circuit, minimality=None, knockouts=0
    )
    counted: dict[str, int] = dict.fromkeys(EDGE_CLASSES, 0)
    for name in model.shape.edge_names:
        counted[edge_class(parse_edge(name))] += 1
    assert sum(counted.values()) == model.shape.n_edges
    for name in EDGE_CLASSES:
        own = sum(edge_class(parse_edge(e)) == name for e in circuit.edges)
        only = found.of(f"only:{name}").to_pylist()[0]
        without = found.of(f"without:{name}").to_pylist()[0]
        assert only["n_edges"] == model.shape.n_edges - counted[name] + own
        assert without["n_edges"] == len(circuit) - own
        assert only["faithfulness"] == pytest.approx(1, abs=1e-3)
    lost = {n: found.of(f"without:{n}")["change"][0].as_py() for n in EDGE_CLASSES}
    assert lost["logits"] == pytest.approx(1, abs=1e-2)
    assert lost["mlp"] == pytest.approx(0, abs=1e-6)


def test_a_validation_can_be_stored(hand, tmp_path):
    known, model = hand
    circuit = cl.Circuit.from_edges(known.carries, model.shape)
    found = validate(
        model, known.prompts, cl.logit_diff(), circuit, minimality=None, random=1
    )
    with Store(tmp_path / "store.duckdb") as store:
        run_id = store.save(found)
        again = store.load(run_id)
    assert again.rows["subject"].to_pylist() == found.rows["subject"].to_pylist()
    assert again.faithfulness == found.faithfulness
    assert again.run.policy_digest == found.run.policy_digest


def test_chunking_changes_no_number():
    model, prompts = read_models.model(), pairs(4)
    edges = [edge for i, edge in enumerate(model.shape.edge_names) if i % 3]
    circuit = cl.Circuit.from_edges(edges, model.shape)
    metric = cl.logit_diff()
    found = [
        validate(model, prompts, metric, circuit, minimality=None),
        validate(
            model,
            prompts,
            metric,
            circuit,
            minimality=None,
            batch_size=3,
            configs_per_pass=2,
        ),
    ]
    for name in ("faithfulness", "kl", "change"):
        np.testing.assert_allclose(
            found[0].rows[name].to_numpy(), found[1].rows[name].to_numpy(), atol=1e-10
        )


def test_refusals():
    model, prompts = read_models.model(), pairs()
    circuit = cl.Circuit.from_edges(["m1->logits"], model.shape)
    with pytest.raises(CircuitlabError) as refused:
        validate(model, prompts, cl.logit_diff(), circuit, minimality="heads")  # type: ignore[arg-type]
    assert refused.value.code == "minimality_invalid"
    same = cl.Prompts.from_tokens(
        prompts.clean, prompts.clean, [1] * len(prompts), [2] * len(prompts)
    )
    with pytest.raises(CircuitlabError) as refused:
        validate(model, same, cl.logit_diff(), circuit)
    assert refused.value.code == "faithfulness_undefined"


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("knockouts_invalid", {"knockouts": -1}),
        ("random_invalid", {"random": -1}),
        ("random_invalid", {"random": 2.5}),
        ("seed_invalid", {"seed": -1}),
        ("samples_invalid", {"samples": "100"}),
        ("circuit_invalid", {"circuit": ["m1->logits"]}),
        ("metric_invalid", {"metric": "logit_diff"}),
    ],
)
def test_arguments_that_can_not_be_used_are_refused(code: str, options: dict[str, Any]):
    model, prompts = read_models.model(), pairs()
    circuit = cl.Circuit.from_edges(["m1->logits"], model.shape)
    given: dict[str, Any] = {"metric": cl.logit_diff(), "circuit": circuit, **options}
    with pytest.raises(CircuitlabError) as refused:
        validate(model, prompts, **given)
    assert refused.value.code == code
