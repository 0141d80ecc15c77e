"""Near-misses of sharded data parallelism: meshes, settings, what is left out or empty."""

from __future__ import annotations

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.fully_shard import PlainFsdp


@near_miss("fsdp.ignores-by-address", rejected_by="fsdp.init.ignored-on-the-meta-device")
class IgnoresByAddress(PlainFsdp):
    """Recognises ignored parameters by where their memory lies.

    From: `data_ptr()` as an identity.
    Unseen: On the meta device every address is 0, and nothing at all is sharded.
    """

    def managed(self):
        ignored = [p.data_ptr() for p in self.module.parameters() if id(p) in self.ignored]
        return {p: at for p, at in super().managed().items() if p.data_ptr() not in ignored}


@near_miss("fsdp.divides-by-replicas-too", rejected_by="fsdp.backward.divide-factor-over-replicas")
class DividesByReplicasToo(Patched):
    """Takes a divide factor in the place of the number of shards.

    From: Two stages, each of which divides.
    Unseen: Without replicas there is one stage.
    """

    module = "solution.parallel.fsdp.unit"
    find = "return (1.0, first, second) if factor is None else (1.0, 1.0, factor)"
    replace = "return 1.0, factor or first, second"


@near_miss("fsdp.sets-the-outermost-alone", rejected_by="fsdp.traffic.recursive")
class SetsTheOutermostAlone(Patched):
    """Changes when the unit that is told frees its weights, and none inside it.

    From: A setter that is written for one unit.
    Unseen: The numbers are right; every unit but one is gathered twice.
    """

    module = "solution.parallel.fsdp.module"
    find = """for unit in _units_in(self, recurse):
            unit.reshard_after_forward = reshard_after_forward"""
    replace = "self._fsdp_unit.reshard_after_forward = reshard_after_forward"


@near_miss("fsdp.calls-methods-uncast", rejected_by="fsdp.precision.registered-method")
class CallsMethodsUncast(Patched):
    """Gathers the weights for a registered method, and hands it the inputs as they came.

    From: The result of the shared pre-forward is not used.
    Unseen: In float32 there is nothing to cast.
    """

    module = "solution.parallel.fsdp.module"
    find = "            args, kwargs = schedule.pre_forward(unit, module, args, kwargs)\n"
    replace = "            schedule.pre_forward(unit, module, args, kwargs)\n"


@near_miss("fsdp.stays-on-the-meta-device", rejected_by="fsdp.init.meta-device")
class StaysOnTheMetaDevice(Patched):
    """Takes an assigned shard only where its device is the old one's.

    From: A comparison of everything about two tensors.
    Unseen: `to_empty` replaces the shards' memory, not the Parameters.
    """

    module = "solution.parallel.fsdp.param"
    find = "return tuple(parameter.shape), parameter.placements, parameter.device_mesh"
    replace = (
        "return tuple(parameter.shape), parameter.device, parameter.placements, "
        "parameter.device_mesh"
    )


@near_miss("fsdp.gathers-for-a-late-wait", rejected_by="fsdp.traffic.wait-after-reshard")
class GathersForALateWait(Patched):
    """A handle's wait gathers the unit where it is sharded, so that it is unsharded for certain.

    From: A wait that should be safe to call at any time.
    Unseen: Nobody waits for what was freed, except a loop with an early exit.
    """

    module = "solution.parallel.fsdp.module"
    find = "        self._unit.wait_for_unshard()\n"
    replace = "        self._unit.unshard()\n        self._unit.wait_for_unshard()\n"


@near_miss("fsdp.holds-back-for-no-replica", rejected_by="fsdp.programs.any-production-situation")
class HoldsBackForNoReplica(Patched):
    """Keeps reduced gradients back for an all-reduce that the mesh has no replicas for.

    From: One flag for two kinds of mesh.
    Unseen: Loops switch the all-reduce off on meshes of two dimensions.
    """

    module = "solution.parallel.fsdp.unit"
    find = "return not self.all_reduces and self.mesh.replica_group is not None"
    replace = "return not self.all_reduces"


@near_miss("fsdp.reduces-in-training-mode", rejected_by="fsdp.backward.in-evaluation-mode")
class ReducesInTrainingMode(Patched):
    """Reduces what is replicated where the module is in training mode.

    From: `self.training` read as "gradients are wanted".
    Unseen: Loops call `train()`. Fine-tuning without dropout does not, and ranks drift apart.
    """

    module = "solution.parallel.fsdp.api"
    find = "        self._reducer.finish()\n"
    replace = "        if self.training:\n            self._reducer.finish()\n"


