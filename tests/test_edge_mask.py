"""Trained gates find a known circuit, repeatably, and leave the model alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import circuitlab as cl
from circuitlab.ablations import AblationSource, Patch
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import prepare
from circuitlab.circuits import top_k
from circuitlab.edge_mask import Gates, Training, edge_mask, train_gates
from circuitlab.errors import CircuitlabError
from circuitlab.evaluate import evaluate
from tests import read_models
from tests.hand_models import induction_model
from tests.test_acdc import pairs


def test_gates_find_the_hand_weighted_circuit():
    hand = induction_model(n=8)
    model = cl.load_model(hand.model)
    training = Training(steps=60, sparsity=2.0, rate=0.3)
    found = edge_mask(model, hand.prompts, training=training)
    assert hand.carries <= found.edges
    assert len(found) <= len(hand.carries) + 2
    result = evaluate(model, hand.prompts, cl.logit_diff(), found)
    assert result.faithfulness == pytest.approx(1, abs=0.02)


def test_gates_of_one_chunk_are_derived_again_and_again():
    model, prompts = read_models.model(), pairs()
    source = AblationSource(model, prompts, Patch(), cl.logit_diff())
    chunk = prepare(model, source.rows(slice(0, len(prompts))), cl.logit_diff())
    found = []
    for _ in range(2):
        gates = torch.ones(1, *model.shape.edge_mask.shape, dtype=model.dtype)
        logits = run_circuits(model, chunk, gates.requires_grad_())
        cl.logit_diff()(logits[0], chunk.batch).mean().backward()
        found.append(gates.grad)
    assert found[0] is not None
    torch.testing.assert_close(*found)
    for parameter in model.bridge.parameters():  # type: ignore[attr-defined]
        parameter.grad = None


def test_more_sparsity_keeps_fewer_edges_and_a_seed_repeats():
    model, prompts = read_models.model(), pairs()
    sizes = []
    for sparsity in (0.0, 1.0, 30.0):
        training = Training(steps=25, sparsity=sparsity, rate=0.4)
        found, table = train_gates(model, prompts, training=training)
        again, same = train_gates(model, prompts, training=training)
        assert again.edges == found.edges
        assert same.rows.equals(table.rows)
        sizes.append(len(found))
    assert sizes[0] > sizes[1] > sizes[2]
    losses = found.provenance["losses"]
    assert len(losses) == 25
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_gates_rank_as_support():
    model, prompts = read_models.model(), pairs()
    training = Training(steps=25, sparsity=3.0, rate=0.4)
    for metric in (cl.kl(), cl.logit_diff()):
        circuit, table = train_gates(model, prompts, metric, training=training)
        support = table.support
        assert ((support > 0) & (support < 1)).all()
        inside = [support[model.shape.edge_index[edge]] for edge in circuit.edges]
        outside = [
            support[model.shape.edge_index[edge]] for edge in circuit.complement().edges
        ]
        assert min(inside) >= max(outside)


def test_a_start_restricts_the_gates():
    model, prompts = read_models.model(), pairs()
    start = cl.Circuit.from_edges(
        ["input->m0", "m0->logits", "m1->logits"], model.shape
    )
    training = Training(steps=3)
    circuit, table = train_gates(model, prompts, start=start, training=training)
    assert circuit.edges <= start.edges
    scored = {row.edge for row in table if row.status == "ok"}
    assert scored == start.edges


def test_drawn_gates_have_the_chance_that_is_stated():
    universe = np.ones((40, 50), dtype=bool)
    training = Training(start=0.3)
    gates = Gates(universe, training, torch.device("cpu"), torch.float64)
    drawn = gates.draw()
    assert drawn.shape == (1, 40, 50)
    assert (drawn > 0).double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert gates.chance() == pytest.approx(0.3)


def test_the_model_is_left_alone_and_bad_training_refused():
    model: Any = read_models.model()
    edge_mask(model, pairs(), training=Training(steps=2))
    assert all(p.requires_grad and p.grad is None for p in model.bridge.parameters())
    bad: list[dict[str, Any]] = [
        {"steps": 0},
        {"rate": 0.0},
        {"start": 1.0},
        {"sparsity": -1.0},
        {"sparsity": float("nan")},
        {"steps": 2.5},
        {"steps": "3"},
        {"rate": "0.1"},
        {"seed": -1},
    ]
    for wrong in bad:
        with pytest.raises(CircuitlabError) as refused:
            Training(**wrong)
        assert refused.value.code == "training_invalid"


def test_provenance_is_that_of_a_selection():
    model, prompts = read_models.model(), pairs()
    start = top_k(cl.edge_scores(model, prompts, cl.logit_diff()), 30)
    found, gates = train_gates(model, prompts, start=start, training=Training(steps=3))
    told = json.loads(json.dumps(found.provenance))
    selected = top_k(gates, len(found), rank="support", prune=False).provenance
    # All that a selection says, of the same scores, but for how it was chosen.
    assert selected.keys() - told.keys() == {"k"}
    for key in selected.keys() - {"k", "selector", "text"}:
        assert told[key] == selected[key], key
    assert told["method"] == "edge_mask"
    assert told["policy_digest"] == gates.run.policy_digest
    assert told["target"]["name"] == "kl"
    left_out = model.shape.n_edges - len(start)
    assert told["excluded"] == {"unavailable": left_out}
    assert (told["universe"], told["n"]) == (len(start), len(found))


def test_equal_training_has_equal_gates_whatever_its_numbers_types():
    plain = Training(steps=3, sparsity=2.0, seed=1)
    typed = Training(steps=np.int64(3), sparsity=2, seed=np.int32(1))  # type: ignore[arg-type]
    assert json.dumps(typed.to_json()) == json.dumps(plain.to_json())


def test_an_empty_start_has_no_gates():
    model, prompts = read_models.model(), pairs()
    nothing = cl.Circuit.from_edges([], model.shape)
    found = edge_mask(model, prompts, start=nothing, training=Training(steps=1))
    assert (len(found), found.provenance["universe"]) == (0, 0)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("batch_size_invalid", {"batch_size": 0}),
        ("metric_invalid", {"metric": "kl"}),
        ("training_invalid", {"training": {"steps": 3}}),
        ("circuit_invalid", {"start": ["input->m0"]}),
        ("prompts_invalid", {"prompts": "pairs.csv"}),
    ],
)
def test_what_can_not_be_trained_is_refused(code: str, options: dict[str, Any]):
    given: dict[str, Any] = {"prompts": pairs(), "training": Training(steps=1)}
    with pytest.raises(CircuitlabError) as refused:
        edge_mask(read_models.model(), **{**given, **options})
    assert refused.value.code == code
