"""Methods against circuits that are known: a compiled program, and fixed circuits.

`data/tracr_frac_prevs.npz` holds the weights of tracr's `make_frac_prevs(tokens == "x")`,
compiled causally for the tokens w, x, y, z with a BOS (tracr-pypi 1.0.0): the MLP of layer
0 computes whether a token is x, the head of layer 1 averages that over what came before,
and dimension 0 of the stream is the answer. `data/embedded_circuits.json` was written by
`scripts/embedded_circuits.py --fix`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import circuitlab as cl
from circuitlab.backends import TokenBatch, load_model
from circuitlab.circuits import auroc
from circuitlab.exact import exact_effects

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

PROGRAM = {"input->m0", "m0->a1.h0<v>", "a1.h0->logits"}
PARTS = {"q": "query", "k": "key", "v": "value", "o": "linear"}


def compiled_program() -> Any:
    """The compiled program as a native TransformerLens model; logits are the stream."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig(
        d_model=15,
        d_head=8,
        n_heads=1,
        n_layers=2,
        n_ctx=7,
        d_vocab=6,
        d_vocab_out=15,
        d_mlp=1,
        act_fn="relu",
        normalization_type=None,
        architecture="TransformerLensNative",
    )
    boot: Any = TransformerBridge
    bridge = boot.boot_native(config)
    named = bridge.original_model.named_parameters()
    own = {name.replace("._original_component", ""): value for name, value in named}
    with torch.no_grad(), np.load(DATA / "tracr_frac_prevs.npz") as weights:
        for name, value in _translated(weights).items():
            own[name].copy_(value)
    return load_model(bridge)


def _translated(weights: Any) -> dict[str, torch.Tensor]:
    def of(name: str) -> torch.Tensor:
        return torch.tensor(weights[name])

    found = {
        "tok_embed.weight": of("token_embed/embeddings"),
        "pos.weight": of("pos_embed/embeddings"),
        "head.weight": torch.eye(15),
    }
    for layer in range(2):
        theirs, ours = f"transformer/layer_{layer}", f"layers.{layer}"
        parts = {f"attn.{a}": f"attn/{b}" for a, b in PARTS.items()}
        parts |= {"mlp.fc_in": "mlp/linear_1", "mlp.fc_out": "mlp/linear_2"}
        for own, other in parts.items():
            found[f"{ours}.{own}.weight"] = of(f"{theirs}/{other}/w").T
            found[f"{ours}.{own}.bias"] = of(f"{theirs}/{other}/b")
    return found


@pytest.fixture(scope="module")
def program():
    return compiled_program()


@pytest.fixture(scope="module")
def program_prompts():
    draw = np.random.default_rng(0)

    def tokens() -> np.ndarray:
        return np.concatenate([np.zeros((24, 1), int), draw.integers(2, 6, (24, 5))], 1)

    return cl.Prompts.from_tokens(tokens(), tokens(), np.full(24, 2), np.full(24, 3))


def distance() -> cl.Metric:
    """How far the share is from the clean run's, turned so that higher is better."""

    def fn(logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        assert batch.clean_logits is not None
        return -(logits[:, 0] - batch.clean_logits[:, 0]).abs()

    return cl.custom(fn, higher_is_better=True, name="minus_distance")


def test_the_program_computes_the_share_of_x(program):
    batch = program.batch([[0, 3, 2, 3, 5, 3]])
    shares = program.run(batch)[0, :, 0].tolist()
    assert shares == pytest.approx([0, 1, 1 / 2, 2 / 3, 1 / 2, 3 / 5], abs=1e-6)


def test_only_the_programs_edges_have_an_effect(program, program_prompts):
    effects = exact_effects(program, program_prompts, distance())
    moving = {row.edge for row in effects if abs(row.score or 0) > 1e-6}
    assert moving == PROGRAM


def test_acdc_finds_exactly_the_program(program, program_prompts):
    found = cl.acdc(program, program_prompts, distance(), threshold=1e-4)
    assert found.edges == PROGRAM


def test_the_program_alone_is_faithful_and_the_rest_does_nothing(
    program, program_prompts
):
    circuit = cl.Circuit.from_edges(PROGRAM, program.shape)
    share = cl.custom(
        lambda logits, _: logits[:, 0], higher_is_better=True, name="share"
    )
    found = cl.evaluate(program, program_prompts, share, circuit)
    rest = cl.evaluate(program, program_prompts, share, circuit.complement())
    assert found.faithfulness == pytest.approx(1, abs=1e-5)
    assert rest.faithfulness == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", [cl.EAP(), cl.EAPIG(5), cl.CleanCorrupted()])
def test_methods_score_the_program_alone(program, program_prompts, method):
    share = cl.custom(
        lambda logits, _: logits[:, 0], higher_is_better=True, name="share"
    )
    table = cl.edge_scores(
        program, program_prompts, share, method=method, grain="example"
    )
    moving = {row.edge for row in table if abs(row.score or 0) > 1e-6}
    assert moving == PROGRAM


@pytest.mark.parametrize("task", ["ioi", "greater_than", "pronouns", "agreement"])
@pytest.mark.parametrize("kind", ["exact", "acdc"])
def test_methods_find_the_embedded_models_fixed_circuits_on_other_prompts(task, kind):
    from embedded_circuits import recall

    truth = json.loads((DATA / "embedded_circuits.json").read_text())[task][kind]
    model = load_model("embedded")
    prompts = cl.tasks.by_name(task)(n=64, seed=1, model=model)
    circuit = cl.Circuit.from_edges(truth, model.shape)
    for method in (cl.EAP(), cl.EAPIG(5), cl.CleanCorrupted()):
        table = cl.edge_scores(model, prompts, cl.logit_diff(), method=method)
        assert auroc(table, circuit, rank="magnitude") > 0.97
        assert recall(table, truth) >= 0.6


def test_the_fixed_circuits_are_what_acdc_still_finds():
    """The pronoun circuit, refound from the prompts it was fixed on."""
    truth = json.loads((DATA / "embedded_circuits.json").read_text())["pronouns"]
    model = load_model("embedded")
    prompts = cl.tasks.pronouns(n=32, seed=0, model=model)
    assert set(truth["acdc"]) == cl.acdc(model, prompts, threshold=0.05).edges
