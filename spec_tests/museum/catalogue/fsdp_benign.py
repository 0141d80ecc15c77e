"""Right but unusual sharded modules, and near-misses at the edges: other worlds, odd moments."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from spec_tests.museum.card import benign, near_miss
from spec_tests.plain.fsdp import Done
from spec_tests.plain.fully_shard import PlainFsdp


@benign("benign.fsdp-piecemeal")
class Piecemeal(PlainFsdp):
    """Parameter by parameter, all-reduce and slice, divides first.

    One parameter at a time, nothing ahead of its use, everything reduced everywhere. Gathers by
    broadcasts and whenever it has not just gathered; divides first.
    """

    def by_dtype(self):
        return [[piece] for piece in self.pieces]

    def prefetch(self):
        pass

    def is_fresh(self):
        return False

    def send_gather(self, whole, own):
        parts = whole.view(self.size(), -1)
        parts[self.rank()] = own
        for rank, part in enumerate(parts):
            dist.broadcast(part, group_src=rank, group=self.group)
        return Done()

    def reduce(self, pieces):
        for piece in pieces:
            super().reduce([piece])

    def cast_for_reduce(self, flat):
        return flat / self.size()

    def send_reduction(self, flat):
        whole = flat.reshape(-1).clone()
        dist.all_reduce(whole, group=self.group)
        return whole.view(self.size(), -1)[self.rank()].clone()

    def divisor(self):
        return self.mesh.size() // self.size()


@benign("benign.fsdp-refuses-after-failure")
class RefusesAfterFailure(PlainFsdp):
    """An error after an interrupted backward, and reductions by all-to-all.

    After a backward that did not end, the model says so and does no more. A rank gets its piece of
    everyone's gradients and adds them up.
    """

    def send_reduction(self, flat):
        pieces = torch.empty_like(flat.reshape(-1))
        dist.all_to_all_single(pieces, flat.reshape(-1), group=self.group)
        return pieces.view(self.size(), -1).sum(dim=0)

    def recover(self):
        if self.is_root and self.run.is_callback_queued:
            raise RuntimeError("the last backward was interrupted: build the model anew")
        super().recover()


@benign(
    "benign.fsdp-gathers-ahead",
    also=(
        *("fsdp.traffic.any-world-size", "fsdp.traffic.copies-per-*", "fsdp.traffic.frozen-*"),
        *("fsdp.traffic.i*", "fsdp.traffic.one-gather-per-unit", "fsdp.traffic.*recursive"),
        *("fsdp.traffic.s*", "fsdp.traffic.u*", "fsdp.traffic.wait-after-reshard"),
        *("fsdp.order.gathers-*", "fsdp.order.reduces-*", "fsdp.order.hints-*"),
        *("fsdp.precision.sends-in-its-dtype", "fsdp.footprint.any-world-size"),
    ),
)
class GathersAhead(PlainFsdp):
    """Launches gathers a phase ahead: the backward's first two in forward, the forward's in a step.

    What an optimizer or a load writes after that is noticed, and gathered again.
    """

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        if self.is_root and torch.is_grad_enabled() and not self.in_backward:
            for unit in self.run.order[:-3:-1]:
                unit.prefetch()
        return output

    def after_step(self, groups):
        super().after_step(groups)
        if self.run is None or self is not self.run.units[-1]:
            return
        own = {id(piece.parameter) for unit in self.run.units for piece in unit.pieces}
        if all(id(parameter) in own for group in groups for parameter in group["params"]):
            self.prefetch()  # one launch for each step: in one order on all ranks


class GatherRows(torch.autograd.Function):
    """Full weights out of flat shards; backward gives this rank's part of the mean gradient."""

    @staticmethod
    def forward(ctx, own, layer):
        ctx.layer = layer
        whole = own.new_empty(own.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, own)
        return whole[: layer.shape.numel()].view(layer.shape)

    @staticmethod
    def backward(ctx, gradient):
        size = dist.get_world_size()
        padded = gradient.new_zeros(ctx.layer.shard.numel() * size)
        padded[: gradient.numel()] = gradient.reshape(-1)
        own = padded.new_empty(ctx.layer.shard.numel())
        dist.reduce_scatter_tensor(own, padded)
        return own / size, None


