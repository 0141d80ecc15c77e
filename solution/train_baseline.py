"""Train GPT-2 on one rank: the numbers that every other layout is compared with.

    python -m solution.data.prepare --out outputs/data
    python -m solution.train_baseline --data outputs/data --steps 20
    python -m solution.train_baseline --preset large --sequence-length 1024 --dry-run

`train` is the loop of the other entry scripts as well: they differ in what they wrap the model in.
Flags and files: `solution.job`, or `--help`.
"""

import os
import sys

import torch
from torch import nn

from solution import job
from solution.job import Job, Wrap
from solution.models import families
from solution.resume import Restarts
from solution.train_config import TrainConfig
from solution.trainer import training_steps
from solution.world import World


def train(job: Job, wrap: Wrap) -> None:
    """Build, wrap, loop, log; every rank calls it."""
    config = job.config
    torch.manual_seed(config.seed)  # equal on all ranks, so they build the same model
    module = families.build(
        job.model_config,
        attention=config.attention,
        activation_checkpointing=config.activation_checkpointing,
    ).to(job.world.device)
    model = wrap(module, config, job.world)  # first: it may put shards in place of parameters
    optimizer = job.optimizer(module)
    with Restarts(job, model, optimizer) as restarts:
        finished = restarts.resume()
        if finished >= config.steps:
            return  # done by an earlier run, whose summary stays
        records = training_steps(
            model,
            optimizer,
            job.loader,
            steps=config.steps,
            finished=finished,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            max_norm=config.max_norm,
            lr=job.learning_rate,
            dtype=config.dtype,
        )
        with job.running(finished) as log:
            for step in range(finished, config.steps):
                with job.watching(step):
                    record = next(records)
                log.step(record, seconds=job.seconds[-1], val_loss=job.evaluate(model, step + 1))
                restarts.after_step(step + 1)
    job.summarize(module, optimizer, log)


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
    return job.main(train, unwrapped, name="baseline", description="Train GPT-2 on one rank.")


if __name__ == "__main__":
    sys.exit(main())
