"""ACDC gives the sequential algorithm's circuit, edge by edge, for less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import circuitlab as cl
from circuitlab import checkpoint
from circuitlab.ablations import AblationSource, as_ablation
from circuitlab.acdc import acdc, acdc_sweep, hierarchical_acdc, visit_order
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import (
    CircuitState,
    Focus,
    prepare,
)
from circuitlab.coupling import heads_are_coupled
from circuitlab.errors import CircuitlabError
from circuitlab.evaluate import measure
from circuitlab.store import Store
from circuitlab.wiring import wiring_of
from tests import read_models
from tests.hand_models import induction_model, ioi_model
from tests.sequential_acdc import sequential_acdc

GOLDEN = Path(__file__).parent / "golden" / "acdc_smollm2"


def pairs(n: int = 3) -> cl.Prompts:
    """Token pairs that differ at two positions, for the tiny models."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(1, read_models.VOCAB, (n, 7), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 2], corrupted[:, 4] = 7, 8
    return cl.Prompts.from_tokens(clean, corrupted, clean[:, 0], corrupted[:, 2])


def work(circuit: cl.Circuit) -> Mapping[str, Any]:
    """What the search that found it did."""
    assert circuit.run is not None
    return circuit.run.provenance


UNCOUPLED = ["gpt2", "llama", "neox", "neox_sequential", "opt", "bloom", "phi"]


COUPLED = ["gemma2", "olmo2"]


@pytest.mark.parametrize(
    ("family", "ablation"),
    [*((f, "patch") for f in [*UNCOUPLED, *COUPLED]), ("gpt2", "mean")],
)
def test_a_state_gives_what_whole_passes_give(family, ablation):
    model, metric = read_models.model(family), cl.logit_diff()
    shape, prompts = model.shape, pairs()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    chunk = prepare(model, source.rows(slice(0, len(prompts))), metric)
    generator = np.random.default_rng(0)
    mask = shape.edge_mask & (generator.random(shape.edge_mask.shape) < 0.6)
    wiring = wiring_of(model)
    state = CircuitState(model, chunk, mask, wiring)

    def whole(masks):
        found = [run_circuits(model, chunk, [m]) for m in masks]
        return torch.cat(found)

    torch.testing.assert_close(state.logits, whole([mask]), rtol=0, atol=1e-12)
    tried = 0
    for column in visit_order(shape):
        senders = np.flatnonzero(state.mask[:, column])[:3]
        if not wiring.alive(state.mask)[column] or not len(senders):
            state.mask[:, column] = False
            continue
        focus = Focus(state, column, wiring.plan(state.mask, column))
        removed = np.zeros((len(senders), len(mask)), dtype=bool)
        for row, sender in enumerate(senders):
            removed[row:, sender] = True
        masks = np.repeat(state.mask[None], len(senders), axis=0)
        masks[:, :, column] &= ~removed
        trial = focus.trial(removed)
        torch.testing.assert_close(trial.logits, whole(masks), rtol=0, atol=1e-12)
        focus.commit(trial, len(senders) - 1, removed[-1])
        tried += 1
    assert tried >= 10


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "opt", *COUPLED])
@pytest.mark.parametrize(
    ("metric", "ablation", "threshold"),
    [(cl.kl(), "patch", 0.02), (cl.logit_diff(), "mean", 0.05)],
    ids=["kl-patch", "logit_diff-mean"],
)
def test_the_circuit_is_the_sequential_one(family, metric, ablation, threshold):
    model, prompts = read_models.model(family), pairs()
    plain = sequential_acdc(model, prompts, metric, threshold, ablation=ablation)
    found = acdc_sweep(model, prompts, metric, [threshold], ablation=ablation)[0]
    assert found.circuit.edges == plain.edges
    assert 0 < len(plain.edges) < model.shape.n_edges
    rows = found.decisions.to_pandas()
    tested = rows[rows.status == "ok"].set_index("edge").score
    assert set(tested.index) == set(plain.changes)
    for edge, change in plain.changes.items():
        assert tested[edge] == pytest.approx(change, abs=1e-10)
    cost = work(found.circuit)["component_evaluations"]
    assert cost <= plain.components
    single = acdc(model, prompts, metric, threshold, ablation=ablation, speculate=1)
    assert single.edges == plain.edges
    assert work(single)["wasted"] == 0
    # Where heads are coupled, a layer's are computed together.
    least = 1.5 if family in COUPLED else 2.5
    assert least * work(single)["component_evaluations"] < plain.components