@near_miss("fsdp.adds-hints-to-the-default", rejected_by="fsdp.order.hints-replace-the-default")
class AddsHintsToTheDefault(Patched):
    """Gathers the next unit ahead, and those of the hint as well.

    From: A list that is extended where it should be replaced.
    Unseen: All is gathered in time. Only the peak of memory grows, by a unit.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "for other in unit.backward_prefetch or chosen:"
    replace = "for other in [*chosen, *unit.backward_prefetch]:"


@near_miss("fsdp.mesh-outlives-its-group", rejected_by="fsdp.init.new-default-group")
class MeshOutlivesItsGroup(Patched):
    """Keeps the mesh that it made for the first default group, and uses it after that one is gone.

    From: A cache of meshes by size alone, or `functools.cache`.
    Unseen: Scripts make one default group; a notebook or a test suite makes many.
    """

    module = "solution.parallel.fsdp.options"
    find = "_made.setdefault(dist.group.WORLD, {})"
    replace = "_made.setdefault(_once, {})"


@near_miss(
    "fsdp.tells-one-row",
    rejected_by="fsdp.refusals.unequal-ranks-of-a-mesh",
    outcomes=("failed", "hang", "died"),
)
class TellsOneRow(Patched):
    """A rank whose first group disagrees does not say so in its second group.

    From: One comparison per group, each of what this rank holds.
    Unseen: On a mesh of one dim all ranks are in the group that disagrees.
    """

    module = "solution.parallel.agreement"
    find = "comm.agree(checksum if is_same else -1, group)"
    replace = "comm.agree(checksum, group)"


@near_miss("fsdp.frees-before-hooks", rejected_by="fsdp.forward.hooks-see-full-weights")
class FreesBeforeHooks(Patched):
    """Frees before the forward hooks that the module has already.

    From: `prepend=True`, copied from the hook before the forward.
    Unseen: Hooks of a test look at outputs, and not at weights.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "module.register_forward_hook(after, always_call=True)"
    replace = "module.register_forward_hook(after, prepend=True, always_call=True)"


@near_miss("fsdp.tuples-lose-their-names", rejected_by="fsdp.forward.nested-containers")
class TuplesLoseTheirNames(PlainFsdp):
    """Hands every tuple on as a plain one.

    From: `isinstance(value, tuple)`, and `tuple(...)` of its parts.
    Unseen: What a test passes are tensors, or tuples without names.
    """

    def watch_inputs(self, args, kwargs):
        args, kwargs = super().watch_inputs(args, kwargs)
        return args, {n: tuple(v) if isinstance(v, tuple) else v for n, v in kwargs.items()}


@near_miss("fsdp.casts-to-plain-tuples", rejected_by="fsdp.precision.casts-are-selective")
class CastsToPlainTuples(Patched):
    """Makes a plain tuple of every tuple in which it casts something.

    From: The same, in the cast.
    Unseen: Outputs of a test are tensors, and in float32.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "if type(values) is tuple:"
    replace = "if isinstance(values, tuple):"


@near_miss(
    "fsdp.gradients-in-the-first-dtype", rejected_by="fsdp.precision.two-dtypes-reduced-in-one"
)
class GradientsInTheFirstDtype(Patched):
    """Puts gradients of all dtypes in one message, and gives each the dtype of the first.

    From: A reduce_dtype that all of them are cast to anyway.
    Unseen: Parameters of a test have one dtype.
    """

    module = "solution.parallel.fsdp.unit"
    find = "return self.policy.reduce_dtype or own, parameter.local.dtype"
    replace = "return (self.policy.reduce_dtype or own,) * 2"


@near_miss("fsdp.repeats-are-new-calls", rejected_by="fsdp.footprint.peak-when-recomputed")
class RepeatsAreNewCalls(Patched):
    """Counts a forward that activation checkpointing repeats as the start of a new call.

    From: One pre-forward hook for both.
    Unseen: Values are right; whole gradients stay until the backward ends.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "if is_new and is_first:"
    replace = "if is_first:"


@near_miss("fsdp.repeats-are-not-cast", rejected_by="fsdp.precision.casts-when-recomputed")
class RepeatsAreNotCast(Patched):
    """Does not cast the output of a forward that a backward repeats.

    From: A repeated forward is taken for one whose output nobody sees.
    Unseen: Tests with checkpointing compute in float32.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "return _cast(output, unit.policy.output_dtype)"
    replace = "return _cast(output, unit.policy.output_dtype) if is_new else output"


@near_miss("fsdp.refuses-both-alone", rejected_by="fsdp.refusals.gather-extensions")
class RefusesBothAlone(Patched):
    """Refuses a class that has both methods of the all-gather, and not one that has one.

    From: `all(hasattr(...))`: what PyTorch would call has both.
    Unseen: Classes of a test are complete.
    """

    module = "solution.parallel.fsdp.options"
    find = """if hasattr(tensor, method):"""
    replace = """if hasattr(tensor, method) and hasattr(tensor, "fsdp_post_all_gather"):"""


@near_miss("fsdp.counts-below-zero", rejected_by="fsdp.lifecycle.shards-after-exception")
class CountsBelowZero(Patched):
    """Counts a call as ended that never began, where a hook of the user's raised before ours.

    From: A depth that goes up in one hook and down in another, which comes after exceptions too.
    Unseen: Exceptions of a test come from layers.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "unit.depth = max(0, unit.depth - 1)"
    replace = "unit.depth -= 1"


@near_miss("fsdp.knows-units-by-class", rejected_by="fsdp.init.ties-across-units")
class KnowsUnitsByClass(Patched):
    """Takes a parameter of another unit of the same class for one of its own.

    From: Units are compared by the name that errors call them by.
    Unseen: The tie of a test is that of an embedding and a head.
    """

    module = "solution.parallel.fsdp.options"
    find = "if owner is not None:"
    replace = "if owner is not None and owner != module:"
