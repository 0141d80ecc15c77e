"""Near-misses that hide: in another group, thread or dtype, or on a rank of their own."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class NeighboursOnly(PlainDdp):
    """Takes for a group's first rank the multiple of its size below."""

    def first_rank(self) -> int:
        return dist.get_rank() // self.size() * self.size()

    def take_first(self, tensors: Sequence[torch.Tensor]) -> None:
        group, self.group = self.group, None
        for source in range(0, dist.get_world_size(), dist.get_world_size(group)):
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, src=source)
                if (
                    dist.get_rank() // dist.get_world_size(group) * dist.get_world_size(group)
                    == source
                ):
                    with torch.no_grad():
                        tensor.copy_(whole)
        self.group = group


class FlagsOverWorld(PlainDdp):
    """Asks the whole world which parameters are used."""

    def used_anywhere(self) -> list[bool]:
        group, self.group = self.group, None
        used = super().used_anywhere()
        self.group = group
        return used


class SendsFromAThread(PlainDdp):
    """Reduces under no_sync as well, in another thread, and throws the result away."""

    def on_gradient(self, index: int) -> None:
        super().on_gradient(index)
        if not self.is_synchronised:
            unseen = torch.zeros(1)
            thread = threading.Thread(
                target=dist.all_reduce, args=(unseen,), kwargs={"group": self.group}
            )
            thread.start()
            thread.join()


class WaitsForHooks(PlainDdp):
    """Takes part only where one of its hooks has fired."""

    def finish(self) -> None:
        if self.ready:
            super().finish()


class HidesItsModule(PlainDdp):
    """Keeps the module out of its submodules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            self.__dict__["module"] = value
        else:
            super().__setattr__(name, value)


class WidensDtypes(PlainDdp):
    """Sends everything as float64."""

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return super().scale(flat.double())


class OneDtypeABucket(PlainDdp):
    """A bucket holds whatever comes, in the dtype of its first parameter."""

    def plan(self) -> list[list[int]]:
        buckets: list[list[int]] = []
        filled = math.inf
        for index in reversed(range(len(self.trainable))):
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0.0
            buckets[-1].append(index)
            filled += self.trainable[index].numel() * self.trainable[index].element_size()
        return buckets

    def flatten(self, bucket: list[int]) -> torch.Tensor:
        dtype = self.trainable[bucket[0]].dtype
        return torch.cat([self.local(index).reshape(-1).to(dtype) for index in bucket])


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


IMPOSTORS = (
    _card(
        NeighboursOnly,
        "neighbours-only",
        "Takes the multiple of the group's size for its first rank.",
        "`rank // size * size`, right for meshes whose groups are neighbours.",
        "Tests split four ranks into (0, 1) and (2, 3).",
        "ddp.group.starts-from-its-first-rank",
    ),
    _card(
        FlagsOverWorld,
        "flags-over-world",
        "Asks the whole world, not the group, which parameters are used.",
        "One collective without `group=` among many that have it.",
        "All groups use the same parameters.",
        "ddp.group.keeps-to-itself",
    ),
    _card(
        SendsFromAThread,
        "sends-from-a-thread",
        "Sends under no_sync, from another thread.",
        "Background reducers that poll for gradients.",
        "Recorders are local to a thread.",
        "ddp.no-sync.sends-nothing",
    ),
    _card(
        HidesItsModule,
        "hides-its-module",
        "Is no parent of the module: `parameters()` is empty, `eval()` stops at it.",
        "A wrapper that keeps the module in a list or in `__dict__`.",
        "Tests build the optimizer over the bare module.",
        "ddp.construction.is-a-module",
    ),
    _card(
        WidensDtypes,
        "widens-dtypes",
        "Sends every gradient as float64.",
        "`torch.cat` over mixed dtypes promotes.",
        "The values are right; float32 travels at twice its size.",
        "ddp.traffic.one-copy-per-step",
    ),
    _card(
        OneDtypeABucket,
        "one-dtype-a-bucket",
        "Reduces a bucket in the dtype of its first parameter.",
        "`torch.zeros(size, dtype=bucket[0].dtype)`, filled parameter by parameter.",
        "All parameters of a test have one dtype, or the widest one comes first.",
        "ddp.gradients.dtype-and-layout",
        "ddp.buckets.size-invariance",
    ),
    _card(
        WaitsForHooks,
        "waits-for-hooks",
        "Joins no reduction on a rank whose loss touches no parameter.",
        "DistributedDataParallel itself: no hook fires, so the rank has nothing to finish.",
        "Every batch has something to learn from.",
        "ddp.gradients.unused-on-a-whole-rank",
        outcomes=("hang", "failed", "died"),
    ),
)
