"""Tasks: seeded sets of prompt pairs, checked against a model's tokenizer.

Each is a plain function of `n`, `seed` and `model` that returns `Prompts` and says in
`prompts.dropped` what it left out and why.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from types import MappingProxyType

from circuitlab.errors import ArgumentError
from circuitlab.prompts import Prompts
from circuitlab.tasks.agreement import agreement as agreement
from circuitlab.tasks.capitals import capitals as capitals
from circuitlab.tasks.greater_than import greater_than as greater_than
from circuitlab.tasks.induction import induction as induction
from circuitlab.tasks.ioi import ioi as ioi
from circuitlab.tasks.pronouns import pronouns as pronouns

Task = Callable[..., Prompts]

TASKS = MappingProxyType(
    {
        "ioi": ioi,
        "greater_than": greater_than,
        "induction": induction,
        "pronouns": pronouns,
        "agreement": agreement,
        "capitals": capitals,
    }
)
"""Every task by its name."""


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(TASKS)


def by_name(name: str) -> Task:
    """The task of that name; `greater-than` is `greater_than` too.

    Raises ArgumentError `task_unknown`, with the nearest names.
    """
    wanted = name.replace("-", "_").lower()
    if wanted not in TASKS:
        nearest = difflib.get_close_matches(wanted, TASKS, n=3)
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ArgumentError(
            "task_unknown",
            f"there is no task {name!r}; {hint}tasks are {', '.join(TASKS)}",
            value=name,
            nearest=nearest,
            expected=list(TASKS),
        )
    return TASKS[wanted]
