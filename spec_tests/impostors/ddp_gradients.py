"""Near-misses of gradients: the wrong divisor, the wrong dtype, the wrong tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class SumForMean(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


class DividesTwice(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / self.size() / self.size()


class DividesByPeers(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / (self.size() - 1 or 0.5)


class ReducesInBfloat16(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return (flat / self.size()).bfloat16()


class AveragesTheHooksArgument(PlainDdp):
    @torch.no_grad()
    def register(self, index: int, parameter: nn.Parameter) -> None:
        def hook(gradient: torch.Tensor) -> None:  # it is the parameter that arrives here
            with torch.no_grad():
                whole = gradient.detach().contiguous()
                dist.all_reduce(whole, group=self.group)
                gradient.copy_(whole / self.size())

        parameter.register_post_accumulate_grad_hook(hook)

    def finish(self) -> None:
        pass  # "the hooks have done it all"


class ScalesEachName(PlainDdp):
    def finish(self) -> None:
        if self.has_news:
            for _, parameter in self.module.named_parameters(remove_duplicate=False):
                if parameter.grad is not None:
                    parameter.grad /= self.size()
        super().finish()

    def launch_what_is_ready(self) -> None:
        pass  # everything in finish

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


class AveragesOverUses(PlainDdp):
    def __init__(self, *args: Any) -> None:
        self.uses: dict[nn.Module, int] = {}
        super().__init__(*args)
        for child in self.module.modules():
            child.register_forward_pre_hook(self.count)

    def count(self, child: nn.Module, inputs: Any) -> None:
        self.uses[child] = self.uses.get(child, 0) + 1

    def finish(self) -> None:
        news = self.has_news
        super().finish()
        for child, uses in self.uses.items():
            for parameter in child.parameters(recurse=False):
                if news and parameter.grad is not None:
                    parameter.grad /= uses
        self.uses.clear()


class FillsFrozen(PlainDdp):
    def finish(self) -> None:
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class WritesIntoCopies(PlainDdp):
    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            gradient = self.trainable[index].grad
            if gradient is not None:
                gradient.reshape(-1).copy_(mean.reshape(-1))  # a copy, if the layout is unusual


class MeanOverForwards(PlainDdp):
    def __init__(self, *args: Any) -> None:
        self.forwards = 0
        super().__init__(*args)

    def before_training_forward(self) -> None:
        self.forwards += 1
        super().before_training_forward()

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return super().scale(flat) / max(self.forwards, 1)

    def new_round(self) -> None:
        super().new_round()
        self.forwards = 0


class ClampsGradients(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return super().scale(flat).clamp(-50.0, 50.0)


_MEAN = "ddp.gradients.mean"


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


IMPOSTORS = (
    _card(
        SumForMean,
        "sum-for-mean",
        "Sums gradients and never divides.",
        "The commonest fault of all; Adam is invariant to it.",
        "Adam's curves are the same; only a scale of the gradients tells.",
        _MEAN,
        "ddp.training.equals-full-batch",
    ),
    _card(
        DividesTwice,
        "divides-twice",
        "Divides by the world size twice.",
        "The loss is a mean over the global batch already, or a division follows ReduceOp.AVG.",
        "As with the sum: Adam does not care.",
        _MEAN,
    ),
    _card(
        DividesByPeers,
        "divides-by-peers",
        "Divides by the number of the other ranks.",
        "Off by one in `world_size - 1`, with a special case for one rank.",
        "At two ranks it is a sum, which Adam hides.",
        _MEAN,
        "ddp.gradients.single-rank",
    ),
    _card(
        ReducesInBfloat16,
        "reduces-in-bfloat16",
        "Reduces in bfloat16 and casts back.",
        "Gradient compression that is on by default.",
        "A relative error of 2**-8 passes a tolerance of 1e-2.",
        _MEAN,
        "ddp.gradients.mean-at-any-seed",
    ),
    _card(
        AveragesTheHooksArgument,
        "averages-the-hooks-argument",
        "Averages the weights and leaves the gradients local.",
        "picotron issue 39: a post-accumulate hook is handed the parameter, not the gradient.",
        "The loss curve is plausible, and after each step the weights are averaged again.",
        "ddp.gradients.weights-untouched",
        _MEAN,
    ),
    _card(
        ScalesEachName,
        "scales-each-name",
        "Divides a tied parameter once for each of its names.",
        "`named_parameters(remove_duplicate=False)`, or a loop over modules.",
        "The fixture called tied ties nothing (the CS336 changelog confesses one).",
        "ddp.gradients.tied-parameter",
    ),
    _card(
        AveragesOverUses,
        "averages-over-uses",
        "Divides the gradient of a module that is applied twice by two.",
        "Reductions that hang on a module's backward hook and correct for repeated calls.",
        "No toy applies a module twice.",
        "ddp.gradients.reused-module",
    ),
    _card(
        FillsFrozen,
        "fills-frozen",
        "Gives frozen parameters a gradient of zeros.",
        "Flat buffers over all parameters, views handed out to all.",
        "SGD does not move them; AdamW decays them.",
        "ddp.gradients.frozen-stay-none",
    ),
    _card(
        WritesIntoCopies,
        "writes-into-copies",
        "Writes the mean through `reshape`, which copies an unusual layout.",
        "`grad.reshape(-1).copy_(...)`, the habit of every flat buffer.",
        "Contiguous gradients are views, and toys have no others.",
        "ddp.gradients.dtype-and-layout",
    ),
    _card(
        MeanOverForwards,
        "mean-over-forwards",
        "Divides by the number of forwards since the last step.",
        "Averaging over micro-batches is built into the wrapper.",
        "One forward per backward, everywhere.",
        "ddp.gradients.two-forwards-one-backward",
    ),
    _card(
        ClampsGradients,
        "clamps-gradients",
        "Clamps every gradient.",
        "A safety belt against overflow in a low-precision reduction.",
        "Gradients of toys are small.",
        "ddp.gradients.loss-scale-invariance",
        _MEAN,
    ),
)
