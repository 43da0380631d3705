"""`circuitlab sweep`: many searches, over models, tasks, methods and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_output import print_csv, print_json, print_table, remark

if TYPE_CHECKING:
    from circuitlab.engines import Engine
    from circuitlab.sweep import Progress


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A sweep in TOML (docs/sweeps.md)."),
    ],
    plan: Annotated[
        bool, typer.Option("--plan", help="List what would run, and stop.")
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
    if plan:
        for cell in wanted.cells():
            typer.echo(str(cell))
        return
    found = run_sweep(
        wanted, open_store(store), folder=folder, retries=retries, report=_report,
        engine=_engine(workers, ray, address, gpus),
    )  # fmt: skip
    rows = found.summary.rows.to_pylist()
    failures = [dict(failure) for failure in found.failures]
    if as_csv:
        print_csv(found.summary.rows.column_names, rows)
    elif as_json:
        print_json({"rows": rows, "failures": failures, "run_ids": found.run_ids})
    else:
        print_table(
            [c for c in found.summary.rows.column_names if _filled(rows, c)], rows
        )
    for failure in failures:
        remark(f"failed: {failure}")
    if failures:
        raise typer.Exit(1)


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
