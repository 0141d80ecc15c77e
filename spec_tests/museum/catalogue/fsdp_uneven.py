"""Near-misses of FSDP where steps, ranks or containers are not alike; most were ours, once."""

from spec_tests.museum.card import Source

UNIT = Source("solution.parallel.fsdp.unit")
SCHEDULE = Source("solution.parallel.fsdp.schedule")
API = Source("solution.parallel.fsdp.api")

UNIT.near_miss(
    "fsdp.thaws-at-a-gather",
    "fsdp.backward.frozen-while-kept",
    "- if not (is_fresh and all(p.trains_alike for p in self.parameters)):",
    "+ if not (is_fresh):",
    does="Tells a full parameter whether it trains only when it is gathered.",
    seen="ours, once, and FSDP2: what is kept since the last pass goes on as it was.",
    unseen="An optimizer steps between most freezings, and after a step everything is gathered.",
)

UNIT.near_miss(
    "fsdp.sends-what-it-used",
    "fsdp.backward.unused-on-some-ranks",
    "- sent = [p for p in self.parameters if p.unreduced is not None or p.is_trained]",
    "+ sent = [p for p in self.parameters if p.unreduced is not None]",
    does="Reduces the gradients that this rank has, and no others.",
    seen="ours, once, and FSDP2.",
    unseen="Ranks run the same branches in most models, and then have the same gradients.",
)

SCHEDULE.near_miss(
    "fsdp.leaves-additions-alone",
    "fsdp.refusals.parameters-added-later",
    "- unit.inventory.require_nothing_new(unit.name)",
    "+ pass",
    does="Trains parameters that are added after sharding on each rank by itself.",
    seen="ours, once, and FSDP2.",
    unseen="They are added to all ranks alike, and the loss falls.",
)

SCHEDULE.near_miss(
    "fsdp.makes-dataclasses-anew",
    "fsdp.forward.containers-of-ones-own",
    "  if isinstance(values, type | nn.Module) or id(values) in around:",
    "      return values",
    "+ if dataclasses.is_dataclass(values) and not isinstance(values, type):",
    "+     fields = [field.name for field in dataclasses.fields(values) if field.init]",
    "+     new = {name: _map_tensors(change, getattr(values, name)) for name in fields}",
    "+     return dataclasses.replace(values, **new)",
    does="Makes a dataclass whose tensors change with its constructor.",
    seen="ours, once, and FSDP2: dataclasses.replace.",
    unseen="Most dataclasses only hold.",
)

SCHEDULE.near_miss(
    "fsdp.full-until-its-backward",
    "fsdp.accumulation.cleared-before-backward",
    "- unit.register_sharded()",
    "  is_outermost = self._outermost is unit",
    does="Shows the full parameters of a unit that stays unsharded until its backward.",
    seen="FSDP2, whose root does.",
    unseen="An optimizer clears the gradients of its shards; a model those that it shows.",
)

API.near_miss(
    "fsdp.averages-vectors-alone",
    "fsdp.backward.rest-with-a-layers-name",
    "- replicated = [p for p in module.named_parameters() if not isinstance(p[1], DTensor)]",
    "+ vectors = [p for p in module.named_parameters() if p[1].ndim == 1]",
    "+ replicated = [p for p in vectors if not isinstance(p[1], DTensor)]",
    does="Averages parameters outside of layers only if they have one dim.",
    seen='"norms and biases".',
    unseen="Until a model has a table of its own, of positions say.",
)

API.near_miss(
    "fsdp.tables-in-full",
    "fsdp.precision.of-a-table",
    "+ is_table = any(isinstance(layer, nn.Embedding) for layer in layers)",
    "- fully_shard(layers, mp_policy=policy)",
    "+ fully_shard(layers, mp_policy=_NO_CASTS if is_table else policy)",
    does="Leaves a whole model's tables in their own dtype.",
    seen="compute_dtype, for the layers that multiply.",
    unseen="The next layer casts its input, and the loss is a little better.",
)

API.near_miss(
    "fsdp.strips-everywhere",
    "fsdp.init.names-like-a-prefix",
    "      name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()",
    "-     for name, p in model.named_parameters()",
    "+     for name, p in ((n.replace('module.', ''), p) for n, p in model.named_parameters())",
    "  }",
    does="Takes the wrapper's prefix out of names wherever it occurs.",
    seen="`str.replace`.",
    unseen='Few children have a name that ends in "module".',
)

SCHEDULE.near_miss(
    "fsdp.shows-what-was-open",
    "fsdp.accumulation.after-an-interrupted-backward",
    "- if self._queued_end is end:  # it was interrupted",
    "+ if False:  # it was interrupted",
    does="After a backward that raised shows the full parameters of the units that it was in.",
    seen="ours, once, and FSDP2.",
    unseen="An optimizer holds the shards; a model's zero_grad clears those that it shows.",
)

UNIT.near_miss(
    "fsdp.one-optimizer-counts",
    ("fsdp.lifecycle.fresh-after-step", "fsdp.programs.any-situation"),
    "- unit.num_updates += any(id(p.sharded) in stepped for p in unit.parameters)",
    "+ unit.num_updates += id(unit.parameters[0].sharded) in stepped",
    does="Asks of one parameter of a unit whether an optimizer has stepped.",
    seen="`unit.parameters[0]`",
    unseen="One optimizer holds all parameters of a unit, unless weights and biases are apart.",
)