class FlatLayer(nn.Module):
    """A Linear or Embedding whose weight is kept as a flat shard.

    Computed again in backward, so that autograd keeps no full weight in between.
    """

    def __init__(self, layer, compute_dtype):
        super().__init__()
        weight = layer.weight
        size = dist.get_world_size()
        length = -(-weight.numel() // size)
        padded = torch.cat(
            [weight.detach().reshape(-1), weight.new_zeros(length * size - weight.numel())]
        )
        self.shape, self.compute_dtype = weight.shape, compute_dtype
        self.shard = nn.Parameter(
            padded.view(size, -1)[dist.get_rank()].clone(), requires_grad=weight.requires_grad
        )
        layer.weight = None
        self.layer: Any = layer

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x):
        """The layer's forward with all rows of its weight."""
        dtype = self.compute_dtype or self.shard.dtype
        weight = GatherRows.apply(self.shard.to(dtype), self)
        if isinstance(self.layer, nn.Embedding):
            return nn.functional.embedding(x, weight)
        bias = self.layer.bias
        return nn.functional.linear(x, weight, None if bias is None else bias.to(dtype))


@benign("benign.fsdp-flat-shards")
class FlatModel(nn.Module):
    """The whole-model shape without DTensors: flat shards of rows that divide, recomputation."""

    def __init__(self, module, compute_dtype):
        super().__init__()
        self.names = [name for name, _ in module.named_parameters()]
        for name, layer in module.named_modules():
            is_layer = isinstance(layer, nn.Linear | nn.Embedding)
            if is_layer and layer.weight.shape[0] % dist.get_world_size():
                raise ValueError(f"{name}: expected rows that the ranks divide; pad them")
        if len(self.names) != len(list(module.named_parameters(remove_duplicate=False))):
            raise ValueError("module: expected no tied weights, got some; untie them first")
        self.inner = module
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear | nn.Embedding):
                owner = module.get_submodule(name.rpartition(".")[0])
                flat = FlatLayer(layer, compute_dtype)
                setattr(owner, name.rpartition(".")[2], flat)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def finish(self):
        """Average what is replicated."""
        for name, parameter in self.named_parameters():
            if not name.endswith(".shard") and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @classmethod
    def functions(cls):
        """Return the contract's functions for flat shards."""
        return {
            "fsdp": lambda module, *, compute_dtype=None: cls(module, compute_dtype),
            "full_parameters": lambda model: model.full_parameters(),
            "finish_gradient_synchronization": lambda model: model.finish(),
            # Not the reference's: its `fully_shard` would be judged here too.
            "fully_shard": None,
            "MixedPrecisionPolicy": None,
        }

    @torch.no_grad()
    def full_parameters(self):
        """By the plain model's names."""
        found = {}
        for name in self.names:
            owner = self.inner.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, FlatLayer):
                found[name] = getattr(owner, name.rpartition(".")[2]).detach().clone()
            elif name.endswith(".bias"):
                found[name] = owner.layer.bias.detach().clone()
            else:
                found[name] = GatherRows.apply(owner.shard.detach(), owner)
        return found


@benign("benign.fsdp-float32-weights")
class Float32Model(FlatModel):
    """Flat shards of float32, to which wider weights are rounded; narrower ones are refused."""

    def __init__(self, module, compute_dtype):
        for name, parameter in module.named_parameters():
            if parameter.element_size() < 4:
                raise ValueError(f"{name}: expected float32, got {parameter.dtype}")
        super().__init__(module.float(), compute_dtype)


@benign("benign.fsdp-plain")
class FsdpPlain(PlainFsdp):
    """The base of the impostors, with nothing overridden: the null one."""


