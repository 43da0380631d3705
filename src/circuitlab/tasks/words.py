"""Words that several tasks share. Which of them a task uses, its tokenizer decides."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


MEN = listed(
    """
    John Tom James Frank Paul Mark Peter Simon David Robert Jack Adam Bill Henry
    Michael Martin Luke Daniel George Charles Scott Andrew Richard Steven Kevin
    Brian Alex Joe Eric Ryan
    """
)

WOMEN = listed(
    """
    Mary Anna Sarah Emily Alice Laura Lucy Emma Jane Kate Rachel Susan Lisa Julia
    Helen Grace Amy Rose Jessica Karen Linda Nancy Elizabeth Rebecca Jennifer
    Michelle Lily Claire Victoria Maria
    """
)

NAMES = tuple(name for pair in zip(MEN, WOMEN, strict=True) for name in pair)

PLACES = listed(
    """
    store school park garden station office market library restaurant hospital
    museum beach house church hotel farm
    """
)

OBJECTS = listed(
    """
    book ring drink letter ball basket gift key camera watch card bottle computer
    hat ticket phone
    """
)
