"""Captures: addresses on the path, payloads, liveness."""

from __future__ import annotations

import pickle

import pytest
import torch

from circuitlab.backends import Site, Tap, load_model
from circuitlab.errors import ArgumentError, CircuitlabError, ReadError
from circuitlab.prompts import Prompts
from circuitlab.reads import read, seed
from circuitlab.trace import capture
from tests.read_models import OTHERS, TOKENS, huggingface, model

LOGIT = seed("unembed.hook_out", index=(0, -1, 7))
FAMILIES = ["gpt2", "llama", "neox", "gemma2", "opt", "bloom", "phi", "mixtral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_addresses_are_of_tensors_really_on_the_path(family: str):
    """A change of what flows at a site moves the logit as the site's gradient says.

    (Attention rounds to float32 in many models, which sets the step and the tolerance.)
    """
    found = model(family)
    batch = found.batch(TOKENS)
    trace = capture(found, TOKENS, save=[], norms="fused")
    table = read(trace, LOGIT, frozen=None, method="grad", reduce=None)
    generator = torch.Generator().manual_seed(0)
    names = [
        "embed.hook_out",
        "blocks.0.attn.hook_q",
        "blocks.0.attn.hook_z",
        "blocks.0.attn.hook_out",
        "blocks.1.mlp.hook_out" if family != "opt" else "blocks.1.mlp.out.hook_out",
        "unembed.hook_in",
    ]
    for name in names:
        record = trace.record(name)
        step = torch.randn(record.shape, generator=generator, dtype=torch.float64)
        step = step / step.norm() * 1e-2

        def moved(sign: float, record=record, step=step) -> float:
            tap = Tap(Site(record.site), lambda value: value + sign * step)
            return float(found.run(batch, [tap])[0, -1, 7])

        slope = (moved(1) - moved(-1)) / 2
        expected = float((table[record.label].value * step).sum())
        assert slope == pytest.approx(expected, rel=1e-2, abs=2e-6), name


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt", "bloom"])
def test_the_stream_has_its_total_gradient_and_not_the_mlp_branch_alone(family: str):
    found = model(family)
    trace = capture(found, TOKENS, save=[])
    table = read(trace, LOGIT, frozen=None, method="grad", reduce=None)
    after = "blocks.0.hook_resid_mid"
    total = table[after].value
    last = table["blocks.0.hook_out"].value
    branch = read(
        trace,
        LOGIT,
        frozen=[f"{s.mlp_out.path}.hook_out" for s in found.layers if s.mlp_out],
        method="grad",
        reduce=None,
    )
    # Without the MLPs the stream's gradient is the next block's; with them it is not.
    assert torch.equal(branch[after].value, branch["blocks.0.hook_out"].value)
    assert not torch.allclose(total, last)


def test_every_spelling_names_one_record():
    trace = capture(model(), TOKENS, save=[])
    names = [
        "blocks.0.attn.q.hook_out",
        "blocks.0.attn.hook_q",
        "blocks.0.attn.q",
        "blocks.0.attn.hook_q:1",
        Site("blocks.0.attn.q", "out"),
    ]
    assert len({trace.record(name).key for name in names}) == 1
    assert trace.record("blocks.0.attn.q").key == "s1|blocks/0/attn/q|out|1"
    assert trace.record("blocks.0.attn.q").key == Site("blocks.0.attn.q").key
    assert {r.site for r in trace.matching("blocks.*.hook_resid_post")} == {
        "blocks.0.hook_out",
        "blocks.1.hook_out",
    }


def test_structural_keys_hold_across_captures_and_lengths():
    one = capture(model(), TOKENS, save=[])
    other = capture(model(), [[5, 6, 7]], save=[])
    assert [r.key for r in one.population] == [r.key for r in other.population]
    assert len({r.key for r in one.population}) == len(one.population)
    assert one.inventory_digest == other.inventory_digest


def test_passes_are_told_apart():
    found = model()
    norm = found.module("blocks.1.ln1")  # type: ignore[attr-defined]
    calls = []

    def again(module, args, output):
        if not calls:
            calls.append(1)
            return module(args[0] * 2) + output
        return None

    handle = norm.register_forward_hook(again)
    try:
        trace = capture(found, TOKENS, save=["blocks.1.ln1.hook_in"])
    finally:
        handle.remove()
    places = [r.place for r in trace.matching("blocks.1.ln1.hook_in")]
    assert places == [("blocks.1.ln1.hook_in", 1), ("blocks.1.ln1.hook_in", 2)]
    with pytest.raises(ArgumentError) as refused:
        trace.record("blocks.1.ln1.hook_in")
    assert refused.value.code == "site_pass_ambiguous"
    second = trace["blocks.1.ln1.hook_in:2"]
    assert torch.equal(second, trace["blocks.1.ln1.hook_in:1"] * 2)
    keys = [r.key for r in trace.matching("blocks.1.ln1.hook_in")]
    assert keys == ["s1|blocks/1/ln1|in|1", "s1|blocks/1/ln1|in|2"]
    with pytest.raises(ArgumentError) as unknown:
        trace.record("blocks.1.ln1.hook_in:3")
    assert unknown.value.code == "site_pass_unknown"


def test_save_keeps_what_it_names_and_nothing_else():
    none = capture(model(), TOKENS, save=[])
    some = capture(model(), TOKENS, save=["blocks.*.hook_resid_post", "embed"])
    every = capture(model(), TOKENS)
    assert none.saved_bytes == 0
    assert {site for site, _ in some.saved} == {
        "blocks.0.hook_out",
        "blocks.1.hook_out",
        "embed.hook_out",
    }
    assert some.saved_bytes == 3 * 3 * 5 * 32 * 8
    assert {place for place in every.saved if place[0] != "logits"} == {
        r.place for r in every.population
    }
    with pytest.raises(ReadError) as refused:
        none["embed.hook_out"]
    assert refused.value.code == "read_payload_unretained"
    assert refused.value.fields["addresses"] == ["embed.hook_out:1"]
    assert "save=['embed.hook_out']" in str(refused.value)


def test_saved_values_are_apart_from_the_graph():
    trace = capture(model(), TOKENS)
    before = read(trace, LOGIT, frozen=None, method="grad", reduce=None)
    with torch.no_grad():
        for site, _ in trace.saved:
            value = trace[site]
            assert not value.requires_grad
            if value.is_floating_point():
                value.zero_()
    after = read(trace, LOGIT, frozen=None, method="grad", reduce=None)
    for key in before:
        assert torch.equal(before[key].value, after[key].value)


def test_a_capture_changes_no_logits_and_keeps_parameters_on_the_graph():
    found = model()
    batch = found.batch(TOKENS)
    plain = found.run(batch, fast_norms=False)  # type: ignore[call-arg]
    trace = capture(found, TOKENS, backward_ready=True)
    assert torch.equal(trace["logits"], plain)
    assert torch.equal(trace["unembed.hook_out"], plain)
    embedding = found.module("embed").original_component.weight  # type: ignore
    assert embedding.grad is None
    trace["logits"][0, -1, 7].backward(retain_graph=True)
    assert embedding.grad is not None
    assert float(embedding.grad.abs().max()) > 0
    for parameter in found.bridge.parameters():  # type: ignore[attr-defined]
        parameter.grad = None


def test_prompts_give_their_side_and_texts_need_a_tokenizer():
    prompts = Prompts.from_tokens(TOKENS, OTHERS)
    clean = capture(model(), prompts, ["embed"])
    corrupted = capture(model(), prompts, ["embed"], side="corrupted")
    plain = capture(model(), OTHERS, ["embed"])
    assert torch.equal(corrupted["embed"], plain["embed"])
    assert not torch.equal(corrupted["embed"], clean["embed"])
    with pytest.raises(CircuitlabError) as refused:
        capture(model(), ["some text"])
    assert refused.value.code == "tokenizer_missing"


def test_unequal_lengths_are_padded_and_masked():
    trace = capture(model(), [[1, 2, 3, 4, 5], [3, 4, 5]], save=[])
    target = seed("unembed.hook_out", index=(1, "last", 7))
    table = read(trace, target, frozen=None, method="grad", reduce=None)
    alone = capture(model(), [[3, 4, 5]], save=[])
    expected = read(
        alone,
        seed("unembed.hook_out", index=(0, -1, 7)),
        frozen=None,
        method="grad",
        reduce=None,
    )
    found = table["blocks.0.hook_in"].value[1, :3]
    assert torch.allclose(found, expected["blocks.0.hook_in"].value[0], atol=1e-12)
    assert not table["blocks.0.hook_in"].value[1, 3:].any()


def test_inner_sites_of_norms_are_captured_open():
    closed = capture(model(), TOKENS, save=[])
    opened = capture(model(), TOKENS, save=[], norms="open")
    inner = set(opened.sites) - set(closed.sites)
    assert inner == {
        f"{norm}.{point}"
        for norm in (
            "blocks.0.ln1",
            "blocks.0.ln2",
            "blocks.1.ln1",
            "blocks.1.ln2",
            "ln_final",
        )
        for point in ("hook_scale", "hook_normalized")
    }
    with pytest.raises(ArgumentError) as refused:
        capture(model(), TOKENS, save=["blocks.0.ln1.hook_scale"])
    assert refused.value.code == "site_not_captured"


def test_fused_norms_have_the_same_sites_otherwise():
    plain = capture(model("llama"), TOKENS, save=[])
    fused = capture(model("llama"), TOKENS, save=[], norms="fused")
    assert set(plain.sites) - set(fused.sites) <= set()
    assert set(fused.sites) == set(plain.sites)


# --- refusals ---


def refusal(found: pytest.ExceptionInfo[ReadError]) -> tuple[object, object]:
    assert str(found.value.fields["remedy"]) in str(found.value)
    return found.value.code, found.value.fields["reason"]


@pytest.mark.parametrize(
    ("context", "reason"),
    [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")],
)
def test_a_pass_without_a_graph_says_why(context, reason: str):
    with context():
        trace = capture(model(), TOKENS)
    assert not trace.live
    with pytest.raises(ReadError) as refused:
        read(trace, LOGIT)
    assert refusal(refused) == ("read_addressing_unavailable", reason)
    assert len(read(trace, method="activation")) > 10


def test_all_parameters_frozen_is_detached():
    found = model("neox")
    with found.frozen():
        trace = capture(found, TOKENS)
    with pytest.raises(ReadError) as refused:
        read(trace, LOGIT)
    assert refusal(refused) == ("read_addressing_unavailable", "detached")


def test_a_freed_graph():
    trace = capture(model(), TOKENS, backward_ready=True)
    logit = trace["logits"][0, -1, 7]
    torch.autograd.grad(logit, trace["blocks.0.hook_in"])
    with pytest.raises(ReadError) as refused:
        read(trace, LOGIT)
    assert refusal(refused) == ("read_addressing_unavailable", "graph_freed")
    # The refusal left the trace's suppression as it was.
    assert trace.watch._suppressed == 0


def test_a_cleaned_trace():
    with capture(model(), TOKENS) as trace:
        assert trace.live
    with pytest.raises(ReadError) as refused:
        read(trace, LOGIT)
    assert refusal(refused) == ("read_addressing_unavailable", "cleaned")
    assert trace.saved_bytes == 0


def test_a_loaded_trace():
    trace = capture(model(), TOKENS, ["embed"])
    loaded = pickle.loads(pickle.dumps(trace))
    with pytest.raises(ReadError) as refused:
        read(loaded, LOGIT)
    assert refusal(refused) == ("read_addressing_unavailable", "loaded")
    assert torch.equal(loaded[("embed.hook_out")], trace["embed.hook_out"])
    assert trace.live


def test_unknown_and_unfired_sites_are_refused_by_name():
    trace = capture(model(), TOKENS, save=[])
    for name, code in [
        ("blocks.0.atn.hook_q", "site_unknown"),
        ("blocks.7.hook_in", "site_unknown"),
        ("blocks.0.hook_mlp_in", "site_gated"),
    ]:
        with pytest.raises(ArgumentError) as refused:
            trace.record(name)
        assert refused.value.code == code
        with pytest.raises(ArgumentError):
            capture(model(), TOKENS, save=[name])
    with pytest.raises(ArgumentError) as option:
        capture(model(), TOKENS, norms="fast")  # type: ignore[arg-type]
    assert option.value.code == "capture_option_invalid"


def test_a_capture_leaves_the_users_model_as_it_was():
    hf = huggingface("gpt2")
    found = load_model(hf)
    hooks = {n: len(m._forward_hooks) for n, m in found.bridge.named_modules()}  # type: ignore
    trace = capture(found, TOKENS)
    read(trace, LOGIT, frozen=None)
    after = {n: len(m._forward_hooks) for n, m in found.bridge.named_modules()}  # type: ignore
    assert hooks == after
    assert all(p.grad is None and p.requires_grad for p in hf.parameters())