def test_coupled_heads_are_found_out():
    assert all(heads_are_coupled(read_models.model(f)) for f in COUPLED)
    assert not any(heads_are_coupled(read_models.model(f)) for f in UNCOUPLED)


def distance() -> cl.Metric:
    """How far the logit difference is from the full model's: removing an edge of a head
    that works against the answer counts too."""

    def fn(logits, batch):
        difference = cl.logit_diff().fn
        return (difference(logits, batch) - difference(batch.clean_logits, batch)).abs()

    return cl.custom(fn, higher_is_better=False, name="distance")


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_circuits_with_unread_heads_run_alike_together_and_alone(family):
    """Under a post-norm a head that nothing reads still moves the layer's scale."""
    model, prompts = read_models.model(family), pairs()
    generator = np.random.default_rng(0)
    circuits = [
        cl.Circuit.from_edges(
            [e for e in model.shape.edge_names if generator.random() < share],
            model.shape,
        )
        for share in (0.1, 0.3, 0.5)
    ]
    together = measure(model, prompts, cl.logit_diff(), circuits).metric
    for row, circuit in enumerate(circuits):
        alone = measure(model, prompts, cl.logit_diff(), [circuit]).metric[0]
        np.testing.assert_allclose(together[row], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("threshold", [0.001, 0.1])
def test_the_hand_weighted_induction_circuit_is_found_exactly(threshold):
    hand = induction_model(n=8)
    model = cl.load_model(hand.model)
    for metric in (cl.kl(), cl.logit_diff()):
        assert acdc(model, hand.prompts, metric, threshold).edges == hand.carries
        assert acdc(model, hand.blanked, metric, threshold).edges == hand.wired


def test_the_hand_weighted_ioi_circuit_is_found_exactly():
    hand = ioi_model(n=8)
    model = cl.load_model(hand.model)
    assert acdc(model, hand.prompts, distance(), 0.05).edges == hand.carries
    # By the task's direction, the negative head's edges are in the way and go.
    helping = {edge for edge in hand.carries if "a2.h2" not in edge}
    assert acdc(model, hand.prompts, cl.logit_diff(), 0.05).edges == helping


@pytest.mark.parametrize(("task", "threshold"), [("ioi", 0.05), ("induction", 0.05)])
def test_on_the_embedded_model(task, threshold):
    model = cl.load_model("embedded")
    prompts = cl.tasks.by_name(task)(n=6, seed=0, model=model)
    plain = sequential_acdc(model, prompts, cl.kl(), threshold)
    found = acdc(model, prompts, threshold=threshold)
    assert found.edges == plain.edges
    assert 4 * work(found)["component_evaluations"] < plain.components


def test_guesses_and_chunks_change_no_decision():
    model, prompts = read_models.model(), pairs(5)
    first = acdc_sweep(model, prompts, thresholds=[0.02], speculate=1)[0]
    for guesses, size in ((3, 2), (40, None)):
        again = acdc_sweep(
            model, prompts, thresholds=[0.02], speculate=guesses, batch_size=size
        )[0]
        assert again.circuit.edges == first.circuit.edges
        np.testing.assert_allclose(
            again.decisions.scores, first.decisions.scores, rtol=0, atol=1e-12
        )
    passes = [work(r.circuit)["passes"] for r in (first, again)]
    assert passes[1] < passes[0]


def test_thresholds_share_the_decisions_they_agree_on():
    model, prompts = read_models.model(), pairs()
    thresholds = [0.05, 0.002, 0.02]
    together = acdc_sweep(model, prompts, thresholds=thresholds, speculate=1)
    apart = [
        acdc_sweep(model, prompts, thresholds=[t], speculate=1)[0] for t in thresholds
    ]
    assert [r.threshold for r in together] == thresholds
    for one, other in zip(together, apart, strict=True):
        assert one.circuit.edges == other.circuit.edges
        np.testing.assert_allclose(
            one.decisions.scores, other.decisions.scores, rtol=0, atol=1e-12
        )
    assert len({r.circuit.edges for r in together}) == 3
    shared = work(together[0].circuit)["evaluations"]
    assert shared < sum(work(r.circuit)["evaluations"] for r in apart)


@pytest.mark.parametrize("thresholds", [[0.02], [0.05, 0.005]])
def test_a_killed_run_goes_on_from_its_last_step(tmp_path, thresholds):
    model, prompts = read_models.model(), pairs()
    path = tmp_path / "steps.jsonl"
    options = {"thresholds": thresholds, "checkpoint": path}
    whole = acdc_sweep(model, prompts, **options)
    text = path.read_bytes()
    lines = text.count(b"\n")
    for kept in (len(text) // 3, len(text) - 3):
        path.write_bytes(text[:kept])
        again = acdc_sweep(model, prompts, **options)
        for one, other in zip(again, whole, strict=True):
            assert one.circuit.edges == other.circuit.edges
            np.testing.assert_allclose(
                one.decisions.scores, other.decisions.scores, atol=1e-12
            )
        assert path.read_bytes().count(b"\n") == lines
    assert work(again[0].circuit)["evaluations"] <= 8
    with pytest.raises(CircuitlabError) as refused:
        acdc(model, prompts, threshold=0.5, checkpoint=path)
    assert refused.value.code == "checkpoint_mismatch"


def test_going_on_finds_the_circuit_that_was_saved(tmp_path):
    model, prompts, path = read_models.model(), pairs(), tmp_path / "steps.jsonl"
    whole, again = (
        acdc(model, prompts, threshold=0.02, checkpoint=path) for _ in range(2)
    )
    assert (work(whole)["replayed"], work(again)["evaluations"]) == (0, 0)
    assert work(again)["replayed"] == work(whole)["decisions"] + 1
    with Store(tmp_path / "store.duckdb") as store:
        assert store.save(whole) == store.save(again)


HEAD = b'{"order":"receivers'
FIRST = b'{"value":0.1}'


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"clean": "a", "corrupted": "b"}\n{"clean": "c"', "checkpoint_mismatch"),
        (b"no newline", "checkpoint_mismatch"),
        (b"\x00\xff\n", "checkpoint_mismatch"),
        (b"[1,2]\n", "checkpoint_mismatch"),
        (b"\n\n", "checkpoint_mismatch"),
        (HEAD + b'","schema":"circuitlab_acdc_v1"}\n', "checkpoint_mismatch"),
        (b"HEAD\nedge\n", "checkpoint_corrupt"),
        (b'HEAD\n{"foo":1}\n', "checkpoint_corrupt"),
        (b'HEAD\n{"value":"x"}\n{"edge":[0,1', "checkpoint_corrupt"),
        (b'HEAD\n{"edge":[0,1],"value":0.1}\n', "checkpoint_mismatch"),
        (b"HEAD\n" + FIRST + b"\n" + FIRST + b"\n", "checkpoint_mismatch"),
    ],
)
def test_a_file_that_is_refused_stays_as_it_was(tmp_path, content, code):
    model, prompts, path = read_models.model(), pairs(), tmp_path / "steps.jsonl"
    acdc(model, prompts, threshold=0.02, checkpoint=path)
    head = path.read_bytes().partition(b"\n")[0]
    path.write_bytes(content.replace(b"HEAD", head))
    with pytest.raises(CircuitlabError) as refused:
        acdc(model, prompts, threshold=0.02, checkpoint=path)
    assert refused.value.code == code
    assert path.read_bytes() == content.replace(b"HEAD", head)


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_first_line_that_was_cut_short_is_written_again(tmp_path, cut):
    model, prompts, path = read_models.model(), pairs(), tmp_path / "steps.jsonl"
    found = acdc(model, prompts, threshold=0.02, checkpoint=path)
    text = path.read_bytes()
    path.write_bytes(text.partition(b"\n")[0][:cut])
    assert acdc(model, prompts, threshold=0.02, checkpoint=path) == found
    assert path.read_bytes() == text


