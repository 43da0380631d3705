"""A recipe: what a scoring command was told, as plain values.

It is kept in the run's provenance, so that a circuit can later be evaluated on prompts
that were held out, and the run can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuitlab.errors import ArgumentError, DataError, StoreError

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.methods import Method
    from circuitlab.metrics import Metric
    from circuitlab.prompts import Prompts
    from circuitlab.tables import Run

DRAWING = ("task", "file", "n", "seed", "corruption", "prepend_bos")
KEY = "command"
"""Where a run's provenance keeps the recipe."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides an edge run; `file` wins over `task`.

    Of runs that were combined, `parts` says for each how its prompts were drawn, in the
    fields `DRAWING`.
    """

    model: str
    task: str | None = None
    file: str | Path | None = None
    n: int | None = None
    seed: int = 0
    corruption: str | None = None
    prepend_bos: bool | None = None
    metric: str = "logit_diff"
    method: str = "eap-ig"
    steps: int = 5
    rule: str = "midpoint"
    path: str = "inputs"
    ablation: str = "patch"
    dtype: str | None = None
    device: str | None = None
    ungroup_kv: bool = False
    parts: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self):
        if self.task and self.file:
            raise ArgumentError(
                "prompts_ambiguous",
                "give --task or --file, not both",
                value=[self.task, self.file],
            )
        if self.n is not None and self.n < 1:
            raise ArgumentError(
                "task_size_invalid",
                f"--n {self.n}: ask for 1 prompt or more",
                value=self.n,
            )
        if self.file:
            object.__setattr__(self, "file", str(Path(self.file).absolute()))
        object.__setattr__(self, "model", _absolute(self.model))

    def to_json(self) -> dict[str, Any]:
        """Plain values without what was left open."""
        return {k: v for k, v in asdict(self).items() if v not in (None, ())}

    @staticmethod
    def of(run: Run) -> Recipe:
        """The recipe of a run. Raises StoreError `run_not_reproducible`."""
        found = run.provenance.get(KEY)
        if not isinstance(found, Mapping):
            raise StoreError(
                "run_not_reproducible",
                "this run does not say with which model and prompts it was made: it was "
                "not made by `circuitlab score`; use the library, with your own prompts",
                value=None,
            )
        known = {k: v for k, v in found.items() if k in Recipe.__dataclass_fields__}
        return Recipe(**{**known, "parts": tuple(known.get("parts", ()))})

    @staticmethod
    def joined(recipes: Sequence[Recipe]) -> Recipe:
        """The recipe of runs that differ in their prompts, combined into one."""
        each = [part for recipe in recipes for part in recipe.each()]
        parts = tuple({name: getattr(part, name) for name in DRAWING} for part in each)
        return replace(each[0].on(), n=None, seed=0, prepend_bos=None, parts=parts)

    def each(self) -> list[Recipe]:
        """The recipe of every part; this one where there are none."""
        return [replace(self, parts=(), **part) for part in self.parts] or [self]

    def sets(self, model: Backend) -> list[Prompts]:
        """The prompts to score, part by part."""
        return [part.prompts(model) for part in self.each()]

    def load_model(self) -> Backend:
        """The model, loaded and probed."""
        from circuitlab.cli_quiet import quiet_load

        return quiet_load(
            self.model, dtype=self.dtype, device=self.device, ungroup_kv=self.ungroup_kv
        )

    def prompts(self, model: Backend) -> Prompts:
        """The prompts to score."""
        if self.parts:
            return _joined(self.sets(model))
        if self.file:
            every = self._from_file(model)
            if self.n is None or self.n == len(every):
                return every
            return every.split(self.n, self.seed)[0]
        return self._task(model, self._size)

    def held_out(self, model: Backend, n: int | None = None) -> Prompts:
        """Prompts of the same kind that `prompts` does not hold: `n` of them, by default
        as many as a task's were scored, and all that a file has left.

        A file's other rows, or the task's next ones of the same seed. Raises DataError
        `no_held_out_prompts`, also where there are fewer than `n`.
        """
        found = self._left(model, n)
        if n is not None and len(found) < n:
            raise DataError(
                "no_held_out_prompts",
                f"only {len(found)} prompts of {found.name} were not scored; ask for at "
                "most so many (--n), or draw with another --seed",
                value=n,
                expected=len(found),
            )
        return found if n is None else found[:n]

    def _left(self, model: Backend, n: int | None) -> Prompts:
        """Held-out prompts: `n` or, where there are not so many, all."""
        if self.parts:
            share = None if n is None else -(-n // len(self.parts))
            found = self._left_of_parts(model, share)
            short = n is not None and len(found) < n
            return self._left_of_parts(model, n) if short else found
        if self.file:
            every = self._from_file(model)
            if self.n is not None and self.n < len(every):
                return every.split(self.n, self.seed)[1]
            raise self._none_left(
                f"all {len(every)} prompts of {self.file} were scored"
            )
        wanted = self._size + (self._size if n is None else n)
        try:
            every = self._task(model, wanted)
        except DataError as error:
            found = error.fields.get("value")
            if error.code != "task_too_small" or not isinstance(found, int):
                raise
            if found <= self._size:
                raise self._none_left(
                    f"{self._task_name} has no more prompts"
                ) from None
            every = self._task(model, found)
        # A task draws in a fixed order, so a larger set begins with the smaller one.
        return every[self._size :]

    def _left_of_parts(self, model: Backend, n: int | None) -> Prompts:
        """What the parts hold out, at most `n` of each, without what another part
        scored."""
        seen = {clean for prompts in self.sets(model) for clean in prompts.clean}
        found = []
        for part in self.each():
            try:
                held = part._left(model, n)[:n]
            except DataError as error:
                if error.code != "no_held_out_prompts":
                    raise
                continue
            rows = [i for i, clean in enumerate(held.clean) if clean not in seen]
            seen.update(held.clean)
            found += [held.take(rows)] if rows else []
        if not found:
            raise self._none_left("these runs together scored all prompts")
        return _joined(found)

    def redrawn(self, model: Backend, seed: int, n: int | None = None) -> Prompts:
        """Prompts of the same kind, drawn with another seed: `n`, by default as many as
        were scored. Of runs that were combined, about as many of each kind of prompts."""
        kinds: dict[tuple[Any, ...], Recipe] = {}
        for part in self.each():
            kinds.setdefault((part.task, part.file, part.corruption), part)
        share = None if n is None else -(-n // len(kinds))
        drawn = [
            replace(part, seed=seed, n=part.n if share is None else share)
            for part in kinds.values()
        ]
        found = [part.prompts(model) for part in drawn]
        return found[0] if len(found) == 1 else _joined(found)[:n]

    def _none_left(self, why: str) -> DataError:
        return DataError(
            "no_held_out_prompts",
            f"{why}; score fewer (--n), or give others with --task or --file, or accept "
            "the same ones with --on scored",
            value=self.file or self._task_name,
        )

    @property
    def _task_name(self) -> str:
        return self.task or "ioi"

    @property
    def _size(self) -> int:
        return 32 if self.n is None else self.n

    def _task(self, model: Backend, n: int) -> Prompts:
        from circuitlab import tasks

        task = tasks.by_name(self._task_name)
        how = {"corruption": self.corruption} if self.corruption else {}
        if how and task is not tasks.ioi:
            raise ArgumentError(
                "corruption_unknown",
                f"{self._task_name} has one corruption; leave --corruption out",
                value=self.corruption,
            )
        return task(n, self.seed, model, prepend_bos=self.prepend_bos, **how)

    def _from_file(self, model: Backend) -> Prompts:
        from circuitlab.prompts import Prompts

        assert self.file is not None
        long_answers = self.metric == "answer_logprob"
        return Prompts.from_file(
            self.file,
            model,
            prepend_bos=self.prepend_bos,
            multi_token_answers=long_answers,
        )

    def metric_value(self) -> Metric:
        """The metric named. Raises ArgumentError `metric_unknown`."""
        from circuitlab import metrics

        known: dict[str, Callable[[], Metric]] = {
            "logit_diff": metrics.logit_diff,
            "prob_diff": metrics.prob_diff,
            "answer_logprob": metrics.answer_logprob,
            "kl": metrics.kl,
        }
        return _choice("metric", self.metric, known)()

    def method_value(self) -> Method:
        """The method named. Raises ArgumentError `method_unknown`."""
        from circuitlab.methods import EAP, EAPIG, CleanCorrupted, Exact

        rule: Any = self.rule
        path: Any = self.path
        known: dict[str, Callable[[], Method]] = {
            "eap": EAP,
            "eap_ig": lambda: EAPIG(self.steps, rule, path),
            "clean_corrupted": CleanCorrupted,
            "exact": Exact,
        }
        return _choice("method", self.method, known)()

    def check_names(self, *, method: bool = True) -> None:
        """Refuse unknown names now, and not after minutes of loading.

        `method` False leaves the method's out: that of a search is no score's.
        """
        from circuitlab.ablations import as_ablation

        self.metric_value()
        if method:
            self._check_method()
        as_ablation(self.ablation)

    def _check_method(self) -> None:
        """Refuse, in this program's words, a method that would score everything zero."""
        from circuitlab.methods import only_at_clean

        stationary = self.metric_value().stationary_at_clean
        if only_at_clean(self.method_value()) and stationary:
            raise ArgumentError(
                "metric_stationary_at_clean",
                f"the gradient of {self.metric} is zero at the clean run, so {self.method} "
                "would score everything zero; use --method eap-ig with --rule midpoint",
                value=self.method,
                metric=self.metric,
                expected="eap-ig",
            )

    def on(self, **prompts: Any) -> Recipe:
        """The same computation on other prompts."""
        none = {"task": None, "file": None, "corruption": None, "parts": ()}
        return replace(self, **{**none, **prompts})

    def signed(self, run: Run, **more: Any) -> Run:
        """A run that says with which recipe (and what `more`) it was made."""
        return replace(
            run, provenance={**run.provenance, KEY: {**self.to_json(), **more}}
        )


def _joined(sets: Sequence[Prompts]) -> Prompts:
    """Sets of prompts as one."""
    import pyarrow as pa

    from circuitlab.prompts import joined_name

    name = joined_name(some.name for some in sets)
    table = pa.concat_tables([some.table for some in sets])
    every = replace(sets[0], table=table, name=name)
    return every[:]  # numbered anew


def _choice(what: str, name: str, known: Mapping[str, Any]) -> Any:
    wanted = name.replace("-", "_").lower()
    if wanted not in known:
        raise ArgumentError(
            f"{what}_unknown",
            f"there is no {what} {name!r}; choose {', '.join(known)}",
            value=name,
            expected=list(known),
        )
    return known[wanted]


def _absolute(model: str) -> str:
    """A path that means the same from any working directory; names stay as they are."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
