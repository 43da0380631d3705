"""The options that several commands share, each written once.

Options that always come together are a group: a dataclass below. A command that takes
groups is decorated with `grouped`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
Seed = Annotated[int, typer.Option(min=0, help="Draws the prompts.")]
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
Start = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Search only among the edges of this circuit."),
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
    int | None,
    typer.Option("--seed", min=0, help="Draws other prompts than were scored."),
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


@dataclass(frozen=True)
class Drawing:
    """How prompts are drawn: fields of a recipe."""

    n: Count = None
    seed: Seed = 0
    corruption: Corruption = None
    prepend_bos: Bos = None


@dataclass(frozen=True)
class Loading:
    """How a model is loaded: fields of a recipe."""

    dtype: Dtype = None
    device: Device = None


@dataclass(frozen=True)
class Cut:
    """Which edges of a run of scores make a circuit."""

    top_k: TopK = None
    top_fraction: TopFraction = None
    threshold: Threshold = None
    greedy: Greedy = None
    mass: Mass = None
    select: Select = None
    rank: Rank = None
    no_prune: NoPrune = False

    def given(self) -> dict[str, Any]:
        """The cuts that were asked for, by the selector's name; at most one is right."""
        cuts = {
            "top_k": self.top_k,
            "top_fraction": self.top_fraction,
            "threshold": self.threshold,
            "greedy": self.greedy,
            "cumulative_mass": self.mass,
        }
        return {name: value for name, value in cuts.items() if value is not None}


@dataclass(frozen=True)
class Measuring:
    """On which prompts, and how, circuits of a stored run are measured."""

    ablation: Ablation = "patch"
    metric: OtherMetric = None
    on: On = "held-out"
    task: Task = None
    file: File = None
    n: Count = None
    seed: OtherSeed = None
    model: Where = None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: each option of a group stands for itself, in the
    group's place."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            shown += _parameters(hints[name])
        else:
            shown.append(_parameter(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    # Typer would look through to the command's own parameters.
    del run.__wrapped__
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(f.name, f.default, hints[f.name]) for f in fields(group)]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    # By keyword alone: then what has no default may follow what has one.
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