def test_a_log_of_more_steps_than_the_run_has_is_refused(tmp_path):
    model, prompts, path = read_models.model(), pairs(), tmp_path / "steps.jsonl"
    acdc(model, prompts, threshold=0.02, checkpoint=path)
    with path.open("ab") as file:
        file.write(b'{"edge":[0,1],"value":0.5}\n')
    with pytest.raises(CircuitlabError) as refused:
        acdc(model, prompts, threshold=0.02, checkpoint=path)
    assert refused.value.code == "checkpoint_mismatch"


@pytest.mark.parametrize("name", ["", "file/steps.jsonl"])
def test_a_checkpoint_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(CircuitlabError) as refused:
        acdc(read_models.model(), pairs(), checkpoint=tmp_path / name)
    assert refused.value.code == "checkpoint_unusable"


def test_a_checkpoint_has_one_holder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WAIT", 0.1)
    model, prompts, path = read_models.model(), pairs(), tmp_path / "steps.jsonl"
    seen = []

    def meanwhile(done: int, total: int) -> None:
        if not seen:
            with pytest.raises(CircuitlabError) as refused:
                acdc(model, prompts, threshold=0.02, checkpoint=path)
            seen.append(refused.value)

    found = acdc(model, prompts, threshold=0.02, checkpoint=path, progress=meanwhile)
    assert seen[0].code == "checkpoint_held"
    assert f"process {os.getpid()} on" in str(seen[0])
    assert acdc(model, prompts, threshold=0.02, checkpoint=path) == found


