"""The site inventory: names by identity, axes, flags, globs, depth, and `resid_mid`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from families import family_model, hf_model

from circuitlab.backends import Tap, load_model
from circuitlab.errors import ArgumentError
from circuitlab.interventions import Edit, add, replace_with, run
from circuitlab.inventory import inventory
from circuitlab.site_info import SiteInfo
from circuitlab.values import site_values

TOYS = ("gpt2", "neox_parallel", "neox_sequential", "llama")
FAMILIES = (*TOYS, "gpt_neo", "gptj", "opt", "bloom", "gemma2", "phi", "olmo", "olmo2")
FAMILIES = (*FAMILIES, "qwen3", "granite", "mixtral")
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


@cache
def model_of(family: str) -> Any:
    return family_model(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_spelling_names_one_site_by_the_identity_of_its_hook_point(family: str):
    model = model_of(family)
    sites = inventory(model)
    points = model.bridge.hook_dict
    middles = {name for name in points if name.endswith("hook_resid_mid")}
    assert {n for s in sites for n in s.spellings} == set(points)
    for name, point in points.items():
        site = sites.find(name)
        assert (points[site.name] is point) or name in middles
        assert name in site.spellings
    assert len({site.name for site in sites}) == len(sites)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_site_s_view_is_what_transformer_lens_shows_under_every_spelling(family: str):
    model = model_of(family)
    sites = [site for site in inventory(model) if site.fired]
    batch = model.batch(ROWS)
    ours = site_values(model, batch, sites)
    names = [n for s in sites for n in s.spellings if not n.endswith("hook_pos_embed")]
    theirs: dict[str, Any] = {}

    def keep(value: Any, hook: Any, name: str) -> None:
        theirs[name] = value.detach().clone()

    hooks = [(n, lambda value, hook, n=n: keep(value, hook, n)) for n in names]
    with torch.no_grad():
        model.bridge.run_with_hooks(batch.tokens, fwd_hooks=hooks, prepend_bos=False)
    for site in sites:
        for name in site.spellings:
            if name not in theirs or theirs[name].ndim != ours[site.name].ndim:
                continue
            shown = theirs[name].double()
            if shown.shape != ours[site.name].shape:  # some head norms: heads first
                shown = shown.transpose(1, 2)
            close = torch.allclose(
                shown, ours[site.name].double(), rtol=1e-5, atol=1e-6
            )
            assert close, (site.name, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_axes_are_those_of_the_value(family: str):
    model = model_of(family)
    sites = [site for site in inventory(model) if site.fired]
    values = site_values(model, model.batch(ROWS), sites)
    sizes = {"batch": 2, "pos": 5, "query": 5, "key": 5, "shared": 1}
    for site in sites:
        shape = values[site.name].shape
        assert len(shape) == len(site.axes) == len(site.sizes)
        for axis, size, found in zip(site.axes, site.sizes, shape, strict=True):
            assert found == sizes.get(axis, size)
    shape = model.shape
    assert inventory(model)["blocks.0.attn.hook_z"].n_heads == shape.n_heads
    assert inventory(model)["blocks.0.attn.hook_k"].n_heads == shape.n_kv_heads
    pattern = inventory(model)["blocks.0.attn.hook_pattern"]
    assert pattern.axes == ("batch", "head", "query", "key")


@pytest.mark.parametrize("family", FAMILIES)
def test_view_and_raw_undo_each_other(family: str):
    model = model_of(family)
    raws: dict[str, torch.Tensor] = {}
    sites = [site for site in inventory(model) if site.fired]

    def keep(site: SiteInfo):
        return lambda value: raws.__setitem__(site.name, value.clone())

    model.run(model.batch(ROWS), [Tap(site.site, keep(site)) for site in sites])
    for site in sites:
        assert torch.equal(site.raw(site.view(raws[site.name])), raws[site.name])


@pytest.mark.parametrize(
    "family", ["gpt2", "neox_parallel", "llama", "gptj", "opt", "olmo"]
)
def test_writable_is_what_an_edit_does(family: str):
    """Noise at a writable site changes the logits; elsewhere it is refused."""
    model = model_of(family)
    batch = model.batch(ROWS)
    clean = model.run(batch)
    for site in inventory(model):
        if not site.fired or not site.floating or site.layer == 1:
            continue
        edit = Edit(
            site.name, lambda x, _: x + 0.3 * torch.sin(7 * x.clamp_min(-9) + 1)
        )
        if site.writable:
            edited = run(model, batch, edit, grad=False).logits
            assert float((edited - clean).abs().max()) > 1e-7, site.name
        else:
            with pytest.raises(ArgumentError) as refused:
                run(model, batch, edit, grad=False)
            assert refused.value.code == "site_observe_only"


def test_patterns_whose_edits_are_discarded_are_known():
    for family, expected in (("gpt2", "ok"), ("gptj", "observe_only")):
        found = inventory(model_of(family))["blocks.0.attn.hook_pattern"]
        assert found.status == expected


@pytest.mark.parametrize("family", TOYS)
def test_a_glob_over_layers_gives_one_site_a_layer_in_depth_order(family: str):
    sites = inventory(model_of(family))
    for pattern in ("blocks.*.hook_in", "blocks.*.hook_resid_pre"):
        found = [site.name for site in sites.match(pattern)]
        assert found == ["blocks.0.hook_in", "blocks.1.hook_in"]
    heads = [site.name for site in sites.match("blocks.*.attn.hook_z")]
    assert heads == ["blocks.0.attn.o.hook_in", "blocks.1.attn.o.hook_in"]


def test_one_star_stays_in_its_segment_and_two_cross():
    sites = inventory(model_of("gpt2"))
    one = {site.name for site in sites.match("blocks.0.*.hook_in")}
    two = {site.name for site in sites.match("blocks.0.**.hook_in")}
    assert one == {f"blocks.0.{m}.hook_in" for m in ("ln1", "attn", "ln2", "mlp")}
    assert one < two
    assert "blocks.0.attn.q.hook_in" in two
    with pytest.raises(ArgumentError) as refused:
        sites.match("*.hook_resid_pre")
    assert refused.value.code == "site_unknown"


def test_a_glob_gives_what_exact_names_give():
    sites = inventory(model_of("llama"))
    exact = [sites.match(f"blocks.{i}.hook_attn_out")[0] for i in range(2)]
    assert list(sites.match("blocks.*.hook_attn_out")) == exact


def test_sites_come_in_the_order_they_fire():
    model = model_of("gpt2")
    sites = [site for site in inventory(model) if site.fired and site.through is None]
    seen: list[str] = []
    taps = [Tap(s.site, lambda _, n=s.name: seen.append(n)) for s in reversed(sites)]
    model.run(model.batch(ROWS), taps, fast_norms=False)
    assert seen == [site.name for site in sites]


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("blocks.0.hook_mlp_in", "set_use_hook_mlp_in(True)"),
        ("blocks.0.attn.hook_result", "set_use_attn_result(True)"),
        ("blocks.1.hook_q_input", "set_use_split_qkv_input(True)"),
        ("blocks.1.hook_attn_in", "set_use_attn_in(True)"),
    ],
)
def test_a_gated_site_is_refused_with_the_call_that_opens_it(name: str, gate: str):
    sites = inventory(model_of("gpt2"))
    assert sites.find(name).status == "gated"
    for attempt in (name, name.replace("0", "*").replace("1", "*")):
        with pytest.raises(ArgumentError) as refused:
            sites.match(attempt)
        assert refused.value.code == "site_gated"
        assert refused.value.fields["gate"] == gate
        assert gate in str(refused.value)


def test_an_opened_gate_is_seen_and_a_closed_one_too():
    model: Any = load_model(hf_model("gpt2"))
    name = "blocks.0.attn.hook_result"
    assert not inventory(model).find(name).fired
    model.bridge.set_use_attn_result(True)
    site = inventory(model).match(name)[0]
    assert site.axes == ("batch", "pos", "head", "feature")
    assert site.sizes == (None, None, 4, 32)
    model.bridge.set_use_attn_result(False)
    assert not inventory(model).find(name).fired
    assert inventory(model) is inventory(model)


def test_a_site_that_never_fires_is_refused():
    with pytest.raises(ArgumentError) as refused:
        inventory(model_of("gpt2")).match("blocks.0.attn.qkv.hook_in")
    assert refused.value.code == "site_never_fires"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("blocks.0.hook_resid_prev", "blocks.0.hook_resid_pre"),
        ("blocks.7.attn.hook_z", "blocks.1.attn.hook_z"),
        ("blocks.0.hook_q", "blocks.0.attn.hook_q"),
        ("hook_z", "blocks.0.attn.hook_z"),
        ("blocks.*.hook_zz", "blocks.0.attn.hook_z"),
    ],
)
def test_a_miss_lists_the_nearest_names(name: str, near: str):
    with pytest.raises(ArgumentError) as refused:
        inventory(model_of("gpt2")).match(name)
    assert refused.value.code == "site_unknown"
    nearest = refused.value.fields["nearest"]
    assert isinstance(nearest, list)
    assert near in nearest
    assert len(nearest) <= 5
    assert near in str(refused.value)


def test_a_preview_shows_what_a_pattern_expands_to_also_what_is_gated():
    rows = inventory(model_of("llama")).preview("blocks.*.attn.hook_*")
    json.dumps(rows)
    found = {row["site"]: row for row in rows}
    assert found["blocks.0.attn.o.hook_in"]["spellings"] == ["blocks.0.attn.hook_z"]
    assert found["blocks.0.attn.o.hook_in"]["key"] == "s1|blocks/0/attn/o|in|1"
    assert found["blocks.0.attn.hook_result"]["status"] == "gated"
    assert found["blocks.0.attn.hook_result"]["gate"] == "set_use_attn_result(True)"


def test_keys_are_equal_across_models_and_spellings_and_differ_between_sites():
    first, second = (inventory(model_of(f)) for f in ("gpt2", "llama"))
    name = "blocks.1.attn.hook_q"
    assert first[name].key() == second[name].key() == "s1|blocks/1/attn/q|out|1"
    assert first[name].key(2) == "s1|blocks/1/attn/q|out|2"
    keys = [site.key() for site in first]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_inventory_can_be_taken_where_gradients_are_off(mode: Any):
    expected = [(s.name, s.status) for s in inventory(model_of("gpt2"))]
    fresh = load_model(hf_model("gpt2"))
    with mode():
        found = [(s.name, s.status) for s in inventory(fresh)]
    assert found == expected


def test_taking_the_inventory_leaves_the_model_alone():
    model: Any = load_model(hf_model("llama"))
    parameters = list(model.bridge.parameters())
    parameters[0].requires_grad_(False)
    hooks = [len(m._forward_hooks) for m in model.bridge.modules()]
    before = [p.clone() for p in parameters]
    inventory(model)
    assert [p.requires_grad for p in parameters] == [False] + [True] * (
        len(parameters) - 1
    )
    assert all(p.grad is None for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert [len(m._forward_hooks) for m in model.bridge.modules()] == hooks


# --- the stream between attention and MLP ---

SEQUENTIAL = [f for f in FAMILIES if f not in ("neox_parallel", "gptj", "phi")]


@pytest.mark.parametrize("family", ["neox_parallel", "gptj", "phi"])
def test_parallel_blocks_have_no_resid_mid(family: str):
    with pytest.raises(ArgumentError) as refused:
        inventory(model_of(family)).match("blocks.0.hook_resid_mid")
    assert refused.value.code == "site_unknown"
    assert refused.value.fields["reason"] == "no_resid_mid"


@pytest.mark.parametrize("family", SEQUENTIAL)
def test_writing_resid_mid_changes_both_branches(family: str):
    """The block's output moves by the delta and by what the MLP makes of it."""
    model = model_of(family)
    sites = inventory(model)
    batch = model.batch(ROWS)
    generator = torch.Generator().manual_seed(5)
    delta = (
        torch.randn(model.shape.d_model, generator=generator).double().to(model.dtype)
    )
    wanted = [sites[f"blocks.0.{n}"] for n in ("hook_resid_mid", "mlp.hook_out")]
    out = sites["blocks.0.hook_out"]
    writes = (
        sites["blocks.0.ln2_post.hook_out"] if "ln2_post" in _norms(model) else None
    )
    wanted.append(writes or sites["blocks.0.hook_mlp_out"])
    wanted.append(out)
    before = site_values(model, batch, wanted)
    seen: dict[str, torch.Tensor] = {}
    edits = {
        "blocks.0.hook_resid_mid": add(delta),
        wanted[2].name: lambda x, s: seen.__setitem__(s.name, x) or x,
        out.name: lambda x, s: seen.__setitem__(s.name, x) or x,
    }
    run(model, batch, edits, grad=False)
    mlp = seen[wanted[2].name] - before[wanted[2].name]
    moved = seen[out.name] - before[out.name]
    torch.testing.assert_close(moved, delta + mlp, rtol=1e-6, atol=1e-6)
    assert float(mlp.abs().max()) > 1e-3


