"""Edge-seeded gradients: addresses in the autograd graph, and pulls between them.

A tensor's address is the autograd node that made it and its output slot there. A pull
seeds a cotangent at one address and returns the gradients at others: no payload is
needed, only the graph. `reads` and `edges` both work through this module; it knows
neither models nor tables, and never calls `.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from circuitlab.errors import ArgumentError, InternalError, ReadError

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Address:
    """Where a tensor comes from in the graph; `shape` is what its gradient has there.

    Two tensors with equal `key` are one value under two names.
    """

    edge: GradientEdge
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """Identity of the node (by object id) and the output slot."""
        return id(self.edge.node), self.edge.output_nr


def address_of(value: Tensor) -> Address | None:
    """A tensor's address; None where it is on no graph."""
    if not value.requires_grad:
        return None
    return Address(get_gradient_edge(value), tuple(value.shape))


def pull(
    seed: Address,
    cotangent: Tensor,
    at: Sequence[Address],
    *,
    batched: bool = False,
) -> list[Tensor | None]:
    """Pull a cotangent at `seed` back to the addresses: one autograd call.

    `cotangent` has the seed's shape, with a leading axis of targets if `batched`; the
    gradients have their address's shape likewise. None where nothing flows. The graph
    is kept. Raises ReadError `read_addressing_unavailable` (reason `graph_freed`) and
    `batched_attribution_unsupported`.
    """

    def call(cotangent: Tensor, batched: bool) -> list[Tensor | None]:
        found = torch.autograd.grad(
            [seed.edge],
            [address.edge for address in at],
            [cotangent],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return list(found)

    try:
        return call(cotangent, batched)
    except (RuntimeError, NotImplementedError) as error:
        if _graph_freed(error):
            raise unavailable("graph_freed") from error
        if not batched or isinstance(error, torch.OutOfMemoryError):
            raise
        # Only an operator that fails in batches alone is a batching fault.
        call(cotangent[0], False)
        raise ReadError(
            "batched_attribution_unsupported",
            "an operator of this model has no batching rule, so several targets can't "
            f"share one backward ({_first_line(error)}); pass target_batch_size=1",
            reason=_first_line(error),
            expected="target_batch_size=1",
        ) from error


def gradients_at(target: Tensor, tensors: Mapping[K, Tensor]) -> dict[K, Tensor | None]:
    """Gradients of a scalar at live tensors, by their addresses, in one call.

    None where a tensor is on no graph or the target doesn't reach it. The graph is
    freed. Raises ArgumentError `target_detached` for a target without a graph.
    """
    seed = address_of(target)
    if seed is None:
        raise ArgumentError(
            "target_detached",
            "the target carries no graph; compute it from tensors of a live pass",
        )
    found: dict[K, Tensor | None] = dict.fromkeys(tensors)
    edges = {name: address_of(tensor) for name, tensor in tensors.items()}
    live = {name: address for name, address in edges.items() if address is not None}
    gradients = torch.autograd.grad(
        [seed.edge],
        [address.edge for address in live.values()],
        [torch.ones_like(target)],
        allow_unused=True,
    )
    found.update(zip(live, gradients, strict=True))
    return found


def _graph_freed(error: Exception) -> bool:
    return "backward through the graph a second time" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- liveness ---

_REMEDIES = {
    "inference_mode": "it was captured under torch.inference_mode; capture outside it",
    "no_grad": "it was captured under torch.no_grad; capture with gradients enabled",
    "detached": "the model gave logits without a graph: all its parameters are frozen, "
    "or it cuts gradients; let at least the embedding's parameters require gradients "
    "(parameter.requires_grad_()) and capture again",
    "graph_freed": "a backward pass freed its graph; read before it, or run it with "
    "retain_graph=True, and capture again",
    "cleaned": "it was cleaned up; read before trace.cleanup(), or capture again",
    "loaded": "it was loaded or copied, and a graph lives only in the process that "
    "made it; capture again",
    "backend_unsupported": "its backend lacks GRADIENTS; load the model with a backend "
    "that has them",
}


def unavailable(reason: str) -> ReadError:
    """The refusal of a gradient read on a trace that has no live graph."""
    return ReadError(
        "read_addressing_unavailable",
        f"this trace can't be read by gradients: {_REMEDIES[reason]}",
        reason=reason,
        remedy=_REMEDIES[reason],
    )


class Watch:
    """Counts what a user's own backward passes do to a captured graph.

    One prehook on each addressed node adds to `events`; inside `suppressed` they do
    nothing, so that a read leaves its own capture's counters alone.
    """

    def __init__(self) -> None:
        self.events = 0
        self._suppressed = 0
        self._handles: list[Any] = []

    def attach(self, addresses: Iterable[Address]) -> None:
        """Watch the nodes of these addresses, each once."""
        nodes = {id(a.edge.node): a.edge.node for a in addresses}
        self._handles = [n.register_prehook(self._count) for n in nodes.values()]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _count(self, _gradients: tuple) -> None:
        if not self._suppressed:
            self.events += 1

    @contextmanager
    def suppressed(self) -> Iterator[None]:
        """Reads run in here. Raises InternalError `read_suppression_leak` on a leak."""
        before = (self.events, len(self._handles))
        self._suppressed += 1
        try:
            yield
        finally:
            self._suppressed -= 1
        after = (self.events, len(self._handles))
        if after != before:
            raise InternalError(
                "read_suppression_leak",
                f"a read changed its own capture's counters from {before} to {after}; "
                "please report this",
                value=after,
                expected=before,
            )


# --- freezing ---


@dataclass(frozen=True, eq=False)
class Freeze:
    """No gradient passes this address on its way back.

    `mask` bool, broadcastable to the address's shape: only these elements; None: all.
    """

    address: Address
    mask: Tensor | None = None


@contextmanager
def frozen_at(freezes: Sequence[Freeze]) -> Iterator[set[tuple[int, int]]]:
    """Stop gradients at slots while inside; yields the keys of those reached so far.

    A frozen address's own gradient is what arrives there, before it is stopped (and
    after what is frozen downstream). Leaving puts every node back as it was.
    """
    reached: set[tuple[int, int]] = set()
    by_node: dict[int, list[Freeze]] = {}
    for freeze in freezes:
        by_node.setdefault(id(freeze.address.edge.node), []).append(freeze)
    with ExitStack() as stack:
        for group in by_node.values():
            node = group[0].address.edge.node
            handle = node.register_prehook(_stopping(group, reached))
            stack.callback(handle.remove)
        yield reached


def _stopping(group: Sequence[Freeze], reached: set[tuple[int, int]]) -> Callable:
    def hook(gradients: tuple) -> tuple:
        new = list(gradients)
        for freeze in group:
            slot = freeze.address.edge.output_nr
            gradient = new[slot]
            if gradient is None:
                continue
            reached.add(freeze.address.key)
            # Filled, not multiplied: an infinite gradient must stop too.
            if freeze.mask is None:
                new[slot] = torch.zeros_like(gradient)
            else:
                new[slot] = gradient.masked_fill(freeze.mask, 0)
        return tuple(new)

    return hook
