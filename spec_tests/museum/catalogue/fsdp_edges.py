"""Near-misses of sharded data parallelism at its edges: meshes, dtypes, outputs, settings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.fsdp import Unit
from spec_tests.plain.fully_shard import PlainFsdp


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
class IntForFalse(Patched):
    """Takes an int for False, and keeps everything after forward.

    From: `reshard_after_forward is True`.
    Unseen: Outputs, gradients and their traffic within a node are as they should be.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "return not unit.reshard_after_forward"
    replace = "return unit.reshard_after_forward is not True"


@near_miss("fsdp.always-recursive", rejected_by="fsdp.traffic.not-recursive")
class AlwaysRecursive(Patched):
    """Sets every unit inside as well, whatever `recurse` says.

    From: An argument that is taken and not read.
    Unseen: Tests set the whole model.
    """

    module = "solution.parallel.fsdp.module"
    find = "cast(nn.Module, module).modules() if recurse else [module]"
    replace = "cast(nn.Module, module).modules()"


@near_miss("fsdp.ignores-trained-alone", rejected_by="fsdp.init.ignored-parameters")
class IgnoresTrainedAlone(PlainFsdp):
    """Shards what it is to ignore where that is frozen.

    From: A filter for gradients that ends up in front of all.
    Unseen: What is ignored is mostly trained: experts, adapters.
    """

    def __init__(self, module, mesh, raf, policy, ignored=()):
        super().__init__(module, mesh, raf, policy, [p for p in ignored if p.requires_grad])


@near_miss("fsdp.classes-by-name", rejected_by="fsdp.init.classes-of-one-name")
class ClassesByName(PlainFsdp):
    """Keeps the classes of sharded modules by their names.

    From: torchtitan's simple_fsdp: a cache by class, whose second model gets the first one's.
    Unseen: A process has one model, whose classes have names of their own.
    """

    made: ClassVar[dict[str, type]] = {}

    @classmethod
    def class_of(cls, kind):
        return cls.made.setdefault(kind.__name__, super().class_of(kind))


@near_miss("fsdp.knows-layers-by-class", rejected_by="fsdp.footprint.subclass-in-a-whole-model")
class KnowsLayersByClass(PlainFsdp):
    """Shards layers whose class is Linear or Embedding, and none made from these.

    From: `type(module) in (Linear, Embedding)`.
    Unseen: Memory alone: what is no layer is replicated, and gets its mean.
    """

    @classmethod
    def layers_of(cls, module):
        layers = super().layers_of(module)
        return [part for part in layers if type(part).__name__ in ("Linear", "Embedding")]


@near_miss(
    "fsdp.holds-back-the-rest-alone", rejected_by="fsdp.accumulation.no-sync-of-a-whole-model"
)
class HoldsBackTheRestAlone(Patched):
    """Inside `no_sync` what is replicated stays local, and the shards are reduced.

    From: A context of two parts, one of which is forgotten.
    Unseen: The gradients are right: reductions of each micro-batch add up.
    """

    module = "solution.parallel.fsdp.api"
    find = "with self._reducer.no_sync(), self.module.no_sync():"
    replace = "with self._reducer.no_sync():"


@near_miss(
    "fsdp.returns-what-is-unsharded",
    rejected_by="fsdp.lifecycle.full-parameters-of-what-is-unsharded",
)
class ReturnsWhatIsUnsharded(Patched):
    """Takes the full values that are registered, whatever happened to the shards since.

    From: `dict(model.named_parameters())`, where a DTensor is expected and a plain one is there.
    Unseen: Between steps all is sharded.
    """

    module = "solution.parallel.fsdp.api"
    find = "            part.reshard()\n"
    replace = "            pass\n"


@near_miss("fsdp.keeps-discarded-gathers", rejected_by="fsdp.footprint.discarded-gathers")
class KeepsDiscardedGathers(Patched):
    """Never gives back the memory of a gather that nobody used.

    From: A buffer that is returned where its rows are copied out, and nowhere else.
    Unseen: Every gather of a plain step is used.
    """

    module = "solution.parallel.fsdp.unit"
    find = (
        "            handle.wait()\n            self.buffers.give_back(message)\n"
        "        self._in_flight.clear()"
    )
    replace = "            handle.wait()\n        self._in_flight.clear()"


@near_miss(
    "fsdp.trusts-what-flies",
    rejected_by=(
        "fsdp.lifecycle.fresh-after-gather-in-flight",
        "fsdp.programs.any-production-situation",
    ),
)
class TrustsWhatFlies(Patched):
    """Takes a gather in flight for current, whatever happened to the shards since it began.

    From: FSDP2, which asks nothing of the kind.
    Unseen: Gathers begin in the forward that uses them.
    """

    module = "solution.parallel.fsdp.unit"
    find = "        if self.state is not UnitState.SHARDED:\n            is_fresh"
    replace = "        if self.state is UnitState.UNSHARDED:\n            is_fresh"


@near_miss(
    "fsdp.methods-end-unguarded", rejected_by="fsdp.lifecycle.registered-method-after-exception"
)
class MethodsEndUnguarded(Patched):
    """Registers no shards where a registered method raised.

    From: FSDP2: the call, and then what is done after a forward, without a `finally`.
    Unseen: Exceptions end most runs.
    """

    module = "solution.parallel.fsdp.module"
    find = (
        "        finally:\n            output = schedule.post_forward(unit, module, args, output)"
    )
    replace = (
        "        except ArithmeticError:\n            raise\n"
        "        output = schedule.post_forward(unit, module, args, output)"
    )


@near_miss("fsdp.watches-positions-alone", rejected_by="fsdp.footprint.peak-of-calls-by-keyword")
class WatchesPositionsAlone(Patched):
    """Knows by a unit's positional inputs when its backward is over.

    From: A hook that is given `args`, and of `kwargs` knows nothing.
    Unseen: What is left is reduced at the end of the backward: gradients are right.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "_differentiable((args, kwargs))"
    replace = "_differentiable(args)"
