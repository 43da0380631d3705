"""Take the inventory of a loaded model: what its sites are, seen by running it.

A site is a fact about an object: names are grouped by the identity of what they name,
and one probe pass finds which sites fire, how often, in which order, with which axes,
and whether a value written there reaches the logits. Nothing is taken from a table of
synonyms. Running edits and reading gradients happen elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from circuitlab.backends import Backend, Point, Site, Tap
from circuitlab.site_info import Inventory, Layout, SiteInfo

PATTERN_AXES = ("batch", "head", "query", "key")
_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def inventory(model: Backend) -> Inventory:
    """The sites of a model, found by one small forward and backward.

    Found once per model and state of its flags: asking again costs nothing.
    """
    return model.remembered("inventory", lambda: _take(model))


# --- the probe ---


@dataclass
class _Seen:
    """What the probe saw at one site."""

    passes: int = 0
    value: Tensor | None = None
    leaf: Tensor | None = None


def _take(model: Backend) -> Inventory:
    points = [_without_resid_mid(point) for point in model.points()]
    rows, length = _probe_size(model)
    seen, order = _watch(model, points, rows, length)
    sites = [
        _describe(model, point, seen[point.name], rows, length) for point in points
    ]
    ranked = _by_depth(sites, order)
    return Inventory(tuple(_with_resid_mid(model, ranked, seen)))


def _without_resid_mid(point: Point) -> Point:
    kept = [name for name in point.spellings if not name.endswith("hook_resid_mid")]
    return replace(point, spellings=tuple(kept))


def _probe_size(model: Backend) -> tuple[int, int]:
    """Rows and positions that no axis of heads or features is mistaken for."""
    shape = model.shape
    taken = {shape.n_heads, shape.n_kv_heads, shape.d_head, shape.d_model, 1}
    free = [n for n in range(2, 16) if n not in taken]
    return free[0], next(n for n in free[1:] if n * free[0] not in taken and n > 3)


def _watch(
    model: Backend, points: list[Point], rows: int, length: int
) -> tuple[dict[str, _Seen], list[str]]:
    """Run once with a zero added at every site, and see which zeros matter."""
    seen = {point.name: _Seen() for point in points}
    order: list[str] = []
    readonly = {point.name for point in points if point.readonly}

    def look(name: str):
        def fn(value: Tensor) -> Tensor | None:
            found = seen[name]
            found.passes += 1
            if found.value is not None:
                return None
            order.append(name)
            found.value = value.detach()
            if name in readonly or not value.is_floating_point():
                return None
            found.leaf = torch.zeros_like(value, requires_grad=True)
            return value + found.leaf

        return fn

    taps = [Tap(Site(point.name), look(point.name)) for point in points]
    batch = _probe_batch(model, rows, length)
    with torch.inference_mode(False), model.frozen():
        logits = model.run(batch, taps, grad=True)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(logits.shape, generator=generator).to(logits)
        leaves = {name: s.leaf for name, s in seen.items() if s.leaf is not None}
        total = (logits * weights).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            seen[name].leaf = None
    return seen, order


def _probe_batch(model: Backend, rows: int, length: int):
    generator = torch.Generator().manual_seed(0)
    high = min(model.shape.d_vocab, 1000)
    tokens = torch.randint(1, high, (rows, length), generator=generator)
    return model.batch(tokens.tolist())


def _describe(
    model: Backend, point: Point, seen: _Seen, rows: int, length: int
) -> SiteInfo:
    found = _LAYER.search(point.name)
    site = SiteInfo(
        point.name,
        point.spellings,
        layer=int(found[1]) if found else None,
        passes=seen.passes,
        gate=point.gate if seen.passes == 0 else None,
    )
    if seen.value is None:
        return site
    layout = _layout(model, point, tuple(seen.value.shape), length)
    shape = _viewed(model, point, tuple(seen.value.shape), layout)
    axes = _axes(shape, rows, length)
    free = ("batch", "pos", "query", "key")
    sizes = tuple(
        None if axis in free else size for axis, size in zip(axes, shape, strict=True)
    )
    return replace(
        site,
        layout=layout,
        axes=axes,
        sizes=sizes,
        floating=seen.value.is_floating_point(),
        writable=seen.leaf is not None,
    )


def _heads_at(model: Backend, point: Point) -> int | None:
    """How many heads are merged into the last axis here; None where none are."""
    parent = point.name.rpartition(".")[0]
    for layer in model.layers:
        if point.name.endswith("hook_out") and parent == layer.q.path:
            return model.shape.n_heads
        if point.name.endswith("hook_out") and parent in (layer.k.path, layer.v.path):
            return model.shape.n_kv_heads
        if point.name.endswith("hook_in") and parent == layer.z.path:
            return model.shape.n_heads
    return None


def _layout(
    model: Backend, point: Point, shape: tuple[int, ...], length: int
) -> Layout:
    heads = (model.shape.n_heads, model.shape.n_kv_heads)
    if len(shape) == 3 and _heads_at(model, point) is not None:
        return "merged_heads"
    if len(shape) == 4 and shape[1] in heads and shape[2] == length != shape[3]:
        return "heads_first"
    return "plain"


def _viewed(
    model: Backend, point: Point, shape: tuple[int, ...], layout: Layout
) -> tuple[int, ...]:
    if layout == "merged_heads":
        heads = _heads_at(model, point)
        assert heads is not None
        return (*shape[:-1], heads, shape[-1] // heads)
    if layout == "heads_first":
        rows, heads, length, *rest = shape
        return (rows, length, heads, *rest)
    return shape


def _axes(shape: tuple[int, ...], rows: int, length: int) -> tuple[str, ...]:
    """Label a view's axes by the sizes that the probe chose."""
    if len(shape) == 4 and shape[2:] == (length, length):
        return PATTERN_AXES
    first = {rows: "batch", 1: "shared"}.get(shape[0], "rows") if shape else "scalar"
    if len(shape) < 2 or shape[1] != length:
        return (first, *_others(len(shape) - 1))[: len(shape)]
    rest = {0: (), 1: ("feature",), 2: ("head", "feature")}
    others = rest.get(len(shape) - 2) or _others(len(shape) - 2)
    return (first, "pos", *others)


