"""How fast and how large a store is, beside one Parquet file a run.

    python scripts/bench_store.py                            # 1,000 runs × 130,000 edges
    python scripts/bench_store.py --runs 50 --writers 4      # quicker, and with company

Builds a store of synthetic runs, with honest statuses, and beside it the plain
alternative that one would write without a store: a folder with one Parquet file a run,
read with pandas or polars. Prints the time of a save, bytes a row, and the latency of
every named query, each from opening the store to having the rows, next to the plain
way where there is one. All times are from the same run on the same machine, the two
sides interleaved, so compare them with each other. Times are by the clock; `cpu` is the
median of this process's processor time, which a busy machine distorts less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

from circuitlab.circuits import top_k
from circuitlab.queries import named_queries
from circuitlab.sites import ModelShape
from circuitlab.store import Store
from circuitlab.tables import EdgeTable, ModelInfo, Run, edge_rows

TASKS = ("ioi", "greater_than", "induction", "pronouns", "agreement")
LATEST = "select count(*) from v_edge where run_id = (select max(run_id) from v_run)"
AIMS = {"save": 150.0, "top_50": 50.0, "two_run_join": 100.0}
"""Aims of the design in milliseconds, on an idle machine."""


@dataclass(frozen=True)
class Bench:
    """What is measured: the store, the plain folder, and the runs in both."""

    store: Store
    plain: Path
    template: pa.Table
    shape: ModelShape
    runs: int
    repeat: int

    def edges(self, number: int) -> EdgeTable:
        """Run `number`: a stable signal, noise of its own, some edges unreachable."""
        count = len(self.template)
        signal = np.random.default_rng(0).standard_t(3, count) * 1e-3
        random = np.random.default_rng(number + 1)
        score = signal + random.normal(size=count) * 1e-3
        error = np.abs(random.normal(size=count)) * 1e-4
        status = self.template["status"]
        missing = np.asarray(status) != "ok"
        rows = self.template
        for name, values in (("score", score), ("stderr", error)):
            column = pa.array(values, pa.float64(), mask=missing)
            rows = rows.set_column(rows.schema.get_field_index(name), name, column)
        return EdgeTable(rows, self.run(number))

    def run(self, number: int) -> Run:
        return Run(
            kind="edge",
            model=ModelInfo(
                f"model-{number % 3}",
                "gpt2",
                f"{number % 3:064x}",
                "float32",
                "transformer_lens",
                self.shape,
            ),
            dataset=TASKS[number % len(TASKS)],
            dataset_digest=f"{number % len(TASKS):064x}",
            n=32,
            policy={
                "method": {"name": "eap_ig", "steps": 5, "rule": "midpoint"},
                "metric": {"name": "logit_diff", "higher_is_better": True},
                "ablation": {"name": "patch"},
                "seed": number,
            },
            seed=number,
            started_at=f"2026-01-01T00:00:{number % 60:02}+00:00",
        )


def shape_of(edges: int) -> ModelShape:
    """A GPT-2-like shape of 12 heads with about so many edges."""
    shapes = [ModelShape(n, 12, 12, 768, 64, 50257) for n in range(1, 64)]
    return min(shapes, key=lambda shape: abs(shape.n_edges - edges))


def template_of(shape: ModelShape) -> pa.Table:
    random = np.random.default_rng(7)
    reached = random.random(shape.n_edges) >= 0.02
    status = np.where(reached, "ok", "unreachable").tolist()
    zeros = np.zeros(shape.n_edges)
    return edge_rows(shape, zeros, zeros, 32, status)


@dataclass(frozen=True)
class Took:
    """Milliseconds by the clock, and of processor time of this process."""

    wall: float
    cpu: float


def timed(work: Callable[[], Any]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Took(wall * 1e3, cpu * 1e3)


def heading(what: str) -> None:
    columns = "".join(f"{name:>10}" for name in ("median", "95 %", "max", "cpu"))
    print(f"\n{what:<26}{columns}")


def line(name: str, times: list[Took], beside: str = "") -> None:
    walls = sorted(took.wall for took in times)
    cpu = statistics.median(took.cpu for took in times)
    shown = (
        statistics.median(walls),
        walls[int(0.95 * (len(walls) - 1))],
        walls[-1],
        cpu,
    )
    print(f"{name:<26}" + "".join(f"{value:>10.1f}" for value in shown) + f"  {beside}")


def save_all(bench: Bench) -> list[str]:
    """Save every run both ways; print what a save takes."""
    ids, ours, plain = [], [], []
    for number in range(bench.runs):
        edges = bench.edges(number)

        def save(edges: EdgeTable = edges) -> None:
            ids.append(bench.store.save(edges))

        path = bench.plain / f"{number:05}.parquet"
        ours.append(timed(save))
        plain.append(timed(lambda e=edges, p=path: pq.write_table(e.rows, p)))
        if (number + 1) % 100 == 0:
            print(f"… {number + 1} runs saved", flush=True)
    folding = timed(lambda: bench.store.fold(wait=30))
    heading("milliseconds")
    aim = f"aim {AIMS['save']:.0f}; some saves also fold, which is the tail"
    line("save a run", ours, aim)
    line("  plain: write Parquet", plain)
    line("fold what was left", [folding])
    return ids


def sizes(bench: Bench) -> None:
    """Print bytes a row: the store, plain Parquet, and 32-bit floats for comparison."""
    rows = bench.runs * len(bench.template)
    database = Path(bench.store.path).stat().st_size
    files = sum(path.stat().st_size for path in bench.plain.iterdir())
    print(f"\n{'bytes a row':<26}{'':>10}")
    print(f"{'store':<26}{database / rows:>10.2f}  {database / 1e6:,.0f} MB")
    print(f"{'  plain: Parquet':<26}{files / rows:>10.2f}  {files / 1e6:,.0f} MB")
    some = min(bench.runs, 20)
    for kind in ("double", "float"):
        size = _size_as(bench, kind, some) / (some * len(bench.template))
        print(f"{f'  rewritten, {kind}':<26}{size:>10.2f}  {some} runs, without names")


def _size_as(bench: Bench, kind: str, runs: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.duckdb"
        with duckdb.connect(str(path)) as con:
            con.execute(f"attach '{bench.store.path}' as s (read_only)")
            con.execute(
                f"create table edge as select run_no, row, edge_no, position, "
                f"sample_id, score::{kind} as score, stderr::{kind} as stderr, n, "
                f"status from s.edge where run_no <= {runs} order by run_no, row"
            )
        return path.stat().st_size


def asked(bench: Bench, ids: list[str]) -> Mapping[str, Mapping[str, object]]:
    """What each named query is asked."""
    pair = {"run_a": ids[0], "run_b": ids[len(TASKS) * 3 % len(ids)]}
    exact = {"run": ids[0], "run_exact": ids[1]}
    return {
        "agreement_with_exact": exact,
        "circuit_with_scores": {"run": bench.store.save(top_k(bench.edges(0), 200))},
        "edge_history": {"edge": "m0->logits"},
        "overlap": pair,
        "rank_stability": {"task": TASKS[0], "model": "model-0"},
        "scores_beside_exact": exact,
        "scores_side_by_side": pair,
        "top_edges": {"run": ids[-1], "k": 50},
    }


def query_all(bench: Bench, ids: list[str]) -> dict[str, float]:
    """Print the latency of every named query; the medians."""
    given = asked(bench, ids)
    bench.store.fold(wait=30)
    found = {}
    heading("named query, ms")
    for name, query in named_queries().items():
        values = given.get(name, {"run": ids[0]} if "run" in query.names else {})
        times = [
            timed(lambda n=name, v=values: bench.store.query(n, **v))
            for _ in range(bench.repeat)
        ]
        found[name] = statistics.median(took.wall for took in times)
        aim = {
            "top_edges": f"aim {AIMS['top_50']:.0f}",
            "scores_side_by_side": f"aim {AIMS['two_run_join']:.0f}",
        }.get(name, "")
        line(f"@{name}", times, aim)
    return found


def plain_queries(bench: Bench, ours: dict[str, float]) -> None:
    """The same questions to the folder of Parquet files, with pandas and polars."""
    files = sorted(bench.plain.iterdir())
    other = files[len(TASKS) * 3 % len(files)]
    works: dict[str, dict[str, Callable[[], Any]]] = {
        "top_edges": {"pandas": lambda: _top_pandas(files[-1])},
        "scores_side_by_side": {"pandas": lambda: _join_pandas(files[0], other)},
        "edge_history": {"pandas": lambda: _history_pandas(files)},
    }
    try:
        import polars
    except ImportError:
        print("(polars is not installed)")
    else:
        works["top_edges"]["polars"] = lambda: _top_polars(polars, files[-1])
        works["scores_side_by_side"]["polars"] = lambda: _join_polars(
            polars, files[0], other
        )
        works["edge_history"]["polars"] = lambda: _history_polars(polars, bench.plain)
    heading("plain way, ms")
    for name, ways in works.items():
        for way, work in ways.items():
            times = [timed(work) for _ in range(bench.repeat)]
            ratio = statistics.median(took.wall for took in times) / ours[name]
            line(f"  {name[:16]}, {way}", times, f"{ratio:.1f} × ours")


def _top_pandas(path: Path) -> pandas.DataFrame:
    frame = pandas.read_parquet(path, columns=["edge", "score"])
    return frame.iloc[_largest(frame["score"])]


def _join_pandas(one: Path, two: Path) -> pandas.DataFrame:
    frames = [pandas.read_parquet(p, columns=["edge", "score"]) for p in (one, two)]
    both = frames[0].merge(frames[1], on="edge", suffixes=("_a", "_b"))
    return both.iloc[_largest(both["score_b"] - both["score_a"])]


def _largest(values: Any) -> np.ndarray:
    return np.argsort(-np.nan_to_num(np.abs(values.to_numpy())))[:50]


def _history_pandas(paths: list[Path]) -> list[pandas.DataFrame]:
    wanted = [("edge", "==", "m0->logits")]
    return [
        pandas.read_parquet(path, columns=["edge", "score"], filters=wanted)
        for path in paths
    ]


def _top_polars(polars: Any, path: Path) -> Any:
    frame = polars.scan_parquet(path).select("edge", "score")
    return frame.top_k(50, by=polars.col("score").abs()).collect()


def _join_polars(polars: Any, one: Path, two: Path) -> Any:
    left = polars.scan_parquet(one).select("edge", "score")
    right = polars.scan_parquet(two).select("edge", "score")
    both = left.join(right, on="edge", suffix="_b")
    difference = (polars.col("score_b") - polars.col("score")).abs()
    return both.top_k(50, by=difference).collect()


def _history_polars(polars: Any, folder: Path) -> Any:
    frame = polars.scan_parquet(f"{folder}/*.parquet").select("edge", "score")
    return frame.filter(polars.col("edge") == "m0->logits").collect()


def writer(path: str, plain: str, edges: int, first: int, count: int, out: Any) -> None:
    """One of several processes that save at once."""
    shape = shape_of(edges)
    bench = Bench(Store(path), Path(plain), template_of(shape), shape, count, 1)
    times = []
    for number in range(first, first + count):
        table = bench.edges(number)
        times.append(timed(lambda t=table: bench.store.save(t)))
    bench.store.close()
    out.put(times)


def company(bench: Bench, writers: int, count: int, edges: int) -> None:
    """Several processes save while this one queries; print both sides' times."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    folder = str(bench.plain)
    children = [
        context.Process(
            target=writer,
            args=(bench.store.path, folder, edges, 10**6 * (i + 1), count, out),
        )
        for i in range(writers)
    ]
    for child in children:
        child.start()
    reads = []
    while any(child.is_alive() for child in children) and out.qsize() < writers:
        reads.append(timed(lambda: bench.store.runs(limit=50)))
        reads.append(timed(lambda: bench.store.sql(LATEST)))
        time.sleep(0.05)
    saves = [t for _ in children for t in out.get()]
    for child in children:
        child.join()
    heading(f"{writers} writers, 1 reader, ms")
    line("save a run", saves, f"{len(saves)} saves")
    line("read", reads, f"{len(reads)} reads")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--edges", type=int, default=130_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--writers", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to build; else temporary")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="circuitlab-bench-"))
    plain = folder / "plain"
    plain.mkdir(parents=True, exist_ok=True)
    shape = shape_of(options.edges)
    store = Store(folder / "bench.duckdb")
    rows = template_of(shape)
    bench = Bench(store, plain, rows, shape, options.runs, options.repeat)
    print(f"{options.runs:,} runs × {len(rows):,} edges, DuckDB {duckdb.__version__}")
    try:
        ids = save_all(bench)
        sizes(bench)
        ours = query_all(bench, ids)
        plain_queries(bench, ours)
        if options.writers:
            company(bench, options.writers, 12, options.edges)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
