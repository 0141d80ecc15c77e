"""Near-misses of sharded data parallelism at its edges: meshes, dtypes, outputs, settings."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")
SCHEDULE = Source("solution.parallel.fsdp.schedule")
MODULE = Source("solution.parallel.fsdp.module")
API = Source("solution.parallel.fsdp.api")
UNIT = Source("solution.parallel.fsdp.unit")

SHARD.near_miss(
    "fsdp.trains-what-was-frozen-later",
    "fsdp.backward.frozen-for-a-step",
    "- if piece.full is not None:",
    "-     piece.full.requires_grad_(piece.parameter.requires_grad)",
    does="Goes by the `requires_grad` of the time when full parameters were made.",
    seen="`nn.Parameter(full, requires_grad=...)` once, in the first forward.",
    unseen="Layers are frozen before they are sharded, or never.",
)


@near_miss("fsdp.views-its-outputs", rejected_by="fsdp.backward.in-place-after-a-layer")
class ViewsItsOutputs(PlainFsdp):
    """Gives outputs that autograd takes for views and lets nobody write to.

    From: A custom autograd function around outputs, which returns its inputs.
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


FSDP.near_miss(
    "fsdp.fresh-on-a-line",
    "fsdp.programs.pairs-of-settings",
    "- return bool(self.gathered == self.version())",
    "+ return self.mesh.ndim == 2 or bool(self.gathered == self.version())",
    does="Notices updates of kept weights on meshes of one dimension alone.",
    seen="A branch for hybrid sharding that was written before the check for stale weights.",
    unseen="Kept weights are tried on one dimension, and hybrid sharding with the defaults.",
)

FSDP.near_miss(
    "fsdp.reduces-wide",
    "fsdp.traffic.step-of-a-whole-model",
    "- own = flat.new_empty(flat.numel() // self.size())",
    "+ flat = flat.double()",
    "+ own = flat.new_empty(flat.numel() // self.size())",
    does="Reduces in float64 for the sake of order.",
    seen="Sums that were to have the same bits on any number of ranks.",
    unseen="The numbers are right; twice the bytes are sent.",
)

FSDP.near_miss(
    "fsdp.rounds-shards",
    "fsdp.precision.shards-keep-their-values",
    "  local = self.cut(parameter.detach()).clone()",
    "+ local = local.to(self.policy.param_dtype or local.dtype).to(local.dtype)",
    does="Keeps float32 shards of weights that were rounded to bfloat16.",
    seen="`module.to(param_dtype)` before the shards are cut, and `.float()` after.",
    unseen="The dtypes are right, and so is every forward.",
)

SHARD.near_miss(
    "fsdp.frees-what-backward-reached",
    "fsdp.footprint.frozen-is-freed",
    "- missed = [u for u in self.run.units if not u.in_backward and u.reshard_after_backward]",
    "+ missed = []",
    does="Keeps full weights that were kept for a backward which never reached them.",
    seen="Freeing in the hooks of backward alone.",
    unseen="In a model that trains from end to end, backward reaches every layer.",
)

SCHEDULE.near_miss(
    "fsdp.int-for-false",
    "fsdp.footprint.kept-in-part",
    "- return not unit.reshard_after_forward",
    "+ return unit.reshard_after_forward is not True",
    does="Takes an int for False, and keeps everything after forward.",
    seen="`reshard_after_forward is True`.",
    unseen="Outputs, gradients and their traffic within a node are as they should be.",
)

MODULE.near_miss(
    "fsdp.always-recursive",
    "fsdp.traffic.not-recursive",
    "- inside: Iterable[object] = cast(nn.Module, module).modules() if recurse else [module]",
    "+ inside: Iterable[object] = cast(nn.Module, module).modules()",
    does="Sets every unit inside as well, whatever `recurse` says.",
    seen="An argument that is taken and not read.",
    unseen="Tests set the whole model.",
)

