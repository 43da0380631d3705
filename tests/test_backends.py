"""The seam to the model: what runs, what is seen, and that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, family_model, hf_model, native_bridge, token_prompts
from torch import Tensor, nn

from circuitlab.ablations import AblationSource, Patch
from circuitlab.backends import (
    Backend,
    Capability,
    Site,
    Tap,
    as_backend,
    load_model,
    require,
)
from circuitlab.circuits import Circuit
from circuitlab.edges import ScoringInterrupted, edge_scores
from circuitlab.errors import ArgumentError, DataError, ModelError
from circuitlab.evaluate import evaluate
from circuitlab.methods import EAPIG, Exact
from circuitlab.metrics import custom, logit_diff
from circuitlab.prompts import Prompts


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return token_prompts()


@pytest.fixture(scope="module")
def gpt2() -> Backend:
    return family_model("gpt2")


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a careless tool would leave changed."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [
            len(getattr(module, attribute))
            for attribute in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
                "_backward_pre_hooks",
            )
        ]
        points = [len(getattr(module, a, ())) for a in ("fwd_hooks", "bwd_hooks")]
        own = "forward" in module.__dict__
        found[f"module {name}"] = (id(module), module.training, hooks, points, own)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}"] = (
            id(parameter),
            parameter.requires_grad,
            parameter.dtype,
            parameter._version,
            None if parameter.grad is None else parameter.grad.clone().sum().item(),
        )
    return found


def busy_model(family: str = "gpt2") -> Any:
    """A user's model in the middle of training: gradients, flags, a hook, dropout."""
    model = hf_model(family)
    model.config.use_cache = False
    tokens = torch.tensor(token_prompts().clean)
    model(tokens).logits.sum().backward()
    model.train()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    model.register_forward_hook(lambda _m, _a, out: out)
    return model


def raising(*_: Any) -> Any:
    raise ZeroDivisionError


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def second_time(fn: Callable) -> Callable:
    calls: list[int] = []

    def maybe(*args: Any) -> Any:
        calls.append(1)
        return fn(*args) if len(calls) > 1 else args[0].sum(-1)

    return maybe


WORK: dict[str, Callable[[Any, Prompts], object]] = {
    "eap": lambda m, p: edge_scores(m, p, logit_diff()),
    "eap_ig": lambda m, p: edge_scores(m, p, logit_diff(), method=EAPIG(2)),
    "activations": lambda m, p: edge_scores(
        m, p, logit_diff(), method=EAPIG(1, path="activations"), ablation="mean"
    ),
    "exact": lambda m, p: edge_scores(
        m, p, logit_diff(), method=Exact(("input->m0", "m0->logits"))
    ),
    "evaluate": lambda m, p: evaluate(
        m, p, logit_diff(), Circuit.from_edges(["input->m1", "m1->logits"])
    ),
}

FAILING: dict[str, tuple[type[BaseException], Callable[[Any, Prompts], object]]] = {
    "metric_raises": (
        ZeroDivisionError,
        lambda m, p: edge_scores(m, p, custom(raising, higher_is_better=True)),
    ),
    "metric_raises_under_gradients": (
        ZeroDivisionError,
        lambda m, p: edge_scores(
            m,
            p,
            custom(second_time(raising), higher_is_better=True),
            method=EAPIG(2),
        ),
    ),
    "progress_raises": (
        ZeroDivisionError,
        lambda m, p: edge_scores(m, p, logit_diff(), progress=raising),
    ),
    "interrupted": (
        ScoringInterrupted,
        lambda m, p: edge_scores(m, p, logit_diff(), batch_size=1, progress=interrupt),
    ),
    "interrupted_in_the_metric": (
        ScoringInterrupted,
        lambda m, p: edge_scores(m, p, custom(interrupt, higher_is_better=True)),
    ),
    "evaluation_raises": (
        ZeroDivisionError,
        lambda m, p: evaluate(
            m,
            p,
            custom(raising, higher_is_better=True),
            Circuit.from_edges(["input->m1"]),
        ),
    ),
}


