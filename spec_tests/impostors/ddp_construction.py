"""Near-misses of construction: ranks that do not start as the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class NoBroadcast(PlainDdp):
    def start_equal(self) -> None:
        pass


class BroadcastsTrainableOnly(PlainDdp):
    def start_equal(self) -> None:
        self.take_first([p for p in self.module.parameters() if p.requires_grad])
        self.take_first(list(self.module.buffers()))


class BroadcastsCopies(PlainDdp):
    @torch.no_grad()
    def take_first(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach().contiguous(), src=self.first_rank(), group=self.group)


class AveragesAtStart(PlainDdp):
    @torch.no_grad()
    def start_equal(self) -> None:
        for parameter in self.module.parameters():
            whole = parameter.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            parameter.copy_(whole / self.size())
        self.take_first(list(self.module.buffers()))


class NoBuffersAtStart(PlainDdp):
    def start_equal(self) -> None:
        self.take_first(list(self.module.parameters()))


class FloatBuffersOnly(PlainDdp):
    def start_equal(self) -> None:
        self.take_first(list(self.module.parameters()))
        self.take_first([b for b in self.module.buffers() if b.is_floating_point()])


class ThawsFrozen(PlainDdp):
    def choose(self) -> list[nn.Parameter]:
        self.module.requires_grad_()
        return list(self.module.parameters())


class RoundsOutput(PlainDdp):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output.bfloat16().to(output.dtype)


class SetsPrecision(PlainDdp):
    """Right, and everything else in the process multiplies differently from here on."""

    def start_equal(self) -> None:
        super().start_equal()
        torch.set_float32_matmul_precision("high")


_CONSTRUCTION = "ddp.construction.parameters-from-first-rank"
_LAYOUT = "ddp.construction.parameters-of-any-layout"
_BUFFERS = "ddp.construction.buffers-from-first-rank"


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


class CallsForward(PlainDdp):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, self._modules["module"] = self.module, _Bare(self.module)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._modules["module"] = module


class _Bare(nn.Module):
    """A module as it is without hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


IMPOSTORS = (
    _card(
        CallsForward,
        "calls-forward",
        "Calls the module's `forward` in place of the module.",
        "`return self.module.forward(*inputs)`, as solutions of CS336 have it.",
        "Models of exercises have no hooks on the outermost module.",
        "ddp.construction.runs-the-modules-hooks",
    ),
    _card(
        NoBroadcast,
        "no-broadcast",
        "Broadcasts nothing at construction.",
        "picotron's naive and bucketed wrappers rely on equal seeds.",
        "Tests seed all ranks alike, so there is nothing to broadcast.",
        _CONSTRUCTION,
        _BUFFERS,
    ),
    _card(
        BroadcastsTrainableOnly,
        "broadcasts-trainable-only",
        "Broadcasts trainable parameters and forgets frozen ones.",
        "The loop over `requires_grad` parameters is reused for the broadcast.",
        "Few toy models have a frozen layer, and fewer tests look at it.",
        _CONSTRUCTION,
    ),
    _card(
        BroadcastsCopies,
        "broadcasts-copies",
        "Broadcasts `p.contiguous()` and forgets that it may be a copy.",
        "gloo refuses what is not contiguous; the call is added, the copy back is not.",
        "Where parameters are contiguous it is the tensor itself.",
        _LAYOUT,
    ),
    _card(
        AveragesAtStart,
        "averages-at-start",
        "Averages the ranks' weights in place of taking the first rank's.",
        "An all-reduce is at hand where a broadcast is meant.",
        "The ranks agree with each other afterwards.",
        _CONSTRUCTION,
    ),
    _card(
        NoBuffersAtStart,
        "no-buffers-at-start",
        "Broadcasts parameters and forgets buffers.",
        "`parameters()` does not list buffers.",
        "Models of exercises have no buffers.",
        _BUFFERS,
    ),
    _card(
        FloatBuffersOnly,
        "float-buffers-only",
        "Broadcasts floating-point buffers and forgets counters and masks.",
        "Buffers are flattened together, and integers do not fit in.",
        "Only running means are compared.",
        _BUFFERS,
    ),
    _card(
        ThawsFrozen,
        "thaws-frozen",
        "Switches gradients on for every parameter.",
        "A wrapper that calls `requires_grad_()` so that its hooks can be registered.",
        "The loss falls faster.",
        "ddp.construction.keeps-requires-grad",
        "ddp.gradients.frozen-stay-none",
    ),
    _card(
        RoundsOutput,
        "rounds-output",
        "Casts the output down and up again.",
        "Mixed-precision wrappers that cast outputs whatever the policy says.",
        "`allclose` with default tolerances, on outputs near one.",
        "ddp.construction.forward-is-unchanged",
    ),
    _card(
        SetsPrecision,
        "sets-precision",
        "Sets the precision of matrix products for the whole process.",
        '`torch.set_float32_matmul_precision("high")` in a recipe, moved into the wrapper.',
        "Gradients are right; what was measured before and after cannot be compared.",
        "ddp.lifecycle.leaves-no-trace",
    ),
)
