"""Edge scores: equal to other tools and to plain autograd, however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import family_model, hf_model, token_prompts
from golden_toy import by_edge, toy, toy_prompts
from plain_models import plain
from torch import Tensor

from circuitlab.ablations import Mean, Resample
from circuitlab.backends import Backend, load_model
from circuitlab.edges import (
    ScoringInterrupted,
    combine,
    edge_scores,
    scores_by_node,
)
from circuitlab.errors import ArgumentError, DataError
from circuitlab.methods import EAP, EAPIG, CleanCorrupted, Exact, Method
from circuitlab.metrics import answer_logprob, custom, kl, logit_diff, normalised
from circuitlab.prompts import Prompts
from circuitlab.read_table import ReadTable
from circuitlab.store import Store
from circuitlab.tables import EdgeTable


def off(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest expected value."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.isfinite(expected).all()
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def gpt2() -> Backend:
    return family_model("gpt2")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return token_prompts(n=5)


@pytest.fixture(scope="module")
def whole(gpt2: Backend, prompts: Prompts) -> EdgeTable:
    return edge_scores(gpt2, prompts, logit_diff(), method=EAPIG(2))


# --- against other tools ---


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (EAP(), "EAP"),
        (EAPIG(5, "left"), "EAP-IG-inputs"),
        (CleanCorrupted(), "clean-corrupted"),
        (EAPIG(5, "right", path="activations_all_groups"), "EAP-IG-activations"),
    ],
    ids=["eap", "eap_ig", "clean_corrupted", "eap_ig_activations"],
)
def test_scores_equal_eap_igs_published_ones_with_the_sign_turned(
    method: Method, name: str
):
    found = edge_scores(toy(), toy_prompts(), logit_diff(), method=method)
    assert off(found.scores, -by_edge(f"eapig_scores_{name}")) < 1e-5


def test_scores_estimate_the_exact_effects():
    exact = by_edge("exact_effect_on_logit_diff")
    ours = edge_scores(toy(torch.float64), toy_prompts(), logit_diff(), method=Exact())
    assert off(ours.scores, exact) < 1e-4
    for method, least in ((EAP(), 0.65), (EAPIG(5), 0.75)):
        found = edge_scores(toy(), toy_prompts(), logit_diff(), method=method)
        assert np.corrcoef(found.scores, exact)[0, 1] > least


def test_transformer_lens_own_scores_are_the_corrupted_gradient_turned():
    """It takes the gradient at the corrupted run and clean − corrupted."""
    prompts = toy_prompts()
    swapped = Prompts.from_tokens(
        prompts.corrupted, prompts.clean, prompts.answers, prompts.wrong_answers
    )
    found = edge_scores(toy(), swapped, logit_diff())
    expected = by_edge("tl43_edge_scores_summed_over_positions")
    assert off(found.scores, expected) < 1e-4


# --- against plain autograd ---


def plain_scores(model: Any, edges: tuple[str, ...], prompts: Prompts) -> np.ndarray:
    """EAP with one zero leaf per receiver, added to what it alone reads."""
    rig = plain(model)
    clean, corrupted = (
        torch.tensor(rows) for rows in (prompts.clean, prompts.corrupted)
    )
    with torch.no_grad():
        rig.run(corrupted)
        ablated = rig.senders
        rig.run(clean)
        delta = {name: ablated[name] - rig.senders[name] for name in ablated}
    leaves: dict[str, Tensor] = {}

    def receive(name: str, x: Tensor) -> Tensor:
        leaves[name] = torch.zeros_like(x, requires_grad=True)
        return x + leaves[name]

    logits = rig.run(clean, receive)[:, -1]
    right, wrong = (
        torch.tensor([answer[0][0] for answer in answers])
        for answers in (prompts.answers, prompts.wrong_answers)
    )
    rows = torch.arange(len(clean))
    metric = (logits[rows, right] - logits[rows, wrong]).mean()
    names = list(leaves)
    gradients = torch.autograd.grad(metric, [leaves[name] for name in names])
    found = dict(zip(names, gradients, strict=True))
    pairs = [edge.split("->") for edge in edges]
    return np.array([float((delta[u] * found[v]).sum()) for u, v in pairs])


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox_parallel"])
def test_two_reads_equal_one_zero_leaf_per_receiver(family: str, prompts: Prompts):
    source = hf_model(family)
    model = load_model(source)
    found = edge_scores(model, prompts, logit_diff()).scores
    expected = plain_scores(source, model.shape.edge_names, prompts)
    assert off(found, expected) < 1e-10


# --- how it is cut up changes nothing ---


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 1},
        {"batch_size": 2},
        {"memory_budget": 200_000},
        {"memory_budget": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "method", [EAPIG(2), EAPIG(2, path="activations")], ids=["inputs", "activations"]
)
def test_chunks_of_examples_and_senders_change_no_score(
    gpt2: Backend, prompts: Prompts, how: dict[str, Any], method: Method
):
    one = edge_scores(gpt2, prompts, logit_diff(), method=method)
    found = edge_scores(gpt2, prompts, logit_diff(), method=method, **how)
    assert off(found.scores, one.scores) < 1e-12
    assert off(found.rows["stderr"], one.rows["stderr"]) < 1e-9


def test_the_order_of_prompts_changes_no_score(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable
):
    turned = prompts.take([3, 0, 4, 2, 1])
    found = edge_scores(gpt2, turned, logit_diff(), method=EAPIG(2))
    assert off(found.scores, whole.scores) < 1e-12


def test_standard_errors_are_those_of_the_examples(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable
):
    each = edge_scores(
        gpt2, prompts, logit_diff(), method=EAPIG(2), grain="example"
    ).scores.reshape(5, -1)
    assert off(each.mean(0), whole.scores) < 1e-12
    expected = each.std(0, ddof=1) / np.sqrt(5)
    assert off(whole.rows["stderr"], expected) < 1e-9


@pytest.mark.parametrize("method", [EAP(), EAPIG(2)], ids=["eap", "eap_ig"])
def test_positions_sum_to_edges(gpt2: Backend, prompts: Prompts, method: Method):
    site = edge_scores(gpt2, prompts, logit_diff(), method=method)
    table = edge_scores(gpt2, prompts, logit_diff(), method=method, grain="position")
    found = table.scores.reshape(7, -1)
    assert off(found.sum(0), site.scores) < 1e-12
    assert table.rows["position"].to_pylist()[:: len(site)] == list(range(7))
    # Pairs differ from the second token to the fourth, so nothing moves before it.
    assert (found[0] == 0).all()


def test_positions_of_prompts_of_different_lengths(gpt2: Backend):
    """Grain position pads on the right, in whatever order the lengths come."""
    rows = [token_prompts(n=1, length=length, seed=length) for length in (4, 7, 5)]
    prompts = joined(rows)
    site = edge_scores(gpt2, prompts, logit_diff())
    for size in (1, 2, 3):
        found = edge_scores(
            gpt2, prompts, logit_diff(), grain="position", batch_size=size
        )
        assert off(found.scores.reshape(7, -1).sum(0), site.scores) < 1e-12


def joined(sets: list[Prompts]) -> Prompts:
    columns = [
        [row for one in sets for row in getattr(one, name)]
        for name in ("clean", "corrupted", "answers", "wrong_answers")
    ]
    return Prompts.from_tokens(*columns)


@pytest.mark.parametrize("ablation", ["patch", "zero", "mean", "mean_positional"])
def test_prompts_of_different_lengths_score_as_each_alone(gpt2: Backend, ablation: str):
    rows = [token_prompts(n=2, length=length, seed=length) for length in (4, 7)]
    prompts = joined(rows)
    given: Any = ablation
    if ablation.startswith("mean"):
        given = Mean(rows[1], positional=ablation == "mean_positional")
    both = edge_scores(gpt2, prompts, logit_diff(), method=EAPIG(2), ablation=given)
    alone = [
        edge_scores(gpt2, one, logit_diff(), method=EAPIG(2), ablation=given).scores
        for one in prompts.batches(1)
    ]
    assert off(both.scores, np.mean(alone, axis=0)) < 1e-11


def test_tied_receivers_have_the_sum_of_their_ports(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable
):
    tied = edge_scores(gpt2, prompts, logit_diff(), method=EAPIG(2), receivers="head")
    scores = {row.edge: row.score for row in whole}
    for row in tied:
        head, bracket, _ = row.edge.partition("<")
        ports = [f"{head}<{p}>" for p in "qkv"] if bracket else [head]
        assert row.score == pytest.approx(sum(scores[p] or 0 for p in ports))
    nodes = [scores_by_node(table)["score"] for table in (tied, whole)]
    assert off(*nodes) < 1e-12


def test_node_scores_are_the_same_at_every_grain(prompts: Prompts):
    model = family_model("llama")
    tables = [
        edge_scores(model, prompts, logit_diff()),
        edge_scores(model, prompts, logit_diff(), grain="position"),
        edge_scores(model, prompts, logit_diff(), grain="example"),
        edge_scores(model, prompts, logit_diff(), receivers="head"),
    ]
    nodes = [scores_by_node(table) for table in tables]
    assert nodes[0]["component"].to_pylist() == [c.name for c in model.shape.senders]
    for other in nodes[1:]:
        assert off(other["score"], nodes[0]["score"]) < 1e-12


# --- streams, shards, interruptions ---


def test_shards_and_streams_combine_to_the_whole(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable
):
    parts = [prompts[:1], replace(prompts[1:4], name="other"), prompts[4:]]

    def score(some: Any) -> EdgeTable:
        return edge_scores(gpt2, some, logit_diff(), method=EAPIG(2))

    def stream() -> Iterator[Prompts]:
        yield from parts

    for found in (combine([score(part) for part in parts]), score(stream())):
        assert off(found.scores, whole.scores) < 1e-12
        assert off(found.rows["stderr"], whole.rows["stderr"]) < 1e-9
        assert found.run.n == 5
        assert found.run.dataset == f"{prompts.name}+other"
        assert found.run.policy_digest == whole.run.policy_digest
        for name in ("metric_clean", "metric_ablated", "completeness_error"):
            expected = whole.run.provenance[name]
            assert found.run.provenance[name] == pytest.approx(expected)


def test_combine_refuses_what_is_not_one_computation(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable
):
    first, rest = prompts[:2], prompts[2:]

    def score(some: Prompts, **how: Any) -> EdgeTable:
        return edge_scores(gpt2, some, how.pop("metric", logit_diff()), **how)

    mean = score(first, ablation="mean")
    cases = [
        ("combine_empty", []),
        ("combine_mismatch", [score(first), whole]),
        ("combine_mismatch", [score(first), score(rest, ablation="zero")]),
        ("combine_mismatch", [score(first), score(rest, receivers="head")]),
        ("combine_mismatch", [score(first, grain="example")] * 1 + [score(rest)]),
        ("combine_repeated", [whole, whole]),
        ("mean_reference_needed", [mean, score(rest, ablation="mean")]),
    ]
    for code, tables in cases:
        with pytest.raises(ArgumentError) as caught:
            combine(tables)
        assert caught.value.code == code
    other = edge_scores(family_model("llama"), first, logit_diff())
    with pytest.raises(ArgumentError) as caught:
        combine([score(rest), other])
    assert caught.value.fields["differs"] == "model"


def test_exact_effects_of_some_edges_stream_and_combine(
    gpt2: Backend, prompts: Prompts
):
    method = Exact(("m0->logits", "input->m0"))
    one = edge_scores(gpt2, prompts, logit_diff(), method=method)
    parts = [prompts[:2], prompts[2:]]
    found = edge_scores(gpt2, parts, logit_diff(), method=method)
    assert found.rows["edge"].to_pylist() == one.rows["edge"].to_pylist()
    assert off(found.scores, one.scores) < 1e-12
    assert off(found.rows["stderr"], one.rows["stderr"]) < 1e-9
    with pytest.raises(ArgumentError) as caught:
        edge_scores(gpt2, prompts, logit_diff(), method=method, grain="position")
    assert caught.value.code == "exact_option_unsupported"


def test_means_of_a_streams_own_sets_are_refused(gpt2: Backend, prompts: Prompts):
    parts = [prompts[:2], prompts[2:]]
    with pytest.raises(ArgumentError) as caught:
        edge_scores(gpt2, parts, logit_diff(), ablation="mean")
    assert caught.value.code == "mean_reference_needed"
    mean = Mean(prompts)
    found = edge_scores(gpt2, parts, logit_diff(), ablation=mean)
    one = edge_scores(gpt2, prompts, logit_diff(), ablation=mean)
    assert off(found.scores, one.scores) < 1e-12


@pytest.mark.parametrize("streamed", [False, True])
def test_an_interruption_keeps_what_was_done(
    gpt2: Backend, prompts: Prompts, whole: EdgeTable, streamed: bool
):
    calls: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 2:
            raise KeyboardInterrupt

    given: Any = [prompts[:1], prompts[1:]] if streamed else prompts
    with pytest.raises(ScoringInterrupted) as caught:
        edge_scores(
            gpt2,
            given,
            logit_diff(),
            method=EAPIG(2),
            batch_size=1 if streamed else 2,
            progress=stop,
        )
    partial = caught.value.partial
    assert partial is not None
    done = partial.run.n
    assert done == (2 if streamed else 4)
    first = edge_scores(gpt2, prompts[:done], logit_diff(), method=EAPIG(2))
    assert off(partial.scores, first.scores) < 1e-12
    rest = edge_scores(gpt2, prompts[done:], logit_diff(), method=EAPIG(2))
    assert off(combine([partial, rest]).scores, whole.scores) < 1e-12
    if not streamed:
        assert partial.run.dataset_digest == prompts[:done].digest


def test_an_interruption_before_anything_was_done_has_no_table(gpt2: Backend):
    def sets() -> Iterator[Prompts]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(ScoringInterrupted) as caught:
        edge_scores(gpt2, sets(), logit_diff())
    assert caught.value.partial is None


def test_progress_counts_examples(gpt2: Backend, prompts: Prompts):
    calls: list[tuple[int, int]] = []
    edge_scores(
        gpt2,
        prompts,
        logit_diff(),
        batch_size=2,
        progress=lambda *now: calls.append(now),
    )
    assert calls == [(2, 5), (4, 5), (5, 5)]


def test_no_prompts_are_refused(gpt2: Backend):
    with pytest.raises(DataError) as caught:
        edge_scores(gpt2, [], logit_diff())
    assert caught.value.code == "prompts_empty"


def test_donors_are_drawn_by_the_seed_and_recorded(gpt2: Backend, prompts: Prompts):
    def score(seed: int) -> EdgeTable:
        return edge_scores(gpt2, prompts, logit_diff(), ablation=Resample(seed=seed))

    first, again, other = score(0), score(0), score(3)
    assert (first.scores == again.scores).all()
    assert first.run_id == again.run_id
    donors = first.run.provenance["donors"]
    assert len(donors) == 5
    assert all(donor != i for i, donor in enumerate(donors))
    assert other.run.provenance["donors"] != donors
    assert other.run.policy_digest != first.run.policy_digest


# --- receivers that nothing reaches ---


@pytest.fixture
def cut_off() -> Any:
    """A model whose first layer's values are detached, by the user's own hook."""
    source = hf_model("gpt2")
    model = load_model(source)
    value = model.module("blocks.0.attn.v")  # type: ignore[attr-defined]
    handle = value.register_forward_hook(lambda _m, _a, out: out.detach())
    yield model
    handle.remove()


@pytest.mark.parametrize("grain", ["site", "position", "example"])
def test_unreachable_receivers_have_a_status_and_no_score(
    cut_off: Backend, prompts: Prompts, grain: Any
):
    found = edge_scores(
        cut_off, prompts, logit_diff(), method=EAPIG(2), grain=grain
    ).rows
    for row in found.select(["edge", "score", "stderr", "status"]).to_pylist():
        unreachable = row["edge"].startswith("input->a0.") and "<v>" in row["edge"]
        assert (row["status"] == "unreachable") == unreachable
        assert (row["score"] is None) == unreachable
        assert row["stderr"] is None or not unreachable


def test_unreachable_rows_round_trip(cut_off: Backend, prompts: Prompts, tmp_path):
    table = edge_scores(cut_off, prompts, logit_diff())
    assert table.run.provenance["excluded_counts"] == {"unreachable": 4}
    with Store(tmp_path / "store.duckdb") as store:
        again = store.load(store.save(table))
    assert again.rows.equals(table.rows)
    json_file = tmp_path / "table.json"
    ReadTable.from_edges(table).save(json_file)
    loaded = ReadTable.load(json_file).to_edges()
    assert loaded.rows.equals(table.rows)
    parts = [edge_scores(cut_off, p, logit_diff()) for p in (prompts[:2], prompts[2:])]
    both = combine(parts)
    assert both.rows["status"].equals(table.rows["status"])
    assert both.rows["score"].null_count == 4
    nodes = scores_by_node(table)
    assert nodes["score"].null_count == 0


def test_a_zero_is_a_score_and_not_unreachable(gpt2: Backend, prompts: Prompts):
    same = Prompts.from_tokens(
        prompts.clean, prompts.clean, prompts.answers, prompts.wrong_answers
    )
    found = edge_scores(gpt2, same, logit_diff(), method=EAPIG(2))
    assert (found.scores == 0).all()
    assert set(found.rows["status"].to_pylist()) == {"ok"}
    one_token = Prompts.from_tokens([[1], [2]], [[3], [4]], [1, 2], [3, 4])
    found = edge_scores(gpt2, one_token, logit_diff())
    assert found.rows["score"].null_count == 0
    # One key: what a query or key reads changes nothing.
    assert found["input->a0.h0<q>"].score == pytest.approx(0, abs=1e-15)
    assert found["input->a0.h0<v>"].score != 0


# --- metrics that are attributed ---


def test_kl_is_attributed_along_a_path_and_refused_at_its_minimum(
    gpt2: Backend, prompts: Prompts
):
    refused: list[Method] = [
        EAP(),
        EAPIG(1, "right"),
        EAPIG(1, "right", path="activations"),
    ]
    for method in refused:
        with pytest.raises(ArgumentError) as caught:
            edge_scores(gpt2, prompts, kl(), method=method)
        assert caught.value.code == "metric_stationary_at_clean"
        assert "EAPIG" in str(caught.value)
    found = edge_scores(gpt2, prompts, kl(), method=EAPIG(20))
    assert not found.higher_is_better
    ran = found.run.provenance
    assert ran["metric_clean"] == pytest.approx(0, abs=1e-12)
    assert abs(ran["completeness_error"]) < 0.02 * ran["metric_ablated"]


def test_more_steps_are_more_complete(gpt2: Backend, prompts: Prompts):
    def error(steps: int) -> float:
        method = EAPIG(steps, "gauss_legendre")
        run = edge_scores(gpt2, prompts, logit_diff(), method=method).run
        return abs(run.provenance["completeness_error"])

    assert error(24) < 1e-4
    assert error(24) < error(2)


def test_a_normalised_metric_scales_the_scores(gpt2: Backend, prompts: Prompts):
    plainly = edge_scores(gpt2, prompts, logit_diff())
    run = plainly.run.provenance
    full, ablated = run["metric_clean"], run["metric_ablated"]
    metric = normalised(logit_diff(), full=full, ablated=ablated)
    found = edge_scores(gpt2, prompts, metric)
    assert off(found.scores * (full - ablated), plainly.scores) < 1e-12
    assert found.run.provenance["metric_clean"] == pytest.approx(1)
    assert found.run.provenance["metric_ablated"] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ArgumentError) as caught:
        edge_scores(gpt2, prompts, normalised(kl(), full=0.0, ablated=2.0))
    assert caught.value.code == "metric_stationary_at_clean"


@pytest.mark.parametrize("ablation", ["patch", "zero", "mean", "mean_positional"])
def test_answers_of_several_tokens_are_attributed(
    gpt2: Backend, prompts: Prompts, ablation: str
):
    answers = [[[1, 2]], [[3, 4, 5]], [[6]], [[7, 8]], [[9]]]
    some = Prompts.from_tokens(prompts.clean, prompts.corrupted, answers)
    found = edge_scores(gpt2, some, answer_logprob(), ablation=ablation)
    apart = edge_scores(gpt2, some, answer_logprob(), ablation=ablation, batch_size=1)
    assert off(found.scores, apart.scores) < 1e-11
    assert np.abs(found.scores).max() > 0


def test_a_custom_metric_reads_the_clean_logits_as_it_reads_the_others(
    gpt2: Backend, prompts: Prompts
):
    def distance(logits: Tensor, batch: Any) -> Tensor:
        assert batch.clean_logits.shape == logits.shape
        return (logits - batch.clean_logits).square().flatten(1).sum(1)

    for positions in ("last", "all"):
        metric = custom(distance, positions=positions, higher_is_better=False)
        found = edge_scores(gpt2, prompts, metric, method=EAPIG(2))
        assert np.isfinite(found.scores).all()
        assert found.run.provenance["metric_clean"] == pytest.approx(0, abs=1e-12)


# --- refusals ---


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("ablation_unknown", {"ablation": "shuffle"}),
        ("ablation_unknown", {"ablation": 3}),
        ("batch_size_invalid", {"batch_size": 0}),
        ("batch_size_invalid", {"batch_size": 1.5}),
        ("batch_size_invalid", {"batch_size": True}),
        ("grain_unknown", {"grain": "token"}),
        ("receivers_unknown", {"receivers": "kv"}),
        ("method_unknown", {"method": "eap"}),
        ("metric_invalid", {"metric": "logit_diff"}),
        ("prompts_invalid", {"prompts": [[1, 2, 3]]}),
    ],
)
def test_wrong_arguments_are_refused(
    gpt2: Backend, prompts: Prompts, code: str, how: dict[str, Any]
):
    given = {"prompts": prompts, "metric": logit_diff(), **how}
    with pytest.raises(ArgumentError) as caught:
        edge_scores(gpt2, **given)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "make",
    [
        lambda: EAPIG(0),
        lambda: EAPIG(2.5),  # type: ignore[arg-type]
        lambda: EAPIG(True),
        lambda: EAPIG(1, "trapezoid"),
        lambda: EAPIG(3, "simpson"),  # type: ignore[arg-type]
        lambda: EAPIG(3, path="weights"),  # type: ignore[arg-type]
    ],
)
def test_impossible_paths_are_refused(make: Any):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.code.startswith("ig_")


@pytest.mark.parametrize("rule", ["left", "right", "midpoint", "trapezoid"])
def test_rules_have_the_weights_of_their_names(rule: Any):
    alphas, weights = zip(*EAPIG(5, rule).points(), strict=True)
    assert sum(weights) == pytest.approx(1)
    expected = {
        "left": [0, 0.2, 0.4, 0.6, 0.8],
        "right": [0.2, 0.4, 0.6, 0.8, 1],
        "midpoint": [0.1, 0.3, 0.5, 0.7, 0.9],
        "trapezoid": [0, 0.25, 0.5, 0.75, 1],
    }
    assert alphas == pytest.approx(expected[rule])


@pytest.mark.parametrize(
    "fn",
    [
        lambda logits, _batch: torch.ones(len(logits), dtype=logits.dtype),
        lambda logits, _batch: logits.detach().sum(-1),
        lambda logits, _batch: torch.ones(len(logits), requires_grad=True) * 2,
    ],
    ids=["constant", "detached", "of_something_else"],
)
def test_a_metric_that_ignores_the_logits_is_refused(
    gpt2: Backend, prompts: Prompts, fn: Any
):
    metric = custom(fn, higher_is_better=True, name="ignoring")
    with pytest.raises(ArgumentError) as caught:
        edge_scores(gpt2, prompts, metric)
    assert caught.value.code == "metric_ignores_logits"


def test_a_metric_that_is_not_finite_names_the_example(gpt2: Backend):
    prompts = token_prompts(n=5)

    def fn(logits: Tensor, batch: Any) -> Tensor:
        bad = torch.tensor([a[0][0] == prompts.answers[3][0][0] for a in batch.answers])
        return torch.where(bad, torch.inf, logits.sum(-1))

    metric = custom(fn, higher_is_better=True, name="bad")
    for given, row in ((prompts, 3), ([prompts[:2], prompts[2:]], 1)):
        with pytest.raises(DataError) as caught:
            edge_scores(gpt2, given, metric, batch_size=2)
        assert caught.value.code == "metric_not_finite"
        assert caught.value.fields["row"] == row
        assert f"example {row}" in str(caught.value)
    assert caught.value.fields["set"] == 1


def test_a_score_that_is_not_finite_names_the_example_and_the_edge(gpt2: Backend):
    """The metric is finite where its gradient is not: √x at 0."""
    prompts = token_prompts(n=5)

    def fn(logits: Tensor, batch: Any) -> Tensor:
        values = []
        for row, answers in zip(logits, batch.answers, strict=True):
            zero = row.sum() - row.detach().sum()
            bad = answers == prompts.answers[3]
            values.append(zero.abs().sqrt() if bad else row.sum())
        return torch.stack(values)

    metric = custom(fn, higher_is_better=True, name="root")
    with pytest.raises(DataError) as caught:
        edge_scores(gpt2, prompts[3:], metric)
    assert caught.value.code == "score_not_finite"
    assert caught.value.fields["row"] == 0
    with pytest.raises(DataError) as caught:
        edge_scores(gpt2, prompts.take([0, 1, 2, 4, 3]), metric, batch_size=2)
    assert caught.value.fields["row"] == 4
    assert "->" in str(caught.value.fields["edge"])


def test_unequal_lengths_are_refused_for_patching_only(gpt2: Backend):
    rows = token_prompts(n=2)
    corrupted = [rows.corrupted[0], rows.corrupted[1][:-1]]
    uneven = Prompts.from_tokens(
        rows.clean, corrupted, rows.answers, rows.wrong_answers
    )
    with pytest.raises(DataError) as caught:
        edge_scores(gpt2, uneven, logit_diff())
    assert caught.value.code == "prompt_lengths_differ"
    assert caught.value.fields["row"] == 1
    for ablation in ("zero", "mean"):
        found = edge_scores(gpt2, uneven, logit_diff(), ablation=ablation)
        assert np.isfinite(found.scores).all()
