"""The kernel: edits resolved against a model become taps.

A tap sees a site's raw value; the kernel gives the verb its labelled view, checks what
comes back, and lays it out as the model had it. Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.errors import ArgumentError
from circuitlab.inventory import inventory
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.selections import Door
from circuitlab.site_info import SiteInfo
from circuitlab.values import Finder
from circuitlab.verb import Firing, Verb, as_verb


@dataclass(frozen=True)
class Edit:
    """One verb at the sites that a name or glob names.

    `site` may be a door, `subspace(site, basis)` or `units(mask, site=…)`. `expect` is
    how many sites the name must match; `edit_count_unexpected` otherwise.
    """

    site: str
    verb: Verb
    expect: int | None = None

    def __init__(self, site: str | Door, verb: Any, *, expect: int | None = None):
        name = site.site if isinstance(site, Door) else site
        if not isinstance(name, str):
            raise ArgumentError(
                "edit_site_missing",
                f"an edit needs the name of a site, not {name!r}",
                value=str(name),
            )
        object.__setattr__(self, "site", name)
        object.__setattr__(self, "expect", expect)
        found = site(verb) if isinstance(site, Door) else as_verb(verb)
        object.__setattr__(self, "verb", found)


Edits = Edit | Sequence[Edit] | Mapping[Any, Any]
"""Edits to apply: `Edit`s, or a mapping from site names to verbs."""


def as_edits(edits: Edits) -> tuple[Edit, ...]:
    """The edits in the order they were written. Raises `edits_empty`, `edit_not_a_verb`."""
    if isinstance(edits, Edit):
        return (edits,)
    if isinstance(edits, Mapping):
        found = tuple(Edit(site, verb) for site, verb in edits.items())
    else:
        found = tuple(edits)
    if not found:
        raise ArgumentError(
            "edits_empty",
            "there is nothing to edit; for the model as it is, see baseline",
        )
    for edit in found:
        if not isinstance(edit, Edit):
            raise ArgumentError(
                "edit_not_a_verb",
                f"{edit!r} is no edit; write Edit(site, verb) or a mapping",
                value=type(edit).__name__,
            )
    return found


# --- from edits to taps ---


@dataclass(eq=False)
class _Pass:
    """What the taps of one forward share."""

    batch: TokenBatch
    offset: int = 0
    frontier: bool = False
    fired: dict[str, int] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Resolved:
    """Edits resolved against a model: `taps` to run with, in this order.

    Call `begin` before a pass and `check` after it; `record` is what was done, as
    JSON-able values.
    """

    sites: tuple[SiteInfo, ...]
    verbs: tuple[Verb, ...]
    taps: tuple[Tap, ...] = ()
    notes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    current: _Pass | None = None

    def begin(
        self, batch: TokenBatch, *, offset: int = 0, frontier: bool = False
    ) -> None:
        """A new pass over `batch`, whose first row is number `offset` of its set."""
        self.current = _Pass(batch, offset, frontier)

    def check(self) -> None:
        """Refuse with `edit_never_fired` a pass that left an edit out."""
        fired = self.current.fired if self.current else {}
        for site in self.sites:
            if not fired.get(site.name):
                raise ArgumentError(
                    "edit_never_fired",
                    f"the edit at {site.name} fired zero times, so the result would be "
                    "that of the unedited model",
                    site=site.name,
                )

    @property
    def record(self) -> list[dict[str, Any]]:
        """One entry a site: its name and key, the verb, and what was drawn or resolved."""
        return [
            {
                "site": site.name,
                "key": site.key(),
                **verb.describe(),
                "notes": self.notes.get(site.name, []),
            }
            for site, verb in zip(self.sites, self.verbs, strict=True)
        ]


def resolve_edits(
    model: Backend,
    edits: Edits,
    batch: TokenBatch | None = None,
    *,
    prompts: Prompts | None = None,
    metric: Metric | None = None,
) -> Resolved:
    """Resolve edits to taps on a model, for one or more passes.

    Sources of donors are run here, once. `batch` begins the first pass; `prompts` are
    what `"corrupted"` and `"clean"` stand for. Raises ArgumentError `site_unknown`,
    `site_gated`, `site_never_fires`, `site_observe_only`, `site_not_floating`,
    `edit_duplicate_site`, `edit_count_unexpected`, `source_needs_prompts`.
    """
    pairs = _matched(model, as_edits(edits))
    finder = Finder(model, pairs, prompts, metric)
    verbs = tuple(
        verb.found(lambda source, site=site: finder.find(source, site))
        for site, verb in pairs
    )
    found = Resolved(tuple(site for site, _ in pairs), tuple(verb for _, verb in pairs))
    found.taps = tuple(_taps(model, found, verbs))
    if batch is not None:
        found.begin(batch)
    return found


def _matched(model: Backend, edits: tuple[Edit, ...]) -> list[tuple[SiteInfo, Verb]]:
    """Each site once, with its verb, in order of depth."""
    sites = inventory(model)
    found: dict[str, tuple[SiteInfo, Verb, str]] = {}
    for edit in edits:
        matches = sites.match(edit.site)
        if edit.expect is not None and len(matches) != edit.expect:
            raise ArgumentError(
                "edit_count_unexpected",
                f"{edit.site!r} matches {len(matches)} sites; {edit.expect} were expected",
                value=len(matches),
                expected=edit.expect,
                sites=[site.name for site in matches],
            )
        for site in matches:
            _require_editable(site, edit.site)
            if site.name in found:
                raise ArgumentError(
                    "edit_duplicate_site",
                    f"{edit.site!r} and {found[site.name][2]!r} both edit {site.name}; "
                    "for one edit after the other write compose(first, second)",
                    site=site.name,
                    value=[found[site.name][2], edit.site],
                )
            found[site.name] = (site, edit.verb, edit.site)
    order = sorted(found, key=sites.rank.__getitem__)
    return [found[name][:2] for name in order]


def _require_editable(site: SiteInfo, asked: str) -> None:
    if not site.floating:
        raise ArgumentError(
            "site_not_floating",
            f"{asked}: {site.name} holds integers, which can't be edited",
            site=site.name,
        )
    if not site.writable:
        raise ArgumentError(
            "site_observe_only",
            f"{asked}: this model discards what is written at {site.name}, so an edit "
            "there would change nothing",
            site=site.name,
        )


def _taps(model: Backend, found: Resolved, verbs: tuple[Verb, ...]) -> Iterator[Tap]:
    """The edits' taps, then those that keep values for later sites."""
    watched: dict[str, SiteInfo] = {}
    names = inventory(model)
    last: list[Tap] = []
    for site, verb in zip(found.sites, verbs, strict=True):
        notes = found.notes.setdefault(site.name, [])
        fire = _fire(found, site, verb, notes)
        if site.through is None:
            yield Tap(site.site, fire)
        else:
            last.append(_through(found, site, fire))
            watched[f"blocks.{site.layer}.hook_in"] = names[
                f"blocks.{site.layer}.hook_in"
            ]
        for part in verb.walk():
            if part.name == "swap_with":
                watched[part.params["site"]] = names.live(part.params["site"])
    for name, site in watched.items():
        yield Tap(site.site, _keeper(found, name, site))
    yield from last


