"""The commands over node scores, searches, masks, comparisons and combined runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import circuitlab as cl
from circuitlab import cli
from circuitlab.acdc import hierarchical_acdc
from circuitlab.circuits import auroc
from circuitlab.edges import edge_scores, scores_by_node
from circuitlab.node_table import NodeTable
from circuitlab.sites import ModelShape
from circuitlab.store import Store
from tests.test_cli_science import Lab

N = 4
EAP = ("--method", "eap", "--n", N)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that this file's tests share: what they save has its content's id."""
    return tmp_path_factory.mktemp("cli_methods") / "store.duckdb"


@pytest.fixture
def lab(path: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(path, capsys)


def refused(lab: Lab, *words: object) -> tuple[int, str]:
    """The exit code and the error's code of a command."""
    lab.capsys.readouterr()
    code = cli.run([*map(str, words), "--store", str(lab.store)])
    printed = lab.capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error["), printed.err
    assert printed.err.count("\n") == 1
    return code, printed.err.partition("[")[2].partition("]")[0]


def circuit_of(lab: Lab, k: int = 30) -> dict[str, Any]:
    return lab("circuit", lab("score", "embedded", *EAP)["run_id"], "--top-k", k)


def rerun(lab: Lab, run_id: str) -> tuple[str, str]:
    """The run that rerunning a run gives, and what it says of it."""
    lab.capsys.readouterr()
    assert cli.run(["rerun", run_id, "--json", "--store", str(lab.store)]) == 0
    printed = lab.capsys.readouterr()
    return json.loads(printed.out)["run_id"], printed.err


def remade(lab: Lab, run_id: str) -> bool:
    """Whether rerunning a run gives it again, and says so."""
    again, said = rerun(lab, run_id)
    return again == run_id and "bit for bit" in said


# --- nodes ---


def test_a_node_is_the_sum_of_the_edges_that_leave_it(lab: Lab):
    found = lab("nodes", "embedded", "--n", N, "--top", 100)
    edges = Store(lab.store).load(lab("score", "embedded", "--n", N)["run_id"])
    expected = scores_by_node(edges).to_pylist()
    told = {row["component"]: row["score"] for row in found["top"]}
    assert told == pytest.approx(
        {r["component"]: r["score"] for r in expected}, abs=1e-5
    )
    sizes = [abs(row["score"]) for row in found["top"]]
    assert sizes == sorted(sizes, reverse=True)


def test_nodes_are_kept_and_made_again(lab: Lab):
    nodes = lab("nodes", "embedded", "--n", N)["run_id"]
    neurons = lab("nodes", "embedded", "--n", N, "--neurons")["run_id"]
    whole, features = Store(lab.store).load(nodes), Store(lab.store).load(neurons)
    assert isinstance(whole, NodeTable)
    assert (whole.run_id, whole.neurons, features.neurons) == (nodes, False, True)
    width = len(features) // len(whole)
    sums = features.scores.reshape(len(whole), width).sum(1)
    assert sums == pytest.approx(whole.scores, abs=1e-5)
    assert remade(lab, neurons)
    query = "select address, site, score from v_act where run_id = $run and pass = 0"
    rows = lab("sql", query, "--param", f"run={json.dumps(nodes)}")
    assert {"address": "a0.h1", "site": "blocks.0.attn.h1"}.items() <= {
        row["address"]: row for row in rows
    }["a0.h1"].items()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--method", "exact"), "method_unsupported"),
        (("--method", "eap", "--metric", "kl"), "metric_stationary_at_clean"),
        (("--method", "magic"), "method_unknown"),
    ],
)
def test_methods_that_score_no_nodes_are_refused(lab: Lab, words: Sequence, error: str):
    assert refused(lab, "nodes", "embedded", *words) == (2, error)


# --- exact effects of a circuit ---


def test_exact_effects_of_a_circuit_alone(lab: Lab):
    circuit = circuit_of(lab, 12)
    words = ("score", "embedded", "--method", "exact", "--n", N)
    found = lab(*words, "--circuit", circuit["circuit_id"])
    edges = Store(lab.store).load(found["run_id"])
    kept = {row["edge"] for row in circuit["edges"]}
    assert {row.edge for row in edges} == kept
    assert {row.status for row in edges} == {"ok"}
    assert remade(lab, found["run_id"])
    assert refused(
        lab, "score", "embedded", *EAP, "--circuit", circuit["circuit_id"]
    ) == (
        2,
        "circuit_needs_exact",
    )
    assert refused(lab, *words, "--circuit", "0123456789") == (3, "run_unknown")


