"""ACDC: remove every edge whose removal hardly worsens the metric (Conmy et al. 2023).

Receivers are visited from the logits back, in reverse canonical order, and a receiver's
senders latest first. An edge goes if M worsens by less than the threshold τ, compared
with M of the circuit as it then is; else it stays. A receiver whose component no kept
edge leaves is skipped, and its edges go untested; where heads act on each other within a
layer (`coupling`), only once nothing reads any of them.

The circuit is the plain sequential algorithm's, edge by edge; it costs less, because a
trial computes only what it changes (`circuit_state`), because a sender that is its own
ablated value is removed without a pass, and because the next edges are tried in the same
pass under the guess that this one goes. A wrong guess costs its rows and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.acdc_trials import Counts, Trials
from circuitlab.backends import Backend, as_backend
from circuitlab.checkpoint import Checkpoint
from circuitlab.circuit_state import prepare
from circuitlab.circuits import SCHEMA, Circuit, top_fraction
from circuitlab.edges import edge_scores
from circuitlab.errors import (
    ArgumentError,
    DataError,
    require_count,
    require_number,
    require_type,
)
from circuitlab.methods import EAPIG
from circuitlab.metrics import Metric, kl
from circuitlab.prompts import Prompts
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable, Run, digest, edge_rows, now, versions

SPECULATE = 8
"""How many edges one pass tries at most, by default."""

MEMORY_BUDGET = 1 << 30
"""Bytes that one chunk's sender differences may take, by default."""

ORDER = "receivers and their senders in reverse canonical order"


def visit_order(shape: ModelShape) -> tuple[int, ...]:
    """Receiver indices in the order ACDC visits them: the logits first.

    The reverse of the canonical order: layer, kind, head number, port. A receiver's
    senders are visited in reverse canonical order too.
    """
    return tuple(reversed(range(len(shape.receivers))))


@dataclass(frozen=True)
class AcdcResult:
    """What ACDC found at one threshold.

    `decisions` has a row for every edge of the model: `score` is how M changed when the
    edge was taken out of the circuit as it then was (in M's units; `stderr` is null);
    rows of edges that were not tested have status `unavailable`.
    """

    threshold: float
    circuit: Circuit
    decisions: EdgeTable


