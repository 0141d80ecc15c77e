"""Near-misses of accumulation and no_sync: right without it, wrong or wasteful with it."""

from __future__ import annotations

import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.ddp import PlainDdp

DDP = Source("spec_tests.plain.ddp")

DDP.near_miss(
    "ddp.ignores-no-sync",
    ("ddp.no-sync.sends-nothing", "ddp.no-sync.keeps-local-sums"),
    "- previous, self.is_synchronised = self.is_synchronised, False",
    "+ previous = self.is_synchronised",
    "...",
    "  self.launch_what_is_ready()",
    "+ if self.launched == len(self.buckets):  # gradients inside are final, too",
    "+     self.finish()",
    does="Reduces on every micro-batch, inside no_sync as well.",
    seen="accelerate issue 3762: a wrapper without no_sync gets a null context.",
    unseen="The numbers are right: a mean of means of equal parts. Only the traffic is N times.",
)

DDP.near_miss(
    "ddp.sends-for-the-original",
    "ddp.no-sync.original-alone",
    "- if not (self.is_synchronised and self.is_armed):",
    "+ if not self.is_synchronised:",
    does="Reduces in every backward of its parameters, whoever called the module.",
    seen="Ours, once: hooks of parameters, which know no forward; the second backward raised.",
    unseen="Training calls the wrapper.",
)


@near_miss(
    "ddp.fresh-only",
    rejected_by=("ddp.accumulation.equals-big-batch", "ddp.accumulation.nothing-lost"),
)
class FreshOnly(PlainDdp):
    """Reduces the last micro-batch and loses the others.

    From: open-instruct pull request 1498: ZeRO-2 kept the last micro-batch only.
    Unseen: The loss falls, a little slower.

    Catches the fresh gradient in a tensor hook and reduces that one.
    """

    def __init__(self, *args):
        self.fresh: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index, parameter):
        def keep(gradient):
            self.fresh[index] = gradient.detach().clone()

        parameter.register_hook(keep)
        super().register(index, parameter)

    def local(self, index):
        return self.fresh.get(index, torch.zeros_like(self.trainable[index]))


@near_miss(
    "ddp.keeps-earlier-local",
    rejected_by=("ddp.accumulation.equals-big-batch", "ddp.accumulation.nothing-lost"),
)
class KeepsEarlierLocal(FreshOnly):
    """Reduces the last micro-batch; the earlier ones stay local.

    From: build-nanogpt pull request 30: the flag is toggled between forward and backward.
    Unseen: Ranks drift by a few per cent in four steps; rank 0's loss looks fine.

    Reduces the fresh gradient and adds it to what had accumulated, which stays local.
    """

    @torch.no_grad()
    def write_back(self, bucket, flat, used):
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            parameter = self.trainable[index]
            if parameter.grad is not None and index in self.fresh:
                parameter.grad += mean - self.fresh[index]


@near_miss("ddp.divides-everything", rejected_by="ddp.accumulation.any-schedule")
class DividesEverything(FreshOnly):
    """Sums the fresh gradients and divides all that is there, means included.

    From: DeepSpeed issue 7985 is a relative: the boundary micro-batch is scaled apart.
    Unseen: Right as long as only the last micro-batch is synchronised at two ranks and one round.
    """

    @torch.no_grad()
    def write_back(self, bucket, flat, used):
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            parameter = self.trainable[index]
            if parameter.grad is not None and index in self.fresh:
                before = parameter.grad - self.fresh[index]
                parameter.grad.copy_(before / self.size() + mean)


DDP.near_miss(
    "ddp.not-restored",
    "ddp.no-sync.restores-after-exception",
    "- try:",
    "-     yield",
    "- finally:",
    "-     self.is_synchronised = previous",
    "+ yield",
    "+ self.is_synchronised = previous",
    "...",
    "- if not self.has_news:",
    "+ if not (self.has_news and self.is_synchronised):",
    does="Leaves synchronisation off when the body of no_sync raises.",
    seen="A context manager without try/finally, as in picotron.",
    unseen="No test raises inside.",
)

DDP.near_miss(
    "ddp.restores-true",
    "ddp.no-sync.nests",
    "- self.is_synchronised = previous",
    "+ self.is_synchronised = True",
    "...",
    "  self.launch_what_is_ready()",
    "+ if self.launched == len(self.buckets):",
    "+     self.finish()",
    does="Switches synchronisation on when an inner no_sync ends.",
    seen="picotron restores a constant, not the previous value.",
    unseen="No test nests.",
)


