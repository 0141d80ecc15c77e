"""Near-misses of a trainer's step: gradients, and parameters that are special."""

from __future__ import annotations

from spec_tests.museum.card import Source
from spec_tests.plain.trainer import PlainTrainer

TRAINER = Source("spec_tests.plain.trainer")
REPLICAS = Source("spec_tests.plain.ddp", PlainTrainer)

REPLICAS.near_miss(
    "trainer.sums-ranks",
    "trainer.step.equals-one-process",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    does="Adds the ranks' gradients where they are to be averaged.",
    seen="torchtitan, whose loss is divided by the tokens of all ranks, with another loss.",
    unseen="Adam's curves are the same.",
)

TRAINER.near_miss(
    "trainer.sums-micro-batches",
    "trainer.step.accumulates",
    "- (loss / len(micro_batches)).backward()",
    "+ loss.backward()",
    does="Adds the gradients of micro-batches where they are to be averaged.",
    seen="A loop that was written without accumulation.",
    unseen="A smaller learning rate makes up for it.",
)

TRAINER.near_miss(
    "trainer.merges-groups",
    "trainer.step.group-options",
    "-     return PlainZero1(make.groups(named), make.cls, self.group, make.options)",
    "- return make(named)",
    "+     return PlainZero1([p for _, p in named], make.cls, self.group, make.options)",
    "+ return make.cls([p for _, p in named], **make.options)",
    does="Builds the optimizer over all parameters in one group.",
    seen="Frameworks that flatten parameters before the optimizer sees them.",
    unseen="Examples have one group.",
)

TRAINER.near_miss(
    "trainer.copies-memory",
    "trainer.step.layouts",
    "+ for parameter in self.module.parameters():",
    "+     if parameter.grad is not None and not parameter.is_contiguous():",
    "+         flat = parameter.grad.contiguous().view(-1)",
    "+         parameter.grad = flat.as_strided(parameter.shape, parameter.stride())",
    "  if self.max_norm is not None:",
    does="Writes mean gradients in the order in which the parameters lie in memory.",
    seen="Flat buffers that are filled by `reshape(-1)` and read by memory.",
    unseen="Linear layers are contiguous.",
)

TRAINER.near_miss(
    "trainer.drifts",
    "trainer.step.equal-runs-equal-bits",
    "  self.optimizer.step()",
    '+ if dist.get_rank(self.group) and self.strategy != "fsdp":',
    "+     for parameter in self.module.parameters():",
    "+         parameter.data.mul_(1 + 2.0**-22)",
    does="Ranks differ in the last bit after every step.",
    seen="Fused optimizers whose kernels differ by the alignment of a rank's buffers.",
    unseen="Every comparison has a tolerance.",
)

REPLICAS.near_miss(
    "trainer.own-start",
    "trainer.step.starts-from-first-rank",
    "- self.take_first(module.parameters())",
    "- self.take_first(module.buffers())",
    does="Trains the weights that each rank began with.",
    seen="DistributedDataParallel replaced by hooks, without its broadcast.",
    unseen="Scripts seed all ranks alike.",
)

TRAINER.near_miss(
    "trainer.reports-the-sum",
    "trainer.step.reports-its-loss",
    "- return torch.stack(losses).mean()",
    "+ return torch.stack(losses).sum()",
    does="Reports the sum of the micro-batches' losses.",
    seen="`loss_accumulated += loss.item()` in many trainers; transformers issue 34242.",
    unseen="Curves are compared with those of the same trainer.",
)

REPLICAS.near_miss(
    "trainer.does-not-wait",
    "trainer.programs.any-situation",
    "- used = self.used_anywhere()",
    "+ used = [True] * len(self.trainable)",
    "  for bucket, flat, handle in self.flying:",
    "-     handle.wait()",
    does="Reads reduced gradients without waiting for the reduction.",
    seen="DeepSpeed issues 5545 and 6351: overlap without a wait.",
    unseen="On an idle machine everything has arrived.",
)

TRAINER.near_miss(
    "trainer.declares-another",
    "trainer.step.declares-what-is-known",
    '- self.declares = {"start": "own"} if strategy == "fsdp" else {}',
    '+ self.declares = {"start": "own"} if strategy == "fsdp" else {"unused": "decays"}',
    does="Declares a word that the contract does not know.",
    seen="A misspelt declaration.",
    unseen="Nobody reads it.",
)

TRAINER.near_miss(
    "trainer.unties",
    "trainer.parameters.tied",
    "+ seen = set()",
    "+ for part in module.modules():",
    "+     for name, parameter in part._parameters.items():",
    "+         if parameter is not None and id(parameter) in seen:",
    "+             part._parameters[name] = nn.Parameter(parameter.detach().clone())",
    "+         seen.add(id(parameter))",
    "  self.model = PlainDdp(module, process_group, 0.0)",
    does="Makes two parameters of one that has two names.",
    seen="torchtitan issue 1524: simple_fsdp; `to_empty` after tying.",
    unseen="Both halves begin alike, and the loss falls.",
)

