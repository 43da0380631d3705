"""Small stores for the app's tests: synthetic runs, whole in every column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from circuitlab.circuits import Circuit, top_k
from circuitlab.prompts import Prompts
from circuitlab.sites import ModelShape
from circuitlab.store import Store
from circuitlab.tables import (
    EVAL,
    PER_EXAMPLE,
    PROMPT,
    EdgeTable,
    ModelInfo,
    Run,
    edge_rows,
)

SMALL = ModelShape(3, 4, 4, 32, 8, 61)
GROUPED = ModelShape(2, 4, 2, 32, 8, 61)
GPT2 = ModelShape(12, 12, 12, 768, 64, 50257)
LARGE = ModelShape(24, 12, 12, 768, 64, 50257)
"""About 130,000 edges."""

NASTY = "<img src=x onerror=alert(1)> **bold** ![x](http://outside.invalid/a.png)"


def edge_table(
    shape: ModelShape = SMALL,
    seed: int = 0,
    *,
    model: str = "toy",
    task: str = "ioi",
    method: str = "eap_ig",
    digest: str = "data",
) -> EdgeTable:
    """Scores with a few strong edges and a long tail, as real ones have."""
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(99)
    # Some components matter more than others, as in real models: they read and they
    # write, and what matters comes from the input and goes to the logits.
    parts = dict.fromkeys(c.name for c in shape.senders)
    parts |= dict.fromkeys(r.component.name for r in shape.receivers)
    matter = {name: float(fixed.normal(0, 1.7)) for name in parts}
    matter |= {"input": 3.0, "logits": 3.0}
    senders, receivers = shape.edge_indices
    sent = np.array([matter[c.name] for c in shape.senders])[senders]
    read = np.array([matter[r.component.name] for r in shape.receivers])[receivers]
    size = np.exp(sent + read + fixed.normal(-6, 1.0, len(senders)))
    sign = np.where(fixed.random(shape.n_edges) < 0.72, -1.0, 1.0)
    score = sign * size * np.exp(rng.normal(0, 0.4, shape.n_edges))
    run = Run(
        kind="edge",
        model=ModelInfo(
            model, "GPT2LMHeadModel", f"w-{model}", "float32", "transformer_lens", shape
        ),
        dataset=task,
        dataset_digest=digest,
        n=32,
        policy={
            "method": method,
            "method_options": {"steps": 5, "rule": "midpoint"},
            "metric": {"name": "logit_diff", "higher_is_better": True},
            "ablation": {"name": "patch"},
            "reduction": "sum_positions_mean_examples",
            "grain": "site",
            "frozen": None,
        },
        provenance={"autograd_calls": 20},
        seed=seed,
        started_at=f"2026-11-{1 + seed % 28:02d}T10:00:00.000+00:00",
        seconds=1.5,
        versions={"circuitlab": "0.1.0", "torch": "2.13.0"},
    )
    rows = edge_rows(shape, score, np.abs(score) * 0.2, 32)
    return EdgeTable(rows, run)


def busy_heads(edges: EdgeTable, k: int) -> list[str]:
    """The heads of a circuit, those with the most edges out of them first."""
    sent = Counter(name.partition("->")[0] for name in top_k(edges, k))
    return [name for name, _ in sent.most_common() if ".h" in name]


@dataclass(frozen=True)
class Evaluated:
    """EVAL and PER_EXAMPLE rows with their run, as `evaluate` and `curve` give them."""

    rows: pa.Table
    per_example: pa.Table
    run: Run


def curve_of(edges: EdgeTable, sizes: Sequence[int], seed: int = 0) -> Evaluated:
    """A plausible faithfulness curve over sizes, with its random baseline."""
    rng = np.random.default_rng(seed)
    rows, examples = [], []
    for label in ("circuit", "random"):
        for k in sizes:
            circuit = top_k(edges, k)
            share = np.log(1 + k) / np.log(1 + edges.shape.n_edges)
            value = share**0.4 if label == "circuit" else share**4
            rows.append(_eval_row(circuit, label, k, float(value)))
            metric = 0.2 + 3.0 * value + rng.normal(0, 0.4, 6)
            examples += [
                _example(circuit, label, k, i, float(m)) for i, m in enumerate(metric)
            ]
    run = replace(
        edges.run,
        kind="eval",
        policy={
            "method": "circuit_run",
            "metric": edges.run.policy["metric"],
            "ablation": {"name": "patch"},
        },
        parent=edges.run_id,
    )
    return Evaluated(
        pa.Table.from_pylist(rows, schema=EVAL),
        pa.Table.from_pylist(examples, schema=PER_EXAMPLE),
        run,
    )


def _eval_row(circuit: Circuit, label: str, k: int, value: float) -> dict:
    found = dict.fromkeys(EVAL.names)
    found |= {"circuit_id": circuit.id, "label": label, "rank": "magnitude"}
    found |= {"ablation": "patch", "metric_name": "logit_diff", "k": k}
    found |= {"n_edges": len(circuit), "n": 6, "faithfulness": value}
    found |= {"faithfulness_low": value - 0.06, "faithfulness_high": value + 0.05}
    found |= {"metric": 0.2 + 3 * value, "metric_full": 3.2, "metric_ablated": 0.2}
    return found | {"kl": 1 - value, "accuracy": value, "prompts_overlap": False}


def _example(circuit: Circuit, label: str, k: int, i: int, metric: float) -> dict:
    return {
        "circuit_id": circuit.id,
        "label": label,
        "k": k,
        "prompt": i,
        "metric": metric,
        "metric_full": 3.2 + 0.1 * i,
        "metric_ablated": 0.2,
        "kl": max(0.0, 3.2 - metric),
    }


def prompts(n: int = 6, name: str = "ioi") -> Prompts:
    """Text prompts with tokens, one of them with HTML in it."""
    rows = []
    for i in range(n):
        clean = [
            "When",
            " Mary",
            " and",
            " John",
            " went",
            ",",
            " John",
            " gave",
            " to",
        ]
        other = ["When", " Mary", " and", " John", " went", ",", " Tom", " gave", " to"]
        clean[4] = other[4] = " <b>ran</b>" if i == 0 else f" walked{i}"
        row = dict.fromkeys(PROMPT.names)
        row |= {"prompt": i, "clean": "".join(clean), "corrupted": "".join(other)}
        row |= {"clean_tokens": list(range(9)), "corrupted_tokens": list(range(9))}
        row |= {"answers": [[10 + i]], "wrong_answers": [[20 + i]]}
        row |= {"answer_texts": [" Mary"], "wrong_answer_texts": [" John"]}
        row |= {"clean_token_texts": clean, "corrupted_token_texts": other}
        rows.append(row)
    return Prompts(pa.Table.from_pylist(rows, schema=PROMPT), name=name, seed=0)


def fill(path: Path) -> dict[str, str]:
    """A store with one of everything; the run ids by what they are."""
    store = Store(path)
    data = prompts()
    first = edge_table(digest=data.digest)
    second = edge_table(seed=1, digest=data.digest, method="eap")
    grouped = edge_table(GROUPED, seed=2, model="grouped", task="greater_than")
    nasty = edge_table(seed=3, model=NASTY, task=NASTY)
    ids = {
        "first": store.save(first, data),
        "second": store.save(second),
        "grouped": store.save(grouped),
        "nasty": store.save(nasty),
        "curve": store.save(curve_of(first, [5, 10, 20, 40, 80, 160])),
        "curve2": store.save(curve_of(second, [5, 10, 20, 40, 80, 160], seed=1)),
        "circuit": store.save(top_k(first, 25)),
    }
    store.tag(ids["first"], "paper", "<i>tag</i>")
    store.note(ids["nasty"], NASTY)
    store.fold()
    return ids


def fill_many(path: Path, count: int = 1000) -> None:
    """A store of many small runs: a few that were saved, and copies of their rows,
    because a thousand saves would take the test's minute."""
    store = Store(path)
    shape = ModelShape(1, 2, 2, 8, 4, 11)
    saved = 10
    for i in range(saved):
        name = f"model-{i % 7}"
        store.save(edge_table(shape, i, model=name, task=("ioi", "capitals")[i % 2]))
    store.fold()
    assert store.database is not None
    with store.database.writing(5) as con:
        assert isinstance(con, duckdb.DuckDBPyConnection)
        for table, own in (("run", ", md5(run_id || i) as run_id"), ("edge", "")):
            con.execute(
                f"insert into {table} select r.* replace (run_no + i * {saved} as run_no"
                f"{own}) from {table} r, range(1, {count // saved}) t(i)"
            )
