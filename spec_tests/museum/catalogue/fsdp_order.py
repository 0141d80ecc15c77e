"""Near-misses of sharded data parallelism: order and overlap of messages, and settings."""

from __future__ import annotations

from spec_tests.museum.card import Source

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")
API = Source("solution.parallel.fsdp.api")
REDUCER = Source("solution.parallel.reducer")

FSDP.near_miss(
    "fsdp.gathers-twice",
    ("fsdp.traffic.copies-per-step", "fsdp.traffic.step-of-a-whole-model"),
    "  whole = own.new_empty(self.size() * own.numel())",
    "+ dist.all_gather_into_tensor(whole, own, group=self.group)",
    does="Gathers everything twice.",
    seen="A gather in a hook of the module and one in a hook of its parent.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.frees-in-windows",
    "fsdp.traffic.copies-per-window",
    "  self.in_backward = True",
    "+ self.reshard_after_backward = True",
    does="Frees after every backward.",
    seen="`set_reshard_after_backward` sets an attribute that nobody reads.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.sends-frozen",
    "fsdp.programs.any-production-situation",
    "  def reduce(self, pieces: list[Piece]) -> None:",
    "+     frozen = sum(p.parameter.numel() for p in self.pieces if not p.parameter.requires_grad)",
    "+     if pieces and frozen:",
    "+         dist.all_reduce(pieces[0].local.new_zeros(frozen), group=self.group)",
    does="Reduces zeros for frozen parameters.",
    seen="One flat buffer for the whole unit.",
    unseen="The result is thrown away; fine-tuning pays for the whole model.",
)

FSDP.near_miss(
    "fsdp.one-by-one",
    "fsdp.traffic.one-gather-per-unit",
    "- return list(found.values())",
    "+ return [[piece] for piece in self.pieces]",
    "...",
    "- self.reduce([p for p in pieces if p.pending is not None])",
    "+ for piece in pieces:",
    "+     self.reduce([] if piece.pending is None else [piece])",
    does="Sends parameter by parameter.",
    seen="A loop over parameters around a collective.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.asks-its-peers",
    "fsdp.traffic.same-on-all-ranks",
    "  self.run.order.clear()",
    '+ self.peers = getattr(self, "peers", None) or dist.new_group([0, 1])',
    "+ if self.rank() < 2:",
    "+     dist.all_reduce(torch.zeros(1), group=self.peers)",
    does="Sends something among the ranks that have rows alone.",
    seen="pytorch issue 174862.",
    unseen="With rows on every rank all do the same.",
)

FSDP.near_miss(
    "fsdp.gathers-anew",
    "fsdp.programs.any-production-situation",
    "- return bool(self.gathered == self.version())",
    "+ return False",
    does="Gathers units that are unsharded already.",
    seen="No state that says that the full weights are there.",
    unseen="The numbers are right.",
)

SHARD.near_miss(
    "fsdp.no-prefetch",
    "fsdp.order.gathers-ahead-in-backward",
    "- return super().next_in_backward() if hints is None else [*hints]",
    "+ return hints or []",
    does="Gathers each unit in backward when it is needed.",
    seen="The straightforward hook.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.reduces-after-backward",
    "fsdp.order.reduces-during-backward",
    "  def post_backward(self) -> None:",
    "+     return",
    does="Reduces all units at the end of backward.",
    seen="One callback in place of a hook for each unit.",
    unseen="The numbers are right.",
)

SHARD.near_miss(
    "fsdp.ignores-hints",
    "fsdp.order.hints-are-followed",
    "- self._plain_fsdp.forward_prefetch = [m._plain_fsdp for m in modules]",
    "+ pass",
    "...",
    "- self._plain_fsdp.backward_prefetch = [m._plain_fsdp for m in modules]",
    "+ pass",
    does="Stores hints and never reads them.",
    seen="A setter that was written for the signature's sake.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.shares-prefetch",
    "fsdp.order.hints-change-no-bit",
    "  Never used alone: `PlainFsdp` adds casts, loads and recovery, and marks modules as units.",
    '  """',
    "+ ahead = []",
    "...",
    "  if not self.is_unsharded and self.flying is None:",
    "+     self.ahead.append(self)",
    "...",
    "+ other = self.ahead.pop(0) if self.ahead else self",
    "+ if other is not self and other.flying is not None and self.flying is None:",
    "+     self.flying, other.flying = (self.version(), other.flying[1]), None",
    "  if self.flying is None:",
    does="Takes the unit that was gathered ahead for its own.",
    seen="One slot for the gather in flight, in place of one for each unit.",
    unseen="Where hints name the next unit, it is right.",
)

