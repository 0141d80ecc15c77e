"""This process's place in a run: torchrun's environment, the default group, the device.

Rank, size and device come from the environment here, and nowhere else in the library.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from solution import comm


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the run."""

    rank: int  # 0 .. size - 1, over all machines
    size: int
    device: torch.device  # where this rank's model and batches live
    backend: str  # "nccl" or "gloo"

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that logs and writes for all."""
        return self.rank == 0


@contextmanager
def distributed(*, device: str | None = None) -> Iterator[World]:
    """Join the run that torchrun's environment describes, and leave it however the body ends.

    With one GPU per local rank the backend is nccl, otherwise gloo (with CUDA tensors where ranks
    share a GPU). Started by plain `python`, it is a run of one rank.

    Args:
        device: "cpu" or "cuda"; None takes CUDA when there is any.

    Raises:
        ValueError: RANK without WORLD_SIZE or the reverse, values that make no sense, or a device
            that is not there.
    """
    if comm.is_initialized():
        raise RuntimeError(
            "distributed() expected no process group yet; this process has one already"
        )
    world = _world_from_environment(device)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    # One rank started by hand has no rendezvous to go to: its store lives in this process.
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(minutes=10),  # after which a collective without its peers is an error
        device_id=world.device if world.backend == "nccl" else None,
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE as torchrun sets them; 0 and 1 without either.

    Raises:
        ValueError: one without the other, or values that make no sense.
    """
    values = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 1:
        raise ValueError(
            f"expected RANK and WORLD_SIZE both set or neither, got {values}; start with torchrun, "
            f"or set {missing[0]}"
        )
    rank, size = _environment_int("RANK", 0), _environment_int("WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ValueError(f"expected 0 <= RANK < WORLD_SIZE, got RANK={rank}, WORLD_SIZE={size}")
    return rank, size


def _world_from_environment(device: str | None) -> World:
    rank_, size_ = rank_and_size()
    local_rank = _environment_int("LOCAL_RANK", rank_)
    local_size = _environment_int("LOCAL_WORLD_SIZE", size_)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'expected device "cpu", "cuda" or None, got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('got device="cuda" but no CUDA device is visible; use device="cpu"')
    if device == "cpu" or not torch.cuda.is_available():
        return World(rank_, size_, torch.device("cpu"), "gloo")
    num_devices = torch.cuda.device_count()
    # nccl refuses two ranks on one GPU; gloo carries CUDA tensors through host memory.
    backend = "nccl" if local_size <= num_devices and dist.is_nccl_available() else "gloo"
    return World(rank_, size_, torch.device("cuda", local_rank % num_devices), backend)


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an integer in {name}, got {text!r}") from None
