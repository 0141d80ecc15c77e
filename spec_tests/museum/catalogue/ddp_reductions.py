"""Near-misses of reductions: not finished, not begun, begun anew, or in another order."""

from __future__ import annotations

from spec_tests.museum.card import Source

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

DDP.near_miss(
    "ddp.sums-again-in-finish",
    "ddp.gradients.finish-is-idempotent",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    "...",
    "- self.ready.add(index)",
    "+ self.trainable[index].grad /= self.size()",
    "+ self.ready.add(index)",
    "...",
    "- if not self.has_news:",
    "-     return",
    does="Sums once more at every finish.",
    seen="The division sits in the hook, the reduction in finish.",
    unseen="Nobody calls finish twice in a test; trainers with two optimizers do.",
)

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

DDP.near_miss(
    "ddp.sums-zeroed-views",
    ("ddp.gradients.zero-grad-modes", "ddp.accumulation.two-finishes"),
    "+ def add_last(gradient):",
    "+     is_kept = parameter.grad is not None and self.is_synchronised",
    "+     return gradient + parameter.last if is_kept else gradient",
    "+ parameter.last = 0.0",
    "+ parameter.register_hook(add_last)",
    "  weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    "...",
    "  parameter.grad.copy_(mean)",
    "+ parameter.last = mean",
    does="Adds the last mean again where gradients were zeroed in place.",
    seen="Code that asks `grad is None` to learn whether a bucket is fresh.",
    unseen="`set_to_none=True` is the default.",
)

DDP.near_miss(
    "ddp.refuses-unused-late",
    "ddp.gradients.unused-everywhere",
    "  used = self.used_anywhere()",
    '+ if not all(used) and hasattr(self, "has_finished"):',
    '+     raise RuntimeError("a parameter has had no gradient in two steps")',
    "+ self.has_finished = True",
    does="Finds out at the end of the second step that a parameter has never had a gradient.",
    seen="A check that compares the gradients of two steps.",
    unseen="It is an error, and a test for an error passes; one update was made.",
)

DDP.near_miss(
    "ddp.reduces-what-it-has",
    "ddp.gradients.unused-somewhere",
    "- while self.launched < len(self.buckets):",
    "-     self.launch(self.buckets[self.launched])",
    "- used = self.used_anywhere()",
    "+ used = [parameter.grad is not None for parameter in self.trainable]",
    "+ for bucket in self.buckets[self.launched :]:",
    "+     if any(used[index] for index in bucket):",
    "+         self.launch(bucket)",
    does="Reduces the gradients that this rank has, in order.",
    seen="`for p in parameters: if p.grad is not None: all_reduce(p.grad)`.",
    unseen="All ranks use the same parameters; where sizes agree nothing even crashes.",
    outcomes=("failed", "hang", "died"),
)

DDP.near_miss(
    "ddp.launches-as-ready",
    ("ddp.gradients.rank-dependent-order", "ddp.traffic.same-order-on-all-ranks"),
    "+ left = sorted(self.buckets[self.launched :], key=lambda b: not self.ready.issuperset(b))",
    "+ self.buckets[self.launched :] = left",
    "  while self.launched < len(self.buckets) and self.ready.issuperset(",
    does="Launches each bucket as it becomes ready on this rank.",
    seen="pytorch issues 72843 and 174862: collectives are paired by position.",
    unseen="All ranks run the same graph in the same order.",
    outcomes=("failed", "hang", "died"),
)

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
    seen="`if not torch.compiler.is_compiling()` around calls that break a graph.",
    unseen="Each rank trains alone, and its loss falls.",
)