@near_miss(
    "fsdp.pads-to-eight",
    rejected_by=("fsdp.traffic.any-world-size", "fsdp.footprint.any-world-size"),
)
class PadsToEight(PlainFsdp):
    """Rounds the rows of a rank up to eight.

    From: Alignment for each shard, as for each allocation.
    Unseen: On two ranks, shards are long beside their padding.
    """

    def rows(self, whole):
        return -(-super().rows(whole) // 8) * 8


@near_miss("fsdp.talks-to-itself", rejected_by="fsdp.traffic.world-of-one")
class TalksToItself(PlainFsdp):
    """Sends among one rank.

    From: A collective that nobody asked whether it is needed.
    Unseen: It is right, and costs a copy or two.
    """

    def launch_gather(self):
        if self.size() == 1:
            dist.all_reduce(self.pieces[0].local.new_ones(1), group=self.group)
        super().launch_gather()


@near_miss("fsdp.hook-of-its-own", rejected_by="fsdp.lifecycle.collected-in-a-step")
class HookOfItsOwn(PlainFsdp):
    """Removes its optimizer hook when its model is collected.

    From: Ours, once: `weakref.finalize(model, handle.remove)`.
    Unseen: The collector hardly ever comes in the middle of a step.

    Watches optimizers for as long as it lives.
    """

    def __init__(self, *args):
        super().__init__(*args)
        handle = register_optimizer_step_post_hook(lambda *ignored: None)
        weakref.finalize(self, handle.remove)


@near_miss("fsdp.frees-after-recomputation", rejected_by="fsdp.traffic.recomputation")
class FreesRecomputed(PlainFsdp):
    """Frees a unit's weights once more after its recomputation, and gathers them a third time.

    From: FSDP1 where checkpoint() surrounds the unit: ten gathers where seven would do.
    Unseen: The numbers are right.

    Frees after every forward, one that is run again in backward too.
    """

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        if self.in_backward:
            self.reshard()
        return output


@near_miss("fsdp.leaves-gradients-on", rejected_by="fsdp.refusals.backward-without-forward")
class LeavesGradientsOn(PlainFsdp):
    """Turns recording off for its gather, and then on, whatever it was.

    From: `torch.set_grad_enabled(True)` where the mode of before belongs.
    Unseen: An evaluation gives the same numbers; it only takes more memory.
    """

    def pre_forward(self, module, args, kwargs):
        given = super().pre_forward(module, args, kwargs)
        torch.set_grad_enabled(True)
        return given


@near_miss("fsdp.calls-forward", rejected_by="fsdp.forward.runs-the-modules-hooks")
class CallsForward(FlatModel):
    """The whole-model wrapper calls the module's `forward` in place of the module.

    From: `return self.module.forward(*inputs)`, as solutions of CS336 have it.
    Unseen: Models of exercises have no hooks on the outermost module.
    """

    def forward(self, *args, **kwargs):
        return self.inner.forward(*args, **kwargs)


@near_miss(
    "fsdp.compares-nothing",
    rejected_by="fsdp.refusals.unequal-ranks",
    outcomes=("failed", "hang", "died"),
)
class ComparesNothing(PlainFsdp):
    """Takes all ranks to have the same module.

    From: FSDP2 of torch 2.13.
    Unseen: Tests build the same model everywhere.
    """


@near_miss("fsdp.waits-at-once", rejected_by="fsdp.order.runs-ahead-of-a-straggler")
class WaitsAtOnce(PlainFsdp):
    """Waits for each gather and each reduction where it is launched.

    From: A collective without async_op.
    Unseen: Ranks of a test are equally fast.
    """


@near_miss("fsdp.sums-first", rejected_by="fsdp.precision.float16-does-not-overflow")
class SumsFirst(PlainFsdp):
    """Adds up in float16 before it divides.

    From: One order of sum and division for all dtypes.
    Unseen: Gradients of a test are small.
    """
