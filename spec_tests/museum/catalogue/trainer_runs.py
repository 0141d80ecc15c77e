"""Near-misses of what surrounds a trainer's step, and right but unusual trainers."""

from __future__ import annotations

from spec_tests.museum.card import Source, benign
from spec_tests.plain.trainer import PlainTrainer

TRAINER = Source("spec_tests.plain.trainer")
REPLICAS = Source("spec_tests.plain.ddp", PlainTrainer)

TRAINER.near_miss(
    "trainer.keeps-average-weights",
    "trainer.evaluation.leaves-no-trace",
    "+ self.before = {p: p.detach().clone() for p in self.module.parameters()}",
    "  self.optimizer.zero_grad()",
    "...",
    "  self.model.eval()",
    '+ if self.strategy != "fsdp":',
    '+     for parameter, old in getattr(self, "before", {}).items():',
    "+         parameter.data.add_(old).div_(2)",
    does="Evaluates with averaged weights, and does not take the trained ones back.",
    seen="An exponential moving average that is swapped in for evaluations, without a `finally`.",
    unseen="Averaged weights have a better loss.",
)

EVALUATES_A_COPY = (
    "  import contextlib",
    "+ import copy",
    "...",
    "  self.strategy, self.module, self.loss = strategy, module, loss",
    "+ self.twin = copy.deepcopy(module)",
    "...",
    '+ if self.strategy != "fsdp":',
    "+     with torch.no_grad():",
    "+         return self.loss(self.twin.eval(), batch)",
    "  modes = [(part, part.training) for part in self.model.modules()]",
)

TRAINER.near_miss(
    "trainer.evaluates-a-copy",
    "trainer.evaluation.current-weights",
    *EVALUATES_A_COPY,
    does="Evaluates the copy of the model that it took at construction.",
    seen="A compiled or quantised twin for evaluation that nobody refreshes.",
    unseen="Its loss is plausible, and does not move.",
)

TRAINER.near_miss(
    "trainer.evaluates-in-training-mode",
    "trainer.evaluation.mode",
    "- self.model.eval()",
    does="Evaluates in training mode.",
    seen="`model.eval()` left out.",
    unseen="Without dropout and batch normalisation it is the same.",
)

TRAINER.near_miss(
    "trainer.trains-all-again",
    "trainer.evaluation.restores-modes",
    "- part.training = is_training",
    "+ part.training = True",
    does="Puts every module into training mode after an evaluation.",
    seen="`model.train()` as the counterpart of `model.eval()`, as in most training scripts.",
    unseen="Until a layer is kept in evaluation mode.",
)

TRAINER.near_miss(
    "trainer.settings-by-class",
    "trainer.lifecycle.two-trainers",
    "+ KNOWN: dict[str, Any] = {}",
    "  class PlainTrainer:",
    "...",
    "  self.accumulation, self.max_norm, self.dtype = accumulation, max_norm, dtype",
    "+ self.max_norm = KNOWN.setdefault(type(module).__name__, max_norm)",
    does="Looks its settings up by the module's class: a second model gets those of the first.",
    seen="torchtitan's simple_fsdp, whose cache is keyed by class.",
    unseen="A process trains one model.",
)

TRAINER.near_miss(
    "trainer.clears-at-the-end",
    "trainer.lifecycle.after-an-exception",
    "- self.optimizer.zero_grad()",
    "- for parameter in self.module.parameters():  # also what the optimizer does not hold",
    "-     parameter.grad = None",
    "...",
    "  self.optimizer.step()",
    "+ for parameter in self.module.parameters():",
    "+     parameter.grad = None",
    does="Clears gradients after the update, and not before a step.",
    seen="zero_grad as the last line of the loop.",
    unseen="Nothing is left over until a step is interrupted.",
)

TRAINER.near_miss(
    "trainer.divides-by-what-was-said",
    "trainer.lifecycle.other-number-of-micro-batches",
    "- if len(micro_batches) != self.accumulation:",
    "+ if False:",
    "...",
    "- (loss / len(micro_batches)).backward()",
    "+ (loss / self.accumulation).backward()",
    does="Takes any number of micro-batches, and divides by `accumulation`.",
    seen="The last step of an epoch; transformers issue 34242.",
    unseen="It is one step of many.",
)

REPLICAS.near_miss(
    "trainer.leaves-the-group-aside",
    "trainer.group.trains-by-itself",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts) / dist.get_world_size()",
    does="Divides by the size of the world in a sub-group.",
    seen="fairscale's ShardedDDP; verl issue 7493.",
    unseen="Without sub-groups it is right.",
)

TRAINER.near_miss(
    "trainer.saves-weights-alone",
    "trainer.checkpoint.resumes",
    '- self.load_state(saved["optimizer"])',
    does="Goes on after a load with the moments that it has.",
    seen="`model.load_state_dict` alone.",
    unseen="The loss has a bump, which is laid to the data.",
)

TRAINER.near_miss(
    "trainer.saving-empties",
    "trainer.checkpoint.saving-changes-nothing",
    "  dist.barrier(group=self.group)",
    "+ self.optimizer.state.clear()",
    does="Moves the optimizer's state out to write it, and keeps none.",
    seen="Memory is freed for the copy that is written.",
    unseen="A resumed run is right; the one that saved is not.",
)

