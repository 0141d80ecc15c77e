"""Near-misses of sharded data parallelism: order and overlap of messages, and settings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.fully_shard import PlainFsdp


@near_miss(
    "fsdp.gathers-twice",
    rejected_by=("fsdp.traffic.copies-per-step", "fsdp.traffic.step-of-a-whole-model"),
)
class GathersTwice(PlainFsdp):
    """Gathers everything twice.

    From: A gather in a hook of the module and one in a hook of its parent.
    Unseen: The numbers are right.
    """

    def send_gather(self, whole, own):
        super().send_gather(whole, own).wait()
        return super().send_gather(whole, own)


@near_miss("fsdp.frees-in-windows", rejected_by="fsdp.traffic.copies-per-window")
class FreesInWindows(PlainFsdp):
    """Frees after every backward.

    From: `set_reshard_after_backward` sets an attribute that nobody reads.
    Unseen: The numbers are right.
    """

    def pre_backward(self, gradient):
        self.reshard_after_backward = True
        return super().pre_backward(gradient)


@near_miss("fsdp.sends-frozen", rejected_by="fsdp.traffic.frozen-not-reduced")
class SendsFrozen(PlainFsdp):
    """Reduces zeros for frozen parameters.

    From: One flat buffer for the whole unit.
    Unseen: The result is thrown away; fine-tuning pays for the whole model.
    """

    def reduce(self, pieces):
        super().reduce(pieces)
        frozen = sum(p.parameter.numel() for p in self.pieces if not p.parameter.requires_grad)
        if pieces and frozen:
            dist.all_reduce(pieces[0].local.new_zeros(frozen), group=self.group)


@near_miss("fsdp.one-by-one", rejected_by="fsdp.traffic.one-gather-per-unit")
class OneByOne(PlainFsdp):
    """Sends parameter by parameter.

    From: A loop over parameters around a collective.
    Unseen: The numbers are right.
    """

    def by_dtype(self):
        return [[piece] for piece in self.pieces]

    def reduce(self, pieces):
        for piece in pieces:
            super().reduce([piece])


@near_miss("fsdp.asks-its-peers", rejected_by="fsdp.traffic.same-on-all-ranks")
class AsksItsPeers(PlainFsdp):
    """Sends something among the ranks that have rows alone.

    From: pytorch issue 174862.
    Unseen: With rows on every rank all do the same.
    """

    peers: Any = None

    def end_of_backward(self):
        super().end_of_backward()
        if self.peers is None:
            self.peers = dist.new_group([0, 1])
        if self.rank() < 2:
            dist.all_reduce(torch.zeros(1), group=self.peers)


@near_miss("fsdp.waits-after-update", rejected_by="fsdp.traffic.update-is-silent")
class WaitsAfterUpdate(PlainFsdp):
    """Lets all ranks meet after each update.

    From: A barrier that once cured a race.
    Unseen: The numbers are right.
    """

    has_hook: ClassVar[list[Any]] = []

    def __init__(self, *args):
        super().__init__(*args)
        if not self.has_hook:
            self.has_hook.append(register_optimizer_step_post_hook(lambda *ignored: dist.barrier()))


@near_miss("fsdp.gathers-anew", rejected_by="fsdp.traffic.unsharded-once")
class GathersAnew(PlainFsdp):
    """Gathers what is unsharded already.

    From: No state that says that the full weights are there.
    Unseen: The numbers are right.
    """

    def is_fresh(self):
        return False


@near_miss("fsdp.no-prefetch", rejected_by="fsdp.order.gathers-ahead-in-backward")
class NoPrefetch(PlainFsdp):
    """Gathers each unit in backward when it is needed.

    From: The straightforward hook.
    Unseen: The numbers are right.
    """

    def next_in_backward(self):
        return self.backward_prefetch or []


@near_miss("fsdp.reduces-after-backward", rejected_by="fsdp.order.reduces-during-backward")
class ReducesAfterBackward(PlainFsdp):
    """Reduces all units at the end of backward.

    From: One callback in place of a hook for each unit.
    Unseen: The numbers are right.
    """

    def post_backward(self):
        pass


@near_miss("fsdp.ignores-hints", rejected_by="fsdp.order.hints-are-followed")
class IgnoresHints(PlainFsdp):
    """Stores hints and never reads them.

    From: A setter that was written for the signature's sake.
    Unseen: The numbers are right.
    """

    def pre_forward(self, module, args, kwargs):
        self.forward_prefetch, self.backward_prefetch = [], None
        return super().pre_forward(module, args, kwargs)


@near_miss("fsdp.shares-prefetch", rejected_by="fsdp.order.hints-change-no-bit")
class SharesPrefetch(PlainFsdp):
    """Takes what was gathered ahead for its own.

    From: One slot for what is on its way, in place of one for each unit.
    Unseen: Where hints name the next unit, it is right.
    """

    ahead: ClassVar[list[Any]] = []

    def prefetch(self):
        super().prefetch()
        if self.flying is not None:
            self.ahead.append(self)

    def unshard(self):
        if not self.is_unsharded and self.ahead:
            other = self.ahead.pop(0)
            if other is not self and other.flying is not None and self.flying is None:
                self.flying, other.flying = (self.version(), other.flying[1]), None
        super().unshard()


@near_miss("fsdp.drops-reductions", rejected_by="fsdp.schedule.waits-for-every-launch")
class DropsReductions(PlainFsdp):
    """Launches each reduction and waits for none.

    From: A blocking call was made asynchronous, and its result is a handle now.
    Unseen: Nothing raises: the shard has its shape, and what lay in the buffer is small.
    """

    def send_reduction(self, flat):
        own = flat.new_empty(flat.numel() // self.size())
        self.launched(dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True))
        return own

    def launched(self, handle):
        pass


@near_miss("fsdp.reads-before-wait", rejected_by="fsdp.schedule.same-gradients")
class ReadsBeforeWait(DropsReductions):
    """Divides and assigns each reduced shard at once and waits at the end of the backward.

    From: All waits in one place, and the division stayed where it was.
    Unseen: Every handle is waited for, as a review would ask.
    """

    def launched(self, handle):
        self.__dict__.setdefault("late", []).append(handle)

    def end_of_backward(self):
        super().end_of_backward()
        for unit in self.run.units:
            for handle in unit.__dict__.pop("late", []):
                handle.wait()


@near_miss("fsdp.drops-until-last", rejected_by="fsdp.accumulation.last-backward")
class DropsUntilLast(PlainFsdp):
    """Reduces before the last backward as well, and keeps the last one's gradients alone.

    From: A flag that skips the end of a backward, where gradients are put into their places.
    Unseen: Windows in tests are switched by set_requires_gradient_sync.
    """

    def assign(self, piece, shard):
        if self.is_last_backward:
            super().assign(piece, shard)


@near_miss("fsdp.finishes-late", rejected_by="fsdp.programs.any-production-situation")
class FinishesLate(PlainFsdp):
    """Adds what was under way to the gradients of the last backward, cleared or not.

    From: Ours, once: a reduction in flight is no gradient yet, so zero_grad finds nothing.
    Unseen: Nobody clears in the middle of a window, but who skips a bad batch.
    """

    def assign(self, piece, shard):
        if not self.is_last_backward:
            self.__dict__.setdefault("late", []).append((piece, shard))
            return
        for other, earlier in self.__dict__.pop("late", []):
            super().assign(other, earlier)
        super().assign(piece, shard)


@near_miss("fsdp.divides-by-both", rejected_by="fsdp.backward.divide-factor")
class DividesByBoth(PlainFsdp):
    """Divides by the factor what it has averaged.

    From: ReduceOp.AVG with a factor on top.
    Unseen: Adam does not care for the scale of gradients.
    """

    def mean(self, flat):
        own = super().mean(flat)
        return own if self.factor is None else own / self.divisor()


@near_miss("fsdp.all-reduces-each-time", rejected_by="fsdp.accumulation.all-reduce-at-the-last")
class AllReducesEachTime(PlainFsdp):
    """Takes set_requires_all_reduce, and averages replicas after every backward.

    From: A setter that is taken and not read.
    Unseen: The gradients are right.
    """


@near_miss("fsdp.unshards-anyway", rejected_by="fsdp.traffic.not-unsharded-in-backward")
class UnshardsAnyway(PlainFsdp):
    """Gathers in backward what it was told not to.

    From: A setter that is taken and not read.
    Unseen: The gradients are right.
    """


@near_miss(
    "fsdp.list-as-units",
    rejected_by=(
        "fsdp.traffic.list-is-one-unit",
        "fsdp.backward.list-of-modules",
        "fsdp.footprint.part-of-a-list",
    ),
)
class ListAsUnits(PlainFsdp):
    """Makes each module of a list a unit of its own.

    From: A loop over the list.
    Unseen: The gradients are right, unless the modules are tied.
    """


@near_miss("fsdp.cuts-rows-anyway", rejected_by="fsdp.refusals.other-dims")
class CutsRowsAnyway(PlainFsdp):
    """Takes shard_placement_fn, and cuts along dim 0.

    From: An option that is taken and not read.
    Unseen: Outputs are the same.
    """


@near_miss("fsdp.averages-children-alone", rejected_by="fsdp.backward.rest-of-any-depth")
class AveragesChildrenAlone(Patched):
    """Averages what is replicated in the model and its children, and no deeper.

    From: named_children for named_modules
    Unseen: Toys have their norms at the top.
    """

    module = "solution.parallel.fsdp.api"
    find = "replicated = [p for p in module.named_parameters() if not isinstance(p[1], DTensor)]"
    replace = (
        "found = [p for m in (module, *module.children()) for p in m.named_parameters('', False)]; "
        "replicated = [p for p in found if not isinstance(p[1], DTensor)]"
    )


@near_miss(
    "fsdp.thawed-trains-alone",
    rejected_by="fsdp.backward.thawed-rest",
)
class ThawedTrainsAlone(Patched):
    """Hooks what requires a gradient when it is wrapped, and does not look again.

    From: the reference itself, until somebody read it
    Unseen: Who thaws a norm sees the loss fall on every rank, and the ranks drift apart.
    """

    module = "solution.parallel.reducer"
    find = "        for name, parameter in self._frozen:"
    replace = "        for name, parameter in ():"