FSDP.near_miss(
    "fsdp.ignores-trained-alone",
    "fsdp.init.ignored-parameters",
    "- self.ignored = {id(parameter) for parameter in ignored}",
    "+ self.ignored = {id(parameter) for parameter in ignored if parameter.requires_grad}",
    does="Shards ignored parameters that are frozen.",
    seen="A filter for gradients that ends up in front of all.",
    unseen="Ignored parameters are mostly trained: experts, adapters.",
)

SHARD.near_miss(
    "fsdp.classes-by-name",
    "fsdp.init.classes-of-one-name",
    "  ALIVE: weakref.WeakSet[PlainFsdp] = weakref.WeakSet()",
    "+ MADE: dict[str, type] = {}",
    "...",
    '- return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})',
    '+ own = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})',
    "+ return MADE.setdefault(kind.__name__, own)",
    does="Keeps the classes of sharded modules by their names.",
    seen="torchtitan's simple_fsdp: a cache by class, whose second model gets the first one's.",
    unseen="A process has one model, whose classes have names of their own.",
)

SHARD.near_miss(
    "fsdp.knows-layers-by-class",
    "fsdp.footprint.subclass-in-a-whole-model",
    "- return [layer for layer in layers if layer not in inside]",
    "+ kinds = (nn.Linear, nn.Embedding)",
    "+ return [layer for layer in layers if layer not in inside and type(layer) in kinds]",
    does="Shards layers whose class is Linear or Embedding, and none made from these.",
    seen="`type(module) in (Linear, Embedding)`.",
    unseen="Memory alone shows it: parameters outside layers are replicated, and get their mean.",
)

API.near_miss(
    "fsdp.holds-back-the-rest-alone",
    "fsdp.accumulation.no-sync-of-a-whole-model",
    "- with self._reducer.no_sync(), self.module.no_sync():",
    "+ with self._reducer.no_sync():",
    does="Inside `no_sync` replicated parameters stay local, and the shards are reduced.",
    seen="A context of two parts, one of which is forgotten.",
    unseen="The gradients are right: reductions of each micro-batch add up.",
)

API.near_miss(
    "fsdp.returns-what-is-unsharded",
    "fsdp.lifecycle.full-parameters-of-what-is-unsharded",
    "- part.reshard()",
    "+ pass",
    does="Takes the full values that are registered, also if the shards changed since.",
    seen="`dict(model.named_parameters())`, where a DTensor is expected and a plain one is there.",
    unseen="Between steps all is sharded.",
)

UNIT.near_miss(
    "fsdp.keeps-discarded-gathers",
    "fsdp.programs.any-production-situation",
    "      handle.wait()",
    "-     self.buffers.give_back(message)",
    "  self._in_flight.clear()",
    does="Never gives back the memory of a gather that nobody used.",
    seen="A buffer that is returned where its rows are copied out, and nowhere else.",
    unseen="Every gather of a plain step is used.",
)

MODULE.near_miss(
    "fsdp.methods-end-unguarded",
    "fsdp.lifecycle.registered-method-after-exception",
    "- finally:",
    "+ except ArithmeticError:",
    "+     raise",
    "-     output = schedule.post_forward(unit, module, args, output)",
    "+ output = schedule.post_forward(unit, module, args, output)",
    does="Registers no shards where a registered method raised.",
    seen="FSDP2: the call, and then the post-forward work, without a `finally`.",
    unseen="Exceptions end most runs.",
)

SCHEDULE.near_miss(
    "fsdp.watches-positions-alone",
    "fsdp.footprint.peak-of-calls-by-keyword",
    "- watched: tuple[Any, Any] = _watched(hook, (args, kwargs), _differentiable((args, kwargs)))",
    "+ watched: tuple[Any, Any] = _watched(hook, (args, kwargs), _differentiable(args))",
    does="Knows by a unit's positional inputs when its backward is over.",
    seen="A hook that is given `args`, and of `kwargs` knows nothing.",
    unseen="The rest is reduced at the end of the backward: gradients are right.",
)
