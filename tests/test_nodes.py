"""Node and neuron scores against edges, and against real edits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import family_model, token_prompts

from circuitlab.backends import Tap
from circuitlab.edges import edge_scores, scores_by_node
from circuitlab.errors import ArgumentError
from circuitlab.methods import EAP, EAPIG, Exact
from circuitlab.metrics import kl, logit_diff
from circuitlab.nodes import node_scores
from circuitlab.senders import collect

FAMILIES = ["gpt2", "llama", "neox_parallel", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [EAP(), EAPIG(3)])
def test_a_node_is_the_sum_of_the_edges_that_leave_it(family, method):
    model, prompts = family_model(family), token_prompts()
    nodes = node_scores(model, prompts, logit_diff(), method=method)
    edges = edge_scores(model, prompts, logit_diff(), method=method)
    expected = scores_by_node(edges)
    assert nodes["component"].to_pylist() == expected["component"].to_pylist()
    assert nodes["score"].to_numpy() == pytest.approx(
        expected["score"].to_numpy(), abs=1e-10
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_neurons_sum_to_their_node_and_cutting_the_batch_changes_nothing(family):
    model, prompts = family_model(family), token_prompts()
    nodes = node_scores(model, prompts, logit_diff())
    neurons = node_scores(model, prompts, logit_diff(), neurons=True, batch_size=1)
    matrix = neurons["score"].to_numpy().reshape(nodes.num_rows, -1)
    assert matrix.shape[1] == model.shape.d_model
    assert matrix.sum(1) == pytest.approx(nodes["score"].to_numpy(), abs=1e-10)


def test_an_mlp_neurons_score_is_the_slope_of_moving_it_towards_its_corrupted_value():
    """EAP-IG's own code uses the gradient at the MLP's input here."""
    model, prompts = family_model("gpt2"), token_prompts()
    neurons = node_scores(model, prompts, logit_diff(), neurons=True).to_pandas()
    batch = model.batch(prompts.clean, prompts.answers, prompts.wrong_answers)
    clean, _ = collect(model, batch)
    corrupted, _ = collect(model, model.batch(prompts.corrupted))
    for neuron in (0, 7, 21):
        move = torch.zeros_like(clean.mlps[0])
        move[..., neuron] = (corrupted.mlps[0] - clean.mlps[0])[..., neuron]

        def metric(step: float, move: torch.Tensor = move) -> float:
            site = model.layers[0].mlp_out
            tap = Tap(site, lambda value: value + step * move)
            logits = model.run(batch, [tap], positions=batch.last)
            return float(logit_diff()(logits, batch).mean())

        slope = (metric(1e-4) - metric(-1e-4)) / 2e-4
        row = neurons[(neurons.component == "m0") & (neurons.neuron == neuron)]
        assert float(row.score.iloc[0]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_standard_errors_are_over_examples():
    model, prompts = family_model("gpt2"), token_prompts(4)
    whole = node_scores(model, prompts, logit_diff())
    single = [
        node_scores(model, prompts[i : i + 1], logit_diff())["score"].to_numpy()
        for i in range(4)
    ]
    expected = np.std(single, axis=0, ddof=1) / 2
    assert whole["stderr"].to_numpy() == pytest.approx(expected, abs=1e-10)
    assert node_scores(model, prompts[:1], logit_diff())["stderr"].null_count == len(
        model.shape.senders
    )


def test_paths_through_activations_are_refused():
    with pytest.raises(ArgumentError) as caught:
        node_scores(
            family_model("gpt2"),
            token_prompts(),
            logit_diff(),
            method=EAPIG(2, path="activations"),
        )
    assert caught.value.code == "method_unsupported"


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("metric_stationary_at_clean", {"metric": kl()}),
        ("metric_invalid", {"metric": "kl"}),
        ("method_unknown", {"method": "eap"}),
        ("method_unsupported", {"method": Exact()}),
        # Its correction is of edges, and would be left out without a word.
        ("method_unsupported", {"method": EAP(qk_correction=True)}),
        ("batch_size_invalid", {"batch_size": 0}),
        ("memory_budget_invalid", {"memory_budget": "1GB"}),
        ("prompts_invalid", {"prompts": None}),
    ],
)
def test_what_can_not_score_nodes_is_refused(code: str, options: dict[str, Any]):
    given: dict[str, Any] = {"prompts": token_prompts(), "metric": logit_diff()}
    with pytest.raises(ArgumentError) as caught:
        node_scores(family_model("gpt2"), **{**given, **options})
    assert caught.value.code == code
