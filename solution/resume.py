"""Checkpoints of a run: when it saves, where it resumes, and how it stops on SIGTERM.

1. A run with `--checkpoint-dir` looks there first. Nothing but that folder decides where it begins,
   so the same command starts a run, restarts it after a crash, and does nothing when it is done.
2. It saves every `--save-every` steps and at the last one; `--keep` of them stay.
3. SIGTERM (the scheduler wants the machine, torchrun ends its workers) sets a flag. After each step
   the ranks sum their flags, so that all of them stop after the same one; they save and raise
   `Interrupted`. The cost is one small sum per step.
4. The settings that decide the weights are saved as well and compared: another learning rate after
   a restart is a mistake, or a new run. World size, micro-batches and wrapper may change.

`torchrun --max-restarts=N` starts all ranks anew when one dies, and they go on from the last save.
With gloo set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: in a store that attempts share, the ranks of the
second one find the addresses of the first.
"""

import signal
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from solution import comm
from solution.checkpoint import Stateful, latest_step, load_checkpoint, save_checkpoint
from solution.checkpoint.folder import together
from solution.console import say
from solution.train_config import TrainConfig
from solution.world import World

# The settings on which the weights after n steps depend; dtypes are those of a sharded run.
DECISIVE = (
    *("model", "size", "vocab_size", "sequence_length", "steps", "global_batch_size"),
    *("learning_rate", "warmup_steps", "weight_decay", "max_norm", "precision", "seed"),
    *("param_dtype", "reduce_dtype"),
)


class Interrupted(RuntimeError):
    """The run was told to stop, and has saved what it had."""


class Restarts:
    """The saves of one run, and where it resumes; without a checkpoint folder it does nothing."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Stateful,
    ) -> None:
        self._config, self._world, self._loader = config, world, loader
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": self}
        self._own = {name: getattr(config, name, "float32") for name in DECISIVE}
        self._is_told_to_stop = False

    def __enter__(self) -> Self:
        if self._config.checkpoint_dir is not None:
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._config.checkpoint_dir is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the number of finished steps.

        Raises:
            CheckpointError: on all ranks: there are some, and none can be used.
        """
        directory = self._config.checkpoint_dir
        if directory is None:
            return 0
        # One rank looks for all: a folder that appears meanwhile must not divide them.
        what = f"look for checkpoints in {directory}"
        found = together(what, lambda: latest_step(directory), None, by_first=True)
        finished, said = 0, f"none in {directory} yet, beginning at step 0"
        if found is not None:
            finished = load_checkpoint(directory, **self._parts)
            said = f"going on after step {finished} of {directory}"
        if self._world.is_first:
            say(f"  checkpoints: {said}")
        return finished

    def after_step(self, finished: int) -> None:
        """Save where it is due; every rank calls it after every step.

        Raises:
            Interrupted: on all ranks, after SIGTERM on any.
            CheckpointError: on all ranks, when saving failed.
        """
        config = self._config
        if config.checkpoint_dir is None:
            return
        flag = torch.tensor(float(self._is_told_to_stop), device=self._world.device)
        is_stopping = bool(comm.sum_over_ranks(flag))
        every = config.save_every
        is_due = finished == config.steps or (every is not None and finished % every == 0)
        if is_due or is_stopping:
            save_checkpoint(config.checkpoint_dir, step=finished, keep=config.keep, **self._parts)
        if is_stopping and finished < config.steps:
            raise Interrupted(
                f"told to stop; saved after step {finished} of {config.steps} in "
                f"{config.checkpoint_dir}, the same command goes on from there"
            )

    def _on_sigterm(self, *_: object) -> None:
        self._is_told_to_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved as the loader's state: that, and the decisive settings."""
        return {"loader": self._loader.state_dict(), "settings": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the loader's place.

        Raises:
            ValueError: lists the decisive settings that are other ones than those saved.
        """
        saved = state["settings"]
        differing = [
            f"{name} {own!r} (saved: {saved.get(name)!r})"
            for name, own in self._own.items()
            if own != saved.get(name, own)  # an older save may lack one
        ]
        if differing:
            raise ValueError(
                f"expected the settings that the run began with, got other ones: "
                f"{', '.join(differing)}; use those, or another --checkpoint-dir"
            )
        self._loader.load_state_dict(state["loader"])
