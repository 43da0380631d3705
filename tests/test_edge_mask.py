"""Trained gates find a known circuit, repeatably, and leave the model alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import circuitlab as cl
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
    ]
    for wrong in bad:
        with pytest.raises(CircuitlabError) as refused:
            Training(**wrong)
        assert refused.value.code == "training_invalid"
