"""A loader's state_dict right after load_state_dict is that of the start, not what was loaded.

Expected: a checkpoint written between a resume and its first batch resumes at batch 2
Got: it resumes at batch 0
Versions: accelerate 1.15.0, torch 2.13.0, checked 2026-11-23
Clause: data.state.of-what-was-loaded, data.state.of-a-resumed-pass
Issue: https://github.com/huggingface/accelerate/pull/4244
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

RANKS = 2


def _loader() -> DataLoader:
    one_rank = {"num_processes": 1, "process_index": 0}
    return prepare_data_loader(DataLoader(range(6)), use_stateful_dataloader=True, **one_rank)


def observe(rank: int) -> tuple[object, object]:
    """Return where a loader goes on that was stopped after 2 batches and resumed twice."""
    first, second, third = _loader(), _loader(), _loader()
    batches = iter(first)
    next(batches), next(batches)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    return 2, next(iter(third)).item()


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=RANKS)
        expected, got = zip(*(torch.load(f"{folder}/{r}") for r in range(RANKS)), strict=True)
    print(f"expected on each rank: {expected}\ngot:                   {got}")
    return int(expected != got)


if __name__ == "__main__":
    try:
        status = _main()  # 1: the fault is there
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
