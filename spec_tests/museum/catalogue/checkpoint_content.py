"""Near-misses of what is saved and loaded: missing, another's, or by another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint, bare, rank


@near_miss(
    "checkpoint.step-before-counting",
    rejected_by=("checkpoint.content.step", "checkpoint.resume.equals-uninterrupted"),
)
class StepBeforeCounting(PlainCheckpoint):
    """Stores the step as it was before it was counted.

    From: a course's trainer: one more update than asked for after each restart
    Unseen: Off by one, and only after a restart.
    """

    def step_to_store(self, step):
        return max(0, step - 1)


@near_miss(
    "checkpoint.no-random-state",
    rejected_by=("checkpoint.content.random-state", "checkpoint.resume.equals-uninterrupted"),
)
class ForgetsGenerators(PlainCheckpoint):
    """Does not bring back torch's generator.

    From: nanoGPT, picotron and most trainers that save a state dict
    Unseen: Models without dropout resume exactly.
    """

    def restore_rank(self, everyone, loader):
        state = torch.get_rng_state()
        super().restore_rank(everyone, loader)
        torch.set_rng_state(state)


@near_miss(
    "checkpoint.first-ranks-random-state",
    rejected_by=("checkpoint.content.random-state", "checkpoint.resume.wrapped"),
)
class FirstRanksGenerators(PlainCheckpoint):
    """Gives the first rank's generators and loader to all ranks.

    From: torchtitan issue 291: one key, many ranks, one survivor
    Unseen: On one rank it is right.
    """

    def whose(self, everyone):
        return 0


@near_miss(
    "checkpoint.no-loader",
    rejected_by=("checkpoint.content.loader", "checkpoint.resume.equals-uninterrupted"),
)
class ForgetsLoader(PlainCheckpoint):
    """Starts the data anew after each restart.

    From: nanoGPT issue 467
    Unseen: The loss is even better than before.
    """

    def restore_rank(self, everyone, loader):
        super().restore_rank(everyone, None)


@near_miss("checkpoint.loader-after-generators", rejected_by="checkpoint.content.loader-that-draws")
class LoaderLast(PlainCheckpoint):
    """Restores the generators, and then the loader, which draws from them.

    From: restoring in the order in which the save wrote
    Unseen: Most loaders draw nothing while they take up a state.
    """

    def restore_rank(self, everyone, loader):
        super().restore_rank(everyone, None)
        if loader is not None:
            loader.load_state_dict(everyone[self.whose(everyone)]["loader"])


@near_miss(
    "checkpoint.no-moments",
    rejected_by=("checkpoint.content.optimizer", "checkpoint.resume.equals-uninterrupted"),
)
class ForgetsMoments(PlainCheckpoint):
    """Saves options of the optimizer, not its state.

    From: KempnerForge pull request 115
    Unseen: A bump in the loss that looks like noise.
    """

    def of_optimizer(self, model, optimizer):
        found = super().of_optimizer(model, optimizer)
        return {name: {**entry, "state": {}} for name, entry in found.items()}


@near_miss(
    "checkpoint.state-in-the-weights-dtype", rejected_by="checkpoint.content.optimizer-dtypes"
)
class StateInTheWeightsDtype(PlainCheckpoint):
    """Hands state to the optimizer's own `load_state_dict`, which casts it.

    From: torch.optim.Optimizer.load_state_dict, which knows `step` alone by name
    Unseen: Moments of AdamW have the dtype of their parameters.
    """

    def restore_optimizer(self, model, optimizer, saved):
        super().restore_optimizer(model, optimizer, saved)
        optimizer.load_state_dict(optimizer.state_dict())


@near_miss(
    "checkpoint.first-ranks-moments", rejected_by="checkpoint.sharded-optimizer.any-world-size"
)
class FirstRanksMoments(PlainCheckpoint):
    """Saves the state that the first rank has of a sharded optimizer.

    From: `if rank == 0: torch.save(optimizer.state)`, from before the optimizer was sharded
    Unseen: It saves, it loads, and a part of the moments is warm.
    """

    def joined(self, parts):
        return parts[0]


@near_miss("checkpoint.rate-alone", rejected_by="checkpoint.content.optimizer")
class RateAlone(PlainCheckpoint):
    """Of the optimizer's options brings back the learning rate alone.

    From: a scheduler's state, saved in place of the groups
    Unseen: The other options are those of the script, until a phase of training changes one.
    """

    def of_optimizer(self, model, optimizer):
        found = super().of_optimizer(model, optimizer)
        return {
            name: {**entry, "options": {"lr": entry["options"]["lr"]}}
            for name, entry in found.items()
        }


@near_miss("checkpoint.no-options", rejected_by="checkpoint.content.optimizer")
class ForgetsOptions(PlainCheckpoint):
    """Saves state of the optimizer, not its options: the learning rate starts anew.

    From: Megatron issue 7468: weight decay of the launch for a step after loading
    Unseen: Schedules that are computed from the step hide it.
    """

    def of_optimizer(self, model, optimizer):
        found = super().of_optimizer(model, optimizer)
        return {name: {**entry, "options": {}} for name, entry in found.items()}


@near_miss("checkpoint.child-for-a-wrapped", rejected_by="checkpoint.content.child-called-module")
class ChildForAWrapped(Patched):
    """Takes a model that has a child called `module` for a wrapper.

    From: `getattr(model, "module", model)`
    Unseen: Few models have such a child; of one that has, all the rest is left out.
    """

    module = "solution.checkpoint.named"
    find = """            hasattr(model, "no_sync")
            and not isinstance(model, FSDPModule)
            and isinstance"""
    replace = "            isinstance"


@near_miss("checkpoint.no-buffers", rejected_by="checkpoint.content.model")
class ForgetsBuffers(PlainCheckpoint):
    """Leaves buffers as they were built.

    From: checkpoints made of named_parameters()
    Unseen: Transformers have none that matter.
    """

    def restore_model(self, model, saved):
        own = dict(bare(model).named_buffers())
        super().restore_model(model, {**saved, **{n: t.clone() for n, t in own.items()}})


@near_miss("checkpoint.buffers-of-any-rank", rejected_by="checkpoint.resume.buffers-of-first-rank")
class BuffersOfAnyRank(PlainCheckpoint):
    """Saves each buffer from another rank.

    From: torch.distributed.checkpoint balances who writes which name of a replicated state
    Unseen: The statistics of each rank look plausible.
    """

    def of_model(self, model, everyone):
        found = super().of_model(model, everyone)
        for number, name in enumerate(everyone[0]["buffers"]):
            found[name] = everyone[number % len(everyone)]["buffers"][name]
        return found


@near_miss("checkpoint.new-parameters", rejected_by="checkpoint.content.reaches-live-objects")
class NewParameters(PlainCheckpoint):
    """Puts new Parameter objects into the model.

    From: load_state_dict(assign=True) with an optimizer that was built before
    Unseen: The loaded values are right; they only never change again.
    """

    def restore_model(self, model, saved):
        bare(model).load_state_dict(saved, assign=True)


@near_miss("checkpoint.shared-cache", rejected_by="checkpoint.content.shares-no-memory")
class CachesReads(PlainCheckpoint):
    """Hands out the same tensors at each load.

    From: a cache of what was read, with optimizers that keep what they are given
    Unseen: Needs two runs in one process.
    """

    def __init__(self):
        self.known: dict[Path, dict[str, Any]] = {}

    def read(self, path):
        if path not in self.known:
            self.known[path] = super().read(path)
        return self.known[path]


@near_miss("checkpoint.leaves-it-evaluating", rejected_by="checkpoint.save.changes-nothing")
class LeavesItEvaluating(PlainCheckpoint):
    """Switches the model to evaluation for the save, and leaves it so.

    From: a trainer that validates and saves in one function
    Unseen: Toys have neither dropout nor batch norms, and weights go on moving.
    """

    def of_model(self, model, everyone):
        model.eval()
        return super().of_model(model, everyone)


@near_miss(
    "checkpoint.wrappers-names",
    rejected_by=("checkpoint.names.across-torch-wrapper", "checkpoint.names.across-own-wrappers"),
)
class WrappersNames(PlainCheckpoint):
    """Saves the wrapper's state dict, `module.` prefix included.

    From: the course's distributed trainer; half of all forum threads on loading
    Unseen: It loads where it was saved.
    """

    def of_model(self, model, everyone):
        return model.state_dict()

    def check(self, module, saved):
        pass

    def restore_model(self, model, saved):
        model.load_state_dict(saved)


@near_miss(
    "checkpoint.optimizer-by-position", rejected_by="checkpoint.names.optimizer-by-parameter"
)
class OptimizerByPosition(PlainCheckpoint):
    """Keys optimizer state by the number of the parameter.

    From: torch.optim's own state_dict
    Unseen: The same script in the same order loads it.
    """

    def of_optimizer(self, model, optimizer):
        return optimizer.state_dict()

    def restore_optimizer(self, model, optimizer, saved):
        optimizer.load_state_dict(saved)


@near_miss("checkpoint.file-per-rank", rejected_by="checkpoint.world-size.any")
class FilePerRank(PlainCheckpoint):
    """Each rank saves and loads a file of its own.

    From: the first version of every sharded checkpoint
    Unseen: It is right as long as the world stays the same.
    """

    def root(self, directory):
        return super().root(directory) / f"rank-{rank()}"

    def save(self, directory, *, step, model, optimizer, loader=None):
        everyone = self.gather(self.of_rank(model, loader))
        state = {
            "step": step,
            "model": self.of_model(model, everyone),
            "optimizer": self.of_optimizer(model, optimizer),
            "ranks": everyone,
        }
        self.put(self.root(directory), step, state)

    def load(self, directory, *, model, optimizer, loader=None):
        self.share = lambda value: self.newest(self.root(directory))  # type: ignore[method-assign]  # every rank its own
        return super().load(directory, model=model, optimizer=optimizer, loader=loader)
