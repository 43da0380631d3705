"""Selectors: which edges, or which sites, as a value that compiles to SQL and a mask.

Across fields a row must meet all, within a field one; what an exclude matches is out,
and pinned rows are in whatever else is said. A field that is None makes no demand; an
empty one is met by nothing. `selector_text` reads and writes their text form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any as Anything

import numpy as np
import pyarrow as pa

from circuitlab.conditions import All, Any, Compare, Condition, Not, Stride, Within
from circuitlab.errors import ArgumentError
from circuitlab.patterns import KINDS as KINDS
from circuitlab.patterns import Bound as Bound
from circuitlab.patterns import EdgePattern as EdgePattern
from circuitlab.patterns import End as End
from circuitlab.patterns import (
    Numbers,
    as_list,
    as_numbers,
    as_words,
    component_test,
    numbers_of,
    refuse,
    set_field,
)
from circuitlab.patterns import Span as Span
from circuitlab.sites import (
    PORTS,
    Component,
    ModelShape,
    Receiver,
    parse_edge,
    site_glob,
)
from circuitlab.tables import STATUSES, EdgeTable

EndFields = tuple[frozenset[str] | None, Numbers | None, Numbers | None]


@dataclass(frozen=True)
class EdgeSelector:
    """Which edges. See the module for how fields combine; `str` gives the text form.

    `names` holds patterns, explicit ones included. Numbers are ints, Spans, slices or
    ranges, negative from the end. `sign` is that of the score. Without any field it
    selects every candidate, and prints as `*`.
    """

    names: tuple[EdgePattern, ...] | None = None
    sender_kinds: frozenset[str] | None = None
    sender_layers: Numbers | None = None
    sender_heads: Numbers | None = None
    receiver_kinds: frozenset[str] | None = None
    receiver_layers: Numbers | None = None
    receiver_heads: Numbers | None = None
    ports: frozenset[str] | None = None
    positions: Numbers | None = None
    statuses: frozenset[str] | None = None
    sign: str | None = None
    bounds: tuple[Bound, ...] = ()
    exclude: tuple[EdgeSelector, ...] = ()
    pinned: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.names is not None:
            names = tuple(dict.fromkeys(self.names))
            # A pattern that matches everything demands nothing.
            set_field(self, "names", None if EdgePattern() in names else names)
        for end in ("sender", "receiver"):
            kinds = as_words(getattr(self, f"{end}_kinds"), KINDS, "kind")
            set_field(self, f"{end}_kinds", kinds)
        for name in ("sender_layers", "sender_heads", "positions"):
            set_field(self, name, as_numbers(getattr(self, name)))
        for name in ("receiver_layers", "receiver_heads"):
            set_field(self, name, as_numbers(getattr(self, name)))
        set_field(self, "ports", as_words(self.ports, (*PORTS, "in"), "port"))
        _common(self)
        set_field(
            self, "pinned", frozenset(parse_edge(pin).name for pin in self.pinned)
        )

    @property
    def of_sender(self) -> EndFields:
        """What is demanded of the sender: kinds, layers, heads."""
        return self.sender_kinds, self.sender_layers, self.sender_heads

    @property
    def of_receiver(self) -> EndFields:
        """What is demanded of the receiver: kinds, layers, heads."""
        return self.receiver_kinds, self.receiver_layers, self.receiver_heads

    @property
    def is_empty(self) -> bool:
        """Whether nothing is demanded, so that every candidate is selected."""
        return self == EdgeSelector(pinned=self.pinned)

    def __str__(self) -> str:
        from circuitlab.selector_text import edge_selector_text

        return edge_selector_text(self)

    def condition(
        self,
        shape: ModelShape,
        *,
        higher_is_better: bool = True,
        n_positions: int | None = None,
    ) -> Condition:
        """The selector over the columns of `v_edge`, for a model's shape.

        Raises ArgumentError `edge_unknown` for an explicit edge that the model does not
        have, `selector_out_of_range`, or `positions_unresolved`.
        """
        context = (shape, higher_is_better, n_positions)
        parts = [*_name_parts(self, shape), *_row_parts(self, *context[1:])]
        for other in self.exclude:
            inner = other.condition(
                shape, higher_is_better=higher_is_better, n_positions=n_positions
            )
            parts.append(Not(inner))
        found = All(tuple(parts))
        if not self.pinned:
            return found
        shape.mask_of(self.pinned)
        return Any((found, Within("edge", tuple(sorted(self.pinned)))))

    def to_sql(
        self,
        shape: ModelShape,
        *,
        higher_is_better: bool = True,
        n_positions: int | None = None,
    ) -> tuple[str, list[object]]:
        """A WHERE clause over `v_edge` and its parameters, in order. Raises as above."""
        found = self.condition(
            shape, higher_is_better=higher_is_better, n_positions=n_positions
        )
        return found.sql()

    def mask(self, table: EdgeTable, *, n_positions: int | None = None) -> np.ndarray:
        """Which rows of a table are selected, bool [row]. Raises as above."""
        uses_support = any(b.quantity == "support" for b in _all_bounds(self))
        higher = table.higher_is_better if uses_support else True
        found = self.condition(
            table.shape, higher_is_better=higher, n_positions=n_positions
        )
        return found.mask(_columns(table.rows))

    def preview(self, shape: ModelShape) -> Preview:
        """What the names and fields match in a model, before any score is looked at."""
        pairs = np.zeros(shape.edge_mask.shape, dtype=bool)
        impossible = np.zeros_like(pairs)
        for pattern in self.names if self.names is not None else (EdgePattern(),):
            senders, receivers = _pattern_sets(pattern, shape)
            matched = np.outer(
                [s.name in senders for s in shape.senders],
                [r.name in receivers for r in shape.receivers],
            )
            pairs |= matched
            if "*" not in (pattern.sender.form, pattern.receiver.form):
                impossible |= matched & ~shape.edge_mask
        rows, columns = _field_sets(self, shape)
        pairs &= shape.edge_mask & np.outer(rows, columns)
        return Preview(shape.names_of(pairs), int(impossible.sum()))


@dataclass(frozen=True)
class Preview:
    """The edges that a selector's names match, and how many pairs are no edges."""

    edges: tuple[str, ...]
    impossible: int


