"""The options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub name, a model folder, a GGUF file, or `embedded`, the small model "
        "that circuitlab ships.",
    ),
]
RunId = Annotated[str, typer.Argument(help="A run id, or the first characters of one.")]
CircuitOrRun = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The id of a circuit, or of a run of edge scores (then say what to keep, "
        "as in --top-k 200). The first characters of an id are enough.",
    ),
]

Task = Annotated[
    str | None,
    typer.Option(help="A task's prompts (see `circuitlab tasks`); ioi by default."),
]
File = Annotated[
    Path | None,
    typer.Option(
        help="A CSV, JSONL or Parquet file of prompt pairs, in place of a task: columns "
        "clean, corrupted, answer, wrong_answer."
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--n",
        help="How many prompts: 32 of a task by default, all of a file. Of a file they "
        "are drawn by --seed, and the rest is held out.",
    ),
]
Seed = Annotated[int, typer.Option(help="Draws the prompts.")]
Corruption = Annotated[
    str | None,
    typer.Option(help="How ioi makes the corrupted prompt: abc, s1_io_flip, …"),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Begin each prompt with the BOS token, or don't; by default as the "
        "tokenizer does to plain text.",
    ),
]
Metric = Annotated[
    str, typer.Option(help="logit_diff, prob_diff, answer_logprob or kl.")
]
Method = Annotated[str, typer.Option(help="eap, eap-ig, clean-corrupted, or exact.")]
Steps = Annotated[int, typer.Option(help="Points of EAP-IG's path.")]
Rule = Annotated[
    str,
    typer.Option(
        help="Where the points lie: midpoint, left, right, trapezoid, gauss_legendre."
    ),
]
Path_ = Annotated[
    str,
    typer.Option(
        "--path",
        help="What EAP-IG interpolates: inputs, activations (each sender group alone), "
        "or activations_all_groups (EAP-IG's own).",
    ),
]
Ablation = Annotated[
    str,
    typer.Option(help="What a corrupted edge carries: patch, zero, mean, resample, …"),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32 (the default), float64 or bfloat16.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …")]
UngroupKv = Annotated[
    bool,
    typer.Option(
        "--ungroup-kv",
        help="One key and value receiver per query head, in place of one per KV head.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Examples at a time; by default as memory allows. No score moves."
    ),
]

Shown = Annotated[int, typer.Option("--top", help="How many edges to show.")]
On = Annotated[
    str,
    typer.Option(
        "--on",
        help="held-out: prompts that were not scored (a file's other rows, the task's "
        "next ones); scored: the very same.",
    ),
]
OtherMetric = Annotated[
    str | None, typer.Option("--metric", help="Another metric than the scores'.")
]
OtherSeed = Annotated[
    int | None, typer.Option("--seed", help="Draws other prompts than were scored.")
]
Where = Annotated[
    str | None,
    typer.Option("--model", help="Where the model is now, if it was moved."),
]

TopK = Annotated[int | None, typer.Option(help="Keep the k best edges.")]
TopFraction = Annotated[
    float | None, typer.Option(help="Keep the best share of all edges, as 0.02.")
]
Threshold = Annotated[
    float | None, typer.Option(help="Keep the edges whose key is above this.")
]
Greedy = Annotated[
    int | None,
    typer.Option(help="Keep k edges taken from the logits backwards: all connected."),
]
Mass = Annotated[
    float | None,
    typer.Option(help="Keep the fewest edges that hold this share of all keys."),
]
Select = Annotated[
    str | None,
    typer.Option(help="Only edges that match, as 'a5-9.*<q> & |score|>0.01'."),
]
Rank = Annotated[
    str | None,
    typer.Option(
        help="What best means: magnitude (|score|, the default) or support (−score: "
        "positive helps)."
    ),
]
NoPrune = Annotated[
    bool, typer.Option("--no-prune", help="Keep edges that lead nowhere.")
]

Store = Annotated[
    Path | None,
    typer.Option(
        help="The store; else $CIRCUITLAB_STORE, else store/circuitlab.duckdb."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV on stdout, nothing else.")]
