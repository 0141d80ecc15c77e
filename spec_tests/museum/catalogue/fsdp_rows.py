"""Near-misses of sharded data parallelism: what a rank keeps, and calls besides forward."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

# ------------------------------------------------------------------------------------------- rows


@near_miss("fsdp.deals-rows", rejected_by=("fsdp.init.nothing-lost", "fsdp.forward.equals-plain"))
class DealsRows(PlainFsdp):
    """Deals rows out in turns and puts them together in blocks.

    From: `whole[rank::size]` next to an all-gather.
    Unseen: Shapes are right, and a random model with mixed-up rows trains.
    """

    def cut(self, whole):
        rows = super().cut(whole).shape[0]
        return whole[self.rank() :: self.size()][:rows]


@near_miss(
    "fsdp.drops-tail",
    rejected_by=(
        "fsdp.init.nothing-lost-of-any-model",
        "fsdp.init.any-number-of-rows",
        "fsdp.forward.equals-any-plain-model",
        "fsdp.training.equals-full-batch-of-any-model",
    ),
)
class DropsTail(PlainFsdp):
    """Keeps only as many rows as divide by the number of ranks.

    From: Floor division; the Efficient DL homework demands divisibility for it.
    Unseen: Hidden sizes are powers of two, vocabularies are not.
    """

    def cut(self, whole):
        kept = whole.clone()
        kept[whole.shape[0] // self.size() * self.size() :] = 0
        return super().cut(kept)


@near_miss("fsdp.balances-rows", rejected_by="fsdp.init.rows-as-torch-chunk")
class BalancesRows(PlainFsdp):
    """Deals rows out evenly under a placement that means torch.chunk.

    From: `numpy.array_split` and `tensor_split` deal so.
    Unseen: Sizes that divide are dealt out alike.
    """

    def cut(self, whole):
        return whole.tensor_split(self.size())[self.rank()]


@near_miss(
    "fsdp.shape-from-local",
    rejected_by=("fsdp.init.parameters-are-dtensors", "fsdp.init.dtensor-metadata"),
)
class ShapeFromLocal(PlainFsdp):
    """Leaves shape and stride to DTensor.from_local.

    From: flashoptim issue 6.
    Unseen: Right wherever the rows divide.
    """

    def as_dtensor(self, local, like):
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


@near_miss("fsdp.bookkeeps-in-buffer", rejected_by="fsdp.init.the-rest-stays")
class BookkeepsInBuffer(PlainFsdp):
    """Keeps its rank in a buffer of the module.

    From: `register_buffer` as a place for state that moves with the module.
    Unseen: Nobody compares the keys of a checkpoint with the plain model's.
    """

    def __init__(self, module, *rest):
        super().__init__(module, *rest)
        module.register_buffer("shard_rank", torch.tensor(self.rank()))


# ---------------------------------------------------------------------------------------- forward


@near_miss("fsdp.copies-out-in-order", rejected_by="fsdp.forward.equals-plain")
class CopiesOutInOrder(PlainFsdp):
    """Cuts the gathered buffer by parameter first and by rank second.

    From: One flat gather for several parameters without the view [ranks, elements].
    Unseen: Units of one parameter are right.
    """

    def cut_gathered(self, pieces, whole):
        lengths = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return whole.split([self.size() * length for length in lengths])


@near_miss("fsdp.evaluates-in-half", rejected_by="fsdp.forward.without-gradients")
class EvaluatesInHalf(PlainFsdp):
    """Gathers in bfloat16 where no gradient is recorded.

    From: A fast path for evaluation.
    Unseen: Validation loss is off in the third digit.
    """

    is_evaluation = False

    def pre_forward(self, *args):
        self.is_evaluation = not torch.is_grad_enabled()
        return super().pre_forward(*args)

    def cast_for_gather(self, own, piece):
        own = super().cast_for_gather(own, piece)
        return (own / 3).bfloat16().to(own.dtype) * 3 if self.is_evaluation else own


@near_miss("fsdp.keeps-inference-tensors", rejected_by="fsdp.forward.evaluation-leaves-no-trace")
class KeepsInferenceTensors(PlainFsdp):
    """Cannot train after a first forward in inference mode.

    From: FSDP2 of torch 2.13, whose full parameters are made in whatever mode there is.
    Unseen: Tests train first and evaluate later.
    """

    def making_tensors(self):
        return contextlib.nullcontext()


@near_miss("fsdp.rounds-in-backward", rejected_by="fsdp.forward.resharding-changes-no-bit")
class RoundsInBackward(PlainFsdp):
    """Gathers in bfloat16 for backward.

    From: A second code path for the gather in backward.
    Unseen: Integers survive it, and losses are those of forward.
    """

    def cast_for_gather(self, own, piece):
        own = super().cast_for_gather(own, piece)
        return own.bfloat16().to(own.dtype) if self.in_backward else own


@near_miss("fsdp.part-in-wrong-order", rejected_by="fsdp.forward.resharding-to-a-part")
class PartInWrongOrder(PlainFsdp):
    """Puts the rows of a smaller world together in another order.

    From: Ranks of a sub-group taken for ranks of the world.
    Unseen: An int for `reshard_after_forward` is seldom given.
    """

    refuses = False  # an int

    def cut_gathered(self, pieces, whole):
        if type(self.raf) is int and self.in_backward:
            whole = whole.view(self.size(), -1).roll(self.raf, dims=0).reshape(-1)
        return super().cut_gathered(pieces, whole)


@near_miss("fsdp.casts-frozen-integers", rejected_by="fsdp.precision.integers-are-not-cast")
class CastsFrozenIntegers(PlainFsdp):
    """Gathers frozen integers in the dtype of the floating-point parameters.

    From: One dtype per unit, so that one message serves it.
    Unseen: Integers below 256 come through bfloat16 unchanged.
    """

    def compute_dtype(self, piece):
        return self.policy.param_dtype or piece.parameter.dtype


@near_miss("fsdp.drops-tangents", rejected_by="fsdp.forward.under-a-transform")
class DropsTangents(PlainFsdp):
    """Hides `torch.func` from a whole forward, where its own gather alone cannot bear it.

    From: `torch._C._DisableFuncTorch` around too much.
    Unseen: The output is right; only its tangent is zero.
    """

    def pre_forward(self, module, args, kwargs):
        with torch._C._DisableFuncTorch():
            args, kwargs = super().pre_forward(module, args, kwargs)
        return tuple(torch.autograd.forward_ad.unpack_dual(arg)[0] for arg in args), kwargs

    def post_forward(self, module, args, output):
        with torch._C._DisableFuncTorch():
            return super().post_forward(module, args, output)


@near_miss("fsdp.frees-under-its-caller", rejected_by="fsdp.lifecycle.registered-method")
class FreesUnderItsCaller(PlainFsdp):
    """Ends a registered method as it ends a forward, in the middle of a forward as well.

    From: FSDP2 of torch 2.13, with reshard_after_forward=True.
    Unseen: A forward seldom computes on after the method that it calls.
    """

    @property
    def num_running(self):
        return 0

    @num_running.setter
    def num_running(self, value):
        pass


@near_miss("fsdp.takes-a-name", rejected_by="fsdp.init.names-of-the-model")
class TakesANameOfTheModel(PlainFsdp):
    """Sets `_schedule` in the module, which may have one.

    From: Ours, once, and each wrapper that keeps its state in `module._state`.
    Unseen: Toys have no attributes of their own.

    Notes its pass in the module under a name that anybody might use.
    """

    def find_root(self):
        super().find_root()
        object.__setattr__(self.module, "_schedule", self.run)


@near_miss("fsdp.tells-nobody", rejected_by="fsdp.backward.post-accumulate-hooks")
class TellsNobody(PlainFsdp):
    """Assigns gradients to shards and calls no hook that waits for them.

    From: Ours, once: autograd calls such hooks for leaves of the graph, which shards are not.
    Unseen: Optimizers mostly step after the backward.
    """

    def tell(self, piece):
        pass


@near_miss("fsdp.shards-what-is-not-called", rejected_by="fsdp.forward.layers-that-are-not-called")
class ShardsWhatIsNotCalled(PlainFsdp):
    """Makes a unit of every Linear, also of one whose weight others read.

    From: nn.MultiheadAttention and its out_proj.
    Unseen: Course models have attention of their own.

    Takes every Linear for a layer that is called.
    """

    leaves_attention = False


@near_miss("fsdp.local-for-shard", rejected_by="fsdp.refusals.unregistered-method")
class LocalForShard(PlainFsdp):
    """Leaves plain rows in the module between steps, where a DTensor would object.

    From: Shards as plain Parameters, as courses have them: an embedding finds its first rows.
    Unseen: A wrong shape raises in most layers.
    """

    def register(self, *, sharded):
        super().register(sharded=sharded)
        if sharded and self.gathered is not None:
            for piece in self.pieces:
                for owner, name in piece.places:
                    owner._parameters[name] = nn.Parameter(piece.local)


@near_miss("fsdp.reduces-ignored", rejected_by="fsdp.traffic.ignored-parameters")
class ReducesIgnored(PlainFsdp):
    """Averages the gradients of what it should leave.

    From: A loop over all parameters at the end of backward, for those that no hook has reached.
    Unseen: With equal batches on all ranks the mean is each one's own.
    """

    def end_of_backward(self):
        super().end_of_backward()
        for parameter in self.module.parameters():
            if id(parameter) in self.ignored and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@near_miss("fsdp.writes-into-a-dataclass", rejected_by="fsdp.precision.callers-inputs")
class WritesIntoADataclass(Patched):
    """Puts the cast inputs into the caller's own dataclass.

    From: setattr on what should be a copy
    Unseen: Few callers look at a batch again; the next epoch's is narrow already.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "changed = _copied(values) if changed is values else changed"
    replace = "changed = values"