def acdc(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    threshold: float = 0.01,
    start: Circuit | None = None,
    *,
    ablation: Ablation | str = "patch",
    speculate: int = SPECULATE,
    batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Circuit:
    """Run ACDC; return the circuit, with its provenance.

    `metric` None is `kl()`; a task metric counts by its direction. `threshold` τ is in
    the metric's units. `start` restricts the universe of edges: all others are ablated
    throughout. `checkpoint` names a file that a killed run continues from. `speculate`
    changes no decision. `acdc_sweep` gives the decisions too, for several thresholds.

    Raises ArgumentError `threshold_invalid`, `speculate_out_of_range`,
    `batch_size_invalid`, `metric_invalid`, `start_invalid`, `edge_unknown`,
    `ablation_unknown`; DataError `prompt_lengths_differ`, `metric_not_finite`, and of
    the checkpoint `checkpoint_mismatch`, `checkpoint_corrupt`, `checkpoint_held` (another
    process is at work on it), `checkpoint_unusable`.

    Source: Conmy et al. 2023, algorithm 1.
    """
    found = acdc_sweep(
        model,
        prompts,
        metric,
        [threshold],
        start,
        ablation=ablation,
        speculate=speculate,
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
    )
    return found[0].circuit


def acdc_sweep(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    thresholds: Sequence[float] = (0.01,),
    start: Circuit | None = None,
    *,
    ablation: Ablation | str = "patch",
    speculate: int = SPECULATE,
    batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[AcdcResult, ...]:
    """Run ACDC at several thresholds; return a result for each, in their order.

    Thresholds share their decisions until they first disagree. Everything else as in
    `acdc`. `progress(done, total)` counts the edges decided.
    """
    model = as_backend(model)
    metric = kl() if metric is None else metric
    thresholds = _checked(thresholds, speculate, start)
    begun, clock = now(), time.perf_counter()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    universe = model.shape.edge_mask if start is None else start.mask(model.shape)
    run = _run(model, prompts, metric, source, start)
    size = _chunk(model, prompts) if batch_size is None else batch_size
    size = require_count("batch_size_invalid", "batch_size", size)
    with _log(checkpoint, run, thresholds) as log:
        chunks = [prepare(model, rows, metric) for rows in source.chunks(size)]
        trials = Trials(model, chunks, metric)
        search = Search(
            model.shape, trials, metric.higher_is_better, speculate, log, progress
        )
        branches = {
            threshold: branch
            for branch in search.run(universe, tuple(sorted(set(thresholds))))
            for threshold in branch.thresholds
        }
    counts = replace(
        search.counts, components=trials.components, passes=trials.passes
    ).to_json()
    run = replace(
        run,
        provenance={**counts, "replayed": len(log.steps) if log else 0},
        started_at=begun,
        seconds=time.perf_counter() - clock,
    )
    return tuple(_result(t, branches[t], run, universe, start) for t in thresholds)


def hierarchical_acdc(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    threshold: float = 0.01,
    *,
    fraction: float = 0.1,
    scores: EdgeTable | None = None,
    ablation: Ablation | str = "patch",
    **options: Any,
) -> Circuit:
    """Run ACDC inside the `fraction` of the edges that score highest by magnitude.

    `scores` None computes EAP-IG (5 midpoint steps) with the same metric. What is cut
    by score is never tested, so the circuit may differ from full ACDC's: see
    docs/acdc.md for how much. `options` are `acdc`'s, without `start`. Raises as `acdc`
    and `top_fraction` do, and ArgumentError `universe_ambiguous`.
    """
    if "start" in options:
        raise ArgumentError(
            "universe_ambiguous",
            "the scores say among which edges hierarchical_acdc searches; give "
            "acdc(start=…) a circuit of your own",
            value="start",
        )
    model = as_backend(model)
    metric = kl() if metric is None else metric
    if scores is None:
        scores = edge_scores(model, prompts, metric, method=EAPIG(5), ablation=ablation)
    start = top_fraction(scores, fraction, rank="magnitude")
    found = acdc(model, prompts, metric, threshold, start, ablation=ablation, **options)
    facts = {"within": start.provenance, "fraction": fraction}
    return replace(found, provenance={**found.provenance, **facts})


def _checked(
    thresholds: Sequence[float], speculate: int, start: Circuit | None
) -> tuple[float, ...]:
    """The thresholds as numbers, once everything else is seen to be what it should be."""
    require_count("speculate_out_of_range", "speculate", speculate)
    remedy = "give a circuit, whose edges are the ones to search among"
    require_type("start_invalid", "start", start, Circuit | None, remedy)
    several = isinstance(thresholds, Iterable) and not isinstance(thresholds, str)
    given = tuple(thresholds) if several else ()
    if not given:
        raise ArgumentError(
            "threshold_invalid",
            f"thresholds is {thresholds!r}; give a list with at least one number",
            value=thresholds,
        )
    return tuple(
        require_number(
            "threshold_invalid",
            "the threshold",
            threshold,
            lambda t: bool(np.isfinite(t)) and t >= 0,
            "a finite number, zero or more, in the metric's units",
        )
        for threshold in given
    )


def _log(checkpoint: str | Path | None, run: Run, thresholds: Sequence[float]) -> Any:
    """The step log, for a `with`; None without a checkpoint."""
    if checkpoint is None:
        return nullcontext()
    head = {"schema": "circuitlab_acdc_v1", "params": run.params_digest}
    head |= {"thresholds": list(thresholds), "order": ORDER}
    return Checkpoint.opened(checkpoint, head, _is_step)


def _is_step(value: Any) -> bool:
    """The first step is the value of the whole universe; then there is one per edge."""
    if not isinstance(value, dict) or not isinstance(value.get("value"), float):
        return False
    edge = value.get("edge", [0, 0])
    whole = isinstance(edge, list) and all(type(index) is int for index in edge)
    return whole and len(edge) == 2 and set(value) <= {"edge", "value"}


def _chunk(model: Backend, prompts: Prompts) -> int:
    width = max(len(row) for row in prompts.clean) * model.shape.d_model
    one = (len(model.shape.senders) + 8 * SPECULATE) * width * model.dtype.itemsize
    return max(1, min(len(prompts), MEMORY_BUDGET // one))


def _run(
    model: Backend,
    prompts: Prompts,
    metric: Metric,
    source: AblationSource,
    start: Circuit | None,
) -> Run:
    return Run(
        kind="edge",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy={
            "method": "acdc",
            "method_options": {"order": ORDER},
            "metric": metric.describe(),
            "ablation": source.record,
            "reduction": "mean_examples",
            "grain": "site",
            "universe": "all" if start is None else start.id,
        },
        seed=prompts.seed,
        versions=versions(),
    )


def _result(
    threshold: float,
    branch: Branch,
    run: Run,
    universe: np.ndarray,
    start: Circuit | None,
) -> AcdcResult:
    shape = run.model.shape
    assert shape is not None
    options = {**run.policy["method_options"], "threshold": threshold}
    run = replace(run, policy={**run.policy, "method_options": options})
    senders, receivers = shape.edge_indices
    change = branch.change[senders, receivers]
    status = np.where(np.isnan(change), "unavailable", "ok").tolist()
    decisions = EdgeTable(edge_rows(shape, change, None, run.n, status), run)
    edges = frozenset(shape.names_of(branch.mask))
    outside = shape.n_edges - int(universe.sum())
    tested = status.count("ok")
    excluded = {"start": outside, "unread": shape.n_edges - outside - tested}
    provenance = {
        **_provenance(threshold, run, start),
        "run_id": decisions.run_id,
        "order_digest": digest(list(visit_order(shape))),
        "universe": int(universe.sum()),
        "rankable": tested,
        "excluded": {why: count for why, count in excluded.items() if count},
        "metric": branch.current,
        "selected": len(edges),
        "n": len(edges),
        "pruned": False,
    }
    return AcdcResult(threshold, Circuit(edges, shape, run, provenance), decisions)


def _provenance(threshold: float, run: Run, start: Circuit | None) -> Mapping[str, Any]:
    """What was asked for, with the words of a selection from scores.

    No counts of work: those differ where a run went on from its checkpoint, and this is
    part of the circuit's identity. They stand in the run's provenance.
    """
    return {
        "schema": SCHEMA,
        "selector": "acdc",
        "text": f"acdc(threshold={threshold:g})",
        "threshold": threshold,
        "policy_digest": run.policy_digest,
        "method": run.policy["method"],
        "reduction": run.policy["reduction"],
        "target": run.policy["metric"],
        "rank": ORDER,
        "where": None,
        "pins": [],
        "start": None if start is None else start.id,
    }


# --- the search ---


@dataclass
class Branch:
    """One line of decisions, shared by the thresholds that agree on all of them.

    `receiver` counts the receivers that are done; `passed` the senders of the next one
    that are. `change` [sender, receiver] is NaN where nothing was tested.
    """

    thresholds: tuple[float, ...]
    mask: np.ndarray
    change: np.ndarray
    current: float
    receiver: int = 0
    below: int | None = None

    def fork(self, thresholds: tuple[float, ...]) -> Branch:
        return replace(
            self,
            thresholds=thresholds,
            mask=self.mask.copy(),
            change=self.change.copy(),
        )


@dataclass
class Search:
    """The loop over receivers and edges, with speculation, splits and the step log."""

    shape: ModelShape
    trials: Trials
    higher_is_better: bool
    speculate: int
    log: Checkpoint | None
    progress: Callable[[int, int], None] | None
    counts: Counts = field(default_factory=Counts)

    def run(
        self, universe: np.ndarray, thresholds: tuple[float, ...]
    ) -> Iterator[Branch]:
        """Yield a finished branch for every set of thresholds that agreed throughout."""
        self._replay = [] if self.log is None else list(self.log.steps)
        self._replay.reverse()
        self._width = 1
        self._open: list[Branch] = []
        self._live: Branch | None = None
        blank = np.full(universe.shape, np.nan)
        first = Branch(thresholds, universe.copy(), blank, float("nan"))
        first.current = self._first_value(first)
        self._open.append(first)
        while self._open:
            yield self._finish(self._open.pop())
        if self._replay:
            self._next_step([])  # no run has that: the log is of a longer one

    def _first_value(self, branch: Branch) -> float:
        if self._replay:
            return self._next_step(None)
        self._go_live(branch)
        value = self.trials.value
        self._say({"value": value})
        return value

    def _go_live(self, branch: Branch) -> None:
        """Compute the branch's circuit, unless the trials stand there already."""
        if self._live is not branch:
            self.trials.begin(branch.mask)
            self._live = branch

    def _say(self, *steps: Any) -> None:
        if self.log is not None:
            self.log.append(*steps)

    def _finish(self, branch: Branch) -> Branch:
        order = visit_order(self.shape)
        for done in range(branch.receiver, len(order)):
            branch.receiver = done
            column = order[done]
            if branch.below is None and not self._alive(branch, column):
                self._skip(branch, column)
            else:
                self._visit(branch, column)
            branch.below = None
            if self.progress:
                decided = sum(int(self.shape.upstream[c]) for c in order[: done + 1])
                self.progress(decided, self.shape.n_edges)
        return branch

    def _alive(self, branch: Branch, column: int) -> bool:
        return bool(self.trials.wiring.alive(branch.mask)[column])

    def _skip(self, branch: Branch, column: int) -> None:
        """Drop the edges into a component that nothing kept reads."""
        self.counts.skipped += int(branch.mask[:, column].sum())
        branch.mask[:, column] = False
        if self._live is branch:
            self.trials.drop_all(column)

    def _visit(self, branch: Branch, column: int) -> None:
        """Try the edges into one receiver, latest sender first."""
        upto = self.shape.upstream[column] if branch.below is None else branch.below
        queue = np.flatnonzero(branch.mask[:upto, column])[::-1].tolist()
        self.trials.leave()
        self._expected: dict[int, float] = {}
        while queue:
            logged = self._logged(branch, column, queue)
            if logged or not queue:
                continue
            self._go_live(branch)
            self.trials.focus(column)
            self._drop_idle(branch, column, queue)
            if queue:
                self._try(branch, column, queue)

    def _logged(self, branch: Branch, column: int, queue: list[int]) -> bool:
        """Take one decision from the step log, if there is one left."""
        if not self._replay:
            return False
        sender = queue.pop(0)
        self._decide(branch, column, sender, self._next_step([sender, column]))
        return True

    def _next_step(self, edge: list[int] | None) -> float:
        """The logged value of an edge, which must be the next in the log."""
        step = self._replay.pop()
        if step.get("edge") != edge:
            raise DataError(
                "checkpoint_mismatch",
                f"the checkpoint's next edge is {step.get('edge')}, where this run has "
                f"{edge}; delete it and start again",
                value=step.get("edge"),
                expected=edge,
            )
        return step["value"]

    def _drop_idle(self, branch: Branch, column: int, queue: list[int]) -> None:
        """Decide the first edges that carry nothing: M can't change."""
        steps = []
        while queue and self.trials.idle(queue[0]) and min(branch.thresholds) > 0:
            sender = queue.pop(0)
            self.counts.idle += 1
            steps.append(self._step(sender, column, branch.current))
            self._decide(branch, column, sender, branch.current)
            self.trials.drop(sender)
        if steps:
            self._say(*steps)

    def _try(self, branch: Branch, column: int, queue: list[int]) -> None:
        """One pass over the next few edges, each as if those before it were decided as
        guessed. What follows a wrong guess is not decided, but guessed better."""
        width = min(self._width, self.speculate, len(queue))
        senders = queue[:width]
        going = [self._expect(branch, sender) for sender in senders]
        removed = np.zeros((width, len(branch.mask)), dtype=bool)
        for row, sender in enumerate(senders):
            removed[row:, sender] = True
            removed[row + 1 :, sender] = going[row]
        values = self.trials.values(removed)
        self.counts.evaluations += width
        before = branch.current
        for sender, goes, value in zip(senders, going, values, strict=True):
            self._expected[sender] = value - before
            before = value if goes else before
        steps, last, right = [], -1, 0
        for row, sender in enumerate(senders):
            queue.pop(0)
            steps.append(self._step(sender, column, values[row]))
            goes = self._decide(branch, column, sender, values[row])
            last = row if goes else last
            if goes != going[row]:
                break
            right += 1
        self.counts.wasted += width - len(steps)
        if last >= 0:
            self.trials.commit(last, removed[last])
        if right == width:
            self._width = 2 * width
        self._say(*steps)

    def _expect(self, branch: Branch, sender: int) -> bool:
        """Guess whether an edge goes: as it seemed when it was last tried, else yes."""
        if sender not in self._expected:
            return True
        return self._worse(self._expected[sender]) < max(branch.thresholds)

    def _worse(self, change: float) -> float:
        return -change if self.higher_is_better else change

    def _step(self, sender: int, column: int, value: float) -> dict[str, Any]:
        return {"edge": [int(sender), int(column)], "value": float(value)}

    def _decide(self, branch: Branch, column: int, sender: int, value: float) -> bool:
        """Remove the edge or keep it, for every threshold; True if this branch removes.

        Where thresholds disagree, those that keep it go on in a branch of their own.
        """
        change = value - branch.current
        worse = self._worse(change)
        goes = tuple(t for t in branch.thresholds if worse < t)
        stays = tuple(t for t in branch.thresholds if not worse < t)
        branch.change[sender, column] = change
        self.counts.decisions += 1
        if goes and stays:
            other = branch.fork(stays)
            other.below = sender
            self._open.append(other)
            self.counts.splits += 1
            branch.thresholds = goes
        if goes:
            branch.mask[sender, column] = False
            branch.current = value
        return bool(goes)
