"""The frozen policy of a read: at which sites gradients are stopped, and who says so.

`DEFAULT` stops them at every MLP's output (the published direct-edge linearisation of
attribution graphs), `None` nowhere (the total derivative), and explicit sites or masks
replace the default. Where MLP outputs are is a fact of the loaded model's shape; no
name is searched for a substring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from circuitlab.backends import Site
from circuitlab.errors import ReadError
from circuitlab.gradients import Address, Freeze
from circuitlab.site_selection import SiteSelection
from circuitlab.tables import digest
from circuitlab.targets import tensor_digest
from circuitlab.trace import SiteRecord, Trace


@dataclass(frozen=True)
class Policy:
    """A registered frozen policy, by name. There is one: `mlp_out`."""

    name: str


DEFAULT: Final = Policy("mlp_out")
"""What `read` freezes when `frozen` is omitted."""

WARNING = (
    "read_frozen_default_linearization: this read stops gradients at every MLP's output "
    "(frozen=DEFAULT), so its numbers are direct effects and differ from Captum-like "
    "totals; pass frozen=None for the total derivative"
)


@dataclass(frozen=True, eq=False)
class Frozen:
    """A resolved policy. `requested` counts the sites that were named, `places` those
    that are frozen: an alias group is frozen as a whole."""

    name: str
    freezes: tuple[Freeze, ...] = ()
    requested: int = 0
    resolved: int = 0
    identity: tuple[tuple[str, int, str | None], ...] = ()
    groups: tuple[tuple[str, ...], ...] = field(default=())

    @property
    def digest(self) -> str:
        """Portable, and it sees masks: sorted (site key, pass, mask digest)."""
        return digest(self.description)

    @property
    def description(self) -> dict[str, Any]:
        return {"policy": self.name, "sites": [list(i) for i in self.identity]}

    def reached(self, keys: set[tuple[int, int]]) -> int:
        """How many of the requested sites a backward reached."""
        return sum(f.address.key in keys for f in self.freezes)


def resolve_frozen(trace: Trace, frozen: Any) -> Frozen:
    """Resolve `frozen=` against a trace.

    Raises ReadError `default_frozen_sites_underivable`,
    `read_frozen_selection_invalid`, `read_frozen_policy_invalid`; ArgumentError as
    `Trace.record`, or `by_score_invalid` for a selection of another model.
    """
    if frozen is None:
        return Frozen("none")
    if isinstance(frozen, Policy):
        if frozen != DEFAULT:
            raise ReadError(
                "read_frozen_policy_invalid",
                f"there is no policy {frozen.name!r}; the registered one is mlp_out",
                value=frozen.name,
                expected=["mlp_out"],
            )
        wanted = [(record, None) for record in mlp_outputs(trace)]
        return _frozen(trace, "mlp_out", wanted)
    return _frozen(trace, "explicit", named_sites(trace, frozen))


def mlp_outputs(trace: Trace) -> list[SiteRecord]:
    """The MLPs' outputs by the model's shape; empty where it has no MLPs.

    Raises ReadError `default_frozen_sites_underivable`.
    """
    model = trace.model
    if not model.shape.has_mlp:
        return []
    found: list[SiteRecord] = []
    missing: list[int] = []
    for layer, sites in enumerate(model.layers):
        passes = []
        if sites.mlp_out is not None:
            name = f"{sites.mlp_out.path}.hook_{sites.mlp_out.slot}"
            passes = [r for r in trace.population if r.site == _canonical(trace, name)]
        if not passes or any(r.address is None for r in passes):
            missing.append(layer)
        found += passes
    if missing:
        raise ReadError(
            "default_frozen_sites_underivable",
            f"the model has MLPs, but the outputs of those in layers {missing} were not "
            "found on the graph; pass frozen=None or explicit sites",
            layers=missing,
        )
    return found


def _canonical(trace: Trace, name: str) -> str:
    info = trace.inventory.names.get(name)
    return info.name if info else name


Masked = Sequence[tuple[SiteRecord, Tensor | None]]


def named_sites(trace: Trace, named: Any) -> Masked:
    """Sites, globs, a mapping from sites to bool masks, or a selection, as records.

    In firing order, each once. Masks have the recorded shape (or broadcast to it); True
    is what is meant.
    """
    if isinstance(named, SiteSelection):
        named = _of_selection(trace, named)
    if isinstance(named, str | Site):
        named = [named]
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(named, Mapping):
        pairs = named.items()
    else:
        pairs = [(site, None) for site in named]
    found: dict[Any, tuple[SiteRecord, Tensor | None]] = {}
    for site, mask in pairs:
        for record in trace.matching(site):
            checked = None if mask is None else _mask(mask, record)
            found[record.place] = (record, checked)
    order = {place: i for i, place in enumerate(trace.records)}
    return [found[place] for place in sorted(found, key=order.__getitem__)]


def _of_selection(trace: Trace, selection: SiteSelection) -> dict[str, Any]:
    selection.check(trace.info.weights_digest, trace.inventory_digest)
    found: dict[str, Any] = {}
    for place in selection.places:
        record = trace.records[place]
        mask = selection.mask(place, record.shape)
        found[record.label] = None if mask is None else torch.from_numpy(mask)
    return found


def _mask(mask: Any, record: SiteRecord) -> Tensor:
    value = torch.as_tensor(mask)
    fits = value.dtype == torch.bool
    try:
        value = value.broadcast_to(record.shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ReadError(
            "read_mask_invalid",
            f"a mask of {record.label} is bool and broadcasts to its recorded shape "
            f"{list(record.shape)}; this one is {value.dtype} {list(value.shape)}",
            value=(str(value.dtype), tuple(value.shape)),
            recorded_shape=record.shape,
        )
    return value.to(record.device)


def _frozen(trace: Trace, name: str, wanted: Masked) -> Frozen:
    by_key: dict[tuple[int, int], tuple[Address, Tensor | None]] = {}
    for record, mask in wanted:
        if record.address is None:
            raise ReadError(
                "read_frozen_selection_invalid",
                f"{record.label} is on no graph ({record.reason}), so it can't be "
                "frozen; choose differentiable sites",
                site=record.label,
                reason=record.reason,
            )
        key = record.address.key
        flat = None if mask is None else mask.reshape(record.address.shape)
        if key in by_key:
            flat = _union(by_key[key][1], flat)
        by_key[key] = (record.address, flat)
    members: dict[tuple[int, int], list[SiteRecord]] = {key: [] for key in by_key}
    for record in trace.population:
        if record.address is not None and record.address.key in members:
            members[record.address.key].append(record)
    identity = sorted(
        (r.key, r.pass_index, None if m is None else tensor_digest(m))
        for r, m in wanted
    )
    return Frozen(
        name,
        tuple(Freeze(address, mask) for address, mask in by_key.values()),
        requested=len(wanted),
        resolved=sum(map(len, members.values())),
        identity=tuple(identity),
        groups=tuple(
            tuple(r.label for r in group)
            for group in members.values()
            if len(group) > 1
        ),
    )


def _union(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one | other
