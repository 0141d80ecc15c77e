"""clip_grad_norm_ of order infinity raises on a rank with an empty shard; its peers hang.

Expected: the largest element, 3, on both ranks
Got: an error on rank 1, rank 0 waits forever
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.empty-shards
Case: *-inf
Known: https://github.com/pytorch/pytorch/pull/173238
"""

import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
SECONDS = 8
EXPECTED = ["norm 3.0"] * RANKS


def step(rank: int) -> str:
    """Return the largest element of a gradient of one row, which only the first rank has."""
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.full((1,), 3.0), mesh, [Shard(0)])
    norm = nn.utils.clip_grad_norm_([weight], 100.0, float("inf"))
    return f"norm {float(norm.full_tensor())}"


def on_rank(rank: int, folder: str) -> None:
    """Join the process group, take the step, and write how it ended to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    Path(folder, f"begun-{rank}").touch()
    try:
        end = step(rank)
    except Exception as error:
        end = f"raised {error!s:.90}"
    Path(folder, f"new-{rank}").write_text(end)
    Path(folder, f"new-{rank}").rename(Path(folder, f"end-{rank}"))
    time.sleep(SECONDS)  # a rank that exits would be an error for those that wait for it


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(on_rank, (folder,), nprocs=RANKS, join=False).processes
        files = [Path(folder, f"end-{rank}") for rank in range(RANKS)]
        deadline, begun = time.monotonic() + 60, 0
        while time.monotonic() < deadline and all(rank.is_alive() for rank in ranks):
            time.sleep(0.1)
            begun = len([*Path(folder).glob("begun-*")])
            if begun == RANKS:
                deadline = min(deadline, time.monotonic() + SECONDS)
            if all(file.exists() for file in files):
                break
        got = [f"died with {rank.exitcode}" if rank.exitcode else "still waits" for rank in ranks]
        got = [f.read_text() if f.exists() else end for f, end in zip(files, got, strict=True)]
        for rank in ranks:
            rank.kill()
    print(f"expected: {EXPECTED}\ngot:      {got}")
    return int(got != EXPECTED) if begun == RANKS else 2


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
