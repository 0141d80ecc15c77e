"""Train GPT-2 on one rank: the numbers that every other layout is compared with.

    python -m solution.data.prepare --out outputs/data
    python -m solution.train_baseline --data outputs/data --steps 20
    python -m solution.train_baseline --preset large --sequence-length 1024 --dry-run

The loop is `solution.job.train`, for all entry scripts: they differ in what they wrap the model in.
Flags and files: `solution.job`, or `--help`.
"""

import os
import sys

from torch import nn

from solution import job
from solution.train_config import TrainConfig
from solution.world import World


def unwrapped(module: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Return the model as it is: nothing to reduce."""
    return module


def main() -> int:
    """Run the command; return the exit status."""
    # Checked before anyone waits for the other ranks to come.
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        sys.stderr.write(
            f"error: expected one rank, got WORLD_SIZE={world_size}; unset it, or run "
            "`torchrun --standalone --nproc-per-node=N -m solution.train_ddp`\n"
        )
        return 2
    return job.main(unwrapped, TrainConfig, "Train GPT-2 on one rank.")


if __name__ == "__main__":
    sys.exit(main())
