"""Teacher forcing: a compiled decoder gets the tokens and the KV cache eager had at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor, Tensor], Tensor]  # tokens [m], positions [m] -> logits [m, vocab]


class Cached(Protocol):
    """A decoder whose KV caches can be read and set."""

    def caches(self) -> list[Tensor]: ...


@dataclass
class Trace:
    """What eager did with a sequence: one step for the prompt, then one for each token.

    ``logits`` are those behind the last token of each step. ``margins`` say how decided its routing
    was: the smallest gap, over all routers and tokens of the step, between the last expert chosen
    and the first one not.
    """

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    caches: list[list[Tensor]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """The greedy token behind each step."""
        return [int(x.argmax()) for x in self.logits]


@dataclass(frozen=True)
class Comparison:
    """The result of teacher forcing.

    Args:
        steps, compared: how many steps there were, and how many had decided routing: only those
            are compared.
        max_error: largest difference of a logit.
        tolerance: what it may be.
        tokens_equal, tokens_decided: greedy tokens equal, of those where eager's top-2 margin
            exceeds the tolerance.
        logits: those behind the last token of each step, compared or not.
    """

    steps: int
    compared: int
    max_error: float
    tolerance: float
    tokens_equal: int
    tokens_decided: int
    logits: list[Tensor] = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        within = self.max_error <= self.tolerance and self.tokens_equal == self.tokens_decided
        enough = self.compared >= self.steps / 2 and self.tokens_decided > 0
        return within and enough


def record(
    model: Cached,
    forward: Forward,
    prompt: Tensor,
    new_tokens: int,
    stop: Sequence[int] = (),
    routers: Sequence[nn.Module] = (),
    step: Callable[[], None] = lambda: None,
) -> Trace:
    """Run eager greedily, until a token is in ``stop``.

    ``routers`` are modules with ``weight``, ``top_k`` and the hidden state as input; ``step`` is
    called after each step.
    """
    trace = Trace()
    gaps: list[float] = []
    hooks = [r.register_forward_hook(lambda m, a, _: gaps.append(_gap(m, a[0]))) for r in routers]
    tokens, positions = prompt, torch.arange(len(prompt), device=prompt.device)
    try:
        for _ in range(new_tokens):
            gaps.clear()
            trace.caches.append([c.clone() for c in model.caches()])
            logits = forward(tokens, positions)[-1].float()
            trace.tokens.append(tokens)
            trace.positions.append(positions)
            trace.logits.append(logits)
            trace.margins.append(min(gaps, default=float("inf")))
            tokens, positions = logits.argmax().reshape(1), positions[-1:] + 1
            step()
            if int(tokens) in stop:
                break
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _gap(router: Any, x: Tensor) -> float:
    k = int(router.top_k)
    logits = torch.nn.functional.linear(x.float(), router.weight.float())
    best = logits.topk(k + 1, dim=-1).values
    return float((best[:, k - 1] - best[:, k]).min())


def compare(
    model: Cached,
    forward: Forward,
    trace: Trace,
    tolerance: float,
    decided: float = 0.0,
    step: Callable[[], None] = lambda: None,
) -> Comparison:
    """Feed ``forward`` what eager saw at each step.

    Steps whose routing margin is below ``decided`` do not count; ``step`` is called after each.
    """
    error, equal, sure, compared = 0.0, 0, 0, 0
    all_logits = []
    for tokens, positions, caches, want, margin in zip(
        trace.tokens, trace.positions, trace.caches, trace.logits, trace.margins, strict=True
    ):
        restore(model, caches)
        got = forward(tokens, positions)[-1].float()
        all_logits.append(got)
        step()
        if margin < decided:
            continue
        compared += 1
        error = max(error, float((got - want).abs().max()))
        first, second = want.topk(2).values
        if first - second > tolerance:
            sure += 1
            equal += int(got.argmax() == want.argmax())
    return Comparison(len(trace.tokens), compared, error, tolerance, equal, sure, all_logits)


def restore(model: Cached, caches: list[Tensor]) -> None:
    """Give the model the caches of a step of the trace."""
    for cache, value in zip(model.caches(), caches, strict=True):
        cache.copy_(value)
