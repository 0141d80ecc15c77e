"""A wrapped toy, the training calls that a clause makes on it, and the gradients that they imply.

Most clauses on gradients differ in their calls alone. So the calls are a value, written once: each
rank follows them on its toy, and the law derives from the same text which micro-batches have to be
in the gradient.

    gradients(world, body, subject, "mlp", "backward 5, zero_grad, accumulate 0, backward 1")

    backward N          forward, synchronised backward and finish of micro-batch N
    unfinished N        the same without the finish
    accumulate N        forward and backward whose gradients stay on this rank
    evaluate N          forward without gradients
    forward N           forward alone: the latest moment for an error of an earlier call
    finish              once more
    zero_grad           to None; `zero_grad False` to zero
    note                what follows does not count: only errors are looked for

Any other method of the toy is a call as well. Flags of the model follow the number, as in
`backward 0 use=abc`; `use=abc/ab` gives the first rank another value than the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.programs.laws import equivalence, refusal
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS, sum_of_squares

SEED = 7
"""Of weights and inputs, where a clause does not draw one."""


class WrappedToy(ABC):
    """One rank's toy behind a wrapper, with an optimizer over what is trained.

    The loss of each micro-batch is `world_size * sum_of_squares`, so that the mean over ranks is
    the plain sum.

    Attributes:
        module: the toy, as built with `seed`; `wrapped` is what the function under test made of it.
        noted: the gradients at the call `note`.
        called: what is called in place of `wrapped`, where that is compiled.
    """

    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    noted: Gradients | None = None
    called: Any = None

    def __init__(
        self, ctx: Context, toy: str, seed: int, weights: int, dtype: torch.dtype | None
    ) -> None:
        self.ctx, self.toy, self.seed = ctx, TOYS[toy], seed
        self.module = self.toy.build(weights).to(ctx.device, dtype)

    def batch(self, micro: int = 0) -> torch.Tensor:
        """This rank's inputs `[4, 6]` of a micro-batch."""
        return self.toy.batch(self.seed, rank=self.ctx.rank, micro=micro).to(self.ctx.device)

    def loss(self, micro: int = 0, **flags: Any) -> torch.Tensor:
        """Forward of this rank's micro-batch number `micro`, flags by position."""
        model = self.wrapped if self.called is None else self.called
        return self.ctx.world_size * sum_of_squares(model(self.batch(micro), *flags.values()))

    forward = loss

    def backward(self, micro: int = 0, **flags: Any) -> None:
        """Forward and synchronised backward of a micro-batch, and the finish after it."""
        self.loss(micro, **flags).backward()
        self.finish()

    def unfinished(self, micro: int = 0, **flags: Any) -> None:
        """Forward and synchronised backward of a micro-batch, without the finish after it."""
        self.loss(micro, **flags).backward()

    @abstractmethod
    def accumulate(self, micro: int = 0, **flags: Any) -> None:
        """Forward and backward of a micro-batch whose gradients stay on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """End the synchronisation of a backward pass."""

    def evaluate(self, micro: int) -> Named:
        """Output of a forward without gradients."""
        with torch.no_grad():
            return {"output": self.wrapped(self.batch(micro))}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients through the optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @abstractmethod
    def gradients(self) -> Gradients:
        """The gradients, by the plain model's names."""

    @abstractmethod
    def weights(self) -> Named:
        """Full weights, by the plain model's names."""

    @torch.no_grad()
    def negate(self) -> None:
        """An update that keeps integers: every parameter changes its sign, in place."""
        for parameter in self.wrapped.parameters():
            parameter.neg_()

    def evaluation_mode(self) -> None:
        """Switch dropout off and statistics to the running ones; gradients are wanted as ever."""
        for part in (self.wrapped, self.module):
            if isinstance(part, nn.Module):
                part.eval()

    def note(self) -> None:
        """Keep the gradients of now for the end."""
        self.noted = self.gradients()

    def follow(self, calls: str) -> None:
        """Make the calls."""
        for name, arguments, flags in spelled_out(calls, self.ctx.rank):
            getattr(self, name)(*arguments, **flags)

    def gradients_after(self, calls: str) -> Gradients:
        """Make the calls; return the gradients after them, or at `note`."""
        self.follow(calls)
        return self.gradients() if self.noted is None else self.noted

    def forward_hooks(self) -> list[str]:
        """The hooks of the original module that a forward runs, in order."""
        found: list[str] = []
        self.module.register_forward_pre_hook(lambda *_: found.append("before"))
        self.module.register_forward_hook(lambda *_: found.append("after"))
        self.loss()
        return found


