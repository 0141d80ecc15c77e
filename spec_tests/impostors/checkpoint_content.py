"""Near-misses of saving and loading: something is missing, another's, or has another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_tests.impostors.plain_checkpoint import PlainCheckpoint, bare, card, rank


class StepBeforeCounting(PlainCheckpoint):
    def step_to_store(self, step: int) -> int:
        return max(0, step - 1)


class ForgetsGenerators(PlainCheckpoint):
    def restore_rank(self, everyone: list[dict[str, Any]], loader: Any) -> None:
        state = torch.get_rng_state()
        super().restore_rank(everyone, loader)
        torch.set_rng_state(state)


class FirstRanksGenerators(PlainCheckpoint):
    def whose(self, everyone: list[dict[str, Any]]) -> int:
        return 0


class ForgetsLoader(PlainCheckpoint):
    def restore_rank(self, everyone: list[dict[str, Any]], loader: Any) -> None:
        super().restore_rank(everyone, None)


class ForgetsMoments(PlainCheckpoint):
    def of_optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        found = super().of_optimizer(model, optimizer)
        return {name: {**entry, "state": {}} for name, entry in found.items()}


class FirstRanksMoments(PlainCheckpoint):
    def joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return parts[0]


class ForgetsOptions(PlainCheckpoint):
    def of_optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        found = super().of_optimizer(model, optimizer)
        return {name: {**entry, "options": {}} for name, entry in found.items()}


class ForgetsBuffers(PlainCheckpoint):
    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        own = dict(bare(model).named_buffers())
        super().restore_model(model, {**saved, **{n: t.clone() for n, t in own.items()}})


class BuffersOfAnyRank(PlainCheckpoint):
    def of_model(self, model: nn.Module, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        found = super().of_model(model, everyone)
        for number, name in enumerate(everyone[0]["buffers"]):
            found[name] = everyone[number % len(everyone)]["buffers"][name]
        return found


class OnlyFirstRankLoads(PlainCheckpoint):
    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        if rank() == 0:
            super().restore_model(model, saved)


class NewParameters(PlainCheckpoint):
    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        bare(model).load_state_dict(saved, assign=True)


class CachesReads(PlainCheckpoint):
    def __init__(self) -> None:
        self.known: dict[Path, dict[str, Any]] = {}

    def read(self, path: Path) -> dict[str, Any]:
        if path not in self.known:
            self.known[path] = super().read(path)
        return self.known[path]


class WritesLater(PlainCheckpoint):
    def __init__(self) -> None:
        self.waiting: list[tuple[Path, int, dict[str, Any]]] = []

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        self.waiting.append((root, step, state))

    def load(self, directory, *, model, optimizer, loader=None) -> int:
        while self.waiting:
            super().put(*self.waiting.pop())
        return super().load(directory, model=model, optimizer=optimizer, loader=loader)


class StepsColdOptimizer(PlainCheckpoint):
    def of_optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        if not optimizer.state:
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return super().of_optimizer(model, optimizer)


class WrappersNames(PlainCheckpoint):
    def of_model(self, model: nn.Module, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        return model.state_dict()

    def check(self, module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        pass

    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        model.load_state_dict(saved)


class OptimizerByPosition(PlainCheckpoint):
    def of_optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return optimizer.state_dict()

    def restore_optimizer(self, model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
        optimizer.load_state_dict(saved)


class FilePerRank(PlainCheckpoint):
    def root(self, directory: Any) -> Path:
        return super().root(directory) / f"rank-{rank()}"

    def save(self, directory, *, step, model, optimizer, loader=None) -> None:
        everyone = self.gather(self.of_rank(model, loader))
        state = {
            "step": step,
            "model": self.of_model(model, everyone),
            "optimizer": self.of_optimizer(model, optimizer),
            "ranks": everyone,
        }
        self.put(self.root(directory), step, state)

    def load(self, directory, *, model, optimizer, loader=None) -> int:
        self.share = lambda value: self.newest(self.root(directory))  # type: ignore[method-assign]  # every rank its own
        return super().load(directory, model=model, optimizer=optimizer, loader=loader)


IMPOSTORS = (
    card(
        StepBeforeCounting,
        "step-before-counting",
        "Stores the step as it was before it was counted.",
        "a course's trainer: one more update than asked for after each restart",
        "Off by one, and only after a restart.",
        "content.step",
        "resume.equals-uninterrupted",
    ),
    card(
        ForgetsGenerators,
        "no-random-state",
        "Does not bring back torch's generator.",
        "nanoGPT, picotron and most trainers that save a state dict",
        "Models without dropout resume exactly.",
        "content.random-state",
        "resume.equals-uninterrupted",
    ),
    card(
        FirstRanksGenerators,
        "first-ranks-random-state",
        "Gives the first rank's generators and loader to all ranks.",
        "torchtitan issue 291: one key, many ranks, one survivor",
        "On one rank it is right.",
        "content.random-state",
        "resume.wrapped",
    ),
    card(
        ForgetsLoader,
        "no-loader",
        "Starts the data anew after each restart.",
        "nanoGPT issue 467",
        "The loss is even better than before.",
        "content.loader",
        "resume.equals-uninterrupted",
    ),
    card(
        ForgetsMoments,
        "no-moments",
        "Saves options of the optimizer, not its state.",
        "KempnerForge pull request 115",
        "A bump in the loss that looks like noise.",
        "content.optimizer",
        "resume.equals-uninterrupted",
    ),
    card(
        FirstRanksMoments,
        "first-ranks-moments",
        "Saves the state that the first rank has of a sharded optimizer.",
        "`if rank == 0: torch.save(optimizer.state)`, from before the optimizer was sharded",
        "It saves, it loads, and a part of the moments is warm.",
        "sharded-optimizer.any-world-size",
    ),
    card(
        ForgetsOptions,
        "no-options",
        "Saves state of the optimizer, not its options: the learning rate starts anew.",
        "Megatron issue 7468: weight decay of the launch for a step after loading",
        "Schedules that are computed from the step hide it.",
        "content.optimizer",
    ),
    card(
        ForgetsBuffers,
        "no-buffers",
        "Leaves buffers as they were built.",
        "checkpoints made of named_parameters()",
        "Transformers have none that matter.",
        "content.model",
    ),
    card(
        BuffersOfAnyRank,
        "buffers-of-any-rank",
        "Saves each buffer from another rank.",
        "torch.distributed.checkpoint balances who writes which name of a replicated state",
        "The statistics of each rank look plausible.",
        "resume.buffers-of-first-rank",
    ),
    card(
        OnlyFirstRankLoads,
        "first-rank-loads",
        "Fills the model on the first rank alone.",
        "`if rank == 0: load()` after wrapping, when nothing is broadcast any more",
        "The first rank's log is right.",
        "content.model",
    ),
    card(
        NewParameters,
        "new-parameters",
        "Puts new Parameter objects into the model.",
        "load_state_dict(assign=True) with an optimizer that was built before",
        "The loaded values are right; they only never change again.",
        "content.reaches-live-objects",
    ),
    card(
        CachesReads,
        "shared-cache",
        "Hands out the same tensors at each load.",
        "a cache of what was read, with optimizers that keep what they are given",
        "Needs two runs in one process.",
        "content.shares-no-memory",
    ),
    card(
        WritesLater,
        "written-later",
        "Writes from the live tensors some time after save has returned.",
        "asynchronous saves without a copy; the step tensors of an offloaded state dict",
        "Each tensor is whole, only from different steps.",
        "content.model",
        "world-size.any",
    ),
    card(
        StepsColdOptimizer,
        "steps-cold-optimizer",
        "Steps an optimizer without state to find out what its state is.",
        "torch issue 164929, get_optimizer_state_dict",
        "No weight moves; the first real update is corrected like the second.",
        "save.changes-nothing",
    ),
    card(
        WrappersNames,
        "wrappers-names",
        "Saves the wrapper's state dict, `module.` prefix included.",
        "the course's distributed trainer; half of all forum threads on loading",
        "It loads where it was saved.",
        "names.across-torch-wrapper",
        "names.across-own-wrappers",
    ),
    card(
        OptimizerByPosition,
        "optimizer-by-position",
        "Keys optimizer state by the number of the parameter.",
        "torch.optim's own state_dict",
        "The same script in the same order loads it.",
        "names.optimizer-by-parameter",
    ),
    card(
        FilePerRank,
        "file-per-rank",
        "Each rank saves and loads a file of its own.",
        "the first version of every sharded checkpoint",
        "It is right as long as the world stays the same.",
        "world-size.any",
    ),
)