# --- acdc inside a share of the edges ---


def test_acdc_inside_the_best_share_is_the_librarys(lab: Lab):
    words = ("--threshold", 0.1, "--fraction", 0.2, "--n", N, "--task", "induction")
    (found,) = lab("acdc", "embedded", *words)
    saved = Store(lab.store).load(found["run_id"])
    model = cl.load_model("embedded")
    prompts = cl.tasks.induction(N, 0, model)
    expected = hierarchical_acdc(model, prompts, threshold=0.1, fraction=0.2)
    assert saved.edges == expected.edges
    assert saved.provenance["fraction"] == 0.2
    scores = Store(lab.store).load(found["scores_run"])
    assert saved.edges <= cl.top_fraction(scores, 0.2, rank="magnitude").edges
    assert remade(lab, found["decisions_run"])
    assert lab("evaluate", found["circuit_id"])["prompts_overlap"] is False


def test_acdc_decisions_are_made_again_as_decisions(lab: Lab):
    start = circuit_of(lab)["circuit_id"]
    words = ("--threshold", 0.1, "--threshold", 0.4, "--n", N)
    low, high = lab("acdc", "embedded", *words, "--start", start)
    assert low["n_edges"] > high["n_edges"]
    for found in (low, high):
        # Alone, a threshold speculates otherwise, which may round otherwise.
        again, said = rerun(lab, found["decisions_run"])
        assert "not the same" not in said
        old, new = (
            Store(lab.store).load(run_id) for run_id in (found["decisions_run"], again)
        )
        assert [row.status for row in old] == [row.status for row in new]
        assert new.scores == pytest.approx(old.scores, abs=1e-5, nan_ok=True)
        assert new.run.policy["method"] == "acdc"
        assert new.run.provenance["command"]["method"] == "acdc"


def test_two_universes_are_refused(lab: Lab):
    words = ("acdc", "embedded", "--fraction")
    assert refused(lab, *words, 0.1, "--start", "abc") == (2, "universe_ambiguous")
    assert refused(lab, *words, 1.5) == (2, "fraction_out_of_range")


# --- masks ---


def test_a_trained_mask_is_a_circuit_and_a_run_of_scores(lab: Lab):
    words = ("--steps", 8, "--rate", 0.6, "--sparsity", 8, "--n", N, "--batch-size", 2)
    found = lab("mask", "embedded", *words)
    circuit, gates = (
        Store(lab.store).load(found[name]) for name in ("run_id", "gates_run")
    )
    assert 0 < len(circuit) == found["n_edges"] < 262
    assert list(circuit.ordered) == found["edges"]
    assert gates.run.policy["method"] == "edge_mask"
    chosen = lab(
        "circuit", found["gates_run"], "--top-k", len(circuit), "--rank", "support",
        "--no-prune",
    )  # fmt: skip
    assert {row["edge"] for row in chosen["edges"]} == circuit.edges
    assert lab("evaluate", found["circuit_id"])["prompts_overlap"] is False
    assert remade(lab, found["gates_run"])


def test_a_mask_inside_a_circuit(lab: Lab):
    start = circuit_of(lab)
    found = lab(
        "mask", "embedded", "--steps", 2, "--n", N, "--start", start["circuit_id"]
    )
    assert set(found["edges"]) <= {row["edge"] for row in start["edges"]}
    assert remade(lab, found["gates_run"])
    assert refused(lab, "mask", "embedded", "--steps", 0) == (2, "training_invalid")
    assert refused(lab, "mask", "embedded", "--metric", "x") == (2, "metric_unknown")


# --- comparing ---


def test_a_circuit_is_compared_with_itself_and_with_less(lab: Lab, tmp_path: Path):
    known, less = circuit_of(lab, 40), circuit_of(lab, 20)
    found = lab("compare", known["circuit_id"], known["circuit_id"], less["circuit_id"])
    by_id = {row["circuit_id"]: row for row in found["rows"]}
    assert by_id[known["circuit_id"]]["iou"] == 1.0
    share = less["n_edges"] / known["n_edges"]
    row = by_id[less["circuit_id"]]
    assert (row["precision"], row["false_positive_rate"]) == (1.0, 0.0)
    assert row["true_positive_rate"] == row["iou"] == pytest.approx(share)
    (curve,) = found["curves"]
    assert (curve["auc"], curve["n_universe"]) == (1.0, 262)
    file = tmp_path / "known.json"
    lab("export", file, known["circuit_id"])
    again = lab("compare", file, known["circuit_id"], less["circuit_id"])
    assert again["rows"] == found["rows"]
    saved = Store(lab.store).load_record(found["run_id"]).tables["eval"].to_pylist()
    assert {row["label"] for row in saved} == {"compared"}
    assert {row["auc"] for row in saved} == {1.0}


