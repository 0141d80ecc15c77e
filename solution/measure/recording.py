"""Record a few steps of a run: what each rank did when.

The first `WARM_UP` steps of the process are left out: they allocate, connect, settle buckets. The
next `num_steps` are recorded, each as one `ProfilerStep#N` around one optimizer step, N being its
number in the log; evaluations and checkpoints in between are in the file but in no step. The file
gets its final name when it is whole. Recording slows down what it watches by tens of microseconds
per operator and changes no number of it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, _KinetoProfile, record_function

WARM_UP = 3


class Recording:
    """The profiler over `num_steps` steps of one rank, perhaps none.

    Attributes:
        path: of this rank's trace, in a folder that is made when it is written.
    """

    def __init__(self, folder: Path, rank: int, num_steps: int, device: torch.device) -> None:
        self.path = folder / f"rank{rank}_trace.json"
        self.num_steps = num_steps
        self._taken = 0
        self._device = device
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = _KinetoProfile(activities=kinds, record_shapes=True, profile_memory=True)

    def require(self, num_left: int) -> None:
        """Raise a ValueError unless `num_left` steps are enough, and no rank's trace is there."""
        if self.num_steps:
            require_free(self.path.parent, "rank*_trace.json*")
        if self.num_steps and num_left < WARM_UP + self.num_steps:
            raise ValueError(
                f"expected at least {WARM_UP + self.num_steps} steps to record {self.num_steps} "
                f"after {WARM_UP} of warm-up, got {num_left} that are left; ask for more steps or "
                "fewer profile_steps"
            )

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one optimizer step, the `number`-th of the run."""
        index, self._taken = self._taken - WARM_UP, self._taken + 1
        if not 0 <= index < self.num_steps:
            yield
            return
        if index == 0:
            # The profiler's first start reads this. Its own lines (USDT, level 5) are left out.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._profiler.start()  # type: ignore[no-untyped-call]  # unannotated in torch
        is_last = True  # also where the step raises
        try:
            with record_function(f"ProfilerStep#{number}"):
                yield
                if self._device.type == "cuda":  # or the device's part would lie behind the mark
                    torch.cuda.synchronize(self._device)
            is_last = index == self.num_steps - 1
        finally:
            if is_last:
                self._profiler.stop()  # type: ignore[no-untyped-call]  # as above
        if is_last:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f".{self.path.name}.partial")
            self._profiler.export_chrome_trace(str(partial))
            partial.replace(self.path)
            del self._profiler  # and its events, which are many


def require_free(folder: Path, pattern: str) -> None:
    """Raise a ValueError if there are such files: a mixture of two runs would look like one."""
    found = sorted(folder.glob(pattern))
    if found:
        raise ValueError(
            f"expected no {pattern} in {folder}, got {len(found)} of an earlier run, the first "
            f"{found[0].name}; move them away, or give another folder"
        )
