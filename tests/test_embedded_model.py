"""The embedded model: small, offline, able, and sparse on prompts it never saw."""

from __future__ import annotations

from functools import cache

import pytest

import circuitlab as cl
from circuitlab.data import embedded_model, held_out, is_held_out

TASKS = ("ioi", "greater_than", "induction", "pronouns", "agreement")
N_EDGES = 262


@pytest.fixture(scope="module")
def model():
    return cl.load_model(str(embedded_model()))


@pytest.fixture(scope="module")
def measured(model):
    """Per task, a circuit of a share of the edges, measured on prompts not scored."""

    @cache
    def measure(task: str, share: float):
        prompts = held_out(cl.tasks.by_name(task)(800, seed=1001, model=model))
        scored, rest = prompts.split(48, seed=0)
        edges = cl.edge_scores(model, scored, cl.logit_diff(), method=cl.EAPIG(steps=5))
        circuit = cl.top_k(edges, int(share * N_EDGES))
        return cl.evaluate(model, rest, cl.logit_diff(), circuit, scored=scored)

    return measure


def test_it_is_small_and_complete():
    files = {path.name for path in embedded_model().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert sum(path.stat().st_size for path in embedded_model().iterdir()) < 2_000_000


def test_its_shape_is_the_documented_one(model):
    assert model.shape.n_edges == N_EDGES
    assert (model.shape.n_layers, model.shape.n_heads) == (3, 4)


def test_its_tokens_are_words_with_their_space_and_no_bos(model):
    prompts = cl.tasks.ioi(4, 0, model)
    assert not prompts.prepend_bos
    pieces = prompts.table["clean_token_texts"].to_pylist()
    assert ["".join(row) for row in pieces] == prompts.table["clean"].to_pylist()
    assert all(len(answer[0]) == 1 for answer in prompts.answers)


def test_held_out_prompts_are_about_a_quarter(model):
    prompts = cl.tasks.ioi(400, 5, model)
    kept = held_out(prompts)
    assert 0.17 < len(kept) / len(prompts) < 0.33
    assert all(is_held_out(text) for text in kept.table["clean"].to_pylist())


@pytest.mark.parametrize("task", TASKS)
def test_it_does_the_task_and_not_its_corruption(measured, task):
    found = measured(task, 0.1).per_example
    right = (found["metric_full"].to_numpy() > 0).mean()
    corrupted = (found["metric_ablated"].to_numpy() > 0).mean()
    assert len(found) > 100
    assert right >= 0.99
    assert corrupted <= 0.5


def test_a_fifth_of_the_edges_does_ioi(measured):
    found = measured("ioi", 0.2)
    assert found.n_edges <= 0.2 * N_EDGES
    assert found.faithfulness >= 0.9
    assert not found.prompts_overlap


def test_a_tenth_of_the_edges_does_other_tasks(measured):
    found = {task: measured(task, 0.1) for task in TASKS[1:]}
    able = [task for task, one in found.items() if one.faithfulness >= 0.9]
    assert all(one.n_edges <= 0.1 * N_EDGES for one in found.values())
    assert len(able) >= 2, {task: one.faithfulness for task, one in found.items()}
