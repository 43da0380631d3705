"""Which edits let the gradient through: every door, verb and `keep_grad`, against hooks."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import family_model, hf_model, token_prompts

from circuitlab.backends import load_model
from circuitlab.errors import ArgumentError
from circuitlab.interventions import (
    Edit,
    add,
    at_positions,
    bind,
    compose,
    freeze,
    keep_grad,
    mean_ablate,
    patch_from,
    replace_with,
    resume,
    run,
    scale,
    subspace,
    units,
    zero_ablate,
)
from circuitlab.notices import CircuitlabWarning, forget_notices
from circuitlab.prompts import Prompts
from circuitlab.trace import capture

ROOT = Path(__file__).resolve().parent.parent


def _script() -> ModuleType:
    path = ROOT / "scripts" / "gradient_matrix.py"
    spec = importlib.util.spec_from_file_location("gradient_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["gradient_matrix"] = module
    spec.loader.exec_module(module)
    return module


matrix = _script()
CELLS = [
    pytest.param(case, place, door, keep, id=f"{place}-{door}-{case.name}-{keep}")
    for place in matrix.PLACES
    for case in matrix.CASES
    for door in matrix.DOORS
    for keep in (False, True)
]
CUTS = {
    "zero_ablate()",
    "replace_with(v)",
    "patch_from(donor)",
    "swap_with(site)",
    "resample_rows_from(donor, seed=0)",
    "mean_ablate(donor)",
    "scramble_elements(donor, seed=0)",
    "freeze()",
}


@pytest.fixture(scope="module")
def toy() -> Any:
    return matrix.Toy()


@pytest.fixture(scope="module")
def hands() -> dict:
    return {}


def _expected(case: Any, place: str, keep: bool) -> str:
    """The contract, said again without circuitlab."""
    name = case.name
    if name.startswith("set_affine") and place != "subspace":
        return "raises:affine_source_needs_subspace"
    if name.startswith("project") and place == "subspace":
        return "raises:subspace_edit_unsupported"
    if place == "subspace":
        return "reaches"
    cuts = name in CUTS or name == "at_positions([0], zero_ablate())"
    if cuts and keep:
        return "raises:edit_detached_from_graph"
    return "cut" if name in CUTS and place == "the site" else "reaches"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place", "door", "keep"), CELLS)
def test_a_cell_of_the_matrix_is_what_a_plain_hook_gives(
    toy: Any, hands: dict, case: Any, place: str, door: str, keep: bool
):
    cell = matrix.measured(toy, case, place, door, keep)
    assert cell.outcome == _expected(case, place, keep)
    if cell.outcome.startswith("raises"):
        return
    assert cell.warned == (door == "resume" and keep)
    kind = "resume" if door == "resume" else "live"
    if (case.name, place, kind) not in hands:
        hands[case.name, place, kind] = matrix.by_hand(toy, case, place, door)
    hand = hands[case.name, place, kind]
    assert cell.outcome == hand.outcome
    torch.testing.assert_close(cell.loss, hand.loss, rtol=1e-11, atol=1e-11)
    for found, expected in ((cell.before, hand.before), (cell.between, hand.between)):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    if door == "resume":
        assert cell.before is None


@pytest.mark.slow
def test_the_page_holds_the_matrix_as_measured(toy: Any):
    text = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.page(text, matrix.table(toy)) == text


# --- the spellings that the contract names ---


def _gradient(toy: Any, verb: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the edit writes at the site, and the gradient at the weight before it."""
    seen = []

    def look(value: torch.Tensor, site: object) -> torch.Tensor:
        seen.append(value.detach())
        return value

    logits = run(
        toy.model, toy.batch, {"blocks.0.hook_out": compose(verb, look)}
    ).logits
    (found,) = torch.autograd.grad(toy.loss(logits), toy.weights[0])
    return seen[0], found


def test_scale_by_zero_writes_zeros_and_keeps_a_zero_gradient(toy: Any):
    written, gradient = _gradient(toy, keep_grad(scale(0.0)))
    assert bool((written == 0).all())
    assert bool((gradient == 0).all())


def test_scale_by_zero_and_add_writes_the_value_with_a_zero_gradient(toy: Any):
    written, gradient = _gradient(toy, keep_grad(compose(scale(0.0), add(toy.vector))))
    assert torch.equal(written, toy.vector.expand_as(written))
    assert bool((gradient == 0).all())