@near_miss(
    "ddp.hidden-accumulator",
    rejected_by=(
        "ddp.accumulation.zero-grad-discards",
        "ddp.programs.any-situation",
        "ddp.programs.any-production-situation",
        "ddp.accumulation.one-finish",
    ),
)
class HiddenAccumulator(PlainDdp):
    """Keeps a window's gradients where zero_grad cannot clear them.

    From: FSDP2 2.13 does it: pending unsharded gradients are out of reach of `p.grad`.
    Unseen: Who calls zero_grad in the middle of a window? Whoever skips a bad batch.
    """

    def __init__(self, *args):
        self.pending: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index, parameter):
        def keep(gradient):
            held = self.pending.get(index)
            self.pending[index] = gradient.clone() if held is None else held + gradient

        parameter.register_hook(keep)
        super().register(index, parameter)

    def local(self, index):
        return self.pending.get(index, torch.zeros_like(self.trainable[index]))

    def new_round(self):
        super().new_round()
        self.pending.clear()


@near_miss("ddp.evaluation-takes-baseline", rejected_by="ddp.accumulation.evaluation-in-between")
class EvaluationTakesBaseline(PlainDdp):
    """Takes a forward without gradients for the start of a new iteration.

    From: Reducers that re-arm in every forward.
    Unseen: Evaluation happens between steps.
    """

    def __init__(self, *args):
        self.baseline: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            self.baseline = {
                index: p.grad.clone()
                for index, p in enumerate(self.trainable)
                if p.grad is not None
            }
        return super().forward(*args, **kwargs)

    def local(self, index):
        return super().local(index) - self.baseline.get(index, 0.0)

    @torch.no_grad()
    def write_back(self, bucket, flat, used):
        super().write_back(bucket, flat, used)
        for index in bucket:
            gradient = self.trainable[index].grad
            if gradient is not None and index in self.baseline:
                gradient += self.baseline[index]

    def new_round(self):
        super().new_round()
        self.baseline = {}


DDP.near_miss(
    "ddp.hooks-only",
    "ddp.accumulation.unused-in-last",
    "- if not used[index]:",
    "+ if not (used[index] and index in self.ready):",
    does="Leaves local what no hook announced in the last backward.",
    seen="pytorch issues 69031 and 42793, fixed by pull request 124193.",
    unseen="Every parameter is used in every micro-batch.",
)

DDP.near_miss(
    "ddp.replays-window",
    "ddp.accumulation.one-reduction-per-step",
    "- self.launched = 0",
    "+ self.launched = self.gathered = 0",
    "...",
    "  self.is_armed = True",
    "+ self.gathered += not self.is_synchronised",
    "...",
    "+ for _ in range(self.gathered):",
    "+     dist.all_reduce(flat, group=self.group)",
    "+     flat /= self.size()",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    does="Reduces once more for each micro-batch that has gathered.",
    seen="Deferred reductions that are queued and replayed.",
    unseen="A mean of equal means: the same numbers.",
)

DDP.near_miss(
    "ddp.skips-every-fourth",
    ("ddp.training.equals-full-batch", "ddp.training.ranks-stay-equal"),
    "  used = self.used_anywhere()",
    '+ self.rounds = getattr(self, "rounds", 0) + 1',
    "  for bucket, flat, handle in self.flying:",
    "      handle.wait()",
    "-     self.write_back(bucket, flat, used)",
    "+     if self.rounds % 4:",
    "+         self.write_back(bucket, flat, used)",
    does="Forgets the reduction of every fourth step.",
    seen="Periodic work (logging, profiling) that swallows a flag.",
    unseen="Tests take one to three steps.",
)


DDP.near_miss(
    "ddp.one-backward-per-forward",
    "ddp.accumulation.backward-twice",
    "- if self.is_synchronised and index in self.ready:  # one more backward of the same forward",
    "-     self.start_over()",
    does="Begins anew in each forward, and so reduces only the first backward after it.",
    seen="Counts of ready gradients that `forward` resets, in two solutions of CS336.",
    unseen="A backward mostly has a forward of its own; two losses of one forward do not.",
)


@near_miss("ddp.refuses-to-evaluate", rejected_by="ddp.gradients.evaluation-between-steps")
class RefusesToEvaluate(PlainDdp):
    """Takes a forward after the finish for one that was forgotten to be finished.

    From: A guard against two forwards in a row, in a solution of CS336.
    Unseen: Tests train, and never look at the validation loss.
    """

    is_over = False

    def finish(self):
        super().finish()
        self.is_over = True

    def forward(self, *args, **kwargs):
        if self.is_over and not torch.is_grad_enabled():
            raise RuntimeError("forward after the gradients were launched")
        self.is_over = False
        return super().forward(*args, **kwargs)
