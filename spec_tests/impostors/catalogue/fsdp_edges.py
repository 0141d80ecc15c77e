"""Near-misses of sharded data parallelism at its edges: meshes, dtypes, outputs, settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

from spec_tests.impostors.card import Patched, near_miss
from spec_tests.plain.fsdp import Unit
from spec_tests.plain.fully_shard import PlainFsdp


@near_miss("fsdp.watches-first-output", rejected_by="fsdp.forward.nested-containers")
class WatchesFirstOutput(PlainFsdp):
    """Gathers for a backward that comes by the first output alone.

    From: A hook on `output[0]`, which is the loss or the logits, mostly.
    Unseen: The loss of a test is made of all outputs, or of the first.
    """

    def post_forward(self, module, args, output):
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
        super().post_forward(module, args, tensors[:1])
        return output


@near_miss("fsdp.one-dtype-for-all", rejected_by="fsdp.backward.two-dtypes-in-a-unit")
class OneDtypeForAll(PlainFsdp):
    """Reduces a unit in the dtype of its first parameter.

    From: One flat buffer, `torch.empty(..., dtype=gradients[0].dtype)`.
    Unseen: A unit mostly has one dtype.
    """

    def reduce(self, pieces):
        for piece in pieces:
            piece.pending = piece.pending.to(pieces[0].pending.dtype)
        super().reduce(pieces)


@near_miss("fsdp.trains-what-was-frozen-later", rejected_by="fsdp.backward.frozen-for-a-step")
class TrainsWhatWasFrozenLater(PlainFsdp):
    """Goes by what required gradients when full parameters were made.

    From: `nn.Parameter(full, requires_grad=...)` once, in the first forward.
    Unseen: Layers are frozen before they are sharded, or never.
    """

    def adopt(self):
        trains = [piece.full is not None and piece.full.requires_grad for piece in self.pieces]
        super().adopt()
        for piece, did in zip(self.pieces, trains, strict=True):
            if piece.full is not None:
                piece.full.requires_grad_(did)


@near_miss(
    "fsdp.zeros-for-unused",
    rejected_by=("fsdp.backward.unused-unit", "fsdp.training.equals-full-batch-of-any-model"),
)
class ZerosForUnused(PlainFsdp):
    """Leaves zeros where no rank had a gradient.

    From: A reduction of everything, whatever was used.
    Unseen: SGD without weight decay does not notice.
    """

    def end_of_backward(self):
        super().end_of_backward()
        for unit in self.run.units:
            for piece in unit.pieces:
                if piece.parameter.requires_grad and piece.parameter.grad is None:
                    zeros = torch.zeros_like(piece.local)
                    piece.parameter.grad = unit.as_dtensor(zeros, piece.parameter)


@near_miss("fsdp.views-its-outputs", rejected_by="fsdp.backward.in-place-after-a-layer")
class ViewsItsOutputs(PlainFsdp):
    """Gives outputs that autograd takes for views and lets nobody write to.

    From: A custom autograd function around outputs, which gives back what it was given.
    Unseen: Activations of a test are `abs` or `gelu`, and none is in place.
    """

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        is_tensor = isinstance(output, torch.Tensor) and output.requires_grad
        return Both.apply(output, output.new_zeros(1))[0] if is_tensor else output


class Both(torch.autograd.Function):
    """The identity on two tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@near_miss("fsdp.rank-of-the-world", rejected_by="fsdp.lifecycle.part-of-the-world")
class RankOfTheWorld(PlainFsdp):
    """Takes a rank's number in the world for its place in the mesh.

    From: `dist.get_rank()` without a group.
    Unseen: A mesh of neighbours that begins at zero, or at a multiple of its size, is right.
    """

    def rank(self):
        return dist.get_rank() % self.size()


