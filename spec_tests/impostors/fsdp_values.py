"""Near-misses of sharded data parallelism, backward: wrong means, wrong rows of them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card, offer
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Piece

# --------------------------------------------------------------------------------------- backward


class SumForMean(Unit):
    """Sums and does not divide."""

    def divisor(self) -> int:
        return 1


class DividesTwice(Unit):
    """Divides before the reduction and after it."""

    def cast_for_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / self.size()


class ReducesOnInputsOnly(Unit):
    """Reduces where the inputs' gradients pass, and nowhere else."""

    def end_of_backward(self) -> None:
        assert self.run is not None
        for unit in self.run.units:
            if not any(p.requires_grad for p in unit.watched):  # type: ignore[attr-defined]  # units of this class
                for piece in unit.pieces:
                    if piece.full is not None:
                        piece.full.grad = None
        super().end_of_backward()

    watched: Any = ()

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        self.watched = [t for t in args if isinstance(t, torch.Tensor)]
        return super().watch_inputs(args, kwargs)


class Unties(Unit):
    """Gives each name a parameter of its own, ties or not."""

    def shard(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> Piece:
        first = super().shard(parameter, places[:1])
        more = [super(Unties, self).shard(parameter, [place]) for place in places[1:]]
        self.untied = (*self.untied, *more)
        return first

    untied: tuple[Piece, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pieces = [*self.pieces, *self.untied]


class PacksInReverse(Unit):
    """Packs gradients in the order in which they arrive, and cuts them in that of construction."""

    def flatten(self, pieces: list[Piece]) -> torch.Tensor:
        return super().flatten(pieces[::-1])


class ZerosForFrozen(Unit):
    """Leaves zeros where a parameter has no gradient."""

    def end_of_backward(self) -> None:
        super().end_of_backward()
        assert self.run is not None
        for unit in self.run.units:
            for piece in unit.pieces:
                if piece.parameter.grad is None:
                    zeros = torch.zeros_like(piece.local)
                    piece.parameter.grad = unit.as_dtensor(zeros, piece.parameter)


class Thaws(Unit):
    """Makes a Parameter of every shard, which trains by default."""

    def shard(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> Piece:
        piece = super().shard(parameter, places)
        piece.parameter.requires_grad_(True)
        return piece


class DividesInFinish(Unit):
    """Sums in backward, and divides what it finds in finish."""

    def divisor(self) -> int:
        return 1

    def finish(self) -> None:
        for piece in self.pieces:
            gradient: Any = piece.parameter.grad
            if gradient is not None:
                gradient._local_tensor.div_(self.mesh.size())


class ShardsTheRest(Unit):
    """Shards norms and other small parameters of a whole model, too."""

    replicates_rest = False


class ScalesInputs(Unit):
    """Divides every gradient that passes, those of inputs too."""

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / self.size())
        return super().watch_inputs(args, kwargs)


class StaticGraph(Unit):
    """Takes the first backward's units for those of all backwards."""

    known: Any = None

    def end_of_backward(self) -> None:
        assert self.run is not None
        for unit in self.run.units:
            if unit.known is None:  # type: ignore[attr-defined]  # units of this class
                unit.known = unit.in_backward  # type: ignore[attr-defined]  # likewise
            if not unit.known:  # type: ignore[attr-defined]  # likewise
                for piece in unit.pieces:
                    piece.parameter.grad = piece.pending = None
                    if piece.full is not None:
                        piece.full.grad = None
        super().end_of_backward()

    def post_backward(self) -> None:
        if self.known is not False:
            super().post_backward()


class OverwritesGradients(Unit):
    """Sets the sharded gradient, where it ought to add to it."""

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        piece.parameter.grad = self.as_dtensor(shard, piece.parameter)


class FreesRecomputed(Unit):
    """Frees its weights after any forward, one that backward recomputes too."""

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = super().post_forward(module, args, output)
        if self.in_backward:
            for piece in self.pieces:
                piece.full.data.zero_()
        return output


class NoneWithoutRows(Unit):
    """Has no gradient on ranks that have no rows."""

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        if shard.numel():
            super().assign(piece, shard)


# --------------------------------------------------------------------------------------- training


class FreshParameters(Unit):
    """Wraps the shard in a Parameter of its own each time."""

    def reshard(self) -> None:
        for piece in self.pieces:
            gradient = piece.parameter.grad
            piece.parameter = nn.Parameter(
                piece.parameter.detach(), requires_grad=piece.parameter.requires_grad
            )
            piece.parameter.grad = gradient
        super().reshard()


class Dithers(Unit):
    """Rounds stochastically, with a generator that nobody seeds."""

    generator: ClassVar[torch.Generator] = torch.Generator()

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        own = super().mean(flat)
        noise = torch.rand(own.shape, generator=self.generator).to(own.dtype) - 0.5
        return own * (1 + noise * 8 * torch.finfo(own.dtype).eps)


IMPOSTORS: tuple[Impostor, ...] = (
    card(
        SumForMean,
        "sum-for-mean",
        "Sums gradients and does not divide.",
        "ReduceOp.SUM is the default.",
        "Adam does not feel a constant factor.",
        "fsdp.backward.mean-gradient",
        "fsdp.training.equals-full-batch",
    ),
    card(
        DividesTwice,
        "divides-twice",
        "Divides before the reduction and after it.",
        "pre-division for float16 copied without its counterpart.",
        "Adam does not feel a constant factor.",
        "fsdp.backward.mean-gradient",
    ),
    card(
        ReducesOnInputsOnly,
        "reduces-on-inputs-only",
        "Never reduces a unit whose inputs need no gradient.",
        "The post-backward hook hangs on the gradients of inputs; an embedding has none.",
        "The loss falls without the embedding.",
        "fsdp.backward.mean-gradient",
    ),
    card(
        Unties,
        "unties",
        "Gives each name of a tied weight a parameter of its own.",
        "pytorch issues 176225 and 176076; accelerate issue 4171.",
        "The first forward is right: both copies are still equal.",
        "fsdp.backward.mean-gradient-of-any-model",
    ),
    card(
        PacksInReverse,
        "packs-in-reverse",
        "Packs gradients in another order than it cuts them.",
        "Gradients arrive in reverse order of use.",
        "Units of one parameter are right.",
        "fsdp.backward.any-granularity",
    ),
    card(
        ZerosForFrozen,
        "zeros-for-frozen",
        "Leaves zeros where a parameter has no gradient.",
        "A buffer for the whole unit, frozen or not.",
        "SGD does not notice; AdamW decays the frozen weights.",
        "fsdp.backward.frozen-subset",
    ),
    card(
        Thaws,
        "thaws",
        "Makes frozen weights trainable.",
        "`nn.Parameter(shard)` in four solutions of CS336; requires_grad is true by default.",
        "Nothing is frozen when a model is trained from the start.",
        "fsdp.backward.frozen-in-a-whole-model",
    ),
    Impostor(
        "fsdp.divides-in-finish",
        "Divides every gradient in `finish_gradient_synchronization`.",
        "A sum is reduced in backward, and averaged once it has arrived.",
        "One finish after each backward divides once.",
        ("fsdp.backward.finish-is-idempotent",),
        functions=lambda: {**offer(DividesInFinish), "fully_shard": None},
    ),
    card(
        ShardsTheRest,
        "shards-the-rest",
        "Shards the norms of a whole model as well.",
        "Ours, once: the course's test gathers the gradient of a norm and met a DTensor.",
        "All numbers are right.",
        "fsdp.backward.replicated-rest",
    ),
    card(
        ScalesInputs,
        "scales-inputs",
        "Divides the gradients of inputs as well.",
        "A global hook that divides whatever passes.",
        "Inputs of language models have no gradient.",
        "fsdp.backward.inputs-keep-their-gradient",
    ),
    card(
        StaticGraph,
        "static-graph",
        "Takes the first backward's units for those of all.",
        "Order and set of units recorded once.",
        "Most models use all of their layers, always.",
        "fsdp.backward.unused-unit",
    ),
    card(
        OverwritesGradients,
        "overwrites-gradients",
        "Sets the sharded gradient where it ought to add.",
        "`parameter.grad = shard` at the end of the reduction.",
        "Right for one micro-batch per step.",
        "fsdp.backward.forwards-and-backwards-entangled",
        "fsdp.accumulation.of-a-whole-model",
    ),
    card(
        FreesRecomputed,
        "frees-recomputed",
        "Ends a recomputation as if it were a forward.",
        "The post-forward hook does not know that backward runs.",
        "Tests do not checkpoint activations.",
        "fsdp.backward.activation-checkpointing",
        outcomes=("failed", "died"),
    ),
    card(
        NoneWithoutRows,
        "none-without-rows",
        "Has no gradient on ranks that have no rows.",
        "`if shard.numel()` before the assignment.",
        "Its peers wait for it in the next clipping.",
        "fsdp.backward.gradients-are-shards",
    ),
    card(
        FreshParameters,
        "fresh-parameters",
        "Wraps the shard in a Parameter of its own each time.",
        "`setattr(module, name, nn.Parameter(shard))` after every pass.",
        "The loss of the first steps is right, for nothing has moved.",
        "fsdp.training.same-parameter-objects",
        "fsdp.training.equals-full-batch",
    ),
    card(
        Dithers,
        "dithers",
        "Rounds stochastically with a generator that nobody seeds.",
        "Stochastic rounding in gradient compression.",
        "The error is one unit in the last place.",
        "fsdp.training.repeatable",
    ),
)
