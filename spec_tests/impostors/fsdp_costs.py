"""Near-misses of sharded data parallelism that compute right: memory, and precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.fsdp_offer import card, offer
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import MixedPrecisionPolicy, Piece

# ----------------------------------------------------------------------------------------- memory


def shards_nothing() -> Functions:
    """Replicates everything and averages gradients, under the name of sharding."""

    def finish(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full_parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    return {
        "fsdp": lambda module, *, compute_dtype=None: module,
        "finish_gradient_synchronization": finish,
        "full_parameters": full_parameters,
        "fully_shard": None,
        "MixedPrecisionPolicy": None,
    }


class KeepsOriginals(Unit):
    """Keeps the parameters that it was given beside their shards."""

    originals: tuple[nn.Parameter, ...] = ()

    def shard(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> Piece:
        self.originals = (*self.originals, parameter)
        return super().shard(parameter, places)


class LeavesEmbeddings(Unit):
    """Shards the Linear layers of a whole model and replicates its embedding."""

    layers = nn.Linear


class LooksAtChildren(Unit):
    """Looks for layers among the children of a whole model."""

    shards_itself = False


class FreesWithGradients(Unit):
    """Frees full weights of a backward where a gradient of theirs arrives."""

    def reshard(self) -> None:
        if not self.in_backward or any(p.parameter.requires_grad for p in self.pieces):
            super().reshard()


class FreesNothing(Unit):
    """Drops its own references to full weights, and leaves autograd's."""

    def free(self) -> None:
        for piece in self.pieces:
            piece.full.grad = None


class IgnoresKeeping(Unit):
    """Reshards after every forward."""

    def reshards_after_forward(self) -> bool:
        return True


class FreesAtTheEnd(Unit):
    """Frees all units at the end of the root's pass."""

    def reshards_after_forward(self) -> bool:
        if self.is_root and self.run is not None:
            for unit in self.run.units:
                unit.reshard()
        return self.is_root

    def post_backward(self) -> None:
        pass


class KeepsHandles(Unit):
    """Notes every buffer that it ever sent."""

    sent: tuple[torch.Tensor, ...] = ()

    def send_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        self.sent = (*self.sent, own)
        return super().send_gather(whole, own)


# -------------------------------------------------------------------------------------- precision


class IgnoresDtype(Unit):
    """Computes in the parameters' own dtype, whatever the policy says."""

    def compute_dtype(self, piece: Piece) -> torch.dtype:
        return piece.parameter.dtype

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        return values


class HalfMasters(Unit):
    """Keeps its shards in the dtype of the computation."""

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return super().keep(rows).to(self.policy.param_dtype or rows.dtype)


class CastsBuffers(Unit):
    """Casts buffers along with weights."""

    def __init__(self, module: nn.Module, *rest: Any) -> None:
        super().__init__(module, *rest)
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.is_floating_point() and self.policy.param_dtype is not None:
                    part._buffers[name] = buffer.to(self.policy.param_dtype)


class ReducesInHalf(Unit):
    """Reduces in the dtype of the computation."""

    def send_reduction(self, flat: torch.Tensor) -> torch.Tensor:
        return super().send_reduction(flat.to(self.policy.param_dtype or flat.dtype)).to(flat.dtype)


class AccumulatesInHalf(Unit):
    """Adds up what waits in the dtype of the computation, and reduces in another."""

    def add_pending(self, piece: Piece, gradient: torch.Tensor) -> None:
        if piece.pending is not None:
            piece.pending = piece.pending.to(gradient.dtype) + gradient
            gradient = torch.zeros_like(gradient)
        super().add_pending(piece, gradient)
        assert piece.pending is not None
        piece.pending = piece.pending.to(self.policy.reduce_dtype or gradient.dtype)


class KeepsTheFirstShare(Unit):
    """Cast weights collect the gradient of their first use in a forward alone."""

    def register(self, *, sharded: bool) -> None:
        super().register(sharded=sharded)
        was_used = self.run is not None and self in self.run.order
        for piece in self.pieces:
            is_cast = self.compute_dtype(piece) != piece.parameter.dtype
            if is_cast and was_used and not sharded and not self.in_backward:
                for owner, name in piece.places:
                    owner._parameters[name] = piece.full.detach()


class GathersWide(Unit):
    """Gathers in the shards' dtype and casts afterwards."""

    def cast_for_gather(self, own: torch.Tensor, piece: Piece) -> torch.Tensor:
        return own


class OutermostWins(Unit):
    """Gives every unit the root's policy."""

    def find_root(self) -> None:
        super().find_root()
        assert self.run is not None
        for unit in self.run.units:
            if self.is_root:
                unit.policy = dataclasses.replace(self.policy)


class CastsIntegers(Unit):
    """Casts whatever is a tensor."""

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, lambda t: t.to(dtype), values)


def _half_policy(**forced: Any) -> Functions:
    """The plain functions, with a policy class that forces some of its fields."""

    def policy(**given: Any) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**{**given, **forced})

    return {**offer(Unit), "MixedPrecisionPolicy": policy}


_RIGHT = "The numbers are right."

