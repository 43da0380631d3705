"""Taps that stay for the length of a `with`, also for the user's own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from circuitlab.backends import Tap, TokenBatch

Install = Callable[[Tap, Callable[[], tuple[int, ...]]], AbstractContextManager[None]]


@contextmanager
def bound(
    network: nn.Module,
    taps: Sequence[Tap],
    install: Install,
    begin: Callable[[TokenBatch], None],
    end: Callable[[], None],
) -> Iterator[None]:
    """Install taps; around each forward of `network`, `begin` gets its tokens and `end`
    is called. `install(tap, shape)` gets a function that tells the rows and positions of
    the forward that runs."""
    current: list[TokenBatch] = []

    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        current[:] = [_seen(args, kwargs)]
        begin(current[0])

    def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
        end()

    def shape() -> tuple[int, ...]:
        return tuple(current[0].tokens.shape)

    with ExitStack() as stack:
        first = network.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        stack.callback(first.remove)
        last = network.register_forward_hook(leave)
        stack.callback(last.remove)
        for tap in taps:
            stack.enter_context(install(tap, shape))
        yield


def _seen(args: tuple, kwargs: dict[str, Any]) -> TokenBatch:
    """The rows of one forward, and which of their tokens are real."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        embedded: Tensor = kwargs["inputs_embeds"]
        tokens = embedded.new_zeros(embedded.shape[:2], dtype=torch.int64)
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        mask = torch.ones_like(tokens)
    mask = mask[:, -tokens.shape[1] :].bool()
    places = torch.arange(tokens.shape[1], device=mask.device)
    return TokenBatch(tokens, mask, (mask * places).argmax(1))
