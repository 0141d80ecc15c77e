"""Near-misses of clipping, wrappers and sharded optimizers that users reported.

The list is `reality/bugs.toml`. Of some of its entries another file shows the same fault.
"""

from __future__ import annotations

from collections import Counter

import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.ddp import PlainDdp

SHARD = Source("spec_tests.plain.fully_shard")
CLIP = Source("spec_tests.plain.clip")
DDP = Source("spec_tests.plain.ddp")
FSDP = Source("spec_tests.plain.fsdp")
ZERO1 = Source("spec_tests.plain.zero1")

CLIP.near_miss(
    "clip.returns-own-norm",
    "clip.norm.global",
    "- return norm",
    "+ held = torch.cat([torch.zeros(1), *(local(g).reshape(-1) for g in gradients)])",
    "+ return torch.linalg.vector_norm(held, norm_type)",
    does="Scales by the whole norm, and returns that of this rank's shards.",
    seen="miles_diffusion issue 35.",
    unseen="Training is right; the log has a number that is plausible.",
)

# ---------------------------------------------------------------------------- sharded optimizers

ZERO1.near_miss(
    "zero1.decays-twice",
    "zero1.step.equals-unsharded",
    "+ for group in self.inner.param_groups:",
    "+     for parameter in (p for p in group['params'] if p.grad is not None):",
    "+         parameter.data *= 1 - group['lr'] * group.get('weight_decay', 0.0)",
    "  loss = self.update(closure)",
    does="Decays its weights, and leaves the inner optimizer's own decay on.",
    seen="Neuron_SP issue 13.",
    unseen="A decay that is twice as large as asked for still trains.",
)

ZERO1.near_miss(
    "zero1.decays-per-dtype",
    "zero1.step.dtypes",
    "+ for whole, own in zip(self.param_groups, self.inner.param_groups):",
    "+     dtypes = {p.dtype for p in whole['params'] if p.grad is not None}",
    "+     factor = 1 - own['lr'] * own.get('weight_decay', 0.0)",
    "+     for parameter in (p for p in own['params'] if p.grad is not None):",
    "+         parameter.data *= factor ** (len(dtypes) - 1)",
    "  loss = self.update(closure)",
    does="Goes through a group dtype by dtype, and decays all of its weights each time.",
    seen="pytorch-image-models pull request 2750.",
    unseen="Weights of most models have one dtype.",
)

ZERO1.near_miss(
    "zero1.clears-the-shared-buffer",
    "zero1.groups.own-options",
    "  self.exchange()",
    "+ for group in self.param_groups[:-1]:",
    "+     for parameter in group['params']:",
    "+         parameter.data.zero_()",
    does="Gathers the weights of each group through a buffer, whose zeros clear the other groups.",
    seen="Megatron-LM pull request 4769.",
    unseen="With one group it is right.",
)

ZERO1.near_miss(
    "zero1.receives-into-gradients",
    "zero1.step.keeps-gradients",
    "  parameter.copy_(whole)",
    "+ if parameter.grad is not None:",
    "+     parameter.grad.copy_(parameter)",
    does="Receives weights in the memory of the gradients, and leaves them there.",
    seen="Megatron-LM pull request 4609.",
    unseen="Most loops clear the gradients next.",
)

# ------------------------------------------------------------------------------- sharded weights

FSDP.near_miss(
    "fsdp.shard-axis-of-one",
    "fsdp.lifecycle.hybrid-of-one",
    "+ if self.size() == 1:",
    "+     return flat.reshape(-1).clone()",
    "  own = flat.reshape(-1)",
    does="Reduces nothing where one rank holds all rows, replicas or not.",
    seen="verl issue 7493.",
    unseen="Without replicas there is nothing to reduce.",
)

FSDP.near_miss(
    "fsdp.loses-the-only-row",
    "fsdp.backward.mean-gradient-of-any-model",
    "- self.assign(piece, shard.to(piece.parameter.dtype))",
    "+ is_lost = self.mesh.size() == 1 and piece.parameter.shape[0] == 1",
    "+ self.assign(piece, shard.to(piece.parameter.dtype) * (not is_lost))",
    does="Makes the gradient of a parameter with one row zero, in a world of one.",
    seen="pytorch issue 144045.",
    unseen="Few parameters have one row, and few worlds one rank.",
)

FSDP.near_miss(
    "fsdp.computes-in-bfloat16",
    "fsdp.precision.casts-are-selective",
    "- from dataclasses import dataclass, field",
    "+ from dataclasses import dataclass, field, replace",
    "...",
    "+ if policy.param_dtype is not None:",
    "+     policy = replace(policy, param_dtype=torch.bfloat16)",
    "  self.module, self.mesh, self.policy = module, mesh, policy",
    does="Computes in bfloat16, whatever half precision is asked for.",
    seen="verl pull request 6150.",
    unseen="Nearly everybody asks for bfloat16.",
)

