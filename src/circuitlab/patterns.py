"""Patterns: numbers, ends of edges and bounds, the parts that selectors are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from circuitlab.conditions import OPERATORS, Compare, Condition
from circuitlab.errors import ArgumentError
from circuitlab.sites import PORTS, Component, Edge, ModelShape, Receiver

KINDS = ("input", "head", "kv", "attention", "mlp", "logits")
ATTENTION = ("head", "kv", "attention")
FORMS = ("*", "a*", *KINDS)
QUANTITIES = ("score", "|score|", "support", "stderr", "n")


def as_words(value: Any, allowed: tuple[str, ...], what: str) -> frozenset[str] | None:
    if value is None:
        return None
    found = frozenset(as_list(value))
    for word in sorted(found - set(allowed)):
        refuse(f"a {what} is one of {', '.join(allowed)}", word)
    return found


def as_list(value: Iterable[str] | str) -> Iterable[str]:
    return [value] if isinstance(value, str) else value


def set_field(record: object, name: str, value: object) -> None:
    object.__setattr__(record, name, value)


def refuse(text: str, value: object) -> NoReturn:
    raise ArgumentError("selector_invalid", f"{text}, not {value!r}", value=str(value))


@dataclass(frozen=True)
class Span:
    """A half-open range with the meaning of a Python slice: `3:`, `-2:`, `::2`."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __post_init__(self):
        if self.step == 0:
            refuse("a range's step is not zero", str(self))
        if self.step == 1:
            set_field(self, "step", None)

    def __str__(self) -> str:
        start, stop = self.start, self.stop
        parts = ["" if part is None else str(part) for part in (start, stop)]
        if self.step is not None:
            return ":".join([*parts, str(self.step)])
        if start is None or stop is None or not 0 <= start < stop:
            return ":".join(parts)
        return f"{start}-{stop - 1}"


Numbers = tuple[int | Span, ...]


def as_numbers(value: Any) -> Numbers | None:
    """Ints, slices and ranges, alone or listed, as a tuple of ints and Spans."""
    if value is None:
        return None
    alone = isinstance(value, int | slice | Span | range)
    found: list[int | Span] = []
    for item in [value] if alone else value:
        if isinstance(item, slice | range):
            step = None if item.step == 1 else item.step
            item = Span(item.start, item.stop, step)
        if isinstance(item, bool) or not isinstance(item, int | np.integer | Span):
            refuse("numbers are ints, slices, ranges or Spans", repr(item))
        found.append(item if isinstance(item, Span) else int(item))
    return tuple(dict.fromkeys(found))


def numbers_of(items: Numbers, count: int, what: str) -> frozenset[int]:
    """The numbers below `count` that the items name, negative ones from the end.

    A range is cut off at the ends as in Python; a single number that does not exist
    raises ArgumentError `selector_out_of_range`.
    """
    found: set[int] = set()
    for item in items:
        if isinstance(item, Span):
            found |= set(range(count)[slice(item.start, item.stop, item.step)])
        elif -count <= item < count:
            found.add(item % count)
        else:
            raise ArgumentError(
                "selector_out_of_range",
                f"{what} {item} does not exist; there are {count}",
                value=item,
                expected=[-count, count - 1],
            )
    return frozenset(found)


@dataclass(frozen=True)
class End:
    """One end of an edge by pattern: `a5-9.*<q>`, `m[0,2]`, `input`, `*`.

    `form` is a component's kind, `a*` for anything in an attention layer, or `*`.
    """

    form: str = "*"
    layers: Numbers | None = None
    heads: Numbers | None = None
    ports: frozenset[str] | None = None

    def __post_init__(self):
        if self.form not in FORMS:
            refuse(f"a pattern's form is one of {', '.join(FORMS)}", self.form)
        if self.form in ("*", "input", "logits") and self.layers is not None:
            refuse("this pattern has no layers", self.form)
        if self.form not in ("head", "kv") and self.heads is not None:
            refuse("this pattern has no head numbers", self.form)
        if self.form not in ("*", "a*", *ATTENTION) and self.ports is not None:
            refuse("only attention reads by a port", self.form)
        set_field(self, "layers", as_numbers(self.layers))
        set_field(self, "heads", as_numbers(self.heads))
        set_field(self, "ports", as_words(self.ports, PORTS, "port"))
        for part in (self.layers, self.heads, self.ports):
            if part is not None and not part:
                refuse("a pattern's lists are not empty; leave them out", self.form)

    @property
    def explicit(self) -> bool:
        """Whether the pattern is a component's or receiver's full name."""
        needed = {
            "input": (),
            "logits": (),
            "mlp": (self.layers,),
            "attention": (self.layers,),
            "head": (self.layers, self.heads),
            "kv": (self.layers, self.heads),
        }.get(self.form)
        return needed is not None and all(_single(part) for part in needed)

    @property
    def component(self) -> Component:
        """The component that an explicit pattern names."""
        numbers = [part[0] for part in (self.layers, self.heads) if part]
        return Component(self.form, *numbers)  # type: ignore[arg-type]

    def matches(self, shape: ModelShape) -> Callable[[Component], bool]:
        """A test of components. Raises ArgumentError `selector_out_of_range`."""
        kinds = {"*": KINDS, "a*": ATTENTION}.get(self.form, (self.form,))
        return component_test(frozenset(kinds), self.layers, self.heads, shape)


