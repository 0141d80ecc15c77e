"""Near-misses of sharded data parallelism over time: stale weights, lost and forgotten sums."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Pass, Unit
from spec_tests.impostors.plain_fsdp_storage import Piece

# ----------------------------------------------------------------------------------- accumulation


class IgnoresFlag(Unit):
    """Reduces every micro-batch, whatever was set."""

    def take_gradients(self, pieces: list[Piece]) -> None:
        self.is_synchronised = True
        super().take_gradients(pieces)


class FreesPending(Unit):
    """Loses what waits for its reduction when the weights are freed."""

    def free(self) -> None:
        super().free()
        for piece in self.pieces:
            piece.pending = None


class HiddenAccumulator(Unit):
    """Keeps what waits for its reduction where no optimizer knows of it."""

    def forget_what_was_cleared(self) -> None:
        pass

    def hold(self, pieces: list[Piece]) -> None:
        pass


class SeesNoneOnly(Unit):
    """Takes a gradient that is gone for cleared, and one of zeros for one that is there."""

    def forget_what_was_cleared(self) -> None:
        for piece in self.pieces:
            if piece.token[0] is not None and piece.parameter.grad is None:
                piece.pending, piece.token = None, (None, None)


class ReducesUsedOnly(Unit):
    """Reduces what this backward used, and leaves other units what waits there."""

    def end_of_backward(self) -> None:
        assert self.run is not None
        unused = [u for u in self.run.units if not u.in_backward and u.is_synchronised]
        for unit in unused:
            for piece in unit.pieces:
                piece.pending = None
        super().end_of_backward()


class EvaluationDropsWindow(Unit):
    """Begins a window anew with every forward without gradients."""

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            for piece in self.pieces:
                piece.pending = None
        return super().pre_forward(module, args, kwargs)


# -------------------------------------------------------------------------------------- lifecycle


class Stale(Unit):
    """Computes with whatever full weights there are."""

    def is_fresh(self) -> bool:
        return True


class StaleAhead(Unit):
    """Gathers the next layer ahead, and the last for backward; uses it whenever that comes."""

    def unshard(self) -> None:
        if self.flying is not None:
            self.flying = (self.version(), self.flying[1])
        super().unshard()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = super().pre_forward(module, args, kwargs)
        assert self.run is not None
        for unit in self.run.units[self.run.units.index(self) + 1 :][:1]:
            unit.prefetch()
        return inputs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = super().post_forward(module, args, output)
        if self.is_root and self.run is not None:
            self.run.units[-1].prefetch()
        return output


class WatchesParameters(Unit):
    """Notices writes through the Parameter, and none to its local tensor."""

    def version(self) -> Any:
        return tuple((id(p.parameter), p.parameter._version) for p in self.pieces)


class NeverForgets(Unit):
    """Keeps the state of a pass that was interrupted."""

    def recover(self) -> None:
        pass


class OnePass(Unit):
    """Shares one state of a pass among all models."""

    everyone: ClassVar[Pass] = Pass()

    def find_root(self) -> None:
        super().find_root()
        if self.is_root and not self.everyone.units:
            self.everyone.units = self.run.units if self.run else []
        for unit in self.run.units if self.run else []:
            unit.run = self.everyone


class DividesByWorld(Unit):
    """Divides by the size of the world, on any mesh."""

    def divisor(self) -> int:
        return dist.get_world_size()


class DividesByShards(Unit):
    """Divides by the number of shards, replicas or not."""

    def divisor(self) -> int:
        return self.size()


class DividesByTwoAtLeast(Unit):
    """Takes a world to have two ranks at least."""

    def divisor(self) -> int:
        return max(2, self.mesh.size())


class GivesWhatIsThere(Unit):
    """Gives what is registered for its state, full weights too."""

    def before_state_dict(self, *ignored: Any) -> None:
        pass


class LoadsIntoFull(Unit):
    """Takes a load for one into full weights."""

    def before_load(self, *ignored: Any) -> None:
        self.unshard()
        self.register(sharded=False)


class RefusesNothing(Unit):
    """Shards whatever it is given."""

    refuses = False


class ReshardsLate(Unit):
    """Leaves full parameters registered until the next forward."""

    def reshard(self) -> None:
        pass


IMPOSTORS: tuple[Impostor, ...] = (
    card(
        IgnoresFlag,
        "ignores-sync-flag",
        "Reduces every micro-batch.",
        "`set_requires_gradient_sync` sets an attribute that nobody reads.",
        "The numbers are right; the traffic is N times what it should be.",
        "fsdp.accumulation.sends-no-gradient",
    ),
    card(
        FreesPending,
        "frees-pending",
        "Loses what waits for its reduction when the weights are freed.",
        "Pending gradients kept in the full parameters' `.grad`.",
        "With one micro-batch per step nothing ever waits.",
        "fsdp.accumulation.any-schedule",
    ),
    card(
        HiddenAccumulator,
        "hidden-accumulator",
        "Keeps what waits for its reduction out of reach of zero_grad.",
        "FSDP2 of torch 2.13.",
        "Nobody skips a step in the middle of a window, until a loss overflows.",
        "fsdp.accumulation.zero-grad-discards",
    ),
    card(
        SeesNoneOnly,
        "sees-none-only",
        "Does not see a zero_grad that writes zeros.",
        "`if parameter.grad is None` as the sign of zero_grad.",
        "`set_to_none=True` is the default.",
        "fsdp.accumulation.zero-grad-discards",
    ),
    card(
        ReducesUsedOnly,
        "reduces-used-only",
        "Forgets what waits in units that the last micro-batch does not use.",
        "pytorch issue 69031.",
        "Most models use all of their layers, always.",
        "fsdp.accumulation.unused-in-last",
    ),
    card(
        EvaluationDropsWindow,
        "evaluation-drops-window",
        "Begins a window anew with every forward without gradients.",
        "State that is reset in forward, evaluation or not.",
        "Evaluation comes between steps, mostly.",
        "fsdp.accumulation.evaluation-in-between",
        "fsdp.programs.any-sequence",
    ),
    card(
        Stale,
        "stale-after-step",
        "Computes with whatever full weights there are.",
        "FSDP2 of torch 2.13, outside of reshard_after_forward=True.",
        "The loss falls all the same, a step late.",
        "fsdp.lifecycle.fresh-after-step",
        "fsdp.lifecycle.fresh-after-evaluation",
        "fsdp.programs.any-sequence-with-kept-weights",
    ),
    card(
        StaleAhead,
        "stale-ahead",
        "Computes with what was gathered ahead, however long ago.",
        "CS336 solutions that gather two layers ahead, or for a backward that does not come.",
        "In training every gather is used at once.",
        "fsdp.lifecycle.fresh-after-evaluation-of-a-whole-model",
        "fsdp.lifecycle.fresh-after-layers-left-out",
    ),
    card(
        WatchesParameters,
        "watches-parameters",
        "Does not notice writes to a local tensor.",
        "The version counter of a DTensor is not that of its local tensor.",
        "Optimizers go through the DTensor; moving averages need not.",
        "fsdp.lifecycle.fresh-after-load",
    ),
    card(
        NeverForgets,
        "never-forgets",
        "Keeps the state of a backward that was interrupted.",
        "FSDP2 of torch 2.13; a flag that is reset at the end of backward only.",
        "No test raises in backward.",
        "fsdp.lifecycle.after-exception",
    ),
    card(
        OnePass,
        "one-pass",
        "Shares one state of a pass among all models.",
        "A module-level context for communication.",
        "Tests shard one model at a time.",
        "fsdp.lifecycle.two-models",
        outcomes=("failed", "died", "hang"),
    ),
    card(
        DividesByWorld,
        "divides-by-world",
        "Divides by the size of the world on any mesh.",
        "`dist.get_world_size()` without a group.",
        "Most meshes are the world.",
        "fsdp.lifecycle.part-of-the-world",
    ),
    card(
        DividesByShards,
        "divides-by-shards",
        "Divides by the number of shards alone.",
        "pytorch issue 125484.",
        "Adam does not feel a constant factor.",
        "fsdp.lifecycle.hybrid",
    ),
    card(
        DividesByTwoAtLeast,
        "no-world-of-one",
        "Takes a world to have two ranks at least.",
        "A division factor that was written for several ranks.",
        "Nobody shards over one rank in a test.",
        "fsdp.lifecycle.world-of-one",
    ),
    card(
        GivesWhatIsThere,
        "gives-what-is-there",
        "Gives full weights in its state dict where they are unsharded.",
        "pytorch issues 131965 and 154655.",
        "Tests save right after a step.",
        "fsdp.state-dict.sharded-at-any-moment",
    ),
    card(
        LoadsIntoFull,
        "loads-into-full",
        "Takes a load for one into full weights.",
        "A hook that gathers before every access from outside.",
        "Tests load what a plain model gave.",
        "fsdp.state-dict.round-trip",
    ),
    card(
        RefusesNothing,
        "refuses-nothing",
        "Shards whatever it is given.",
        "No check at the entrance.",
        "Tests shard what can be sharded.",
        "fsdp.refusals.at-once-and-by-name",
        "fsdp.refusals.by-the-first-step",
    ),
    card(
        ReshardsLate,
        "reshards-late",
        "Leaves full parameters registered after reshard.",
        "Freeing put off until the next forward.",
        "The numbers are right.",
        "fsdp.lifecycle.by-hand",
    ),
)
