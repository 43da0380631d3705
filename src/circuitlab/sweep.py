"""Sweeps: models × revisions × tasks × methods × seeds, planned, resumable, recorded.

A sweep is a value, usually read from TOML (`sweep_plan`). Its plan is a list of cells;
each cell finds circuits on some prompts, at every size or threshold, and evaluates them
on others. Cells run on an engine; the driver saves what they return. A file beside the
store records each finished cell, so that a sweep that was killed goes on where it was,
and ACDC cells go on from their last decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from circuitlab import tasks
from circuitlab.checkpoint import Checkpoint
from circuitlab.distribute import ModelSpec, metric_named, worker_model
from circuitlab.engines import RETRIES, Engine, Outcome, Serial
from circuitlab.errors import ArgumentError, DataError, StoreError
from circuitlab.prompts import Prompts
from circuitlab.store import Store
from circuitlab.sweep_cells import CellWork, find_circuits, passes_of
from circuitlab.sweep_plan import Cell as Cell
from circuitlab.sweep_plan import Sweep as Sweep
from circuitlab.sweep_plan import content_of, is_file, require_prompts
from circuitlab.sweep_summary import SUMMARY, Summary


@dataclass(frozen=True)
class CellResult:
    """What a cell returns: things to save, its rows of the summary, and the sizes that
    its model is too small for."""

    things: tuple[Any, ...]
    rows: tuple[Mapping[str, Any], ...]
    seconds: float
    left_out: tuple[float, ...] = ()


def run_cell(cell: Cell) -> CellResult:
    """Run one cell, here: find its circuits and evaluate them on held-out prompts."""
    clock = time.perf_counter()
    sweep = cell.sweep
    model = worker_model(_spec(cell))
    scored, held = cell_prompts(cell, model)
    checkpoint = None
    if cell.state is not None:
        checkpoint = str(Path(cell.state) / f"{cell.key}.jsonl")
    work = CellWork(
        model,
        scored,
        held,
        metric_named(sweep.metric),
        metric_named(sweep.acdc_metric),
        sweep,
        cell.seed,
        checkpoint,
    )
    found = find_circuits(cell.method, work)
    seconds = time.perf_counter() - clock
    rows = [{**cell.facts(), **row, "seconds": seconds} for row in found.rows]
    return CellResult(tuple(found.things), tuple(rows), seconds, tuple(found.left_out))


def cell_prompts(cell: Cell, model: Any) -> tuple[Prompts, Prompts]:
    """The `n` prompts that a cell searches on, and the `held` that evaluate it.

    The seed draws them: from a task, or among all rows of a file. Raises DataError
    `prompts_too_few`, or `prompts_file_changed` for a file that was edited since the
    sweep began.
    """
    sweep = cell.sweep
    if is_file(cell.task):
        if content_of(cell.task) != cell.content:
            raise DataError(
                "prompts_file_changed",
                f"{cell.task} was changed since the sweep began; put it back, or give "
                "the sweep another name",
                value=cell.task,
            )
        found = Prompts.from_file(cell.task, model=model)
    else:
        wanted = sweep.n + sweep.held
        found = tasks.by_name(cell.task)(n=wanted, seed=cell.seed, model=model)
    require_prompts(cell.task, len(found), sweep)
    scored, others = found.split(sweep.n, seed=cell.seed)
    return scored, others[: sweep.held]


def _spec(cell: Cell) -> ModelSpec:
    sweep = cell.sweep
    return ModelSpec(cell.model, cell.revision, sweep.dtype, sweep.device)


@dataclass(frozen=True)
class Progress:
    """How far a sweep is. `seconds_left` is None until a cell has finished."""

    done: int
    total: int
    failed: int
    seconds_left: float | None
    cell: Cell
    error: str | None = None


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: its summary, and the cells that failed, with their errors.

    `left_out` has a row for each cell whose model was too small for some sizes;
    `resumed` counts the cells that were done before.
    """

    summary: Summary
    failures: tuple[Mapping[str, Any], ...] = ()
    run_ids: tuple[str, ...] = ()
    resumed: int = 0
    left_out: tuple[Mapping[str, Any], ...] = ()


@dataclass
class _Driver:
    """Runs the cells that are left, and keeps what they return."""

    sweep: Sweep
    store: Store
    log: Checkpoint
    done: dict[str, Mapping[str, Any]]
    failures: list[Mapping[str, Any]] = field(default_factory=list)

    def run(
        self,
        cells: Sequence[Cell],
        engine: Engine,
        retries: int,
        report: Callable[[Progress], None] | None,
    ) -> None:
        began, before = time.perf_counter(), len(self.done)
        for count, outcome in enumerate(engine.run(run_cell, cells, retries), 1):
            cell = cells[outcome.index]
            self._keep(cell, outcome)
            if report:
                left = (time.perf_counter() - began) / count * (len(cells) - count)
                total, failed = before + len(cells), len(self.failures)
                done = before + count
                report(Progress(done, total, failed, left, cell, outcome.error))

    def _keep(self, cell: Cell, outcome: Outcome) -> None:
        step: dict[str, Any] = {"cell": cell.key, "attempts": outcome.attempts}
        if outcome.ok:
            ids = [self.store.save(thing) for thing in outcome.value.things]
            for run_id in ids:
                self.store.tag(run_id, f"sweep:{self.sweep.name}")
            rows = [dict(row) for row in outcome.value.rows]
            step |= {"ok": True, "runs": ids, "rows": rows}
            step["left_out"] = list(outcome.value.left_out)
            self.done[cell.key] = step
        else:
            failure = {**cell.facts(), "error": outcome.error, "code": outcome.code}
            step |= {"ok": False, **failure}
            self.failures.append({**failure, "attempts": outcome.attempts})
        # After the saves: a kill in between repeats a cell, and saving it is a no-op.
        self.log.append(step)

    def result(self, cells: Sequence[Cell], resumed: int) -> SweepResult:
        found = [(c, self.done[c.key]) for c in cells if c.key in self.done]
        rows = [row for _, step in found for row in step["rows"]]
        summary = Summary(pa.Table.from_pylist(rows, schema=SUMMARY), self.sweep.name)
        run_ids = tuple(run_id for _, step in found for run_id in step["runs"])
        left_out = tuple(
            {**cell.facts(), "sizes": step["left_out"]}
            for cell, step in found
            if step["left_out"]
        )
        return SweepResult(summary, tuple(self.failures), run_ids, resumed, left_out)