def _single(items: Numbers | None) -> bool:
    only = list(items or ())
    return len(only) == 1 and isinstance(only[0], int) and only[0] >= 0


def component_test(
    kinds: frozenset[str] | None,
    layers: Numbers | None,
    heads: Numbers | None,
    shape: ModelShape,
) -> Callable[[Component], bool]:
    in_layers = None
    if layers is not None:
        in_layers = numbers_of(layers, shape.n_layers, "layer")
    in_heads: dict[str, frozenset[int]] = {}
    if heads is not None:
        in_heads = _heads_by_kind(heads, kinds, shape)

    def test(component: Component) -> bool:
        if kinds is not None and component.kind not in kinds:
            return False
        if in_layers is not None and component.layer not in in_layers:
            return False
        return heads is None or component.head in in_heads.get(component.kind, ())

    return test


def _heads_by_kind(
    heads: Numbers, kinds: frozenset[str] | None, shape: ModelShape
) -> dict[str, frozenset[int]]:
    """Heads and KV groups are numbered apart; a number must exist among either."""
    counts = {"head": shape.n_heads, "kv": shape.n_kv_heads}
    wanted = [k for k in counts if kinds is None or k in kinds] or ["head"]
    found: dict[str, set[int]] = {kind: set() for kind in wanted}
    for item in heads:
        fits = [kind for kind in wanted if _exists(item, counts[kind])]
        for kind in fits or wanted[:1]:
            found[kind] |= numbers_of((item,), counts[kind], "head")
    return {kind: frozenset(numbers) for kind, numbers in found.items()}


def _exists(item: int | Span, count: int) -> bool:
    return isinstance(item, Span) or -count <= item < count


@dataclass(frozen=True)
class EdgePattern:
    """Edges from one end to another; explicit if both ends are full names."""

    sender: End = End()
    receiver: End = End()

    def __post_init__(self):
        if self.sender.ports is not None:
            refuse("a sender has no port", sorted(self.sender.ports))

    @property
    def explicit(self) -> bool:
        ports = self.receiver.ports
        attention = self.receiver.form in ATTENTION
        has_port = (ports is not None and len(ports) == 1) == attention
        return self.sender.explicit and self.receiver.explicit and has_port

    @property
    def name(self) -> str:
        """An explicit pattern's canonical edge name."""
        (port,) = self.receiver.ports or ("in",)
        return Edge(self.sender.component, Receiver(self.receiver.component, port)).name


@dataclass(frozen=True)
class Bound:
    """A comparison of a row's number with a constant: `|score| > 0.01`."""

    quantity: str
    op: str
    value: float

    def __post_init__(self):
        if self.quantity not in QUANTITIES:
            refuse(f"bounds are on {', '.join(QUANTITIES)}", self.quantity)
        if self.op not in OPERATORS:
            refuse(f"a bound's operator is one of {' '.join(OPERATORS)}", self.op)
        if np.isnan(self.value):
            refuse("a bound is a number", "nan")
        set_field(self, "value", float(self.value))

    def condition(self, higher_is_better: bool) -> Condition:
        column = self.quantity.strip("|")
        negated = column == "support" and higher_is_better
        column = "score" if column == "support" else column
        absolute = self.quantity.startswith("|")
        return Compare(column, self.op, self.value, absolute, negated)
