"""Checkpoints of a distributed run: one file per step, complete or absent.

Problem: a job may die at any moment, also while it saves, and may resume with other ranks.

Idea: gather everything to the first rank; write under another name, flush, rename. A rename is
atomic, so each file with the final name is whole.

Steps
    1. Save: gather each rank's state of random generators, loader and buffers, and the moments by
       parameter name (a sharded optimizer has them on their owner alone).
    2. The first rank writes; all ranks learn whether it could, and raise together.
    3. Load: the first rank picks the highest step; all read it, check names and shapes before any
       change, restore, the loader first: it may refuse. Generators are restored if the number of
       ranks is the same.

Use
    save_checkpoint("run", step=3, model=model, optimizer=optimizer)
    step = load_checkpoint("run", model=model, optimizer=optimizer)     # 3, on every rank

Cost: the whole state passes through the first rank, pickled, and is written once.

Source: torch.save's documentation; `man 2 rename` and `man 2 fsync`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# ---------------------------------------------------------------------------------------- save


def save_checkpoint(
    directory: Any, *, step: int, model: nn.Module, optimizer: Any, loader: Any = None
) -> None:
    """Write the state of all ranks into the directory; all ranks raise if that fails."""
    root = Path(directory).absolute()
    everyone = gather(state_of_rank(model, loader))
    moments = joined(gather(state_of_optimizer(model, optimizer)))
    error = None
    if rank() == 0:
        state = {
            "step": step,
            "model": {**bare(model).state_dict(), **everyone[0]["buffers"]},
            "optimizer": moments,
            "ranks": everyone,
        }
        try:
            write(root, step, state)
        except (OSError, RuntimeError) as caught:  # torch's file writer raises the latter
            error = f"{type(caught).__name__}: {caught}"
    error = of_first_rank(error)
    if error is not None:
        raise RuntimeError(f"the first rank could not write the checkpoint: {error}")


def state_of_rank(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Return what differs between ranks."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
        "loader": None if loader is None else loader.state_dict(),
        "buffers": dict(bare(model).named_buffers()),
    }


def state_of_optimizer(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the options and the state of each parameter by its name."""
    names = {id(p): name for name, p in bare(model).named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            entries = dict(optimizer.state.get(parameter, {}))
            found[names[id(parameter)]] = {"options": options, "state": entries}
    return found


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Where ranks keep the state of other parameters, take each from the one that has it."""
    return {
        name: next((part[name] for part in parts if part[name]["state"]), entry)
        for name, entry in parts[0].items()
    }


def write(root: Path, step: int, state: dict[str, Any]) -> None:
    """Write one file that has its name once it is whole, and on the disk."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / ".saving"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / f"step-{step}.pt")


# ---------------------------------------------------------------------------------------- load


def load_checkpoint(directory: Any, *, model: nn.Module, optimizer: Any, loader: Any = None) -> int:
    """Restore the save of the highest step, and return that step."""
    path = of_first_rank(newest(Path(directory).absolute()) if rank() == 0 else None)
    if path is None:
        raise RuntimeError(f"expected a checkpoint in {directory}, found none")
    state = torch.load(path, weights_only=True)
    require_fit(bare(model), state["model"])
    restore_rank(state["ranks"], loader)
    restore_optimizer(model, optimizer, state["optimizer"])
    restore_model(bare(model), state["model"])
    loaded: int = state["step"]
    return loaded


def newest(root: Path) -> Path | None:
    """Return the file of the highest step."""
    found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]
    return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)


def require_fit(module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Raise if the model has other names or shapes than what was saved."""
    own = {**module.state_dict(), **dict(module.named_buffers())}
    wrong = {n for n in own.keys() & saved.keys() if own[n].shape != saved[n].shape}
    wrong |= own.keys() ^ saved.keys()
    if wrong:
        raise ValueError(f"the checkpoint does not fit the model: {sorted(wrong)}")


def restore_model(module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy parameters and buffers, also the buffers that are in no state dict."""
    module.load_state_dict({name: saved[name] for name in module.state_dict()})
    for name, buffer in module.named_buffers():
        buffer.copy_(saved[name])


def restore_optimizer(model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    """Put the options and the state of each parameter in the place of the optimizer's own."""
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


def restore_rank(everyone: list[dict[str, Any]], loader: Any) -> None:
    """Restore this rank's loader and generators; of another number of ranks the loader alone."""
    is_same_size = len(everyone) == size()
    own = everyone[rank() if is_same_size else 0]
    if loader is not None:
        loader.load_state_dict(own["loader"])
    if is_same_size:
        torch.set_rng_state(own["torch"])
        np.random.set_state(tuple(own["numpy"]))
        random.setstate(own["python"])


# --------------------------------------------------------------------------------------- ranks


def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank has, in order of rank."""
    everyone: list[Any] = [own] * size()
    if size() > 1:
        dist.all_gather_object(everyone, own)
    return everyone


def of_first_rank(value: Any) -> Any:
    """Return what the first rank has."""
    parcel = [value]
    if size() > 1:
        dist.broadcast_object_list(parcel, src=0)
    return parcel[0]


def rank() -> int:
    """Return this rank; 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks; 1 where nothing is distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside a data-parallel wrapper."""
    return model.module if hasattr(model, "no_sync") else model  # type: ignore[return-value]  # a wrapper's child


class PlainCheckpoint:
    """What this file offers."""

    @staticmethod
    def functions() -> dict[str, Any]:
        """Return the contract's functions."""
        return {"save_checkpoint": save_checkpoint, "load_checkpoint": load_checkpoint}