def test_the_page_s_own_example(toy: Any):
    site = "blocks.0.hook_out"
    with pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, {site: keep_grad(zero_ablate())})
    error = refused.value
    assert error.code == error.fields["code"] == "edit_detached_from_graph"
    assert error.fields["site"] == site
    assert site in str(error)
    assert "keep_grad(scale(0.0))" in str(error)
    logits = run(toy.model, toy.batch, {site: keep_grad(scale(0.0))}).logits
    assert logits.requires_grad


@pytest.mark.parametrize(
    ("verb", "spelling"),
    [
        (zero_ablate(), "keep_grad(scale(0.0))"),
        (freeze(), "leave the site unedited"),
        (patch_from(torch.zeros(1)), "subspace(site, basis)"),
        (mean_ablate(torch.zeros(3, 5, 16)), "mean_ablate(dim='pos')"),
        (lambda value, site: value.detach() * 2, "compute from `value`"),
    ],
)
def test_the_refusal_names_a_spelling_that_keeps_the_graph(
    toy: Any, verb: Any, spelling: str
):
    with pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, {"blocks.0.hook_out": keep_grad(verb)})
    assert refused.value.fields["reason"] == "edit_cuts"
    assert spelling in str(refused.value)


def test_a_value_with_its_own_graph_does_not_pass_for_the_site_s(toy: Any):
    trained = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    verb = keep_grad(lambda value, site: trained.expand_as(value).clone())
    with pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, {"blocks.0.hook_out": verb})
    assert refused.value.fields["reason"] == "edit_cuts"


def test_a_written_value_trains_and_a_donor_does_not(toy: Any):
    """`replace_with` passes a value's own gradient on; `patch_from` detaches it."""
    trained = toy.donor.clone().requires_grad_(True)
    for verb, reached in ((replace_with(trained), True), (patch_from(trained), False)):
        logits = run(toy.model, toy.batch, {"blocks.0.hook_out": verb}).logits
        weight = toy.model.bridge.unembed.original_component.weight
        found = torch.autograd.grad(
            toy.loss(logits), [trained, weight], allow_unused=True
        )
        assert (found[0] is not None) == reached


def test_keep_grad_refuses_where_gradients_are_disabled(toy: Any):
    edits = {"blocks.0.hook_out": keep_grad(scale(0.5))}
    with torch.no_grad(), pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, edits)
    assert refused.value.fields["reason"] == "grad_disabled"
    with pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, edits, grad=False)
    assert refused.value.fields["reason"] == "grad_disabled"


def test_keep_grad_refuses_where_the_site_has_no_graph(toy: Any):
    edits = {"blocks.0.hook_out": keep_grad(scale(0.5))}
    with toy.model.frozen(), pytest.raises(ArgumentError) as refused:
        run(toy.model, toy.batch, edits)
    assert refused.value.fields["reason"] == "site_has_no_graph"


def test_without_keep_grad_nothing_is_checked(toy: Any):
    with torch.no_grad():
        logits = run(toy.model, toy.batch, {"blocks.0.hook_out": zero_ablate()}).logits
    assert not logits.requires_grad


def test_in_units_the_selected_elements_are_what_is_checked(toy: Any):
    site = "blocks.0.hook_out"
    door = units(toy.mask, site=site)
    inside = Edit(door, keep_grad(zero_ablate()))
    around = Edit(site, keep_grad(door(zero_ablate())))
    for edit in (inside, around):
        with pytest.raises(ArgumentError) as refused:
            run(toy.model, toy.batch, [edit])
        assert refused.value.fields["reason"] == "edit_cuts"


@pytest.mark.parametrize("outside", [True, False])
def test_the_interchange_that_trains(toy: Any, outside: bool):
    """A patched subspace: the basis and the weights before it both get gradients."""
    basis = toy.basis.clone().requires_grad_(True)
    door = subspace("blocks.0.hook_out", basis)
    verb = (
        keep_grad(door(patch_from(toy.donor)))
        if outside
        else keep_grad(patch_from(toy.donor))
    )
    edit = Edit("blocks.0.hook_out", verb) if outside else Edit(door, verb)
    logits = run(toy.model, toy.batch, [edit]).logits
    of_basis, of_weight = torch.autograd.grad(toy.loss(logits), [basis, toy.weights[0]])
    assert float(of_basis.abs().max()) > 0
    assert float(of_weight.abs().max()) > 0


