"""Right but unusual sharded modules: every clause up to level `correct` must accept these."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.fsdp_offer import offer
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Done, Piece


class Piecemeal(Unit):
    """One parameter at a time, nothing ahead of its use, everything reduced everywhere.

    Gathers by broadcasts and whenever it has not just gathered; divides first.
    """

    def by_dtype(self) -> list[list[Piece]]:
        return [[piece] for piece in self.pieces]

    def prefetch(self) -> None:
        pass

    def is_fresh(self) -> bool:
        return False

    def send_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        parts = whole.view(self.size(), -1)
        parts[self.rank()] = own
        for rank, part in enumerate(parts):
            dist.broadcast(part, group_src=rank, group=self.group)
        return Done()

    def reduce(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            super().reduce([piece])

    def cast_for_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / self.size()

    def send_reduction(self, flat: torch.Tensor) -> torch.Tensor:
        whole = flat.reshape(-1).clone()
        dist.all_reduce(whole, group=self.group)
        return whole.view(self.size(), -1)[self.rank()].clone()

    def divisor(self) -> int:
        return self.mesh.size() // self.size()


class RefusesAfterFailure(Unit):
    """After a backward that did not end, the model says so and does no more."""

    def recover(self) -> None:
        assert self.run is not None
        if self.is_root and self.run.is_callback_queued:
            raise RuntimeError("the last backward was interrupted: build the model anew")
        super().recover()


class GatherRows(torch.autograd.Function):
    """Full weights out of flat shards; backward gives this rank's part of the mean gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, layer: FlatLayer) -> torch.Tensor:
        ctx.layer = layer
        whole = own.new_empty(own.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, own)
        return whole[: layer.shape.numel()].view(layer.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # as documented
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

    def __init__(self, layer: Any, compute_dtype: Any) -> None:
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

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's forward with all rows of its weight."""
        dtype = self.compute_dtype or self.shard.dtype
        weight = GatherRows.apply(self.shard.to(dtype), self)
        if isinstance(self.layer, nn.Embedding):
            return nn.functional.embedding(x, weight)
        bias = self.layer.bias
        return nn.functional.linear(x, weight, None if bias is None else bias.to(dtype))


class FlatModel(nn.Module):
    """The whole-model shape as a course solution has it: no DTensor, the rest is replicated."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def finish(self) -> None:
        """Average what is replicated."""
        for name, parameter in self.named_parameters():
            if not name.endswith(".shard") and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
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


class Float32Model(FlatModel):
    """Float32 weights, whatever it is given, as a course has it: wider are rounded."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        for name, parameter in module.named_parameters():
            if parameter.element_size() < 4:
                raise ValueError(f"{name}: expected float32, got {parameter.dtype}")
        super().__init__(module.float(), compute_dtype)


def flat_shards(model: type[FlatModel] = FlatModel) -> Functions:
    """The contract's functions for flat shards."""
    return {
        "fsdp": lambda module, *, compute_dtype=None: model(module, compute_dtype),
        "full_parameters": lambda model: model.full_parameters(),
        "finish_gradient_synchronization": lambda model: model.finish(),
        # Not the reference's: its `fully_shard` would be judged here too.
        "fully_shard": None,
        "MixedPrecisionPolicy": None,
    }


def _card(unit: type[Unit], words: str, does: str) -> Impostor:
    return Impostor(f"benign.fsdp-{words}", does, "", "", (), functions=lambda: offer(unit))


IMPOSTORS = (
    _card(Unit, "plain", "The base of the impostors, with nothing overridden: the null one."),
    _card(RefusesAfterFailure, "refuses-after-failure", "An error after an interrupted backward."),
    _card(Piecemeal, "piecemeal", "Parameter by parameter, all-reduce and slice, divides first."),
    Impostor(
        "benign.fsdp-flat-shards",
        "The whole-model shape without DTensors: flat shards of rows that divide, recomputation.",
        "",
        "",
        (),
        functions=flat_shards,
    ),
    Impostor(
        "benign.fsdp-float32-weights",
        "Flat shards of float32, to which wider weights are rounded; narrower ones are refused.",
        "",
        "",
        (),
        functions=lambda: flat_shards(Float32Model),
    ),
)
