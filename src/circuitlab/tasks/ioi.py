"""Indirect object identification: "Mary and John …, John gave a book to" → " Mary".

Source: Wang et al. 2022, "Interpretability in the Wild", arXiv 2211.00593. The
templates are our own, in the paper's two orders.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Literal

from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import (
    Dropped,
    collect,
    known_templates,
    require,
    single_tokens,
)
from circuitlab.tasks.words import NAMES, OBJECTS, PLACES

Corruption = Literal["abc", "s1_io_flip", "s2_io_flip", "random_names", "s2_random"]
Order = Literal["mixed", "abba", "baba"]
Roles = tuple[str, str, str]  # the names that stand first, second and third

TEMPLATES = (
    "When {A} and {B} went to the {place}, {S} gave a {object} to",
    "Then, {A} and {B} went to the {place}. {S} gave a {object} to",
    "After {A} and {B} arrived at the {place}, {S} handed a {object} to",
    "While {A} and {B} were working at the {place}, {S} passed a {object} to",
    "Then, {A} and {B} had a long talk at the {place}. {S} gave a {object} to",
    "Yesterday, {A} and {B} met at the {place}, and {S} offered a {object} to",
    "As {A} and {B} were leaving the {place}, {S} showed a {object} to",
    "The day {A} and {B} visited the {place}, {S} brought a {object} to",
)

DISTRACTOR = "Earlier, {X} was at the {other}."


def ioi(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    corruption: Corruption = "abc",
    *,
    prepend_bos: bool | None = None,
    order: Order = "mixed",
    distractor: bool = False,
) -> Prompts:
    """Make IOI prompts: who is given the object? The name that is not the giver.

    The answer is the indirect object (IO), the wrong answer the subject (S).
    `order`: `abba` names IO first ("Mary and John …, John"), `baba` S first.
    `distractor` puts a sentence before it that mentions IO, S or a third name, so that
    counting how often a name stands there no longer solves the task.

    `corruption` makes the corrupted prompt from the clean one:
    `abc` three other names, all different (the paper's; the logit difference goes to
    about 0); `s2_random` only the giver becomes a third name (about 0);
    `random_names` other names in the same roles (same structure, unknown names);
    `s2_io_flip` IO gives (the answer turns round); `s1_io_flip` IO and S trade places
    in the first clause (the answer stays: only position information differs).

    Raises ArgumentError `tokenizer_missing`, `corruption_unknown`, `order_unknown`,
    `task_size_invalid`; DataError `task_too_small`.
    """
    corrupt = _corruption(corruption)
    _check_order(order)
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    names = single_tokens(NAMES, encoder, "name", dropped)
    places = single_tokens(PLACES, encoder, "place", dropped)
    objects = single_tokens(OBJECTS, encoder, "object", dropped)
    templates = [f"{DISTRACTOR} {text}" if distractor else text for text in TEMPLATES]
    templates = known_templates(templates, encoder, dropped)
    require("ioi", 6, dropped, names=names)
    require("ioi", 2, dropped, places=places)
    require("ioi", 1, dropped, objects=objects, templates=templates)

    def draw(rng: Random) -> PromptText:
        io, s, *others = rng.sample(names, 6)
        io_first = order == "abba" or (order == "mixed" and rng.random() < 0.5)
        clean = (io, s, s) if io_first else (s, io, s)
        place, other = rng.sample(places, 2)
        template = rng.choice(templates)
        extra = rng.choice([io, s, others[3]])
        texts = [
            template.format(
                A=first,
                B=second,
                S=third,
                X=extra,
                place=place,
                other=other,
                object=thing,
            )
            for thing in [rng.choice(objects)]
            for first, second, third in (clean, corrupt(clean, others))
        ]
        return PromptText(texts[0], texts[1], (f" {io}",), (f" {s}",))

    return collect("ioi", draw, n, seed, encoder, dropped)


def _abc(clean: Roles, others: list[str]) -> Roles:
    return others[0], others[1], others[2]


def _s2_random(clean: Roles, others: list[str]) -> Roles:
    return clean[0], clean[1], others[0]


def _random_names(clean: Roles, others: list[str]) -> Roles:
    first, second = others[0], others[1]
    return first, second, first if clean[2] == clean[0] else second


def _s2_io_flip(clean: Roles, others: list[str]) -> Roles:
    first, second, third = clean
    return first, second, second if third == first else first


def _s1_io_flip(clean: Roles, others: list[str]) -> Roles:
    return clean[1], clean[0], clean[2]


_CORRUPTIONS: dict[str, Callable[[Roles, list[str]], Roles]] = {
    "abc": _abc,
    "s1_io_flip": _s1_io_flip,
    "s2_io_flip": _s2_io_flip,
    "random_names": _random_names,
    "s2_random": _s2_random,
}


def _corruption(name: str) -> Callable[[Roles, list[str]], Roles]:
    if name not in _CORRUPTIONS:
        raise ArgumentError(
            "corruption_unknown",
            f"ioi has no corruption {name!r}; choose {', '.join(_CORRUPTIONS)}",
            value=name,
            expected=list(_CORRUPTIONS),
        )
    return _CORRUPTIONS[name]


def _check_order(order: str) -> None:
    if order not in ("mixed", "abba", "baba"):
        raise ArgumentError(
            "order_unknown",
            f"ioi has no order {order!r}; choose mixed, abba or baba",
            value=order,
            expected=["mixed", "abba", "baba"],
        )
