"""Commands on models and tasks: tasks, models check, doctor."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_output import print_json, print_table, say, show
from circuitlab.cli_recipe import Recipe
from circuitlab.errors import CircuitlabError

tasks_app = typer.Typer(invoke_without_command=True, help="List, show and check tasks.")
models_app = typer.Typer(no_args_is_help=True, help="Check models.")

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.prompts import Prompts

PROMPT_COLUMNS = ("clean", "corrupted", "answer_texts", "wrong_answer_texts")


@tasks_app.callback()
def tasks(
    context: typer.Context, as_json: opt.Json = False, as_csv: opt.Csv = False
) -> None:
    """List the tasks: sets of prompt pairs made for a model's tokenizer.

    Example: circuitlab tasks
    """
    if context.invoked_subcommand:
        return
    from circuitlab.tasks import TASKS

    rows = [
        {"task": name, "about": (task.__doc__ or "").strip().splitlines()[0]}
        for name, task in TASKS.items()
    ]
    show(("task", "about"), rows, as_json=as_json, as_csv=as_csv)


@tasks_app.command("show")
def tasks_show(
    task: Annotated[str, typer.Argument(help="A task's name.")],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer: as MODEL of `circuitlab score`.")
    ] = "embedded",
    n: Annotated[int, typer.Option("--n", help="How many prompts.")] = 8,
    seed: opt.Seed = 0,
    corruption: opt.Corruption = None,
    bos: opt.Bos = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Show a task's prompts as a model's tokenizer gives them.

    Example: circuitlab tasks show ioi --n 4
    """
    recipe = Recipe(
        model, task=task, n=n, seed=seed, corruption=corruption, prepend_bos=bos
    )
    prompts = recipe.prompts(recipe.load_model())
    show(PROMPT_COLUMNS, prompts.table.to_pylist(), as_json=as_json, as_csv=as_csv)
    if not (as_json or as_csv):
        for reason, count in prompts.dropped:
            say(f"{count} dropped: {reason}")


@tasks_app.command("check")
@opt.grouped
def tasks_check(
    *,
    task: opt.Task = None,
    file: opt.File = None,
    model: Annotated[str, typer.Option(help="The model to ask.")] = "embedded",
    drawing: opt.Drawing,
    as_json: opt.Json = False,
) -> None:
    """Can a model do the task? Its accuracy on clean and on corrupted prompts.

    A circuit can be found where the clean prompts are answered and the corrupted ones
    are not. The prompts' lengths and answers are checked on the way.

    Example: circuitlab tasks check --task greater_than --model embedded
    """
    recipe = Recipe(model, task, file, **vars(drawing))
    loaded = recipe.load_model()
    found = _answered(loaded, recipe.prompts(loaded))
    if as_json:
        print_json(found)
    else:
        print_table(
            ("what", "value"), [{"what": k, "value": v} for k, v in found.items()]
        )


def _answered(model: Backend, prompts: Prompts) -> dict[str, Any]:
    """Accuracy and mean logit difference, on clean and on corrupted prompts."""
    import torch

    from circuitlab.ablations import token_batch
    from circuitlab.metrics import accuracy, logit_diff

    prompts.require_equal_lengths()
    found: dict[str, Any] = {"prompts": len(prompts), "dropped": dict(prompts.dropped)}
    for metric in (accuracy(), logit_diff()):
        for name in ("clean", "corrupted"):
            parts = []
            for part in prompts.batches(16):
                batch = token_batch(model, part, metric, corrupted=name == "corrupted")
                parts.append(metric(model.run(batch, positions=batch.last), batch))
            found[f"{metric.name}_{name}"] = float(torch.cat(parts).mean())
    return found


@models_app.command("check")
@opt.grouped
def models_check(
    model: opt.Model,
    *,
    loading: opt.Loading,
    ungroup_kv: opt.UngroupKv = False,
    as_json: opt.Json = False,
) -> None:
    """Load a model, probe every site that scoring reads, and say what it offers.

    Example: circuitlab models check embedded
    """
    recipe = Recipe(model, ungroup_kv=ungroup_kv, **vars(loading))
    loaded = recipe.load_model()
    info, shape = loaded.info, loaded.shape
    facts: dict[str, Any] = {
        "model": info.name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "backend": info.backend,
        "processing": info.processing,
        "weights": info.weights_digest,
        **shape.to_json(),
        "senders": len(shape.senders),
        "receivers": len(shape.receivers),
        "edges": shape.n_edges,
        "capabilities": sorted(capability.name for capability in loaded.capabilities),
        "probes": "passed",
    }
    if as_json:
        print_json(facts)
    else:
        print_table(
            ("what", "value"), [{"what": k, "value": v} for k, v in facts.items()]
        )


@dataclass(frozen=True)
class Finding:
    """One thing that doctor looked at."""

    what: str
    value: str
    good: bool = True


def doctor(store: opt.Store = None, as_json: opt.Json = False) -> None:
    """Look at installation, store and machine.

    Exits with 1 if anything is wrong.

    Example: circuitlab doctor
    """
    findings = [*_versions(), _store(store), _embedded(), *_machine()]
    rows = [vars(finding) for finding in findings]
    if as_json:
        print_json(rows)
    else:
        show(("what", "value", "good"), rows)
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


def _versions() -> list[Finding]:
    from circuitlab.tables import versions

    found = [Finding(name, version) for name, version in versions().items()]
    import duckdb
    import pyarrow
    import streamlit.version

    others = {
        "duckdb": duckdb.__version__,
        "pyarrow": pyarrow.__version__,
        "streamlit": streamlit.version.STREAMLIT_VERSION_STRING,
    }
    return found + [Finding(name, version) for name, version in others.items()]


def _store(path: Any) -> Finding:
    opened = open_store(path)
    try:
        count = opened.runs().num_rows
    except CircuitlabError as error:
        missing = error.code == "store_missing"
        return Finding("store", str(error), good=missing)
    return Finding("store", f"{opened.path}: {count} runs")


def _embedded() -> Finding:
    try:
        model = Recipe("embedded").load_model()
    except CircuitlabError as error:
        return Finding("embedded model", str(error), good=False)
    return Finding("embedded model", f"loads, {model.shape.n_edges} edges")


def _machine() -> list[Finding]:
    import torch

    cuda = torch.cuda.is_available()
    offline = os.environ.get("HF_HUB_OFFLINE", "")
    return [
        Finding("platform", sys.platform),
        Finding("threads", str(torch.get_num_threads())),
        Finding("cuda", torch.cuda.get_device_name() if cuda else "none"),
        Finding(
            "hub", "offline (HF_HUB_OFFLINE)" if offline in ("1", "true") else "asked"
        ),
    ]