# --- nothing is left behind ---


@pytest.mark.parametrize("work", WORK)
def test_the_users_model_is_as_it_was(work: str, prompts: Prompts):
    source = busy_model()
    before, clean = state_of(source), torch.tensor(prompts.clean)
    logits = source.eval()(clean).logits
    source.train()
    model = load_model(source)
    inside = state_of(model.bridge)  # type: ignore[attr-defined]
    WORK[work](model, prompts)
    assert state_of(source) == before
    assert state_of(model.bridge) == inside  # type: ignore[attr-defined]
    assert torch.equal(source.eval()(clean).logits, logits)


@pytest.mark.parametrize("failure", FAILING)
def test_the_users_model_is_as_it_was_after_an_error(failure: str, prompts: Prompts):
    kind, work = FAILING[failure]
    source = busy_model()
    before = state_of(source)
    model = load_model(source)
    inside = state_of(model.bridge)  # type: ignore[attr-defined]
    with pytest.raises(kind):
        work(model, prompts)
    assert state_of(source) == before
    assert state_of(model.bridge) == inside  # type: ignore[attr-defined]


def test_a_tap_that_raises_leaves_no_hook(gpt2: Backend, prompts: Prompts):
    before = state_of(gpt2.bridge)  # type: ignore[attr-defined]
    batch = gpt2.batch(prompts.clean)
    for slot in ("in", "out", "instead"):
        with pytest.raises(ZeroDivisionError):
            gpt2.run(batch, [Tap(Site("blocks.1.attn.q", slot), raising)])
        assert state_of(gpt2.bridge) == before  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        gpt2.run(batch, [gpt2.bypass(0), Tap(Site("blocks.1.no_such"), raising)])
    assert state_of(gpt2.bridge) == before  # type: ignore[attr-defined]


def test_a_ready_bridge_is_as_it_was(prompts: Prompts):
    bridge = native_bridge(normalization_type="LN")
    bridge.train()
    # Its own first forward installs hooks that stay.
    bridge(torch.tensor(prompts.clean))
    before = state_of(bridge)
    model = load_model(bridge)
    edge_scores(model, prompts, logit_diff(), method=EAPIG(2))
    assert state_of(bridge) == before
    assert as_backend(model) is model
    assert np.allclose(
        edge_scores(bridge, prompts, logit_diff()).scores,
        edge_scores(model, prompts, logit_diff()).scores,
    )


@pytest.mark.parametrize("dtype", ["float64", torch.bfloat16, None])
@pytest.mark.parametrize("ungroup_kv", [False, True])
def test_loading_a_model_object_leaves_it_alone(dtype: Any, ungroup_kv: bool):
    """Casting a module casts its parameters in place, and they are the user's."""
    source = hf_model("llama", torch.float32)
    before, tokens = state_of(source), torch.tensor([[1, 2, 3]])
    logits = source(tokens).logits
    model = load_model(source, dtype=dtype, ungroup_kv=ungroup_kv)
    expected = torch.float32 if dtype is None else getattr(torch, str(dtype), dtype)
    assert model.dtype == expected
    assert state_of(source) == before
    assert torch.equal(source(tokens).logits, logits)
    assert source.config.num_key_value_heads == 2


def test_weights_are_shared_with_the_users_model(prompts: Prompts):
    """So a model in training can be read again and again without a copy."""
    source = hf_model("gpt2")
    model = load_model(source)
    first = edge_scores(model, prompts, logit_diff())
    with torch.no_grad():
        source.transformer.h[0].mlp.c_fc.weight.mul_(0.5)
    second = edge_scores(model, prompts, logit_diff())
    again = edge_scores(load_model(source), prompts, logit_diff())
    assert not np.allclose(first.scores, second.scores)
    assert (second.scores == again.scores).all()
    digests = [table.run.model.weights_digest for table in (first, second, again)]
    assert digests[0] != digests[1] == digests[2]