def test_the_written_component_of_a_patched_subspace_is_the_donor_s(toy: Any):
    seen = []
    inside = compose(
        subspace(None, toy.basis, origin=toy.origin)(patch_from(toy.donor)),
        lambda value, site: seen.append(value.detach()) or value,
    )
    run(toy.model, toy.batch, {"blocks.0.hook_out": inside})
    inverse = torch.linalg.pinv(toy.basis)
    torch.testing.assert_close(seen[0] @ inverse, toy.donor @ inverse)


def test_the_frontier_warns_once_and_the_leaf_gets_the_gradient(toy: Any):
    forget_notices()
    edits = {"blocks.1.hook_out": keep_grad(scale(0.5))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = resume(toy.model, toy.batch, edits, 1)
        resume(toy.model, toy.batch, edits, 1)
    codes = [w.message.code for w in caught if isinstance(w.message, CircuitlabWarning)]
    assert codes == ["keep_grad_replay_frontier"]
    assert first.frontier is not None
    (found,) = torch.autograd.grad(toy.loss(first.logits), first.frontier)
    assert float(found.abs().max()) > 0
    forget_notices()


def test_live_doors_reach_the_embeddings_and_leave_grad_alone(toy: Any):
    bridge = toy.model.bridge
    flags = [(p, p.requires_grad, p.grad) for p in bridge.parameters()]
    embedding = bridge.embed.original_component.weight
    edits = {"blocks.*.attn.hook_z": at_positions("last", scale(0.5))}
    (found,) = torch.autograd.grad(
        toy.loss(run(toy.model, toy.batch, edits).logits), embedding
    )
    with bind(toy.model, edits):
        logits = bridge(toy.batch.tokens, prepend_bos=False, use_cache=False)
    (bound,) = torch.autograd.grad(toy.loss(logits), embedding)
    assert float(found.abs().max()) > 0
    torch.testing.assert_close(bound, found)
    for parameter, asked, gradient in flags:
        assert parameter.requires_grad == asked
        assert parameter.grad is gradient


def test_a_backward_through_an_edit_equals_finite_differences(toy: Any):
    """The graph that is kept is the right one."""
    edits = {"blocks.0.mlp.hook_out": compose(scale(0.7), add(toy.vector))}
    weight = toy.weights[0]
    loss = toy.loss(run(toy.model, toy.batch, edits).logits)
    (gradient,) = torch.autograd.grad(loss, weight)
    step = 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    step = step.to(weight)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step)
            values.append(toy.loss(run(toy.model, toy.batch, edits).logits))
            weight.sub_(sign * step)
    difference = (values[0] - values[1]) / 2
    torch.testing.assert_close(
        difference, (gradient * step).sum(), rtol=1e-5, atol=1e-12
    )


# --- other families, the real model, and the stream between attention and MLP ---


def _blocks(network: Any) -> Any:
    inner = getattr(network, "gpt_neox", None) or network.model
    return inner.layers


def _doors(model: Any, prompts: Prompts, edits: Any) -> dict[str, Any]:
    tokens = torch.tensor([list(row) for row in prompts.clean])
    found = {"run": run(model, prompts, edits).logits}
    trace = capture(model, prompts, ["logits"], backward_ready=True, edits=edits)
    found["capture"] = trace["logits"]
    with bind(model, edits):
        found["bind"] = model.bridge(tokens, prepend_bos=False, use_cache=False)
    return found


