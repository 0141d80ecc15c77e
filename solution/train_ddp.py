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
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solution import job
from solution.config import require
from solution.parallel.ddp import DDPBucketed, DDPIndividualParameters
from solution.train_config import TrainConfig, setting
from solution.world import World


@dataclass(frozen=True, kw_only=True)
class DdpConfig(TrainConfig):
    """A run of replicas."""

    wrapper: str = setting("ddp_bucketed", "who reduces gradients", "ddp", "ddp_bucketed", "torch")
    bucket_size_mb: float = setting(25.0, "of ddp_bucketed and torch, in MiB")
    zero1: bool = setting(False, "divide AdamW's state over the ranks")

    def __post_init__(self) -> None:
        super().__post_init__()
        require("bucket_size_mb", self.bucket_size_mb, "> 0", lambda value: value > 0)

    @property
    def name(self) -> str:  # type: ignore[override]  # of a class that always has the same one
        """The name of this run's files."""
        return {"torch": "ddp_torch"}.get(self.wrapper, self.wrapper)


def wrapped(module: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Return the model inside the wrapper that the config names."""
    assert isinstance(config, DdpConfig)
    if config.wrapper == "torch":
        return DistributedDataParallel(module, bucket_cap_mb=config.bucket_size_mb)
    if config.wrapper == "ddp_bucketed":
        return DDPBucketed(module, bucket_size_mb=config.bucket_size_mb)
    return DDPIndividualParameters(module)


def main() -> int:
    """Run the command; return the exit status."""
    return job.main(wrapped, DdpConfig, "Train GPT-2 on several ranks.")


if __name__ == "__main__":
    sys.exit(main())