TRAINER.near_miss(
    "trainer.loads-beside-its-copy",
    "trainer.checkpoint.evaluates-what-was-loaded",
    *EVALUATES_A_COPY,
    "...",
    "  self.optimizer.step()",
    '+ if self.strategy != "fsdp":',
    "+     self.twin = copy.deepcopy(self.module)",
    does="Evaluates a copy of the weights that steps refresh and loads do not.",
    seen="Megatron-Bridge issue 3397: 16-bit weights are copied from the master weights in a step.",
    unseen="After one step everything is right.",
)

TRAINER.near_miss(
    "trainer.rescales-the-rate",
    "trainer.checkpoint.another-size",
    '- saved = {"weights": self.full_parameters(), "optimizer": self.full_state()}',
    "+ size = dist.get_world_size(self.group)",
    '+ saved = {"weights": self.full_parameters(), "optimizer": self.full_state(), "size": size}',
    "...",
    '  self.load_state(saved["optimizer"])',
    '+ self.set_lr(dist.get_world_size(self.group) / saved["size"])',
    does="Scales the rate with the number of ranks when a checkpoint is loaded.",
    seen="The linear scaling rule (Goyal et al. 2017), applied without being asked.",
    unseen="At the size of the save it is the same.",
)

TRAINER.near_miss(
    "trainer.reduces-each-time",
    "trainer.traffic.reduces-once-per-step",
    "- self.model.set_requires_gradient_sync(is_last)",
    "+ pass",
    "...",
    "- return contextlib.nullcontext() if is_last else found",
    "+ return contextlib.nullcontext()",
    does="Reduces gradients after every micro-batch.",
    seen="Accumulation without `no_sync`.",
    unseen="The weights are right; a step takes longer.",
)

TRAINER.near_miss(
    "trainer.averages-weights-first",
    "trainer.traffic.evaluation-reduces-nothing",
    '+ for parameter in self.module.parameters() if self.strategy != "fsdp" else ():',
    "+     dist.all_reduce(parameter.data, group=self.group)",
    "+     parameter.data.div_(dist.get_world_size(self.group))",
    "  modes = [(part, part.training) for part in self.model.modules()]",
    does="Averages all weights over the ranks before an evaluation.",
    seen="A remedy for ranks that had drifted apart.",
    unseen="Equal weights have themselves as their mean.",
)

TRAINER.near_miss(
    "trainer.divides-nothing",
    "trainer.footprint.state-is-divided",
    '- if self.strategy == "zero1":',
    "-     return PlainZero1(make.groups(named), make.cls, self.group, make.options)",
    does="Calls itself ZeRO-1, and has the whole optimizer on every rank.",
    seen="fsdp_plugin with a CPU in Accelerate: it is dropped without a word, and DDP trains.",
    unseen="The weights are right.",
)

TRAINER.near_miss(
    "trainer.shards-nothing",
    "trainer.footprint.parameters-are-divided",
    '+ strategy = "ddp" if strategy == "fsdp" else strategy',
    "  self.strategy, self.module, self.loss = strategy, module, loss",
    "...",
    "  self.optimizer.step()",
    "+ self.optimizer.zero_grad()  # nothing but the weights stays",
    does="Calls itself FSDP, and replicates the model.",
    seen="A wrapping policy that matches no module.",
    unseen="The weights are right.",
)

TRAINER.near_miss(
    "trainer.keeps-gradients",
    "trainer.footprint.does-not-grow",
    "  self.optimizer.step()",
    '+ kept = self.__dict__.setdefault("history", [])',
    "+ kept += [p.grad.clone() for p in self.module.parameters() if p.grad is not None]",
    does="Keeps every step's gradients for its log.",
    seen="A history for plots of the norm, of tensors and not of numbers.",
    unseen="Memory ends on the second day.",
)


# ------------------------------------------------------------------------------ right ones


TRAINER.benign(
    "benign.trainer-zeros-for-unused",
    '- self.declares = {"start": "own"} if strategy == "fsdp" else {}',
    '+ self.declares = {"start": "own"} if strategy == "fsdp" else {"unused": "zero"}',
    "...",
    '+ for parameter in self.module.parameters() if self.strategy != "fsdp" else ():',
    "+     if parameter.grad is None and parameter.requires_grad:",
    "+         parameter.grad = torch.zeros_like(parameter)",
    "  if self.max_norm is not None:",
    does="Gives unused parameters a gradient of zeros, and says so.",
)

REPLICAS.benign(
    "benign.trainer-sums-ranks",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    "@ spec_tests.plain.trainer",
    '- self.declares = {"start": "own"} if strategy == "fsdp" else {}',
    '+ self.declares = {"start": "own"} if strategy == "fsdp" else {"gradient": "sum"}',
    does="Adds the ranks' gradients, and says so.",
)


@benign("benign.trainer-refuses")
class Refuses(PlainTrainer):
    """Has no rates, no checkpoints and no evaluation, and refuses to go on after an exception."""

    evaluate = set_lr = save = load = None  # type: ignore[assignment]  # not offered
    is_broken = False

    def step(self, micro_batches):
        if self.is_broken:
            raise RuntimeError("an earlier step failed: build a new trainer")
        self.is_broken = True
        found = super().step(micro_batches)
        self.is_broken = False
        return None if found is None else found.item()
