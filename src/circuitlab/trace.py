"""Capture: one live pass, with the autograd address of every site.

Takes a model and prompts, gives a `Trace`: addresses of tensors that are really on the
path, and values only of the sites that `save` names. It differentiates nothing and
inserts no leaf, so gradients reach the embeddings and every parameter upstream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from circuitlab.backends import (
    Backend,
    Capability,
    Site,
    Tap,
    TokenBatch,
    as_backend,
)
from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError, ReadError
from circuitlab.gradients import Address, Watch, address_of, unavailable
from circuitlab.inventory import inventory
from circuitlab.prompts import Prompts
from circuitlab.site_info import Inventory, SiteInfo
from circuitlab.sites import site_key
from circuitlab.tables import ModelInfo, digest

Norms = Literal["model", "fused", "open"]
Place = tuple[str, int]
"""A site and its pass, from 1: a module that runs twice has two."""

LOGITS = "logits"
_INNER = ("hook_scale", "hook_normalized")


@dataclass(frozen=True, eq=False)
class SiteRecord:
    """One site of one pass. `shape` is `[example, pos, …]`, also where the model merges
    those axes; `address` is None off the graph, and `reason` says why."""

    site: str
    pass_index: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: Address | None
    reason: str | None = None

    @property
    def place(self) -> Place:
        return self.site, self.pass_index

    @property
    def label(self) -> str:
        return f"{self.site}:{self.pass_index}"


class Trace:
    """A captured pass: `records` by place in firing order, and what was saved.

    Make one with `capture`. It holds the graph, and so the activations that autograd
    keeps, until `cleanup()` (or the end of its `with`).
    """

    def __init__(
        self, model: Backend, prompts: Prompts, batch: TokenBatch, norms: Norms
    ):
        self.model = model
        self.prompts = prompts
        self.batch = batch
        self.norms: str = norms
        self.records: dict[Place, SiteRecord] = {}
        self.side = "clean"
        self.backward_ready = False
        self.edits: Any = None
        self.dead: str | None = None
        self._known: tuple[ModelInfo, Inventory] | None = None
        self.watch = Watch()
        self._saved: dict[Place, Tensor] = {}

    def __repr__(self) -> str:
        state = self.dead or "live"
        return (
            f"<Trace of {self.prompts.name}: {len(self.batch)} examples, "
            f"{len(self.records)} sites, {len(self._saved)} saved, {state}>"
        )

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the payloads but no graph: reason `loaded`."""
        off = {p: replace(r, address=None) for p, r in self.records.items()}
        saved = {place: value.detach() for place, value in self._saved.items()}
        return {
            **self.__dict__,
            "model": None,
            "_known": (self.info, self.inventory),
            "records": off,
            "dead": "loaded",
            "watch": Watch(),
            "_saved": saved,
        }

    @property
    def sites(self) -> tuple[str, ...]:
        """The canonical names of all sites that fired, in firing order."""
        return tuple(dict.fromkeys(r.site for r in self.population))

    @property
    def population(self) -> tuple[SiteRecord, ...]:
        """Every site's record in firing order; the returned logits are no site."""
        return tuple(r for r in self.records.values() if r.site != LOGITS)

    @property
    def inventory(self) -> Inventory:
        return self._known[1] if self._known else inventory(self.model)

    @property
    def info(self) -> ModelInfo:
        """Which weights ran."""
        return self._known[0] if self._known else self.model.info

    @property
    def inventory_digest(self) -> str:
        """Equal for traces whose sites are the same, whatever their values."""
        return digest([r.key for r in self.population])

    @property
    def saved(self) -> tuple[Place, ...]:
        return tuple(self._saved)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the payloads that the trace holds; aliases share one."""
        unique = {v.data_ptr(): v for v in self._saved.values()}
        return sum(v.numel() * v.element_size() for v in unique.values())

    @property
    def backward_events(self) -> int:
        """How often nodes of the graph ran in backward passes other than reads."""
        return self.watch.events

    @property
    def live(self) -> bool:
        return self.dead is None

    def require_live(self) -> None:
        """Raise ReadError `read_addressing_unavailable` with the reason, if dead."""
        if self.dead is not None:
            raise unavailable(self.dead)

    def cleanup(self) -> None:
        """Let go of the graph and the payloads; reads refuse from here on."""
        self.watch.detach()
        self.records = {p: replace(r, address=None) for p, r in self.records.items()}
        self._saved = {}
        self.dead = self.dead or "cleaned"

    def __contains__(self, site: object) -> bool:
        return isinstance(site, str) and any(
            place in self._saved for place in self._places_or_none(site)
        )

    def __getitem__(self, site: str | Site) -> Tensor:
        """A saved site's value; on its graph only if captured `backward_ready`.

        Raises ReadError `read_payload_unretained`, or as `record`.
        """
        return self.payload(self.record(site))

    def payload(self, record: SiteRecord) -> Tensor:
        value = self._saved.get(record.place)
        if value is None:
            raise unretained([record.label])
        return value

    def has_payload(self, record: SiteRecord) -> bool:
        return record.place in self._saved

    def record(self, site: str | Site) -> SiteRecord:
        """The record of a site by any spelling, `site:pass`, or module path.

        Raises ArgumentError `site_unknown` (with the nearest names), `site_gated`,
        `site_never_fires`, `site_pass_ambiguous`, `site_pass_unknown`.
        """
        name, wanted = _split_pass(site)
        passes = [p for p in self._names(name) if wanted in (None, p[1])]
        if len(passes) == 1:
            return self.records[passes[0]]
        known = [p[1] for p in self._names(name)]
        if not passes:
            raise ArgumentError(
                "site_pass_unknown",
                f"{name} ran {len(known)} time(s) in this pass; there is no {wanted}",
                value=wanted,
                expected=known,
            )
        raise ArgumentError(
            "site_pass_ambiguous",
            f"{name} ran {len(known)} times; write {name}:1 to name a pass",
            value=name,
            expected=[f"{name}:{p}" for p in known],
        )

    def matching(self, pattern: str | Site) -> tuple[SiteRecord, ...]:
        """The records that a name or glob names, every pass, in firing order."""
        if isinstance(pattern, str) and "*" in pattern:
            names = {info.name for info in self.inventory.match(pattern)}
            return tuple(r for r in self.population if r.site in names)
        name, wanted = _split_pass(pattern)
        if wanted is not None:
            return (self.record(pattern),)
        return tuple(self.records[place] for place in self._names(name))

    def _names(self, name: str) -> list[Place]:
        """Every pass of a name, or the refusal that says why there is none."""
        found = self._places_or_none(name)
        if not found:
            info = find_site(self.inventory, name)
            _not_captured(info, self.norms)
        return found

    def _places_or_none(self, name: str) -> list[Place]:
        if name != LOGITS:
            names = self.inventory.names
            info = names.get(name) or names.get(f"{name}.hook_out")
            name = info.name if info else name
        return [place for place in self.records if place[0] == name]


def _not_captured(info: SiteInfo, norms: str) -> NoReturn:
    raise ArgumentError(
        "site_not_captured",
        f"{info.name} fired in the probe but not in this capture (norms={norms!r}); a "
        "norm's inner sites need capture(..., norms='open')",
        value=info.name,
        expected="norms='open'",
    )


def find_site(sites: Inventory, name: str) -> SiteInfo:
    """A fired site by spelling or module path. Raises as `Inventory.live`."""
    out = f"{name}.hook_out"
    if name not in sites.names and out in sites.names:
        name = out
    return sites.live(name)


def _split_pass(site: str | Site) -> tuple[str, int | None]:
    if isinstance(site, Site):
        return f"{site.path}.hook_{site.slot}", None
    name, colon, number = site.rpartition(":")
    if colon and number.isdigit():
        return name, int(number)
    return site, None


def unretained(labels: Sequence[str]) -> ReadError:
    """The refusal of a read that needs values which the capture did not save."""
    first = [label.rsplit(":", 1)[0] for label in labels[:20]]
    recapture = f"capture(model, prompts, save={first!r})"
    return ReadError(
        "read_payload_unretained",
        f"{len(labels)} site(s) were not saved by this capture: {', '.join(labels[:20])}; "
        f"capture again with {recapture}, or read method='grad', which needs no values",
        addresses=list(labels[:20]),
        count=len(labels),
        recapture=recapture,
    )


def capture(
    model: Any,
    prompts: Any,
    save: Literal["all"] | Iterable[str | Site] = "all",
    *,
    side: Literal["clean", "corrupted"] = "clean",
    backward_ready: bool = False,
    norms: Norms = "model",
    edits: Any = None,
) -> Trace:
    """Run the prompts once with the graph kept; return the trace.

    `prompts` are Prompts (their `side`), rows of token ids, or texts. `save` names the
    sites whose values are kept (names, globs, module paths): `"all"`, or `[]` for
    addresses alone, which is all that `method="grad"` needs. Values are copies, apart
    from the graph, unless `backward_ready`, where `trace[site]` is the live tensor.

    `norms`: "model" runs the model's own norm modules, "fused" their closed form in the
    model's precision (as `edge_scores` does), "open" makes TransformerLens compute them
    step by step, so that `hook_scale` and `hook_normalized` are sites too. `edits` are
    interventions, applied during the pass.

    Under `torch.no_grad` or `inference_mode` there is no graph, and gradient reads of
    the trace refuse. Raises ArgumentError `site_unknown`, `site_gated`,
    `site_not_captured`, `capture_option_invalid`; DataError as `Prompts.from_tokens`.
    """
    model = as_backend(model)
    _check_options(side, norms)
    found = as_prompts(prompts, model)
    rows = found.clean if side == "clean" else found.corrupted
    batch = model.batch(rows, found.answers, found.wrong_answers)
    trace = Trace(model, found, batch, norms)
    trace.side, trace.backward_ready = side, backward_ready
    plan = model.remembered(f"capture {norms}", lambda: _plan(model, norms))
    known = [tapped.info for tapped in plan]
    known += [middle for tapped in plan for middle in tapped.middles]
    recorder = _Recorder(trace, _wanted(trace.inventory, known, save, norms))
    extra, check = _edit_taps(model, edits, batch, trace)
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    taps = [*extra, *(recorder.tap(tapped) for tapped in plan)]
    options = {"fast_norms": norms == "fused"} if _has_fast_norms(model) else {}
    logits = model.run(batch, taps, grad=grad, **options)
    check()
    recorder.take_logits(logits)
    trace.dead = _why_dead(model, grad, logits)
    if trace.live:
        trace.watch.attach(r.address for r in trace.records.values() if r.address)
    return trace


def _check_options(side: str, norms: str) -> None:
    options = {
        "side": (side, ("clean", "corrupted")),
        "norms": (norms, ("model", "fused", "open")),
    }
    for name, (value, expected) in options.items():
        if value not in expected:
            raise ArgumentError(
                "capture_option_invalid",
                f"{name} is {value!r}; write one of {', '.join(expected)}",
                value=value,
                expected=expected,
            )


def as_prompts(prompts: Any, model: Backend) -> Prompts:
    """Prompts as they are; rows of token ids, or texts, as prompts."""
    if isinstance(prompts, Prompts):
        return prompts
    if isinstance(prompts, str):
        prompts = [prompts]
    if all(isinstance(row, str) for row in prompts):
        encoder = Encoder.of(model, None)
        prompts = [list(encoder.prompt(text)) for text in prompts]
    return Prompts.from_tokens(prompts, prompts)


@dataclass(frozen=True)
class _Tapped:
    """A site that a capture looks at, where, and what else its tensor is called."""

    info: SiteInfo
    key: str
    site: Site
    middles: tuple[SiteInfo, ...]


def _plan(model: Backend, norms: str) -> list[_Tapped]:
    """The sites that captures of this model look at; found once."""
    sites = inventory(model)
    middles = _stream_middles(model, sites)
    return [
        _Tapped(
            info, info.key(), _tap_site(info, norms), tuple(middles.get(info.name, ()))
        )
        for info in sites
        if info.fired
        and info.through is None
        and (norms == "open" or not info.name.endswith(_INNER))
    ]


def _wanted(
    sites: Inventory, captured: list[SiteInfo], save: Any, norms: Norms
) -> set[str]:
    """Canonical names of the sites to save."""
    known = {info.name for info in captured} | {LOGITS}
    if isinstance(save, str):
        if save == "all":
            return known
        save = [save]
    found: set[str] = set()
    for pattern in save:
        name, _ = _split_pass(pattern)
        if name == LOGITS:
            found.add(LOGITS)
        elif "*" in name:
            found |= {i.name for i in sites.match(name)} & known
        else:
            info = find_site(sites, name)
            if info.name not in known:
                _not_captured(info, norms)
            found.add(info.name)
    return found


def _edit_taps(
    model: Backend, edits: Any, batch: TokenBatch, trace: Trace
) -> tuple[list[Tap], Callable[[], None]]:
    if not edits:
        return [], lambda: None
    from circuitlab.doors import resolve_edits

    resolved = resolve_edits(model, edits, batch, prompts=trace.prompts)
    trace.edits = resolved.record
    return list(resolved.taps), resolved.check


def _has_fast_norms(model: Backend) -> bool:
    return hasattr(model, "bridge")


def _why_dead(model: Backend, grad: bool, logits: Tensor) -> str | None:
    if torch.is_inference_mode_enabled():
        return "inference_mode"
    if not grad:
        return "no_grad"
    if Capability.GRADIENTS not in model.capabilities:
        return "backend_unsupported"
    return None if logits.requires_grad else "detached"


class _Recorder:
    """Writes records (and wanted payloads) into a trace while its pass runs."""

    def __init__(self, trace: Trace, wanted: set[str]):
        self.trace = trace
        self.wanted = wanted
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._passes: Counter[str] = Counter()

    def tap(self, tapped: _Tapped) -> Tap:
        info = tapped.info

        def fn(value: Tensor) -> None:
            self.take(info, tapped.key, value)
            for middle in tapped.middles:
                self.take(middle, middle.key(), value)

        return Tap(tapped.site, fn, raw=True)

    def take_logits(self, value: Tensor) -> None:
        """Record what the model returned: a target, and no site."""
        self._write(LOGITS, site_key(LOGITS), 1, value)

    def take(self, info: SiteInfo, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        self._passes[info.name] += 1
        index = self._passes[info.name]
        self._write(info.name, key if index == 1 else info.key(index), index, value)

    def _write(self, name: str, key: str, index: int, value: Tensor) -> None:
        address = address_of(value)
        shape = _apart(tuple(value.shape), tuple(self.trace.batch.tokens.shape))
        reason = None
        if address is None:
            reason = "no_grad_fn" if value.is_floating_point() else "not_floating"
        record = SiteRecord(
            name, index, key, shape, value.dtype, value.device, address, reason
        )
        self.trace.records[record.place] = record
        if name in self.wanted:
            self.trace._saved[record.place] = self._keep(record, value)

    def _keep(self, record: SiteRecord, value: Tensor) -> Tensor:
        address = record.address
        if not self.trace.backward_ready:
            if address is None:
                value = value.detach().clone()
            else:
                if address.key not in self._copies:
                    self._copies[address.key] = value.detach().clone()
                value = self._copies[address.key]
        # The live tensor itself, where its shape is the recorded one.
        same = tuple(value.shape) == record.shape
        return value if same else value.reshape(record.shape)


def _apart(shape: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Rows and positions apart, where a block merges them (OPT, MoE routers)."""
    if len(shape) == 2 and shape[0] == tokens[0] * tokens[1]:
        return (*tokens, shape[1])
    return shape


def _tap_site(info: SiteInfo, norms: str) -> Site:
    """The hook point, whose output is on the path; with fused norms the norm module,
    since then its hook points don't run."""
    parent, _, last = info.name.rpartition(".hook_")
    is_norm = parent.rsplit(".", 1)[-1].startswith("ln")
    if norms == "fused" and is_norm and last in ("in", "out"):
        return Site(parent, "in" if last == "in" else "out")
    return info.site


def _stream_middles(model: Backend, sites: Inventory) -> dict[str, list[SiteInfo]]:
    """`hook_resid_mid` by the site whose tensor it is: the MLP's pre-norm input.

    That input is the stream itself, so the gradient at its address is the total one,
    not the MLP branch's.
    """
    found: dict[str, list[SiteInfo]] = {}
    for info in sites:
        if info.through is None or not info.fired:
            continue
        assert info.layer is not None
        stream = model.layers[info.layer].mlp_stream
        if stream is not None:
            found.setdefault(f"{stream.path}.hook_{stream.slot}", []).append(info)
    return found
