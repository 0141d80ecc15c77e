"""Near-misses of FSDP where steps, ranks or containers are not alike; most were ours, once."""

from __future__ import annotations

from spec_tests.impostors.card import Patched, near_miss


@near_miss("fsdp.thaws-at-a-gather", rejected_by="fsdp.backward.frozen-while-kept")
class ThawsAtAGather(Patched):
    """Tells a full parameter whether it trains only when it is gathered.

    From: ours, once, and FSDP2: what is kept since the last pass goes on as it was.
    Unseen: An optimizer steps between most freezings, and after a step everything is gathered.
    """

    module = "solution.parallel.fsdp.param"
    find = "self.sharded._version, local._version, self.sharded.requires_grad"
    replace = "self.sharded._version, local._version, True"


@near_miss("fsdp.sends-what-it-used", rejected_by="fsdp.backward.unused-on-some-ranks")
class SendsWhatItUsed(Patched):
    """Reduces the gradients that this rank has, and no others.

    From: ours, once, and FSDP2.
    Unseen: Ranks run the same branches in most models, and then have the same gradients.
    """

    module = "solution.parallel.fsdp.unit"
    find = "if p.unreduced is not None or p.is_trained]"
    replace = "if p.unreduced is not None]"


@near_miss(
    "fsdp.reduces-what-has-gradients",
    rejected_by="fsdp.backward.unused-on-some-ranks",
    outcomes=("hang",),
)
class ReducesWhatHasGradients(Patched):
    """Starts no reduction of a unit of which this rank has used no parameter.

    From: ours, once, and FSDP2.
    Unseen: Until a rank skips a layer whose module it calls.
    """

    module = "solution.parallel.fsdp.schedule"
    find = "unit.has_something_to_send(is_called=is_called)"
    replace = "unit.has_something_to_send(is_called=False)"


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
