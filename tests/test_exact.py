"""Exact edge effects: equal to the peer's, and to a circuit that lacks one edge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import circuitlab as cl
from circuitlab.errors import CircuitlabError
from circuitlab.evaluate import measure
from circuitlab.exact import exact_effects
from tests import read_models
from tests.hand_models import ioi_model
from tests.test_acdc import pairs

TOY = Path(__file__).parent / "golden" / "gpt2_toy"


def golden_model() -> tuple[object, cl.Prompts, dict[str, float]]:
    """The golden toy, its prompts, and the peer's exact effects by edge."""
    config = json.loads((TOY / "gpt2_toy.config.json").read_text())
    for key in ("architecture", "architectures"):
        config.pop(key, None)
    model = GPT2LMHeadModel(GPT2Config(**config)).eval()
    model.load_state_dict(load_file(TOY / "gpt2_toy.safetensors"), strict=False)
    model.tie_weights()
    arrays = np.load(TOY / "gpt2_toy.npz")
    index = json.loads((TOY / "index.json").read_text())
    labels = arrays["labels"]
    prompts = cl.Prompts.from_tokens(
        arrays["clean"], arrays["corrupt"], labels[:, 0], labels[:, 1]
    )
    loaded = cl.load_model(model)
    table = arrays["exact_effect_on_logit_diff"]
    rows, columns = index["forward_nodes"], index["backward_nodes"]
    effects = {}
    for edge in loaded.shape.edge_names:
        sender, _, receiver = edge.partition("->")
        effects[edge] = float(table[rows.index(sender), columns.index(receiver)])
    return loaded, prompts, effects


def test_effects_equal_the_peers():
    model, prompts, effects = golden_model()
    found = exact_effects(model, prompts, cl.logit_diff())
    assert len(found) == 479
    ours = np.array([row.score for row in found])
    theirs = np.array([effects[row.edge] for row in found])
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2", "bloom"])
@pytest.mark.parametrize("ablation", ["patch", "mean"])
def test_an_effect_is_that_of_a_circuit_without_the_edge(family, ablation):
    model, prompts, metric = read_models.model(family), pairs(), cl.logit_diff()
    found = exact_effects(model, prompts, metric, ablation=ablation)
    names = model.shape.edge_names[:: len(model.shape.edge_names) // 11]
    circuits = [
        cl.Circuit.from_edges(set(model.shape.edge_names) - {name}, model.shape)
        for name in names
    ]
    measured = measure(model, prompts, metric, circuits, ablation=ablation)
    for row, name in enumerate(names):
        effects = measured.metric[row] - measured.full
        assert found[name].score == pytest.approx(effects.mean(), abs=1e-10)
        stderr = effects.std(ddof=1) / np.sqrt(len(effects))
        assert found[name].stderr == pytest.approx(stderr, abs=1e-10)


def test_the_hand_weighted_circuit_is_what_has_an_effect():
    hand = ioi_model(n=8)
    model = cl.load_model(hand.model)
    found = exact_effects(model, hand.prompts, cl.logit_diff())
    effects = {row.edge: abs(row.score or 0.0) for row in found}
    assert min(effects[edge] for edge in hand.carries) > 0.05
    assert max(v for edge, v in effects.items() if edge not in hand.carries) < 1e-3


def test_chosen_edges_batches_and_rows_change_nothing():
    model, prompts = read_models.model(), pairs(4)
    whole = exact_effects(model, prompts, cl.logit_diff())
    names = ["m0->a1.h2<k>", "input->a0.h1<q>", "a1.h0->logits"]
    some = exact_effects(
        model, prompts, cl.logit_diff(), names, batch_size=3, memory_budget=1
    )
    assert [row.edge for row in some] == sorted(
        names, key=model.shape.edge_index.__getitem__
    )
    for row in some:
        assert row.score == pytest.approx(whole[row.edge].score, abs=1e-12)
        assert row.stderr == pytest.approx(whole[row.edge].stderr, abs=1e-12)
    assert whole.run.provenance["passes"] < len(whole)


def test_a_killed_run_goes_on(tmp_path):
    model, prompts = read_models.model(), pairs(3)
    path = tmp_path / "exact.jsonl"
    options = {"checkpoint": path, "batch_size": 2}
    whole = exact_effects(model, prompts, cl.logit_diff(), **options)
    text = path.read_bytes()
    path.write_bytes(text[: len(text) * 2 // 3])
    again = exact_effects(model, prompts, cl.logit_diff(), **options)
    assert again.rows.equals(whole.rows)
    assert 0 < again.run.provenance["passes"] < whole.run.provenance["passes"]
    done = exact_effects(model, prompts, cl.logit_diff(), **options)
    assert done.run.provenance["passes"] == 0
    with pytest.raises(CircuitlabError) as refused:
        exact_effects(model, pairs(4), cl.logit_diff(), **options)
    assert refused.value.code == "checkpoint_mismatch"


@pytest.mark.parametrize(
    "line", ['{"foo": 1}', "[1,2]", '{"start":0,"receiver":"x","senders":[]}', "{"]
)
def test_a_step_that_is_none_is_refused_and_left(tmp_path, line):
    model, prompts, path = read_models.model(), pairs(2), tmp_path / "exact.jsonl"
    exact_effects(model, prompts, cl.logit_diff(), ["input->m0"], checkpoint=path)
    path.write_text(path.read_text() + line + "\n")
    before = path.read_bytes()
    with pytest.raises(CircuitlabError) as refused:
        exact_effects(model, prompts, cl.logit_diff(), ["input->m0"], checkpoint=path)
    assert refused.value.code == "checkpoint_corrupt"
    assert path.read_bytes() == before


def test_the_model_is_left_as_it_was():
    model: Any = read_models.model()
    prompts = pairs()
    before = torch.is_grad_enabled()
    asked = [p.requires_grad for p in model.bridge.parameters()]
    exact_effects(model, prompts, cl.kl(), ["input->m0"])
    assert torch.is_grad_enabled() == before
    assert [p.requires_grad for p in model.bridge.parameters()] == asked
    with pytest.raises(CircuitlabError) as refused:
        exact_effects(model, prompts, cl.kl(), ["m1->m0"])
    assert refused.value.code == "edge_unknown"