def test_scores_are_compared_by_their_whole_ranking(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    known = lab("circuit", run_id, "--top-k", 40, "--no-prune")["circuit_id"]
    found = lab("compare", known, run_id, "--sizes", "20,40,80")
    assert [row["n_both"] for row in found["rows"]] == [20, 40, 40]
    (curve,) = found["curves"]
    assert (curve["auc"], curve["scores_run"]) == (1.0, run_id)
    (row,) = lab("compare", known, run_id, "--rank", "support")["rows"]
    assert row["n_edges"] == 40
    universe = lab("circuit", run_id, "--top-k", 100, "--no-prune")["circuit_id"]
    (curve,) = lab("compare", known, run_id, "--universe", universe)["curves"]
    assert (curve["n_known"], curve["n_universe"]) == (40, 100)


def test_what_can_not_be_compared(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    known = circuit_of(lab)["run_id"]
    assert refused(lab, "compare", run_id, known) == (3, "run_kind_wrong")
    empty = lab("circuit", run_id, "--top-k", 0)["circuit_id"]
    assert refused(lab, "compare", empty, known) == (2, "known_circuit_empty")
    words = ("compare", known, known, "--universe")
    assert refused(lab, *words, empty) == (2, "universe_empty")
    assert refused(lab, "compare", "no.json", known) == (2, "interchange_missing")
    assert refused(lab, "compare", known, run_id, "--sizes", "a") == (
        2,
        "sizes_invalid",
    )
    assert "or mib" not in said_of(lab, "compare", known, run_id, "--sizes", "mib")[2]
    assert refused(lab, "compare", known) == (2, "usage")


def test_what_is_compared_has_one_universe(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    known = lab("circuit", run_id, "--top-k", 40, "--no-prune")
    some = lab("circuit", run_id, "--top-k", 60, "--no-prune", "--rank", "support")
    words = ("score", "embedded", "--method", "exact", "--n", N, "--circuit")
    exact = lab(*words, some["circuit_id"])["run_id"]
    found = lab("compare", known["circuit_id"], exact, "--sizes", "15")
    (row,), (curve,) = found["rows"], found["curves"]
    edges = Store(lab.store).load(exact)
    truth = Store(lab.store).load(known["run_id"])
    inside = truth.edges & set(edges.rows["edge"].to_pylist())
    assert (curve["n_universe"], curve["n_known"]) == (60, len(inside))
    assert 0 < len(inside) < 40
    assert curve["auc"] == auroc(edges, truth)
    wrong = row["n_edges"] - row["n_both"]
    assert row["false_positive_rate"] == wrong / (60 - len(inside))
    assert row["true_positive_rate"] == row["n_both"] / len(inside)
    assert row["outside"] == 40 - len(inside)


def test_where_all_is_known_there_is_no_area(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    some = lab("circuit", run_id, "--top-k", 30, "--no-prune")
    words = ("score", "embedded", "--method", "exact", "--n", N, "--circuit")
    exact = lab(*words, some["circuit_id"])["run_id"]
    known = lab("circuit", run_id, "--top-k", 40, "--no-prune")["run_id"]
    found = lab("compare", known, exact, "--sizes", "10,30")
    assert found["curves"][0]["auc"] is None
    assert [row["true_positive_rate"] for row in found["rows"]] == [10 / 30, 1.0]
    assert [row["precision"] for row in found["rows"]] == [1.0, 1.0]
    assert [row["false_positive_rate"] for row in found["rows"]] == [None, None]
    code, out, said = said_of(lab, "compare", known, exact)
    assert (code, "no AUC of" in out, "no AUC of" in said) == (0, True, True)


def test_models_of_different_shape_are_not_compared(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    shape = ModelShape(2, 2, 2, 8, 4, 11)
    edges = ["input->m0", "m0->logits"]
    other = Store(lab.store).save(cl.Circuit.from_edges(edges, shape))
    own = circuit_of(lab)["run_id"]
    for words in ((own, other), (other, run_id), (own, own, "--universe", other)):
        assert refused(lab, "compare", *words) == (2, "circuit_shape_mismatch")


# --- combining ---


def test_combined_runs_are_as_scored_together(lab: Lab):
    parts = [lab("score", "embedded", *EAP, "--seed", s)["run_id"] for s in (1, 2)]
    found = lab("combine", *parts)
    combined = Store(lab.store).load(found["run_id"])
    assert combined.run.n == 2 * N
    assert combined.run.provenance["combined"] == parts
    model = cl.load_model("embedded")
    sets = [cl.tasks.ioi(N, seed, model) for seed in (1, 2)]
    together = edge_scores(model, sets, cl.logit_diff())
    assert together.run.params_digest == combined.run.params_digest
    assert combined.scores == pytest.approx(together.scores, abs=1e-6)
    circuit = lab("circuit", found["run_id"], "--top-k", 40)["circuit_id"]
    held = lab("evaluate", circuit)
    assert (held["n"], held["prompts_overlap"]) == (2 * N, False)
    assert lab("evaluate", circuit, "--on", "scored")["n"] == 2 * N
    assert lab("evaluate", circuit, "--seed", 9, "--n", 3)["n"] == 3


def test_a_combined_run_is_made_again_from_all_its_parts(lab: Lab):
    ids = [lab("score", "embedded", *EAP, "--seed", s)["run_id"] for s in (1, 2, 3)]
    two = lab("combine", *ids[:2])["run_id"]
    three = lab("combine", two, ids[2])
    assert three["run_id"] == lab("combine", *ids)["run_id"]
    assert remade(lab, three["run_id"])
    made = Store(lab.store).load(three["run_id"])
    assert made.run.provenance["combined"] == ids
    start = circuit_of(lab, 12)["circuit_id"]
    words = ("score", "embedded", "--method", "exact", "--circuit", start, "--n", 2)
    some = [lab(*words, "--seed", s)["run_id"] for s in (1, 2)]
    assert remade(lab, lab("combine", *some)["run_id"])


def test_a_search_inside_a_circuit_is_made_again_elsewhere(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    start = circuit_of(lab, 22)
    words = ("mask", "embedded", "--steps", 2, "--n", N, "--start", start["circuit_id"])
    gates = lab(*words)["gates_run"]
    folder, other = tmp_path / "out", Lab(tmp_path / "other.duckdb", capsys)
    assert lab("export", folder, gates) == [gates, start["run_id"]]
    other("import", folder)
    assert remade(other, gates)
    # An export of the library takes along what it is told.
    Store(lab.store).export([gates], tmp_path / "alone")
    bare = Lab(tmp_path / "bare.duckdb", capsys)
    bare("import", tmp_path / "alone")
    code, _, said = said_of(bare, "rerun", gates)
    assert (code, said.partition(": ")[0]) == (3, "error[universe_missing]")
    assert start["circuit_id"] in said
    lab("export", tmp_path / "circuit", start["circuit_id"])
    bare("import", tmp_path / "circuit")
    assert remade(bare, gates)


def test_gates_are_made_again_in_their_own_batches(lab: Lab):
    words = ("--steps", 2, "--n", N, "--batch-size", 2)
    gates = lab("mask", "embedded", *words)["gates_run"]
    assert lab("rerun", gates, "--batch-size", 2)["run_id"] == gates
    assert refused(lab, "rerun", gates, "--batch-size", 1) == (2, "batch_size_invalid")


def test_runs_that_do_not_go_together_are_refused(lab: Lab):
    one = lab("score", "embedded", *EAP)["run_id"]
    other = lab("score", "embedded", "--n", N)["run_id"]
    assert refused(lab, "combine", one, other) == (2, "combine_mismatch")
    assert refused(lab, "combine", one, one) == (2, "combine_repeated")
    assert refused(lab, "combine", one) == (2, "combine_empty")
    circuit = circuit_of(lab)["run_id"]
    assert refused(lab, "combine", one, circuit) == (3, "run_kind_wrong")


def test_prompts_that_two_runs_share_are_told(lab: Lab):
    one = lab("score", "embedded", "--method", "eap", "--n", N)["run_id"]
    more = lab("score", "embedded", "--method", "eap", "--n", N + 2)["run_id"]
    lab.capsys.readouterr()
    assert cli.run(["combine", one, more, "--store", str(lab.store)]) == 0
    assert f"{N} prompts stand in more than one" in lab.capsys.readouterr().err


# --- one circuit of several runs ---


def said_of(lab: Lab, *words: object) -> tuple[int, str, str]:
    """The exit code of a command, and what it said for people."""
    lab.capsys.readouterr()
    code = cli.run([*map(str, words), "--store", str(lab.store)])
    printed = lab.capsys.readouterr()
    return code, printed.out, printed.err


def test_the_same_edges_of_two_computations_are_not_mixed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lab = Lab(tmp_path / "store.duckdb", capsys)
    made = circuit_of(lab, 20)
    circuit = made["circuit_id"]
    before = lab("evaluate", circuit)
    words = ("--start", circuit, "--threshold", 0, "--n", N)
    (kept,) = lab("acdc", "embedded", *words)
    assert kept["circuit_id"] == circuit
    for command in (
        ("evaluate", circuit),
        ("validate", circuit),
        ("compare", circuit, circuit),
    ):
        code, _, said = said_of(lab, *command)
        assert (code, said.partition("[")[2].partition("]")[0]) == (3, "run_ambiguous")
        assert f"{made['run_id']} (metric logit_diff" in said
        assert f"{kept['run_id']} (metric kl" in said
    assert lab("evaluate", made["run_id"]) == before
    other = lab("evaluate", kept["run_id"])
    assert (before["metric_name"], other["metric_name"]) == ("logit_diff", "kl")
    # Where only the edges count, there is nothing to mix up.
    lab("compare", circuit, made["run_id"])
    lab("acdc", "embedded", *words)


def test_searches_that_found_the_same_edges_alike_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lab = Lab(tmp_path / "store.duckdb", capsys)
    start = circuit_of(lab, 20)["run_id"]
    words = ("acdc", "embedded", "--start", start, "--n", N, "--threshold")
    (low,), (high,) = lab(*words, 0.05), lab(*words, 0.0500001)
    assert low["run_id"] != high["run_id"]
    assert low["circuit_id"] == high["circuit_id"]
    assert lab("evaluate", low["circuit_id"])["metric_name"] == "kl"


def test_circuits_of_one_run_are_one_and_so_are_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lab = Lab(tmp_path / "store.duckdb", capsys)
    made = circuit_of(lab, 20)
    edges = Store(lab.store).load(made["scores_run"])
    again = lab("circuit", made["scores_run"], "--top-k", 20, "--name", "again")
    assert again["run_id"] != made["run_id"]
    file = tmp_path / "plain.csv"
    lab("export", file, made["run_id"])
    lab("import", file)
    found = lab("evaluate", made["circuit_id"])
    assert (found["dataset"], found["model"]) == ("ioi", edges.run.model.name)


def test_an_evaluation_says_of_what_it_is(lab: Lab):
    run_id = lab("score", "embedded", *EAP)["run_id"]
    made = circuit_of(lab)
    code, out, _ = said_of(lab, "circuit", run_id, "--top-k", 30)
    assert (code, out.splitlines()[-1]) == (0, f"run {made['run_id']}")
    for command in (
        ("evaluate", made["run_id"]),
        ("curve", run_id, "--sizes", "10,20"),
        ("validate", made["run_id"], "--minimality", "none", "--knockouts", 0),
    ):
        code, out, _ = said_of(lab, *command)
        first = out.splitlines()[0]
        assert first.startswith("logit_diff of ")
        assert first.endswith(f" on {N} prompts of ioi")


# --- which prompts ---


def test_as_many_prompts_are_measured_as_were_asked_for(lab: Lab):
    made = circuit_of(lab, 25)["run_id"]
    found = lab("evaluate", made, "--n", 5 * N)
    assert (found["n"], found["prompts_overlap"]) == (5 * N, False)
    assert lab("evaluate", made)["n"] == N
    assert lab("evaluate", made, "--n", 2)["n"] == 2
    found = lab("evaluate", made, "--on", "scored", "--n", 2)
    assert (found["n"], found["prompts_overlap"]) == (2, True)
    for words, error in (
        (("--n", 0), "task_size_invalid"),
        (("--n", -1), "task_size_invalid"),
        (("--on", "scored", "--n", N + 1), "task_size_invalid"),
        (("--on", "scored", "--seed", 3), "prompts_ambiguous"),
        (("--on", "scored", "--task", "ioi"), "prompts_ambiguous"),
    ):
        assert refused(lab, "evaluate", made, *words) == (2, error)


def test_more_prompts_than_a_file_holds_out_are_refused(lab: Lab, tmp_path: Path):
    names = ["Mary", "John", "James", "Robert", "David", "Emma"]
    texts = "When {} and {} went to the park, {} gave a book to"
    rows = [
        {
            "clean": texts.format(one, two, two),
            "corrupted": texts.format(one, two, one),
            "answer": f" {one}",
            "wrong_answer": f" {two}",
        }
        for one, two in zip(names, names[1:] + names[:1], strict=True)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run_id = lab("score", "embedded", "--file", file, *EAP)["run_id"]
    made = lab("circuit", run_id, "--top-k", 25)["run_id"]
    assert lab("evaluate", made, "--n", 2)["n"] == 2
    assert refused(lab, "evaluate", made, "--n", 3) == (2, "no_held_out_prompts")


def test_runs_of_several_tasks_are_named_after_all_of_them(lab: Lab):
    tasks = ("ioi", "greater_than")
    parts = [lab("score", "embedded", *EAP, "--task", t)["run_id"] for t in tasks]
    found = lab("combine", *parts)
    assert found["dataset"] == "ioi+greater_than"
    made = lab("circuit", found["run_id"], "--top-k", 40)["run_id"]
    for words in ((), ("--n", 2 * N), ("--n", 2), ("--seed", 9), ("--on", "scored")):
        measured = lab("evaluate", made, *words)
        assert measured["dataset"] == "ioi+greater_than"
        assert measured["n"] == (2 if words == ("--n", 2) else 2 * N)
    seeds = [lab("score", "embedded", *EAP, "--seed", s)["run_id"] for s in (1, 2)]
    combined = Store(lab.store).load(lab("combine", *seeds)["run_id"])
    assert (combined.run.dataset, combined.run.seed) == ("ioi", None)


# --- what a refusal says ---


@pytest.mark.parametrize(
    ("words", "told", "untold"),
    [
        (
            ("mask", "embedded", "--open", 1.0),
            "--open is 1.0; give a number above",
            "start",
        ),
        (("mask", "embedded", "--gate-seed", -1), "--gate-seed", "seed is"),
        (("nodes", "embedded", "--method", "foo"), "eap, eap-ig, clean", "exact"),
        (("nodes", "embedded", "--method", "exact"), "--method eap, eap-ig", "EAP("),
        (
            ("nodes", "embedded", "--metric", "kl", "--method", "eap"),
            "--method eap-ig",
            "EAPIG(",
        ),
        (
            ("score", "embedded", "--metric", "kl", "--method", "eap"),
            "--method eap-ig",
            "EAPIG(",
        ),
    ],
)
def test_a_refusal_names_options_and_not_what_python_calls_them(
    lab: Lab, words: Sequence, told: str, untold: str
):
    code, _, said = said_of(lab, *words)
    assert code == 2
    assert told in said
    assert untold not in said


def test_a_circuit_of_another_model_is_refused_with_a_remedy(lab: Lab):
    other = Store(lab.store).save(cl.Circuit.from_edges(["input->m7"]))
    for words in (
        ("mask", "embedded", "--start", other, "--n", 2),
        ("acdc", "embedded", "--start", other, "--n", 2),
        ("score", "embedded", "--method", "exact", "--circuit", other, "--n", 2),
    ):
        code, _, said = said_of(lab, *words)
        assert (code, said.partition(": ")[0]) == (2, "error[edge_unknown]")
        assert "give edges, or a circuit, of this model" in said


def test_circuits_of_no_model_need_a_universe(lab: Lab):
    store = Store(lab.store)
    edges = ["input->m0", "m0->logits", "m1->logits"]
    known, found, among = (
        store.save(cl.Circuit.from_edges(some))
        for some in (edges[:1], edges[:2], edges)
    )
    code, _, said = said_of(lab, "compare", known, found)
    assert (code, said.partition(": ")[0]) == (2, "error[universe_unknown]")
    assert "--universe" in said
    (row,) = lab("compare", known, found, "--universe", among)["rows"]
    assert (row["precision"], row["false_positive_rate"]) == (0.5, 0.5)
