"""Where a rank's loss touches no parameter, DistributedDataParallel hangs on the other ranks,
find_unused_parameters=True or not.

Expected: every rank ends the step, with the mean or an error
Got: rank 0 waits in its backward for ever
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.gradients.unused-on-a-whole-rank
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
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
SECONDS = 8
EXPECTED = ["ended its backward, or raised"] * RANKS


def step(rank: int) -> str:
    """Return how a step ends in which the last rank's batch has nothing to learn from."""
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    loss = model(torch.ones(1, 2)).sum()
    if rank == 1:
        loss = torch.zeros((), requires_grad=True)
    loss.backward()
    return "ended its backward"


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
    return int(any("died" in end or "waits" in end for end in got)) if begun == RANKS else 2


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
