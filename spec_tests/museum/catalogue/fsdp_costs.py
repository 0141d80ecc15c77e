"""Near-misses of sharded data parallelism that compute right: memory, and precision."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.museum.card import FreeStanding, Patched, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

# ----------------------------------------------------------------------------------------- memory


@near_miss("fsdp.shards-nothing", rejected_by="fsdp.footprint.shards-alone-stay")
class ShardsNothing(FreeStanding):
    """Replicates everything and averages gradients.

    From: It passes every test of the CS336 assignment that can be passed.
    Unseen: The numbers are right.
    """

    fully_shard = MixedPrecisionPolicy = None

    @staticmethod
    def fsdp(module, *, compute_dtype=None):
        return module

    @staticmethod
    def finish_gradient_synchronization(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @staticmethod
    def full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@near_miss("fsdp.keeps-originals", rejected_by="fsdp.footprint.shards-alone-stay")
class KeepsOriginals(PlainFsdp):
    """Keeps the full parameters of before beside their shards.

    From: A list of the original parameters, for their shapes and names.
    Unseen: The numbers are right.
    """

    originals: tuple[nn.Parameter, ...] = ()

    def shard(self, parameter, places):
        self.originals = (*self.originals, parameter)
        return super().shard(parameter, places)


@near_miss("fsdp.leaves-embeddings", rejected_by="fsdp.footprint.embedding-of-a-whole-model")
class LeavesEmbeddings(PlainFsdp):
    """Replicates the embedding of a whole model.

    From: A solution of CS336 that gathers Linear layers only.
    Unseen: Its numbers are right, and so is the memory of a tower of Linear layers.
    """

    layers = nn.Linear


@near_miss("fsdp.looks-at-children", rejected_by="fsdp.footprint.layer-as-the-whole-model")
class LooksAtChildren(PlainFsdp):
    """Replicates a whole model that is a layer itself.

    From: `for name, child in module.named_children()` in two solutions of CS336.
    Unseen: Models are more than one layer, nearly always.
    """

    shards_itself = False


@near_miss("fsdp.keeps-in-evaluation", rejected_by="fsdp.footprint.freed-after-use")
class KeepsInEvaluation(Patched):
    """Frees after a forward that a backward follows, and not after another.

    From: Freeing hangs on what autograd has saved, and without gradients it has saved nothing.
    Unseen: Memory is measured in training, and the next step frees it.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "        if not (self._keeps(unit) and (has_backward or unit.was_kept)):\n"
    replace = "        if has_backward and not self._keeps(unit):\n"


@near_miss("fsdp.frees-nothing", rejected_by="fsdp.footprint.freed-after-use")
class FreesNothing(PlainFsdp):
    """Never frees full weights.

    From: `self.full = None` where autograd holds a view of it.
    Unseen: The numbers are right.
    """

    def free(self):
        for piece in self.pieces:
            piece.full.grad = None


@near_miss("fsdp.ignores-keeping", rejected_by="fsdp.footprint.kept-on-request")
class IgnoresKeeping(PlainFsdp):
    """Reshards after every forward, whatever was asked for.

    From: An argument that is stored and never read.
    Unseen: The numbers are right.
    """

    def reshards_after_forward(self):
        return True


@near_miss("fsdp.one-is-true", rejected_by="fsdp.traffic.ints-for-true-and-false")
class OneIsTrue(PlainFsdp):
    """Frees full weights after forward where `reshard_after_forward` is 1.

    From: `if reshard_after_forward:`, where True and 1 are the same.
    Unseen: The numbers are right; a job of one rank per node has one copy too many on its network.
    """

    def reshards_after_forward(self):
        return not self.is_root if self.raf is None else bool(self.raf)


@near_miss("fsdp.frees-at-the-end", rejected_by="fsdp.footprint.peak-does-not-grow-with-depth")
class FreesAtTheEnd(PlainFsdp):
    """Frees all units at the end of a pass.

    From: Freeing in one callback is simpler than in many hooks.
    Unseen: Before and after a pass, memory is as it should be.
    """

    def reshards_after_forward(self):
        if self.is_root and self.run is not None:
            for unit in self.run.units:
                unit.reshard()
        return self.is_root

    def post_backward(self):
        pass


@near_miss("fsdp.keeps-handles", rejected_by="fsdp.footprint.no-growth")
class KeepsHandles(PlainFsdp):
    """Notes every buffer that it ever sent.

    From: A list of handles that is never cleared.
    Unseen: Ten steps fit into any memory.
    """

    sent: tuple[torch.Tensor, ...] = ()

    def send_gather(self, whole, own):
        self.sent = (*self.sent, own)
        return super().send_gather(whole, own)