def _keeper(found: Resolved, name: str, site: SiteInfo) -> Callable[[Tensor], None]:
    def keep(raw: Tensor) -> None:
        assert found.current is not None
        found.current.values[name] = site.view(raw)

    return keep


def _fire(
    found: Resolved, site: SiteInfo, verb: Verb, notes: list[dict[str, Any]]
) -> Callable[[Tensor], Tensor]:
    def fire(raw: Tensor) -> Tensor:
        now = found.current
        assert now is not None
        now.fired[site.name] = now.fired.get(site.name, 0) + 1
        value = site.view(raw)
        firing = Firing(
            site,
            now.batch,
            now.fired[site.name],
            now.offset,
            earlier=now.values,
            frontier=now.frontier,
            notes=notes,
        )
        new = verb(value, firing)
        _require_same(new, value, site, verb)
        # Model code takes views of what it gets, so it must be laid out as before.
        written = site.raw(new)
        return written.contiguous() if raw.is_contiguous() else written

    return fire


def _require_same(new: Any, value: Tensor, site: SiteInfo, verb: Verb) -> None:
    """A result has the shape, dtype and device of what it replaces."""
    if not isinstance(new, Tensor):
        found: Any = type(new).__name__
    else:
        found = (tuple(new.shape), str(new.dtype), str(new.device))
    expected = (tuple(value.shape), str(value.dtype), str(value.device))
    if found != expected:
        raise ArgumentError(
            "edit_result_invalid",
            f"{verb.name} at {site.name} gave {found}; {expected} was expected (return "
            "the new value, functionally)",
            site=site.name,
            value=found,
            expected=expected,
        )
    if bool(torch.isnan(new).any()) and not bool(torch.isnan(value).any()):
        raise ArgumentError(
            "edit_result_not_finite",
            f"{verb.name} at {site.name} gave NaN where the site has numbers; look for a "
            "division by zero or a product of 0 and infinity",
            site=site.name,
            verb=verb.name,
        )


def _through(found: Resolved, site: SiteInfo, fire: Callable[[Tensor], Tensor]) -> Tap:
    """Write the stream between attention and MLP: change what the attention adds.

    Both of the stream's branches, the MLP's and the skip, then see the new value.
    """
    assert site.through is not None
    start, rate = f"blocks.{site.layer}.hook_in", site.rate

    def write(added: Tensor) -> Tensor:
        assert found.current is not None
        before = found.current.values[start]
        new = fire(before + rate * added)
        return (new - before) / rate

    return Tap(Site(site.through), write)
