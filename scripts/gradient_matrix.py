"""Measure which edits let the gradient through, and write it into docs/gradients.md.

    python scripts/gradient_matrix.py           write the page's table anew
    python scripts/gradient_matrix.py --check   fail if the page differs

Every cell is run on a float64 GPT-2 of two layers, and written a second time as a plain
torch forward hook on the same weights outside circuitlab. `tests/test_gradient_contract.py`
holds each cell's gradient against that hook's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformer_lens.model_bridge.sources._bridge_builder import (
    build_bridge_from_module,
)

from circuitlab.backends import Backend, TokenBatch, load_model
from circuitlab.errors import CircuitlabError
from circuitlab.interventions import (
    Door,
    Edit,
    Firing,
    Verb,
    add,
    add_noise,
    at_positions,
    bind,
    clamp,
    compose,
    freeze,
    interpolate,
    inventory,
    keep_grad,
    mean_ablate,
    patch_from,
    permute_batch,
    project_onto,
    project_out,
    replace_with,
    resample_rows_from,
    resume,
    run,
    scale,
    scramble_elements,
    set_affine_coordinates,
    set_direction_mean,
    splice_module,
    steer,
    subspace,
    swap_with,
    units,
    zero_ablate,
)
from circuitlab.notices import CircuitlabWarning, forget_notices
from circuitlab.prompts import Prompts
from circuitlab.trace import capture

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gradients.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
DOORS = ("run", "capture", "bind", "resume")
PLACES = ("the site", "units", "subspace")
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
WIDTH = 16

Hand = Callable[["Toy", Tensor, "Frame"], Tensor]


@dataclass(frozen=True)
class Case:
    """A verb, and the same written by hand: `hand(toy, value, frame)`."""

    name: str
    verb: Callable[[Toy], Any]
    hand: Hand


@dataclass(frozen=True)
class Frame:
    """How a donor or a direction looks to a verb: as it is, or in coordinates.

    `draw(verb, probe)` is what a seeded verb makes of a constant probe: its draw alone.
    """

    point: Callable[[Tensor], Tensor]
    vector: Callable[[Tensor], Tensor]
    draw: Callable[[Verb, Tensor], Tensor]
    earlier: Tensor
    whole: Tensor


@dataclass(frozen=True)
class Cell:
    """What was seen: `outcome`, the loss and the gradients (before, between)."""

    outcome: str
    loss: Tensor | None = None
    before: Tensor | None = None
    between: Tensor | None = None
    warned: bool = False


def _config() -> transformers.GPT2Config:
    config = transformers.GPT2Config(
        vocab_size=13, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=24, n_positions=8
    )
    config._attn_implementation = "eager"
    config.architectures = ["GPT2LMHeadModel"]
    return config


def _network() -> nn.Module:
    torch.manual_seed(0)
    found = transformers.GPT2LMHeadModel(_config()).double().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return found


class Toy:
    """The two-layer model, once for circuitlab and once plain, and some fixed tensors."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str, bool], Cell] = {}
        self.plain: Any = _network()
        network: Any = _network()
        bridge = build_bridge_from_module(
            network,
            architecture="GPT2LMHeadModel",
            hf_config=network.config,
            dtype=torch.float64,
            device="cpu",
            model_name="toy",
        )
        self.model: Backend = load_model(bridge)
        self.batch: TokenBatch = self.model.batch(ROWS)
        self.prompts = Prompts.from_tokens(ROWS, ROWS)
        random = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.vector = draw(WIDTH)
        self.basis = draw(2, WIDTH)
        self.origin = draw(WIDTH)
        self.weight = draw(2, WIDTH)
        self.bias = draw(2)
        self.donor = draw(3, 5, WIDTH)
        self.mask = draw(5, WIDTH) > 0
        self.readout = draw(3, 5, 13)

    def site(self, door: str) -> str:
        """Where the edit is: the output of the first block, or of the resumed one."""
        return "blocks.1.hook_out" if door == "resume" else "blocks.0.hook_out"

    def loss(self, logits: Tensor) -> Tensor:
        return (logits * self.readout).sum()

    @cached_property
    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A weight of each block in the bridge: before, and between."""
        bridge: Any = self.model.bridge  # type: ignore[attr-defined]
        return self._same(bridge, 0), self._same(bridge, 1)

    @property
    def plain_weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        blocks = self.plain.transformer.h
        return blocks[0].mlp.c_fc.weight, blocks[1].mlp.c_fc.weight

    def _same(self, bridge: nn.Module, block: int) -> nn.Parameter:
        wanted = self.plain_weights[block]
        fits = (p for p in bridge.parameters() if p.shape == wanted.shape)
        return next(p for p in fits if torch.equal(p, wanted))


# --- the verbs, and the same by hand ---


CASES = (
    Case("scale(0.5)", lambda t: scale(0.5), lambda t, x, f: x * 0.5),
    Case("scale(0.0)", lambda t: scale(0.0), lambda t, x, f: x * 0.0),
    Case("clamp(-1, 1)", lambda t: clamp(-1, 1), lambda t, x, f: x.clamp(-1, 1)),
    Case(
        "add_noise(0.1, seed=0)",
        lambda t: add_noise(0.1, seed=0),
        lambda t, x, f: (
            x + f.draw(add_noise(0.1, seed=0), torch.zeros_like(x).detach())
        ),
    ),
    Case("add(v)", lambda t: add(t.vector), lambda t, x, f: x + f.vector(t.vector)),
    Case(
        "steer(v, 2)",
        lambda t: steer(t.vector, 2.0),
        lambda t, x, f: x + 2 * f.vector(t.vector),
    ),
    Case(
        "project_onto(v)",
        lambda t: project_onto(t.vector),
        lambda t, x, f: (x @ t.vector)[..., None] * t.vector / t.vector.dot(t.vector),
    ),
    Case(
        "project_out(v)",
        lambda t: project_out(t.vector),
        lambda t, x, f: (
            x - (x @ t.vector)[..., None] * t.vector / t.vector.dot(t.vector)
        ),
    ),
    Case(
        'mean_ablate(dim="pos")',
        lambda t: mean_ablate(dim="pos"),
        lambda t, x, f: x.mean(1, keepdim=True).expand_as(x),
    ),
    Case(
        "scramble_elements(seed=0)",
        lambda t: scramble_elements(seed=0),
        lambda t, x, f: x.flatten(1).gather(1, _shuffled(x, f)).reshape(x.shape),
    ),
    Case(
        "permute_batch([1, 2, 0])",
        lambda t: permute_batch([1, 2, 0]),
        lambda t, x, f: x[[1, 2, 0]],
    ),
    Case(
        "set_direction_mean(v, 0.3)",
        lambda t: set_direction_mean(t.vector, 0.3),
        lambda t, x, f: _set_mean(x, f.vector(t.vector)),
    ),
    Case(
        "splice_module(tanh)",
        lambda t: splice_module(nn.Tanh()),
        lambda t, x, f: torch.tanh(x),
    ),
    Case(
        "interpolate(donor, 0.3)",
        lambda t: interpolate(t.donor, 0.3),
        lambda t, x, f: 0.7 * x + 0.3 * f.point(t.donor),
    ),
    Case(
        "compose(scale(0.5), add(v))",
        lambda t: compose(scale(0.5), add(t.vector)),
        lambda t, x, f: x * 0.5 + f.vector(t.vector),
    ),
    Case(
        "compose(scale(0.0), add(v))",
        lambda t: compose(scale(0.0), add(t.vector)),
        lambda t, x, f: x * 0.0 + f.vector(t.vector),
    ),
    Case(
        "at_positions([0], scale(0.5))",
        lambda t: at_positions([0], scale(0.5)),
        lambda t, x, f: torch.cat([x[:, :1] * 0.5, x[:, 1:]], 1),
    ),
    Case(
        "a callable (value, site)",
        lambda t: lambda value, site: value * value,
        lambda t, x, f: x * x,
    ),
    Case(
        "at_positions([0], zero_ablate())",
        lambda t: at_positions([0], zero_ablate()),
        lambda t, x, f: torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1),
    ),
    Case("zero_ablate()", lambda t: zero_ablate(), lambda t, x, f: torch.zeros_like(x)),
    Case(
        "replace_with(v)",
        lambda t: replace_with(t.vector),
        lambda t, x, f: f.point(t.vector.expand(3, 5, WIDTH)),
    ),
    Case(
        "patch_from(donor)",
        lambda t: patch_from(t.donor),
        lambda t, x, f: f.point(t.donor),
    ),
    Case(
        "swap_with(site)",
        lambda t: swap_with("blocks.0.hook_in"),
        lambda t, x, f: f.point(f.earlier.detach()),
    ),
    Case(
        "resample_rows_from(donor, seed=0)",
        lambda t: resample_rows_from(t.donor, seed=0),
        lambda t, x, f: f.point(t.donor[_donors(t, f)]),
    ),
    Case(
        "mean_ablate(donor)",
        lambda t: mean_ablate(t.donor),
        lambda t, x, f: f.point(t.donor.mean((0, 1)).expand(3, 5, WIDTH)),
    ),
    Case(
        "scramble_elements(donor, seed=0)",
        lambda t: scramble_elements(t.donor, seed=0),
        lambda t, x, f: _elements(t, f)[_picked(t, x, f)],
    ),
    Case("freeze()", lambda t: freeze(), lambda t, x, f: x.detach()),
    Case(
        "set_affine_coordinates(W, b)",
        lambda t: set_affine_coordinates(t.weight, t.bias),
        lambda t, x, f: f.whole @ t.weight.T + t.bias,
    ),
)


def _set_mean(x: Tensor, along: Tensor) -> Tensor:
    unit = along / along.norm()
    return x - (x @ unit)[..., None] * unit + 0.3 * unit


def _shuffled(x: Tensor, frame: Frame) -> Tensor:
    """Which element of its row each element becomes: the draw on numbered elements."""
    numbers = torch.arange(x[0].numel(), dtype=x.dtype).reshape(x.shape[1:])
    drawn = frame.draw(scramble_elements(seed=0), numbers.expand_as(x).contiguous())
    return drawn.flatten(1).long()


def _donors(toy: Toy, frame: Frame) -> list[int]:
    """Which row each example gets: the draw on rows that hold their own number."""
    numbered = torch.arange(3.0).double()[:, None, None].expand(3, 5, WIDTH)
    drawn = frame.draw(resample_rows_from(numbered, seed=0), toy.donor)
    return drawn[:, 0, 0].long().tolist()


def _elements(toy: Toy, frame: Frame) -> Tensor:
    return frame.point(toy.donor).reshape(-1)


def _picked(toy: Toy, x: Tensor, frame: Frame) -> Tensor:
    count = _elements(toy, frame).numel()
    numbered = torch.arange(count, dtype=x.dtype)
    drawn = frame.draw(scramble_elements(numbered[:, None], seed=0), x.detach())
    return drawn.long()


def by_hand(toy: Toy, case: Case, place: str, door: str) -> Cell:
    """The same edit as plain torch hooks on the plain model."""
    earlier: list[Tensor] = []
    blocks = toy.plain.transformer.h
    block = blocks[1] if door == "resume" else blocks[0]
    site = inventory(toy.model).find(toy.site(door))

    def edit(_module: nn.Module, _args: object, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        new = _written(toy, case, place, x, earlier[0], Firing(site, toy.batch))
        return (new, *output[1:]) if isinstance(output, tuple) else new

    def cut(_module: nn.Module, args: tuple) -> Any:
        return (args[0].detach().requires_grad_(True), *args[1:])

    handles = [block.register_forward_pre_hook(cut)] if door == "resume" else []
    handles.append(block.register_forward_pre_hook(lambda _, a: earlier.append(a[0])))
    handles.append(block.register_forward_hook(edit))
    try:
        with torch.enable_grad():
            loss = toy.loss(toy.plain(toy.batch.tokens, use_cache=False).logits)
    finally:
        for handle in handles:
            handle.remove()
    return _graded(loss, toy.plain_weights, door)


def _written(
    toy: Toy, case: Case, place: str, x: Tensor, earlier: Tensor, firing: Firing
) -> Tensor:
    def draw(verb: Verb, probe: Tensor) -> Tensor:
        find = _as_population
        return verb.found(find)(probe, firing)

    if place != "subspace":
        frame = Frame(lambda t: t, lambda t: t, draw, earlier, x)
        new = case.hand(toy, x, frame)
        return new if place == "the site" else torch.where(toy.mask, new, x)
    inverse = torch.linalg.pinv(toy.basis)
    frame = Frame(
        lambda t: (t - toy.origin) @ inverse, lambda t: t @ inverse, draw, earlier, x
    )
    old = (x - toy.origin) @ inverse
    return x + (case.hand(toy, old, frame) - old) @ toy.basis


def _as_population(source: Any) -> Any:
    from circuitlab.interventions import Population

    return Population(source)


def _graded(loss: Tensor, weights: tuple[Tensor, Tensor], door: str) -> Cell:
    before, between = torch.autograd.grad(loss, weights, allow_unused=True)
    seen = between if door == "resume" else before
    outcome = "cut" if seen is None else "reaches"
    return Cell(outcome, loss.detach(), before, between)


# --- the same through circuitlab ---


def measured(toy: Toy, case: Case, place: str, door: str, keep: bool) -> Cell:
    """One cell: run the edit through a door, and see what reaches the weights."""
    key = (case.name, place, door, keep)
    if key not in toy.cells:
        toy.cells[key] = _measure(toy, case, place, door, keep)
    return toy.cells[key]


def _measure(toy: Toy, case: Case, place: str, door: str, keep: bool) -> Cell:
    verb = case.verb(toy)
    if case.name.startswith("swap_with") and door == "resume":
        verb = swap_with("blocks.1.hook_in")
    verb = keep_grad(verb) if keep else verb
    confined: Door | str = toy.site(door)
    if place == "units":
        confined = units(toy.mask, site=toy.site(door))
    elif place == "subspace":
        confined = subspace(toy.site(door), toy.basis, origin=toy.origin)
    edits = [Edit(confined, verb)]
    forget_notices()
    try:
        with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CircuitlabWarning)
            loss = toy.loss(_logits(toy, edits, door))
    except CircuitlabError as error:
        return Cell(f"raises:{error.code}")
    warned = [
        w.message.code for w in caught if isinstance(w.message, CircuitlabWarning)
    ]
    found = _graded(loss, toy.weights, door)
    noticed = "keep_grad_replay_frontier" in warned
    return Cell(found.outcome, found.loss, found.before, found.between, noticed)


def _logits(toy: Toy, edits: list[Edit], door: str) -> Tensor:
    if door == "run":
        return run(toy.model, toy.batch, edits).logits
    if door == "resume":
        return resume(toy.model, toy.batch, edits, 1).logits
    if door == "capture":
        options = {"save": ["logits"], "backward_ready": True, "norms": "fused"}
        return capture(toy.model, toy.prompts, edits=edits, **options)["logits"]
    with bind(toy.model, edits):
        bridge: Any = toy.model.bridge  # type: ignore[attr-defined]
        return bridge(toy.batch.tokens, prepend_bos=False, use_cache=False)


# --- the page ---


def table(toy: Toy) -> str:
    """The matrix in Markdown: one table a place, a row a verb, two columns a door."""
    parts = []
    for place in PLACES:
        parts += [f"### {_TITLES[place]}", "", _head(), _rule()]
        parts += [_row(toy, case, place) for case in CASES]
        parts.append("")
    return "\n".join(parts)


_TITLES = {
    "the site": "On the whole site",
    "units": "Through `units(mask)`",
    "subspace": "Through `subspace(site, basis, origin=…)`",
}


def _head() -> str:
    doors = " | ".join(f"{door} | {door}, keep_grad" for door in DOORS)
    return f"| verb | {doors} |"


def _rule() -> str:
    return "|---" * (1 + 2 * len(DOORS)) + "|"


def _row(toy: Toy, case: Case, place: str) -> str:
    cells = []
    for door in DOORS:
        for keep in (False, True):
            cell = measured(toy, case, place, door, keep)
            text = f"`{cell.outcome}`" if ":" in cell.outcome else cell.outcome
            if door == "resume" and ":" not in cell.outcome:
                text = f"{'cut' if cell.before is None else 'reaches'} / {text}"
            cells.append(text + (" ⚠" if cell.warned else ""))
    return f"| `{case.name}` | {' | '.join(cells)} |"


def page(text: str, matrix: str) -> str:
    """The page with the matrix between its two marks."""
    start, rest = text.split(BEGIN)
    _, end = rest.split(END)
    return f"{start}{BEGIN}\n{matrix}\n{END}{end}"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text, table(Toy()))
    if "--check" in sys.argv[1:]:
        return 0 if text == wanted else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