def spelled_out(calls: str, rank: int) -> list[tuple[str, list[int], dict[str, str]]]:
    """Return (method, arguments, flags of the model) for each call, as `rank` makes them."""
    found = []
    for call in filter(None, map(str.strip, calls.split(","))):
        name, *words = call.split()
        flags = dict(word.split("=") for word in words if "=" in word)
        for flag, choices in flags.items():
            values = choices.split("/")
            flags[flag] = values[rank % len(values)]
        constants = {"True": True, "False": False}
        numbers = [constants[w] if w in constants else int(w) for w in words if "=" not in w]
        found.append((name, numbers, flags))
    return found


def outstanding(calls: str, rank: int) -> list[tuple[int, dict[str, str]]]:
    """Return number and flags of each micro-batch that the gradients of `rank` must contain."""
    found: list[tuple[int, dict[str, str]]] = []
    for name, arguments, flags in spelled_out(calls, rank):
        if name == "zero_grad":
            found = []
        elif name in ("backward", "unfinished", "accumulate"):
            found.append((arguments[0], flags))
        elif name == "note":
            break
    return found


def gradients(
    world: World,
    body: Callable[..., Any],
    subject: str,
    toy: str,
    calls: str,
    *,
    seed: int = SEED,
    may_refuse: bool = False,
    ordinary: tuple[Any, ...] = (),
    absent_is_zero: bool = False,
    within: Tolerance | None = None,
    hints: Sequence[Hint] = (),
    given: str = "",
    **options: Any,
) -> None:
    """After the calls all ranks must hold the mean gradient of the outstanding micro-batches.

    Args:
        body: called with (ctx, subject, toy, seed, calls, **options); returns gradients by name.
        may_refuse, ordinary: an error is right as well, see `refusal.answer_or_refusal`.
        absent_is_zero, within, hints, given: see `equivalence.mean_gradients`.
    """
    __tracebackhide__ = True
    ranks: Sequence[Gradients] | None
    if may_refuse:
        ranks = refusal.answer_or_refusal(
            world, body, subject, toy, seed, calls, ordinary=ordinary, **options
        )
    else:
        ranks = world.run(body, subject, toy, seed, calls, **options)
    if ranks is None:
        return
    micros = [micro for micro, _ in outstanding(calls, 0)]
    flags = [dict(outstanding(calls, rank)) for rank in range(world.size)]
    uncleared = ",".join(call for call in calls.split(",") if "zero_grad" not in call)
    every = [dict(outstanding(uncleared, rank)) for rank in range(world.size)]

    def kept() -> Gradients:
        return equivalence.full_batch_gradients(
            toy,
            seed,
            ranks=range(world.size),
            micros=[micro for micro, _ in outstanding(uncleared, 0)],
            flags=lambda rank, micro: every[rank][micro],
        )

    if uncleared != calls:
        hints = [*hints, Hint("gradients from before a zero_grad are still in it", kept)]
    equivalence.mean_gradients(
        ranks,
        toy,
        seed,
        micros=micros,
        flags=lambda rank, micro: flags[rank][micro],
        absent_is_zero=absent_is_zero,
        within=within,
        hints=hints,
        given=given or calls,
    )
