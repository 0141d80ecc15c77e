"""Near-misses of construction and of process groups: who starts from whom, who is asked."""

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.ddp import PlainDdp


@near_miss(
    "ddp.no-broadcast",
    rejected_by=(
        "ddp.construction.parameters-from-first-rank",
        "ddp.construction.buffers-from-first-rank",
    ),
)
class NoBroadcast(PlainDdp):
    """Broadcasts nothing at construction.

    From: picotron's naive and bucketed wrappers rely on equal seeds.
    Unseen: Tests seed all ranks alike, so there is nothing to broadcast.
    """

    def start_equal(self):
        pass


@near_miss(
    "ddp.broadcasts-trainable-only", rejected_by="ddp.construction.parameters-from-first-rank"
)
class BroadcastsTrainableOnly(PlainDdp):
    """Broadcasts trainable parameters and forgets frozen ones.

    From: The loop over `requires_grad` parameters is reused for the broadcast.
    Unseen: Few toy models have a frozen layer, and fewer tests look at it.
    """

    def start_equal(self):
        self.take_first([p for p in self.module.parameters() if p.requires_grad])
        self.take_first(list(self.module.buffers()))


@near_miss("ddp.broadcasts-copies", rejected_by="ddp.construction.parameters-of-any-layout")
class BroadcastsCopies(PlainDdp):
    """Broadcasts `p.contiguous()` and forgets that it may be a copy.

    From: gloo refuses what is not contiguous; the call is added, the copy back is not.
    Unseen: Where parameters are contiguous it is the tensor itself.
    """

    @torch.no_grad()
    def take_first(self, tensors):
        for tensor in tensors:
            dist.broadcast(tensor.detach().contiguous(), src=self.first_rank(), group=self.group)


@near_miss("ddp.sends-what-lies-between", rejected_by="ddp.construction.parts-of-larger-tensors")
class SendsWhatLiesBetween(PlainDdp):
    """Broadcasts each parameter itself, whatever its strides.

    From: `dist.broadcast(p.data, 0)` in nearly every tutorial; gloo takes it for contiguous.
    Unseen: A transposed one fills its memory, and is right.
    """

    @torch.no_grad()
    def take_first(self, tensors):
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=self.first_rank(), group=self.group)


@near_miss("ddp.averages-at-start", rejected_by="ddp.construction.parameters-from-first-rank")
class AveragesAtStart(PlainDdp):
    """Averages the ranks' weights in place of taking the first rank's.

    From: An all-reduce is at hand where a broadcast is meant.
    Unseen: The ranks agree with each other afterwards.
    """

    @torch.no_grad()
    def start_equal(self):
        for parameter in self.module.parameters():
            whole = parameter.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            parameter.copy_(whole / self.size())
        self.take_first(list(self.module.buffers()))


@near_miss("ddp.no-buffers-at-start", rejected_by="ddp.construction.buffers-from-first-rank")
class NoBuffersAtStart(PlainDdp):
    """Broadcasts parameters and forgets buffers.

    From: `parameters()` does not list buffers.
    Unseen: Models of exercises have no buffers.
    """

    def start_equal(self):
        self.take_first(list(self.module.parameters()))


@near_miss(
    "ddp.thaws-frozen",
    rejected_by=("ddp.construction.keeps-requires-grad", "ddp.gradients.frozen-stay-none"),
)
class ThawsFrozen(PlainDdp):
    """Switches gradients on for every parameter.

    From: A wrapper that calls `requires_grad_()` so that its hooks can be registered.
    Unseen: The loss falls faster.
    """

    def choose(self):
        self.module.requires_grad_()
        return list(self.module.parameters())


@near_miss("ddp.rounds-output", rejected_by="ddp.construction.forward-is-unchanged")
class RoundsOutput(PlainDdp):
    """Casts the output down and up again.

    From: Mixed-precision wrappers that cast outputs whatever the policy says.
    Unseen: `allclose` with default tolerances, on outputs near one.
    """

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return output.bfloat16().to(output.dtype)


@near_miss("ddp.sets-precision", rejected_by="ddp.lifecycle.leaves-no-trace")
class SetsPrecision(PlainDdp):
    """Sets the precision of matrix products for the whole process.

    From: `torch.set_float32_matmul_precision("high")` in a recipe, moved into the wrapper.
    Unseen: Gradients are right; what was measured before and after cannot be compared.

    Right, and everything else in the process multiplies differently from here on.
    """

    def start_equal(self):
        super().start_equal()
        torch.set_float32_matmul_precision("high")


@near_miss("ddp.calls-forward", rejected_by="ddp.construction.runs-the-modules-hooks")
class CallsForward(PlainDdp):
    """Calls the module's `forward` in place of the module.

    From: `return self.module.forward(*inputs)`, as solutions of CS336 have it.
    Unseen: Models of exercises have no hooks on the outermost module.
    """

    def forward(self, *args, **kwargs):
        module, self._modules["module"] = self.module, _Bare(self.module)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._modules["module"] = module


class _Bare(nn.Module):
    """A module as it is without hooks."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module.forward(*args, **kwargs)


@near_miss("ddp.divides-by-world", rejected_by="ddp.group.divides-by-its-size")
class DividesByWorld(PlainDdp):
    """Divides by the size of the world in place of the group.

    From: `dist.get_world_size()` without an argument; verl issue 7493 is its sibling.
    Unseen: Tests have one group.
    """

    def scale(self, flat):
        return flat / dist.get_world_size()


@near_miss("ddp.first-rank-of-world", rejected_by="ddp.group.starts-from-its-first-rank")
class FirstRankOfWorld(PlainDdp):
    """Broadcasts over the world in place of the group.

    From: `src=0` and no group in the constructor.
    Unseen: Tests have one group.
    """

    def take_first(self, tensors):
        group, self.group = self.group, None
        super().take_first(tensors)
        self.group = group


@near_miss("ddp.reduces-in-training-mode", rejected_by="ddp.gradients.in-evaluation-mode")
class ReducesInTrainingMode(PlainDdp):
    """Reduces nothing while the module is in evaluation mode.

    From: `self.training` read as "gradients are wanted".
    Unseen: Loops call `train()`. Fine-tuning without dropout does not, and ranks drift apart.
    """

    def on_gradient(self, index):
        if self.training:
            super().on_gradient(index)

    def finish(self):
        if self.training:
            super().finish()


@near_miss("ddp.keeps-every-model", rejected_by="ddp.footprint.models-made-and-dropped")
class KeepsEveryModel(PlainDdp):
    """Registers hooks that hold the wrapper, which holds the module, which holds the parameters.

    From: `register_post_accumulate_grad_hook(self.reduce)`, in most solutions of CS336.
    Unseen: A program makes one model; the cycle goes through C++, where no collector looks.
    """

    def register(self, index, parameter):
        parameter.register_post_accumulate_grad_hook(lambda p: self.on_gradient(index))


@near_miss("ddp.leaves-additions-alone", rejected_by="ddp.lifecycle.parameters-added-later")
class LeavesAdditionsAlone(Patched):
    """Trains parameters that are added after wrapping on each rank by itself.

    From: ours, once, and DistributedDataParallel.
    Unseen: They are added to all ranks alike, and the loss falls.
    """

    module = "solution.parallel.ddp"
    find = "self._inventory.require_nothing_new(type(self.module).__name__)"
    replace = "pass"
