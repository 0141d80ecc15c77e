"""Train GPT-2 with data parallelism: every rank has the whole model and a part of each batch.

    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --data outputs/data --steps 20
    torchrun --standalone --nproc-per-node=2 -m solution.train_ddp --wrapper torch ...

`--wrapper` chooses who reduces the gradients: `ddp` (one all-reduce per parameter), `ddp_bucketed`
(flat buckets), or `torch`, PyTorch's DistributedDataParallel, for comparison. `--zero1` divides the
state of AdamW over the ranks; weights stay the same to the bit, and checkpoints go either way.
Seed, data and order of sequences are those of `train_baseline`, so the losses are the same up to
rounding. gloo on CPUs, nccl where every rank has a GPU. Flags and files: `solution.job`, or
`--help`.
"""

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solution import job
from solution.parallel.ddp import DDPBucketed, DDPIndividualParameters
from solution.train_config import TrainConfig
from solution.world import World


def wrapped(module: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Return the model inside the wrapper that the config names."""
    if config.wrapper == "torch":
        return DistributedDataParallel(module, bucket_cap_mb=config.bucket_size_mb)
    if config.wrapper == "ddp_bucketed":
        return DDPBucketed(module, bucket_size_mb=config.bucket_size_mb)
    return DDPIndividualParameters(module)


def main() -> int:
    """Run the command; return the exit status."""
    return job.main(wrapped, description="Train GPT-2 on several ranks.")


if __name__ == "__main__":
    sys.exit(main())
