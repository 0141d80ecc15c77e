"""Training scripts that are right, and faults in them, for the tests of `trainspec watch`.

`SCRIPTS` are the right ones: `torchrun --nproc-per-node=W script.py --steps N --seed S`, or plain
`python script.py`, which is one rank. At its end each rank prints `fingerprint <rank> <sha256>`:
see `frame.py`, which the scripts import as a file beside them.
`faults.toml` holds changes of one or two lines; each is a mistake that a public thread tells of.
`small.toml` holds small scripts that the watcher once told wrongly, and what it should say of each.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import tomllib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import set_start_method
from pathlib import Path

HERE = Path(__file__).parent
_OURS = ("__init__", "__main__", "elsewhere", "frame", "trial")
SCRIPTS = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem not in _OURS))


PREAMBLE = """
import os, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo"); rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
end_soon = lambda seconds: threading.Timer(seconds, os._exit, (3,)).start()
def train(model, steps=4, lr=0.01):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(1 + rank)
    for step in range(steps):
        yield step
        model(torch.randn(6, 8)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Fault:
    """A change to one script, and what a watcher should report of it.

    The text `find` is replaced by `replace`; `edits` are several such pairs. `check` is the
    check that should report the fault, `also` are checks that may report what follows from it.
    `seen` is what the run shows without a watcher. `needs` is a library that the script must find.
    `spare` faults are not counted. `missed` is why a watcher cannot tell one.
    """

    id: str
    script: str
    check: str
    story: str
    link: str
    find: str = ""
    replace: str = ""
    edits: Sequence[dict[str, str]] = ()
    also: Sequence[str] = ()
    steps: int = 4
    spare: bool = False
    seen: str = ""
    needs: str = ""
    missed: str = ""


def find(script: str) -> Path:
    """Return the file of a script."""
    return HERE / f"{script}.py"


def told_by() -> dict[str, list[str]]:
    """Return norm to the faults that it is to report; where it has none, to small scripts."""
    found: dict[str, list[str]] = {}
    for fault in faults():
        found.setdefault(fault.check, []).append(fault.id)
    scripts: dict[str, list[str]] = {}
    for case in small():
        for norm in {*case.must, *case.should} - found.keys():
            scripts.setdefault(norm, []).append(case.id)
    return found | scripts


def faults() -> list[Fault]:
    """Return the faults of `faults.toml`, in its order."""
    return [Fault(**entry) for entry in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]


def write_fault(fault: Fault, directory: Path) -> Path:
    """Write the changed script, and what it imports, to `directory`; return its path.

    Raises:
        ValueError: a text that is to be replaced is not in the script exactly once.
    """
    text = find(fault.script).read_text()
    for edit in fault.edits or [{"find": fault.find, "replace": fault.replace}]:
        if text.count(edit["find"]) != 1:
            raise ValueError(f"{fault.id}: not found once: {edit['find']!r}")
        text = text.replace(edit["find"], edit["replace"])
    path = directory / f"{fault.script}.py"
    path.write_text(text)
    shutil.copy(find("frame"), directory)
    return path


@dataclass(frozen=True)
class Small:
    """A script, and the causes that are to be reported of it.

    A command that starts `trainings`, one after the other, has their numbers in TRAINING.
    """

    id: str
    text: str
    file: str = "train.py"
    options: list[str] = field(default_factory=list)
    must: list[str] = field(default_factory=list)
    should: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    hides: list[str] = field(default_factory=list)
    world: int = 2
    trainings: int = 1

    def write(self, folder: Path) -> Path:
        """Write the script into a folder; returns its path."""
        path = folder / self.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(PREAMBLE.lstrip() + self.text.lstrip())
        return path


def small() -> list[Small]:
    """Return the scripts of `small.toml`."""
    entries = tomllib.loads((HERE / "small.toml").read_text())["script"]
    return [Small(**entry) for entry in entries]


def be_rank(words: list[str], environment: dict[str, str], log: str, boot: str) -> None:
    """In a fork: be the process that torchrun would have started, watched if there is a `boot`.

    It is here since a fork imports the module: `trial` imports what the agent needs, for 0.1 s.
    """
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
    # Of the process that it comes from: torch would take 174 libraries apart, a tenth of a run.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as Python does for a script
    set_start_method("fork", force=True)  # of workers; a forkserver's fork would ask a forkserver
    if boot:
        runpy.run_path(boot)["_start"]()
        # A rank of torchrun's connects at once; a fork might be a worker that loads data.
        sys.modules["trainspec_watch.guard"].Current.probe.connect()  # type: ignore[attr-defined]
    status = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