def _norms(model: Any) -> Any:
    return model.bridge.blocks[0].submodules


@pytest.mark.parametrize("family", ["gpt2", "neox_sequential", "llama", "gemma2"])
def test_replacing_resid_mid_makes_what_follows_forget_what_came_before(family: str):
    model = model_of(family)
    batch, other = model.batch(ROWS), model.batch([[7, 7, 7, 7, 7], [8, 9, 8, 9, 8]])
    value = torch.ones(model.shape.d_model, dtype=model.dtype)
    edit = {"blocks.1.hook_resid_mid": replace_with(value)}
    first = run(model, batch, edit, grad=False).logits
    second = run(model, other, edit, grad=False).logits
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_gradient_at_resid_mid_is_the_whole_stream_s(family: str):
    """By finite differences of a written delta; the bridge's own name gives a part."""
    model = model_of(family)
    batch = model.batch(ROWS)
    delta = torch.zeros(model.shape.d_model, dtype=model.dtype, requires_grad=True)
    readout = torch.randn(61, generator=torch.Generator().manual_seed(2)).double()

    def loss(site: str, value: torch.Tensor) -> torch.Tensor:
        return (run(model, batch, {site: add(value)}).logits @ readout).sum()

    (whole,) = torch.autograd.grad(loss("blocks.0.hook_resid_mid", delta), delta)
    (branch,) = torch.autograd.grad(loss("blocks.0.ln2.hook_in", delta), delta)
    step = 1e-5 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(4))
    step = step.to(whole)
    with torch.no_grad():
        high, low = (float(loss("blocks.0.hook_resid_mid", s * step)) for s in (1, -1))
    assert (high - low) / 2 == pytest.approx(float(whole @ step), rel=1e-5)
    assert float((whole - branch).abs().max()) > 1e-2 * float(whole.abs().max())


@pytest.mark.real_model
def test_the_inventory_of_smollm2(smollm2: Any):
    model = load_model(str(smollm2))
    sites = inventory(model)
    assert [s.layer for s in sites.match("blocks.*.attn.hook_k")] == list(range(30))
    assert sites["blocks.0.attn.hook_k"].n_heads == 3
    assert sites["blocks.29.hook_resid_mid"].through == "blocks.29.attn.hook_out"
    with pytest.raises(ArgumentError) as refused:
        sites.match("blocks.*.hook_mlp_in")
    assert refused.value.code == "site_gated"