def test_two_models_that_share_weights_score_alike(prompts: Prompts):
    source = hf_model("llama")
    one, two = load_model(source), load_model(source)
    first = edge_scores(one, prompts, logit_diff())
    assert (edge_scores(two, prompts, logit_diff()).scores == first.scores).all()
    assert (edge_scores(one, prompts, logit_diff()).scores == first.scores).all()


# --- the caller's modes and threads ---


def test_the_callers_gradient_mode_makes_no_difference(gpt2: Backend, prompts: Prompts):
    circuit = Circuit.from_edges(["input->m1", "m1->logits"])

    def work() -> tuple[Any, Any]:
        scores = edge_scores(gpt2, prompts, logit_diff(), method=EAPIG(2)).scores
        return scores, evaluate(gpt2, prompts, logit_diff(), circuit).faithfulness

    scores, faithfulness = work()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            found = work()
            loaded = load_model(hf_model("gpt2")) if mode is torch.no_grad else gpt2
        assert (found[0] == scores).all()
        assert found[1] == faithfulness
        assert (
            edge_scores(loaded, prompts, logit_diff(), method=EAPIG(2)).scores == scores
        ).all()


def test_weights_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        source = hf_model("gpt2")
    with pytest.raises(ModelError) as caught:
        load_model(source)
    assert caught.value.code == "model_without_gradients"


def test_frozen_and_training_models_score_alike(prompts: Prompts):
    source = hf_model("gpt2")
    expected = edge_scores(load_model(source), prompts, logit_diff()).scores
    source.requires_grad_(False)
    found = edge_scores(load_model(source), prompts, logit_diff()).scores
    assert (found == expected).all()
    for module in source.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model = load_model(source)
    model.bridge.train()  # type: ignore[attr-defined]
    assert (edge_scores(model, prompts, logit_diff()).scores == expected).all()
    assert model.bridge.training  # type: ignore[attr-defined]


def test_threads_may_share_a_model(prompts: Prompts):
    model = family_model("gpt2")
    before = state_of(model.bridge)
    expected = edge_scores(model, prompts, logit_diff(), method=EAPIG(3)).scores
    circuit = Circuit.from_edges(["input->m1", "m1->logits"])
    faithful = evaluate(model, prompts, logit_diff(), circuit).faithfulness
    found: list[Any] = []

    def score() -> None:
        method = EAPIG(3)
        found.extend(
            edge_scores(model, prompts, logit_diff(), method=method) for _ in range(3)
        )

    def run() -> None:
        found.extend(evaluate(model, prompts, logit_diff(), circuit) for _ in range(6))

    threads = [threading.Thread(target=work) for work in (score, run, score)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for one in found:
        if hasattr(one, "scores"):
            assert (one.scores == expected).all()
        else:
            assert one.faithfulness == faithful
    assert state_of(model.bridge) == before


# --- running ---


def test_logits_are_the_models_own():
    source = hf_model("gpt2")
    model, tokens = load_model(source), [[1, 2, 3, 4], [5, 6, 7, 8]]
    batch = model.batch(tokens)
    logits = model.run(batch)
    expected = source(torch.tensor(tokens)).logits
    assert torch.allclose(logits, expected, atol=1e-12)
    last = model.run(batch, positions=batch.last)
    assert torch.allclose(last[:, 0], logits[:, -1], atol=1e-12)
    some = torch.tensor([[0, 2], [1, 3]])
    picked = model.run(batch, positions=some)
    assert torch.allclose(picked[1, 1], logits[1, 3], atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logit(gpt2: Backend, side: Any):
    rows = [[1, 2, 3, 4, 5], [6, 7], [8]]
    batch = gpt2.batch(rows, padding_side=side)
    together = gpt2.run(batch, positions=batch.last)[:, 0]
    for i, row in enumerate(rows):
        alone = gpt2.run(gpt2.batch([row]))[0, -1]
        assert torch.allclose(together[i], alone, atol=1e-12)
        assert batch.tokens[i, batch.last[i]] == row[-1]


def test_taps_observe_replace_and_stack(gpt2: Backend, prompts: Prompts):
    batch, site = gpt2.batch(prompts.clean), Site("blocks.1.attn.q")
    seen: list[Tensor] = []
    plain = gpt2.run(batch, [Tap(site, seen.append)])
    assert torch.equal(plain, gpt2.run(batch))
    # Two taps at one site: the second sees what the first put there.
    stacked = [Tap(site, lambda x: x + 1), Tap(site, seen.append)]
    changed = gpt2.run(batch, stacked)
    assert torch.allclose(seen[1], seen[0] + 1, atol=1e-12)
    assert not torch.allclose(changed, plain)
    # Of two that stand instead of a module, the later one runs.
    instead = Site("blocks.1.mlp", "instead")
    zero = [Tap(instead, torch.zeros_like)]
    both = [Tap(instead, raising), *zero]
    assert torch.equal(gpt2.run(batch, both), gpt2.run(batch, zero))


def test_resuming_equals_running(gpt2: Backend, prompts: Prompts):
    batch = gpt2.batch(prompts.clean)
    streams: list[Tensor] = []
    logits = gpt2.run(batch, [Tap(Site("blocks.1", "in"), streams.append)])
    again = gpt2.run(batch, resume=(1, streams[0]))
    assert torch.allclose(again, logits, atol=1e-12)


def test_user_hooks_are_seen_by_every_run(prompts: Prompts):
    """A hook that the user put on the bridge is part of the model."""
    model = family_model("gpt2")
    plain = edge_scores(model, prompts, logit_diff()).scores
    norm = model.module("blocks.1.ln2")
    handle = norm.register_forward_hook(lambda _m, _a, out: out * 2)
    doubled = edge_scores(model, prompts, logit_diff()).scores
    handle.remove()
    assert not np.allclose(doubled, plain)
    assert (edge_scores(model, prompts, logit_diff()).scores == plain).all()


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("token_outside_vocabulary", [1, 61]),
        ("token_outside_vocabulary", [-1]),
        ("prompt_too_long", [1] * 65),
    ],
)
def test_rows_that_a_model_cannot_read_are_refused(
    gpt2: Backend, code: str, row: list[int]
):
    with pytest.raises(DataError) as caught:
        gpt2.batch([[1, 2], row])
    assert caught.value.code == code
    assert caught.value.fields["row"] == 1
    if code == "prompt_too_long":
        assert len(family_model("llama").batch([row])) == 1


