"""Near-misses of sharded data parallelism: meshes, settings, what is left out or empty."""

from spec_tests.museum.card import Source

FSDP = Source("spec_tests.plain.fsdp")
UNIT = Source("solution.parallel.fsdp.unit")
MODULE = Source("solution.parallel.fsdp.module")
PARAM = Source("solution.parallel.fsdp.param")
SCHEDULE = Source("solution.parallel.fsdp.schedule")
OPTIONS = Source("solution.parallel.fsdp.options")
AGREEMENT = Source("solution.parallel.agreement")

FSDP.near_miss(
    "fsdp.ignores-by-address",
    "fsdp.init.ignored-on-the-meta-device",
    "+ ignored = [p.data_ptr() for p in self.module.parameters() if id(p) in self.ignored]",
    "  for owner in modules_without_units(self.module):",
    "...",
    "- if parameter is None or id(parameter) in self.ignored:",
    "+ if parameter is None or parameter.data_ptr() in ignored:",
    does="Recognises ignored parameters by where their memory lies.",
    seen="`data_ptr()` as an identity.",
    unseen="On the meta device every address is 0, and nothing at all is sharded.",
)

MODULE.near_miss(
    "fsdp.sets-the-outermost-alone",
    "fsdp.traffic.recursive",
    "- for unit in _units_in(self, recurse):",
    "-     unit.reshard_after_forward = reshard_after_forward",
    "+ self._fsdp_unit.reshard_after_forward = reshard_after_forward",
    does="Changes when the unit itself frees its weights, and not the units inside it.",
    seen="A setter that is written for one unit.",
    unseen="The numbers are right; every unit but one is gathered twice.",
)

MODULE.near_miss(
    "fsdp.calls-methods-uncast",
    "fsdp.precision.registered-method",
    "- args, kwargs = schedule.pre_forward(unit, module, args, kwargs)",
    "+ schedule.pre_forward(unit, module, args, kwargs)",
    does="Gathers the weights for a registered method, and hands it the inputs as they came.",
    seen="The result of the shared pre-forward is not used.",
    unseen="In float32 there is nothing to cast.",
)

PARAM.near_miss(
    "fsdp.stays-on-the-meta-device",
    "fsdp.init.meta-device",
    "- return tuple(parameter.shape), parameter.placements, parameter.device_mesh",
    "+ device = parameter.device",
    "+ return tuple(parameter.shape), device, parameter.placements, parameter.device_mesh",
    does="Takes an assigned shard only where its device is the old one's.",
    seen="A comparison of everything about two tensors.",
    unseen="`to_empty` replaces the shards' memory, not the Parameters.",
)

MODULE.near_miss(
    "fsdp.gathers-for-a-late-wait",
    "fsdp.traffic.wait-after-reshard",
    '  """Wait for the all-gather; register the unsharded parameters, unless all is sharded."""',
    "+ self._unit.unshard()",
    does="A handle's wait gathers a unit that is sharded by then, so that it is unsharded.",
    seen="A wait that should be safe to call at any time.",
    unseen="Nobody waits for a freed unit, except a loop with an early exit.",
)

SCHEDULE.near_miss(
    "fsdp.adds-hints-to-the-default",
    "fsdp.order.hints-replace-the-default",
    "- for other in unit.backward_prefetch or chosen:",
    "+ for other in [*chosen, *unit.backward_prefetch]:",
    does="Gathers the next unit ahead, and those of the hint as well.",
    seen="A list that is extended where it should be replaced.",
    unseen="All is gathered in time. Only the peak of memory grows, by a unit.",
)

OPTIONS.near_miss(
    "fsdp.mesh-outlives-its-group",
    "fsdp.init.new-default-group",
    "- made = _made.setdefault(dist.group.WORLD, {})",
    "+ made = _made.setdefault(_once, {})",
    does="Keeps the mesh that it made for the first default group after that group is gone.",
    seen="A cache of meshes by size alone, or `functools.cache`.",
    unseen="Scripts make one default group; a notebook or a test suite makes many.",
)

AGREEMENT.near_miss(
    "fsdp.tells-one-row",
    "fsdp.refusals.unequal-ranks-of-a-mesh",
    "- is_same = comm.agree(checksum if is_same else -1, group) and is_same",
    "+ is_same = comm.agree(checksum, group) and is_same",
    does="A rank whose first group disagrees does not say so in its second group.",
    seen="One comparison per group, each of what this rank holds.",
    unseen="On a mesh of one dim all ranks are in the group that disagrees.",
    outcomes=("failed", "hang", "died"),
)

