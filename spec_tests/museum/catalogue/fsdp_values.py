"""Near-misses of sharded data parallelism, backward: wrong means, wrong rows of them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.fsdp import Piece
from spec_tests.plain.fully_shard import PlainFsdp

# --------------------------------------------------------------------------------------- backward


@near_miss(
    "fsdp.sum-for-mean",
    rejected_by=("fsdp.backward.mean-gradient", "fsdp.training.equals-full-batch"),
)
class SumForMean(PlainFsdp):
    """Sums gradients and does not divide.

    From: ReduceOp.SUM is the default.
    Unseen: Adam does not feel a constant factor.
    """

    def divisor(self):
        return 1


@near_miss("fsdp.divides-twice", rejected_by="fsdp.backward.mean-gradient")
class DividesTwice(PlainFsdp):
    """Divides before the reduction and after it.

    From: pre-division for float16 copied without its counterpart.
    Unseen: Adam does not feel a constant factor.
    """

    def cast_for_reduce(self, flat):
        return flat / self.size()


@near_miss("fsdp.unties", rejected_by="fsdp.backward.mean-gradient-of-any-model")
class Unties(PlainFsdp):
    """Gives each name of a tied weight a parameter of its own.

    From: pytorch issues 176225 and 176076; accelerate issue 4171.
    Unseen: The first forward is right: both copies are still equal.
    """

    def shard(self, parameter, places):
        first = super().shard(parameter, places[:1])
        more = [super(Unties, self).shard(parameter, [place]) for place in places[1:]]
        self.untied = (*self.untied, *more)
        return first

    untied: tuple[Piece, ...] = ()

    def __init__(self, *args):
        super().__init__(*args)
        self.pieces = [*self.pieces, *self.untied]


@near_miss("fsdp.packs-in-reverse", rejected_by="fsdp.backward.any-granularity")
class PacksInReverse(PlainFsdp):
    """Packs gradients in another order than it cuts them.

    From: Gradients arrive in reverse order of use.
    Unseen: Units of one parameter are right.
    """

    def flatten(self, pieces):
        return super().flatten(pieces[::-1])


@near_miss("fsdp.zeros-for-frozen", rejected_by="fsdp.backward.frozen-subset")
class ZerosForFrozen(PlainFsdp):
    """Leaves zeros where a parameter has no gradient.

    From: A buffer for the whole unit, frozen or not.
    Unseen: SGD does not notice; AdamW decays the frozen weights.
    """

    def end_of_backward(self):
        super().end_of_backward()
        for unit in self.run.units:
            for piece in unit.pieces:
                if piece.parameter.grad is None:
                    zeros = torch.zeros_like(piece.local)
                    piece.parameter.grad = unit.as_dtensor(zeros, piece.parameter)


@near_miss("fsdp.thaws", rejected_by="fsdp.backward.frozen-in-a-whole-model")
class Thaws(PlainFsdp):
    """Makes frozen weights trainable.

    From: `nn.Parameter(shard)` in four solutions of CS336; requires_grad is true by default.
    Unseen: Nothing is frozen when a model is trained from the start.
    """

    def shard(self, parameter, places):
        piece = super().shard(parameter, places)
        piece.parameter.requires_grad_(True)
        return piece


@near_miss("fsdp.divides-in-finish", rejected_by="fsdp.backward.finish-is-idempotent")
class DividesInFinish(PlainFsdp):
    """Divides every gradient in `finish_gradient_synchronization`.

    From: A sum is reduced in backward, and averaged once it has arrived.
    Unseen: One finish after each backward divides once.
    """

    @classmethod
    def functions(cls):
        return {**super().functions(), "fully_shard": None}

    def divisor(self):
        return 1

    def finish(self):
        for piece in self.pieces:
            gradient: Any = piece.parameter.grad
            if gradient is not None:
                gradient._local_tensor.div_(self.mesh.size())


@near_miss("fsdp.shards-the-rest", rejected_by="fsdp.backward.replicated-rest")
class ShardsTheRest(PlainFsdp):
    """Shards the norms of a whole model as well.

    From: Ours, once: the course's test gathers the gradient of a norm and met a DTensor.
    Unseen: All numbers are right.
    """

    replicates_rest = False


@near_miss("fsdp.scales-inputs", rejected_by="fsdp.backward.inputs-keep-their-gradient")
class ScalesInputs(PlainFsdp):
    """Divides the gradients of inputs as well.

    From: A global hook that divides whatever passes.
    Unseen: Inputs of language models have no gradient.
    """

    def watch_inputs(self, args, kwargs):
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / self.size())
        return super().watch_inputs(args, kwargs)


@near_miss("fsdp.static-graph", rejected_by="fsdp.backward.unused-unit")
class StaticGraph(PlainFsdp):
    """Takes the first backward's units for those of all.

    From: Order and set of units recorded once.
    Unseen: Most models use all of their layers, always.
    """

    known: Any = None

    def end_of_backward(self):
        for unit in self.run.units:
            if unit.known is None:  # type: ignore[attr-defined]  # units of this class
                unit.known = unit.in_backward  # type: ignore[attr-defined]  # likewise
            if not unit.known:  # type: ignore[attr-defined]  # likewise
                for piece in unit.pieces:
                    piece.parameter.grad = piece.pending = None
                    if piece.full is not None:
                        piece.full.grad = None
        super().end_of_backward()

    def post_backward(self):
        if self.known is not False:
            super().post_backward()


@near_miss(
    "fsdp.overwrites-gradients",
    rejected_by=(
        "fsdp.backward.forwards-and-backwards-entangled",
        "fsdp.accumulation.of-a-whole-model",
        "fsdp.accumulation.one-finish",
    ),
)
class OverwritesGradients(PlainFsdp):
    """Sets the sharded gradient where it ought to add.

    From: `parameter.grad = shard` at the end of the reduction.
    Unseen: Right for one micro-batch per step.
    """

    def assign(self, piece, shard):
        piece.parameter.grad = self.as_dtensor(shard, piece.parameter)


@near_miss(
    "fsdp.frees-recomputed",
    rejected_by=(
        "fsdp.backward.activation-checkpointing",
        "fsdp.backward.activation-checkpointing-in-a-whole-model",
    ),
    outcomes=("failed", "died"),
)
class FreesRecomputed(PlainFsdp):
    """Ends a recomputation as if it were a forward.

    From: The post-forward hook does not know that backward runs.
    Unseen: Tests do not checkpoint activations.

    Frees its weights after any forward, one that backward recomputes too.
    """

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        if self.in_backward:
            for piece in self.pieces:
                piece.full.data.zero_()
        return output


@near_miss("fsdp.none-without-rows", rejected_by="fsdp.backward.gradients-are-shards")
class NoneWithoutRows(PlainFsdp):
    """Has no gradient on ranks that have no rows.

    From: `if shard.numel()` before the assignment.
    Unseen: Its peers wait for it in the next clipping.
    """

    def assign(self, piece, shard):
        if shard.numel():
            super().assign(piece, shard)


# --------------------------------------------------------------------------------------- training


@near_miss(
    "fsdp.fresh-parameters",
    rejected_by=("fsdp.training.same-parameter-objects", "fsdp.training.equals-full-batch"),
)
class FreshParameters(PlainFsdp):
    """Wraps the shard in a Parameter of its own each time.

    From: `setattr(module, name, nn.Parameter(shard))` after every pass.
    Unseen: The loss of the first steps is right, for nothing has moved.
    """

    def reshard(self):
        for piece in self.pieces:
            gradient = piece.parameter.grad
            piece.parameter = nn.Parameter(
                piece.parameter.detach(), requires_grad=piece.parameter.requires_grad
            )
            piece.parameter.grad = gradient
        super().reshard()


@near_miss("fsdp.dithers", rejected_by="fsdp.training.repeatable")
class Dithers(PlainFsdp):
    """Rounds stochastically with a generator that nobody seeds.

    From: Stochastic rounding in gradient compression.
    Unseen: The error is one unit in the last place.
    """

    generator: ClassVar[torch.Generator] = torch.Generator()

    def mean(self, flat):
        own = super().mean(flat)
        noise = torch.rand(own.shape, generator=self.generator).to(own.dtype) - 0.5
        return own * (1 + noise * 8 * torch.finfo(own.dtype).eps)


# ---------------------------------------------------------------------------------- compilation


@near_miss("fsdp.reduces-while-tracing", rejected_by="fsdp.compile.like-eager")
class ReducesWhileTracing(PlainFsdp):
    """Reduces the first gradients of a compiled module and no others.

    From: Hooks that were traced ran when the graph was made.
    Unseen: The first step is right.
    """

    was_traced = False

    def send_reduction(self, flat):
        if self.was_traced and self.module._compiled_call_impl:
            return flat[self.rank()].clone()
        self.was_traced = True
        return super().send_reduction(flat)


@near_miss("fsdp.hooks-in-graphs", rejected_by="fsdp.compile.one-graph")
class HooksInGraphs(PlainFsdp):
    """Lets a compiler trace its hooks.

    From: Hooks that were written before there was a compiler.
    Unseen: With graph breaks it is right, only slow.
    """

    untraced = staticmethod(lambda hook: hook)


@near_miss("fsdp.stale-in-part", rejected_by="fsdp.lifecycle.fresh-after-evaluation-in-part")
class StaleInPart(Patched):
    """Compares versions of whole unsharded weights, not of the part that an int keeps.

    From: a test for the state "unsharded" that is older than the state "in part"
    Unseen: After a backward nothing is kept; it takes an evaluation just before the step.
    """

    module = "solution.parallel.fsdp.unit"
    find = "        if self.state is not UnitState.SHARDED:\n            is_fresh"
    replace = (
        "        if self.state in (UnitState.GATHERING, UnitState.UNSHARDED):\n            is_fresh"
    )


@near_miss("fsdp.dtype-of-the-first", rejected_by="fsdp.forward.two-dtypes-of-a-unit")
class DtypeOfTheFirst(Patched):
    """Gathers and computes with all parameters of a unit in the dtype of its first.

    From: `next(module.parameters()).dtype`, kept for the unit
    Unseen: Layers of two dtypes fail at once; factors do not.
    """

    module = "solution.parallel.fsdp.unit"
    find = "        dtype = parameter.local.dtype\n"
    replace = "        dtype = self.parameters[0].local.dtype\n"
