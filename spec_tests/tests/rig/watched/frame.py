"""What the scripts of this folder have in common: their arguments, a process group, and their end.

A script finds it as any script finds a file beside it.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist


def arguments(seed=0):
    """Return `--steps` and `--seed`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=seed)
    return parser.parse_args()


def start():
    """Join the ranks that the launcher started, or be alone; return rank and world size."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def end(rank, *modules):
    """Print the hash of this rank's parameters and buffers, of shards its own, and leave."""
    digest = hashlib.sha256()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().flatten().view(torch.uint8).numpy().tobytes())
    print(f"fingerprint {rank} {digest.hexdigest()}\n", end="")
    if dist.is_initialized():
        time.sleep(0.1)  # until gloo's threads are idle: pytorch/pytorch#179291
        dist.destroy_process_group()
