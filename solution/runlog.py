"""The log of a run: lines on stdout, a JSONL file, plots and a table. The first rank keeps it.

Lines go to stdout, every `log_every` steps and at the first and the last. OUT/NAME.jsonl has one
line per step, flushed, so that what a killed run did can be read. OUT/NAME.png (loss, learning
rate, seconds per step) is drawn from it at the end, never during training, where matplotlib is
installed.
"""

import contextlib
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from solution.console import significant
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
        self.path = path
        self.lines = [] if path is None else _lines_until(path, finished)
        self._config, self._begun = config, time.perf_counter()
        self._file: Any = None
        if path is not None:
            write_atomically(path, "".join(json.dumps(x) + "\n" for x in self.lines).encode())
            self._file = path.open("a")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def step(self, record: StepRecord, *, seconds: float, val_loss: float | None = None) -> None:
        """Keep one optimizer step, and show it if it is its turn."""
        if self.path is None:
            return
        rate = record["tokens"] / seconds
        line = {**record, "tokens_per_s": round(rate, 1), "step_s": round(seconds, 6)}
        if val_loss is not None:
            line["val_loss"] = val_loss
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        step = record["step"]
        is_turn = step in (1, self._config.steps) or step % self._config.log_every == 0
        if is_turn or val_loss is not None or record.get("skipped"):
            say(_text(line, time.perf_counter() - self._begun))

    def plot(self) -> Path | None:
        """Draw loss, learning rate and step time over the steps; None without matplotlib."""
        if self.path is None or not find_spec("matplotlib"):
            return None
        from matplotlib.figure import Figure  # here: half a second, and optional

        figure = Figure(figsize=(12, 3.5), layout="constrained")
        charts = figure.subplots(1, 3)
        titles = {"loss": "loss", "lr": "learning rate", "step_s": "seconds per step"}
        steps = [line["step"] for line in self.lines]
        for axes, (key, title) in zip(charts, titles.items(), strict=True):
            axes.plot(steps, [line[key] for line in self.lines], label="training")
            axes.set(xlabel="step", title=title)
        evaluated = [line for line in self.lines if "val_loss" in line]
        if evaluated:
            xs, ys = zip(*((line["step"], line["val_loss"]) for line in evaluated), strict=True)
            charts[0].plot(xs, ys, "o-", label="validation")
            charts[0].legend()
        path = self.path.with_suffix(".png")
        figure.savefig(path)
        return path


def _text(line: dict[str, Any], since_begin_s: float) -> str:
    text = (
        f"step {line['step']:5d} | loss {line['loss']:.6f} | lr {line['lr']:.2e} | "
        f"time {significant(line['step_s'], 3)} s, "
        f"{significant(since_begin_s, 3)} s since the start | "
        f"{significant(line['tokens_per_s'], 3)} tokens/s | "
        f"grad norm {significant(line['grad_norm'], 5, decimals=4)}"
    )
    if line.get("skipped"):
        text += f" | {line['skipped']} overflow(s), loss scale now {line['scale']:g}"
    if "val_loss" in line:
        text += f" | val loss {line['val_loss']:.6f}"
    return text


def _lines_until(path: Path, finished: int) -> list[dict[str, Any]]:
    """The lines of the first `finished` steps, as far as an earlier run left them."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text().splitlines() if finished and path.exists() else ():
        with contextlib.suppress(ValueError):  # the last one of a killed run may be cut off
            line = json.loads(text)
            if line["step"] <= finished:
                lines.append(line)
    return lines


def say(text: str) -> None:
    """A line on stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
