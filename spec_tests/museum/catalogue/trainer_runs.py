"""Near-misses of what surrounds a trainer's step, and right but unusual trainers."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from spec_tests.museum.card import benign, near_miss
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.trainer import PlainTrainer


@near_miss("trainer.keeps-average-weights", rejected_by="trainer.evaluation.leaves-no-trace")
class KeepsAverageWeights(PlainTrainer):
    """Evaluates with averaged weights, and does not take the trained ones back.

    From: An exponential moving average that is swapped in for evaluations, without a `finally`.
    Unseen: Averaged weights have a better loss.
    """

    @torch.no_grad()
    def update(self):
        before = {p: p.detach().clone() for p in self.module.parameters()}
        super().update()
        self.average = {p: (p.detach() + old) / 2 for p, old in before.items()}

    @torch.no_grad()
    def evaluate(self, batch):
        if self.strategy != "fsdp":
            for parameter, average in getattr(self, "average", {}).items():
                parameter.copy_(average)
        return super().evaluate(batch)


@near_miss("trainer.brings-back-rates", rejected_by="trainer.programs.any-situation")
class BringsBackRates(PlainTrainer):
    """Brings back in an evaluation the rates that the last step had.

    From: A snapshot of weights and optimizer that is swapped out and in for averaged weights.
    Unseen: A schedule that sets the rate between the evaluation and the step.
    """

    rates_of_step: tuple[float, ...] = ()

    def update(self):
        super().update()
        self.rates_of_step = tuple(group["lr"] for group in self.optimizer.param_groups)

    def evaluate(self, batch):
        found = super().evaluate(batch)
        for group, rate in zip(self.optimizer.param_groups, self.rates_of_step, strict=False):
            group["lr"] = rate
        return found


@near_miss("trainer.evaluates-a-copy", rejected_by="trainer.evaluation.current-weights")
class EvaluatesACopy(PlainTrainer):
    """Evaluates the copy of the model that it took at construction.

    From: A compiled or quantised twin for evaluation that nobody refreshes.
    Unseen: Its loss is plausible, and does not move.
    """

    def wrap(self, module):
        self.twin = copy.deepcopy(module)
        return super().wrap(module)

    def evaluate(self, batch):
        if self.strategy == "fsdp":
            return super().evaluate(batch)
        with torch.no_grad():
            return self.loss(self.twin.eval(), batch)


@near_miss("trainer.evaluates-in-training-mode", rejected_by="trainer.evaluation.mode")
class EvaluatesInTrainingMode(PlainTrainer):
    """Evaluates in training mode.

    From: `model.eval()` left out.
    Unseen: Without dropout and batch normalisation it is the same.
    """

    def evaluate(self, batch):
        with torch.no_grad():
            return self.forward(batch)


@near_miss("trainer.stays-in-evaluation-mode", rejected_by="trainer.evaluation.mode")
class StaysInEvaluationMode(PlainTrainer):
    """Trains on in evaluation mode after the first evaluation.

    From: `model.train()` left out: several tutorials.
    Unseen: Dropout that is gone makes the loss fall faster.
    """

    def evaluate(self, batch):
        self.model.eval()
        with torch.no_grad():
            return self.forward(batch)


@near_miss("trainer.trains-all-again", rejected_by="trainer.evaluation.restores-modes")
class TrainsAllAgain(PlainTrainer):
    """Puts every module into training mode after an evaluation.

    From: `model.train()` as the counterpart of `model.eval()`, as in most training scripts.
    Unseen: Until a layer is kept in evaluation mode.
    """

    def evaluate(self, batch):
        found = super().evaluate(batch)
        self.model.train()
        return found


@near_miss("trainer.settings-by-class", rejected_by="trainer.lifecycle.two-trainers")
class SettingsByClass(PlainTrainer):
    """Looks its settings up by the module's class: a second model gets those of the first.

    From: torchtitan's simple_fsdp, whose cache is keyed by class.
    Unseen: A process trains one model.
    """

    known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, strategy: str, module: Any, make_optimizer: Any, **options: Any) -> None:
        super().__init__(strategy, module, make_optimizer, **options)
        self.max_norm = self.known.setdefault(type(module).__name__, (options["max_norm"],))[0]


@near_miss("trainer.clears-at-the-end", rejected_by="trainer.lifecycle.after-an-exception")
class ClearsAtTheEnd(PlainTrainer):
    """Clears gradients after the update, and not before a step.

    From: zero_grad as the last line of the loop.
    Unseen: Nothing is left over until a step is interrupted.
    """

    def clear(self):
        pass

    def update(self):
        super().update()
        super().clear()


@near_miss(
    "trainer.divides-by-what-was-said",
    rejected_by="trainer.lifecycle.other-number-of-micro-batches",
)
class DividesByWhatWasSaid(PlainTrainer):
    """Takes any number of micro-batches, and divides by `accumulation`.

    From: The last step of an epoch; transformers issue 34242.
    Unseen: It is one step of many.
    """

    def check(self, micro_batches):
        self.factor = len(micro_batches) / self.accumulation

    def backward(self, loss):
        super().backward(loss * self.factor)


@near_miss("trainer.leaves-the-group-aside", rejected_by="trainer.group.trains-by-itself")
class LeavesTheGroupAside(PlainTrainer):
    """Divides by the size of the world in a sub-group.

    From: fairscale's ShardedDDP; verl issue 7493.
    Unseen: Without sub-groups it is right.
    """

    class wrapper(PlainDdp):
        def scale(self, flat):
            return flat / dist.get_world_size()


@near_miss("trainer.saves-weights-alone", rejected_by="trainer.checkpoint.resumes")
class SavesWeightsAlone(PlainTrainer):
    """Goes on after a load with the moments that it has.

    From: `model.load_state_dict` alone.
    Unseen: The loss has a bump, which is laid to the data.
    """

    def load_state(self, state):
        pass


@near_miss("trainer.saving-empties", rejected_by="trainer.checkpoint.saving-changes-nothing")
class SavingEmpties(PlainTrainer):
    """Moves the optimizer's state out to write it, and keeps none.

    From: Memory is freed for the copy that is written.
    Unseen: A resumed run is right; the one that saved is not.
    """

    def save(self, directory):
        super().save(directory)
        self.optimizer.state.clear()


@near_miss(
    "trainer.loads-beside-its-copy", rejected_by="trainer.checkpoint.evaluates-what-was-loaded"
)
class LoadsBesideItsCopy(PlainTrainer):
    """Evaluates a copy of the weights that steps refresh and loads do not.

    From: Megatron-Bridge issue 3397: 16-bit weights are copied from the master weights in a step.
    Unseen: After one step everything is right.
    """

    def wrap(self, module):
        self.twin = copy.deepcopy(module)
        return super().wrap(module)

    def update(self):
        super().update()
        if self.strategy != "fsdp":
            self.twin = copy.deepcopy(self.module)

    def evaluate(self, batch):
        if self.strategy == "fsdp":
            return super().evaluate(batch)
        with torch.no_grad():
            return self.loss(self.twin.eval(), batch)


@near_miss("trainer.rescales-the-rate", rejected_by="trainer.checkpoint.another-size")
class RescalesTheRate(PlainTrainer):
    """Scales the rate with the number of ranks when a checkpoint is loaded.

    From: The linear scaling rule (Goyal et al. 2017), applied without being asked.
    Unseen: At the size of the save it is the same.
    """

    def save(self, directory):
        super().save(directory)
        size = dist.get_world_size(self.group)
        (Path(directory) / "size.txt").write_text(str(size), encoding="utf-8")

    def load(self, directory):
        super().load(directory)
        saved = int((Path(directory) / "size.txt").read_text(encoding="utf-8"))
        self.set_lr(dist.get_world_size(self.group) / saved)


@near_miss("trainer.reduces-each-time", rejected_by="trainer.traffic.reduces-once-per-step")
class ReducesEachTime(PlainTrainer):
    """Reduces gradients after every micro-batch.

    From: Accumulation without `no_sync`.
    Unseen: The weights are right; a step takes longer.
    """

    def window(self, *, is_last):
        return contextlib.nullcontext()


@near_miss(
    "trainer.averages-weights-first", rejected_by="trainer.traffic.evaluation-reduces-nothing"
)
class AveragesWeightsFirst(PlainTrainer):
    """Averages all weights over the ranks before an evaluation.

    From: A remedy for ranks that had drifted apart.
    Unseen: Equal weights have themselves as their mean.
    """

    @torch.no_grad()
    def evaluate(self, batch):
        if self.strategy != "fsdp":
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.data, group=self.group)
                parameter.div_(dist.get_world_size(self.group))
        return super().evaluate(batch)


@near_miss("trainer.divides-nothing", rejected_by="trainer.footprint.state-is-divided")
class DividesNothing(PlainTrainer):
    """Calls itself ZeRO-1, and has the whole optimizer on every rank.

    From: fsdp_plugin with a CPU in Accelerate: it is dropped without a word, and DDP trains.
    Unseen: The weights are right.
    """

    def build(self, make):
        if self.strategy == "zero1":
            return make(list(self.module.named_parameters()))
        return super().build(make)


@near_miss("trainer.shards-nothing", rejected_by="trainer.footprint.parameters-are-divided")
class ShardsNothing(PlainTrainer):
    """Calls itself FSDP, and replicates the model.

    From: A wrapping policy that matches no module.
    Unseen: The weights are right.
    """

    def __init__(self, strategy: str, *args: Any, **options: Any) -> None:
        super().__init__("ddp" if strategy == "fsdp" else strategy, *args, **options)

    def report(self, losses):
        super().clear()  # nothing but the weights stays
        return super().report(losses)


@near_miss("trainer.keeps-gradients", rejected_by="trainer.footprint.does-not-grow")
class KeepsGradients(PlainTrainer):
    """Keeps every step's gradients for its log.

    From: A history for plots of the norm, of tensors and not of numbers.
    Unseen: Memory ends on the second day.
    """

    def update(self):
        super().update()
        kept = self.__dict__.setdefault("history", [])
        kept += [p.grad.clone() for p in self.module.parameters() if p.grad is not None]


# ------------------------------------------------------------------------------ right ones


@benign("benign.trainer-zeros-for-unused")
class ZerosForUnused(PlainTrainer):
    """Gives unused parameters a gradient of zeros, and says so."""

    def wrap(self, module):
        self.declares = {"unused": "zero"}
        return super().wrap(module)

    def finish(self):
        super().finish()
        if self.strategy != "fsdp":
            for parameter in self.module.parameters():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)


@benign("benign.trainer-sums-ranks")
class SumsAsDeclared(PlainTrainer):
    """Adds the ranks' gradients, and says so."""

    class wrapper(PlainDdp):
        def scale(self, flat):
            return flat.clone()

    def wrap(self, module):
        self.declares = {"gradient": "sum"}
        return super().wrap(module)


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
