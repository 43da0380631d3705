"""Evaluation of circuits: against the peers' numbers, a plain run, and arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import family_model, hf_model, token_prompts
from golden_toy import arrays, peer_circuit, toy, toy_prompts
from plain_models import plain, with_ablated
from torch import Tensor

from circuitlab.ablations import Mean
from circuitlab.backends import Backend, load_model
from circuitlab.circuits import Circuit, prune, top_k
from circuitlab.edges import edge_scores
from circuitlab.errors import ArgumentError, CircuitlabError, DataError
from circuitlab.evaluate import MIB_FRACTIONS, curve, evaluate, interval, measure
from circuitlab.metrics import answer_logprob, custom, kl, logit_diff, prob_diff
from circuitlab.prompts import Prompts
from circuitlab.tables import EVAL, PER_EXAMPLE, EdgeTable

FAMILIES = ("gpt2", "llama", "neox_parallel")
ABLATIONS = ("patch", "zero", "mean", "mean_positional", "resample")
PEERS = [
    f"eapig_{method}_{search}{size}"
    for method in ("EAP", "EAP-IG-inputs")
    for search in ("topn", "greedy")
    for size in (20, 40, 60, 200)
]


@pytest.fixture(scope="module")
def gpt2() -> Backend:
    return family_model("gpt2")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return token_prompts(n=5)


@pytest.fixture(scope="module")
def scored(gpt2: Backend, prompts: Prompts) -> EdgeTable:
    return edge_scores(gpt2, prompts, logit_diff())


def some_circuits(model: Backend, seed: int = 0) -> list[Circuit]:
    """Random circuits, as they come: with dangling edges."""
    generator = np.random.default_rng(seed)
    names = np.array(model.shape.edge_names)
    shares = (0.1, 0.5, 0.9)
    masks = [generator.random(len(names)) < share for share in shares]
    return [Circuit.from_edges(names[mask].tolist()) for mask in masks]


# --- against the peers ---


def test_peers_circuits_have_the_peers_metrics():
    circuits = [peer_circuit(f"{name}_in_graph") for name in PEERS]
    found = measure(toy(), toy_prompts(), logit_diff(), circuits)
    golden = arrays()
    for name, values in zip(PEERS, found.metric, strict=True):
        assert np.abs(values - golden[f"{name}_metric"]).max() < 1e-4, name
    assert np.abs(found.full - golden["baseline_clean"]).max() < 1e-4
    assert np.abs(found.ablated - golden["baseline_corrupted"]).max() < 1e-4


# --- against a plain run ---


def ablated_values(rig: Any, prompts: Prompts, ablation: str) -> dict[str, Tensor]:
    """The ablated value of each sender, by hand: `[example or 1, pos or 1, d_model]`."""
    with torch.no_grad():
        rig.run(torch.tensor(prompts.corrupted))
    match ablation:
        case "patch":
            return rig.senders
        case "zero":
            return {name: torch.zeros_like(v) for name, v in rig.senders.items()}
        case "mean":
            return {k: v.mean((0, 1), keepdim=True) for k, v in rig.senders.items()}
        case _:
            return {k: v.mean(0, keepdim=True) for k, v in rig.senders.items()}


@pytest.mark.parametrize("ablation", ["patch", "zero", "mean", "mean_positional"])
@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_run_as_with_plain_hooks(family: str, ablation: str, prompts: Prompts):
    source = hf_model(family)
    model, rig = load_model(source), plain(source)
    circuits = some_circuits(model)
    found = measure(model, prompts, logit_diff(), circuits, ablation=ablation)
    values = ablated_values(rig, prompts, ablation)
    rows = torch.arange(len(prompts))
    right, wrong = (
        torch.tensor([answer[0][0] for answer in answers])
        for answers in (prompts.answers, prompts.wrong_answers)
    )
    for circuit, metric in zip(circuits, found.metric, strict=True):
        receive = with_ablated(
            rig, values, set(circuit.edges), set(model.shape.edge_names)
        )
        with torch.no_grad():
            logits = rig.run(torch.tensor(prompts.clean), receive)[:, -1]
        expected = logits[rows, right] - logits[rows, wrong]
        assert np.abs(metric - expected.numpy()).max() < 1e-9


# --- what faithfulness is ---


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("metric", [logit_diff(), prob_diff()], ids=lambda m: m.name)
def test_the_full_circuit_is_one_and_the_empty_one_zero(
    gpt2: Backend, prompts: Prompts, ablation: str, metric: Any
):
    full = Circuit.from_edges(gpt2.shape.edge_names, gpt2.shape)
    found = evaluate(gpt2, prompts, metric, full, ablation=ablation)
    assert found.faithfulness == pytest.approx(1, abs=1e-9)
    assert found.metric == pytest.approx(found.metric_full)
    assert found.kl == pytest.approx(0, abs=1e-9)
    empty = evaluate(gpt2, prompts, metric, full.complement(), ablation=ablation)
    assert empty.faithfulness == pytest.approx(0, abs=1e-9)
    assert empty.metric == pytest.approx(empty.metric_ablated)
    assert empty.n_edges == 0


def test_faithfulness_is_a_ratio_of_means(gpt2: Backend, prompts: Prompts, scored):
    circuit = top_k(scored, 40)
    found = evaluate(gpt2, prompts, logit_diff(), circuit)
    rows = found.per_example
    metric, full, low = (
        rows[name].to_numpy() for name in ("metric", "metric_full", "metric_ablated")
    )
    expected = (metric.mean() - low.mean()) / (full.mean() - low.mean())
    assert found.faithfulness == pytest.approx(expected)
    assert found.metric == pytest.approx(metric.mean())
    assert (found.k, found.n_edges, found.n) == (40, len(circuit), 5)
    assert found.metric_name == "logit_diff"
    assert 0 <= found.accuracy <= 1


def test_per_example_rows_are_in_the_order_of_the_prompts(
    gpt2: Backend, prompts: Prompts, scored
):
    circuit = top_k(scored, 30)
    found = evaluate(gpt2, prompts, logit_diff(), circuit, batch_size=2)
    assert found.rows.schema.equals(EVAL)
    assert found.per_example.schema.equals(PER_EXAMPLE)
    assert found.per_example["prompt"].to_pylist() == list(range(5))
    order = [4, 2, 0, 1, 3]
    turned = evaluate(gpt2, prompts.take(order), logit_diff(), circuit)
    for name in ("metric", "metric_full", "metric_ablated", "kl"):
        expected = found.per_example[name].to_numpy()[order]
        assert turned.per_example[name].to_numpy() == pytest.approx(expected)


def test_dangling_edges_carry_nothing_under_patching(gpt2: Backend, prompts: Prompts):
    circuits = some_circuits(gpt2)
    pruned = [prune(Circuit.from_edges(c.edges, gpt2.shape)) for c in circuits]
    assert len(pruned[0]) < len(circuits[0])
    first, second = (
        measure(gpt2, prompts, logit_diff(), some) for some in (circuits, pruned)
    )
    assert first.metric == pytest.approx(second.metric, abs=1e-10)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_chunks_of_examples_and_circuits_change_no_number(
    gpt2: Backend, prompts: Prompts, ablation: str
):
    circuits = some_circuits(gpt2) + some_circuits(gpt2, seed=1)
    whole = measure(gpt2, prompts, logit_diff(), circuits, ablation=ablation)
    ways: list[dict[str, Any]] = [
        {"batch_size": 1},
        {"configs_per_pass": 1},
        {"batch_size": 2, "configs_per_pass": 4},
        {"memory_budget": 1},
    ]
    for how in ways:
        found = measure(gpt2, prompts, logit_diff(), circuits, ablation=ablation, **how)
        for name in ("metric", "kl", "accuracy", "full", "ablated"):
            expected = getattr(whole, name)
            assert getattr(found, name) == pytest.approx(expected, abs=1e-11)


def test_prompts_of_different_lengths_run_as_each_alone(gpt2: Backend):
    sets = [token_prompts(n=1, length=4 + i, seed=i) for i in range(3)]
    columns = [
        [getattr(one, name)[0] for one in sets]
        for name in ("clean", "corrupted", "answers", "wrong_answers")
    ]
    prompts = Prompts.from_tokens(*columns)
    circuits = some_circuits(gpt2)
    ablations: list[Any] = ["patch", "zero", Mean(prompts), Mean(prompts, True)]
    for ablation in ablations:
        whole = measure(gpt2, prompts, logit_diff(), circuits, ablation=ablation)
        for i, one in enumerate(sets):
            alone = measure(gpt2, one, logit_diff(), circuits, ablation=ablation)
            assert whole.metric[:, i] == pytest.approx(alone.metric[:, 0], abs=1e-10)


def test_intervals_hold_the_ratio_and_narrow_with_examples():
    generator = np.random.default_rng(0)

    def width(n: int) -> float:
        full, low = generator.normal(4, 1, n), generator.normal(0, 1, n)
        metric = low + 0.8 * (full - low) + generator.normal(0, 0.3, n)
        bounds = interval(metric, full, low)
        assert bounds[0] < 0.8 < bounds[1]
        assert interval(metric, full, low) == bounds
        assert interval(metric, full, low, seed=1) != bounds
        return bounds[1] - bounds[0]

    assert width(400) < width(20)
    assert np.isnan(interval(np.ones(1), np.ones(1), np.zeros(1))).all()


def test_one_example_has_no_interval(gpt2: Backend, prompts: Prompts, scored):
    found = evaluate(gpt2, prompts[:1], logit_diff(), top_k(scored, 20))
    assert found.faithfulness_low is None
    assert found.faithfulness_high is None
    assert found.n == 1


def test_overlap_with_the_scored_prompts_is_recorded(
    gpt2: Backend, prompts: Prompts, scored
):
    circuit = top_k(scored, 20)
    for given, expected in ((None, None), (prompts[:2], True), (prompts[3:], False)):
        found = evaluate(gpt2, prompts[:3], logit_diff(), circuit, scored=given)
        assert found.prompts_overlap is expected


# --- refusals ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_ratio_of_nothing_is_refused(dtype: torch.dtype):
    """Identical pairs differ by rounding at most, and that is no effect."""
    prompts = token_prompts(n=6)
    same = Prompts.from_tokens(
        prompts.clean, prompts.clean, prompts.answers, prompts.wrong_answers
    )
    for family in ("gpt2", "llama"):
        model = family_model(family, dtype)
        circuit = Circuit.from_edges(["input->logits"])
        with pytest.raises(DataError) as caught:
            evaluate(model, same, logit_diff(), circuit)
        assert caught.value.code == "faithfulness_undefined"


def test_what_cannot_be_evaluated_is_refused(gpt2: Backend, prompts: Prompts, scored):
    circuit = top_k(scored, 20)
    uneven = Prompts.from_tokens(
        prompts.clean, [row[:-1] for row in prompts.corrupted], [1] * 5, [2] * 5
    )
    unanswered = Prompts.from_tokens(prompts.clean, prompts.corrupted)
    foreign = Circuit.from_edges(["a7.h1->logits"])
    cases: list[tuple[str, Any, Circuit, dict[str, Any]]] = [
        ("prompt_lengths_differ", uneven, circuit, {}),
        ("answers_missing", unanswered, circuit, {}),
        ("edge_unknown", prompts, foreign, {}),
        ("ablation_unknown", prompts, circuit, {"ablation": "nothing"}),
        ("batch_size_invalid", prompts, circuit, {"batch_size": 0}),
        ("batch_size_invalid", prompts, circuit, {"batch_size": -2}),
        ("configs_per_pass_invalid", prompts, circuit, {"configs_per_pass": 0}),
    ]
    for code, given, one, how in cases:
        with pytest.raises(CircuitlabError) as caught:
            evaluate(gpt2, given, logit_diff(), one, **how)
        assert caught.value.code == code


def test_a_metric_that_is_not_finite_names_the_example(
    gpt2: Backend, prompts: Prompts, scored
):
    def fn(logits: Tensor, batch: Any) -> Tensor:
        bad = [answers == prompts.answers[3] for answers in batch.answers]
        return torch.where(torch.tensor(bad), torch.nan, logits.sum(-1))

    metric = custom(fn, higher_is_better=True, name="bad")
    ways: list[dict[str, Any]] = [{"batch_size": 2}, {"configs_per_pass": 2}, {}]
    for how in ways:
        with pytest.raises(DataError) as caught:
            evaluate(gpt2, prompts, metric, top_k(scored, 20), **how)
        assert caught.value.code == "metric_not_finite"
        assert caught.value.fields["row"] == 3


# --- metrics of every kind ---


def test_metrics_without_comparable_answers_have_no_accuracy(
    gpt2: Backend, prompts: Prompts, scored
):
    circuit = top_k(scored, 60)
    several = Prompts.from_tokens(
        prompts.clean, prompts.corrupted, [[[1, 2]], [[3]], [[4]], [[5]], [[6]]]
    )
    found = evaluate(gpt2, several, answer_logprob(), circuit)
    assert found.accuracy is None
    apart = evaluate(gpt2, several, answer_logprob(), circuit, batch_size=1)
    assert found.metric == pytest.approx(apart.metric)
    divergence = evaluate(gpt2, prompts, kl(), circuit)
    assert divergence.metric == pytest.approx(divergence.kl)
    assert divergence.metric_full == pytest.approx(0, abs=1e-12)


def test_a_metric_of_all_positions_sees_clean_logits_of_all_positions(
    gpt2: Backend, prompts: Prompts, scored
):
    def fn(logits: Tensor, batch: Any) -> Tensor:
        return (logits - batch.clean_logits).square().sum((1, 2))

    metric = custom(fn, positions="all", higher_is_better=False)
    found = evaluate(gpt2, prompts, metric, top_k(scored, 60))
    assert found.metric_full == 0
    assert found.metric > 0
    last = evaluate(gpt2, prompts, logit_diff(), top_k(scored, 60))
    assert found.kl == pytest.approx(last.kl)


# --- curves ---


def test_a_curve_has_a_row_per_size(gpt2: Backend, prompts: Prompts, scored):
    sizes = np.array([60, 5, 30, 5])
    found = curve(gpt2, prompts, logit_diff(), scored, sizes=sizes)  # type: ignore[arg-type]
    assert found.rows["k"].to_pylist() == [5, 30, 60]
    for circuit, row in zip(found.circuits, found.rows.to_pylist(), strict=True):
        assert row["n_edges"] == len(circuit) <= row["k"]
        alone = evaluate(gpt2, prompts, logit_diff(), circuit)
        assert row["faithfulness"] == pytest.approx(alone.faithfulness)
    assert found.per_example.num_rows == 15
    assert found.run.parent == scored.run_id
    assert found.cpr is None
    assert found.cmd is None


def test_the_default_sizes_reach_every_edge(gpt2: Backend, prompts: Prompts, scored):
    found = curve(gpt2, prompts, logit_diff(), scored)
    assert found.rows["k"].to_pylist()[-1] == gpt2.shape.n_edges
    assert found.rows["faithfulness"].to_pylist()[-1] == pytest.approx(1)
    unpruned = curve(gpt2, prompts, logit_diff(), scored, sizes=[40], prune=False)
    assert unpruned.rows["n_edges"].to_pylist() == [40]


def test_cpr_and_cmd_are_mibs_trapezoids(gpt2: Backend, prompts: Prompts, scored):
    found = curve(gpt2, prompts, logit_diff(), scored, sizes="mib")
    areas = {}
    for rank in ("support", "magnitude"):
        values = []
        for fraction in MIB_FRACTIONS:
            k = int(fraction * gpt2.shape.n_edges)
            circuit = top_k(scored, k, rank=rank)
            one = evaluate(gpt2, prompts, logit_diff(), circuit)
            values.append(one.faithfulness)
        areas[rank] = (
            sum_of_trapezoids(values),
            sum_of_trapezoids([abs(1 - value) for value in values]),
        )
    assert found.cpr == pytest.approx(areas["support"][0])
    assert found.cmd == pytest.approx(areas["magnitude"][1])
    assert set(found.rows["rank"].to_pylist()) == {"support", "magnitude"}


def sum_of_trapezoids(values: list[float]) -> float:
    total = 0.0
    for i in range(len(values) - 1):
        width = MIB_FRACTIONS[i + 1] - MIB_FRACTIONS[i]
        total += width * (values[i] + values[i + 1]) / 2
    return total


@pytest.mark.parametrize(
    ("code", "sizes"),
    [
        ("sizes_invalid", []),
        ("sizes_invalid", "MIB"),
        ("k_out_of_range", [10**6]),
        ("k_out_of_range", [-1]),
        ("k_out_of_range", [1.5]),
        ("k_out_of_range", ["a"]),
        ("sizes_invalid", 5),
    ],
)
def test_impossible_sizes_are_refused(
    gpt2: Backend, prompts: Prompts, scored, code: str, sizes: Any
):
    with pytest.raises(ArgumentError) as caught:
        curve(gpt2, prompts, logit_diff(), scored, sizes=sizes)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("metric_invalid", {"metric": "logit_diff"}),
        ("circuit_invalid", {"circuit": ["input->m0"]}),
        ("prompts_invalid", {"prompts": "pairs.jsonl"}),
        ("prompts_invalid", {"scored": "ioi"}),
        ("ablation_unknown", {"ablation": 3}),
        ("seed_invalid", {"seed": -1}),
        ("samples_invalid", {"samples": 2.5}),
        ("memory_budget_invalid", {"memory_budget": "1GB"}),
        ("batch_size_invalid", {"batch_size": "3"}),
        ("configs_per_pass_invalid", {"configs_per_pass": 0}),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(
    gpt2: Backend, prompts: Prompts, scored, code: str, options: dict[str, Any]
):
    given: dict[str, Any] = {"prompts": prompts, "metric": logit_diff()}
    given |= {"circuit": top_k(scored, 9), **options}
    with pytest.raises(ArgumentError) as caught:
        evaluate(gpt2, **given)
    assert caught.value.code == code


def test_curves_and_measurements_refuse_what_is_no_table_or_list(
    gpt2: Backend, prompts: Prompts, scored
):
    circuit: Any = top_k(scored, 9)
    with pytest.raises(ArgumentError) as caught:
        curve(gpt2, prompts, logit_diff(), circuit)
    assert caught.value.code == "edge_table_invalid"
    with pytest.raises(ArgumentError) as caught:
        measure(gpt2, prompts, logit_diff(), circuit)
    assert caught.value.code == "circuit_invalid"


def test_measuring_holds_no_graph_of_the_weights(gpt2: Backend, prompts: Prompts):
    """Nor does it ask for gradients where the caller allows them."""
    seen: list[bool] = []

    def fn(logits: Tensor, _batch: Any) -> Tensor:
        seen.append(logits.requires_grad)
        return logits.sum(-1)

    metric = custom(fn, higher_is_better=True, name="watching")
    measure(gpt2, prompts, metric, some_circuits(gpt2))
    assert seen
    assert not any(seen)
