"""Near-misses of a trainer's clipping, learning rates and precision."""

from __future__ import annotations

from spec_tests.museum.card import Source
from spec_tests.plain.trainer import PlainTrainer

TRAINER = Source("spec_tests.plain.trainer")
CLIPPING = Source("spec_tests.plain.clip", PlainTrainer)

TRAINER.near_miss(
    "trainer.clips-before-reducing",
    "trainer.clip.global-norm",
    '- if self.strategy != "fsdp":',
    "-     self.model.finish()",
    "  if self.max_norm is not None:",
    "      clip_grad_norm_(self.module.parameters(), self.max_norm)",
    '+ if self.strategy != "fsdp":',
    "+     self.model.finish()",
    "...",
    "- return contextlib.nullcontext() if is_last else found",
    "+ return found",
    does="Clips each rank's own gradients, and reduces them then.",
    seen="Clipping between backward and the end of the reduction.",
    unseen="Every rank's norm is within the limit.",
)

TRAINER.near_miss(
    "trainer.clips-each-micro-batch",
    "trainer.clip.once-per-step",
    "  (loss / len(micro_batches)).backward()",
    '+ if self.max_norm is not None and self.strategy != "fsdp":',
    "+     nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)",
    does="Clips the accumulated gradients after every micro-batch.",
    seen="Clipping inside the inner loop.",
    unseen="The norm that is logged is within the limit.",
)

TRAINER.near_miss(
    "trainer.clips-by-default",
    "trainer.clip.none-is-none",
    "  self.accumulation, self.max_norm, self.dtype = accumulation, max_norm, dtype",
    "+ self.max_norm = 1.0 if max_norm is None else max_norm",
    does="Clips to 1.0 where nothing is said.",
    seen="DeepSpeed's `gradient_clipping`, which defaults to 1.0 since pull request 8068.",
    unseen="Most recipes clip to 1.0 anyway.",
)

TRAINER.near_miss(
    "trainer.counts-names",
    "trainer.programs.any-situation",
    "- clip_grad_norm_(self.module.parameters(), self.max_norm)",
    "+ named = self.module.named_parameters(remove_duplicate=False)",
    '+ norm = float(clip_grad_norm_([p for _, p in named], float("inf")))',
    "+ for parameter in self.module.parameters():",
    "+     if parameter.grad is not None:",
    "+         parameter.grad *= min(1.0, self.max_norm / (norm + 1e-6))",
    does="Counts a tied parameter's gradient once per name in the norm.",
    seen="A norm over `state_dict()`, or over the parameters of each layer in turn.",
    unseen="The norm is too large by some per cent.",
)

TRAINER.near_miss(
    "trainer.skips-by-its-shards",
    "trainer.clip.not-finite-in-one-shard",
    "- self.optimizer.step()",
    "+ held = [p.grad for p in self.module.parameters() if p.grad is not None]",
    '+ local = [g.to_local() if hasattr(g, "to_local") else g for g in held]',
    "+ if all(bool(torch.isfinite(gradient).all()) for gradient in local):",
    "+     self.optimizer.step()",
    does="Skips the update where a gradient that this rank holds is not finite.",
    seen="`isfinite` over `.grad`, written for replicas, and kept for shards.",
    unseen="Non-finite values are mostly in all gradients, and on all ranks.",
)

TRAINER.near_miss(
    "trainer.skips-on-its-own",
    "trainer.clip.not-finite-alike",
    "- self.optimizer.step()",
    "+ if torch.isfinite(losses[-1]):",
    "+     self.optimizer.step()",
    does="A rank whose own loss is NaN leaves the step out.",
    seen="`if not torch.isfinite(loss): continue`, as in many training scripts.",
    unseen="The ranks drift apart from there on; each one's loss falls.",
)

TRAINER.near_miss(
    "trainer.changes-the-default",
    "trainer.rate.takes-effect",
    '- group["lr"] = factor * rate',
    '+ self.optimizer.defaults["lr"] = factor * self.rates[0]',
    does="Changes the optimizer's default rate, which only groups to come take.",
    seen='`optimizer.defaults["lr"] = lr`.',
    unseen="The log shows the new rate.",
)

TRAINER.near_miss(
    "trainer.one-rate",
    "trainer.rate.every-group",
    '- group["lr"] = factor * rate',
    '+ group["lr"] = factor * self.rates[0]',
    does="Gives all groups the rate of the first.",
    seen='`for group in groups: group["lr"] = lr`, the schedule of a single group.',
    unseen="Examples have one rate.",
)

TRAINER.near_miss(
    "trainer.keeps-the-loss-scale",
    "trainer.precision.near-float32",
    "- (loss / len(micro_batches)).backward()",
    "+ scale = 1 if self.dtype == torch.float32 else 128",
    "+ (scale * loss / len(micro_batches)).backward()",
    does="Scales the loss of a 16-bit step, and never divides the gradient again.",
    seen="DeepSpeed issue 7839: gradients that were divided elsewhere.",
    unseen="Adam does not feel a constant factor.",
)

TRAINER.near_miss(
    "trainer.ignores-dtype",
    "trainer.precision.computes-in-dtype",
    "- is_narrow = self.dtype != torch.float32",
    "+ is_narrow = False",
    does="Computes in float32 whatever dtype is asked for.",
    seen="An option that a framework's configuration does not know, and drops.",
    unseen="The weights are right, and better.",
)

TRAINER.near_miss(
    "trainer.narrow-weights",
    "trainer.precision.small-updates",
    "  self.optimizer.step()",
    '+ if self.dtype == torch.bfloat16 and self.strategy != "fsdp":',
    "+     for parameter in self.module.parameters():",
    "+         parameter.data.copy_(parameter.bfloat16())",
    does="Keeps weights in bfloat16 between steps.",
    seen="`model.to(torch.bfloat16)` in place of autocast, without master weights.",
    unseen="The loss falls until updates are small.",
)

TRAINER.near_miss(
    "trainer.narrow-moments",
    "trainer.precision.lasting-momentum",
    "  self.optimizer.step()",
    '+ state = self.optimizer.inner.state if self.strategy == "zero1" else self.optimizer.state',
    "+ for entry in state.values() if self.dtype == torch.bfloat16 else ():",
    "+     for name, value in entry.items():",
    "+         if isinstance(value, torch.Tensor):",
    "+             entry[name] = value.to(torch.bfloat16).to(value.dtype)",
    does="Keeps the optimizer's state in bfloat16 between steps.",
    seen="Moments that are made like the gradients, or a state dict cast with the weights.",
    unseen="The weights are float32, and move by nearly as much.",
)

TRAINER.near_miss(
    "trainer.keeps-casts",
    "trainer.precision.evaluates-current-weights",
    "  self.optimizer.zero_grad()",
    "+ torch.clear_autocast_cache()",
    "+ torch.autocast_increment_nesting()",
    does="Opens autocast in a step and closes it in the next one.",
    seen="A context that is entered once, so that its cache lives on.",
    unseen="Steps use current weights; a loss that is a step old falls as well.",
)
