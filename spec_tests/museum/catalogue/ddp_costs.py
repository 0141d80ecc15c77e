"""Near-misses of traffic, overlap, footprint and life cycle: the first step looks perfect."""

from spec_tests.museum.card import Source

DDP = Source("spec_tests.plain.ddp")

DDP.near_miss(
    "ddp.sends-frozen",
    "ddp.programs.any-production-situation",
    "+ for parameter in self.module.parameters():",
    "+     if not parameter.requires_grad and self.launched == 1:",
    "+         dist.all_reduce(torch.zeros_like(parameter), group=self.group)",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    does="Sends zeros for frozen parameters.",
    seen="Flattening `p.grad` of all parameters.",
    unseen="The result is thrown away; fine-tuning pays for the whole model.",
)

DDP.near_miss(
    "ddp.one-bucket",
    (
        "ddp.traffic.bucket-count",
        "ddp.overlap.starts-during-backward",
        "ddp.traffic.bucket-capacity",
    ),
    "- if not buckets or filled >= self.bucket_bytes or parameter.dtype != dtype:",
    "+ if not buckets or parameter.dtype != dtype:",
    does="Ignores the bucket size: one bucket holds all.",
    seen="The argument is stored and never read.",
    unseen="The gradients are right; nothing overlaps.",
)

DDP.near_miss(
    "ddp.reduces-after-backward",
    "ddp.overlap.starts-during-backward",
    "- self.launch_what_is_ready()",
    does="Reduces everything after backward.",
    seen="The naive wrapper of every course, sold as overlapped.",
    unseen="The numbers are right.",
)

DDP.near_miss(
    "ddp.blocks-in-hook",
    "ddp.overlap.hooks-do-not-block",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    "+ handle.wait()",
    does="Waits for each reduction inside the hook.",
    seen="`dist.all_reduce(...)` without `async_op=True`.",
    unseen="The order of events is that of an overlapped wrapper.",
)

DDP.near_miss(
    "ddp.module-globals",
    "ddp.lifecycle.two-models",
    "- self.ready: set[int] = set()",
    "- self.flying: list[tuple[list[int], torch.Tensor, Any]] = []",
    "+ PlainDdp.ready, PlainDdp.flying = set(), []",
    does="Keeps the state of a round in its class, which all models share.",
    seen="Global process-group and reducer managers.",
    unseen="Tests wrap one model at a time.",
    outcomes=("failed", "hang", "died"),
)

DDP.near_miss(
    "ddp.buffers-once-only",
    "ddp.lifecycle.buffers-follow-first-rank",
    "- if self.module.training:",
    "-     self.take_first(self.module.buffers())",
    does="Broadcasts buffers at construction and never again.",
    seen="`broadcast_buffers` left out.",
    unseen="Running statistics drift apart slowly.",
)

DDP.near_miss(
    "ddp.keeps-old-buckets",
    "ddp.footprint.gradients",
    "  used = self.used_anywhere()",
    "+ flown = [flat for _, flat, _ in self.flying]",
    '+ self.kept = [*getattr(self, "kept", []), *flown][-2 * len(self.buckets) :]',
    does="Keeps the buckets of the last rounds alive.",
    seen="A list of handles that holds on to its tensors.",
    unseen="Only a model that nearly fills the device notices.",
)

DDP.near_miss(
    "ddp.dithers",
    "ddp.training.repeatable",
    "+ generator = torch.Generator()",
    "+ generator.seed()",
    "+ noise = torch.rand(flat.shape, generator=generator).to(flat.dtype) - 0.5",
    "+ flat *= 1 + noise * 2 * torch.finfo(flat.dtype).eps",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    does="Rounds stochastically with a generator that nobody seeds.",
    seen="Stochastic rounding in gradient compression.",
    unseen="The error is one unit in the last place.",
)

DDP.near_miss(
    "ddp.keeps-all-handles",
    "ddp.footprint.no-growth",
    "  self.flying.append((bucket, flat, handle))",
    '+ self.all_handles = [*getattr(self, "all_handles", []), self.flying[-1]]',
    does="Appends each message to a list that nobody clears.",
    seen="`self.handles.append(...)` in the hook, and a `finish` that waits for all of them.",
    unseen="Waiting twice for a handle is harmless; memory is full after hours.",
)
