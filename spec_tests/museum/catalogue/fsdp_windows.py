"""Near-misses of sharded data parallelism over time: stale weights, lost and forgotten sums."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.plain.fsdp import Pass
from spec_tests.plain.fully_shard import PlainFsdp

# ----------------------------------------------------------------------------------- accumulation


@near_miss("fsdp.ignores-sync-flag", rejected_by="fsdp.accumulation.sends-no-gradient")
class IgnoresFlag(PlainFsdp):
    """Reduces every micro-batch.

    From: `set_requires_gradient_sync` sets an attribute that nobody reads.
    Unseen: The numbers are right; the traffic is N times what it should be.
    """

    def take_gradients(self, pieces):
        self.is_synchronised = True
        super().take_gradients(pieces)


@near_miss("fsdp.frees-pending", rejected_by="fsdp.accumulation.any-schedule")
class FreesPending(PlainFsdp):
    """Loses what waits for its reduction when the weights are freed.

    From: Pending gradients kept in the full parameters' `.grad`.
    Unseen: With one micro-batch per step nothing ever waits.
    """

    def free(self):
        super().free()
        for piece in self.pieces:
            piece.pending = None


@near_miss("fsdp.hidden-accumulator", rejected_by="fsdp.accumulation.zero-grad-discards")
class HiddenAccumulator(PlainFsdp):
    """Keeps what waits for its reduction out of reach of zero_grad.

    From: FSDP2 of torch 2.13.
    Unseen: Nobody skips a step in the middle of a window, until a loss overflows.
    """

    def forget_what_was_cleared(self):
        pass

    def hold(self, pieces):
        pass


@near_miss("fsdp.reduces-used-only", rejected_by="fsdp.accumulation.unused-in-last")
class ReducesUsedOnly(PlainFsdp):
    """Forgets what waits in units that the last micro-batch does not use.

    From: pytorch issue 69031.
    Unseen: Most models use all of their layers, always.

    Reduces what this backward used, and leaves other units what waits there.
    """

    def end_of_backward(self):
        unused = [u for u in self.run.units if not u.in_backward and u.is_synchronised]
        for unit in unused:
            for piece in unit.pieces:
                piece.pending = None
        super().end_of_backward()


@near_miss(
    "fsdp.evaluation-drops-window",
    rejected_by="fsdp.accumulation.evaluation-in-between",
)
class EvaluationDropsWindow(PlainFsdp):
    """Begins a window anew with every forward without gradients.

    From: State that is reset in forward, evaluation or not.
    Unseen: Evaluation comes between steps, mostly.
    """

    def pre_forward(self, module, args, kwargs):
        if not torch.is_grad_enabled():
            for piece in self.pieces:
                piece.pending = None
        return super().pre_forward(module, args, kwargs)


# -------------------------------------------------------------------------------------- lifecycle


@near_miss(
    "fsdp.stale-after-step",
    rejected_by=(
        "fsdp.lifecycle.fresh-after-step",
        "fsdp.lifecycle.fresh-after-evaluation",
    ),
)
class Stale(PlainFsdp):
    """Computes with whatever full weights there are.

    From: FSDP2 of torch 2.13, outside of reshard_after_forward=True.
    Unseen: The loss falls all the same, a step late.
    """

    def is_fresh(self):
        return True


@near_miss(
    "fsdp.stale-ahead",
    rejected_by=(
        "fsdp.lifecycle.fresh-after-evaluation-of-a-whole-model",
        "fsdp.lifecycle.fresh-after-layers-left-out",
    ),
)
class StaleAhead(PlainFsdp):
    """Computes with what was gathered ahead, however long ago.

    From: CS336 solutions that gather two layers ahead, or for a backward that does not come.
    Unseen: In training every gather is used at once.
    """

    def unshard(self):
        if self.flying is not None:
            self.flying = (self.version(), self.flying[1])
        super().unshard()

    def pre_forward(self, module, args, kwargs):
        inputs = super().pre_forward(module, args, kwargs)
        for unit in self.run.units[self.run.units.index(self) + 1 :][:1]:
            unit.prefetch()
        return inputs

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        if self.is_root and self.run is not None:
            self.run.units[-1].prefetch()
        return output


@near_miss("fsdp.first-group-only", rejected_by="fsdp.lifecycle.fresh-after-step")
class FirstGroupOnly(PlainFsdp):
    """Looks for its parameters in the optimizer's first group alone.

    From: `optimizer.param_groups[0]["params"]`.
    Unseen: Weight decay for some parameters is what makes a second group.
    """

    def after_step(self, groups):
        super().after_step(groups[:1])


@near_miss("fsdp.adopts-at-the-gather", rejected_by="fsdp.lifecycle.fresh-after-load")
class AdoptsAtTheGather(PlainFsdp):
    """Looks at the next gather, and no sooner, for what `load_state_dict(assign=True)` put in.

    From: Ours, once: state_dict() shows the shards first, which were still those of construction.
    Unseen: A forward between the load and the next save; loads in one piece.
    """

    def before_state_dict(self, *ignored):
        self.reshard()


@near_miss("fsdp.gathers-once", rejected_by="fsdp.lifecycle.fresh-after-writing-in-a-whole-model")
class GathersOnce(PlainFsdp):
    """Gathers anew after a step of an optimizer alone.

    From: A cache of full weights that a step hook clears.
    Unseen: Everything that trains goes through an optimizer.
    """

    def version(self):
        return self.num_steps

    def free(self):
        pass

    def unshard(self):
        self.is_unsharded = self.gathered is not None
        super().unshard()


@near_miss("fsdp.never-forgets", rejected_by="fsdp.lifecycle.after-exception")
class NeverForgets(PlainFsdp):
    """Keeps the state of a backward that was interrupted.

    From: FSDP2 of torch 2.13; a flag that is reset at the end of backward only.
    Unseen: No test raises in backward.
    """

    def recover(self):
        pass


@near_miss(
    "fsdp.one-pass", rejected_by="fsdp.lifecycle.two-models", outcomes=("failed", "died", "hang")
)
class OnePass(PlainFsdp):
    """Shares one state of a pass among all models.

    From: A module-level context for communication.
    Unseen: Tests shard one model at a time.
    """

    everyone: ClassVar[Pass] = Pass()

    def find_root(self):
        super().find_root()
        if self.is_root and not self.everyone.units:
            self.everyone.units = self.run.units if self.run else []
        for unit in self.run.units if self.run else []:
            unit.run = self.everyone


@near_miss("fsdp.divides-by-world", rejected_by="fsdp.lifecycle.part-of-the-world")
class DividesByWorld(PlainFsdp):
    """Divides by the size of the world on any mesh.

    From: `dist.get_world_size()` without a group.
    Unseen: Most meshes are the world.
    """

    def divisor(self):
        return dist.get_world_size()


@near_miss("fsdp.divides-by-shards", rejected_by="fsdp.lifecycle.hybrid")
class DividesByShards(PlainFsdp):
    """Divides by the number of shards alone.

    From: pytorch issue 125484.
    Unseen: Adam does not feel a constant factor.
    """

    def divisor(self):
        return self.size()


@near_miss("fsdp.no-world-of-one", rejected_by="fsdp.lifecycle.world-of-one")
class DividesByTwoAtLeast(PlainFsdp):
    """Takes a world to have two ranks at least.

    From: A division factor that was written for several ranks.
    Unseen: Nobody shards over one rank in a test.
    """

    def divisor(self):
        return max(2, self.mesh.size())


@near_miss("fsdp.gives-what-is-there", rejected_by="fsdp.state-dict.sharded-at-any-moment")
class GivesWhatIsThere(PlainFsdp):
    """Gives full weights in its state dict where they are unsharded.

    From: pytorch issues 131965 and 154655.
    Unseen: Tests save right after a step.
    """

    def before_state_dict(self, *ignored):
        pass


@near_miss("fsdp.loads-into-full", rejected_by="fsdp.state-dict.round-trip")
class LoadsIntoFull(PlainFsdp):
    """Takes a load for one into full weights.

    From: A hook that gathers before every access from outside.
    Unseen: Tests load what a plain model gave.
    """

    def before_load(self, *ignored):
        self.unshard()
        self.register(sharded=False)


@near_miss(
    "fsdp.refuses-nothing",
    rejected_by=("fsdp.refusals.at-once-and-by-name", "fsdp.refusals.by-the-first-step"),
)
class RefusesNothing(PlainFsdp):
    """Shards whatever it is given.

    From: No check at the entrance.
    Unseen: Tests shard what can be sharded.
    """

    refuses = False


@near_miss("fsdp.reshards-late", rejected_by="fsdp.lifecycle.by-hand")
class ReshardsLate(PlainFsdp):
    """Leaves full parameters registered after reshard.

    From: Freeing put off until the next forward.
    Unseen: The numbers are right.
    """

    def reshard(self):
        pass


@near_miss("fsdp.adds-to-nothing", rejected_by="fsdp.backward.zero-grad-modes")
class AddsToNothing(PlainFsdp):
    """Fails where a parameter has a gradient already, and be it zeros.

    From: Autograd adds a full gradient to `.grad`, which has the shape of the shard by then.
    Unseen: `zero_grad` sets gradients to None unless it is told otherwise.
    """

    def assign(self, piece, shard):
        if piece.parameter.grad is not None:
            raise RuntimeError(f"expected gradients of one shape, got {tuple(shard.shape)}")
        super().assign(piece, shard)
