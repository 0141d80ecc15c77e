"""Near-misses of gradients: the wrong divisor, the wrong dtype, the wrong tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.museum.card import near_miss
from spec_tests.plain.ddp import PlainDdp


@near_miss("ddp.sum-for-mean", rejected_by=("ddp.gradients.mean", "ddp.training.equals-full-batch"))
class SumForMean(PlainDdp):
    """Sums gradients and never divides.

    From: The commonest fault of all; Adam is invariant to it.
    Unseen: Adam's curves are the same; only a scale of the gradients tells.
    """

    def scale(self, flat):
        return flat.clone()


@near_miss("ddp.divides-twice", rejected_by="ddp.gradients.mean")
class DividesTwice(PlainDdp):
    """Divides by the world size twice.

    From: The loss is a mean over the global batch already, or a division follows ReduceOp.AVG.
    Unseen: As with the sum: Adam does not care.
    """

    def scale(self, flat):
        return flat / self.size() / self.size()


@near_miss("ddp.divides-by-peers", rejected_by=("ddp.gradients.mean", "ddp.gradients.single-rank"))
class DividesByPeers(PlainDdp):
    """Divides by the number of the other ranks.

    From: Off by one in `world_size - 1`, with a special case for one rank.
    Unseen: At two ranks it is a sum, which Adam hides.
    """

    def scale(self, flat):
        return flat / (self.size() - 1 or 0.5)


@near_miss(
    "ddp.reduces-in-bfloat16", rejected_by=("ddp.gradients.mean", "ddp.gradients.mean-at-any-seed")
)
class ReducesInBfloat16(PlainDdp):
    """Reduces in bfloat16 and casts back.

    From: Gradient compression that is on by default.
    Unseen: A relative error of 2**-8 passes a tolerance of 1e-2.
    """

    def scale(self, flat):
        return (flat / self.size()).bfloat16()


@near_miss(
    "ddp.averages-the-hooks-argument",
    rejected_by=("ddp.gradients.weights-untouched", "ddp.gradients.mean"),
)
class AveragesTheHooksArgument(PlainDdp):
    """Averages the weights and leaves the gradients local.

    From: picotron issue 39: a post-accumulate hook is handed the parameter, not the gradient.
    Unseen: The loss curve is plausible, and after each step the weights are averaged again.
    """

    @torch.no_grad()
    def register(self, index, parameter):
        def hook(gradient):  # it is the parameter that arrives here
            with torch.no_grad():
                whole = gradient.detach().contiguous()
                dist.all_reduce(whole, group=self.group)
                gradient.copy_(whole / self.size())

        parameter.register_post_accumulate_grad_hook(hook)

    def finish(self):
        pass  # "the hooks have done it all"


@near_miss("ddp.scales-each-name", rejected_by="ddp.gradients.tied-parameter")
class ScalesEachName(PlainDdp):
    """Divides a tied parameter once for each of its names.

    From: `named_parameters(remove_duplicate=False)`, or a loop over modules.
    Unseen: The fixture called tied ties nothing (the CS336 changelog confesses one).
    """

    def finish(self):
        if self.has_news:
            for _, parameter in self.module.named_parameters(remove_duplicate=False):
                if parameter.grad is not None:
                    parameter.grad /= self.size()
        super().finish()

    def launch_what_is_ready(self):
        pass  # everything in finish

    def scale(self, flat):
        return flat.clone()


@near_miss("ddp.averages-over-uses", rejected_by="ddp.gradients.reused-module")
class AveragesOverUses(PlainDdp):
    """Divides the gradient of a module that is applied twice by two.

    From: Reductions that hang on a module's backward hook and correct for repeated calls.
    Unseen: No toy applies a module twice.
    """

    def __init__(self, *args):
        self.uses: dict[nn.Module, int] = {}
        super().__init__(*args)
        for child in self.module.modules():
            child.register_forward_pre_hook(self.count)

    def count(self, child, inputs):
        self.uses[child] = self.uses.get(child, 0) + 1

    def finish(self):
        news = self.has_news
        super().finish()
        for child, uses in self.uses.items():
            for parameter in child.parameters(recurse=False):
                if news and parameter.grad is not None:
                    parameter.grad /= uses
        self.uses.clear()


@near_miss("ddp.fills-frozen", rejected_by="ddp.gradients.frozen-stay-none")
class FillsFrozen(PlainDdp):
    """Gives frozen parameters a gradient of zeros.

    From: Flat buffers over all parameters, views handed out to all.
    Unseen: SGD does not move them; AdamW decays them.
    """

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@near_miss("ddp.writes-into-copies", rejected_by="ddp.gradients.dtype-and-layout")
class WritesIntoCopies(PlainDdp):
    """Writes the mean through `reshape`, which copies an unusual layout.

    From: `grad.reshape(-1).copy_(...)`, the habit of every flat buffer.
    Unseen: Contiguous gradients are views, and toys have no others.
    """

    @torch.no_grad()
    def write_back(self, bucket, flat, used):
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            gradient = self.trainable[index].grad
            if gradient is not None:
                gradient.reshape(-1).copy_(mean.reshape(-1))  # a copy, if the layout is unusual


@near_miss("ddp.strides-of-its-parameters", rejected_by="ddp.gradients.parts-of-larger-tensors")
class StridesOfItsParameters(PlainDdp):
    """Cuts its buckets with the strides of the parameters.

    From: `flat.as_strided(p.shape, p.stride(), offset)`, so that a gradient lies as its parameter.
    Unseen: It is right for each layout that fills its memory.
    """

    def __init__(self, module, group=None, bucket_bytes=0.0):
        super().__init__(module, group, 2**30)

    def flatten(self, bucket):
        flat = super().flatten(bucket)
        for place, index in zip(self.cut(bucket, flat), bucket, strict=True):
            place.copy_(self.local(index))
        return flat

    def cut(self, bucket, flat):
        whole, places, offset = [self.trainable[index] for index in bucket], [], 0
        for parameter in whole:
            places.append(flat.as_strided(parameter.shape, parameter.stride(), offset))
            offset += parameter.numel()
        return places


@near_miss("ddp.takes-positions-alone", rejected_by="ddp.gradients.called-by-keyword")
class TakesPositionsAlone(PlainDdp):
    """Hands on positional arguments alone.

    From: `def forward(self, *inputs): return self.module(*inputs)`.
    Unseen: A toy has one input.
    """

    def forward(self, *inputs):
        return super().forward(*inputs)


@near_miss("ddp.mean-over-forwards", rejected_by="ddp.gradients.two-forwards-one-backward")
class MeanOverForwards(PlainDdp):
    """Divides by the number of forwards since the last step.

    From: Averaging over micro-batches is built into the wrapper.
    Unseen: One forward per backward, everywhere.
    """

    def __init__(self, *args):
        self.forwards = 0
        super().__init__(*args)

    def before_training_forward(self):
        self.forwards += 1
        super().before_training_forward()

    def scale(self, flat):
        return super().scale(flat) / max(self.forwards, 1)

    def new_round(self):
        super().new_round()
        self.forwards = 0


@near_miss(
    "ddp.clamps-gradients",
    rejected_by=("ddp.gradients.loss-scale-invariance", "ddp.gradients.mean"),
)
class ClampsGradients(PlainDdp):
    """Clamps every gradient.

    From: A safety belt against overflow in a low-precision reduction.
    Unseen: Gradients of toys are small.
    """

    def scale(self, flat):
        return super().scale(flat).clamp(-50.0, 50.0)


@near_miss("ddp.averages-what-the-hook-gets", rejected_by="ddp.gradients.shared-by-autograd")
class AveragesWhatTheHookGets(PlainDdp):
    """Averages the gradient in place in a hook on the tensor, before it is accumulated.

    From: `p.register_hook(all_reduce)`, in a solution of CS336; torch says that hooks must not.
    Unseen: Only a sum passes one tensor on to two, and batches broadcast the bias of a layer.
    """

    def register(self, index, parameter):
        parameter.register_hook(self.average)

    def average(self, gradient):
        gradient /= self.size()
        dist.all_reduce(gradient, group=self.group)

    def finish(self):
        pass
