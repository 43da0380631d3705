"""From ids back to circuits, models and prompts: what the commands on runs share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from circuitlab.cli_output import progress
from circuitlab.cli_recipe import Recipe
from circuitlab.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from circuitlab.backends import Backend
    from circuitlab.circuits import Circuit
    from circuitlab.cli_options import Measuring
    from circuitlab.evaluate import Evaluation
    from circuitlab.prompts import Prompts
    from circuitlab.store import Store
    from circuitlab.tables import EdgeTable, Run


def open_store(path: Any = None) -> Store:
    """The store that a command works on."""
    from circuitlab.store import Store

    return Store(path)


def load_edges(store: Store, run_id: str) -> EdgeTable:
    """The edge run of that id. Raises StoreError `run_kind_wrong`, and as `load`."""
    from circuitlab.tables import EdgeTable

    found = store.load(run_id)
    if not isinstance(found, EdgeTable):
        raise StoreError(
            "run_kind_wrong",
            f"{run_id} is no run of edge scores but {_kind(found)}; "
            "`circuitlab runs --kind edge` lists those",
            value=_kind(found),
            expected="edge",
        )
    return found


def _kind(thing: Any) -> str:
    run = getattr(thing, "run", None)
    if hasattr(thing, "edges"):
        return "a circuit"
    return f"a run of kind {run.kind}" if run else type(thing).__name__


def load_circuit(
    store: Store, any_id: str, *, edges_only: bool = False
) -> tuple[Circuit | EdgeTable, str]:
    """What an id names, with its run id: a circuit by its own id or by its run's, or a
    run of edge scores.

    A circuit's own id says only which edges it has. Runs of other models, prompts or
    methods may have given the same ones: then StoreError `run_ambiguous`, unless the
    caller wants the `edges_only`. Raises StoreError `run_kind_wrong`, and as `load`.
    """
    from circuitlab.circuits import Circuit
    from circuitlab.tables import EdgeTable

    run_id = run_of(store, any_id, edges_only=edges_only)
    found = store.load(run_id)
    if not isinstance(found, Circuit | EdgeTable):
        raise StoreError(
            "run_kind_wrong",
            f"{any_id} is neither a circuit nor a run of edge scores, but {_kind(found)}",
            value=_kind(found),
            expected=["circuit", "edge"],
        )
    return found, run_id


def run_of(store: Store, any_id: str, *, edges_only: bool = False) -> str:
    """The id of the run that an id names, be it a run's or a circuit's. Raises as
    `load_circuit` does."""
    try:
        return store.resolve(any_id)
    except StoreError as error:
        if error.code != "run_unknown":
            raise
        runs = _by_circuit_id(store, any_id)
        if not runs:
            raise
        return runs[0] if edges_only else _of_one_origin(store, any_id, runs)


def require_circuit(store: Store, any_id: str, *, edges_only: bool = False) -> Circuit:
    """The circuit of that id. Raises as `load_circuit` does."""
    from circuitlab.circuits import Circuit

    found, _ = load_circuit(store, any_id, edges_only=edges_only)
    if not isinstance(found, Circuit):
        raise StoreError(
            "run_kind_wrong",
            f"{any_id} is a run of edge scores; give a circuit, as `circuitlab circuit` "
            "prints it",
            value="edge",
            expected="circuit",
        )
    return found


def _by_circuit_id(store: Store, prefix: str) -> list[str]:
    """The saved circuits whose own id begins so, the latest first."""
    query = """
        select c.run_id, c.circuit_id from v_circuit c join v_run r using (run_id)
        where r.kind = 'circuit' and starts_with(c.circuit_id, ?)
        order by r.saved_at desc, c.run_id
    """
    rows = store.sql(query, [prefix]).to_pylist()
    ids = sorted({row["circuit_id"] for row in rows})
    if len(ids) > 1:
        raise StoreError(
            "run_ambiguous",
            f"{prefix} is the beginning of {len(ids)} circuits; give more characters",
            value=prefix,
            expected=ids,
        )
    return [row["run_id"] for row in rows]


def _of_one_origin(store: Store, circuit_id: str, runs: Sequence[str]) -> str:
    """The latest of saved circuits of the same edges; those that do not say which scores
    chose them count only where none does. Raises StoreError `run_ambiguous` where the
    circuit would not be measured alike: the model, prompts, metric or ablation differ."""
    from circuitlab.tables import digest

    latest: dict[str, tuple[str, Run]] = {}
    for run_id in runs:
        scores = store.load(run_id).run
        if scores is not None:
            how = [scores.policy.get(key) for key in ("metric", "ablation")]
            model = scores.model.weights_digest, scores.model.dtype
            key = digest(*model, scores.dataset_digest, *how)
            latest.setdefault(key, (run_id, scores))
    if len(latest) > 1:
        found = list(latest.values())
        told = _differing([origin(scores) for _, scores in found])
        each = "; ".join(f"{found[i][0]} ({text})" for i, text in enumerate(told))
        raise StoreError(
            "run_ambiguous",
            f"{len(found)} runs gave the edges of circuit {circuit_id}; give the run id of "
            f"the one that you mean: {each}",
            value=circuit_id,
            expected=[run_id for run_id, _ in found],
        )
    return next((run_id for run_id, _ in latest.values()), runs[0])


def origin(run: Run) -> dict[str, str]:
    """What a circuit's scores were computed from, and how, as a person reads it."""
    policy = run.policy
    named = {key: (policy.get(key) or {}).get("name") for key in ("metric", "ablation")}
    facts = {
        "model": run.model.name,
        "dataset": run.dataset,
        "n": run.n,
        **named,
        "method": policy.get("method"),
        "options": policy.get("method_options"),
        "prompts": run.dataset_digest[:8],
        "weights": run.model.weights_digest[:8],
        "universe": str(policy.get("universe") or "all")[:8],
        "policy": run.policy_digest[:8],
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def _differing(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Each as a text of what is not the same in all; digests and options only for want
    of names."""
    names = [key for key in facts[0] if len({f.get(key) for f in facts}) > 1]
    last = ("options", "prompts", "weights", "policy")
    plain = [key for key in names if key not in last]
    return [
        ", ".join(f"{key} {fact.get(key)}" for key in plain or names) for fact in facts
    ]


@dataclass(frozen=True)
class Bench:
    """The model and prompts that a run's circuits are evaluated on."""

    recipe: Recipe
    model: Backend
    scored: Prompts
    prompts: Prompts

    @staticmethod
    def of(run: Run | None, asked: Measuring) -> Bench:
        """Load a run's model again and draw prompts to evaluate on.

        Raises StoreError `run_not_reproducible`, ArgumentError `prompts_choice_unknown`,
        `prompts_ambiguous`, `task_size_invalid`, and what loading and drawing raise.
        """
        if run is None:
            raise StoreError(
                "run_not_reproducible",
                "this circuit does not say which scores chose it; evaluate it with the "
                "library, on a model and prompts of your own",
                value=None,
            )
        _check_asked(asked)
        recipe = Recipe.of(run)
        recipe = replace(
            recipe,
            model=asked.model or recipe.model,
            metric=asked.metric or recipe.metric,
        )
        recipe.metric_value()
        loaded = recipe.load_model()
        _require_same_model(loaded, run)
        scored = recipe.prompts(loaded)
        return Bench(recipe, loaded, scored, _asked(recipe, loaded, scored, asked))

    def evaluate(self, circuit: Circuit, ablation: str, parent: str) -> Evaluation:
        """Evaluate one circuit; the run points at the circuit's."""
        from circuitlab.evaluate import evaluate

        with progress("Evaluating") as advance:
            found = evaluate(
                self.model, self.prompts, self.recipe.metric_value(), circuit,
                ablation=ablation, scored=self.scored, progress=advance,
            )  # fmt: skip
        return replace(found, run=replace(found.run, parent=parent))


def _check_asked(asked: Measuring) -> None:
    """Refuse options that say nothing, or two things, of which prompts to take."""
    if asked.n is not None and asked.n < 1:
        raise ArgumentError(
            "task_size_invalid",
            f"--n {asked.n}: ask for 1 prompt or more",
            value=asked.n,
        )
    if asked.on not in ("held-out", "scored"):
        raise ArgumentError(
            "prompts_choice_unknown",
            f"--on {asked.on!r}: write held-out or scored",
            value=asked.on,
            expected=["held-out", "scored"],
        )
    others = {"--task": asked.task, "--file": asked.file, "--seed": asked.seed}
    given = [name for name, value in others.items() if value is not None]
    if asked.on == "scored" and given:
        raise ArgumentError(
            "prompts_ambiguous",
            f"--on scored takes the very prompts that were scored, and {given[0]} draws "
            "others; give one of the two",
            value=given,
        )


def _asked(
    recipe: Recipe, model: Backend, scored: Prompts, asked: Measuring
) -> Prompts:
    """The prompts that the options ask for: other ones, or as they were scored."""
    n, seed = asked.n, asked.seed
    if asked.task or asked.file:
        other = recipe.on(
            task=asked.task, file=asked.file, n=n,
            seed=recipe.seed if seed is None else seed,
        )  # fmt: skip
        return other.prompts(model)
    if asked.on == "scored":
        if n is not None and n > len(scored):
            raise ArgumentError(
                "task_size_invalid",
                f"--n {n}: only {len(scored)} prompts were scored; ask for at most so "
                "many, or leave --on scored out",
                value=n,
                expected=len(scored),
            )
        return scored if n is None else scored[:n]
    if seed is None:
        return recipe.held_out(model, n)
    return recipe.redrawn(model, seed, n)


def _require_same_model(model: Backend, run: Run) -> None:
    """The weights must be those of the scores, wherever they lie now."""
    different = model.info.differences(run.model)
    if different:
        raise ArgumentError(
            "model_differs",
            f"{model.info.name} is not the model of this run: {', '.join(different)} "
            "differ; name the model that was scored with --model",
            value=model.info.name,
            expected=run.model.name,
            different=different,
        )