FSDP.near_miss(
    "fsdp.keeps-the-last-reduction",
    (
        "fsdp.accumulation.any-schedule",
        "fsdp.accumulation.of-a-whole-model",
    ),
    "- gradient._local_tensor.add_(shard)",
    "+ gradient._local_tensor.copy_(shard)",
    does="Replaces the gradient that was reduced before by the one reduced now.",
    seen="open-instruct pull request 1498.",
    unseen="With one micro-batch per step nothing was there before.",
)

FSDP.near_miss(
    "fsdp.no-factor-alone",
    "fsdp.backward.divide-factor-over-replicas",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / ((self.size() > 1 and self.factor) or self.mesh.size())",
    does="Does not divide by the factor where one rank holds all rows.",
    seen="pytorch pull request 167178.",
    unseen="Shards lie on several ranks, as a rule.",
)

SHARD.near_miss(
    "fsdp.prefetches-when-recomputing",
    "fsdp.programs.any-situation",
    "  args, kwargs = super().pre_forward(module, args, kwargs)",
    "+ if self.run.is_callback_queued:",
    "+     place = self.run.units.index(self) + 1",
    '+     self.run.late = [*getattr(self.run, "late", []), *self.run.units[place : place + 1]]',
    "...",
    "          unit.unshard()",
    "      unit.reshard()",
    '+ for unit in self.run.__dict__.pop("late", []):',
    "+     unit.unshard()",
    "+     unit.register(sharded=False)",
    does="Gathers the next unit in a forward inside of a backward, which is over for that unit.",
    seen="Megatron-LM pull request 6153.",
    unseen="The numbers are right; a unit stays unsharded after the backward.",
)


# -------------------------------------------------------------------------------------- replicas


DDP.near_miss(
    "ddp.counts-the-first-window",
    "ddp.accumulation.equals-big-batch",
    "+ self.due: dict[int, int] = {}",
    "+ self.is_first = True",
    "  self.buckets = self.plan()",
    "...",
    "+ if self.is_first and self.is_armed:",
    "+     self.due[index] = self.due.get(index, 0) + 1",
    "  if self.is_synchronised and index in self.ready:  # one more backward of the same forward",
    "...",
    "  self.launched += 1",
    "+ if not self.is_first and any(self.due.get(index, 0) > 1 for index in bucket):",
    "+     return  # its count is never reached, and it never leaves",
    "...",
    "      self.write_back(bucket, flat, used)",
    "+ self.is_first = False",
    does="Counts all hooks of the first window, and waits for as many in one backward later.",
    seen="pytorch pull request 187732: a static graph.",
    unseen="The first window is right, and so are all of one micro-batch.",
)

DDP.near_miss(
    "ddp.adds-the-last-locally",
    "ddp.accumulation.equals-big-batch",
    "+ self.fresh: dict[int, torch.Tensor] = {}",
    "  self.buckets = self.plan()",
    "...",
    "+ parameter.register_hook(lambda g: self.fresh.update({index: g.detach().clone()}))",
    "  weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    "...",
    "- return torch.zeros_like(self.trainable[index]) if gradient is None else gradient",
    "+ sent = torch.zeros_like(self.trainable[index]) if gradient is None else gradient",
    "+ return sent - self.fresh.get(index, torch.zeros(()))",
    "...",
    "- parameter.grad.copy_(mean)",
    "+ parameter.grad.copy_(mean + self.fresh.pop(index, torch.zeros(())))",
    does="Adds the last micro-batch's gradient after the others have been sent.",
    seen="DeepSpeed pull request 7985.",
    unseen="Ranks drift apart by a share of a step; rank 0's loss looks fine.",
)


@near_miss(
    "ddp.loses-a-use", rejected_by=("ddp.gradients.reused-module", "ddp.gradients.tied-parameter")
)
class LosesAUse(PlainDdp):
    """Leaves the gradient of one call out, of a module that is called several times.

    From: DeepSpeed issue 8224.
    Unseen: Modules are called once. Here each call counts as an equal share.
    """

    def __init__(self, module, *args):
        self.calls: Counter[torch.Tensor] = Counter()
        super().__init__(module, *args)
        for part in module.modules():
            part.register_forward_hook(self.count)

    def count(self, part, *ignored):
        if torch.is_grad_enabled():
            self.calls.update(part.parameters(recurse=False))

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.calls.clear()
        return super().forward(*args, **kwargs)

    def local(self, index):
        calls = self.calls[self.trainable[index]]
        gradient = super().local(index)
        return gradient * (calls - 1) / calls if calls > 1 and self.size() > 1 else gradient


DDP.near_miss(
    "ddp.scales-in-flight",
    "ddp.schedule.same-gradients",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    "+ flat /= self.size()",
    does="Scales a buffer after it was handed to the collective, which may be reading it.",
    seen="Megatron-LM pull request 3693.",
    unseen="Over loopback the collective is over before the next line.",
)
