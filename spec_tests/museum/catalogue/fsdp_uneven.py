"""Near-misses of FSDP where steps, ranks or containers are not alike; most were ours, once."""

from __future__ import annotations

from spec_tests.museum.card import Patched, near_miss


@near_miss("fsdp.thaws-at-a-gather", rejected_by="fsdp.backward.frozen-while-kept")
class ThawsAtAGather(Patched):
    """Tells a full parameter whether it trains only when it is gathered.

    From: ours, once, and FSDP2: what is kept since the last pass goes on as it was.
    Unseen: An optimizer steps between most freezings, and after a step everything is gathered.
    """

    module = "solution.parallel.fsdp.unit"
    find = "is_fresh and all(p.trains_alike for p in self.parameters)"
    replace = "is_fresh"


@near_miss("fsdp.sends-what-it-used", rejected_by="fsdp.backward.unused-on-some-ranks")
class SendsWhatItUsed(Patched):
    """Reduces the gradients that this rank has, and no others.

    From: ours, once, and FSDP2.
    Unseen: Ranks run the same branches in most models, and then have the same gradients.
    """

    module = "solution.parallel.fsdp.unit"
    find = "if p.unreduced is not None or p.is_trained]"
    replace = "if p.unreduced is not None]"


@near_miss("fsdp.leaves-additions-alone", rejected_by="fsdp.refusals.parameters-added-later")
class LeavesAdditionsAlone(Patched):
    """Trains parameters that are added after sharding on each rank by itself.

    From: ours, once, and FSDP2.
    Unseen: They are added to all ranks alike, and the loss falls.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "unit.inventory.require_nothing_new(unit.name)"
    replace = "pass"


@near_miss("fsdp.makes-dataclasses-anew", rejected_by="fsdp.forward.containers-of-ones-own")
class MakesDataclassesAnew(Patched):
    """Makes a dataclass whose tensors change with its constructor.

    From: ours, once, and FSDP2: dataclasses.replace.
    Unseen: Most dataclasses only hold.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "    parts: list[tuple["
    replace = """    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        fields = [field.name for field in dataclasses.fields(values) if field.init]
        new = {name: _map_tensors(change, getattr(values, name)) for name in fields}
        return dataclasses.replace(values, **new)
    parts: list[tuple["""


@near_miss("fsdp.full-until-its-backward", rejected_by="fsdp.accumulation.cleared-before-backward")
class FullUntilItsBackward(Patched):
    """Shows the full parameters of what stays unsharded until its backward.

    From: FSDP2, whose root does.
    Unseen: An optimizer clears the gradients of its shards; a model those of what it shows.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "            unit.register_sharded()\n            is_outermost"
    replace = "            is_outermost"


@near_miss("fsdp.averages-vectors-alone", rejected_by="fsdp.backward.rest-with-a-layers-name")
class AveragesVectorsAlone(Patched):
    """Averages what belongs to no layer where it has one dim.

    From: "norms and biases".
    Unseen: Until a model has a table of its own, of positions say.
    """

    module = "solution.parallel.fsdp.api"
    find = "if not isinstance(p[1], DTensor)]"
    replace = "if p[1].ndim == 1 and not isinstance(p[1], DTensor)]"


@near_miss("fsdp.tables-in-full", rejected_by="fsdp.precision.of-a-table")
class TablesInFull(Patched):
    """Leaves a whole model's tables in their own dtype.

    From: compute_dtype, for the layers that multiply.
    Unseen: The next layer casts its input, and the loss is a little better.
    """

    module = "solution.parallel.fsdp.api"
    find = "fully_shard(layers, mp_policy=policy)"
    replace = """is_table = any(isinstance(layer, nn.Embedding) for layer in layers)
        fully_shard(layers, mp_policy=_NO_CASTS if is_table else policy)"""


@near_miss("fsdp.strips-everywhere", rejected_by="fsdp.init.names-like-a-prefix")
class StripsEverywhere(Patched):
    """Takes the wrapper's prefix out of names wherever it occurs.

    From: `str.replace`.
    Unseen: Few children have a name that ends in "module".
    """

    module = "solution.parallel.fsdp.api"
    find = "        name: (p.full_tensor() if"
    replace = "        name.replace('module.', ''): (p.full_tensor() if"


@near_miss(
    "fsdp.shows-what-was-open",
    rejected_by="fsdp.accumulation.after-an-interrupted-backward",
)
class ShowsWhatWasOpen(Patched):
    """After a backward that raised shows the full parameters of the units that it was in.

    From: ours, once, and FSDP2.
    Unseen: An optimizer holds the shards; a model's zero_grad clears what the model shows.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "if self._queued_end is end:"
    replace = "if False:"


@near_miss(
    "fsdp.one-optimizer-counts",
    rejected_by=("fsdp.lifecycle.fresh-after-step", "fsdp.programs.any-situation"),
)
class OneOptimizerCounts(Patched):
    """Asks of one parameter of a unit whether an optimizer has stepped.

    From: `unit.parameters[0]`
    Unseen: One optimizer holds all parameters of a unit, unless weights and biases are apart.
    """

    module = "solution.parallel.fsdp.unit"
    find = "any(id(p.sharded) in stepped for p in unit.parameters)"
    replace = "id(unit.parameters[0].sharded) in stepped"


@near_miss("fsdp.half-mean-of-shards", rejected_by="fsdp.precision.float16-over-replicas")
class HalfMeanOfShards(Patched):
    """Divides by the ranks that shard, where a sum of float16 is divided early.

    From: a second formula for one dtype, tried on one mesh
    Unseen: Without replicas it is the mean, and in float32 too.
    """

    module = "solution.parallel.fsdp.unit"
    find = "(factor or first * second) / power"
    replace = "(factor or first) / power"


@near_miss(
    "fsdp.any-step-counts", rejected_by="fsdp.lifecycle.anothers-step", outcomes=("hang", "died")
)
class AnyStepCounts(Patched):
    """Takes the step of any optimizer for an update of every unit.

    From: it is safe to gather once more
    Unseen: All ranks train the same models, until one trains another, and gathers alone.
    """

    module = "solution.parallel.fsdp.unit"
    find = "any(id(p.sharded) in stepped for p in unit.parameters)"
    replace = "bool(stepped)"


@near_miss(
    "fsdp.in-backward-for-ever", rejected_by="fsdp.lifecycle.fresh-after-interrupted-backward"
)
class InBackwardForEver(Patched):
    """After a backward that raised takes the units that it was in for being in it still.

    From: a flag that goes down in post-backward, and nowhere else
    Unseen: What follows is gathered anew; what that keeps is not looked at again.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "            unit.is_in_backward = False\n            unit.depth = 0"
    replace = "            unit.depth = 0"
