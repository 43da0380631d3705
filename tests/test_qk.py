"""The query-key correction against really patched patterns, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import family_model, token_prompts

from circuitlab.backends import Capability, Site, Tap
from circuitlab.edges import edge_scores
from circuitlab.errors import ArgumentError
from circuitlab.exact import exact_effects
from circuitlab.methods import EAP
from circuitlab.metrics import logit_diff
from circuitlab.senders import collect, expand

FAMILIES = ["gpt2", "llama", "neox_parallel", "gemma2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_corrected_score_is_the_patterns_real_change_times_its_gradient(family):
    model, prompts = family_model(family), token_prompts(2)
    table = edge_scores(model, prompts, logit_diff(), method=EAP(qk_correction=True))
    plain = edge_scores(model, prompts, logit_diff())
    batch = model.batch(prompts.clean, prompts.answers, prompts.wrong_answers)
    site = Site("blocks.1.attn.hook_pattern")
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value.view_as(value))
        return kept[0]

    logits = model.run(batch, [Tap(site, keep)], grad=True, positions=batch.last)
    metric = logit_diff()(logits, batch).mean()
    (gradient,) = torch.autograd.grad(metric, [kept[0]])
    clean, _ = collect(model, batch)
    corrupted, _ = collect(model, model.batch(prompts.corrupted))
    delta = expand(model, corrupted.minus(clean), 0, 1)[0]
    layer = model.layers[1]
    weight, bias = model.projection(1, "q")

    def patched(stream: torch.Tensor) -> None:
        streams.append(stream)

    streams: list[torch.Tensor] = []
    model.run(batch, [Tap(layer.attention_stream, patched)])
    query = model.norm(1, "attention")(streams[0] + delta) @ weight[2].t()
    query = query if bias is None else query + bias[2]

    def replace(value: torch.Tensor) -> torch.Tensor:
        heads = value.unflatten(-1, weight.shape[:2]).clone()
        heads[:, :, 2] = query
        return heads.flatten(2)

    changed: list[torch.Tensor] = []
    model.run(batch, [Tap(layer.q, replace), Tap(site, lambda x: changed.append(x))])
    expected = ((changed[0] - kept[0].detach()) * gradient)[:, 2].sum()
    row = table["input->a1.h2<q>"]
    assert row.score == pytest.approx(float(expected), rel=1e-8, abs=1e-12)
    same = [
        name for name in plain.shape.edge_names if not name.endswith(("<q>", "<k>"))
    ]
    assert all(table[name].score == plain[name].score for name in same)


def test_the_correction_is_first_order_where_the_change_is_small():
    model, prompts = family_model("llama"), token_prompts(2)
    tokens = [list(row) for row in prompts.corrupted]
    small = type(prompts).from_tokens(
        prompts.clean, tokens, prompts.answers, prompts.wrong_answers
    )
    exact = exact_effects(model, small, logit_diff())
    plain = edge_scores(model, small, logit_diff())
    corrected = edge_scores(model, small, logit_diff(), method=EAP(qk_correction=True))
    into_qk = np.array(
        [name.endswith(("<q>", "<k>")) for name in plain.shape.edge_names]
    )
    error = np.abs(corrected.scores - exact.scores)[into_qk].mean()
    assert error < np.abs(plain.scores - exact.scores)[into_qk].mean()


@pytest.mark.parametrize("family", ["gptj", "opt"])
def test_models_whose_pattern_cannot_be_edited_are_refused_by_name(family):
    model = family_model(family)
    assert Capability.ATTENTION_PATTERN not in model.capabilities
    with pytest.raises(ArgumentError) as caught:
        edge_scores(
            model, token_prompts(), logit_diff(), method=EAP(qk_correction=True)
        )
    assert caught.value.code == "capability_missing"
    assert caught.value.fields["missing"] == "ATTENTION_PATTERN"