def test_an_interrupted_run_has_kept_its_steps(tmp_path):
    model, prompts = read_models.model(), pairs()
    path = tmp_path / "steps.jsonl"

    class Interrupted(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        acdc(model, prompts, threshold=0.02, checkpoint=path, progress=stop)
    kept = len(path.read_text().splitlines())
    seen: list[tuple[int, int]] = []
    found = acdc(
        model,
        prompts,
        threshold=0.02,
        checkpoint=path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.edges == acdc(model, prompts, threshold=0.02).edges
    assert kept > 10
    assert seen[-1] == (model.shape.n_edges, model.shape.n_edges)


def test_a_start_restricts_the_universe():
    model, prompts = read_models.model(), pairs()
    start = cl.Circuit.from_edges(
        [edge for i, edge in enumerate(model.shape.edge_names) if i % 3], model.shape
    )
    plain = sequential_acdc(model, prompts, cl.kl(), 0.01, start)
    found = acdc_sweep(model, prompts, thresholds=[0.01], start=start)[0]
    assert found.circuit.edges == plain.edges <= start.edges
    assert found.circuit.provenance["universe"] == len(start)
    rows = found.decisions.to_pandas().set_index("edge")
    outside = rows.loc[sorted(set(model.shape.edge_names) - start.edges)]
    assert set(outside.status) == {"unavailable"}


def test_edges_into_unread_components_go_untested():
    model, prompts = read_models.model(), pairs()
    found = acdc_sweep(model, prompts, thresholds=[0.05])[0]
    rows = found.decisions.to_pandas()
    sending = {edge.partition("->")[0] for edge in found.circuit.edges}
    unread = ~rows.receiver.isin([*sending, "logits"])
    assert unread.any()
    assert set(rows[unread].status) == {"unavailable"}
    assert not found.circuit.edges & set(rows[unread].edge)


def test_provenance_says_how_it_came_about():
    model, prompts = read_models.model(), pairs()
    found = acdc_sweep(model, prompts, thresholds=[0.02])[0]
    facts = found.circuit.provenance
    json.dumps(facts)
    assert facts["selector"] == "acdc"
    assert facts["run_id"] == found.decisions.run_id
    assert facts["n"] == len(found.circuit)
    done = work(found.circuit)
    assert done["decisions"] + done["skipped"] == model.shape.n_edges
    assert not done.keys() & facts.keys()
    assert facts["rankable"] == done["decisions"]
    assert facts["excluded"] == {"unread": done["skipped"]}
    # The words of a circuit that was selected from scores.
    scores = cl.edge_scores(model, prompts, cl.logit_diff())
    assert cl.top_k(scores, 3).provenance.keys() - facts.keys() <= {"k", "dangling"}
    assert facts["policy_digest"] == found.decisions.run.policy_digest
    assert (facts["method"], facts["reduction"]) == ("acdc", "mean_examples")
    assert facts["target"]["name"] == "kl"
    assert facts["pins"] == []
    start = cl.Circuit.from_edges(["input->m0", "m0->logits"], model.shape)
    small = acdc(model, prompts, threshold=0.02, start=start)
    assert small.provenance["excluded"]["start"] == model.shape.n_edges - 2
    nothing = acdc(model, prompts, start=cl.Circuit(frozenset(), model.shape))
    assert nothing.provenance["start"] == cl.Circuit(frozenset()).id
    other = acdc_sweep(model, prompts, thresholds=[0.03])[0]
    assert other.decisions.run.policy_digest != found.decisions.run.policy_digest


OTHER_PROCESS = """
from circuitlab.acdc import acdc
from circuitlab.wiring import wiring_of
from tests import read_models
from tests.test_acdc import pairs
found = acdc(read_models.model(), pairs(), threshold=0.02)
done = found.run.provenance["decisions"]
print(found.id, found.provenance["order_digest"], done)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_other_processes_find_the_same_circuit(hash_seed):
    found = acdc(read_models.model(), pairs(), threshold=0.02)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = found.provenance
    expected = [found.id, facts["order_digest"], str(work(found)["decisions"])]
    assert done.stdout.split()[-3:] == expected


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"threshold": -1.0}, "threshold_invalid"),
        ({"threshold": float("nan")}, "threshold_invalid"),
        ({"threshold": "0.1"}, "threshold_invalid"),
        ({"threshold": True}, "threshold_invalid"),
        ({"speculate": 0}, "speculate_out_of_range"),
        ({"speculate": 2.5}, "speculate_out_of_range"),
        ({"batch_size": 0}, "batch_size_invalid"),
        ({"metric": "kl"}, "metric_invalid"),
        ({"start": "input->m0"}, "start_invalid"),
        ({"ablation": "none"}, "ablation_unknown"),
        ({"start": cl.Circuit.from_edges(["m5->logits"])}, "edge_unknown"),
    ],
)
def test_refusals(options, code):
    with pytest.raises(CircuitlabError) as refused:
        acdc(read_models.model(), pairs(), **options)
    assert refused.value.code == code
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("thresholds", [0.1, "0.1", [], [0.1, "0.2"]])
def test_thresholds_are_a_list_of_numbers(thresholds):
    with pytest.raises(CircuitlabError) as refused:
        acdc_sweep(read_models.model(), pairs(), thresholds=thresholds)
    assert refused.value.code == "threshold_invalid"


def test_hierarchical_pruning_tests_only_what_scores_high():
    model = cl.load_model("embedded")
    prompts = cl.tasks.induction(n=6, seed=0, model=model)
    full = acdc(model, prompts, threshold=0.05)
    inside = hierarchical_acdc(model, prompts, threshold=0.05, fraction=0.3)
    assert work(inside)["evaluations"] < work(full)["evaluations"]
    assert inside.provenance["fraction"] == 0.3
    recall = cl.overlap(inside, full).recall
    assert recall is not None
    assert recall >= 0.7
    with pytest.raises(CircuitlabError) as refused:
        hierarchical_acdc(model, prompts, start=full)
    assert refused.value.code == "universe_ambiguous"


@pytest.mark.slow
@pytest.mark.real_model
def test_a_real_model_decides_as_in_the_golden_file(smollm2):
    golden = json.loads((GOLDEN / "decisions.json").read_text(encoding="utf-8"))
    model = cl.load_model(smollm2)
    prompts = cl.Prompts.from_file(GOLDEN / "greater_than.jsonl", model=model)
    start = cl.Circuit.from_edges(golden["start"], model.shape)
    found = acdc_sweep(model, prompts, thresholds=[golden["threshold"]], start=start)[0]
    assert list(found.circuit) == golden["kept"]
    tested = {row.edge: row.score for row in found.decisions if row.status == "ok"}
    assert tested == pytest.approx(golden["decisions"], abs=2e-4)
    # And the sequential algorithm again, for the first thirty.
    plain = sequential_acdc(
        model, prompts, cl.kl(), golden["threshold"], start, limit=30
    )
    assert plain.changes == pytest.approx(
        dict(list(golden["decisions"].items())[:30]), abs=2e-4
    )