@near_miss("fsdp.forgets-what-flew", rejected_by="fsdp.footprint.interrupted-backwards")
class ForgetsWhatFlew(Patched):
    """After an interrupted backward forgets its reductions, without giving back their memory.

    From: a list of what is under way, which is cleared where it should be waited for
    Unseen: A run that meets one exception loses one buffer.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "            reduction.drop()\n        self._reductions.clear()"
    replace = "            pass\n        self._reductions.clear()"


@near_miss("fsdp.leaves-the-next-on-its-way", rejected_by="fsdp.footprint.shorter-evaluation")
class LeavesTheNextOnItsWay(Patched):
    """Discards what was gathered ahead and not used after training forwards alone.

    From: the end of a pass, which hangs on its backward
    Unseen: Evaluations use all layers, nearly always.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "        self._drop_unused()\n\n    def _keeps"
    replace = (
        "        if torch.is_grad_enabled():\n            self._drop_unused()\n\n    def _keeps"
    )


@near_miss("fsdp.frees-what-it-reaches", rejected_by="fsdp.footprint.kept-for-nothing")
class FreesWhatItReaches(Patched):
    """At the end of a backward frees only what the backward has been through.

    From: a hook behind each unit's gradients, and nothing for those that have none
    Unseen: The next forward frees it, if there is one before memory ends.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "or unit.state is not UnitState.SHARDED or unit.has_gradients:"
    replace = "or unit.has_gradients:"
