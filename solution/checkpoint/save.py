"""Saving: capture on every rank, write a part each, complete on rank 0.

Everything that does not go into the library's tensor files is plain: options of the optimizer, and
per rank the loader's state and the generators. It is encoded while it is captured, so nothing that
happens later can leak into it. Tensors are written from where they live, which is why
`save_checkpoint` returns only when they are on disk.

Buffers come from rank 0 alone: running statistics differ between replicas, and a wrapper takes the
first rank's before each forward. Parameters are equal everywhere, so the ranks share the writing.
The state of a sharded optimizer is written by those who have it, under the plain optimizer's names.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from solution import comm
from solution.checkpoint import folder, storage
from solution.checkpoint.folder import CheckpointError, together
from solution.checkpoint.named import ModelTensors, OptimizerTensors, joined
from solution.data.shards import write_atomically

PLAIN = "state.pt"


class Stateful(Protocol):
    """A loader, or whatever else says and takes its state."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from a state."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Stateful | None = None,
    keep: int | None = None,
    process_group: comm.Group = None,
) -> Path:
    """Save a complete checkpoint of `step` below `directory`, or nothing. All ranks call it.

    Args:
        directory: of all checkpoints of a run, on a disk that all ranks share; made if need be.
        step: number of finished optimizer steps.
        model, optimizer: plain or wrapped, and over parameters of the model.
        loader: its `state_dict()` is saved, per rank.
        keep: how many steps to keep, this one included; None keeps all.

    Returns:
        The new folder.

    Raises:
        CheckpointError: on all ranks, when it failed on any; what was saved before is still there.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"expected keep to be None or an integer >= 1, got {keep!r}")
    root, group = Path(directory).absolute(), process_group
    tensors, plain = _captured(step, model, optimizer, loader, group)
    where = f"{root}, step {step}"
    making = f"make a folder for {where}"
    temporary = together(making, lambda: folder.begin(root, step), group, by_first=True)
    try:
        together(
            f"write its part of {where} (is the disk full, is it shared by all ranks?)",
            lambda: storage.write_tensors(tensors, temporary, group),
            group,
        )
        facts = {"step": step, "world_size": comm.size(group)}
        completing = f"complete {where}"
        final = together(
            completing, lambda: _complete(temporary, plain, facts), group, by_first=True
        )
    except CheckpointError:
        if comm.rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if comm.rank(group) == 0:
        folder.retain(root, final, keep)
    return final


def _captured(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Stateful | None,
    group: comm.Group,
) -> tuple[dict[str, Any], bytes]:
    """Return this rank's live tensors, nested by name, and on the first rank everything else.

    Everything else is of all ranks, and encoded.

    Raises:
        CheckpointError: on all ranks, when it failed on any, or they are at different steps.
    """
    is_first = comm.rank(group) == 0

    def capture() -> tuple[dict[str, Any], dict[str, Any], bytes]:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"expected step to be an integer >= 0, got {step!r}")
        named = ModelTensors.of(model)
        states, options = OptimizerTensors.of(optimizer, named).capture()
        weights = {
            name: tensor
            for name, tensor in named.tensors.items()
            if is_first or name not in named.buffers or isinstance(tensor, DTensor)
        }
        common = {"optimizer": options, "objects": named.objects}
        # Encoded here: what cannot be saved is an error before anything is written.
        storage.encode(common)
        state = None if loader is None else loader.state_dict()
        own = storage.encode({"random": random_state(), "loader": state})
        return with_tensors({"model": weights, "optimizer": {"state": states}}), common, own

    tensors, common, own = together(f"capture its state at step {step}", capture, group)
    gathered = comm.gather_objects((step, own, common["optimizer"]), group)
    steps = [each for each, _, _ in gathered]
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"rank {comm.rank(group)}: expected all ranks to save the same step, got {steps} "
            "in order of rank; save after a step that all have finished"
        )
    ranks = [each for _, each, _ in gathered]
    common["optimizer"] = joined([each for _, _, each in gathered])
    return tensors, storage.encode({"step": step, "ranks": ranks, **common}) if is_first else b""


def _complete(temporary: Path, plain: bytes, facts: dict[str, Any]) -> Path:
    """Add what is no tensor, and make the folder a checkpoint; returns where it lies."""
    write_atomically(temporary / PLAIN, plain)
    entries = (storage.read_metadata(temporary).storage_data or {}).values()
    missing = {e.relative_path for e in entries if not (temporary / e.relative_path).is_file()}
    if missing:
        raise FileNotFoundError(
            f"expected the files of all ranks in {temporary}, got none of {sorted(missing)}; "
            "save to a disk that all machines share"
        )
    return folder.finish(temporary, facts)


def with_tensors(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that hold a tensor: an empty dict is an object to the library."""
    return {name: part for name, part in parts.items() if tree_leaves(part)}


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators (CPU and this rank's GPU), NumPy's and Python's.

    They decide dropout, shuffling and initialisation. Nothing is drawn. As tensors and plain
    numbers, which a load that runs no code accepts.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys, np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
    }
    # Not `is_available`: asking for the state of an unused device would start it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every generator as `random_state` found it."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
