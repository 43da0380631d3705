"""The identities that give the scores their meaning, on every architecture family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import (
    FAMILIES,
    GROUPED,
    family_model,
    hf_model,
    native_bridge,
    token_prompts,
)
from torch import Tensor

from circuitlab.ablated_side import ablated_side
from circuitlab.ablations import AblationSource, Patch, Zero
from circuitlab.backends import Site, Tap, load_model
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_run import run_circuits
from circuitlab.circuits import Circuit
from circuitlab.edges import EAP, EAPIG, edge_scores
from circuitlab.errors import ModelError
from circuitlab.evaluate import measure
from circuitlab.metrics import logit_diff
from circuitlab.receivers import leaf_tap
from circuitlab.senders import collect, constant_writes, expand

NATIVE: dict[str, dict[str, Any]] = {
    "native_ln": {"normalization_type": "LN"},
    "native_rms": {"normalization_type": "RMS"},
    "native_none": {"normalization_type": None},
    "native_attention_only": {"normalization_type": "LN", "attn_only": True},
}
EVERY = [*FAMILIES, *NATIVE]


@pytest.fixture(scope="module", params=EVERY)
def model(request: pytest.FixtureRequest):
    if request.param in NATIVE:
        return load_model(native_bridge(**NATIVE[request.param]))
    return family_model(request.param)


@pytest.fixture(scope="module")
def prompts():
    return token_prompts()


def close(found: Any, expected: Any, tolerance: float) -> bool:
    """Equal within `tolerance` of the largest expected value."""
    found, expected = (torch.as_tensor(x).detach().numpy() for x in (found, expected))
    assert np.isfinite(found).all()
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert error <= tolerance, f"off by {error:.2g} of the largest"
    return True


def test_senders_and_biases_sum_to_each_receivers_input(model, prompts):
    batch = model.batch(prompts.clean)
    streams: dict[Site, Tensor] = {}
    wanted = [
        site
        for layer in model.layers
        for site in (layer.attention_stream, layer.mlp_stream)
        if site
    ]
    wanted.append(model.final_stream)
    taps = [Tap(site, lambda x, s=site: streams.__setitem__(s, x)) for site in wanted]
    model.run(batch, taps)
    values, _ = collect(model, batch)
    senders = expand(model, values, 0, len(model.shape.senders))
    biases = torch.zeros_like(values.stream)
    for i, layer in enumerate(model.layers):
        upstream = model.shape.upstream[model.shape.columns(i, "q")[0]]
        total = senders[:upstream].sum(0) + biases
        assert close(total, streams[layer.attention_stream], 1e-10)
        before, constant = biases, constant_writes(model, i)
        biases = biases if constant is None else biases + constant
        if layer.mlp_stream:
            seen = senders[: model.shape.upstream[model.shape.columns(i, "in")[0]]]
            total = seen.sum(0) + (before if model.shape.parallel else biases)
            assert close(total, streams[layer.mlp_stream], 1e-10)
    assert close(senders.sum(0) + biases, streams[model.final_stream], 1e-10)


def gate_gradients(model, prompts, gates: Tensor) -> tuple[np.ndarray, Tensor]:
    """∂(mean metric)/∂(gate of every edge) through a differentiable circuit run."""
    source = AblationSource(model, prompts, Patch(), logit_diff())
    rows = source.rows(slice(0, len(prompts)))
    side = ablated_side(model, rows)
    logits = run_circuits(model, Chunk(rows.clean, side, rows.clean.last), gates)
    metric = logit_diff()(logits[0], rows.clean).mean()
    (gradient,) = torch.autograd.grad(metric, [gates])
    return gradient[0].numpy(), metric.detach()


def test_eap_is_the_derivative_of_patching_each_edge(model, prompts):
    """Independent of the two reads: autograd through per-receiver inputs."""
    scores = edge_scores(model, prompts, logit_diff()).scores
    gates = torch.ones(1, *model.shape.edge_mask.shape, dtype=model.dtype)
    gradient, _ = gate_gradients(model, prompts, gates.requires_grad_())
    senders, receivers = model.shape.edge_indices
    assert close(scores, -gradient[senders, receivers], 1e-9)


def test_eap_equals_finite_differences(model, prompts):
    table = edge_scores(model, prompts, logit_diff())
    source = AblationSource(model, prompts, Patch(), logit_diff())
    rows = source.rows(slice(0, len(prompts)))
    side = ablated_side(model, rows)
    picks = np.argsort(-np.abs(table.scores))[:4]
    senders, receivers = (index[picks] for index in model.shape.edge_indices)
    step = 2e-3
    gates = torch.ones(2 * len(picks), *model.shape.edge_mask.shape, dtype=model.dtype)
    for i, (u, v) in enumerate(zip(senders, receivers, strict=True)):
        gates[2 * i, u, v], gates[2 * i + 1, u, v] = 1 - step, 1 + step
    with torch.no_grad():
        logits = run_circuits(model, Chunk(rows.clean, side, rows.clean.last), gates)
    metric = torch.stack([logit_diff()(one, rows.clean).mean() for one in logits])
    slopes = (metric[0::2] - metric[1::2]) / (2 * step)
    assert close(table.scores[picks], slopes, 2e-2)


def test_a_senders_scores_sum_to_its_total_gradient(model, prompts):
    """Σ over receivers of score(u→v) = Δ(u) · ∂M/∂(what u adds to the stream)."""
    table = edge_scores(model, prompts, logit_diff())
    matrix = np.zeros(model.shape.edge_mask.shape)
    matrix[model.shape.edge_indices] = table.scores
    batch = model.batch(prompts.clean, prompts.answers, prompts.wrong_answers)
    written: dict[str, Tensor] = {}

    def added(name: str):
        def fn(value: Tensor) -> Tensor:
            written[name] = torch.zeros_like(value, requires_grad=True)
            return value + written[name]

        return fn

    layer = model.layers[0]
    out = Site(layer.attention_post) if layer.attention_post else layer.attention_out
    taps = [leaf_tap(model), Tap(model.stream, added("input")), Tap(out, added("head"))]
    if layer.mlp_out:
        taps.append(Tap(layer.mlp_out, added("mlp")))
    logits = model.run(batch, taps, grad=True, positions=batch.last)
    names = list(written)
    gradients = torch.autograd.grad(
        logit_diff()(logits, batch).mean(), [written[name] for name in names]
    )
    clean, _ = collect(model, batch)
    corrupted, _ = collect(model, model.batch(prompts.corrupted))
    delta = expand(model, corrupted.minus(clean), 0, len(model.shape.senders))
    for name, gradient in zip(names, gradients, strict=True):
        rows = [0] if name == "input" else model.shape.rows(0, name).tolist()
        scale = 1.0 if name == "input" else 1 / model.mlp_scale(0)
        expected = (delta[rows] * gradient * scale).sum((1, 2, 3))
        assert close(matrix[rows].sum(1), expected, 1e-9), name


def test_full_and_empty_circuits_are_the_clean_and_corrupted_runs(model, prompts):
    found = measure(
        model,
        prompts,
        logit_diff(),
        [Circuit.from_edges(model.shape.edge_names), Circuit.from_edges([])],
    )
    corrupted = model.batch(prompts.corrupted, prompts.answers, prompts.wrong_answers)
    logits = model.run(corrupted, positions=corrupted.last)
    expected = logit_diff()(logits, corrupted)
    assert close(found.metric[0], found.full, 1e-9)
    assert close(found.metric[1], expected, 1e-9)
    assert close(found.ablated, expected, 1e-9)
    assert np.abs(found.kl[0]).max() < 1e-9


def test_batch_size_and_padding_change_no_number(model, prompts):
    whole = edge_scores(model, prompts, logit_diff(), method=EAPIG(2))
    apart = edge_scores(model, prompts, logit_diff(), method=EAPIG(2), batch_size=1)
    assert close(apart.scores, whole.scores, 1e-9)
    rows = [[*row] for row in prompts.clean]
    rows[0] = rows[0][:4]
    alone = [model.run(b, positions=b.last) for b in (model.batch([r]) for r in rows)]
    for side in ("left", "right"):
        batch = model.batch(rows, padding_side=side)
        together = model.run(batch, positions=batch.last)
        assert close(together, torch.cat(alone), 1e-5), side


@pytest.mark.parametrize("family", GROUPED)
def test_grouped_scores_are_sums_of_ungrouped_ones(family, prompts):
    source = hf_model(family)
    grouped, apart = load_model(source), load_model(source, ungroup_kv=True)
    batch = grouped.batch(prompts.clean)
    assert close(apart.run(batch), grouped.run(batch), 1e-9)
    some = edge_scores(grouped, prompts, logit_diff())
    every = edge_scores(apart, prompts, logit_diff())
    scores = {row.edge: row.score for row in every}
    for row in some:
        if ".kv" not in row.edge.split("->")[1]:
            assert row.score == pytest.approx(scores[row.edge], abs=1e-9)
            continue
        head, port = row.edge.split(".kv")
        group = int(port[0])
        members = [f"{head}.h{2 * group + i}{port[1:]}" for i in (0, 1)]
        assert row.score == pytest.approx(
            sum(scores[m] or 0 for m in members), abs=1e-8
        )


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox_parallel"])
def test_compatibility_mode_gives_a_model_with_its_own_exact_identities(
    family, prompts
):
    source = family_model(family).bridge
    source.enable_compatibility_mode()
    model: Any = load_model(source)
    assert model.processing == "compatibility"
    scores = edge_scores(model, prompts, logit_diff()).scores
    gates = torch.ones(1, *model.shape.edge_mask.shape, dtype=model.dtype)
    gradient, _ = gate_gradients(model, prompts, gates.requires_grad_())
    assert close(scores, -gradient[model.shape.edge_indices], 1e-8)


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox_parallel", "gemma2", "phi"])
def test_zero_ablation_keeps_attention_biases(family, prompts):
    model = family_model(family)
    empty = Circuit.from_edges([])
    found = measure(model, prompts, logit_diff(), [empty], ablation=Zero())
    biases = [constant_writes(model, i) for i in range(model.shape.n_layers)]
    biases = [bias for bias in biases if bias is not None]
    stream = torch.zeros(model.shape.d_model, dtype=model.dtype)
    for bias in biases:
        stream = stream + bias
    batch = model.batch(prompts.clean, prompts.answers, prompts.wrong_answers)
    tap = Tap(model.final_stream, lambda x: stream.expand_as(x))
    expected = logit_diff()(model.run(batch, [tap], positions=batch.last), batch)
    assert found.metric[0] == pytest.approx(expected.numpy(), abs=1e-9)


def test_what_cannot_be_decomposed_is_refused_with_the_reason():
    import transformers as hf

    mamba = hf.AutoModelForCausalLM.from_config(
        hf.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    )
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
        )
    )
    for refused in (mamba, t5):
        with pytest.raises(ModelError) as caught:
            load_model(refused)
        assert caught.value.code == "architecture_unsupported"
        assert caught.value.fields["reason"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_ranks_like_float64(dtype, prompts):
    exact = edge_scores(family_model("llama"), prompts, logit_diff(), method=EAP())
    rough = edge_scores(
        family_model("llama", dtype), prompts, logit_diff(), method=EAP()
    )
    drift = np.abs(rough.scores - exact.scores).max() / np.abs(exact.scores).max()
    assert drift < (1e-4 if dtype == torch.float32 else 0.2)
    assert np.corrcoef(rough.scores, exact.scores)[0, 1] > 0.98
