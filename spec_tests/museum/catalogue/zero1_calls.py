"""Near-misses of the sharded optimizer: what it hands on to the optimizer inside, or drops."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.museum.catalogue.zero1_benign import Elementwise
from spec_tests.museum.catalogue.zero1_updates import StepsAlone
from spec_tests.plain.zero1 import PlainZero1


@near_miss("zero1.drops-keywords", rejected_by="zero1.step.keywords")
class DropsKeywords(PlainZero1):
    """Takes further keywords of `step`, and hands none of them on.

    From: `def step(self, closure=None, **kwargs)`, as the exercise has it, in a solution of CS336.
    Unseen: The steps of Adam and SGD take no other keyword than the closure.
    """

    def step(self, closure=None, **others):
        return super().step(closure)


@near_miss("zero1.clears-groups", rejected_by="zero1.step.counts-in-groups")
class ClearsGroups(PlainZero1):
    """Empties the inner groups before it copies the outer ones.

    From: `local_group.clear(); local_group.update(group)` in each step of a solution of CS336.
    Unseen: Adam and SGD keep nothing in their groups.
    """

    def hand_in(self):
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own = inner["params"]
            inner.clear()
            inner.update({**outer, "params": own})

    def show(self):
        # Of what the inner groups hold, only the options of the caller go outside.
        known = [dict(group) for group in self.param_groups]
        super().show()
        for group, before in zip(self.param_groups, known, strict=True):
            if "steps" in group:
                group["steps"] = before.get("steps", 0)


@near_miss("zero1.clears-to-zero", rejected_by="zero1.step.after-zero-grad")
class ClearsToZero(PlainZero1):
    """`zero_grad` writes zeros unless None is asked for.

    From: The default of torch before 2.0, in a solution of CS336.
    Unseen: Where every parameter is used in every step, zeros are as good as None.
    """

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


@near_miss(
    "zero1.pads-in-single",
    rejected_by="zero1.step.half-precision",
    outcomes=("failed", "hang", "died"),
)
class PadsInSingle(Elementwise):
    """Pads its stretch with float32 zeros, which makes float32 of what is in front of them.

    From: `torch.zeros(n)` without a dtype beside a parameter in bfloat16, in a solution of CS336.
    Unseen: In float32, or where the ranks divide every size, there is nothing to see.
    """

    def padded(self, stretch, number):
        return torch.cat([stretch, torch.zeros(number)]) if number else stretch


@near_miss("zero1.steps-on-stretches", rejected_by="zero1.step.whole-tensors")
class StepsOnStretches(Elementwise):
    """Gives every optimizer flat stretches of the parameters, whatever it does with them.

    From: Equal stretches, as in two solutions of CS336.
    Unseen: SGD and Adam look at each element by itself; Adafactor, LAMB and Muon do not.
    """

    def takes(self, kind):
        return True


@near_miss("zero1.needs-equal-parts", rejected_by="zero1.step.equals-unsharded")
class NeedsEqualParts(Elementwise):
    """Cuts every parameter into equal parts, and fails where there are none.

    From: `chunk(world_size)` before an all-gather, in a solution of CS336.
    Unseen: Layers have even sizes.

    Nothing else is wrong with it, so it fails no other clause.
    """

    def cut(self, whole, rank=None):
        if whole.numel() % self.size():
            raise RuntimeError(f"{whole.numel()} elements for {self.size()} ranks")
        return super().cut(whole, rank)


@near_miss("zero1.averages-gradients", rejected_by="zero1.step.equal-on-all-ranks")
class AveragesGradients(StepsAlone):
    """Averages gradients in the step and sends no weights.

    From: Two readings of "synchronise after the step", in a solution of CS336.
    Unseen: Ranks begin with equal weights, and equal gradients keep them so.
    """

    def update(self, closure):
        for parameter in self.owners:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.size()
        return super().update(closure)


@near_miss("zero1.adds-bare-groups", rejected_by="zero1.groups.added-rate")
class AddsBareGroups(PlainZero1):
    """Keeps the parameters of a group that is added, and not its options.

    From: `super().add_param_group({"params": shards})`, in a solution of CS336.
    Unseen: Groups that are added have the rate of the others.
    """

    def add_param_group(self, param_group):
        bare = {"params": param_group["params"]} if self.inner is not None else param_group
        super().add_param_group(bare)


@near_miss("zero1.steps-under-no-grad", rejected_by="zero1.step.closure")
class StepsUnderNoGrad(PlainZero1):
    """Switches gradients off around all of `step`, the closure among it.

    From: `@torch.no_grad()` above `step`, in solutions of CS336.
    Unseen: PyTorch's optimizers switch them on for the closure; most loops pass none.
    """

    step = torch.no_grad()(PlainZero1.step)


@near_miss("zero1.idle-for-ever", rejected_by="zero1.groups.added-to-an-idle-rank")
class IdleForEver(PlainZero1):
    """Builds its inner optimizer where it owns something at first, and elsewhere never.

    From: `self.inner = None` on a rank without parameters, and `if self.inner` in `step`.
    Unseen: With fewer ranks than parameters every rank owns one from the beginning.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.is_idle = not any(group["params"] for group in self.inner.param_groups)

    def update(self, closure):
        if self.is_idle:
            return None if closure is None else closure()
        return super().update(closure)


@near_miss("zero1.options-before-the-closure", rejected_by="zero1.groups.rate-set-by-closure")
class OptionsBeforeTheClosure(PlainZero1):
    """Hands options to the inner optimizer, and then lets it evaluate the closure.

    From: ours, once, and ZeroRedundancyOptimizer.
    Unseen: Rates are set between steps, by a scheduler.
    """

    def update(self, closure):
        return super().update(None) if closure is None else self.inner.step(closure)


@near_miss(
    "zero1.leaves-without-gradients",
    rejected_by="zero1.step.skips-absent-gradients",
    outcomes=("hang",),
)
class LeavesWithoutGradients(PlainZero1):
    """Returns from a step at once on a rank none of whose own parameters has a gradient.

    From: "nothing to do here", an early return.
    Unseen: All layers run in most models, and each rank owns some.
    """

    def exchange(self):
        own = [p for p in self.owners if self.owned(p)]
        if not own or any(p.grad is not None for p in own):
            super().exchange()


@near_miss("zero1.clears-gradients", rejected_by="zero1.step.keeps-gradients")
class ClearsGradients(PlainZero1):
    """Clears the gradients at the end of a step.

    From: A loop that saves the call of `zero_grad`, in a solution of CS336.
    Unseen: Most loops clear them next.
    """

    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss
