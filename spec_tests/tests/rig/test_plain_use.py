"""What the heads of the plain files show under "Use" runs, on two ranks."""

import ast
import contextlib
import itertools
import struct
import textwrap
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spec_tests import plain
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.toys import TOYS

FILES = sorted(
    path.stem
    for path in Path(plain.__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "fsdp")  # the latter is used through `fully_shard`
)


def use_of(name: str) -> str:
    """The lines below "Use" in the head of a plain file."""
    head = ast.get_docstring(ast.parse(Path(plain.__file__).with_name(f"{name}.py").read_text()))
    assert head is not None
    return textwrap.dedent(head.partition("\nUse\n")[2].partition("\n\n")[0])


def run_the_use_of(ctx: Context, name: str) -> None:
    model, x = TOYS["stack"].build(7), TOYS["stack"].batch(7, rank=0)
    q, ids = torch.randn(1, 2, 5, 4), torch.randint(9, (2, 9))
    header = struct.pack("<3i", 20240520, 1, 100).ljust(1024, b"\0")
    shard = ctx.scratch / f"{ctx.rank}.bin"
    shard.write_bytes(header + struct.pack("<100H", *range(100)))
    if name == "trace":
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
            on_trace_ready=lambda found: found.export_chrome_trace(
                str(ctx.scratch / f"rank{ctx.rank}_trace.json")
            ),
        ) as profiler:
            for _ in range(3):
                model(x).sum().backward()
                profiler.step()
        ctx.barrier()
    module = nn.Embedding(9, 9) if name in ("train", "memory") else model
    make = SimpleNamespace(cls=torch.optim.SGD, options={"lr": 0.1})
    make.groups = lambda named: [{"params": [p for _, p in named]}]
    given = {
        **dict.fromkeys(("q", "k", "v"), q),
        **dict.fromkeys(("x", "first", "second", "last"), x),
        "ids": ids,
        "paths": [shard],
        "time": time,
        "torch": torch,
        "model": module,
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "make_optimizer": make,
        "batches": itertools.repeat((ids[:, :-1], ids[:, 1:])),
        "step": lambda: model(x).sum().backward(),
        "loss": (lambda m, x: m(x).square().mean()) if name == "trainer" else torch.sum,
    }
    source = import_module(f"spec_tests.plain.{name}")
    with contextlib.chdir(ctx.scratch):
        exec(use_of(name), vars(source) | given)


@pytest.mark.parametrize("name", FILES)
def test_what_the_head_of_a_plain_file_shows_runs(worlds: Worlds, name: str):
    assert use_of(name), f'{name}: expected lines under "Use" in the head of the file'
    worlds.world(2).run(run_the_use_of, name)
