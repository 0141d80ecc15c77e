"""A trainer: module, optimizer and loss go in, `step` takes the micro-batches of one update.

Problem: wrapper, accumulation, clipping, optimizer and checkpoint each work alone; called in the
wrong order they train something else without an error.

Idea: one object owns them all and calls them in the one right order.

Steps, for each update
    1. Clear the gradients, whatever left them there.
    2. Forward and backward of each micro-batch, its loss divided by their number; all but the last
       without synchronisation.
    3. Finish the reduction, clip once by the global norm, step.

Use
    trainer = PlainTrainer("zero1", module, make_optimizer, loss=loss, accumulation=2)
    trainer.step([first, second])           # one update; returns the mean loss
    trainer.save("run")

Cost: that of the wrapper and the optimizer inside.

Source: Li et al. 2020, section 3.2.4 on accumulation. Three strategies: replicas (`PlainDdp`),
replicas with a divided optimizer state (`PlainZero1`), divided parameters (`PlainFsdp`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from spec_tests.plain.clip import clip_grad_norm_
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.fully_shard import PlainFsdp
from spec_tests.plain.zero1 import PlainZero1


class PlainTrainer:
    """One model, its optimizer and the order of a step; `strategy` says what is divided."""

    def __init__(
        self, strategy: str, module: nn.Module, make_optimizer: Any, *, loss: Any,
        accumulation: int = 1, max_norm: float | None = None, dtype: Any = torch.float32,
        process_group: Any = None,
    ) -> None:  # fmt: skip
        self.strategy, self.module, self.loss = strategy, module, loss
        self.accumulation, self.max_norm, self.dtype = accumulation, max_norm, dtype
        self.group = process_group
        self.declares = {"start": "own"} if strategy == "fsdp" else {}
        self.model: Any
        if strategy == "fsdp":
            group: Any = dist.group.WORLD if process_group is None else process_group
            mesh = DeviceMesh.from_group(group, "cpu")
            self.model = PlainFsdp.functions()["fully_shard"](module, mesh=mesh)
        else:
            self.model = PlainDdp(module, process_group, 0.0)
        self.trainable = trainable(module)
        self.optimizer = self.build(make_optimizer)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def build(self, make: Any) -> Any:
        named = list(self.module.named_parameters())
        if self.strategy == "zero1":
            return PlainZero1(make.groups(named), make.cls, self.group, make.options)
        return make(named)

    # ---------------------------------------------------------------------------------- a step

    def step(self, micro_batches: Sequence[Any]) -> Any:
        if len(micro_batches) != self.accumulation:
            raise ValueError(
                f"expected {self.accumulation} micro-batches, got {len(micro_batches)}"
            )
        if self.strategy != "fsdp" and trainable(self.module) != self.trainable:
            raise ValueError("parameters were frozen or thawed: build a new trainer")
        self.optimizer.zero_grad()
        for parameter in self.module.parameters():  # also what the optimizer does not hold
            parameter.grad = None
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            with self.window(is_last=index == len(micro_batches) - 1):
                loss = self.forward(micro_batch)
                losses.append(loss.detach())
                (loss / len(micro_batches)).backward()
        if self.strategy != "fsdp":
            self.model.finish()
        if self.max_norm is not None:
            clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        return torch.stack(losses).mean()

    def window(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(is_last)
            return contextlib.nullcontext()
        found: AbstractContextManager[Any] = self.model.no_sync()
        return contextlib.nullcontext() if is_last else found

    def forward(self, batch: Any) -> torch.Tensor:
        is_narrow = self.dtype != torch.float32
        with torch.autocast("cpu", dtype=self.dtype) if is_narrow else contextlib.nullcontext():
            found: torch.Tensor = self.loss(self.model, batch)
        return found

    # ----------------------------------------------------------------------------- in between

    def evaluate(self, batch: Any) -> Any:
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return self.forward(batch)
        finally:
            for part, is_training in modes:
                part.training = is_training

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: whole(p.detach()).clone() for name, p in self.module.named_parameters()}

    def set_lr(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate

    # ----------------------------------------------------------------------------- checkpoints

    def save(self, directory: Any) -> None:
        saved = {"weights": self.full_parameters(), "optimizer": self.full_state()}
        if dist.get_rank(self.group) == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            torch.save(saved, Path(directory) / "trainer.pt")
        dist.barrier(group=self.group)

    def load(self, directory: Any) -> None:
        saved = torch.load(Path(directory) / "trainer.pt", weights_only=True)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(like(parameter, saved["weights"][name]))
        self.load_state(saved["optimizer"])

    def full_state(self) -> Any:
        if self.strategy == "zero1":
            return self.optimizer.full_state()
        state = self.optimizer.state_dict()
        return {**state, "state": each(state["state"], lambda _, tensor: whole(tensor))}

    def load_state(self, state: Any) -> None:
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.strategy == "fsdp":
            state = {**state, "state": each(state["state"], lambda n, t: like(ordered[n], t))}
        self.optimizer.load_state_dict(state)

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class of trainers."""
        strategies = {"": "ddp", "zero1_": "zero1", "fsdp_": "fsdp"}
        return {
            f"build_{word}trainer": functools.partial(cls, strategy)
            for word, strategy in strategies.items()
        }


def trainable(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a shard; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return `full` divided as the parameter is; what has another shape stays whole."""
    if not isinstance(parameter, DTensor) or full.shape != parameter.shape:
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def each(state: dict[int, Any], change: Any) -> dict[int, Any]:
    """Return the state of an optimizer with every tensor changed."""
    return {
        number: {
            key: change(number, value) if isinstance(value, torch.Tensor) else value
            for key, value in entry.items()
        }
        for number, entry in state.items()
    }
