"""Plans: payloads resolved against a model's sites, the one form that is run.

How several payloads go to several sites is said by a wrapper and never guessed from the
length of a list. Every setting is recorded with where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from circuitlab.backends import as_backend
from circuitlab.edits import Edit
from circuitlab.errors import ArgumentError
from circuitlab.inventory import inventory
from circuitlab.payloads import (
    DEFAULTS,
    SETTINGS,
    BySite,
    ForAll,
    InOrder,
    OneEach,
    Payload,
    Settled,
    as_payload,
    unknown_key,
)
from circuitlab.selections import compose
from circuitlab.site_info import SiteInfo
from circuitlab.tables import digest
from circuitlab.verb import Verb, plain


@dataclass(frozen=True, eq=False)
class Plan:
    """What is done at which site, in order of depth: `entries` of a canonical site name
    and its settled payloads, applied one after the other.

    Plans are equal, and hash alike, if they would do the same.
    """

    entries: tuple[tuple[str, tuple[Settled, ...]], ...]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(
            Edit(site, found[0].verb if len(found) == 1 else compose(*_verbs(found)))
            for site, found in self.entries
        )

    @cached_property
    def digest(self) -> str:
        return digest([[s, [f.describe() for f in found]] for s, found in self.entries])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return len(self.entries)

    def preview(self) -> list[dict[str, Any]]:
        """One plain row for each edit, in the order they act, with origins."""
        return [
            {
                "site": site,
                "order": i,
                **found.describe(),
                "origins": dict(found.origins),
            }
            for site, payloads in self.entries
            for i, found in enumerate(payloads)
        ]


def _verbs(found: Sequence[Settled]) -> list[Verb]:
    return [settled.verb for settled in found]


def plan(
    model: Any,
    payloads: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Plan:
    """Resolve payloads against a model's sites.

    `payloads` maps names or globs to a payload (a `Payload`, a tensor, or a mapping of
    its fields) or to a wrapper of them. A setting that a payload leaves open comes from
    `arguments` (`mode=`, `scale_factor=`, `positions=`, `heads=`, `project=`, `over=`),
    else from `config`, else from the default. Raises ArgumentError `payloads_empty`,
    `payload_list_ambiguous`, `payload_unknown_key`, `payload_count_mismatch`,
    `payload_site_missing`, `payload_conflict`, `edit_duplicate_site`, and the codes of
    sites and modes.
    """
    if not isinstance(payloads, Mapping):
        raise ArgumentError(
            "payloads_invalid",
            f"payloads map names of sites to payloads, not {type(payloads).__name__}",
            value=type(payloads).__name__,
        )
    if not payloads:
        raise ArgumentError("payloads_empty", "there is nothing to edit")
    sites = inventory(as_backend(model))
    settle = _Settler(_settings(arguments, "argument"), _settings(config, "config"))
    found: dict[str, tuple[str, tuple[Settled, ...]]] = {}
    for pattern, value in payloads.items():
        matches = sites.match(pattern)
        for site, given in _spread(pattern, value, matches):
            if site.name in found:
                raise ArgumentError(
                    "edit_duplicate_site",
                    f"{pattern!r} and {found[site.name][0]!r} both edit {site.name}; for "
                    "one after the other use InOrder",
                    site=site.name,
                    value=[found[site.name][0], pattern],
                )
            found[site.name] = (pattern, tuple(settle(item) for item in given))
    for _, settled in found.values():
        for item in settled:
            _ = item.verb
    order = sorted(found, key=sites.rank.__getitem__)
    return Plan(tuple((name, found[name][1]) for name in order))


def _settings(given: Mapping[str, Any] | None, origin: str) -> dict[str, Any]:
    found = {k: v for k, v in (given or {}).items() if v is not None}
    unknown = [name for name in found if name not in SETTINGS]
    if unknown:
        raise unknown_key(unknown, SETTINGS, f"the {origin}s")
    checked = Payload(**found)
    return {name: getattr(checked, name) for name in found}


@dataclass(frozen=True)
class _Settler:
    """Decides the settings that a payload leaves open."""

    arguments: Mapping[str, Any]
    config: Mapping[str, Any]

    def __call__(self, payload: Payload) -> Settled:
        values, origins = {}, {}
        for name in SETTINGS:
            own = getattr(payload, name)
            if own is not None and name in self.arguments:
                _require_equal(name, own, self.arguments[name])
            choices = (
                ("payload", own),
                ("argument", self.arguments.get(name)),
                ("config", self.config.get(name)),
            )
            chosen = next(((o, v) for o, v in choices if v is not None), None)
            origins[name], values[name] = chosen or ("default", DEFAULTS[name])
        return Settled(replace(payload, **values), origins)


def _require_equal(name: str, own: Any, argument: Any) -> None:
    if plain(own) == plain(argument):
        return
    raise ArgumentError(
        "payload_conflict",
        f"{name} is {own!r} in the payload and {argument!r} in the call; say it once",
        setting=name,
        value=str(own),
        argument=str(argument),
    )


def _spread(
    pattern: str, value: Any, matches: tuple[SiteInfo, ...]
) -> list[tuple[SiteInfo, tuple[Payload, ...]]]:
    """Which payloads go to which of the matched sites."""
    match value:
        case OneEach(payloads):
            if len(payloads) != len(matches):
                raise ArgumentError(
                    "payload_count_mismatch",
                    f"{pattern!r} matches {len(matches)} sites and OneEach has "
                    f"{len(payloads)} payloads",
                    value=len(payloads),
                    expected=len(matches),
                    sites=[site.name for site in matches],
                )
            given = zip(matches, payloads, strict=True)
            return [(site, _in_order(item)) for site, item in given]
        case BySite(payloads):
            return _by_site(pattern, payloads, matches)
        case ForAll(payload):
            return [(site, _in_order(payload)) for site in matches]
        case _:
            return [(site, _in_order(value)) for site in matches]


def _by_site(
    pattern: str, payloads: Mapping[str, Any], matches: tuple[SiteInfo, ...]
) -> list[tuple[SiteInfo, tuple[Payload, ...]]]:
    found = []
    left = dict(payloads)
    for site in matches:
        named = [name for name in site.spellings if name in left]
        if len(named) != 1:
            raise ArgumentError(
                "payload_site_missing",
                f"BySite has {len(named)} payloads for {site.name}, which {pattern!r} "
                "matches; give it one",
                site=site.name,
                value=named,
            )
        found.append((site, _in_order(left.pop(named[0]))))
    if left:
        raise ArgumentError(
            "payload_site_missing",
            f"BySite names {', '.join(left)}, which {pattern!r} doesn't match",
            value=list(left),
        )
    return found


def _in_order(value: Any) -> tuple[Payload, ...]:
    if isinstance(value, InOrder):
        if not value.payloads:
            raise ArgumentError("payloads_empty", "InOrder has no payloads")
        return tuple(as_payload(item) for item in value.payloads)
    return (as_payload(value),)
