"""Verbs, selections and doors: what is written, where, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from families import family_model

import circuitlab as cl
from circuitlab.backends import Capability, Tap
from circuitlab.errors import ArgumentError
from circuitlab.interventions import (
    Edit,
    Labelled,
    PerExample,
    Verb,
    add,
    add_noise,
    at_heads,
    at_positions,
    baseline,
    bind,
    clamp,
    compose,
    freeze,
    interpolate,
    inventory,
    mean_ablate,
    patch_from,
    permute_batch,
    project_onto,
    project_out,
    replace_with,
    resample_rows_from,
    resolve_edits,
    resume,
    run,
    run_each,
    scale,
    scramble_elements,
    set_direction_mean,
    splice_module,
    steer,
    subspace,
    swap_with,
    units,
    zero_ablate,
)
from circuitlab.prompts import Prompts
from circuitlab.values import site_values

TOYS = ("gpt2", "neox_parallel", "llama")
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
OTHERS = [[3, 7, 9, 1, 5], [9, 8, 6], [5, 4, 2, 8]]
PROMPTS = Prompts.from_tokens(ROWS, OTHERS, [1, 2, 3], [4, 5, 6])
METRIC = cl.logit_diff()
Z, MLP, PATTERN = "blocks.0.attn.hook_z", "blocks.0.hook_mlp_out", "attn.hook_pattern"


@cache
def model_of(family: str) -> Any:
    return family_model(family)


@pytest.fixture(params=TOYS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


@pytest.fixture(scope="module")
def toy() -> Any:
    return model_of("gpt2")


def written(model: Any, site: str, verb: Any, batch: Any = None, **options: Any) -> Any:
    """The site's value before and after an edit, labelled, on the ragged batch."""
    batch = model.batch(ROWS) if batch is None else batch
    info = inventory(model).match(site)[0]
    before = site_values(model, batch, [info])[info.name]
    seen: list[torch.Tensor] = []

    def look(value: torch.Tensor, _site: object) -> torch.Tensor:
        seen.append(value.detach().clone())
        return value

    prompts = options.pop("prompts", PROMPTS)
    edits = Edit(site, compose(verb, look))
    resolved = resolve_edits(model, edits, batch, prompts=prompts)
    model.run(batch, resolved.taps)
    resolved.check()
    return before, seen[0], resolved.record[0]["notes"]


def code(attempt: Any) -> str:
    with pytest.raises(ArgumentError) as refused:
        attempt()
    assert refused.value.fields["code"] == refused.value.code
    return refused.value.code


# --- what each verb writes, said again in plain torch ---

