"""`circuitlab sweep`: many searches, over models, tasks, methods and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_output import print_csv, print_json, print_table, remark, show

if TYPE_CHECKING:
    from circuitlab.engines import Engine
    from circuitlab.sweep import Progress, Sweep, SweepResult

PLAN = ("key", "model", "revision", "task", "seed", "method")


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A sweep in TOML (docs/sweeps.md)."),
    ],
    plan: Annotated[
        bool, typer.Option("--plan", help="List what would run, and stop.")
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Load the models, say what each cell costs, and stop."
        ),
    ] = False,
    workers: Annotated[int, typer.Option(help="Local processes.")] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on a Ray cluster (the extra `ray`).")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster's address; else a local one.")
    ] = None,
    gpus: Annotated[float, typer.Option(help="GPUs of one Ray task.")] = 0,
    retries: Annotated[
        int, typer.Option(help="How often a failed cell is tried again.")
    ] = 2,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where its steps are kept; beside the store by default."),
    ] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Run a sweep; go on where it was stopped.

    Every run is saved and tagged. A cell that fails is recorded, the others go on, and
    the command exits with 1; run it again to try those once more.

    Example: circuitlab sweep sweep.toml --workers 2
    """
    from circuitlab.sweep import Sweep, run_sweep

    wanted = Sweep.from_toml(file)
    if plan or estimate:
        columns, cells = _costs(wanted) if estimate else (PLAN, _plan(wanted))
        show(columns, cells, as_json=as_json, as_csv=as_csv)
        return
    found = run_sweep(
        wanted, open_store(store), folder=folder, retries=retries, report=_report,
        engine=_engine(workers, ray, address, gpus),
    )  # fmt: skip
    _show_result(found, as_json, as_csv)
    if found.failures:
        raise typer.Exit(1)


def _plan(sweep: Sweep) -> list[dict[str, Any]]:
    return [{"key": cell.key, **cell.facts()} for cell in sweep.cells()]


def _costs(sweep: Sweep) -> tuple[list[str], list[dict[str, Any]]]:
    from circuitlab.sweep import estimate

    table = estimate(sweep)
    rows = table.to_pylist()
    total = sum(row["seconds"] for row in rows)
    remark(f"{len(rows)} cells, about {total:.0f} s on one worker, at most")
    return table.column_names, rows


def _show_result(found: SweepResult, as_json: bool, as_csv: bool) -> None:
    columns, rows = found.summary.rows.column_names, found.summary.rows.to_pylist()
    failures = [dict(failure) for failure in found.failures]
    left_out = [dict(row) for row in found.left_out]
    if as_csv:
        print_csv(columns, rows)
    elif as_json:
        facts = {"failures": failures, "left_out": left_out, "run_ids": found.run_ids}
        print_json({"rows": rows, **facts})
    else:
        print_table([c for c in columns if _filled(rows, c)], rows)
    for row in left_out:
        remark(f"left out, the model has fewer edges: {row}")
    for failure in failures:
        remark(f"failed: {failure}")


def _filled(rows: list[dict[str, Any]], column: str) -> bool:
    return any(row[column] is not None for row in rows) and not column.endswith("_id")


def _engine(workers: int, ray: bool, address: str | None, gpus: float) -> Engine:
    from circuitlab.engines import Processes, Ray, Serial

    if ray:
        return Ray(address=address, workers=workers, gpus=gpus)
    return Serial() if workers == 1 else Processes(workers)


def _report(progress: Progress) -> None:
    left = progress.seconds_left
    wait = "" if left is None else f", about {left:.0f} s left"
    state = f"failed: {progress.error}" if progress.error else "done"
    remark(f"{progress.done} of {progress.total}{wait}  {progress.cell}  {state}")