FSDP.near_miss(
    "fsdp.drops-reductions",
    "fsdp.schedule.waits-for-every-launch",
    "- dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    "+ dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group, async_op=True)",
    does="Launches each reduction and waits for none.",
    seen="A blocking call was made asynchronous, and its result is a handle now.",
    unseen="Nothing raises: the shard has its shape, and the buffer's old values are small.",
)

FSDP.near_miss(
    "fsdp.reads-before-wait",
    "fsdp.schedule.same-gradients",
    "- dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    "+ handle = dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group, async_op=True)",
    '+ self.run.late = [*getattr(self.run, "late", []), handle]',
    "...",
    "  self.run.order.clear()",
    '+ for handle in self.run.__dict__.pop("late", []):',
    "+     handle.wait()",
    does="Divides and assigns each reduced shard at once and waits at the end of the backward.",
    seen="All waits in one place, and the division stayed where it was.",
    unseen="Every handle is waited for, as a review would ask.",
)

FSDP.near_miss(
    "fsdp.drops-until-last",
    "fsdp.accumulation.last-backward",
    "  def assign(self, piece: Piece, shard: torch.Tensor) -> None:",
    "+     if not self.is_last_backward:",
    "+         return",
    does="Reduces before the last backward as well, and keeps the last one's gradients alone.",
    seen="A flag that skips the end of a backward, where gradients are put into their places.",
    unseen="Windows in tests are switched by set_requires_gradient_sync.",
)

FSDP.near_miss(
    "fsdp.divides-by-both",
    "fsdp.backward.divide-factor",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or 1) / self.mesh.size()",
    does="Divides by the factor what it has averaged.",
    seen="ReduceOp.AVG with a factor on top.",
    unseen="Adam does not care for the scale of gradients.",
)

FSDP.near_miss(
    "fsdp.all-reduces-each-time",
    "fsdp.accumulation.all-reduce-at-the-last",
    "@ spec_tests.plain.fully_shard",
    "+ def set_requires_all_reduce(self, flag: bool, *, recurse: bool = True) -> None:",
    "+     pass",
    "  def set_is_last_backward(self, flag: bool) -> None:",
    does="Takes set_requires_all_reduce, and averages replicas after every backward.",
    seen="A setter that is taken and not read.",
    unseen="The gradients are right.",
)

FSDP.near_miss(
    "fsdp.unshards-anyway",
    "fsdp.traffic.not-unsharded-in-backward",
    does="Gathers in backward units that it was told not to gather.",
    seen="A setter that is taken and not read.",
    unseen="The gradients are right.",
)

FSDP.near_miss(
    "fsdp.list-as-units",
    (
        "fsdp.traffic.list-is-one-unit",
        "fsdp.backward.list-of-modules",
        "fsdp.footprint.part-of-a-list",
    ),
    does="Makes each module of a list a unit of its own.",
    seen="A loop over the list.",
    unseen="The gradients are right, unless the modules are tied.",
)

FSDP.near_miss(
    "fsdp.cuts-rows-anyway",
    "fsdp.refusals.other-dims",
    "@ spec_tests.plain.fully_shard",
    "- module, *, mesh=None, reshard_after_forward=None, mp_policy=None, ignored_params=()",
    "+ module, *, mesh=None, reshard_after_forward=None, mp_policy=None, ignored_params=(), **_",
    does="Takes shard_placement_fn, and cuts along dim 0.",
    seen="An option that is taken and not read.",
    unseen="Outputs are the same.",
)

API.near_miss(
    "fsdp.averages-children-alone",
    "fsdp.backward.rest-of-any-depth",
    "- replicated = [p for p in module.named_parameters() if not isinstance(p[1], DTensor)]",
    "+ found = [p for m in (module, *module.children()) for p in m.named_parameters('', False)]",
    "+ replicated = [p for p in found if not isinstance(p[1], DTensor)]",
    does="Averages replicated parameters of the model and its children, and none deeper.",
    seen="named_children for named_modules",
    unseen="Toys have their norms at the top.",
)

REDUCER.near_miss(
    "fsdp.thawed-trains-alone",
    "fsdp.backward.thawed-rest",
    "- for name, parameter in self._frozen:",
    "+ for name, parameter in ():",
    does="Hooks parameters that require a gradient at wrapping, and does not look again.",
    seen="the reference itself, until somebody read it",
    unseen="After a norm is unfrozen the loss falls on every rank, and the ranks drift apart.",
)
