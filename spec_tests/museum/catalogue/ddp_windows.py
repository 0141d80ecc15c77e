"""Near-misses of accumulation and no_sync: right without it, wrong or wasteful with it."""

from __future__ import annotations

from spec_tests.museum.card import Source

DDP = Source("spec_tests.plain.ddp")
FRESH = (
    "  weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    '+ parameter.register_hook(lambda g: setattr(parameter, "fresh", g.detach().clone()))',
    "...",
    "- gradient = self.trainable[index].grad",
    '+ gradient = getattr(self.trainable[index], "fresh", None)',
    "...",
)
"""Reduces the gradient of the last micro-batch, which a hook on the tensor catches."""

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

DDP.near_miss(
    "ddp.fresh-only",
    "ddp.accumulation.equals-big-batch",
    *FRESH,
    does="Reduces the last micro-batch and loses the others.",
    seen="open-instruct pull request 1498: ZeRO-2 kept the last micro-batch only.",
    unseen="The loss falls, a little slower.",
)

DDP.near_miss(
    "ddp.keeps-earlier-local",
    "ddp.accumulation.equals-big-batch",
    *FRESH,
    "- parameter.grad.copy_(mean)",
    '+ parameter.grad += mean - getattr(parameter, "fresh", 0.0)',
    does="Reduces the last micro-batch; the earlier ones stay local.",
    seen="build-nanogpt pull request 30: the flag is toggled between forward and backward.",
    unseen="Ranks drift by a few per cent in four steps; rank 0's loss looks fine.",
)

DDP.near_miss(
    "ddp.divides-everything",
    "ddp.accumulation.two-finishes",
    *FRESH,
    "- parameter.grad.copy_(mean)",
    '+ before = parameter.grad - getattr(parameter, "fresh", 0.0)',
    "+ parameter.grad.copy_(before / self.size() + mean)",
    does="Sums the fresh gradients and divides all that is there, means included.",
    seen="DeepSpeed issue 7985 is a relative: the boundary micro-batch is scaled apart.",
    unseen="Right as long as only the last micro-batch is synchronised at two ranks and one round.",
)

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

DDP.near_miss(
    "ddp.hidden-accumulator",
    (
        "ddp.accumulation.zero-grad-discards",
        "ddp.programs.any-situation",
        "ddp.programs.any-production-situation",
        "ddp.accumulation.one-finish",
    ),
    "+ def keep(gradient):",
    "+     parameter.hidden.add_(gradient)",
    "+ parameter.register_hook(keep)",
    "  weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    "...",
    "- gradient = self.trainable[index].grad",
    "+ gradient = self.trainable[index].hidden",
    "...",
    "  self.has_news = self.is_armed = False",
    "+ for parameter in self.trainable:",
    "+     parameter.hidden = torch.zeros_like(parameter)",
    does="Keeps a window's gradients where zero_grad cannot clear them.",
    seen="FSDP2 2.13 does it: pending unsharded gradients are out of reach of `p.grad`.",
    unseen="zero_grad in the middle of a window is rare: a loop that skips a bad batch calls it.",
)

DDP.near_miss(
    "ddp.hooks-only",
    "ddp.accumulation.unused-in-last",
    "- if not used[index]:",
    "+ if not (used[index] and index in self.ready):",
    does="Leaves gradients local that no hook announced in the last backward.",
    seen="pytorch issues 69031 and 42793, fixed by pull request 124193.",
    unseen="Every parameter is used in every micro-batch.",
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

DDP.near_miss(
    "ddp.refuses-to-evaluate",
    "ddp.accumulation.evaluation-in-between",
    '+ if getattr(self, "is_over", False) and not torch.is_grad_enabled():',
    '+     raise RuntimeError("forward after the gradients were launched")',
    "+ self.is_over = False",
    "  if torch.is_grad_enabled():",
    "...",
    "  used = self.used_anywhere()",
    "+ self.is_over = True",
    does="Takes a forward after the finish for one that was forgotten to be finished.",
    seen="A guard against two forwards in a row, in a solution of CS336.",
    unseen="Tests train, and never look at the validation loss.",
)
