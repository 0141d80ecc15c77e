"""Train GPT-2 on one rank: the numbers that every other layout is compared with.

    python -m solution.data.prepare --out outputs/data
    python -m solution.train_baseline --data outputs/data --steps 20
    python -m solution.train_baseline --preset large --sequence-length 1024 --dry-run

Flags and files: `solution.job`, or `--help`.
"""

from __future__ import annotations

import os
import sys

from torch import nn

from solution import job
from solution.train_config import TrainConfig
from solution.world import World

__all__ = ["main"]


def unwrapped(module: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """The model as it is: nothing to reduce."""
    return module


def main() -> int:
    """The command; returns the exit status."""
    # Checked before anyone waits for the other ranks to come.
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        sys.stderr.write(
            f"error: expected one rank, got WORLD_SIZE={world_size}; unset it, or run "
            "`torchrun --standalone --nproc-per-node=N -m solution.train_ddp`\n"
        )
        return 2
    return job.main(unwrapped, name="baseline", description="Train GPT-2 on one rank.")


if __name__ == "__main__":
    sys.exit(main())
