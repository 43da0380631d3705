"""What is known of each site of a model, and how names find it.

A site's facts come from the model's own objects and one probe pass (`inventory`); here
they are only held and looked up.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from circuitlab.backends import Site
from circuitlab.errors import ArgumentError
from circuitlab.sites import site_glob, site_key

Layout = Literal["plain", "merged_heads", "heads_first"]


@dataclass(frozen=True)
class SiteInfo:
    """One site of one model.

    `name` is canonical and is the path of the module whose output the site is; `axes`
    and `sizes` describe the labelled view (None: it varies by batch). `passes` counts
    how often it fired in one forward; `gate` is the call that would make it fire.
    `writable`: a value written here reaches the logits. `through` names the site where
    this one is really written and differentiated (`hook_resid_mid` only): the stream is
    the block's input plus `rate` times the value there.
    """

    name: str
    spellings: tuple[str, ...]
    layer: int | None = None
    axes: tuple[str, ...] = ()
    sizes: tuple[int | None, ...] = ()
    layout: Layout = "plain"
    floating: bool = True
    passes: int = 0
    gate: str | None = None
    writable: bool = False
    through: str | None = None
    rate: float = 1.0
    point: str | None = None
    reason: str | None = None

    @property
    def fired(self) -> bool:
        return self.passes > 0

    @property
    def site(self) -> Site:
        """Where a tap sees the value; for writing see `through`."""
        return Site(self.point or self.name)

    @property
    def status(self) -> str:
        """`ok`, `observe_only`, `gated` or `never_fires`."""
        if not self.fired:
            return "gated" if self.gate else "never_fires"
        return "ok" if self.writable else "observe_only"

    def key(self, pass_index: int = 1) -> str:
        """The structural key: `s1|blocks/3/attn/q|out|1`, equal for all spellings."""
        parent, _, last = self.name.rpartition(".")
        if last in ("hook_in", "hook_out") and self.through is None:
            return site_key(parent, last.removeprefix("hook_"), pass_index)
        return site_key(self.name, "out", pass_index)

    def axis(self, label: str) -> int | None:
        """The place of a labelled axis in the view, or None."""
        return self.axes.index(label) if label in self.axes else None

    @property
    def n_heads(self) -> int | None:
        """How many heads the site has (key-value heads at k and v), or None."""
        axis = self.axis("head")
        return None if axis is None else self.sizes[axis]

    def view(self, value: Tensor) -> Tensor:
        """A raw value of the site with its labelled axes; shares the graph."""
        if self.layout == "merged_heads":
            return value.unflatten(-1, (self.n_heads or 1, -1))
        return value.transpose(1, 2) if self.layout == "heads_first" else value

    def raw(self, value: Tensor) -> Tensor:
        """The reverse of `view`."""
        if self.layout == "merged_heads":
            return value.flatten(-2)
        return value.transpose(1, 2) if self.layout == "heads_first" else value


@dataclass(frozen=True)
class Inventory:
    """Every site of a model in order of depth, under every name it is known by."""

    sites: tuple[SiteInfo, ...]

    def __iter__(self) -> Iterator[SiteInfo]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, name: str) -> SiteInfo:
        """As `find`."""
        return self.find(name)

    @cached_property
    def names(self) -> dict[str, SiteInfo]:
        """Every spelling, and the site it names."""
        return {name: site for site in self.sites for name in site.spellings}

    @cached_property
    def rank(self) -> dict[str, int]:
        """The place of each canonical name in the order of depth."""
        return {site.name: i for i, site in enumerate(self.sites)}

    def find(self, name: str) -> SiteInfo:
        """The site that a name (any spelling) names, whether or not it fires.

        Raises ArgumentError `site_unknown` with up to five nearest names.
        """
        if name in self.names:
            return self.names[name]
        nearest = self.nearest(name)
        absent = ""
        if name.endswith("hook_resid_mid"):
            absent = (
                ": its blocks are parallel or it has no such stream, so no resid_mid"
            )
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        raise ArgumentError(
            "site_unknown",
            f"this model has no site {name!r}{absent}{hint}",
            value=name,
            nearest=nearest,
            reason="no_resid_mid" if absent else "no_such_name",
        )

    def match(self, pattern: str) -> tuple[SiteInfo, ...]:
        """The sites that a name or glob matches, each once, in order of depth.

        `*` stays within one dotted segment, `**` crosses; a glob is held against every
        spelling, as a name is. Sites that don't fire are left out of a glob; naming one
        exactly, or a glob that matches nothing but such sites, is refused.
        Raises ArgumentError `site_unknown`, `site_gated`, `site_never_fires`.
        """
        if "*" not in pattern:
            return (self.live(pattern),)
        test = site_glob(pattern)
        found = [s for s in self.sites if any(test.fullmatch(n) for n in s.spellings)]
        if not found:
            nearest = self.nearest(pattern)
            raise ArgumentError(
                "site_unknown",
                f"no site matches {pattern!r} (`*` stays within one dotted segment, "
                f"`**` crosses); nearest: {', '.join(nearest)}",
                value=pattern,
                nearest=nearest,
                reason="no_match",
            )
        fired = tuple(site for site in found if site.fired)
        if not fired:
            raise _not_fired(found[0], pattern)
        return fired

    def live(self, name: str) -> SiteInfo:
        """As `find`, refusing a site that doesn't fire: `site_gated` names the flag."""
        site = self.find(name)
        if not site.fired:
            raise _not_fired(site, name)
        return site

    def nearest(self, name: str, n: int = 5) -> list[str]:
        """The known names most like `name`, best first: by the last part and the whole."""
        last = name.rpartition(".")[2]

        def likeness(known: str) -> float:
            whole = difflib.SequenceMatcher(None, name, known).ratio()
            end = difflib.SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()
            return whole + end

        return heapq.nlargest(n, self.names, key=likeness)

    def preview(self, pattern: str) -> list[dict[str, Any]]:
        """What a pattern expands to, as plain rows, also for sites that don't fire."""
        test = site_glob(pattern)
        found = [s for s in self.sites if any(test.fullmatch(n) for n in s.spellings)]
        return [
            {
                "site": site.name,
                "spellings": list(site.spellings[1:]),
                "axes": list(site.axes),
                "sizes": list(site.sizes),
                "layer": site.layer,
                "status": site.status,
                "gate": site.gate,
                "passes": site.passes,
                "key": site.key(),
                "written_through": site.through,
            }
            for site in (found or [self.find(pattern)])
        ]


def _not_fired(site: SiteInfo, asked: str) -> ArgumentError:
    if site.gate:
        return ArgumentError(
            "site_gated",
            f"{asked} exists but is switched off; call model.bridge.{site.gate} first",
            value=asked,
            site=site.name,
            gate=site.gate,
        )
    return ArgumentError(
        "site_never_fires",
        f"{asked} exists but never fires in a forward pass of this model"
        + (f": {site.reason}" if site.reason else ""),
        value=asked,
        site=site.name,
        reason=site.reason,
    )