SCHEDULE.near_miss(
    "fsdp.frees-before-hooks",
    "fsdp.forward.hooks-see-full-weights",
    "- module.register_forward_hook(after, always_call=True),",
    "+ module.register_forward_hook(after, prepend=True, always_call=True),",
    does="Frees before the forward hooks that the module has already.",
    seen="`prepend=True`, copied from the hook before the forward.",
    unseen="Hooks of a test look at outputs, and not at weights.",
)

FSDP.near_miss(
    "fsdp.tuples-lose-their-names",
    "fsdp.forward.nested-containers",
    "- return tree_unflatten(leaves, spec)",
    "+ args, kwargs = tree_unflatten(leaves, spec)",
    "+ return args, {n: tuple(v) if isinstance(v, tuple) else v for n, v in kwargs.items()}",
    does="Hands every tuple on as a plain one.",
    seen="`isinstance(value, tuple)`, and `tuple(...)` of its parts.",
    unseen="Tests pass tensors, or tuples without names.",
)

UNIT.near_miss(
    "fsdp.gradients-in-the-first-dtype",
    "fsdp.precision.two-dtypes-reduced-in-one",
    "- return self.policy.reduce_dtype or own, parameter.local.dtype",
    "+ return (self.policy.reduce_dtype or own,) * 2",
    does="Puts gradients of all dtypes in one message, and gives each the dtype of the first.",
    seen="A reduce_dtype that all of them are cast to anyway.",
    unseen="Parameters of a test have one dtype.",
)

SCHEDULE.near_miss(
    "fsdp.repeats-are-new-calls",
    "fsdp.footprint.peak-when-recomputed",
    "- if is_new and is_first:",
    "+ if is_first:",
    does="Counts a forward that activation checkpointing repeats as the start of a new call.",
    seen="One pre-forward hook for both.",
    unseen="Values are right; whole gradients stay until the backward ends.",
)

SCHEDULE.near_miss(
    "fsdp.repeats-are-not-cast",
    "fsdp.precision.casts-when-recomputed",
    "- return _cast(output, unit.policy.output_dtype)",
    "+ return _cast(output, unit.policy.output_dtype) if is_new else output",
    does="Does not cast the output of a forward that a backward repeats.",
    seen="A repeated forward is taken for one whose output nobody sees.",
    unseen="Tests with checkpointing compute in float32.",
)

OPTIONS.near_miss(
    "fsdp.refuses-both-alone",
    "fsdp.refusals.gather-extensions",
    "- if hasattr(tensor, method):",
    '+ if hasattr(tensor, method) and hasattr(tensor, "fsdp_post_all_gather"):',
    does="Refuses a class that has both methods of the all-gather, and not one that has one.",
    seen="`all(hasattr(...))`: what PyTorch would call has both.",
    unseen="Classes of a test are complete.",
)

SCHEDULE.near_miss(
    "fsdp.counts-below-zero",
    "fsdp.lifecycle.shards-after-exception",
    "- unit.depth = max(0, unit.depth - 1)  # a hook of the user's may have raised before ours",
    "+ unit.depth -= 1  # a hook of the user's may have raised before ours",
    does="Counts a call as ended that never began, where a hook of the user's raised before ours.",
    seen="A depth that goes up in one hook and down in another, which comes after exceptions too.",
    unseen="Exceptions of a test come from layers.",
)

OPTIONS.near_miss(
    "fsdp.knows-units-by-class",
    "fsdp.init.ties-across-units",
    "- if owner is not None:",
    "+ if owner is not None and owner != module:",
    does="Takes a parameter of another unit of the same class for one of its own.",
    seen="Units are compared by the name that errors call them by.",
    unseen="The tie of a test is that of an embedding and a head.",
)

MODULE.near_miss(
    "fsdp.registers-what-is-not-sharded",
    "fsdp.lifecycle.registered-method-of-unsharded",
    "- if not isinstance(module, FSDPModule):",
    "-     return",
    does="Looks for the unit of a module that has none when its method is registered.",
    seen="A mutant of the reference that no clause rejected: the early return dropped.",
    unseen="A user who registers a method has sharded the module, unless a switch is off.",
)

MODULE.near_miss(
    "fsdp.slices-are-sharded",
    "fsdp.init.slices-are-plain",
    "- original: Any = cls.__mro__[2]",
    "- self = original.__new__(original)",
    "- self.__init__(*args, **kwargs)  # type: ignore[misc]  # an object of another class",
    "- return self",
    "+ return super().__new__(cls)",
    does="Makes a slice of a sharded container an object of the sharded class, without a unit.",
    seen="The class of a module is replaced, and `nn.Sequential` slices by `self.__class__(...)`.",
    unseen="Slicing is for pipelines and for looking at a model, after it was sharded.",
)
