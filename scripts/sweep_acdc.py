"""Run a sweep of ACDC (and other methods) over models, tasks, thresholds and seeds.

    python scripts/sweep_acdc.py sweep.toml --plan          # list the cells
    python scripts/sweep_acdc.py sweep.toml --estimate      # and what they cost
    python scripts/sweep_acdc.py sweep.toml --workers 4
    python scripts/sweep_acdc.py --model embedded --task ioi --threshold 0.1 0.02

A sweep that was stopped goes on where it was: run the same command again. See
docs/sweeps.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from circuitlab.engines import Engine, Processes, Ray, Serial
from circuitlab.errors import CircuitlabError
from circuitlab.sweep import Progress, Sweep, SweepResult, estimate, run_sweep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", help="a sweep in TOML")
    parser.add_argument("--name", default="acdc", help="without a file: its name")
    parser.add_argument("--model", nargs="+", default=["embedded"], dest="models")
    parser.add_argument("--task", nargs="+", default=["ioi"], dest="tasks")
    parser.add_argument("--method", nargs="+", default=["acdc"], dest="methods")
    parser.add_argument("--threshold", nargs="+", type=float, dest="thresholds")
    parser.add_argument("--seed", nargs="+", type=int, dest="seeds")
    parser.add_argument("--revision", nargs="+", dest="revisions")
    parser.add_argument("--n", type=int, help="prompts to search on")
    parser.add_argument("--held", type=int, help="other prompts to evaluate on")
    parser.add_argument("--store", help="default: $CIRCUITLAB_STORE, or ./store")
    parser.add_argument("--folder", help="where the sweep's steps are kept")
    parser.add_argument("--workers", type=int, default=1, help="local processes")
    parser.add_argument("--ray", action="store_true", help="a Ray cluster")
    parser.add_argument("--address", help="the Ray cluster's address")
    parser.add_argument("--gpus", type=float, default=0, help="of one Ray task")
    parser.add_argument("--retries", type=int, default=2)
    parser.add_argument("--plan", action="store_true", help="list the cells and stop")
    parser.add_argument("--estimate", action="store_true", help="cost them and stop")
    return parser.parse_args()


def sweep_of(args: argparse.Namespace) -> Sweep:
    if args.file:
        return Sweep.from_toml(args.file)
    names = ("models", "tasks", "methods", "thresholds", "seeds", "revisions")
    given: dict[str, Any] = {
        name: getattr(args, name) for name in (*names, "n", "held")
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Sweep(name=args.name, **given)


def engine_of(args: argparse.Namespace) -> Engine:
    if args.ray:
        return Ray(address=args.address, workers=args.workers, gpus=args.gpus)
    return Serial() if args.workers == 1 else Processes(args.workers)


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def say(progress: Progress) -> None:
    state = f"failed: {progress.error}" if progress.error else "done"
    left = clock(progress.seconds_left)
    line = f"{progress.done}/{progress.total}  {left} left  {progress.cell}  {state}"
    print(line, file=sys.stderr, flush=True)


def show_plan(sweep: Sweep, costs: bool) -> None:
    if not costs:
        for cell in sweep.cells():
            print(cell.key, cell)
        return
    table = estimate(sweep).to_pandas()
    print(table.to_string(index=False))
    print(f"about {clock(float(table.seconds.sum()))} on one worker, at most")


def main() -> int:
    args = arguments()
    try:
        sweep = sweep_of(args)
        if args.plan or args.estimate:
            show_plan(sweep, args.estimate)
            return 0
        found = run_sweep(
            sweep,
            args.store,
            folder=args.folder,
            engine=engine_of(args),
            retries=args.retries,
            report=say,
        )
    except CircuitlabError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command to go on", file=sys.stderr)
        return 130
    return finish(found)


def finish(found: SweepResult) -> int:
    columns = ["model", "task", "method", "seed", "setting", "value", "n_edges"]
    columns += ["faithfulness", "kl", "seconds"]
    print(found.summary.rows.select(columns).to_pandas().to_string(index=False))
    for row in found.left_out:
        print(f"left out, the model has fewer edges: {row}", file=sys.stderr)
    for failure in found.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
