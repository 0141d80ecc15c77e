"""Near-misses of the sharded optimizer: who updates what, and parameter groups."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.plain.zero1 import PlainZero1


@near_miss(
    "zero1.never-exchanges",
    rejected_by=("zero1.step.equals-unsharded", "zero1.step.more-ranks-than-parameters"),
)
class NeverExchanges(PlainZero1):
    """Updates what it owns and sends nothing.

    From: The broadcast after the step is forgotten.
    Unseen: Tests that look at one rank's own parameters.
    """

    def exchange(self):
        pass


@near_miss(
    "zero1.steps-alone",
    rejected_by=(
        "zero1.state.divided",
        "zero1.step.equal-on-all-ranks",
        "zero1.footprint.state-is-a-share",
    ),
)
class StepsAlone(PlainZero1):
    """Is the plain optimizer on every rank.

    From: CS336's tests of the sharded optimizer accept it: all ranks see the same data.
    Unseen: Weights are right as long as gradients are equal to the bit.
    """

    def owned(self, parameter):
        return True

    def exchange(self):
        pass


@near_miss(
    "zero1.averages-weights",
    rejected_by=("zero1.step.one-owner-decides", "zero1.traffic.one-copy-per-step"),
)
class AveragesWeights(StepsAlone):
    """Updates everything on every rank and averages the weights.

    From: A repair for replicas that drifted apart.
    Unseen: With equal gradients the average is what each rank has.
    """

    @torch.no_grad()
    def exchange(self):
        for parameter in self.owners:
            whole = parameter.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            parameter.copy_(whole / self.size())


@near_miss("zero1.sends-piece-by-piece", rejected_by="zero1.traffic.few-messages")
class SendsPieceByPiece(PlainZero1):
    """Broadcasts every parameter in a message of its own.

    From: A loop over parameters; ZeroRedundancyOptimizer's default
    Unseen: All weights are right, and one machine's latency is small.

    Right, and as slow as the number of parameters makes it.
    """


@near_miss("zero1.fills-none", rejected_by="zero1.step.skips-absent-gradients")
class FillsNone(PlainZero1):
    """Takes zero for a gradient that is None.

    From: Megatron-LM issue 5974: flat buffers have no None.
    Unseen: Every parameter is used in every step.
    """

    def update(self, closure):
        for parameter in self.owners:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().update(closure)


@near_miss("zero1.thaws-frozen", rejected_by="zero1.step.frozen-untouched")
class ThawsFrozen(PlainZero1):
    """Takes zero for the gradient of a frozen parameter, and so decays it.

    From: Flat buffers over all parameters.
    Unseen: Without weight decay nothing is seen.
    """

    def update(self, closure):
        for parameter in self.owners:
            if parameter.grad is None and not parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().update(closure)


@near_miss("zero1.leaves-out-frozen", rejected_by="zero1.step.thawed-later")
class LeavesOutFrozen(PlainZero1):
    """Has no optimizer for what was frozen at construction.

    From: `[p for p in params if p.requires_grad]`.
    Unseen: Few train in stages, and what stays frozen is right.
    """

    def own_part(self, group):
        mine = [p for p in group["params"] if self.owned(p) and p.requires_grad]
        return {**group, "params": mine}


@near_miss("zero1.refuses-to-own-nothing", rejected_by="zero1.step.more-ranks-than-parameters")
class RefusesToOwnNothing(PlainZero1):
    """Raises on a rank that owns no parameter.

    From: torch.optim refuses an empty list, on one rank alone.
    Unseen: Models have more parameters than tests have ranks.

    Hands its own parameters over without groups, where torch.optim wants at least one.
    """

    def update(self, closure):
        if not any(group["params"] for group in self.inner.param_groups):
            raise ValueError("optimizer got an empty parameter list")
        return super().update(closure)


@near_miss("zero1.drops-closure", rejected_by="zero1.step.closure")
class DropsClosure(PlainZero1):
    """Evaluates the closure after the update.

    From: `step(closure)` is an afterthought.
    Unseen: Nobody passes closures to Adam.
    """

    def update(self, closure):
        super().update(None)
        return None if closure is None else closure()


@near_miss("zero1.shares-its-owners", rejected_by="zero1.step.two-optimizers")
class SharesItsOwners(PlainZero1):
    """Sends the parameters of whichever optimizer was made last.

    From: `owners: dict = {}` in the class in place of the constructor, in a solution of CS336.
    Unseen: A program has one optimizer.

    Who owns what is kept in the class, and begins anew with each optimizer.
    """

    shared: ClassVar[dict[torch.Tensor, int]] = {}

    def __init__(self, *args):
        SharesItsOwners.shared.clear()
        super().__init__(*args)

    def deal(self, parameters):
        super().deal(parameters)
        SharesItsOwners.shared.update(self.owners)

    def exchange(self):
        for parameter, owner in self.shared.items():
            self.take(parameter, owner)


@near_miss("zero1.drops-wait", rejected_by="zero1.step.waits-for-late-owners")
class DropsWait(PlainZero1):
    """Returns while the exchange is under way.

    From: DeepSpeed issues 5545, 6351 and 8061: the exchange overlaps with the next forward.
    Unseen: With punctual ranks small messages arrive in time.
    """

    def exchange(self):
        self.flying = [
            dist.broadcast(p.detach(), group=self.group, group_src=owner, async_op=True)
            for p, owner in self.owners.items()
        ]

    def hand_in(self):
        for handle in getattr(self, "flying", ()):  # before the next step changes them
            handle.wait()
        super().hand_in()


@near_miss("zero1.flattens-in-memory-order", rejected_by="zero1.step.layouts")
class FlattensInMemoryOrder(PlainZero1):
    """Sends a parameter as it lies in memory and reads it row by row.

    From: A flat view of the storage in place of the tensor.
    Unseen: Parameters are contiguous, nearly always.
    """

    @torch.no_grad()
    def take(self, parameter, owner):
        flat = parameter.detach().as_strided((parameter.numel(),), (1,)).clone()
        dist.broadcast(flat, group=self.group, group_src=owner)
        parameter.copy_(flat.view(parameter.shape))


@near_miss("zero1.sends-what-lies-between", rejected_by="zero1.step.parts-of-larger-tensors")
class SendsWhatLiesBetween(PlainZero1):
    """Broadcasts each parameter itself, whatever its strides.

    From: ZeroRedundancyOptimizer; gloo takes such a tensor for a contiguous one.
    Unseen: A transposed one fills its memory, and is right.
    """

    @torch.no_grad()
    def take(self, parameter, owner):
        dist.broadcast(parameter.detach(), group=self.group, group_src=owner)


@near_miss("zero1.sends-in-single", rejected_by="zero1.step.dtypes")
class SendsInSingle(PlainZero1):
    """Sends every parameter as float32.

    From: One flat buffer for all dtypes.
    Unseen: Models are float32.
    """

    @torch.no_grad()
    def take(self, parameter, owner):
        whole = parameter.detach().float().contiguous()
        dist.broadcast(whole, group=self.group, group_src=owner)
        parameter.copy_(whole)


@near_miss("zero1.updates-each-name", rejected_by="zero1.step.tied-parameter")
class UpdatesEachName(PlainZero1):
    """Updates a tied parameter once for each of its names.

    From: Parameters are taken with remove_duplicate=False and dealt by name.
    Unseen: No test model ties anything; a famous one that says so does not.

    Steps once more for what is used twice: here, for matrices of equal sides.
    """

    def update(self, closure):
        loss = super().update(closure)
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                    with torch.no_grad():
                        parameter.sub_(group["lr"] * parameter.grad)
        return loss


@near_miss(
    "zero1.copies-options-once", rejected_by=("zero1.groups.live", "zero1.groups.schedulers")
)
class CopiesOptionsOnce(PlainZero1):
    """Copies options at construction.

    From: pytorch issue 60284: the inner optimizer's groups go stale.
    Unseen: Tests train at a constant rate.
    """

    def hand_in(self):
        pass


@near_miss("zero1.hands-in-rates-only", rejected_by="zero1.groups.live")
class HandsInRatesOnly(PlainZero1):
    """Hands on a changed rate, and no other option.

    From: The fix of a stale rate, for the rate.
    Unseen: Schedules of decay and momentum are rare.
    """

    def hand_in(self):
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]


@near_miss("zero1.drops-empty-groups", rejected_by="zero1.groups.own-options")
class DropsEmptyGroups(PlainZero1):
    """Pairs outer groups with those inner ones that are not empty on this rank.

    From: `if own: groups.append(...)`, and options copied by position.
    Unseen: A group that has parameters on every rank.
    """

    def hand_in(self):
        kept = [g for g in self.inner.param_groups if g["params"]]
        for outer, inner in zip(self.param_groups, kept, strict=False):
            inner.update({k: v for k, v in outer.items() if k != "params"})


@near_miss("zero1.forgets-late-groups", rejected_by="zero1.groups.added-later")
class ForgetsLateGroups(PlainZero1):
    """Takes no notice of groups that are added after construction.

    From: The partition is made in the constructor.
    Unseen: Tests add no groups.
    """

    def add_param_group(self, param_group):
        if self.inner is None:
            super().add_param_group(param_group)
        else:
            torch.optim.Optimizer.add_param_group(self, param_group)

    def hand_in(self):
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=False):
            inner.update({k: v for k, v in outer.items() if k != "params"})


@near_miss("zero1.clears-own-gradients", rejected_by="zero1.groups.zero-grad")
class ClearsOwnGradients(PlainZero1):
    """`zero_grad` clears the gradients of what it owns.

    From: `zero_grad` is handed to the inner optimizer.
    Unseen: Tests clear through the model.
    """

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@near_miss(
    "zero1.owners-of-the-world",
    rejected_by="zero1.group.keeps-to-itself",
    outcomes=("failed", "hang", "died"),
)
class OwnersOfTheWorld(PlainZero1):
    """Deals to, and broadcasts over, the world in place of the group.

    From: `dist.get_world_size()` and no group in the broadcast.
    Unseen: Tests have one group.
    """

    def size(self):
        return dist.get_world_size()

    def rank(self):
        return dist.get_rank()

    @torch.no_grad()
    def take(self, parameter, owner):
        whole = parameter.detach().contiguous()
        dist.broadcast(whole, src=owner)
        parameter.copy_(whole)


@near_miss(
    "zero1.compares-nothing",
    rejected_by=("zero1.refusals.unequal-ranks", "zero1.refusals.sparse"),
    outcomes=("failed", "hang", "died"),
)
class ComparesNothing(PlainZero1):
    """Trusts that all ranks were given the same, and that it is dense.

    From: ZeroRedundancyOptimizer does, and so does every exercise.
    Unseen: Ranks run the same script.
    """


@near_miss("zero1.keeps-copies-of-weights", rejected_by="zero1.step.weights-of-others")
class KeepsCopiesOfWeights(PlainZero1):
    """Updates copies of the weights that it has made at construction.

    From: A flat master copy of float32 weights, as mixed precision needs one.
    Unseen: Nobody else writes the weights of a plain training loop.
    """

    copies = None

    @torch.no_grad()
    def step(self, closure=None):
        if self.copies is None:
            self.copies = {p: p.detach().clone() for p in self.owners}
        for parameter, copy in self.copies.items():
            parameter.copy_(copy)
        loss = super().step(closure)
        self.copies = {p: p.detach().clone() for p in self.owners}
        return loss


@near_miss("zero1.exchanges-when-eager", rejected_by="zero1.compile.step")
class ExchangesWhenEager(PlainZero1):
    """Sends nothing in a step that is traced.

    From: `if not torch.compiler.is_compiling()` around what breaks a graph.
    Unseen: Each rank updates what it owns; the others keep their first values.
    """

    def exchange(self):
        if not torch.compiler.is_compiling():
            super().exchange()