@dataclass(frozen=True)
class SiteSelector:
    """Which sites: as EdgeSelector, over rows with a `site` and numbers.

    `sites` are names or globs: `*` stays in one dotted segment, `**` crosses. Kind,
    layer and port are read from a site's name (see `site_facts`). The other fields look
    at the columns head, position, score, stderr, n and status; one that the table lacks
    is refused.
    """

    sites: tuple[str, ...] | None = None
    kinds: frozenset[str] | None = None
    layers: Numbers | None = None
    heads: Numbers | None = None
    ports: frozenset[str] | None = None
    positions: Numbers | None = None
    statuses: frozenset[str] | None = None
    sign: str | None = None
    bounds: tuple[Bound, ...] = ()
    exclude: tuple[SiteSelector, ...] = ()
    pinned: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.sites is not None:
            sites = tuple(dict.fromkeys(as_list(self.sites)))
            # Alone, a star is the empty selector's text, not a name of one segment.
            set_field(self, "sites", None if sites in (("*",), ("**",)) else sites)
        if self.kinds is not None:
            set_field(self, "kinds", frozenset(as_list(self.kinds)))
        for name in ("layers", "heads", "positions"):
            set_field(self, name, as_numbers(getattr(self, name)))
        set_field(self, "ports", as_words(self.ports, (*PORTS, "in"), "port"))
        _common(self)
        set_field(self, "pinned", frozenset(as_list(self.pinned)))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is demanded, so that every candidate is selected."""
        return self == SiteSelector(pinned=self.pinned)

    def __str__(self) -> str:
        from circuitlab.selector_text import site_selector_text

        return site_selector_text(self)

    def condition(
        self,
        sites: Iterable[str],
        *,
        n_layers: int,
        n_heads: int,
        n_positions: int | None = None,
        higher_is_better: bool = True,
    ) -> Condition:
        """The selector for a model's sites: globs are expanded against `sites`.

        Raises ArgumentError `selector_out_of_range` or `positions_unresolved`.
        """
        known = tuple(sites)
        sizes = {"n_layers": n_layers, "n_heads": n_heads, "n_positions": n_positions}
        parts: list[Condition] = []
        if not (self.sites is self.kinds is self.layers is self.ports is None):
            parts.append(Within("site", self._named(known, n_layers)))
        parts += _number_part("head", self.heads, n_heads)
        parts += _row_parts(self, higher_is_better, n_positions)
        for other in self.exclude:
            inner = other.condition(known, **sizes, higher_is_better=higher_is_better)  # type: ignore[arg-type]
            parts.append(Not(inner))
        found = All(tuple(parts))
        pins = matching_sites(tuple(self.pinned), known)
        return Any((found, Within("site", pins))) if self.pinned else found

    def _named(self, known: tuple[str, ...], n_layers: int) -> tuple[str, ...]:
        """The sites that fit by name: glob, kind, layer and port are read from it."""
        sites = known if self.sites is None else matching_sites(self.sites, known)
        layers = None
        if self.layers is not None:
            layers = numbers_of(self.layers, n_layers, "layer")

        def fits(facts: SiteFacts) -> bool:
            return (
                (self.kinds is None or facts.kind in self.kinds)
                and (layers is None or facts.layer in layers)
                and (self.ports is None or (facts.port or "in") in self.ports)
            )

        return tuple(site for site in sites if fits(site_facts(site)))

    def mask(
        self, rows: pa.Table, *, n_layers: int, n_heads: int, **context: Anything
    ) -> np.ndarray:
        """Which rows are selected, bool [row].

        Raises as `condition`, and ArgumentError `selector_column_missing`.
        """
        sites = dict.fromkeys(rows["site"].to_pylist())
        found = self.condition(sites, n_layers=n_layers, n_heads=n_heads, **context)
        return found.mask(_columns(rows))


def matching_sites(patterns: Iterable[str], sites: Iterable[str]) -> tuple[str, ...]:
    """The sites that a name or glob matches, each once, in the order of `sites`."""
    tests = [site_glob(pattern) for pattern in patterns]
    return tuple(site for site in sites if any(test.fullmatch(site) for test in tests))


@dataclass(frozen=True)
class SiteFacts:
    """What a site's name says: `kind` is the part of a block (attn, mlp, ln1), `block`
    for the block's own sites, and the first segment outside the blocks (embed)."""

    kind: str
    layer: int | None
    port: str | None


def site_facts(site: str) -> SiteFacts:
    """Read a site's name, `blocks.3.attn.q.hook_out`: kind attn, layer 3, port q."""
    segments = site.split(".")
    ports = [part.removeprefix("hook_") for part in segments]
    port = next((part for part in ports if part in PORTS), None)
    inner = re.search(r"(?:^|\.)blocks\.(\d+)(?:\.(\w+))?", site)
    if inner is None:
        return SiteFacts(segments[0], None, port)
    part = inner[2] or "hook"
    return SiteFacts("block" if part.startswith("hook") else part, int(inner[1]), port)


def _name_parts(selector: EdgeSelector, shape: ModelShape) -> list[Condition]:
    """Conditions on who sends and who receives."""
    parts: list[Condition] = []
    if selector.names is not None:
        parts.append(Any(tuple(_pattern(p, shape) for p in selector.names)))
    for end, given in (
        ("sender", selector.of_sender),
        ("receiver", selector.of_receiver),
    ):
        if given != (None, None, None):
            test = component_test(*given, shape)
            parts.append(Within(end, _names(end, test, shape)))
    return parts + _set_part("port", selector.ports)


def _names(
    end: str, test: Callable[[Component], bool], shape: ModelShape
) -> tuple[str, ...]:
    every = (
        shape.senders
        if end == "sender"
        else dict.fromkeys(receiver.component for receiver in shape.receivers)
    )
    return tuple(component.name for component in every if test(component))


def _pattern(pattern: EdgePattern, shape: ModelShape) -> Condition:
    if pattern.explicit:
        shape.mask_of([pattern.name])
        return Within("edge", (pattern.name,))
    parts: list[Condition] = []
    for end, given in (("sender", pattern.sender), ("receiver", pattern.receiver)):
        if given.form != "*":
            parts.append(Within(end, _names(end, given.matches(shape), shape)))
    return All((*parts, *_set_part("port", pattern.receiver.ports)))


