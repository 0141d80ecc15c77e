"""Near-misses of sharded data parallelism over time: stale weights, lost and forgotten sums."""

from __future__ import annotations

from spec_tests.museum.card import Source

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")

# ----------------------------------------------------------------------------------- accumulation


FSDP.near_miss(
    "fsdp.ignores-sync-flag",
    "fsdp.accumulation.sends-no-gradient",
    "- if self.is_synchronised:",
    "+ if True:",
    does="Reduces every micro-batch.",
    seen="`set_requires_gradient_sync` sets an attribute that nobody reads.",
    unseen="The numbers are right; the traffic is N times what it should be.",
)

FSDP.near_miss(
    "fsdp.hidden-accumulator",
    "fsdp.accumulation.zero-grad-discards",
    "  def forget_what_was_cleared(self) -> None:",
    "+     return",
    "...",
    "- self.hold(pieces)",
    "+ pass",
    does="Keeps pending gradients out of reach of zero_grad.",
    seen="FSDP2 of torch 2.13.",
    unseen="Nobody skips a step in the middle of a window, until a loss overflows.",
)

FSDP.near_miss(
    "fsdp.reduces-used-only",
    "fsdp.programs.any-situation",
    "  if not unit.in_backward:",
    "      unit.forget_what_was_cleared()",
    "+     for piece in unit.pieces:",
    "+         piece.pending = None if unit.is_synchronised else piece.pending",
    does="Forgets pending gradients of units that the last micro-batch does not use.",
    seen="pytorch issue 69031.",
    unseen="Most models use all of their layers, always.",
)


# -------------------------------------------------------------------------------------- lifecycle


FSDP.near_miss(
    "fsdp.stale-after-step",
    (
        "fsdp.lifecycle.fresh-after-step",
        "fsdp.lifecycle.fresh-after-evaluation",
        "fsdp.lifecycle.fresh-after-gather-in-flight",
    ),
    "- return bool(self.gathered == self.version())",
    "+ return True",
    does="Computes with the full weights that are left from before.",
    seen="FSDP2 of torch 2.13, outside of reshard_after_forward=True.",
    unseen="The loss falls all the same, a step late.",
)

FSDP.near_miss(
    "fsdp.stale-ahead",
    "fsdp.programs.any-situation",
    "- if self.flying is not None and self.flying[0] != self.version():",
    "-     self.discard_gather()",
    "+ if self.flying is not None:",
    "+     self.flying = (self.version(), self.flying[1])",
    "@ spec_tests.plain.fully_shard",
    "  args, kwargs = super().pre_forward(module, args, kwargs)",
    "+ for unit in self.run.units[self.run.units.index(self) + 1 :][:1]:",
    "+     unit.prefetch()",
    "...",
    "  output = super().post_forward(module, args, output)",
    "+ if self.is_root:",
    "+     self.run.units[-1].prefetch()",
    does="Computes with weights that were gathered ahead, however long ago.",
    seen="CS336 solutions that gather two layers ahead, or for a backward that does not come.",
    unseen="In training every gather is used at once.",
)

SHARD.near_miss(
    "fsdp.first-group-only",
    "fsdp.lifecycle.fresh-after-step",
    '- stepped = {id(parameter) for group in groups for parameter in group["params"]}',
    '+ stepped = {id(parameter) for parameter in groups[0]["params"]}',
    does="Looks for its parameters in the optimizer's first group alone.",
    seen='`optimizer.param_groups[0]["params"]`.',
    unseen="A second group appears only with weight decay for some parameters.",
)

SHARD.near_miss(
    "fsdp.adopts-at-the-gather",
    "fsdp.lifecycle.fresh-after-load",
    "  def before_state_dict(self, *ignored: Any) -> None:",
    "-     self.adopt()",
    does="Sees the tensors of `load_state_dict(assign=True)` at the next gather, and no sooner.",
    seen="Ours, once: state_dict() shows the shards first, which were still those of construction.",
    unseen="A forward between the load and the next save; loads in one piece.",
)

SHARD.near_miss(
    "fsdp.never-forgets",
    "fsdp.lifecycle.after-exception",
    "- self.recover()",
    does="Keeps the state of a backward that was interrupted.",
    seen="FSDP2 of torch 2.13; a flag that is reset at the end of backward only.",
    unseen="No test raises in backward.",
)

FSDP.near_miss(
    "fsdp.one-pass",
    "fsdp.lifecycle.two-models",
    "- run = Pass()",
    '+ run = Unit.everyone = getattr(Unit, "everyone", None) or Pass()',
    "+ units = [] if run.units else run.units",
    "...",
    "- run.units.append(unit)",
    "+ units.append(unit)",
    does="Shares one state of a pass among all models.",
    seen="A module-level context for communication.",
    unseen="Tests shard one model at a time.",
    outcomes=("failed", "died", "hang"),
)

FSDP.near_miss(
    "fsdp.divides-by-world",
    "fsdp.lifecycle.part-of-the-world",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or dist.get_world_size())",
    does="Divides by the size of the world on any mesh.",
    seen="`dist.get_world_size()` without a group.",
    unseen="Most meshes are the world.",
)

FSDP.near_miss(
    "fsdp.divides-by-shards",
    "fsdp.lifecycle.hybrid",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or self.size())",
    does="Divides by the number of shards alone.",
    seen="pytorch issue 125484.",
    unseen="Adam does not feel a constant factor.",
)

FSDP.near_miss(
    "fsdp.no-world-of-one",
    "fsdp.lifecycle.world-of-one",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or max(2, self.mesh.size()))",
    does="Takes a world to have two ranks at least.",
    seen="A division factor that was written for several ranks.",
    unseen="Nobody shards over one rank in a test.",
)

SHARD.near_miss(
    "fsdp.gives-what-is-there",
    "fsdp.state-dict.sharded-at-any-moment",
    "  def before_state_dict(self, *ignored: Any) -> None:",
    "-     self.adopt()",
    "-     self.reshard()",
    "+     pass",
    does="Gives full weights in its state dict where they are unsharded.",
    seen="pytorch issues 131965 and 154655.",
    unseen="Tests save right after a step.",
)

SHARD.near_miss(
    "fsdp.refuses-nothing",
    ("fsdp.refusals.at-once-and-by-name", "fsdp.refusals.by-the-first-step"),
    "- refuses = True",
    "+ refuses = False",
    does="Shards every module that it is given.",
    seen="No check at the entrance.",
    unseen="Tests shard modules that can be sharded.",
)

FSDP.near_miss(
    "fsdp.reshards-late",
    "fsdp.lifecycle.by-hand",
    "  def reshard(self) -> None:",
    "+     return",
    does="Leaves full parameters registered after reshard.",
    seen="Freeing put off until the next forward.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.adds-to-nothing",
    "fsdp.backward.zero-grad-modes",
    "- gradient: Any = piece.parameter.grad",
    "- gradient._local_tensor.add_(shard)",
    '+ raise RuntimeError(f"expected gradients of one shape, got {tuple(shard.shape)}")',
    does="Fails where a parameter has a gradient already, and be it zeros.",
    seen="Autograd adds a full gradient to `.grad`, which has the shape of the shard by then.",
    unseen="`zero_grad` sets gradients to None unless it is told otherwise.",
)