IMPOSTORS: tuple[Impostor, ...] = (
    Impostor(
        "fsdp.shards-nothing",
        "Replicates everything and averages gradients.",
        "It passes every test of the CS336 assignment that can be passed.",
        _RIGHT,
        ("fsdp.footprint.shards-alone-stay",),
        functions=shards_nothing,
    ),
    card(
        KeepsOriginals,
        "keeps-originals",
        "Keeps the full parameters of before beside their shards.",
        "A list of the original parameters, for their shapes and names.",
        _RIGHT,
        "fsdp.footprint.shards-alone-stay",
    ),
    card(
        LeavesEmbeddings,
        "leaves-embeddings",
        "Replicates the embedding of a whole model.",
        "A solution of CS336 that gathers Linear layers only.",
        "Its numbers are right, and so is the memory of a tower of Linear layers.",
        "fsdp.footprint.embedding-of-a-whole-model",
    ),
    card(
        LooksAtChildren,
        "looks-at-children",
        "Replicates a whole model that is a layer itself.",
        "`for name, child in module.named_children()` in two solutions of CS336.",
        "Models are more than one layer, nearly always.",
        "fsdp.footprint.layer-as-the-whole-model",
    ),
    card(
        FreesWithGradients,
        "frees-with-gradients",
        "Never frees the full weights of frozen layers in backward.",
        "Freeing hangs on a hook of the gradient.",
        "Nothing is frozen when a model is trained from the start.",
        "fsdp.footprint.frozen-is-freed",
    ),
    card(
        FreesNothing,
        "frees-nothing",
        "Never frees full weights.",
        "`self.full = None` where autograd holds a view of it.",
        _RIGHT,
        "fsdp.footprint.freed-after-use",
    ),
    card(
        IgnoresKeeping,
        "ignores-keeping",
        "Reshards after every forward, whatever was asked for.",
        "An argument that is stored and never read.",
        _RIGHT,
        "fsdp.footprint.kept-on-request",
    ),
    card(
        FreesAtTheEnd,
        "frees-at-the-end",
        "Frees all units at the end of a pass.",
        "Freeing in one callback is simpler than in many hooks.",
        "Before and after a pass, memory is as it should be.",
        "fsdp.footprint.peak-does-not-grow-with-depth",
    ),
    card(
        KeepsHandles,
        "keeps-handles",
        "Notes every buffer that it ever sent.",
        "A list of handles that is never cleared.",
        "Ten steps fit into any memory.",
        "fsdp.footprint.no-growth",
    ),
    card(
        Unit,
        "zeros-while-waiting",
        "Keeps zeros in `.grad` while the full gradients wait for their reduction.",
        "Ours, once: what stands for a pending gradient was as large as the shard's own.",
        "It is freed with the reduction; between steps nothing is left of it.",
        "fsdp.footprint.window-costs-one-copy",
    ),
    card(
        IgnoresDtype,
        "ignores-dtype",
        "Computes in the parameters' own dtype.",
        "An argument that is stored and never read; CS336's float16 tests accept it.",
        "It is more precise than asked for.",
        "fsdp.precision.computes-in-its-dtype",
    ),
    card(
        HalfMasters,
        "half-masters",
        "Keeps its shards in bfloat16.",
        "`module.to(compute_dtype)` before sharding.",
        "Updates are lost later, when they have become small.",
        "fsdp.precision.updates-are-not-lost",
        "fsdp.precision.shards-keep-their-dtype",
    ),
    card(
        CastsBuffers,
        "casts-buffers",
        "Casts buffers along with weights.",
        "pytorch issue 146114.",
        "Running statistics lose their last digits slowly.",
        "fsdp.precision.shards-keep-their-dtype",
    ),
    card(
        ReducesInHalf,
        "reduces-in-half",
        "Reduces in bfloat16 whatever reduce_dtype says.",
        "The buffer takes the gradients' dtype.",
        "Two ranks hardly round.",
        "fsdp.precision.reduces-in-its-dtype",
    ),
    card(
        AccumulatesInHalf,
        "accumulates-in-half",
        "Adds up micro-batches in bfloat16 and reduces in float32.",
        "DeepSpeed issues 2352 and 2768.",
        "With one micro-batch per step nothing is added up.",
        "fsdp.precision.accumulates-in-its-dtype",
    ),
    card(
        KeepsTheFirstShare,
        "keeps-the-first-share",
        "Loses one of two gradients of a layer that is called twice in half precision.",
        "Each call makes a cast copy of its own, and one of them has the hook.",
        "In float32, and where layers are called once, it is right.",
        "fsdp.precision.layer-used-twice",
    ),
    card(
        GathersWide,
        "gathers-wide",
        "Gathers in float32 and casts afterwards.",
        "The cast stands where the weights are used.",
        "The numbers are right; twice the bytes are sent.",
        "fsdp.precision.sends-in-its-dtype",
        "fsdp.precision.gathers-in-its-dtype",
    ),
    card(
        OutermostWins,
        "outermost-wins",
        "Gives every unit the policy of the root.",
        "One policy stored per model.",
        "A norm that was to compute in float32 computes in bfloat16.",
        "fsdp.precision.casts-are-selective",
    ),
    card(
        CastsIntegers,
        "casts-integers",
        "Casts integers and masks as well.",
        "`tree_map` over all tensors; torchtitan issue 2881.",
        "Small integers survive bfloat16.",
        "fsdp.precision.casts-are-selective",
    ),
    Impostor(
        "fsdp.always-casts-inputs",
        "Casts inputs whatever cast_forward_inputs says.",
        "A field of the policy that nobody reads.",
        "The default is to cast.",
        ("fsdp.precision.casts-are-selective",),
        functions=lambda: _half_policy(cast_forward_inputs=True),
    ),
)