def _pattern_sets(pattern: EdgePattern, shape: ModelShape) -> tuple[set[str], set[str]]:
    """Names of the senders and receivers that a pattern's ends match on their own."""
    if pattern.explicit:
        shape.mask_of([pattern.name])
    sends, reads = pattern.sender.matches(shape), pattern.receiver.matches(shape)
    ports = pattern.receiver.ports
    return (
        {sender.name for sender in shape.senders if sends(sender)},
        {
            receiver.name
            for receiver in shape.receivers
            if reads(receiver.component) and (ports is None or receiver.port in ports)
        },
    )


def _field_sets(
    selector: EdgeSelector, shape: ModelShape
) -> tuple[list[bool], list[bool]]:
    sends = component_test(*selector.of_sender, shape)
    reads = component_test(*selector.of_receiver, shape)

    def receives(receiver: Receiver) -> bool:
        in_ports = selector.ports is None or receiver.port in selector.ports
        return in_ports and reads(receiver.component)

    return [sends(s) for s in shape.senders], [receives(r) for r in shape.receivers]


def _row_parts(
    selector: EdgeSelector | SiteSelector,
    higher_is_better: bool,
    n_positions: int | None,
) -> list[Condition]:
    """Conditions on a row's position, status and numbers."""
    parts = _set_part("status", selector.statuses)
    if selector.positions is not None:
        parts.append(_positions(selector.positions, n_positions))
    if selector.sign is not None:
        op = ">" if selector.sign == "positive" else "<"
        parts.append(Compare("score", op, 0.0))
    return parts + [bound.condition(higher_is_better) for bound in selector.bounds]


def _positions(items: Numbers, count: int | None) -> Condition:
    if count is not None:
        return Within("position", tuple(sorted(numbers_of(items, count, "position"))))
    parts: list[Condition] = []
    for item in items:
        span = item if isinstance(item, Span) else Span(item, item + 1)
        ends = (span.start or 0, span.stop or 0, span.step or 1)
        if min(ends) < 0:
            raise ArgumentError(
                "positions_unresolved",
                f"position {item} counts from the end; pass n_positions=",
                value=str(item),
            )
        parts.append(Stride("position", span.start or 0, span.stop, span.step or 1))
    return Any(tuple(parts))


def _set_part(column: str, values: frozenset[str] | None) -> list[Condition]:
    return [] if values is None else [Within(column, tuple(sorted(values)))]


def _number_part(column: str, items: Numbers | None, count: int) -> list[Condition]:
    if items is None:
        return []
    return [Within(column, tuple(sorted(numbers_of(items, count, column))))]


def _columns(rows: pa.Table) -> Mapping[str, pa.ChunkedArray]:
    return _Columns({name: rows[name] for name in rows.column_names})


class _Columns(dict):
    def __missing__(self, name: str):
        raise ArgumentError(
            "selector_column_missing",
            f"the selector looks at {name}, which these rows do not have",
            value=name,
            expected=sorted(self),
        )


def _all_bounds(selector: EdgeSelector) -> list[Bound]:
    inner = [bound for other in selector.exclude for bound in _all_bounds(other)]
    return [*selector.bounds, *inner]


def _common(selector: EdgeSelector | SiteSelector) -> None:
    """Bring the fields that both selectors have into one form."""
    set_field(selector, "statuses", as_words(selector.statuses, STATUSES, "status"))
    if selector.sign not in (None, "positive", "negative"):
        refuse("sign is positive or negative", selector.sign)
    set_field(selector, "bounds", tuple(dict.fromkeys(selector.bounds)))
    set_field(selector, "exclude", tuple(selector.exclude))


def parse_edge_selector(text: str) -> EdgeSelector:
    """Read a selector's text, `a5-9.*<q> & |score|>0.01`.

    Raises ArgumentError `selector_syntax` with the position marked.
    """
    from circuitlab.selector_text import read_edge_selector

    return read_edge_selector(text)


def parse_site_selector(text: str) -> SiteSelector:
    """Read a site selector's text, `blocks.*.attn.hook_z & layer=3-5`.

    Raises ArgumentError `selector_syntax` with the position marked.
    """
    from circuitlab.selector_text import read_site_selector

    return read_site_selector(text)
