"""Rank bodies that the tests of the rig share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.rig.ranks.rank import Context


def empty(ctx: Context) -> None:
    """Nothing: measures the round trip."""


def who(ctx: Context, word: str = "") -> tuple[int, int, str]:
    """Rank, world size, and an argument back."""
    return ctx.rank, ctx.world_size, word


def pid(ctx: Context) -> int:
    """The process of the rank."""
    return os.getpid()


def call_ddp(ctx: Context, argument: object = 0) -> object:
    """What the implementation's `ddp` returns."""
    return ctx.impl.ddp(argument)


def total(ctx: Context, values: Any) -> torch.Tensor:
    """All-reduce of a tensor."""
    tensor = torch.as_tensor(values, dtype=torch.float64) * (ctx.rank + 1)
    dist.all_reduce(tensor)
    return tensor


def unpicklable(ctx: Context) -> object:
    """What cannot travel."""
    return threading.Lock()


def work(seconds: float) -> None:
    """Compute for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class _Lingering:
    """In a cycle, so that it goes when garbage is collected, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self.me, self.seconds = self, seconds

    def __del__(self) -> None:
        time.sleep(self.seconds)


def fail(ctx: Context, how: str, culprit: int, seconds: float = 0.0) -> float:
    """Rank `culprit` fails in the way called `how`; the others wait for it in an all-reduce.

    What it has made is `seconds` long in going.
    """
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if ctx.rank == culprit:
        if how == "raise":
            _Lingering(seconds)
            raise KeyError("planted")
        if how == "exit":
            sys.exit(3)
        if how == "os-exit":
            os._exit(3)
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(3600)
        if how == "mismatch":
            tensor = torch.ones(7)
        if how == "leave":
            return 0.0
    dist.all_reduce(tensor)
    dist.barrier()
    return float(tensor.sum())
