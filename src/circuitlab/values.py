"""Find the values that sourced verbs write: run their sources once, at all their sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from circuitlab.ablations import token_batch
from circuitlab.backends import Backend, Tap, TokenBatch
from circuitlab.donors import POSITIONAL, Labelled, Population, by_labels
from circuitlab.errors import ArgumentError
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.site_info import SiteInfo
from circuitlab.verb import Verb

CHUNK = 32


def site_values(
    model: Backend, batch: TokenBatch, sites: Sequence[SiteInfo]
) -> dict[str, Tensor]:
    """The labelled view of each site on one pass, detached and copied, by name."""
    found: dict[str, Tensor] = {}

    def keep(site: SiteInfo):
        def fn(raw: Tensor) -> None:
            found[site.name] = site.view(raw).detach().clone()

        return fn

    # Where nobody looks at the unembedding, one position of it is enough.
    whole = any(site.name.startswith("unembed") for site in sites)
    taps = [Tap(site.site, keep(site)) for site in sites]
    model.run(batch, taps, positions=None if whole else batch.last)
    return found


class Finder:
    """The values of every source of some edits: one pass a chunk for all of its sites."""

    def __init__(
        self,
        model: Backend,
        pairs: Sequence[tuple[SiteInfo, Verb]],
        prompts: Prompts | None,
        metric: Metric | None,
    ):
        self.model = model
        self.prompts = prompts
        self.metric = metric
        self._found: dict[tuple[object, str], Population] = {}
        wanted: dict[object, tuple[Any, dict[str, SiteInfo]]] = {}
        for site, verb in pairs:
            for part in verb.walk():
                for name in part.sources:
                    source = part.params[name]
                    if isinstance(source, str | Prompts | TokenBatch):
                        entry = wanted.setdefault(_key(source), (source, {}))
                        entry[1][site.name] = site
        for key, (source, sites) in wanted.items():
            for name, population in self._run(source, list(sites.values())).items():
                self._found[key, name] = population

    def find(self, source: Any, site: SiteInfo) -> Population:
        """The values of a source at a site."""
        if isinstance(source, Population):
            return source
        if isinstance(source, str | Prompts | TokenBatch):
            return self._found[_key(source), site.name]
        if isinstance(source, Mapping):
            source = _named(source, site)
        if isinstance(source, Labelled):
            return Population(by_labels(source, site))
        full = 3 if site.layout == "merged_heads" else None
        return Population(site.view(source) if source.ndim == full else source)

    def _run(self, source: Any, sites: list[SiteInfo]) -> dict[str, Population]:
        if isinstance(source, TokenBatch):
            values = site_values(self.model, source, sites)
            return {
                name: Population(value, source.mask) for name, value in values.items()
            }
        batches = self._batches(source)
        parts = [
            (site_values(self.model, batch, sites), batch.mask) for batch in batches
        ]
        masks = _padded([mask for _, mask in parts], (1,))
        found = {}
        for site in sites:
            places = [i for i, axis in enumerate(site.axes) if axis in POSITIONAL]
            values = _padded([part[site.name] for part, _ in parts], tuple(places))
            found[site.name] = Population(values, masks)
        return found

    def _batches(self, source: Any) -> list[TokenBatch]:
        if isinstance(source, Prompts):
            rows = [list(row) for row in source.clean]
            cuts = range(0, len(rows), CHUNK)
            return [self.model.batch(rows[start : start + CHUNK]) for start in cuts]
        if self.prompts is None:
            raise ArgumentError(
                "source_needs_prompts",
                f"the source {source!r} means the prompts being edited; run over Prompts, "
                "or name the source itself (Prompts, a TokenBatch, tensors)",
                value=source,
            )
        corrupted = source == "corrupted"
        if self.metric is not None:
            return [token_batch(self.model, self.prompts, self.metric, corrupted)]
        side = self.prompts.corrupted if corrupted else self.prompts.clean
        return [self.model.batch([list(row) for row in side])]


def _key(source: Any) -> object:
    return source if isinstance(source, str) else id(source)


def _named(source: Mapping[str, Any], site: SiteInfo) -> Any:
    for name in (site.name, *site.spellings):
        if name in source:
            return source[name]
    raise ArgumentError(
        "source_site_missing",
        f"the source has no value for {site.name}; it has {', '.join(list(source)[:5])}",
        site=site.name,
        value=list(source)[:20],
    )


def _padded(parts: list[Tensor], axes: tuple[int, ...]) -> Tensor:
    """Chunks of rows as one tensor, padded at the end of the given axes."""
    sizes = [max(part.shape[axis] for part in parts) for axis in axes]
    grown = []
    for part in parts:
        for axis, size in zip(axes, sizes, strict=True):
            shape = list(part.shape)
            shape[axis] = size - part.shape[axis]
            if shape[axis]:
                part = torch.cat([part, part.new_zeros(shape)], axis)
        grown.append(part)
    return torch.cat(grown)
