"""Near-misses of sharded data parallelism, forward: wrong rows, wrong weights."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Piece

# ------------------------------------------------------------------------------------------- rows


class DealsRows(Unit):
    """Deals rows out in turns, and puts them together in blocks."""

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        rows = super().cut(whole).shape[0]
        return whole[self.rank() :: self.size()][:rows]


class DropsTail(Unit):
    """Keeps only as many rows as divide by the number of ranks."""

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        kept = whole.clone()
        kept[whole.shape[0] // self.size() * self.size() :] = 0
        return super().cut(kept)


class BalancesRows(Unit):
    """Deals rows out evenly, as tensor_split does, under a placement that means chunk."""

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.tensor_split(self.size())[self.rank()]


class ShapeFromLocal(Unit):
    """Leaves shape and stride of its DTensors to from_local."""

    def as_dtensor(self, local: torch.Tensor, like: torch.Tensor) -> DTensor:
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


class BookkeepsInBuffer(Unit):
    """Keeps its rank in a buffer of the module."""

    def __init__(self, module: nn.Module, *rest: Any) -> None:
        super().__init__(module, *rest)
        module.register_buffer("shard_rank", torch.tensor(self.rank()))


class HoldsFirstShards(Unit):
    """Gathers from the tensors of construction, wherever the values are by now."""

    held: tuple[torch.Tensor, ...] = ()

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        kept = super().keep(rows)
        self.held = (*self.held, kept)
        return kept

    def padded(self, local: torch.Tensor, piece: Piece) -> torch.Tensor:
        number = next(i for i, known in enumerate(self.pieces) if known is piece)
        return super().padded(self.held[number], piece)


# ---------------------------------------------------------------------------------------- forward


class CopiesOutInOrder(Unit):
    """Cuts the gathered buffer by parameter first and by rank second."""

    def cut_gathered(self, pieces: list[Piece], whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lengths = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return whole.split([self.size() * length for length in lengths])


class EvaluatesInHalf(Unit):
    """Gathers in bfloat16 where no gradient is recorded."""

    is_evaluation = False

    def pre_forward(self, *args: Any) -> Any:
        self.is_evaluation = not torch.is_grad_enabled()
        return super().pre_forward(*args)

    def cast_for_gather(self, own: torch.Tensor, piece: Piece) -> torch.Tensor:
        own = super().cast_for_gather(own, piece)
        return (own / 3).bfloat16().to(own.dtype) * 3 if self.is_evaluation else own


class KeepsInferenceTensors(Unit):
    """Makes its full parameters in whatever mode the first forward runs."""

    def making_tensors(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class HooksBareTensors(Unit):
    """Hooks outputs only where they are a tensor or a tuple of tensors."""

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor | tuple):
            return super().post_forward(module, args, output)
        super().post_forward(module, args, None)
        return output


class RoundsInBackward(Unit):
    """Gathers for backward along a path of its own, in bfloat16."""

    def cast_for_gather(self, own: torch.Tensor, piece: Piece) -> torch.Tensor:
        own = super().cast_for_gather(own, piece)
        return own.bfloat16().to(own.dtype) if self.in_backward else own


class PartInWrongOrder(Unit):
    """Puts a part of the world together in the order of its own ranks first."""

    def cut_gathered(self, pieces: list[Piece], whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if type(self.raf) is int and self.in_backward:
            whole = whole.view(self.size(), -1).roll(self.raf, dims=0).reshape(-1)
        return super().cut_gathered(pieces, whole)


IMPOSTORS: tuple[Impostor, ...] = (
    card(
        DealsRows,
        "deals-rows",
        "Deals rows out in turns and puts them together in blocks.",
        "`whole[rank::size]` next to an all-gather.",
        "Shapes are right, and a random model with mixed-up rows trains.",
        "fsdp.init.nothing-lost",
        "fsdp.forward.equals-plain",
    ),
    card(
        DropsTail,
        "drops-tail",
        "Keeps only as many rows as divide by the number of ranks.",
        "Floor division; the Efficient DL homework demands divisibility for it.",
        "Hidden sizes are powers of two, vocabularies are not.",
        "fsdp.init.nothing-lost-of-any-model",
        "fsdp.init.any-number-of-rows",
        "fsdp.forward.equals-any-plain-model",
        "fsdp.training.equals-full-batch-of-any-model",
    ),
    card(
        BalancesRows,
        "balances-rows",
        "Deals rows out evenly under a placement that means torch.chunk.",
        "`numpy.array_split` and `tensor_split` deal so.",
        "Sizes that divide are dealt out alike.",
        "fsdp.init.rows-as-torch-chunk",
    ),
    card(
        ShapeFromLocal,
        "shape-from-local",
        "Leaves shape and stride to DTensor.from_local.",
        "flashoptim issue 6.",
        "Right wherever the rows divide.",
        "fsdp.init.parameters-are-dtensors",
        "fsdp.init.dtensor-metadata",
    ),
    card(
        BookkeepsInBuffer,
        "bookkeeps-in-buffer",
        "Keeps its rank in a buffer of the module.",
        "`register_buffer` as a place for state that moves with the module.",
        "Nobody compares the keys of a checkpoint with the plain model's.",
        "fsdp.init.the-rest-stays",
    ),
    card(
        HoldsFirstShards,
        "holds-first-shards",
        "Gathers from the tensors of construction.",
        "A list of shards made once; `to_empty` and loading put other tensors there.",
        "Optimizers update in place.",
        "fsdp.init.meta-device",
    ),
    card(
        CopiesOutInOrder,
        "copies-out-in-order",
        "Cuts the gathered buffer by parameter first and by rank second.",
        "One flat gather for several parameters without the view [ranks, elements].",
        "Units of one parameter are right.",
        "fsdp.forward.equals-plain",
    ),
    card(
        EvaluatesInHalf,
        "evaluates-in-half",
        "Gathers in bfloat16 where no gradient is recorded.",
        "A fast path for evaluation.",
        "Validation loss is off in the third digit.",
        "fsdp.forward.without-gradients",
    ),
    card(
        KeepsInferenceTensors,
        "keeps-inference-tensors",
        "Cannot train after a first forward in inference mode.",
        "FSDP2 of torch 2.13, whose full parameters are made in whatever mode there is.",
        "Tests train first and evaluate later.",
        "fsdp.forward.evaluation-leaves-no-trace",
    ),
    card(
        HooksBareTensors,
        "hooks-bare-tensors",
        "Hooks outputs only where they are a tensor or a tuple of tensors.",
        "`isinstance(output, torch.Tensor)` in a forward hook.",
        "Toy models return a tensor; those of the hub return a dictionary.",
        "fsdp.forward.nested-containers",
        outcomes=("failed", "died"),
    ),
    card(
        RoundsInBackward,
        "rounds-in-backward",
        "Gathers in bfloat16 for backward.",
        "A second code path for the gather in backward.",
        "Integers survive it, and losses are those of forward.",
        "fsdp.forward.resharding-changes-no-bit",
    ),
    card(
        PartInWrongOrder,
        "part-in-wrong-order",
        "Puts the rows of a smaller world together in another order.",
        "Ranks of a sub-group taken for ranks of the world.",
        "An int for `reshard_after_forward` is seldom given.",
        "fsdp.forward.resharding-to-a-part",
    ),
)