@near_miss("fsdp.swaps-dimensions", rejected_by="fsdp.lifecycle.hybrid-of-one")
class SwapsDimensions(PlainFsdp):
    """Shards over the first dimension of a mesh and replicates over the second.

    From: (shard, replicate) is how some other libraries order them.
    Unseen: On a square mesh all gradients are right.
    """

    def __init__(self, module, mesh, *rest):
        turned = mesh if mesh.ndim == 1 else DeviceMesh(mesh.device_type, mesh.mesh.T)
        super().__init__(module, turned, *rest)


@near_miss("fsdp.fresh-on-a-line", rejected_by="fsdp.programs.pairs-of-settings")
class FreshOnALine(PlainFsdp):
    """Notices updates of kept weights on meshes of one dimension alone.

    From: A branch for hybrid sharding that was written before the check for stale weights.
    Unseen: Kept weights are tried on one dimension, and hybrid sharding with the defaults.
    """

    def is_fresh(self):
        return self.mesh.ndim == 2 or super().is_fresh()


@near_miss("fsdp.reduces-wide", rejected_by="fsdp.traffic.step-of-a-whole-model")
class ReducesWide(PlainFsdp):
    """Reduces in float64 for the sake of order.

    From: Sums that were to have the same bits on any number of ranks.
    Unseen: The numbers are right; twice the bytes are sent.
    """

    def send_reduction(self, flat):
        return super().send_reduction(flat.double()).to(flat.dtype)


@near_miss("fsdp.misses-exceptions", rejected_by="fsdp.lifecycle.shards-after-exception")
class MissesExceptions(PlainFsdp):
    """Leaves full parameters registered where a forward raised.

    From: A post-forward hook without `always_call=True`.
    Unseen: No test raises in a forward; the next step is right all the same.
    """

    def post_forward(self, module, args, output):
        return output if output is None else super().post_forward(module, args, output)


@near_miss(
    "fsdp.reduce-dtype-beside-param-dtype", rejected_by="fsdp.precision.accumulates-in-its-dtype"
)
class ReduceDtypeBesideParamDtype(PlainFsdp):
    """Reads `reduce_dtype` only where there is a `param_dtype`.

    From: `if policy.param_dtype is not None:` around all that a policy does.
    Unseen: Policies of tests name both.
    """

    def add_pending(self, piece, gradient):
        policy = self.policy
        if policy.param_dtype is None:
            self.policy = type(policy)()
        super().add_pending(piece, gradient)
        self.policy = policy


@near_miss("fsdp.rounds-shards", rejected_by="fsdp.precision.shards-keep-their-values")
class RoundsShards(PlainFsdp):
    """Keeps float32 shards of weights that were rounded to bfloat16.

    From: `module.to(param_dtype)` before the shards are cut, and `.float()` after.
    Unseen: The dtypes are right, and so is every forward.
    """

    def keep(self, rows):
        return super().keep(rows.to(self.policy.param_dtype or rows.dtype).to(rows.dtype))


@near_miss("fsdp.frees-what-backward-reached", rejected_by="fsdp.footprint.frozen-is-freed")
class FreesWhatBackwardReached(PlainFsdp):
    """Keeps full weights that were kept for a backward which never reached them.

    From: Freeing in the hooks of backward alone.
    Unseen: In a model that trains from end to end, backward reaches every layer.
    """

    def end_of_backward(self):
        Unit.end_of_backward(self)


@near_miss("fsdp.int-for-false", rejected_by="fsdp.footprint.kept-in-part")
class IntForFalse(PlainFsdp):
    """Takes an int for False, and keeps everything after forward.

    From: `reshard_after_forward is True`.
    Unseen: Outputs, gradients and their traffic within a node are as they should be.
    """

    def reshards_after_forward(self):
        return type(self.raf) is not int and super().reshards_after_forward()


@near_miss("fsdp.always-recursive", rejected_by="fsdp.traffic.not-recursive")
class AlwaysRecursive(Patched):
    """Sets every unit inside as well, whatever `recurse` says.

    From: An argument that is taken and not read.
    Unseen: Tests set the whole model.
    """

    module = "solution.parallel.fsdp.module"
    find = "cast(nn.Module, module).modules() if recurse else [module]"
    replace = "cast(nn.Module, module).modules()"
