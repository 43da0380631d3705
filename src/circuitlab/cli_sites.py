"""Commands on the sites of a model: sites, read, intervene."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_output import (
    print_csv,
    print_json,
    print_table,
    progress,
    remark,
    say,
    show,
)
from circuitlab.cli_recipe import Recipe

SITE_COLUMNS = (
    "site",
    "status",
    "axes",
    "sizes",
    "passes",
    "gate",
    "written_through",
    "spellings",
    "key",
)
READ_COLUMNS = ("site", "position", "score", "stderr", "n", "status", "status_reason")


@opt.grouped
def sites(
    model: opt.Model,
    *,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[PATTERN]",
            help="A name, or a glob: * stays within a segment, ** crosses dots.",
        ),
    ] = "**",
    loading: opt.Loading,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """List a model's sites: names, axes, status.

    A site is one named tensor of the forward pass. Those that never fire, or fire only
    after a call, are listed with the reason.

    Example: circuitlab sites embedded "blocks.0.attn.*"
    """
    from circuitlab.inventory import inventory

    loaded = Recipe(model, **vars(loading)).load_model()
    rows = inventory(loaded).preview(pattern)
    if as_json or as_csv:
        show(SITE_COLUMNS, rows, as_json=as_json, as_csv=as_csv)
    else:
        print_table(SITE_COLUMNS[:5], rows)


@opt.grouped
def read(
    model: opt.Model,
    *,
    within: Annotated[
        list[str] | None,
        typer.Option(help="Sites or globs to read; all upstream by default."),
    ] = None,
    method: Annotated[
        Literal["activation_x_grad", "grad", "activation"],
        typer.Option(help="What is summed up."),
    ] = "activation_x_grad",
    reduce: Annotated[
        Literal["sum", "mean", "sum_of_abs", "abs_of_sum", "l2"],
        typer.Option(help="How a site becomes one number."),
    ] = "sum",
    freeze_mlps: Annotated[
        bool,
        typer.Option(
            "--freeze-mlps", help="Stop gradients at MLP outputs: direct effects alone."
        ),
    ] = False,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "logit_diff",
    drawing: opt.Drawing,
    loading: opt.Loading,
    top: Annotated[int, typer.Option("--top", help="How many sites to show.")] = 20,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Read every site's effect on the metric.

    In one backward pass a batch. Saves the rows. The score is the mean over prompts, in the metric's units.

    Example: circuitlab read embedded --within "blocks.*.hook_out" --n 16
    """
    from dataclasses import replace

    from circuitlab.frozen import DEFAULT
    from circuitlab.reads import read_dataset

    recipe = Recipe(model, task, file, metric=metric, **vars(drawing), **vars(loading))
    target = recipe.metric_value()
    loaded = recipe.load_model()
    prompts = recipe.prompts(loaded)
    with progress(f"Reading {len(prompts)} prompts") as advance:
        table = read_dataset(
            loaded, prompts, target, within=within or None, method=method, reduce=reduce,
            frozen=DEFAULT if freeze_mlps else None, progress=advance,
        )  # fmt: skip
    table = replace(table, run=recipe.signed(table.run))
    with open_store(store) as opened:
        saved = opened.save(table, prompts=prompts)
    rows = table.rows.to_pylist()
    if as_csv:
        print_csv(table.rows.column_names, rows)
        return
    best = sorted((r for r in rows if r["score"] is not None), key=_size)[:top]
    if as_json:
        print_json({"run_id": saved, "n_rows": len(rows), "top": best})
    else:
        print_table(
            [c for c in READ_COLUMNS if any(r[c] is not None for r in best)], best
        )
        say(f"run {saved}")


def _size(row: dict[str, Any]) -> float:
    return -abs(row["score"])


@opt.grouped
def intervene(
    model: opt.Model,
    edits: Annotated[
        Path,
        typer.Argument(
            metavar="EDITS",
            help="A JSON file of edits by site (docs/interventions.md).",
        ),
    ],
    *,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "logit_diff",
    drawing: opt.Drawing,
    loading: opt.Loading,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Edit sites during the pass; print the metric with and without.

    Example: circuitlab intervene embedded edits.json --task ioi --n 8
    """
    from circuitlab.payload_json import load_payloads
    from circuitlab.sweeps import intervene as run_edits

    recipe = Recipe(model, task, file, metric=metric, **vars(drawing), **vars(loading))
    value, told = recipe.metric_value(), load_payloads(edits)
    loaded = recipe.load_model()
    prompts = recipe.prompts(loaded)
    found = run_edits(loaded, prompts, told.payloads, value, config=told.config)
    rows = found.rows.to_pylist()
    show(found.rows.column_names, rows, as_json=as_json, as_csv=as_csv)
    if not (as_json or as_csv):
        change = sum(r["metric"] - r["metric_baseline"] for r in rows) / len(rows)
        remark(f"mean change of {value.name}: {change:.4g} over {len(rows)} prompts")