V = torch.linspace(-1, 1, 8, dtype=torch.float64)
PLAIN = {
    "scale": (scale(0.5), lambda x: 0.5 * x),
    "add": (add(V), lambda x: x + V),
    "steer": (steer(V, 3.0), lambda x: x + 3 * V),
    "clamp": (clamp(-0.1, 0.2), lambda x: x.clamp(-0.1, 0.2)),
    "clamp_low": (clamp(low=0.0), lambda x: x.clamp_min(0)),
    "zero_ablate": (zero_ablate(), lambda x: 0 * x),
    "replace_with": (replace_with(V), lambda x: V.expand_as(x)),
    "freeze": (freeze(), lambda x: x),
    "project_onto": (project_onto(V), lambda x: (x @ V)[..., None] * V / (V @ V)),
    "project_out": (project_out(V), lambda x: x - (x @ V)[..., None] * V / (V @ V)),
    "splice": (splice_module(torch.nn.Tanh()), torch.tanh),
    "callable": (lambda value, site: value**2, lambda x: x**2),
    "set_mean": (
        set_direction_mean(2 * V, 0.4),
        lambda x: x + (0.4 - x @ V / V.norm())[..., None] * V / V.norm(),
    ),
    "compose": (compose(scale(2.0), add(V), scale(0.5)), lambda x: x + V / 2),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_verb_writes_what_it_says(model: Any, name: str):
    verb, plain = PLAIN[name]
    before, after, _ = written(model, Z, verb)
    torch.testing.assert_close(after, plain(before))


@pytest.mark.parametrize("name", PLAIN)
def test_an_edited_pass_equals_a_plain_hook_of_transformer_lens(model: Any, name: str):
    """Whole models, with padding, against hooks of the bridge itself."""
    verb, plain = PLAIN[name]
    ours = run(model, PROMPTS, {"blocks.*.attn.hook_z": verb}, grad=False)
    batch = ours.batch
    hooks = [(f"blocks.{i}.attn.hook_z", lambda x, hook: plain(x)) for i in range(2)]
    with torch.no_grad():
        theirs = model.bridge.run_with_hooks(
            batch.tokens,
            attention_mask=batch.mask.long(),
            fwd_hooks=hooks,
            prepend_bos=False,
        )
    real = batch.mask
    torch.testing.assert_close(ours.logits[real], theirs[real], rtol=1e-6, atol=1e-6)


def test_a_span_is_projected_with_an_orthonormal_basis(toy: Any):
    basis = torch.stack([V, V + torch.arange(8.0).double()])
    before, onto, _ = written(toy, Z, project_onto(basis))
    _, out, _ = written(toy, Z, project_out(basis))
    torch.testing.assert_close(onto + out, before)
    torch.testing.assert_close(out @ basis.T, torch.zeros_like(out @ basis.T))
    joint = torch.ones(4, 8, dtype=torch.float64)
    _, after, _ = written(toy, Z, project_onto(joint, over=("head", "feature")))
    mean = before.mean((-2, -1), keepdim=True)
    torch.testing.assert_close(after, mean.expand_as(before))


def test_projections_do_not_care_how_long_the_basis_is(toy: Any):
    _, unit, _ = written(toy, Z, project_onto(V))
    for length in (1e-9, 1e9):
        _, found, _ = written(toy, Z, project_onto(length * V))
        torch.testing.assert_close(found, unit)


def test_projections_work_in_float64_where_the_model_does(toy: Any):
    """Values of a thousand keep twelve digits, which float32 would not."""
    big = compose(scale(1e3), project_onto(V))
    _, after, _ = written(toy, Z, big)
    _, small, _ = written(toy, Z, project_onto(V))
    torch.testing.assert_close(after, 1e3 * small, rtol=1e-12, atol=1e-12)


# --- values from elsewhere ---


def test_patching_the_corrupted_run_in_gives_its_values(model: Any):
    batch = model.batch(OTHERS)
    info = inventory(model)[Z]
    donor = site_values(model, batch, [info])[info.name]
    _, after, _ = written(model, Z, patch_from())
    real = batch.mask
    torch.testing.assert_close(after[real], donor[real])


def test_patching_every_last_layer_site_gives_the_donor_run(model: Any):
    edits = {"blocks.1.hook_out": patch_from()}
    patched = run(model, PROMPTS, edits, grad=False)
    batch = patched.batch
    donor = model.run(model.batch(OTHERS))
    torch.testing.assert_close(
        patched.logits[batch.mask], donor[batch.mask], rtol=1e-6, atol=1e-6
    )


def test_donors_are_chosen_example_by_example(toy: Any):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    batch = toy.batch(rows)
    info = inventory(toy)[Z]
    values = site_values(toy, batch, [info])[info.name]
    _, after, notes = written(toy, Z, patch_from(batch, rows=[2, 0, 0]), batch)
    torch.testing.assert_close(after, values[[2, 0, 0]])
    assert notes[0]["donors"] == [2, 0, 0]
    named = {"blocks.0.attn.hook_z": values, "blocks.1.attn.hook_z": values}
    _, again, _ = written(toy, Z, patch_from(named), batch)
    torch.testing.assert_close(again, values)
    _, labelled, _ = written(
        toy, Z, replace_with(Labelled(values[:, 0], "batch", "head", "feature")), batch
    )
    torch.testing.assert_close(labelled, values[:, :1].expand_as(values))


def test_a_raw_value_of_a_site_with_heads_is_a_donor_too(toy: Any):
    batch = toy.batch([[1, 2, 3]])
    raw: list[torch.Tensor] = []
    site = inventory(toy)[Z]
    toy.run(batch, [Tap(site.site, lambda x: raw.append(x.clone()))])
    before, after, _ = written(toy, Z, replace_with(raw[0]), batch)
    assert torch.equal(before, after)


def test_the_field_s_mean_ablation_is_over_real_tokens(toy: Any):
    reference = Prompts.from_tokens([[1, 2, 3, 4, 5, 6], [7, 8]], [[1] * 6, [1] * 2])
    info = inventory(toy)[MLP]
    batch = toy.batch([list(row) for row in reference.clean])
    values = site_values(toy, batch, [info])[info.name]
    pooled = values[batch.mask].mean(0)
    _, after, _ = written(toy, MLP, mean_ablate(reference))
    torch.testing.assert_close(after, pooled.expand_as(after))
    _, after, _ = written(toy, MLP, mean_ablate(reference, positional=True))
    at_first = values[:, :2].mean(0)
    torch.testing.assert_close(after[0, :2], at_first)
    torch.testing.assert_close(after[0, 2:], values[0, 2:5])


def test_a_site_s_own_mean_leaves_padding_out(toy: Any):
    before, after, _ = written(toy, MLP, mean_ablate(dim="pos"))
    torch.testing.assert_close(after[1, 0], before[1, :3].mean(0))
    before, after, _ = written(toy, Z, mean_ablate(dim=("head", "feature")))
    torch.testing.assert_close(after[..., 0, 0], before.mean((-2, -1)))


def test_a_mean_of_attention_patterns_is_positional(toy: Any):
    site = f"blocks.0.{PATTERN}"
    assert (
        code(lambda: written(toy, site, mean_ablate(PROMPTS)))
        == "mean_positions_needed"
    )
    _, after, _ = written(toy, site, mean_ablate(PROMPTS, positional=True))
    real = after[0, :, :5, :5]
    torch.testing.assert_close(real.sum(-1), torch.ones_like(real.sum(-1)))


def test_resampling_records_donors_of_equal_length_and_is_repeatable(toy: Any):
    pool = Prompts.from_tokens([*ROWS, *OTHERS], [*OTHERS, *ROWS])
    first = run(
        toy, PROMPTS, {"blocks.*.attn.hook_z": resample_rows_from(pool, seed=4)}
    )
    again = run(
        toy, PROMPTS, {"blocks.*.attn.hook_z": resample_rows_from(pool, seed=4)}
    )
    assert torch.equal(first.logits, again.logits)
    donors = [entry["notes"][0]["donors"] for entry in first.record]
    assert donors[0] == donors[1], "all sites of an edit take the same donors"
    lengths = [len(row) for row in pool.clean]
    assert [lengths[donor] for donor in donors[0]] == [5, 3, 4]
    drawn = {
        tuple(
            run(toy, PROMPTS, {Z: resample_rows_from(pool, seed=s)}).record[0]["notes"][
                0
            ]["donors"]
        )
        for s in range(8)
    }
    assert len(drawn) > 1


@pytest.mark.parametrize(
    "verb",
    [
        add_noise(0.5, seed=1),
        scramble_elements(seed=1),
        scramble_elements("clean", seed=1),
        resample_rows_from(PROMPTS, seed=1),
    ],
    ids=lambda verb: verb.name,
)
def test_draws_depend_on_the_example_and_not_on_its_batch(toy: Any, verb: Verb):
    metric = cl.logit_diff()
    whole = run(toy, PROMPTS, {Z: verb}, metric, grad=False).metric
    if verb.params.get("source") == "clean":
        return  # its pool is the set itself
    parts = [
        run(toy, PROMPTS[i : i + 1], {Z: verb}, metric, grad=False, offset=i).metric
        for i in range(3)
    ]
    assert whole is not None
    torch.testing.assert_close(torch.cat(parts), whole)  # type: ignore[arg-type]


def test_noise_has_its_spread_and_differs_between_sites(toy: Any):
    before, after, notes = written(toy, MLP, add_noise(0.5, seed=0))
    other_before, other, _ = written(
        toy, "blocks.1.hook_mlp_out", add_noise(0.5, seed=0)
    )
    noise = after - before
    assert float(noise.std()) == pytest.approx(0.5, rel=0.15)
    assert float((noise - (other - other_before)).abs().max()) > 0.1
    assert notes == [{"verb": "add_noise", "seed": 0}]


def test_swapping_in_another_site_of_the_same_pass(toy: Any):
    batch = toy.batch(ROWS)
    info = inventory(toy)["blocks.0.attn.hook_q"]
    query = site_values(toy, batch, [info])[info.name]
    _, after, _ = written(toy, Z, swap_with("blocks.0.attn.hook_q"))
    torch.testing.assert_close(after, query)
    late = {"blocks.0.attn.hook_q": swap_with(Z)}
    assert code(lambda: run(toy, PROMPTS, late)) == "swap_site_later"


def test_interpolation_runs_from_the_site_to_the_donor(toy: Any):
    before, half, _ = written(toy, Z, interpolate(alpha=0.5))
    _, patched, _ = written(toy, Z, patch_from())
    torch.testing.assert_close(half, (before + patched) / 2)
    gate = torch.zeros(4, 1, dtype=torch.float64)
    gate[2] = 1.0
    _, gated, _ = written(toy, Z, interpolate(alpha=gate))
    torch.testing.assert_close(gated[:, :, 2], patched[:, :, 2])
    torch.testing.assert_close(gated[:, :, :2], before[:, :, :2])


def test_a_gate_that_asks_for_a_gradient_gets_it(toy: Any):
    gate = torch.full((4, 1), 0.5, dtype=torch.float64, requires_grad=True)
    outcome = run(toy, PROMPTS, {Z: interpolate(alpha=gate)}, cl.logit_diff())
    assert outcome.metric is not None
    (found,) = torch.autograd.grad(outcome.metric.sum(), gate)
    assert bool((found != 0).all())


def test_a_permuted_batch_moves_whole_examples(toy: Any):
    batch = toy.batch([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    before, after, notes = written(toy, Z, permute_batch([1, 2, 0]), batch)
    assert torch.equal(after, before[[1, 2, 0]])
    assert notes == [{"verb": "permute_batch", "rows": [1, 2, 0]}]
    ragged = {Z: permute_batch([1, 2, 0])}
    assert code(lambda: run(toy, PROMPTS, ragged)) == "donor_length_mismatch"


# --- positions, heads, units, subspaces ---


@pytest.mark.parametrize(
    ("positions", "places"),
    [
        ("last", [[4], [2], [3]]),
        ([0, -1], [[0, 4], [0, 2], [0, 3]]),
        (1, [[1], [1], [1]]),
        (PerExample([2, (0, 1), -2]), [[2], [0, 1], [2]]),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_count_real_tokens_on_either_side(
    model: Any, positions: Any, places: list, side: Any
):
    batch = model.batch(ROWS, padding_side=side)
    before, after, notes = written(
        model, Z, at_positions(positions, zero_ablate()), batch
    )
    changed = (before != after).any(-1).any(-1)
    start = [0, 2, 1] if side == "left" else [0, 0, 0]
    expected = torch.zeros_like(changed)
    for row, wanted in enumerate(places):
        expected[row, [start[row] + p for p in wanted]] = True
    assert torch.equal(changed & batch.mask, expected)
    assert notes[0]["positions"] == places


@pytest.mark.parametrize("family", [*TOYS, "opt"])
@pytest.mark.parametrize("name", [*PLAIN, "patch", "mean", "noise", "resample"])
def test_padding_on_either_side_gives_equal_numbers(family: str, name: str):
    model = model_of(family)
    sourced = {
        "patch": patch_from(),
        "mean": mean_ablate("corrupted", positional=True),
        "noise": add_noise(0.3, seed=2),
        "resample": resample_rows_from(seed=2),
    }
    verb = sourced.get(name) or PLAIN[name][0]
    edits = {"blocks.*.attn.hook_z": verb}
    logits = []
    for side in ("right", "left"):
        batch = model.batch(ROWS, padding_side=side)
        resolved = resolve_edits(model, edits, batch, prompts=PROMPTS)
        found = model.run(batch, resolved.taps)
        logits.append([found[i][batch.mask[i]] for i in range(3)])
    for left, right in zip(*logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_heads_are_edited_alone(model: Any):
    before, after, _ = written(model, Z, at_heads([1, -1], zero_ablate()))
    assert bool((after[:, :, [1, 3]] == 0).all())
    assert torch.equal(after[:, :, [0, 2]], before[:, :, [0, 2]])


def test_key_value_heads_are_the_groups(toy: Any):
    grouped = model_of("llama")
    before, after, _ = written(grouped, "blocks.0.attn.hook_v", at_heads(1, scale(0.0)))
    assert before.shape[2] == 2
    assert bool((after[:, :, 1] == 0).all())
    with_one = {"blocks.0.attn.hook_v": at_heads(1, zero_ablate())}
    with_heads = {Z: at_heads([2, 3], zero_ablate())}
    one, two = (run(grouped, PROMPTS, e, grad=False) for e in (with_one, with_heads))
    mask = one.batch.mask
    torch.testing.assert_close(one.logits[mask], two.logits[mask])


def test_at_patterns_positions_are_queries_or_keys(toy: Any):
    site = f"blocks.0.{PATTERN}"
    before, after, _ = written(toy, site, at_positions("last", zero_ablate()))
    assert bool((after[0, :, 4] == 0).all())
    assert torch.equal(after[0, :, :4], before[0, :, :4])
    keys = at_positions([0], zero_ablate(), axis="key")
    before, after, _ = written(toy, site, at_heads(2, keys))
    assert bool((after[:, 2, :, 0] == 0).all())
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert torch.equal(after[:, 2, :, 1:], before[:, 2, :, 1:])


def test_units_edit_where_the_mask_is_true(toy: Any):
    mask = torch.arange(8) % 2 == 0
    before, after, _ = written(toy, Z, units(mask)(zero_ablate()))
    assert bool((after[..., ::2] == 0).all())
    assert torch.equal(after[..., 1::2], before[..., 1::2])
    one = Labelled(torch.tensor([False, True, False]), "batch")
    before, after, _ = written(toy, Z, units(one)(zero_ablate()))
    assert bool((after[1] == 0).all())
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_a_subspace_edit_leaves_the_complement(toy: Any):
    basis = torch.stack([V, V.flip(0) ** 2])
    door = subspace(None, basis, origin=V)
    before, after, _ = written(toy, Z, door(scale(0.0)))
    delta = after - before
    torch.testing.assert_close(
        (after - V) @ torch.linalg.pinv(basis), 0 * delta[..., :2]
    )
    _, residue = torch.linalg.qr(basis.T)
    orthogonal = delta - delta @ torch.linalg.pinv(basis) @ basis
    torch.testing.assert_close(orthogonal, torch.zeros_like(delta))
    assert residue.shape == (2, 2)


# --- functional, typed, never silent ---


@pytest.mark.parametrize("name", [*PLAIN, "patch"])
def test_nothing_is_changed_in_place(toy: Any, name: str):
    """Neither the site's value, nor what shares memory with it, nor a donor."""
    verb = patch_from() if name == "patch" else PLAIN[name][0]
    before: list[torch.Tensor] = []

    def keep(value: torch.Tensor, _site: object) -> torch.Tensor:
        before.extend((value, value.clone()))
        return value

    run(toy, PROMPTS, {Z: compose(keep, verb)}, grad=False)
    assert torch.equal(before[0], before[1])


def test_an_edit_of_a_branch_leaves_the_stream(toy: Any):
    """`ln1.hook_in` shares memory with the stream; the skip path must not change."""
    batch = toy.batch(ROWS)
    site = inventory(toy)["blocks.0.hook_in"]
    before = site_values(toy, batch, [site])[site.name]
    seen: list[torch.Tensor] = []
    edits = {"blocks.0.ln1.hook_in": zero_ablate()}
    resolved = resolve_edits(toy, edits, batch)
    added = inventory(toy)["blocks.0.hook_attn_out"].site
    middle = inventory(toy)["blocks.0.ln2.hook_in"].site
    taps = [*resolved.taps, Tap(added, seen.append), Tap(middle, seen.append)]
    toy.run(batch, taps)
    torch.testing.assert_close(seen[1] - seen[0], before)


def test_a_donor_is_not_aliased(toy: Any):
    donor = torch.zeros(3, 5, 4, 8, dtype=torch.float64)
    verb = replace_with(donor)
    donor.fill_(9.0)
    _, after, _ = written(toy, Z, verb)
    assert bool((after == 0).all())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_backward_works_through_an_edit_at_every_writable_site(family: str):
    """Patterns, norms and their inner values too: in place it would break there."""
    model = model_of(family)
    batch = model.batch([[1, 2, 3], [4, 5, 6]])
    weight = model.bridge.unembed.original_component.weight
    first = next(p for p in model.bridge.blocks[0].parameters() if p.ndim == 2)
    for site in inventory(model):
        if not site.writable or site.layer == 1 or site.axes[0] != "batch":
            continue
        logits = run(model, batch, {site.name: scale(0.9)}, grad=True).logits
        found = torch.autograd.grad(
            logits[..., :7].sum(), [weight, first], allow_unused=True
        )
        assert all(bool(torch.isfinite(g).all()) for g in found if g is not None)
        assert found[1] is not None, site.name


@pytest.mark.parametrize("family", ["gpt2", "neox_parallel", "llama", "gemma2"])
def test_inside_a_norm_scale_and_value_are_two_sides_of_one_division(family: str):
    """Halving a norm's scale doubles what it normalises, with equal gradients."""
    model = model_of(family)
    found = []
    weight = next(p for p in model.bridge.blocks[0].parameters() if p.ndim == 2)
    for site, factor in (("hook_scale", 0.5), ("hook_normalized", 2.0)):
        edits = {f"blocks.1.ln1.{site}": scale(factor)}
        outcome = run(model, PROMPTS, edits, METRIC)
        assert outcome.metric is not None
        (gradient,) = torch.autograd.grad(outcome.metric.sum(), weight)
        found.append((outcome.metric, gradient))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)
    plain = baseline(model, PROMPTS, METRIC).metric
    assert float((found[0][0].detach() - plain).abs().max()) > 1e-3  # type: ignore[operator]


BAD_DONORS = {
    "donor_complex": torch.ones(8, dtype=torch.complex64),
    "donor_not_floating": torch.ones(8, dtype=torch.int64),
    "donor_not_finite": torch.tensor([1.0, float("nan")]),
    "donor_unreadable": [[1.0], [2.0, 3.0]],
}


@pytest.mark.parametrize("expected", BAD_DONORS)
@pytest.mark.parametrize("verb", [add, replace_with, patch_from, project_onto])
def test_unfit_donors_are_refused_by_type(expected: str, verb: Any):
    if verb is patch_from and expected == "donor_unreadable":
        return
    assert code(lambda: verb(BAD_DONORS[expected])) == expected


def test_a_donor_that_overflows_the_model_s_precision_is_refused():
    small = family_model("gpt2", torch.float32)
    edits = {MLP: add(torch.tensor(1e60, dtype=torch.float64))}
    assert code(lambda: run(small, PROMPTS, edits)) == "donor_overflows"


@pytest.mark.parametrize(
    "donor",
    [torch.ones(3), torch.ones(5, 4, 7), torch.ones(2, 3, 5, 4, 8), torch.ones(5, 8)],
)
def test_a_donor_never_enlarges_and_its_axes_are_said(toy: Any, donor: torch.Tensor):
    with pytest.raises(ArgumentError) as refused:
        run(toy, PROMPTS, {Z: replace_with(donor)})
    assert refused.value.code == "donor_shape_invalid"
    for fact in ("batch, pos, head, feature", str(tuple(donor.shape)), "(3, 5, 4, 8)"):
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    "result",
    [
        lambda x: None,
        lambda x: 0.0,
        lambda x: x[..., :1],
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to("meta"),
    ],
)
def test_a_result_of_another_shape_type_or_device_is_refused(toy: Any, result: Any):
    edits = {Z: lambda value, site: result(value)}
    assert code(lambda: run(toy, PROMPTS, edits)) == "edit_result_invalid"


def test_a_result_that_is_not_a_number_is_refused(toy: Any):
    edits = {Z: lambda value, site: (value - value) / (value - value)}
    assert code(lambda: run(toy, PROMPTS, edits)) == "edit_result_not_finite"


REFUSED = {
    "mean_source_needed": lambda: mean_ablate(),
    "clamp_bounds_missing": lambda: clamp(),
    "compose_empty": lambda: compose(),
    "direction_zero": lambda: project_out(torch.zeros(8)),
    "basis_rank_deficient": lambda: project_onto(torch.ones(2, 8)),
    "basis_shape_invalid": lambda: project_onto(torch.tensor(1.0)),
    "seed_needed": lambda: add_noise(1.0, seed=None),  # type: ignore[arg-type]
    "number_invalid": lambda: scale(float("inf")),
    "permutation_source_invalid": lambda: permute_batch(),
    "permutation_invalid": lambda: permute_batch([0, 0, 1]),
    "positions_invalid": lambda: at_positions("first", scale(1.0)),
    "heads_invalid": lambda: at_heads([], scale(1.0)),
    "mask_not_bool": lambda: units(torch.ones(8)),
    "selection_empty": lambda: units(torch.zeros(8, dtype=torch.bool)),
    "source_invalid": lambda: patch_from("corrupt"),
    "edit_not_a_verb": lambda: compose(3),
    "swap_site_invalid": lambda: swap_with(torch.ones(3)),  # type: ignore[arg-type]
    "origin_shape_invalid": lambda: subspace(None, V, origin=torch.ones(3)),
    "donor_axes_invalid": lambda: Labelled(torch.ones(3, 3), "batch"),
    "edit_site_missing": lambda: Edit(units(V > 0), scale(1.0)),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_a_verb_that_makes_no_sense_is_refused_when_it_is_made(expected: str):
    assert code(REFUSED[expected]) == expected


def test_numbers_of_positions_and_heads_are_whole():
    wrong: list[Any] = [5, [1.5], ["last"], [[0, 1.5]], [True]]
    for rows in wrong:
        assert code(lambda r=rows: PerExample(r)) == "positions_invalid"
    wrong = [*wrong[1:3], 1.5, "all"]
    for heads in wrong:
        assert code(lambda h=heads: at_heads(h, scale(1.0))) == "heads_invalid"


PASSES = {
    "edits_empty": {},
    "site_unknown": {"blocks.0.hook_mlp_outt": zero_ablate()},
    "site_gated": {"blocks.*.attn.hook_result": zero_ablate()},
    "site_never_fires": {"blocks.0.attn.qkv.hook_in": zero_ablate()},
    "site_not_floating": {"embed.hook_in": zero_ablate()},
    "position_out_of_range": {Z: at_positions(3, zero_ablate())},
    "head_out_of_range": {Z: at_heads(4, zero_ablate())},
    "site_has_no_heads": {MLP: at_heads(0, zero_ablate())},
    "site_axis_unknown": {Z: at_positions(0, zero_ablate(), axis="key")},
    "donor_rows_mismatch": {Z: patch_from(rows=[0, 9, 0])},
    "edit_duplicate_site": {Z: zero_ablate(), "blocks.*.attn.o.hook_in": scale(2.0)},
    "mean_positions_missing": {
        Z: mean_ablate(Prompts.from_tokens([[1, 2]], [[1, 2]]), positional=True)
    },
    "resample_donor_missing": {
        Z: resample_rows_from(Prompts.from_tokens([[1, 2]], [[1, 2]]), seed=0)
    },
}


@pytest.mark.parametrize("expected", PASSES)
def test_an_edit_that_cannot_be_done_is_refused(toy: Any, expected: str):
    assert code(lambda: run(toy, PROMPTS, PASSES[expected])) == expected


def test_two_spellings_of_a_site_are_one_site(toy: Any):
    """Applied twice it would be another edit; in order it is said so."""
    both = {"blocks.0.hook_mlp_out": scale(2.0), "blocks.0.mlp.hook_out": scale(2.0)}
    with pytest.raises(ArgumentError) as refused:
        run(toy, PROMPTS, both)
    assert refused.value.code == "edit_duplicate_site"
    assert "compose" in str(refused.value)
    once = run(toy, PROMPTS, {MLP: compose(scale(2.0), scale(2.0))}, grad=False)
    plain = run(toy, PROMPTS, {MLP: scale(4.0)}, grad=False)
    torch.testing.assert_close(once.logits, plain.logits)


def test_an_unexpected_number_of_sites_is_refused(toy: Any):
    edit = Edit("blocks.*.hook_in", scale(1.0), expect=3)
    assert code(lambda: run(toy, PROMPTS, edit)) == "edit_count_unexpected"
    run(toy, PROMPTS, Edit("blocks.*.hook_in", scale(1.0), expect=2), grad=False)


def test_an_edit_that_never_fires_is_an_error(toy: Any):
    batch = toy.batch(ROWS)
    resolved = resolve_edits(toy, {Z: zero_ablate()}, batch)
    toy.run(batch)
    assert code(resolved.check) == "edit_never_fired"
    with (
        pytest.raises(ArgumentError, match="zero times"),
        bind(toy, {Z: zero_ablate()}),
    ):
        pass


# --- doors ---


def test_bind_edits_the_user_s_own_calls_and_leaves_nothing_behind(model: Any):
    batch = model.batch(ROWS)
    edits = {"blocks.*.attn.hook_z": at_positions("last", zero_ablate())}
    plain = model.run(batch)
    hooks = [len(m._forward_hooks) for m in model.bridge.modules()]
    arguments = {"attention_mask": batch.mask.long(), "prepend_bos": False}
    with torch.no_grad(), bind(model, edits) as bound:
        first = model.bridge(batch.tokens, **arguments)
        inside = model.run(batch)
        ragged = model.bridge(batch.tokens[:1], prepend_bos=False)
    expected = run(model, batch, edits, grad=False).logits
    for found in (first, inside):
        torch.testing.assert_close(
            found[batch.mask], expected[batch.mask], rtol=1e-6, atol=1e-6
        )
    torch.testing.assert_close(ragged, expected[:1], rtol=1e-6, atol=1e-6)
    assert len(bound.record) == 2
    assert [len(m._forward_hooks) for m in model.bridge.modules()] == hooks
    assert all(not p.fwd_hooks for p in model.bridge.hook_dict.values())
    assert torch.equal(model.run(batch), plain)


def test_an_error_inside_bind_leaves_nothing_behind(toy: Any):
    with pytest.raises(ArgumentError), bind(toy, {Z: lambda value, site: None}):
        toy.run(toy.batch(ROWS))
    assert all(not p.fwd_hooks for p in toy.bridge.hook_dict.values())


@pytest.mark.parametrize("family", [*TOYS, "opt", "gemma2"])
def test_resuming_gives_the_numbers_of_the_live_pass(family: str):
    model = model_of(family)
    edits = {"blocks.1.attn.hook_z": at_heads(0, scale(0.3))}
    live = run(model, PROMPTS, edits, cl.logit_diff())
    replayed = resume(model, PROMPTS, edits, 1, cl.logit_diff())
    torch.testing.assert_close(replayed.metric, live.metric)
    early = {"blocks.0.attn.hook_z": scale(0.3)}
    assert code(lambda: resume(model, PROMPTS, early, 1)) == "edit_before_frontier"
    assert code(lambda: resume(model, PROMPTS, early, 2)) == "layer_out_of_range"
    bad = torch.zeros(1)
    stream = lambda: resume(model, PROMPTS, edits, 1, stream=bad)
    assert code(stream) == "stream_shape_invalid"


_KEPT: list[torch.Tensor] = []


def _kept(value: torch.Tensor, site: object) -> torch.Tensor:
    _KEPT.append(value.detach())
    return value


@pytest.mark.parametrize("family", [*TOYS, "opt"])
def test_capture_takes_edits(family: str):
    model = model_of(family)
    prompts = Prompts.from_tokens([[1, 2, 3], [4, 5, 6]], [[1, 3, 3], [4, 4, 6]])
    trace = cl.capture(model, prompts, ["blocks.0.attn.hook_z"], edits={Z: scale(0.0)})
    assert float(trace[inventory(model)[Z].name].abs().max()) == 0.0
    trace = cl.capture(model, prompts, ["blocks.1.hook_out"], edits={Z: patch_from()})
    live = run(
        model, prompts, {Z: patch_from(), "blocks.1.hook_out": _kept}, grad=False
    )
    torch.testing.assert_close(
        trace["blocks.1.hook_out"], _KEPT[-1], rtol=1e-6, atol=1e-6
    )
    assert trace.edits == live.record[:1]


class Counting:
    """Counts the forwards of a model."""

    def __init__(self, model: Any):
        self.n = 0
        self._handle = model.bridge.original_model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.n += 1

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


SETS = [
    {Z: zero_ablate()},
    {"blocks.*.hook_mlp_out": add_noise(0.4, seed=3)},
    {"blocks.1.hook_out": patch_from()},
    {"blocks.*.attn.hook_z": at_heads(0, at_positions("last", scale(2.0)))},
    {"blocks.1.hook_mlp_out": swap_with("blocks.0.hook_mlp_out")},
]
MIDDLE = {"blocks.*.hook_resid_mid": at_positions("last", scale(0.5))}


@pytest.mark.parametrize("family", [*TOYS, "opt"])
def test_sets_as_rows_of_one_forward_equal_a_loop(family: str):
    model, metric = model_of(family), cl.kl()
    sets = SETS if family == "neox_parallel" else [*SETS, MIDDLE]
    base = baseline(model, PROMPTS, metric)
    loop = [run(model, PROMPTS, s, metric, base=base, grad=False) for s in sets]
    for size in (1, 2, 6):
        found = run_each(
            model, PROMPTS, sets, metric, base=base, sets_per_pass=size, grad=False
        )
        for one, other in zip(found, loop, strict=True):
            torch.testing.assert_close(one.metric, other.metric, rtol=1e-9, atol=1e-9)
            assert one.record == other.record


def test_without_row_batching_sets_run_one_by_one(
    toy: Any, monkeypatch: pytest.MonkeyPatch
):
    base = baseline(toy, PROMPTS)
    lacking = toy.capabilities - {Capability.ROW_BATCHING}
    monkeypatch.setattr(toy, "capabilities", lacking)
    with Counting(toy) as count:
        run_each(toy, PROMPTS, SETS[:2], base=base, grad=False)
    assert count.n == 2
    monkeypatch.setattr(toy, "capabilities", toy.capabilities - {Capability.RESUME})
    attempt = lambda: resume(toy, PROMPTS, {"blocks.1.hook_out": scale(1.0)}, 1)
    assert code(attempt) == "capability_missing"


def test_sites_that_all_examples_share_run_alone_and_take_no_example_s_value():
    model = model_of("llama")
    shared = "rotary_emb.hook_cos"
    base = baseline(model, PROMPTS)
    with Counting(model) as count:
        run_each(model, PROMPTS, [{shared: scale(0.5)}, SETS[0]], base=base, grad=False)
    assert count.n == 2
    attempt = lambda: run(model, PROMPTS, {shared: patch_from(rows=[0, 1, 2])})
    assert code(attempt) == "site_not_per_example"


def test_a_donor_of_another_precision_is_cast_and_the_record_says_so(toy: Any):
    _, after, notes = written(toy, MLP, replace_with(torch.ones(32)))
    assert after.dtype == torch.float64
    assert notes == [{"verb": "donor", "cast": "torch.float32 to torch.float64"}]


def test_the_baseline_runs_once_and_is_not_repeated(toy: Any):
    metric = cl.logit_diff()
    with Counting(toy) as count:
        base = baseline(toy, PROMPTS, metric)
        assert count.n == 1
        plain = [{Z: zero_ablate()}, {Z: scale(0.5)}, {Z: add(V)}]
        for edits in plain:
            run(toy, PROMPTS, edits, metric, base=base, grad=False)
        assert count.n == 4
        run_each(toy, PROMPTS, plain, metric, base=base, grad=False)
        assert count.n == 5


def test_a_metric_that_compares_needs_the_baseline(toy: Any):
    attempt = lambda: run(toy, PROMPTS, {Z: zero_ablate()}, cl.kl())
    assert code(attempt) == "baseline_needed"


def test_other_prompts_are_refused(toy: Any):
    assert code(lambda: run(toy, ROWS, {Z: zero_ablate()})) == "prompts_invalid"
    batch = toy.batch(ROWS)
    assert code(lambda: run(toy, batch, {Z: patch_from()})) == "source_needs_prompts"


# --- verbs as values ---


def test_verbs_are_equal_by_content(toy: Any):
    assert scale(0.5) == scale(0.5) != scale(0.25)
    assert add(torch.ones(3)) == add(torch.ones(3))
    assert add(torch.ones(3)) != add(torch.zeros(3))
    assert hash(at_heads([1], zero_ablate())) == hash(at_heads(1, zero_ablate()))
    assert len({scale(1.0), scale(1.0), scale(2.0)}) == 2
    with pytest.raises(AttributeError):
        scale(1.0).name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        scale(1.0).params["factor"] = 2.0  # type: ignore[index]


@pytest.mark.real_model
def test_edits_on_smollm2(smollm2: Any):
    model = cl.load_model(str(smollm2))
    prompts = cl.tasks.ioi(n=3, seed=0, model=model)
    metric = cl.logit_diff()
    base = baseline(model, prompts, metric)
    patched = run(
        model, prompts, {"blocks.29.hook_out": patch_from()}, metric, grad=False
    )
    rows = [list(row) for row in prompts.corrupted]
    donor = model.batch(rows, prompts.answers, prompts.wrong_answers)
    torch.testing.assert_close(
        patched.metric, metric(model.run(donor), donor), rtol=1e-3, atol=1e-3
    )
    heads = {"blocks.*.attn.hook_v": at_heads(1, zero_ablate())}
    whole = {"blocks.*.attn.hook_z": at_heads([3, 4, 5], zero_ablate())}
    one, two = (
        run(model, prompts, e, metric, grad=False).metric for e in (heads, whole)
    )
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert base.metric is not None
    assert float((base.metric - one).abs().max()) > 0.1  # type: ignore[operator]
    middle = {"blocks.3.hook_resid_mid": patch_from()}
    attention = {
        "blocks.3.hook_in": patch_from(),
        "blocks.3.hook_attn_out": patch_from(),
    }
    one, two = (
        run(model, prompts, e, metric, grad=False).metric for e in (middle, attention)
    )
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
