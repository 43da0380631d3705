"""Sweeps: models × revisions × tasks × methods × seeds, planned, resumable, recorded.

A sweep is a value, usually read from TOML. Its plan is a list of cells; each cell finds
circuits on some prompts, at every size or threshold, and evaluates them on others. Cells
run on an engine; the driver saves what they return. A file beside the store records each
finished cell, so that a sweep that was killed goes on where it was, and ACDC cells go on
from their last decision.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from circuitlab import tasks
from circuitlab.checkpoint import Checkpoint
from circuitlab.distribute import METRICS, ModelSpec, metric_named, worker_model
from circuitlab.engines import RETRIES, Engine, Outcome, Serial
from circuitlab.errors import ArgumentError, DataError
from circuitlab.prompts import Prompts
from circuitlab.store import Store
from circuitlab.sweep_cells import METHODS, CellWork, find_circuits, passes_of
from circuitlab.sweep_summary import SUMMARY, Summary
from circuitlab.tables import digest


@dataclass(frozen=True)
class Sweep:
    """What to compute. Lists are multiplied; everything else holds for all cells.

    `methods` are names from `METHODS`. Scores are cut at every one of `sizes` (numbers
    of edges, or fractions of all edges below 1); `acdc` and `hierarchical_acdc` run at
    every one of `thresholds` (in nats, or in `acdc_metric`'s units), `edge_mask` at
    every one of `sparsities`. `n` prompts are scored and `held` others evaluate. A task
    is a task's name or a prompt file. Raises ArgumentError `sweep_invalid`.
    """

    name: str
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    methods: tuple[str, ...] = ("eap_ig",)
    seeds: tuple[int, ...] = (0,)
    revisions: tuple[str | None, ...] = (None,)
    sizes: tuple[float, ...] = (0.01, 0.05, 0.2)
    thresholds: tuple[float, ...] = (0.01,)
    sparsities: tuple[float, ...] = (1.0,)
    n: int = 32
    held: int = 16
    metric: str = "logit_diff"
    acdc_metric: str = "kl"
    ablation: str = "patch"
    steps: int = 5
    fraction: float = 0.1
    rank: str = "magnitude"
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self):
        lists = ("models", "tasks", "methods", "seeds", "revisions")
        for name in (*lists, "sizes", "thresholds", "sparsities"):
            value = getattr(self, name)
            value = value if isinstance(value, list | tuple) else [value]
            object.__setattr__(self, name, tuple(value))
        spelled = tuple(m.replace("-", "_") for m in self.methods)
        object.__setattr__(self, "methods", spelled)
        for name in lists:
            if not getattr(self, name):
                raise _invalid(name, "is empty; give at least one", ())
        for name, found, known in (
            ("methods", self.methods, METHODS),
            ("metric", (self.metric,), METRICS),
            ("acdc_metric", (self.acdc_metric,), METRICS),
        ):
            wrong = [value for value in found if value not in known]
            if wrong:
                raise _invalid(name, f"has {wrong[0]!r}; write of {known}", wrong)
        for name in ("n", "held"):
            if getattr(self, name) < 1:
                raise _invalid(name, "is below 1", getattr(self, name))

    @staticmethod
    def from_toml(path: str | Path) -> Sweep:
        """Read a sweep's fields from a TOML file; `name` defaults to the file's.

        Raises DataError `sweep_unreadable`, ArgumentError `sweep_invalid`.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(
                "sweep_unreadable",
                f"{path} can't be read as TOML: {error}",
                path=str(path),
            ) from error
        values = {"name": path.stem, **values}
        known = set(Sweep.__dataclass_fields__)
        for name in values:
            if name not in known:
                raise _invalid(name, f"is no field; there are {sorted(known)}", name)
        for name in ("models", "tasks"):
            if name not in values:
                raise _invalid(name, "is missing", None)
        return Sweep(**values)

    def cells(self) -> tuple[Cell, ...]:
        """The plan, model by model, so that a worker loads each as seldom as it can."""
        return tuple(
            Cell(self, *one)
            for one in product(
                self.models, self.revisions, self.tasks, self.seeds, self.methods
            )
        )

    @property
    def digest(self) -> str:
        """Identifies what is computed; not on which device."""
        return digest({**asdict(self), "device": None})[:16]


def _invalid(name: str, why: str, value: object) -> ArgumentError:
    return ArgumentError("sweep_invalid", f"{name} {why}", field=name, value=value)


@dataclass(frozen=True)
class Cell:
    """One unit of a sweep's work. `state` is a folder for the cell's own checkpoint."""

    sweep: Sweep
    model: str
    revision: str | None
    task: str
    seed: int
    method: str
    state: str | None = None

    @property
    def key(self) -> str:
        """Identifies the cell within every sweep of the same settings."""
        facts = self.facts()
        shared = asdict(self.sweep)
        lists = ("name", "models", "tasks", "methods", "seeds", "revisions", "device")
        return digest({**facts, **{k: shared[k] for k in shared if k not in lists}})[
            :16
        ]

    def facts(self) -> dict[str, Any]:
        """What tells it from the other cells, as it stands in the summary."""
        return {
            "model": self.model,
            "revision": self.revision,
            "task": self.task,
            "seed": self.seed,
            "method": self.method,
        }

    def __str__(self) -> str:
        parts = [self.model, self.revision, self.task, self.method, f"seed {self.seed}"]
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True)
class CellResult:
    """What a cell returns: things to save, and its rows of the summary."""

    things: tuple[Any, ...]
    rows: tuple[Mapping[str, Any], ...]
    seconds: float