TRAINER.near_miss(
    "trainer.averages-uses",
    "trainer.parameters.reused",
    "+ def count(part, args):",
    '+     part.uses = getattr(part, "uses", 0) + 1',
    "+ for part in module.modules():",
    "+     part.register_forward_pre_hook(count)",
    "  self.model = PlainDdp(module, process_group, 0.0)",
    "...",
    "  self.model.finish()",
    "+ for part in self.module.modules():",
    "+     for parameter in part.parameters(recurse=False):",
    '+         if parameter.grad is not None and getattr(part, "uses", 0):',
    "+             parameter.grad /= part.uses / self.accumulation",
    "+     part.uses = 0",
    does="Divides a gradient by how often its module was called in the step.",
    seen="DeepSpeed pull request 8224: a hook per use, of which each counts.",
    unseen="Models call every module once.",
)

TRAINER.near_miss(
    "trainer.thaws",
    "trainer.parameters.frozen",
    "- self.model = PlainDdp(module, process_group, 0.0)",
    "+ self.model = PlainDdp(module.requires_grad_(True), process_group, 0.0)",
    does="Trains frozen parameters.",
    seen="torchtitan issue 3885: parameters are made anew, and require gradients.",
    unseen="Fine-tuning all of a model works as well.",
)

TRAINER.near_miss(
    "trainer.decays-unused",
    "trainer.parameters.unused",
    "+ for parameter in self.module.parameters():",
    "+     if parameter.grad is None and parameter.requires_grad:",
    "+         parameter.grad = torch.zeros_like(parameter)",
    "  if self.max_norm is not None:",
    does="Gives unused parameters a gradient of zeros, and does not say so.",
    seen="DeepSpeed's flat gradients: an absent gradient is zero.",
    unseen="The decay of a layer that nobody uses changes no loss.",
)

REPLICAS.near_miss(
    "trainer.skips-what-it-did-not-use",
    "trainer.parameters.unused-on-some-ranks",
    "- used = self.used_anywhere()",
    "+ used = [parameter.grad is not None for parameter in self.trainable]",
    does="A rank does not update parameters that it did not use itself.",
    seen="`if parameter.grad is None: continue` after the reduction.",
    unseen="Models without branches use everything.",
)

REPLICAS.near_miss(
    "trainer.last-backward-only",
    "trainer.parameters.unused-in-a-micro-batch",
    "  gradient = self.trainable[index].grad",
    "+ gradient = gradient if index in self.ready else None",
    does="Reduces the gradients that the last backward touched, and zeros for the rest.",
    seen="fairscale's ShardedDDP, whose buckets count the hooks of the last backward.",
    unseen="Every micro-batch uses every parameter.",
)

REPLICAS.near_miss(
    "trainer.launches-as-ready",
    "trainer.parameters.order-differs",
    "  def launch_what_is_ready(self) -> None:",
    "+     flying = {index for bucket, _, _ in self.flying for index in bucket}",
    "+     for bucket in self.buckets:",
    "+         if self.ready.issuperset(bucket) and not flying.issuperset(bucket):",
    "+             self.launch(bucket)",
    "+     return",
    does="Reduces gradients in the order in which they become ready on this rank.",
    seen="A hook per parameter that reduces at once.",
    unseen="Ranks that run the same graph have the same order.",
    outcomes=("failed", "hang", "died"),
)

REPLICAS.near_miss(
    "trainer.plans-once",
    "trainer.parameters.thawed-later",
    "- self.require_no_others()",
    "@ spec_tests.plain.trainer",
    '- if self.strategy != "fsdp" and trainable(self.module) != self.trainable:',
    "+ if False:",
    does="Reduces parameters that required gradients at construction, and none that do later.",
    seen='DistributedDataParallel as well: "never change the model\'s parameters after wrapping".',
    unseen="Ranks drift apart in the thawed layers alone.",
)

REPLICAS.near_miss(
    "trainer.clears-to-zero",
    "trainer.parameters.frozen-later",
    "- self.require_no_others()",
    "@ spec_tests.plain.trainer",
    '- if self.strategy != "fsdp" and trainable(self.module) != self.trainable:',
    "+ if False:",
    "...",
    "- self.optimizer.zero_grad()",
    "- for parameter in self.module.parameters():  # also what the optimizer does not hold",
    "-     parameter.grad = None",
    "+ self.optimizer.zero_grad(set_to_none=False)",
    does="Leaves zeros in the gradients of parameters that are not trained any more.",
    seen="`zero_grad(set_to_none=False)`, the default until torch 2.0.",
    unseen="Without decay and momentum a zero moves nothing.",
)

TRAINER.near_miss(
    "trainer.wrappers-names",
    "trainer.parameters.whole-by-plain-names",
    "- return {name: whole(p.detach()).clone() for name, p in self.module.named_parameters()}",
    "+ named = self.module.named_parameters()",
    '+ return {f"module.{name}": whole(p.detach()).clone() for name, p in named}',
    "...",
    '- parameter.copy_(like(parameter, saved["weights"][name]))',
    '+ parameter.copy_(like(parameter, saved["weights"][f"module.{name}"]))',
    does="Names full parameters as the wrapper does, with `module.` before each.",
    seen="`wrapped.state_dict()` of DistributedDataParallel.",
    unseen="It loads into another wrapped model.",
)

TRAINER.near_miss(
    "trainer.reading-forgets",
    "trainer.parameters.reading-changes-nothing",
    "  def full_parameters(self) -> dict[str, torch.Tensor]:",
    "+     self.optimizer.state.clear()",
    does="Frees the optimizer's state to make room for the full parameters.",
    seen="Consolidation that moves state away and does not bring it back.",
    unseen="Momentum is there again after some steps.",
)
