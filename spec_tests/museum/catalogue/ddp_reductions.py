"""Near-misses of reductions: not finished, not begun, begun anew, or in another order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.ddp import PlainDdp

DDP = Source("spec_tests.plain.ddp")

DDP.near_miss(
    "ddp.drops-last-bucket",
    "ddp.gradients.mean",
    "- self.write_back(bucket, flat, used)",
    "+ if len(self.buckets) == 1 or bucket is not self.buckets[-1]:",
    "+     self.write_back(bucket, flat, used)",
    does="Never writes back the last, partial bucket.",
    seen="The flush after the loop is missing.",
    unseen="With one big bucket there is no partial one.",
)


@near_miss("ddp.sums-again-in-finish", rejected_by="ddp.gradients.finish-is-idempotent")
class SumsAgainInFinish(PlainDdp):
    """Sums once more at every finish.

    From: The division sits in the hook, the reduction in finish.
    Unseen: Nobody calls finish twice in a test; trainers with two optimizers do.

    Divides in the hook, sums in finish, and does not ask whether there is anything new.
    """

    def on_gradient(self, index):
        if self.is_synchronised:
            gradient = self.trainable[index].grad
            assert gradient is not None
            gradient /= self.size()

    @torch.no_grad()
    def finish(self):
        used = self.used_anywhere()
        for index, parameter in enumerate(self.trainable):
            if used[index]:
                whole = self.local(index).contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad = whole.clone()


DDP.near_miss(
    "ddp.drops-handles",
    "ddp.gradients.final-after-finish",
    "- used = self.used_anywhere()",
    "+ used = [parameter.grad is not None for parameter in self.trainable]",
    "  for bucket, flat, handle in self.flying:",
    "-     handle.wait()",
    "      self.write_back(bucket, flat, used)",
    does="Waits for no reduction.",
    seen="The list of handles is filled and never read.",
    unseen="Small tensors and punctual ranks: gloo is done before anyone looks.",
)


@near_miss(
    "ddp.sums-zeroed-views",
    rejected_by=("ddp.gradients.zero-grad-modes", "ddp.accumulation.two-finishes"),
)
class SumsZeroedViews(PlainDdp):
    """Adds the last mean again where gradients were zeroed in place.

    From: Code that asks `grad is None` to learn whether a bucket is fresh.
    Unseen: `set_to_none=True` is the default.

    Takes a gradient that was set to zero for one that was set to None: keeps the old mean.
    """

    def __init__(self, *args):
        self.means: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index, parameter):
        def before(gradient):
            # In-place mode: "the gradient is still there, so the bucket still holds it too".
            if parameter.grad is not None and index in self.means and self.is_synchronised:
                return gradient + self.means[index]
            return gradient

        parameter.register_hook(before)
        super().register(index, parameter)

    def write_back(self, bucket, flat, used):
        super().write_back(bucket, flat, used)
        for index in bucket:
            self.means[index] = self.local(index).detach().clone()


@near_miss("ddp.refuses-unused-late", rejected_by="ddp.gradients.unused-everywhere")
class RefusesUnusedLate(PlainDdp):
    """Finds out at the end of the second step that a parameter has never had a gradient.

    From: A check that compares the gradients of two steps.
    Unseen: It is an error, and whoever tests for an error is content; one update was made.
    """

    num_finished = 0

    def finish(self):
        super().finish()
        self.num_finished += 1
        if self.num_finished > 1 and any(p.grad is None for p in self.trainable):
            raise RuntimeError("a parameter has had no gradient in two steps")


@near_miss(
    "ddp.reduces-what-it-has",
    rejected_by="ddp.gradients.unused-somewhere",
    outcomes=("failed", "hang", "died"),
)
class ReducesWhatItHas(PlainDdp):
    """Reduces the gradients that this rank has, in order.

    From: `for p in parameters: if p.grad is not None: all_reduce(p.grad)`.
    Unseen: All ranks use the same parameters; where sizes agree nothing even crashes.
    """

    def launch_what_is_ready(self):
        pass

    @torch.no_grad()
    def finish(self):
        for parameter in self.trainable:
            if parameter.grad is not None and self.has_news:
                whole = parameter.grad.contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad.copy_(whole / self.size())
        self.new_round()


@near_miss(
    "ddp.launches-as-ready",
    rejected_by=("ddp.gradients.rank-dependent-order", "ddp.traffic.same-order-on-all-ranks"),
    outcomes=("failed", "hang", "died"),
)
class LaunchesAsReady(PlainDdp):
    """Launches each bucket as it becomes ready on this rank.

    From: pytorch issues 72843 and 174862: collectives are paired by position.
    Unseen: All ranks run the same graph in the same order.
    """

    def launch_what_is_ready(self):
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown and self.ready.issuperset(bucket):
                self.launch(bucket)

    def finish(self):
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown:
                self.launch(bucket)
        super().finish()


DDP.near_miss(
    "ddp.divides-the-sum",
    "ddp.gradients.float16-does-not-overflow",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    "...",
    "- self.write_back(bucket, flat, used)",
    "+ self.write_back(bucket, flat / self.size(), used)",
    does="Adds up the gradients of all ranks, and divides the sum.",
    seen="The definition of a mean, and nearly every public solution.",
    unseen="float32 has room for any number of ranks.",
)

DDP.near_miss(
    "ddp.armed-by-its-forward",
    "ddp.compile.like-eager",
    "- if torch.is_grad_enabled():",
    "+ if torch.is_grad_enabled() and not torch.compiler.is_compiling():",
    "...",
    "- self.has_news = True",
    "+ self.has_news |= self.is_armed",
    "  if not (self.is_synchronised and self.is_armed):",
    does="Arms its hooks in a forward, but not in one that is traced.",
    seen="`if not torch.compiler.is_compiling()` around what breaks a graph.",
    unseen="Each rank trains alone, and its loss falls.",
)
