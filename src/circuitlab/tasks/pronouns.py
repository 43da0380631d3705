"""Gendered pronouns: "So Frank is a really great friend, isn't" → " he".

Source: after Mathwin et al. 2023, "Identifying a Preliminary Circuit for Predicting
Gendered Pronouns in GPT-2 Small". The templates are our own.
"""

from __future__ import annotations

from random import Random
from typing import Any

from circuitlab.encoding import Encoder
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import (
    Dropped,
    collect,
    known_templates,
    require,
    single_tokens,
)
from circuitlab.tasks.words import MEN, WOMEN, listed

TEMPLATES = (
    "So {name} is a really {trait} {role}, isn't",
    "I think that {name} was a {trait} {role}, wasn't",
    "Everyone says {name} is such a {trait} {role}, isn't",
    "They know that {name} was a very {trait} {role}, wasn't",
)

TRAITS = listed(
    """
    great good kind quiet smart tired brave calm famous careful
    """
)

ROLES = listed(
    """
    friend cook teacher student writer doctor neighbor driver leader singer
    """
)


def pronouns(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    *,
    prepend_bos: bool | None = None,
) -> Prompts:
    """Make pronoun prompts: is the person of that name a he or a she?

    The corrupted prompt has a name of the other gender in its place, so its answer is
    the wrong answer.

    Raises ArgumentError `tokenizer_missing`, `task_size_invalid`; DataError
    `task_too_small`.
    """
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    men = single_tokens(MEN, encoder, "name", dropped)
    women = single_tokens(WOMEN, encoder, "name", dropped)
    traits = single_tokens(TRAITS, encoder, "trait", dropped)
    roles = single_tokens(ROLES, encoder, "role", dropped)
    templates = known_templates(TEMPLATES, encoder, dropped)
    require("pronouns", 1, dropped, men=men, women=women, traits=traits, roles=roles)
    require("pronouns", 1, dropped, templates=templates)

    def draw(rng: Random) -> PromptText:
        man, woman = rng.choice(men), rng.choice(women)
        template = rng.choice(templates)
        trait, role = rng.choice(traits), rng.choice(roles)
        he = template.format(name=man, trait=trait, role=role)
        she = template.format(name=woman, trait=trait, role=role)
        if rng.random() < 0.5:
            return PromptText(he, she, (" he",), (" she",))
        return PromptText(she, he, (" she",), (" he",))

    return collect("pronouns", draw, n, seed, encoder, dropped)