def test_capabilities_are_named_where_they_lack(gpt2: Backend):
    require(gpt2, *Capability)
    without = load_model(hf_model("gpt2"))
    without.capabilities = frozenset({Capability.PER_HEAD})
    with pytest.raises(ArgumentError) as caught:
        edge_scores(without, token_prompts(), logit_diff())
    assert caught.value.code == "capability_missing"
    assert caught.value.fields["missing"] == "GRADIENTS"


def test_scoring_starts_where_the_first_pair_differs(gpt2: Backend, prompts: Prompts):
    source = AblationSource(gpt2, prompts, Patch(), logit_diff())
    assert source.rows(slice(0, 3)).first_difference == 1
    same = Prompts.from_tokens(prompts.clean, prompts.clean, [1] * 3, [2] * 3)
    source = AblationSource(gpt2, same, Patch(), logit_diff())
    assert source.rows(slice(0, 3)).first_difference == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"num_hidden_layers": 1},
        {"intermediate_size": 32},
    ],
    ids=str,
)
def test_unusual_shapes_have_exact_identities(
    changes: dict[str, int], prompts: Prompts
):
    import transformers as hf

    config = FAMILIES["llama"]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(0)
    source = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = load_model(source.to(torch.float64).eval())
    names = model.shape.edge_names
    full = evaluate(model, prompts, logit_diff(), Circuit.from_edges(names))
    assert full.faithfulness == pytest.approx(1, abs=1e-9)
    run = edge_scores(
        model, prompts, logit_diff(), method=EAPIG(16, "gauss_legendre")
    ).run
    change = run.provenance["metric_ablated"] - run.provenance["metric_clean"]
    assert abs(run.provenance["completeness_error"]) < 1e-3 * abs(change) + 1e-9