def run_cell(cell: Cell) -> CellResult:
    """Run one cell, here: find its circuits and evaluate them on held-out prompts."""
    clock = time.perf_counter()
    sweep = cell.sweep
    model = worker_model(_spec(cell))
    prompts = load_prompts(cell, model)
    scored, held = prompts.split(min(sweep.n, len(prompts) - 1), seed=cell.seed)
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
    things, rows = find_circuits(cell.method, work)
    seconds = time.perf_counter() - clock
    rows = [{**cell.facts(), **row, "seconds": seconds} for row in rows]
    return CellResult(tuple(things), tuple(rows), seconds)


def load_prompts(cell: Cell, model: Any) -> Prompts:
    """A cell's prompts: of a task, or from a file."""
    wanted = cell.sweep.n + cell.sweep.held
    if Path(cell.task).suffix:
        return Prompts.from_file(cell.task, model=model)[:wanted]
    return tasks.by_name(cell.task)(n=wanted, seed=cell.seed, model=model)


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
    """A finished sweep: its summary, and the cells that failed, with their errors."""

    summary: Summary
    failures: tuple[Mapping[str, Any], ...] = ()
    run_ids: tuple[str, ...] = ()
    resumed: int = 0


@dataclass
class _Driver:
    """Runs the cells that are left, and keeps what they return."""

    sweep: Sweep
    store: Store
    log: Checkpoint
    steps: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: list[Mapping[str, Any]] = field(default_factory=list)

    def run(
        self,
        cells: Sequence[Cell],
        engine: Engine,
        retries: int,
        report: Callable[[Progress], None] | None,
    ) -> None:
        began, total = time.perf_counter(), len(self.sweep.cells())
        for count, outcome in enumerate(engine.run(run_cell, cells, retries), 1):
            cell = cells[outcome.index]
            self._keep(cell, outcome)
            if report:
                left = (time.perf_counter() - began) / count * (len(cells) - count)
                done = total - len(cells) + count
                report(
                    Progress(done, total, len(self.failures), left, cell, outcome.error)
                )

    def _keep(self, cell: Cell, outcome: Outcome) -> None:
        step: dict[str, Any] = {"cell": cell.key, "attempts": outcome.attempts}
        if outcome.ok:
            ids = [self.store.save(thing) for thing in outcome.value.things]
            for run_id in ids:
                self.store.tag(run_id, f"sweep:{self.sweep.name}")
            rows = [dict(row) for row in outcome.value.rows]
            step |= {"ok": True, "runs": ids, "rows": rows}
            self.steps[cell.key] = step
        else:
            failure = {**cell.facts(), "error": outcome.error, "code": outcome.code}
            step |= {"ok": False, **failure}
            self.failures.append({**failure, "attempts": outcome.attempts})
        # After the saves: a kill in between repeats a cell, and saving it is a no-op.
        self.log.append(step)


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
    next time. `engine` None is `Serial()`.

    Raises DataError `checkpoint_mismatch` for a folder of another sweep of that name;
    else as `Sweep` does.
    """
    sweep = sweep if isinstance(sweep, Sweep) else Sweep.from_toml(sweep)
    store = store if isinstance(store, Store) else Store(store)
    place = Path(folder) if folder else _beside(store, sweep)
    head = {"schema": "circuitlab_sweep_v1", "name": sweep.name, "sweep": sweep.digest}
    log = Checkpoint(place / "steps.jsonl", head)
    driver = _Driver(sweep, store, log)
    driver.steps |= {step["cell"]: step for step in log.steps if step["ok"]}
    resumed = len(driver.steps)
    state = str(place / "acdc")
    left = [
        replace(cell, state=state)
        for cell in sweep.cells()
        if cell.key not in driver.steps
    ]
    if left:
        driver.run(left, engine or Serial(), retries, report)
    found = [driver.steps[c.key] for c in sweep.cells() if c.key in driver.steps]
    rows = [row for step in found for row in step["rows"]]
    summary = Summary(pa.Table.from_pylist(rows, schema=SUMMARY), sweep.name)
    summary.write(place)
    run_ids = tuple(run_id for step in found for run_id in step["runs"])
    store.close()
    return SweepResult(summary, tuple(driver.failures), run_ids, resumed)


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
    prompts = load_prompts(cells[0], model)
    rows = [list(row) for row in prompts.clean[: cells[0].sweep.n]]
    batch = model.batch(rows)
    model.run(batch, positions=batch.last)
    clock = time.perf_counter()
    model.run(batch, positions=batch.last)
    one = time.perf_counter() - clock
    for cell in cells:
        forwards = passes_of(cell.method, cell.sweep, model.shape.n_edges)
        yield {**cell.facts(), "forwards": forwards, "seconds": forwards * one}