def _others(count: int) -> tuple[str, ...]:
    return (*(f"axis{i}" for i in range(1, count)), "feature") if count > 0 else ()


def _by_depth(sites: list[SiteInfo], order: list[str]) -> list[SiteInfo]:
    """Sort by first firing; what doesn't fire stands after its neighbour that does."""
    rank = {name: i for i, name in enumerate(order)}
    by_layer: dict[int | None, int] = {}
    for site in sites:
        if site.name in rank:
            by_layer[site.layer] = max(by_layer.get(site.layer, -1), rank[site.name])

    def place(index: int) -> tuple[int, int, int]:
        site = sites[index]
        if site.name in rank:
            return (rank[site.name], 0, 0)
        return (by_layer.get(site.layer, len(rank)), 1, index)

    return [sites[i] for i in sorted(range(len(sites)), key=place)]


# --- the stream between attention and MLP ---


def _with_resid_mid(
    model: Backend, sites: list[SiteInfo], seen: dict[str, _Seen]
) -> list[SiteInfo]:
    """Put each block's `hook_resid_mid` in as a site of its own.

    The bridge gives that name to the MLP norm's input, so a write there changes one of
    the stream's two branches. The stream itself is written through the attention's
    contribution; that it is the sum is checked here on the probe's values.
    """
    at = {name: point.name for point in model.points() for name in point.spellings}
    by_name = {name: site for site in sites for name in site.spellings}
    found = list(sites)
    for layer in range(model.shape.n_layers):
        name = f"blocks.{layer}.hook_resid_mid"
        if name not in at:
            continue
        site = _resid_mid(model, layer, name, by_name, seen, by_name[at[name]])
        written = site.through or f"blocks.{layer}.hook_in"
        found.insert(found.index(by_name[written]) + 1, site)
    return found


def _resid_mid(
    model: Backend,
    layer: int,
    name: str,
    by_name: dict[str, SiteInfo],
    seen: dict[str, _Seen],
    after: SiteInfo,
) -> SiteInfo:
    before = by_name[f"blocks.{layer}.hook_in"]
    added = by_name.get(f"blocks.{layer}.hook_attn_out")
    site = SiteInfo(
        name,
        (name,),
        layer=layer,
        axes=before.axes,
        sizes=before.sizes,
        point=after.name,
    )
    if added is None or not (before.fired and after.fired and added.fired):
        return replace(site, reason="the attention's contribution has no site here")
    start, end = seen[before.name].value, seen[after.name].value
    step = seen[added.name].value
    assert start is not None
    assert end is not None
    assert step is not None
    scale = model.mlp_scale(layer)
    off, rate = min(
        (float((start + r * step - end.reshape(start.shape)).abs().max()), r)
        for r in (1.0, scale)
    )
    if off > _TOLERANCE.get(model.dtype, 0.1) * float(end.abs().max()):
        text = f"it is not the block's input plus {added.name} (off by {off:.2g})"
        return replace(site, reason=text)
    written = replace(site, through=added.name, rate=rate)
    return replace(written, passes=1, writable=added.writable)
