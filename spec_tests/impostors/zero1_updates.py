"""Near-misses of the sharded optimizer's steps: some weight is not what it should be."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from spec_tests.impostors.plain_zero1 import Group, PlainZero1, card


class NeverExchanges(PlainZero1):
    def exchange(self) -> None:
        pass


class StepsAlone(PlainZero1):
    """The plain optimizer on every rank."""

    def owned(self, parameter: torch.Tensor) -> bool:
        return True

    def exchange(self) -> None:
        pass


class AveragesWeights(StepsAlone):
    @torch.no_grad()
    def exchange(self) -> None:
        for parameter in self.owners:
            whole = parameter.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            parameter.copy_(whole / self.size())


class SendsPieceByPiece(PlainZero1):
    """Right, and as slow as the number of parameters makes it."""


class FillsNone(PlainZero1):
    def update(self, closure: Any) -> Any:
        for parameter in self.owners:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().update(closure)


class ThawsFrozen(PlainZero1):
    def update(self, closure: Any) -> Any:
        for parameter in self.owners:
            if parameter.grad is None and not parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().update(closure)


class LeavesOutFrozen(PlainZero1):
    """Deals out what trains at construction, and nothing else."""

    def own_part(self, group: Group) -> Group:
        mine = [p for p in group["params"] if self.owned(p) and p.requires_grad]
        return {**group, "params": mine}


class RefusesToOwnNothing(PlainZero1):
    """Hands its own parameters over without groups, where torch.optim wants at least one."""

    def update(self, closure: Any) -> Any:
        if not any(group["params"] for group in self.inner.param_groups):
            raise ValueError("optimizer got an empty parameter list")
        return super().update(closure)


class DropsClosure(PlainZero1):
    def update(self, closure: Any) -> Any:
        super().update(None)
        return None if closure is None else closure()


class SharesItsOwners(PlainZero1):
    """Who owns what is kept in the class, and begins anew with each optimizer."""

    shared: ClassVar[dict[torch.Tensor, int]] = {}

    def __init__(self, *args: Any) -> None:
        SharesItsOwners.shared.clear()
        super().__init__(*args)

    def deal(self, parameters: list[torch.Tensor]) -> None:
        super().deal(parameters)
        SharesItsOwners.shared.update(self.owners)

    def exchange(self) -> None:
        for parameter, owner in self.shared.items():
            self.take(parameter, owner)


class EvaluatesTwice(PlainZero1):
    def update(self, closure: Any) -> Any:
        if closure is not None:
            closure()
        return super().update(closure)


class DropsWait(PlainZero1):
    def exchange(self) -> None:
        self.flying = [
            dist.broadcast(p.detach(), group=self.group, group_src=owner, async_op=True)
            for p, owner in self.owners.items()
        ]

    def hand_in(self) -> None:
        for handle in getattr(self, "flying", ()):  # before the next step changes them
            handle.wait()
        super().hand_in()


class FlattensInMemoryOrder(PlainZero1):
    """Sends what lies in memory and lays it out row by row."""

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        flat = parameter.detach().as_strided((parameter.numel(),), (1,)).clone()
        dist.broadcast(flat, group=self.group, group_src=owner)
        parameter.copy_(flat.view(parameter.shape))


class SendsInSingle(PlainZero1):
    @torch.no_grad()
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        whole = parameter.detach().float().contiguous()
        dist.broadcast(whole, group=self.group, group_src=owner)
        parameter.copy_(whole)


class UpdatesEachName(PlainZero1):
    """Steps once more for what is used twice: here, for matrices of equal sides."""

    def update(self, closure: Any) -> Any:
        loss = super().update(closure)
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                    with torch.no_grad():
                        parameter.sub_(group["lr"] * parameter.grad)
        return loss


IMPOSTORS = (
    card(
        NeverExchanges,
        "never-exchanges",
        "Updates what it owns and sends nothing.",
        "The broadcast after the step is forgotten.",
        "Tests that look at one rank's own parameters.",
        "zero1.step.equals-unsharded",
        "zero1.step.more-ranks-than-parameters",
    ),
    card(
        StepsAlone,
        "steps-alone",
        "Is the plain optimizer on every rank.",
        "CS336's tests of the sharded optimizer accept it: all ranks see the same data.",
        "Weights are right as long as gradients are equal to the bit.",
        "zero1.state.divided",
        "zero1.step.equal-on-all-ranks",
        "zero1.footprint.state-is-a-share",
    ),
    card(
        AveragesWeights,
        "averages-weights",
        "Updates everything on every rank and averages the weights.",
        "A repair for replicas that drifted apart.",
        "With equal gradients the average is what each rank has.",
        "zero1.step.one-owner-decides",
        "zero1.traffic.one-copy-per-step",
    ),
    card(
        FillsNone,
        "fills-none",
        "Takes zero for a gradient that is None.",
        "Megatron-LM issue 5974: flat buffers have no None.",
        "Every parameter is used in every step.",
        "zero1.step.skips-absent-gradients",
    ),
    card(
        LeavesOutFrozen,
        "leaves-out-frozen",
        "Has no optimizer for what was frozen at construction.",
        "`[p for p in params if p.requires_grad]`.",
        "Few train in stages, and what stays frozen is right.",
        "zero1.step.thawed-later",
    ),
    card(
        ThawsFrozen,
        "thaws-frozen",
        "Takes zero for the gradient of a frozen parameter, and so decays it.",
        "Flat buffers over all parameters.",
        "Without weight decay nothing is seen.",
        "zero1.step.frozen-untouched",
    ),
    card(
        RefusesToOwnNothing,
        "refuses-to-own-nothing",
        "Raises on a rank that owns no parameter.",
        "torch.optim refuses an empty list, on one rank alone.",
        "Models have more parameters than tests have ranks.",
        "zero1.step.more-ranks-than-parameters",
    ),
    card(
        DropsClosure,
        "drops-closure",
        "Evaluates the closure after the update.",
        "`step(closure)` is an afterthought.",
        "Nobody passes closures to Adam.",
        "zero1.step.closure",
    ),
    card(
        SharesItsOwners,
        "shares-its-owners",
        "Sends the parameters of whichever optimizer was made last.",
        "`owners: dict = {}` in the class in place of the constructor, in a solution of CS336.",
        "A program has one optimizer.",
        "zero1.step.two-optimizers",
    ),
    card(
        EvaluatesTwice,
        "evaluates-twice",
        "Evaluates the closure for its loss, and hands it to the inner optimizer as well.",
        "A wrapper that keeps the loss of its own call, in a solution of CS336.",
        "A closure without randomness gives the same weights.",
        "zero1.step.closure",
    ),
    card(
        DropsWait,
        "drops-wait",
        "Returns while the exchange is under way.",
        "DeepSpeed issues 5545, 6351 and 8061: the exchange overlaps with the next forward.",
        "With punctual ranks small messages arrive in time.",
        "zero1.step.waits-for-late-owners",
    ),
    card(
        FlattensInMemoryOrder,
        "flattens-in-memory-order",
        "Sends a parameter as it lies in memory and reads it row by row.",
        "A flat view of the storage in place of the tensor.",
        "Parameters are contiguous, nearly always.",
        "zero1.step.layouts",
    ),
    card(
        SendsInSingle,
        "sends-in-single",
        "Sends every parameter as float32.",
        "One flat buffer for all dtypes.",
        "Models are float32.",
        "zero1.step.dtypes",
    ),
    card(
        UpdatesEachName,
        "updates-each-name",
        "Updates a tied parameter once for each of its names.",
        "Parameters are taken with remove_duplicate=False and dealt by name.",
        "No test model ties anything; a famous one that says so does not.",
        "zero1.step.tied-parameter",
    ),
    card(
        SendsPieceByPiece,
        "sends-piece-by-piece",
        "Broadcasts every parameter in a message of its own.",
        "A loop over parameters; ZeroRedundancyOptimizer's default",
        "All weights are right, and one machine's latency is small.",
        "zero1.traffic.few-messages",
    ),
)
