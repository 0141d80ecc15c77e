"""Checkpoints of a distributed run: one file per step, complete or absent.

Problem: a job may die at any moment, also while it saves, and may resume with other ranks.

Idea: gather everything to the first rank; write under another name, flush, rename. A rename is
atomic, so each file with the final name is whole.

Steps
    1. `save`: gather each rank's state of random generators, loader and buffers, and the moments by
       parameter name (a sharded optimizer has them on their owner alone).
    2. The first rank writes; all ranks learn whether it could, and raise together.
    3. `load`: the first rank picks the highest step; all read it, check names and shapes before any
       change, restore. Generators are restored if the number of ranks is the same.

Use
    keeper = PlainCheckpoint()
    keeper.save("run", step=3, model=model, optimizer=optimizer)
    step = keeper.load("run", model=model, optimizer=optimizer)     # 3, on every rank

Cost: the whole state passes through the first rank, pickled, and is written once.

Source: torch.save's documentation; `man 2 rename` and `man 2 fsync`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class PlainCheckpoint:
    """Saves and loads; see the contract for what it promises."""

    # ------------------------------------------------------------------------------------ save

    def save(self, directory, *, step, model, optimizer, loader=None) -> None:
        root = self.root(directory)
        everyone = self.gather(self.of_rank(model, loader))
        moments = self.joined(self.gather(self.of_optimizer(model, optimizer)))
        error = None
        if rank() == 0:
            state = {
                "step": self.step_to_store(step),
                "model": self.of_model(model, everyone),
                "optimizer": moments,
                "ranks": everyone,
            }
            error = self.attempt(lambda: self.put(root, step, state))
        self.tell(error)

    def root(self, directory: Any) -> Path:
        return Path(directory).absolute()

    def step_to_store(self, step: int) -> int:
        return step

    def of_rank(self, model: nn.Module, loader: Any) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "numpy": [kind, np.asarray(keys).tolist(), *rest],
            "python": random.getstate(),
            "loader": None if loader is None else loader.state_dict(),
            "buffers": dict(bare(model).named_buffers()),
        }

    def of_model(self, model: nn.Module, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        return {**bare(model).state_dict(), **everyone[0]["buffers"]}

    def of_optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        names = {id(p): name for name, p in bare(model).named_parameters()}
        found = {}
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                entries = dict(optimizer.state.get(parameter, {}))
                found[names[id(parameter)]] = {"options": options, "state": entries}
        return found

    def joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Where ranks keep the state of other parameters, each from the one that has it."""
        return {
            name: next((part[name] for part in parts if part[name]["state"]), entry)
            for name, entry in parts[0].items()
        }

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        everyone: list[Any] = [own] * size()
        if size() > 1:
            dist.all_gather_object(everyone, own)
        return everyone

    def attempt(self, work: Callable[[], None]) -> str | None:
        try:
            work()
        except (OSError, RuntimeError) as error:  # torch's file writer raises the latter
            return f"{type(error).__name__}: {error}"
        return None

    def tell(self, error: str | None) -> None:
        error = self.share(error)
        if error is not None:
            raise RuntimeError(f"the first rank could not write the checkpoint: {error}")

    def share(self, value: Any) -> Any:
        parcel = [value]
        if size() > 1:
            dist.broadcast_object_list(parcel, src=0)
        return parcel[0]

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        temporary = self.temporary(root)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(root / f"step-{step}.pt")

    def temporary(self, root: Path) -> Path:
        return root / ".saving"

    # ------------------------------------------------------------------------------------ load

    def load(self, directory, *, model, optimizer, loader=None) -> int:
        path = self.share(self.newest(self.root(directory)) if rank() == 0 else None)
        if path is None:
            return self.none(directory)
        state = self.read(path)
        self.check(bare(model), state["model"])
        self.restore_model(model, state["model"])
        self.restore_optimizer(model, optimizer, state["optimizer"])
        self.restore_rank(state["ranks"], loader)
        return state["step"]

    def newest(self, root: Path) -> Path | None:
        found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]
        return max(found, key=self.order, default=None)

    def order(self, path: Path) -> Any:
        return int(path.stem.partition("-")[2])

    def none(self, directory: Any) -> int:
        raise RuntimeError(f"expected a checkpoint in {directory}, found none")

    def read(self, path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True)

    def check(self, module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        own = values(module)
        wrong = {n for n in own.keys() & saved.keys() if own[n].shape != saved[n].shape}
        wrong |= own.keys() ^ saved.keys()
        if wrong:
            raise ValueError(f"the checkpoint does not fit the model: {sorted(wrong)}")

    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        module = bare(model)
        module.load_state_dict({name: saved[name] for name in module.state_dict()})
        for name, buffer in module.named_buffers():
            buffer.copy_(saved[name])

    def restore_optimizer(self, model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
        names = {id(p): name for name, p in bare(model).named_parameters()}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = saved[names[id(parameter)]]
                group.update(own["options"])
                if own["state"]:
                    optimizer.state[parameter] = dict(own["state"])
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            # A sharded optimizer: of what it loads it keeps the part that it owns.
            optimizer.load_state_dict(torch.optim.Optimizer.state_dict(optimizer))

    def restore_rank(self, everyone: list[dict[str, Any]], loader: Any) -> None:
        own = everyone[self.whose(everyone)]
        if loader is not None:
            loader.load_state_dict(own["loader"])
        if len(everyone) == size():
            torch.set_rng_state(own["torch"])
            np.random.set_state(tuple(own["numpy"]))
            random.setstate(own["python"])

    def whose(self, everyone: list[dict[str, Any]]) -> int:
        return rank() if len(everyone) == size() else 0

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class."""
        made = cls()
        return {"save_checkpoint": made.save, "load_checkpoint": made.load}


def bare(model: nn.Module) -> nn.Module:
    """The model inside a data-parallel wrapper."""
    return model.module if hasattr(model, "no_sync") else model  # type: ignore[return-value]  # a wrapper's child


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, also the buffers that are in no state dict."""
    return {**module.state_dict(), **dict(module.named_buffers())}


def rank() -> int:
    """This rank; 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Number of ranks; 1 where nothing is distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1