def run_sweep(
    sweep: Sweep | str | Path,
    store: Store | str | Path | None = None,
    *,
    folder: str | Path | None = None,
    engine: Engine | None = None,
    retries: int = RETRIES,
    report: Callable[[Progress], None] | None = None,
) -> SweepResult:
    """Run what is left of a sweep; return the summary of all of it.

    Every run is saved in `store` and tagged `sweep:<name>`. `folder` (beside the store
    by default) holds the steps, ACDC's checkpoints, `summary.csv` and `summary.svg`. A
    cell that fails is tried `retries` times more, then recorded; it is tried again the
    next time, and so is a cell whose runs this store doesn't have. `engine` None is
    `Serial()`.

    Raises DataError `checkpoint_mismatch` for a folder of another sweep of that name, or
    for prompt files that were edited, `checkpoint_held` while another process runs the
    sweep, `checkpoint_unusable`; StoreError for a store that can't be used, before
    anything is computed; else as `Sweep` and `Sweep.cells` do.
    """
    sweep = sweep if isinstance(sweep, Sweep) else Sweep.from_toml(sweep)
    store = store if isinstance(store, Store) else Store(store)
    cells = sweep.cells()
    store.require_writable()
    place = _beside(store, sweep) if folder is None else Path(folder)
    head = {"schema": "circuitlab_sweep_v2", "name": sweep.name}
    files = {cell.task: cell.content for cell in cells if cell.content}
    head |= {"sweep": sweep.digest, "files": files}
    with store, Checkpoint.opened(place / "steps.jsonl", head, _is_step) as log:
        done = _done(cells, log.steps, store)
        resumed = len(done)
        driver = _Driver(sweep, store, log, done)
        state = str(place / "acdc")
        left = [replace(cell, state=state) for cell in cells if cell.key not in done]
        if left:
            engine = Serial() if engine is None else engine
            driver.run(left, engine, retries, report)
        result = driver.result(cells, resumed)
        result.summary.write(place)
    return result


def _is_step(value: Any) -> bool:
    """One cell's outcome: what was saved and the summary's rows, or an error."""
    if not isinstance(value, dict) or not isinstance(value.get("cell"), str):
        return False
    if value.get("ok") is not True:
        return value.get("ok") is False
    lists = [value.get(name) for name in ("runs", "rows", "left_out")]
    return all(isinstance(one, list) for one in lists)


def _done(
    cells: Sequence[Cell], steps: Sequence[Mapping[str, Any]], store: Store
) -> dict[str, Mapping[str, Any]]:
    """The last good step of each cell whose runs are all in the store."""
    keys = {cell.key for cell in cells}
    good = {step["cell"]: step for step in steps if step["ok"]}
    wanted = [run_id for step in good.values() for run_id in step["runs"]]
    query = "select run_id from v_run where list_contains($ids, run_id)"
    there: set[str] = set()
    try:
        there |= set(store.sql(query, {"ids": wanted})["run_id"].to_pylist())
    except StoreError as error:
        if error.code != "store_missing":
            raise
    return {
        key: step
        for key, step in good.items()
        if key in keys and there.issuperset(step["runs"])
    }


def _beside(store: Store, sweep: Sweep) -> Path:
    if "://" in store.path:
        raise ArgumentError(
            "sweep_folder_needed",
            f"the store {store.path} is remote; say with folder= where the sweep's steps "
            "are kept",
            value=store.path,
        )
    return Path(store.path).parent / "sweeps" / sweep.name


ESTIMATE = pa.schema(
    [
        ("model", pa.string()),
        ("revision", pa.string()),
        ("task", pa.string()),
        ("seed", pa.int64()),
        ("method", pa.string()),
        ("forwards", pa.float64()),
        ("seconds", pa.float64()),
    ]
)
"""One cell a row: how many forwards of its prompts it costs about, at most, and how long
that takes on one worker here."""


def estimate(sweep: Sweep) -> pa.Table:
    """Say what each cell will cost, with the schema `ESTIMATE`.

    Loads every model, and times one forward of each model and task; bounds where the
    cost depends on what is found (ACDC).
    """
    rows = [row for group in _groups(sweep) for row in _estimated(group)]
    return pa.Table.from_pylist(rows, schema=ESTIMATE)


def _groups(sweep: Sweep) -> Iterator[list[Cell]]:
    cells: dict[tuple, list[Cell]] = {}
    for cell in sweep.cells():
        cells.setdefault((cell.model, cell.revision, cell.task), []).append(cell)
    yield from cells.values()


def _estimated(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    model = worker_model(_spec(cells[0]))
    prompts, _ = cell_prompts(cells[0], model)
    rows = [list(row) for row in prompts.clean]
    batch = model.batch(rows)
    model.run(batch, positions=batch.last)
    clock = time.perf_counter()
    model.run(batch, positions=batch.last)
    one = time.perf_counter() - clock
    for cell in cells:
        forwards = passes_of(cell.method, cell.sweep, model.shape.n_edges)
        yield {**cell.facts(), "forwards": forwards, "seconds": forwards * one}
