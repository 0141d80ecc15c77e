"""Where one rank's module has another shape, FSDP2 does not notice, and gloo aborts.

Expected: an error on both ranks by the end of the first step
Got: a process is ended by SIGABRT
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.refusals.unequal-ranks
Case: *-shape
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
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
from torch.distributed.fsdp import fully_shard

RANKS = 2
SECONDS = 8
EXPECTED = ["raised an error"] * RANKS


def step(rank: int) -> str:
    """Return how the first step of unequal modules ends."""
    layer = nn.Linear(4, 4)
    if rank == 1:
        layer = nn.Linear(4, 5)
    fully_shard(layer)
    layer(torch.ones(1, 4)).sum().backward()
    return "trained"


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
    return int(not all(end.startswith("raised") for end in got)) if begun == RANKS else 2


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
