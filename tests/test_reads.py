"""Reads: what the numbers mean, and everything that is refused."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import circuitlab.frozen
from circuitlab.backends import Tap, TokenBatch, load_model
from circuitlab.errors import ArgumentError, CircuitlabError, InternalError, ReadError
from circuitlab.frozen import DEFAULT, Policy
from circuitlab.measure import Measurement, plan_batches, resolve_population
from circuitlab.metrics import answer_logprob, custom, kl, logit_diff
from circuitlab.notices import CircuitlabWarning, forget_notices
from circuitlab.prompts import Prompts
from circuitlab.reads import read, read_dataset, seed
from circuitlab.reductions import REDUCTIONS
from circuitlab.targets import resolve_targets
from circuitlab.trace import capture
from tests.read_models import OTHERS, TOKENS, huggingface, model

LOGIT = seed("unembed.hook_out", index=(0, -1, 7))
FAMILIES = ["gpt2", "llama", "neox", "neox_sequential", "gemma2", "opt", "bloom", "phi"]
FAMILIES += ["mixtral"]


@pytest.fixture(autouse=True)
def quiet():
    """Every test starts as a fresh process as far as once-only warnings go."""
    forget_notices()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="read_frozen_default")
        yield
    forget_notices()


def refused(code: str, reason: str | None = None):
    """A refusal with this code (and reason)."""

    class Check:
        def __enter__(self):
            self.context = pytest.raises(CircuitlabError)
            self.found = self.context.__enter__()
            return self.found

        def __exit__(self, *error):
            done = self.context.__exit__(*error)
            assert self.found.value.code == code
            assert reason in (None, self.found.value.fields.get("reason"))
            return done

    return Check()


# --- methods and reductions ---


def test_methods_are_what_they_say():
    trace = capture(model(), TOKENS, backward_ready=True)
    site = "blocks.0.attn.hook_z"
    (gradient,) = torch.autograd.grad(
        trace["logits"][0, -1, 7], [trace[site]], retain_graph=True
    )
    value = trace[site].detach()
    expected = {
        "grad": gradient,
        "activation": value,
        "activation_x_grad": value * gradient,
    }
    for method, tensor in expected.items():
        gradient_options = {"target": LOGIT, "frozen": None}
        options = gradient_options if method != "activation" else {}
        row = read(trace, within=site, method=method, reduce=None, **options)[site]  # type: ignore[arg-type]
        assert torch.equal(row.value, tensor)
        assert (row.method, row.reduction, row.grain) == (method, None, "element")
        assert row.score is None
        assert row.status == "ok"


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_reductions_are_over_every_selected_element(reduction: str, masked: bool):
    trace = capture(model(), TOKENS)
    site = "blocks.1.mlp.hook_post"
    dense = read(trace, LOGIT, site, None, reduce=None)[site].value.reshape(-1)
    mask = torch.zeros(trace.record(site).shape, dtype=torch.bool)
    mask[:, 2:, ::3] = True
    if masked:
        dense = dense[mask.reshape(-1)]
    expected = {
        "sum": dense.sum(),
        "mean": dense.mean(),
        "sum_of_abs": dense.abs().sum(),
        "abs_of_sum": dense.sum().abs(),
        "l2": dense.square().sum().sqrt(),
        "max_abs": dense.abs().max(),
    }[reduction]
    within = {site: mask} if masked else [site]
    row = read(trace, LOGIT, within, None, reduce=reduction)[site]  # type: ignore[arg-type]
    assert row.score == pytest.approx(float(expected), rel=1e-12)
    assert row.reduction == reduction


def test_activation_takes_no_target_and_no_frozen_policy():
    trace = capture(model(), TOKENS, ["embed", "blocks.0.hook_out"])
    table = read(trace, method="activation")
    assert table.target_ids == (None,)
    assert table.provenance["frozen_digest"] == "none"
    assert table.provenance["autograd_calls"] == 0
    assert table["embed.hook_out"].score == pytest.approx(
        float(trace["embed.hook_out"].sum())
    )
    assert table["blocks.1.hook_out"].status == "unavailable"
    with refused("read_option_invalid"):
        read(trace, LOGIT, method="activation")
    with refused("read_option_invalid"):
        read(trace, method="activation", frozen=["blocks.0.mlp.hook_out"])


def test_options_are_checked_literals():
    trace = capture(model(), TOKENS)
    for options in (
        {"method": "gradient"},
        {"reduce": "total"},
        {"target_batch_size": 0},
        {"target_batch_size": True},
        {"target_batch_size": "large"},
        {"reduce": None, "per_example": True},
    ):
        with refused("read_option_invalid") as found:
            read(trace, LOGIT, **options)  # type: ignore[arg-type]
        assert "expected" in found.value.fields


# --- targets ---


def test_a_seed_is_the_same_target_in_every_spelling():
    trace = capture(model(), TOKENS, backward_ready=True)
    shape = trace.record("unembed").shape
    one_hot = torch.zeros(shape, dtype=torch.int64)
    one_hot[0, -1, 7] = 1
    targets = [
        LOGIT,
        seed("unembed", index=[0, 4, 7]),
        seed("unembed.hook_out:1", index=(-3, "last", 7)),
        seed("hook_unembed", cotangent=one_hot),
        trace["logits"][0, -1, 7],
        lambda t: t["unembed.hook_out"][0, -1, 7],
    ]
    table = read(trace, targets, frozen=None)
    assert table.target_ids == ("t0", "t1", "t2", "t3", "t4", "t5")
    first = table.target("t0")
    for target in table.target_ids[1:]:
        other = table.target(str(target))
        for (_, kind, address), row in first.items():
            assert other[target, kind, address].score == pytest.approx(
                row.score, rel=1e-12, abs=1e-15
            )


def test_a_cotangent_is_an_inner_product():
    trace = capture(model(), TOKENS)
    weights = torch.randn(trace.record("blocks.0").shape, dtype=torch.float64)
    table = read(trace, seed("blocks.0", cotangent=weights), frozen=None)
    row = table["blocks.0.hook_out"]
    expected = float((trace["blocks.0.hook_out"] * weights).sum())
    assert row.score == pytest.approx(expected)
    assert "blocks.1.hook_out" not in {site for _, _, (site, _) in table}


def test_a_callable_with_a_1d_result_is_a_batch_of_targets():
    trace = capture(model(), TOKENS, backward_ready=True)
    table = read(
        trace,
        [lambda t: t["logits"][0, -1, :5], LOGIT, lambda t: t["logits"][1, -1, 3]],
        frozen=None,
    )
    assert table.target_ids == (*(f"t0[{i}]" for i in range(5)), "t1", "t2")
    for i in range(5):
        alone = read(trace, seed("unembed", index=(0, -1, i)), frozen=None)
        row = table[f"t0[{i}]", "ACT", ("embed.hook_out", 1)]
        assert row.score == pytest.approx(alone["embed.hook_out"].score)


def test_a_metric_is_seeded_at_the_logits():
    prompts = Prompts.from_tokens(TOKENS, OTHERS, [3, 4, 5], [6, 7, 8])
    trace = capture(model(), prompts, ["logits", "embed"])
    table = read(trace, logit_diff(), frozen=None, within="embed")
    logits = capture(model(), prompts, backward_ready=True)
    rows = torch.arange(3)
    value = logits["logits"][:, -1]
    total = (
        value[rows, torch.tensor([3, 4, 5])] - value[rows, torch.tensor([6, 7, 8])]
    ).sum()
    (gradient,) = torch.autograd.grad(total, [logits["embed.hook_out"]])
    expected = float((gradient * trace["embed.hook_out"]).sum())
    assert table["embed.hook_out"].score == pytest.approx(expected)


def test_metrics_that_give_nothing_to_read_are_refused():
    prompts = Prompts.from_tokens(TOKENS, OTHERS, [3, 4, 5], [6, 7, 8])
    trace = capture(model(), prompts, ["logits"])
    with refused("metric_stationary_at_clean"):
        read(trace, kl(), method="grad")

    def blind(logits: Tensor, batch: TokenBatch) -> Tensor:
        return logits.detach().sum(-1)

    with refused("metric_ignores_logits"):
        read(trace, custom(blind, higher_is_better=True), method="grad")

    def moved(logits: Tensor, batch: TokenBatch) -> Tensor:
        assert batch.clean_logits is not None
        return (logits - batch.clean_logits)[:, 7]

    table = read(trace, custom(moved, higher_is_better=True), method="grad")
    per_row = seed("logits", index=(slice(None), "last", 7))
    expected = read(trace, per_row, method="grad")
    assert [r.score for r in table.values()] == [r.score for r in expected.values()]
    long = Prompts.from_tokens(TOKENS, OTHERS, [[[3, 4]], [[4, 5]], [[5, 6]]])
    with refused("read_target_invalid", "answers_not_appended"):
        read(capture(model(), long, ["logits"]), answer_logprob(), method="grad")
    with refused("read_payload_unretained"):
        read(capture(model(), prompts, []), logit_diff(), method="grad")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ((0, -1), "index_rank"),
        ((0, -1, 61), "index_range"),
        ((0, 5, 7), "index_range"),
        ((-4, 0, 7), "index_range"),
        ((True, 0, 7), "index_range"),
        ((0, 0.5, 7), "index_range"),
    ],
)
def test_a_wrong_index_is_refused_with_the_recorded_shape(index, reason):
    trace = capture(model(), TOKENS, save=[])
    with refused("read_target_invalid", reason) as found:
        read(trace, seed("unembed", index=index))
    assert found.value.fields["recorded_shape"] == (3, 5, 61)
    assert "[3, 5, 61]" in str(found.value)


def test_a_wrong_cotangent_is_refused():
    trace = capture(model(), TOKENS, save=[])
    good = torch.ones(3, 5, 61)
    bad = {
        "cotangent_shape": torch.ones(5, 61),
        "cotangent_dtype": good.to(torch.complex64),
        "not_finite": good * torch.nan,
    }
    for reason, cotangent in bad.items():
        with refused("read_target_invalid", reason):
            read(trace, seed("unembed", cotangent=cotangent))
    with refused("read_target_invalid", "seed_arguments"):
        seed("unembed")
    with refused("read_target_invalid", "seed_arguments"):
        seed("unembed", index=(0, 0, 0), cotangent=good)
    with refused("read_site_unaddressable"):
        read(trace, seed("embed.hook_in", index=(0, 0)))


def test_wrong_expressions_are_refused_and_name_the_seeded_spelling():
    live = capture(model(), TOKENS, backward_ready=True)
    saved = capture(model(), TOKENS)
    logits = live["logits"]
    bad = {
        "detached": saved["logits"][0, -1, 7],
        "bare_1d": logits[0, -1],
        "rank": logits[0],
        "not_finite": logits[0, -1, 7] * torch.inf,
        "dtype": logits[0, -1, 7].to(torch.complex128),
    }
    for reason, target in bad.items():
        with refused("read_target_invalid", reason) as found:
            read(live, target)
        assert "seed('unembed.hook_out'" in str(found.value)
    with refused("read_target_invalid", "kind"):
        read(live, lambda _: 3.0)
    with refused("read_target_invalid", "kind"):
        read(live, "logits")
    for nothing in (None, []):
        with refused("read_target_invalid", "missing"):
            read(live, nothing)


# --- the population ---


def test_an_implicit_population_counts_what_it_leaves_out():
    trace = capture(model(), TOKENS, save="all")
    table = read(trace, [LOGIT, seed("blocks.0.hook_out", index=(0, 0, 0))])
    counts = table.provenance["excluded_counts"]
    sites = len(trace.population)
    assert table.provenance["population_size"] == sites
    assert len(table) + sum(counts.values()) == 2 * sites
    off_graph = [r.site for r in trace.population if r.address is None]
    assert counts["not_differentiable"] == 2 * len(off_graph) > 0
    second = table.target("t1")
    # The last ones are names of the target's own tensor.
    own = {"blocks.1.hook_in", "blocks.1.ln1.hook_in"}
    later = ("blocks.1", "ln_final", "unembed")
    found = {site for _, _, (site, _) in second}
    assert {site for site in found if site.startswith(later)} == own
    assert set(table.status_counts) == {"ok"}


def test_an_explicit_population_keeps_honest_rows():
    trace = capture(model(), TOKENS)
    target = seed("blocks.0.hook_out", index=(0, 0, 0))
    named = ["blocks.1.hook_out", "embed.hook_in", "blocks.0.hook_in"]
    table = read(trace, target, named)
    found = {r.address[0]: (r.status, r.status_reason, r.score) for r in table.values()}
    assert found["blocks.1.hook_out"] == ("unreachable", "not_upstream_of_target", None)
    assert found["embed.hook_in"] == ("not_differentiable", "not_floating", None)
    assert found["blocks.0.hook_in"][0] == "ok"
    # Rows stand in firing order, whatever order was asked for.
    assert [a[0] for _, _, a in table] == [
        "embed.hook_in",
        "blocks.0.hook_in",
        "blocks.1.hook_out",
    ]


def test_a_numeric_zero_is_ok():
    trace = capture(model(), TOKENS)
    table = read(
        trace, LOGIT, ["blocks.1.attn.hook_q"], frozen=["blocks.1.attn.hook_z"]
    )
    row = table["blocks.1.attn.q.hook_out"]
    assert (row.status, row.score) == ("ok", 0.0)


def test_unsaved_values_are_refused_if_named_and_unavailable_if_not():
    trace = capture(model(), TOKENS, ["embed"])
    named = ["blocks.0.hook_in", "embed", "blocks.1.hook_in"]
    with refused("read_payload_unretained") as found:
        read(trace, LOGIT, named)
    assert found.value.fields["addresses"] == [
        "blocks.0.hook_in:1",
        "blocks.1.hook_in:1",
    ]
    line = "capture(model, prompts, save=['blocks.0.hook_in', 'blocks.1.hook_in'])"
    assert found.value.fields["recapture"] == line
    table = read(trace, LOGIT)
    row = table["blocks.0.hook_in"]
    assert (row.status, row.status_reason) == ("unavailable", "payload_unretained")
    assert (row.retention, row.score) == ("unretained", None)
    assert table["embed.hook_out"].status == "ok"
    # The gradient needs no values at all.
    assert read(trace, LOGIT, named, method="grad").status_counts == {"ok": 3}
    with refused("read_population_empty"):
        read(trace, LOGIT, [])


def test_masks_are_checked():
    trace = capture(model(), TOKENS)
    for mask in (torch.ones(3, 5, 31, dtype=torch.bool), torch.ones(3, 5, 32)):
        with refused("read_mask_invalid"):
            read(trace, LOGIT, {"blocks.0.hook_in": mask})


# --- frozen ---


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_equals_mlp_outputs_detached_by_a_plain_hook(family: str):
    found = model(family)
    trace = capture(found, TOKENS, save=[])
    # Gemma 2 caps its logits after the unembedding.
    target = seed("logits", index=(0, -1, 7))
    table = read(trace, target, method="grad", reduce=None)
    outputs = [layer.mlp_out for layer in found.layers]
    assert all(outputs)
    kept: dict[str, Tensor] = {}
    taps = [Tap(site, lambda value: value.detach()) for site in outputs if site]
    names = {site for _, _, (site, _) in table}
    infos = [i for i in trace.inventory if i.name in names and i.through is None]

    def keep(name: str):
        return lambda value: kept.update({name: value})

    taps += [Tap(info.site, keep(info.name), raw=True) for info in infos]
    logits = found.run(found.batch(TOKENS), taps, grad=True, fast_norms=False)  # type: ignore
    live = {name: value for name, value in kept.items() if value.requires_grad}
    gradients = torch.autograd.grad(
        logits[0, -1, 7], list(live.values()), allow_unused=True
    )
    frozen = {f"{site.path}.hook_out" for site in outputs if site}
    scale = max(float(g.abs().max()) for g in gradients if g is not None)
    compared = 0
    for (name, value), gradient in zip(live.items(), gradients, strict=True):
        row = table[name].value.reshape(value.shape)
        if gradient is None:
            # Reached, but only through an MLP: nothing comes back through it.
            if name not in frozen and table[name].alias_group is None:
                assert not row.any(), name
            continue
        compared += 1
        assert torch.allclose(row, gradient, rtol=1e-9, atol=1e-12 * scale), name
    assert compared > 10
    facts = table.provenance
    assert facts["frozen_policy"] == "mlp_out"
    assert facts["frozen_requested_count"] == len(outputs)
    assert 0 < facts["frozen_fired_count"] <= facts["frozen_requested_count"]


def test_the_default_is_disclosed_once_and_in_every_table():
    trace = capture(model(), TOKENS)
    with pytest.warns(CircuitlabWarning, match="direct effects") as given:
        first = read(trace, LOGIT)
    (one,) = given
    assert one.message.code == "read_frozen_default_linearization"  # type: ignore
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = read(trace, LOGIT)
    for table in (first, second):
        assert table.provenance["warnings"][0] == circuitlab.frozen.WARNING
    total = read(trace, LOGIT, frozen=None)
    assert total.provenance["warnings"] == []
    assert read(trace, method="activation").provenance["warnings"] == []


def test_a_frozen_site_keeps_its_own_row_after_those_downstream():
    trace = capture(model(), TOKENS)
    sites = ["blocks.0.mlp.hook_out", "blocks.1.mlp.hook_out"]
    both = read(trace, LOGIT, sites, method="grad", reduce=None)
    later = read(trace, LOGIT, sites, sites[1], method="grad", reduce=None)
    total = read(trace, LOGIT, sites, None, method="grad", reduce=None)
    # The last one has nothing frozen downstream of it.
    assert torch.equal(both[sites[1]].value, total[sites[1]].value)
    # The first sees the second frozen, and not itself.
    assert torch.equal(both[sites[0]].value, later[sites[0]].value)
    assert not torch.allclose(both[sites[0]].value, total[sites[0]].value)
    assert both[sites[0]].value.any()


def test_an_intermediate_target_reaches_fewer_frozen_sites():
    trace = capture(model(), TOKENS)
    early = seed("blocks.0.hook_out", index=(0, 0, 0))
    table = read(trace, [LOGIT, early])
    reached = {r.target_id: r.frozen_reached for r in table.values()}
    assert reached == {"t0": 2, "t1": 1}
    assert {r.frozen_requested for r in table.values()} == {2}


def test_explicit_sites_replace_the_default():
    trace = capture(model(), TOKENS)
    site = "blocks.1.attn.hook_z"
    table = read(trace, LOGIT, frozen=[site])
    assert table.provenance["frozen_policy"] == "explicit"
    assert table["blocks.1.attn.v.hook_out"].score == 0
    assert table["blocks.1.mlp.hook_pre"].score != 0
    whole = torch.ones(trace.record(site).shape, dtype=torch.bool)
    masked = read(trace, LOGIT, frozen={site: whole})
    assert [r.score for r in masked.values()] == [r.score for r in table.values()]
    nothing = read(trace, LOGIT, frozen={site: ~whole})
    total = read(trace, LOGIT, frozen=None)
    assert [r.score for r in nothing.values()] == [r.score for r in total.values()]


def test_a_mask_freezes_its_elements_and_changes_the_digest():
    trace = capture(model(), TOKENS)
    site = "blocks.1.hook_in"
    half = torch.zeros(32, dtype=torch.bool)
    half[:16] = True
    masks = {"first": half, "second": ~half, "both": torch.ones(32, dtype=torch.bool)}
    tables = {
        name: read(trace, LOGIT, ["embed", "ln_final"], {site: mask})
        for name, mask in masks.items()
    }
    total = read(trace, LOGIT, ["embed", "ln_final"], None)
    halves = [tables[n]["embed"].score or 0.0 for n in ("first", "second")]
    # What each half stops adds up to everything, since the pull is linear.
    assert sum(halves) == pytest.approx(total["embed.hook_out"].score)
    assert tables["both"]["embed.hook_out"].score == 0
    every = (*tables.values(), total)
    assert len({t.provenance["frozen_digest"] for t in every}) == 4
    assert len({t.run.policy_digest for t in tables.values()}) == 3
    assert len({t["embed.hook_out"].policy_digest for t in tables.values()}) == 3


def test_freezing_an_alias_freezes_its_group_and_says_so():
    trace = capture(model(), TOKENS)
    one = read(trace, LOGIT, frozen=["blocks.0.mlp.hook_out"])
    other = read(trace, LOGIT, frozen=["blocks.0.mlp.out.hook_out"])
    assert [r.score for r in one.values()] == [r.score for r in other.values()]
    facts = one.provenance
    assert (facts["frozen_requested_count"], facts["frozen_resolved_count"]) == (1, 2)
    assert facts["frozen_alias_groups"] == [
        ["blocks.0.mlp.out.hook_out:1", "blocks.0.mlp.hook_out:1"]
    ]
    assert any("blocks.0.mlp.out.hook_out:1" in text for text in facts["warnings"])


def test_removing_a_freeze_restores_gradients_bit_for_bit():
    trace = capture(model(), TOKENS)
    before = read(trace, LOGIT, frozen=None, reduce=None)
    read(trace, LOGIT)
    read(trace, LOGIT, frozen={"blocks.0.hook_out": torch.ones(32, dtype=torch.bool)})
    after = read(trace, LOGIT, frozen=None, reduce=None)
    assert list(before) == list(after)
    assert all(torch.equal(before[k].value, after[k].value) for k in before)


def test_a_model_without_mlps_freezes_the_disclosed_empty_set(monkeypatch):
    from dataclasses import replace

    found = load_model(huggingface("gpt2"))
    trace = capture(found, TOKENS)
    shape = replace(found.shape, has_mlp=False)
    monkeypatch.setattr(found, "shape", shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = read(trace, LOGIT)
    assert table.provenance["frozen_policy"] == "mlp_out"
    assert table.provenance["frozen_requested_count"] == 0
    assert "freezes nothing" in table.provenance["warnings"][0]


def test_underivable_mlps_are_refused(monkeypatch):
    from dataclasses import replace

    found = load_model(huggingface("gpt2"))
    trace = capture(found, TOKENS)
    layers = (found.layers[0], replace(found.layers[1], mlp_out=None))
    monkeypatch.setattr(found, "layers", layers)
    with refused("default_frozen_sites_underivable") as error:
        read(trace, LOGIT)
    assert error.value.fields["layers"] == [1]
    read(trace, LOGIT, frozen=None)


def test_wrong_freezes_are_refused():
    trace = capture(model(), TOKENS)
    with refused("read_frozen_selection_invalid"):
        read(trace, LOGIT, frozen=["embed.hook_in"])
    with refused("read_frozen_policy_invalid"):
        read(trace, LOGIT, frozen=Policy("attribution_graph"))
    with refused("site_unknown"):
        read(trace, LOGIT, frozen=["blocks.0.mpl.hook_out"])
    assert Policy("mlp_out") == DEFAULT


# --- liveness and suppression ---


def test_a_users_backward_with_the_graph_kept_leaves_reads_bitwise_equal():
    trace = capture(model(), TOKENS, backward_ready=True)
    before = read(trace, LOGIT, frozen=None, reduce=None)
    trace["logits"].sum().backward(retain_graph=True)
    after = read(trace, LOGIT, frozen=None, reduce=None)
    assert list(before) == list(after)
    assert all(torch.equal(before[k].value, after[k].value) for k in before)
    for parameter in model().bridge.parameters():  # type: ignore[attr-defined]
        parameter.grad = None


def test_a_read_leaves_the_captures_counters_alone_and_runs_user_hooks():
    trace = capture(model(), TOKENS, backward_ready=True)
    calls = []
    handle = trace["blocks.0.hook_out"].register_hook(
        lambda g: calls.append(1) or g * 2
    )
    plain = capture(model(), TOKENS)
    doubled = read(trace, LOGIT, frozen=None)["embed.hook_out"].score
    assert doubled != pytest.approx(read(plain, LOGIT, frozen=None)["embed"].score)
    assert calls == [1]
    assert trace.backward_events == 0
    handle.remove()
    torch.autograd.grad(
        trace["logits"][0, -1, 7], [trace["blocks.1.hook_in"]], retain_graph=True
    )
    events = trace.backward_events
    assert events > 0
    read(trace, LOGIT, frozen=None)
    assert trace.backward_events == events


def test_state_is_restored_on_errors():
    trace = capture(model(), TOKENS, backward_ready=True)

    def fail(_):
        raise ZeroDivisionError

    handle = trace["blocks.0.hook_out"].register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        read(trace, LOGIT)
    handle.remove()
    plain = capture(model(), TOKENS)
    found = read(trace, LOGIT, frozen=None)
    expected = read(plain, LOGIT, frozen=None)
    assert [r.score for r in found.values()] == [r.score for r in expected.values()]
    torch.autograd.grad(trace["logits"].sum(), [trace["embed.hook_out"]])
    assert trace.backward_events > 0


def test_a_leak_is_an_internal_error():
    trace = capture(model(), TOKENS, backward_ready=True)
    handle = trace["blocks.0.hook_out"].register_hook(
        lambda _: setattr(trace.watch, "events", trace.watch.events + 1)
    )
    with pytest.raises(InternalError) as found:
        read(trace, LOGIT)
    handle.remove()
    assert found.value.code == "read_suppression_leak"


def test_reads_touch_no_grad_of_the_user():
    found = model()
    trace = capture(found, TOKENS)
    read(trace, LOGIT)
    assert all(p.grad is None for p in found.bridge.parameters())  # type: ignore


# --- batching ---


def test_calls_are_counted_by_cone():
    trace = capture(model(), TOKENS)
    targets = [seed("unembed", index=(0, -1, i)) for i in range(7)]
    targets.insert(3, seed("blocks.1.hook_in", index=(0, 0, 0)))
    targets += [seed("blocks.1.hook_in", index=(0, 0, i)) for i in range(3)]
    for size, calls in [(1, 11), (2, 4 + 2), (3, 3 + 2), (7, 1 + 1), (64, 2)]:
        table = read(trace, targets, target_batch_size=size)
        assert table.provenance["autograd_calls"] == calls
        assert table.provenance["batching_plan"] == {
            "requested": size,
            "batch_size": size,
            "reason": "explicit",
            "device": "cpu",
        }
    auto = read(trace, targets).provenance["batching_plan"]
    assert (auto["requested"], auto["batch_size"]) == ("auto", 32)
    assert auto["reason"] == "cpu_batches_measured_faster"


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_batched_and_sequential_reads_agree(family: str):
    trace = capture(model(family), TOKENS)
    targets = [seed("unembed", index=(0, -1, i)) for i in range(6)]
    targets.append(seed("blocks.1.hook_in", index=(0, 2, 0)))
    batched = read(trace, targets, target_batch_size=4)
    sequential = read(trace, targets, target_batch_size=1)
    assert list(batched) == list(sequential)
    for key, row in batched.items():
        other = sequential[key]
        assert row.status == other.status
        assert row.score == pytest.approx(other.score, rel=1e-9, abs=1e-13)
    assert (
        batched.provenance["excluded_counts"]
        == (sequential.provenance["excluded_counts"])
    )


def test_auto_is_sequential_where_nothing_was_measured_and_bounded_by_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    trace = capture(model(), TOKENS)
    cones = resolve_targets(trace, [LOGIT])
    population = resolve_population(trace, None, needs_payload=False)
    cuda = plan_batches("auto", population, cones, torch.device("cuda"))
    assert (cuda.batch_size, cuda.device) == (1, "cuda")
    assert cuda.reason == "not_measured_on_this_device"
    asked = plan_batches(4, population, cones, torch.device("cuda"))
    assert (asked.batch_size, asked.reason) == (4, "explicit")
    small = resolve_population(trace, "embed", needs_payload=False)
    bytes_each = 8 * 3 * 5 * (32 + 61)
    monkeypatch.setattr("circuitlab.measure.BUDGET", 5 * bytes_each)
    few = plan_batches("auto", small, cones, torch.device("cpu"))
    assert (few.batch_size, few.reason) == (5, "memory_budget")


def test_a_call_too_many_is_an_internal_error(monkeypatch: pytest.MonkeyPatch):
    trace = capture(model(), TOKENS)
    once = Measurement._cone

    def twice(self, *args):
        once(self, *args)
        once(self, *args)

    monkeypatch.setattr(Measurement, "_cone", twice)
    with pytest.raises(InternalError) as found:
        read(trace, LOGIT)
    assert found.value.code == "read_engine_call_drift"


class _Unbatchable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore
        return gradient * (1.0 if gradient.sum().item() < 1e9 else 2.0)


def test_an_operator_without_a_batching_rule_is_refused_and_taught():
    found = model()
    module = found.module("blocks.1.mlp")  # type: ignore[attr-defined]
    handle = module.register_forward_hook(lambda _m, _a, out: _Unbatchable.apply(out))
    try:
        trace = capture(found, TOKENS)
    finally:
        handle.remove()
    targets = [seed("unembed", index=(0, -1, i)) for i in range(3)]
    with refused("batched_attribution_unsupported") as error:
        read(trace, targets)
    assert error.value.fields["expected"] == "target_batch_size=1"
    table = read(trace, targets, target_batch_size=1)
    assert table.provenance["autograd_calls"] == 3


# --- memory ---


class _Live(TorchDispatchMode):
    """Counts bytes of the storages that tensors made inside hold, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, Tensor):
                self.count(value.untyped_storage())
        return found

    def count(self, storage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def held(save) -> int:
    """Bytes still held after a capture, beyond those of a capture of nothing."""
    found = model()
    with _Live() as live:
        trace = capture(found, TOKENS, save)
        kept = live.now
    assert trace.live
    return kept


def test_a_gradient_read_retains_no_payload_and_a_product_only_its_sites():
    held([])
    nothing = held([])
    one = 3 * 5 * 32 * 8
    assert held(["blocks.0.hook_in"]) == nothing + one
    # Names of one tensor share one copy.
    aliases = ["blocks.0.hook_in", "blocks.0.ln1.hook_in", "blocks.0.hook_out"]
    assert held(aliases) == nothing + 2 * one
    trace = capture(model(), TOKENS, save=[])
    assert trace.saved_bytes == 0
    assert read(trace, LOGIT, method="grad").status_counts.keys() == {"ok"}


def test_gradients_of_a_read_are_let_go():
    trace = capture(model(), TOKENS)
    targets = [seed("unembed", index=(0, -1, i)) for i in range(4)]
    with _Live() as live:
        kept = []
        for _ in range(3):
            read(trace, targets, frozen=None)
            kept.append(live.now)
    # What the first leaves are weights that its backward saw; then nothing grows.
    assert kept[1] == kept[2] == kept[0]


# --- examples ---


def test_rows_per_example_sum_to_the_batch():
    trace = capture(model(), TOKENS)
    target = seed("unembed", index=(slice(None), -1, 7))
    whole = read(trace, target, frozen=None)
    table = read(trace, target, frozen=None, per_example=True)
    assert set(table.column("sample_id")) == {"0", "1", "2"}
    assert set(table.column("n")) == {1}
    for key, row in whole.items():
        target_id, kind, address = key
        parts = [table[target_id, kind, (*address, str(i))] for i in range(3)]
        assert [part.sample_id for part in parts] == ["0", "1", "2"]
        if row.address[0] == "pos_embed.hook_in":
            continue
        assert sum(part.score or 0.0 for part in parts) == pytest.approx(
            row.score, abs=1e-12
        )


def test_a_site_without_an_example_axis_has_no_example_rows():
    trace = capture(model("llama"), TOKENS)
    table = read(trace, method="activation", per_example=True)
    rows = [r for r in table.values() if r.address[0] == "blocks.0.attn.hook_cos"]
    assert {(r.status, r.status_reason) for r in rows} == {
        ("unsupported_grain", "no_example_axis")
    }


@pytest.mark.parametrize("reduction", ["sum", "l2"])
def test_dataset_means_do_not_depend_on_the_batch_size(reduction: str):
    lengths = [[1, 2, 3, 4, 5], [3, 4, 5], [9, 1, 8, 2, 6], [7, 7, 2, 4], [1, 5]]
    prompts = Prompts.from_tokens(lengths, lengths, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    targets = [seed("unembed", index=(slice(None), "last", 7)), logit_diff()]
    tables = [
        read_dataset(
            model(),
            prompts,
            targets,
            frozen=None,
            within=["blocks.*.hook_resid_post", "embed"],
            batch_size=size,
            reduce=reduction,  # type: ignore[arg-type]
        )
        for size in (1, 2, 5)
    ]
    every = read_dataset(
        model(),
        prompts,
        targets,
        frozen=None,
        within=["blocks.*.hook_resid_post", "embed"],
        batch_size=3,
        per_example=True,
        reduce=reduction,  # type: ignore[arg-type]
    )
    for table in tables:
        assert table.provenance["sample_count"] == 5
        assert set(table.column("reduction")) == {f"{reduction}|mean_examples"}
        for (target, kind, address), row in table.items():
            parts = torch.tensor(
                [every[target, kind, (*address, str(i))].score for i in range(5)],
                dtype=torch.float64,
            )
            assert row.n == 5
            assert row.score == pytest.approx(float(parts.mean()), rel=1e-9)
            stderr = float(parts.std() / 5**0.5)
            assert row.stderr == pytest.approx(stderr, rel=1e-9)


def test_a_target_of_one_example_is_no_target_of_a_dataset():
    with refused("read_target_invalid", "one_example"):
        read_dataset(model(), TOKENS, LOGIT)


def test_progress_is_told():
    seen = []
    read_dataset(
        model(),
        TOKENS,
        seed("unembed", index=(slice(None), -1, 7)),
        method="grad",
        batch_size=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(2, 3), (3, 3)]


# --- what the table says ---


def test_provenance_and_columns():
    trace = capture(model(), TOKENS)
    table = read(trace, LOGIT)
    facts = table.provenance
    for name in (
        "schema_version",
        "rescorable",
        "trace_label",
        "capture_outcome",
        "target_reprs",
        "within_digest",
        "population_size",
        "excluded_counts",
        "frozen_policy",
        "frozen_digest",
        "frozen_requested_count",
        "frozen_resolved_count",
        "frozen_fired_count",
        "alias_group_count",
        "aliased_site_count",
        "batching_plan",
        "autograd_calls",
        "timing_s",
        "result_bytes",
        "sample_count",
        "warnings",
    ):
        assert name in facts, name
    assert facts["target_reprs"] == {"t0": "seed('unembed.hook_out', index=(0, -1, 7))"}
    assert facts["alias_group_count"] > 5
    row = table["blocks.0.attn.q.hook_out"]
    assert (row.kind, row.address) == ("ACT", ("blocks.0.attn.q.hook_out", 1))
    assert (row.shape, row.dtype, row.device) == ((3, 5, 32), "float64", "cpu")
    assert (row.resolution, row.capture_status, row.detached) == (
        "exact",
        "captured",
        True,
    )
    assert row.rescorable
    assert table["blocks.0.hook_in"].alias_group == "s1|blocks/0|in|1"


def test_digests_are_portable_and_see_what_defines_a_number():
    one = read(capture(model(), TOKENS), LOGIT)
    again = read(capture(load_model(huggingface("gpt2")), TOKENS, ["embed"]), LOGIT)
    site = "embed.hook_out"
    assert one.run.policy_digest == again.run.policy_digest
    assert one[site].policy_digest == again[site].policy_digest
    trace = capture(model(), TOKENS)
    pair = read(trace, [seed("unembed", index=(1, -1, 7)), LOGIT])
    # A row's digest is its own: what was read beside it makes no difference.
    assert pair["t1", "ACT", (site, 1)].policy_digest == one[site].policy_digest
    assert pair["t0", "ACT", (site, 1)].policy_digest != one[site].policy_digest
    others = [
        read(trace, LOGIT, frozen=None),
        read(trace, LOGIT, method="grad"),
        read(trace, LOGIT, reduce="mean"),
        read(capture(model(), TOKENS, norms="fused"), LOGIT),
    ]
    digests = {t[site].policy_digest for t in (one, *others)}
    assert len(digests) == 5


def test_a_table_holds_its_trace_weakly():
    trace = capture(model(), TOKENS)
    table = read(trace, LOGIT)
    assert table.rescorable
    there = weakref.ref(trace)
    del trace
    assert there() is None
    assert not table.rescorable
    assert not table["embed.hook_out"].rescorable


def test_unknown_names_of_a_population():
    trace = capture(model(), TOKENS)
    with pytest.raises(ArgumentError) as found:
        read(trace, LOGIT, ["blocks.0.atn.hook_q"])
    assert found.value.code == "site_unknown"
    assert found.value.fields["nearest"]
    with pytest.raises(ReadError):
        read(trace, LOGIT, method="gradd")  # type: ignore[arg-type]
