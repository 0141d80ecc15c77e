"""The log of a run: lines on stdout and a JSONL file. The first rank keeps it.

Lines go to stdout every `log_every` steps and at the first and the last. OUT/NAME.jsonl has one
line per step, written at once, so that what a killed run did can be read.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from solution.console import say, significant
from solution.data.shards import write_atomically
from solution.train_config import TrainConfig
from solution.trainer import StepRecord


class RunLog:
    """The log of one run, on the rank that keeps it.

    Args:
        path: of the JSONL file, in an existing folder; None, on the other ranks, keeps nothing.
        finished: how many of the steps a resumed run has behind it; their lines stay, later ones
            that were not saved go.

    Attributes:
        lines: its content so far, one dict per step.
    """

    def __init__(self, path: Path | None, config: TrainConfig, *, finished: int = 0) -> None:
        self.path, self._config, self._begun = path, config, time.perf_counter()
        self.lines: list[dict[str, Any]] = []
        if path is not None:
            for text in path.read_text().splitlines() if finished and path.exists() else ():
                with contextlib.suppress(ValueError):  # a killed run's last line may be cut off
                    self.lines.append(json.loads(text))
            self.lines = [line for line in self.lines if line["step"] <= finished]
            write_atomically(path, "".join(json.dumps(x) + "\n" for x in self.lines).encode())

    def step(self, record: StepRecord, *, seconds: float, val_loss: float | None = None) -> None:
        """Keep one optimizer step, and show it if it is its turn."""
        if self.path is None:
            return
        rate = record["tokens"] / seconds
        line = {**record, "tokens_per_s": round(rate, 1), "step_s": round(seconds, 6)}
        if val_loss is not None:
            line["val_loss"] = val_loss
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        step = record["step"]
        is_turn = step in (1, self._config.steps) or step % self._config.log_every == 0
        if is_turn or val_loss is not None:
            say(
                f"step {step:5d} | loss {record['loss']:.6f} | lr {record['lr']:.2e} | "
                f"time {significant(seconds, 3)} s, "
                f"{significant(time.perf_counter() - self._begun, 3)} s since the start | "
                f"{significant(rate, 3)} tokens/s | "
                f"grad norm {significant(record['grad_norm'], 5, decimals=4)}"
                + ("" if val_loss is None else f" | val loss {val_loss:.6f}")
            )
