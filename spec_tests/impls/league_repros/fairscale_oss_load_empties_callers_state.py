"""OSS.load_state_dict empties entries of the dict that the caller passed.

Expected: the state dict is unchanged by loading it: momentum of 1 and 1 parameter(s)
Got: on each rank the entries that the other rank owns are gone
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (no clause: a state dict is read twice)
Issue: none found (searched: fairscale OSS load_state_dict modifies mutates state_dict)
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the keys of each entry of a state dict before and after it is loaded."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    plain = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    plain.step()
    state = plain.state_dict()
    before = {key: sorted(value) for key, value in state["state"].items()}
    sharded = OSS(parameters, optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    sharded.load_state_dict(state)
    return before, {key: sorted(value) for key, value in state["state"].items()}


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