@near_miss("fsdp.remembers-every-model", rejected_by="fsdp.footprint.models-made-and-dropped")
class RemembersEveryModel(PlainFsdp):
    """Keeps every unit that it ever made in a list of the class.

    From: A registry by which hooks find their unit, without weak references.
    Unseen: A script trains one model.
    """

    made: ClassVar[list[Any]] = []

    def find_root(self):
        if self not in self.made:
            self.made.append(self)
        super().find_root()


# -------------------------------------------------------------------------------------- precision


@near_miss("fsdp.ignores-dtype", rejected_by="fsdp.precision.computes-in-its-dtype")
class IgnoresDtype(PlainFsdp):
    """Computes in the parameters' own dtype.

    From: An argument that is stored and never read; CS336's float16 tests accept it.
    Unseen: It is more precise than asked for.
    """

    def compute_dtype(self, piece):
        return piece.parameter.dtype

    def cast(self, values, dtype):
        return values


@near_miss(
    "fsdp.half-masters",
    rejected_by=("fsdp.precision.updates-are-not-lost", "fsdp.precision.shards-keep-their-dtype"),
)
class HalfMasters(PlainFsdp):
    """Keeps its shards in bfloat16.

    From: `module.to(compute_dtype)` before sharding.
    Unseen: Updates are lost later, when they have become small.
    """

    def keep(self, rows):
        return super().keep(rows).to(self.policy.param_dtype or rows.dtype)


@near_miss("fsdp.casts-buffers", rejected_by="fsdp.precision.shards-keep-their-dtype")
class CastsBuffers(PlainFsdp):
    """Casts buffers along with weights.

    From: pytorch issue 146114.
    Unseen: Running statistics lose their last digits slowly.
    """

    def __init__(self, module, *rest):
        super().__init__(module, *rest)
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.is_floating_point() and self.policy.param_dtype is not None:
                    part._buffers[name] = buffer.to(self.policy.param_dtype)


@near_miss("fsdp.reduces-in-half", rejected_by="fsdp.precision.reduces-in-its-dtype")
class ReducesInHalf(PlainFsdp):
    """Reduces in bfloat16 whatever reduce_dtype says.

    From: The buffer takes the gradients' dtype.
    Unseen: Two ranks hardly round.
    """

    def send_reduction(self, flat):
        return super().send_reduction(flat.to(self.policy.param_dtype or flat.dtype)).to(flat.dtype)


@near_miss("fsdp.accumulates-in-half", rejected_by="fsdp.precision.accumulates-in-its-dtype")
class AccumulatesInHalf(PlainFsdp):
    """Adds up micro-batches in bfloat16 and reduces in float32.

    From: DeepSpeed issues 2352 and 2768.
    Unseen: With one micro-batch per step nothing is added up.
    """

    def add_pending(self, piece, gradient):
        if piece.pending is not None:
            piece.pending = piece.pending.to(gradient.dtype) + gradient
            gradient = torch.zeros_like(gradient)
        super().add_pending(piece, gradient)
        assert piece.pending is not None
        piece.pending = piece.pending.to(self.policy.reduce_dtype or gradient.dtype)


@near_miss("fsdp.keeps-the-first-share", rejected_by="fsdp.precision.layer-used-twice")
class KeepsTheFirstShare(PlainFsdp):
    """Loses one of two gradients of a layer that is called twice in half precision.

    From: Each call makes a cast copy of its own, and one of them has the hook.
    Unseen: In float32, and where layers are called once, it is right.

    Cast weights collect the gradient of their first use in a forward alone.
    """

    def register(self, *, sharded):
        super().register(sharded=sharded)
        was_used = self.run is not None and self in self.run.order
        for piece in self.pieces:
            is_cast = self.compute_dtype(piece) != piece.parameter.dtype
            if is_cast and was_used and not sharded and not self.in_backward:
                for owner, name in piece.places:
                    owner._parameters[name] = piece.full.detach()


@near_miss(
    "fsdp.gathers-wide",
    rejected_by=("fsdp.precision.sends-in-its-dtype", "fsdp.precision.gathers-in-its-dtype"),
)
class GathersWide(PlainFsdp):
    """Gathers in float32 and casts afterwards.

    From: The cast stands where the weights are used.
    Unseen: The numbers are right; twice the bytes are sent.
    """

    def cast_for_gather(self, own, piece):
        return own


@near_miss("fsdp.zeros-while-waiting", rejected_by="fsdp.footprint.window-costs-one-copy")
class ZerosWhileWaiting(PlainFsdp):
    """Keeps zeros in `.grad` while the full gradients wait for their reduction.

    From: Ours, once: what stands for a pending gradient was as large as the shard's own.
    Unseen: It is freed with the reduction; between steps nothing is left of it.
    """