@pytest.mark.parametrize("family", ["neox_parallel", "neox_sequential", "llama"])
@pytest.mark.parametrize("name", ["scale", "zero_ablate", "compose"])
def test_the_doors_agree_with_a_hook_on_other_families(family: str, name: str):
    model: Any = family_model(family)
    plain = hf_model(family)
    vector = torch.linspace(-1, 1, 32, dtype=torch.float64)
    verb, by_hand = {
        "scale": (keep_grad(scale(0.3)), lambda x: 0.3 * x),
        "zero_ablate": (zero_ablate(), torch.zeros_like),
        "compose": (compose(scale(0.3), add(vector)), lambda x: 0.3 * x + vector),
    }[name]

    def hook(_module: object, _args: object, output: Any) -> Any:
        return (
            by_hand(output)
            if torch.is_tensor(output)
            else (by_hand(output[0]), *output[1:])
        )

    prompts = token_prompts()
    tokens = torch.tensor([list(row) for row in prompts.clean])
    readout = torch.randn(61, generator=torch.Generator().manual_seed(1)).double()
    handle = _blocks(plain)[0].register_forward_hook(hook)
    logits = plain(tokens, use_cache=False).logits
    handle.remove()
    weight = _named(plain, "layers.0.mlp")
    (expected,) = torch.autograd.grad(
        (logits @ readout).sum(), weight, allow_unused=True
    )
    ours = next(p for p in model.bridge.parameters() if _same(p, weight))
    for door, found in _doors(model, prompts, {"blocks.0.hook_out": verb}).items():
        (gradient,) = torch.autograd.grad(
            (found @ readout).sum(), ours, allow_unused=True
        )
        assert (gradient is None) == (expected is None), door
        if gradient is not None:
            # A plain Llama rounds its norms to float32 in float64 models too.
            largest = float(expected.abs().max())
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * largest)
    forget_notices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CircuitlabWarning)
        replayed = resume(model, prompts, {"blocks.1.hook_out": verb}, 1)
    found = torch.autograd.grad(
        (replayed.logits @ readout).sum(),
        [ours, replayed.frontier, _unembedding(model)],  # type: ignore[list-item]
        allow_unused=True,
    )
    assert found[0] is None
    assert (found[1] is None) == (name == "zero_ablate")
    forget_notices()


def _named(network: Any, part: str) -> torch.Tensor:
    return next(p for n, p in network.named_parameters() if part in n and p.ndim == 2)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _unembedding(model: Any) -> torch.Tensor:
    return model.bridge.unembed.original_component.weight


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_resid_mid_follows_the_contract_through_every_door(family: str):
    """Kept: the gradient before is that of the whole stream. Cut: it is exactly zero."""
    model: Any = family_model(family)
    prompts = token_prompts()
    weight = next(p for p in model.bridge.blocks[0].parameters() if p.ndim == 2)
    site = "blocks.1.hook_resid_mid"
    for verb, zero in ((keep_grad(scale(0.5)), False), (zero_ablate(), True)):
        edits = {site: verb}
        gradients = {}
        for door, logits in _doors(model, prompts, edits).items():
            loss = logits.double()[:, -1, 3].sum()
            (gradients[door],) = torch.autograd.grad(loss, weight)
            assert bool((gradients[door] == 0).all()) == zero
        torch.testing.assert_close(
            gradients["run"], gradients["capture"], rtol=1e-4, atol=1e-7
        )
        torch.testing.assert_close(
            gradients["run"], gradients["bind"], rtol=1e-4, atol=1e-7
        )
    with pytest.raises(ArgumentError) as refused:
        run(model, prompts, {site: keep_grad(zero_ablate())})
    assert refused.value.fields["site"] == site
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CircuitlabWarning)
        live = run(model, prompts, {site: scale(0.5)}, grad=False).logits
        replayed = resume(model, prompts, {site: keep_grad(scale(0.5))}, 1).logits
    torch.testing.assert_close(replayed, live, rtol=1e-6, atol=1e-6)
    forget_notices()


@pytest.mark.real_model
def test_the_contract_on_smollm2(smollm2: Any):
    model: Any = load_model(str(smollm2))
    prompts = Prompts.from_tokens([[504, 3575, 282]], [[504, 3575, 338]])
    site = "blocks.3.hook_out"
    embedding = model.bridge.embed.original_component.weight
    basis = torch.randn(
        4, model.shape.d_model, generator=torch.Generator().manual_seed(0)
    )
    door = subspace(site, basis)
    edits = [Edit(door, keep_grad(patch_from()))]
    query = next(p for p in model.bridge.blocks[0].parameters() if p.ndim == 2)
    logits = run(model, prompts, edits).logits
    (reached,) = torch.autograd.grad(logits[0, -1, 0], query)
    assert float(reached.abs().max()) > 0
    cut = run(model, prompts, {site: zero_ablate()}).logits
    (nothing,) = torch.autograd.grad(cut[0, -1, 0], query, allow_unused=True)
    assert nothing is None
    with pytest.raises(ArgumentError, match="keep_grad"):
        run(model, prompts, {site: keep_grad(zero_ablate())})
    assert embedding.grad is None
