"""What a body leaves behind in a rank that lives on: put back, reported, or the end of it."""

import os
import re
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spec_tests.rig.ranks import hygiene
from spec_tests.rig.ranks.errors import RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig import bodies

CHANGES: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float16),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "threads": lambda: torch.set_num_threads(2),
    "autocast on CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "global module hooks": lambda: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: None
    ),
    "environment": lambda: os.environ.update(TRAINSPEC_LEFT_BEHIND="1"),
    "working directory": lambda: os.chdir("/"),
    "warning filters": lambda: warnings.simplefilter("ignore"),
    "alarm handler": lambda: signal.signal(signal.SIGALRM, lambda number, frame: None),
}
"""Name of the probe to a change that can be put back."""


def change(ctx: Context, name: str, *, then_raise: bool = False) -> None:
    """Change one piece of state: what is harmless on all ranks, any other on rank 1 only."""
    if ctx.rank == 1 or name in HARMLESS:
        {**CHANGES, **LASTING, **HARMLESS}[name]()
    if then_raise:
        raise ValueError("after the change")


def state(ctx: Context) -> dict[str, str]:
    """What must be as it was; threads and files come and go with what a rank does at its start.

    Without addresses, as a handler has, and without the name of the pool's folder.
    """
    values = zip(hygiene._PROBES, hygiene.snapshot(), strict=True)
    return {
        probe.name: re.sub(r"trainspec-\w+", "trainspec-", repr(value).partition(" at 0x")[0])
        for probe, value in values
        if not probe.is_harmless
    }


@pytest.mark.parametrize(
    ("name", "transport"), [*((name, "gloo") for name in CHANGES), ("default dtype", "sim")]
)
def test_what_can_be_put_back_is_and_is_reported(worlds: Worlds, name: str, transport: str):
    world = worlds.world(2, transport=transport)
    before, pids, known = world.run(state), world.run(bodies.pid), len(worlds.leaks)
    leaks = world.run(change, name).leaks
    assert worlds.leaks[known:] == list(leaks)
    (own,) = [leak for leak in leaks if f": {name}: " in leak]
    assert own.startswith("rank 1: ")
    assert all(leak.endswith("(restored)") and len(leak) < 500 for leak in leaks)
    assert "PATH" not in own, "of a mapping what has changed"
    found = world.run(state)
    assert found.leaks == ()
    assert found == before
    assert world.run(bodies.pid) == pids, "nothing was lost, so nobody had to die"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


KEPT: list[Any] = []


def enter(manager: Any) -> None:
    KEPT.append(manager)
    manager.__enter__()


LASTING: dict[str, Callable[[], object]] = {
    "inference mode": lambda: enter(torch.inference_mode()),
    "dispatch modes": lambda: enter(_Mode()),
    "function modes": lambda: enter(BaseTorchFunctionMode()),
}
"""Name of the probe to a change that nobody can put back."""
HARMLESS: dict[str, Callable[[], object]] = {
    "Python threads": lambda: threading.Thread(
        target=threading.Event().wait, daemon=True, name="left-behind"
    ).start(),
    "process groups": lambda: dist.new_group([0, 1]),
    "open files": lambda: KEPT.append(Path(__file__).open()),  # noqa: SIM115 - it is to stay open
}
"""Name of the probe to a change that an implementation may want to keep."""


def test_every_probe_is_put_to_the_test():
    assert {probe.name for probe in hygiene._PROBES} == {*CHANGES, *LASTING, *HARMLESS}


@pytest.mark.parametrize("name", [*LASTING, *HARMLESS])
def test_what_cannot_be_put_back_ends_the_pool_unless_it_harms_nobody(worlds: Worlds, name: str):
    world = worlds.world(2)
    before, pids = world.run(state), world.run(bodies.pid)
    leaks = world.run(change, name).leaks
    assert any(leak.startswith(f"rank 1: {name}: ") for leak in leaks)
    if name in HARMLESS:
        assert all(leak.endswith("(kept)") for leak in leaks)
        assert world.run(bodies.pid) == pids
        worlds.drop(None)  # nobody after this one inherits it
    else:
        assert any(leak.endswith("(not restorable)") for leak in leaks)
        assert set(world.run(bodies.pid)).isdisjoint(pids)
    assert world.run(state) == before


def test_a_failing_body_is_cleaned_up_as_well(worlds: Worlds):
    world = worlds.world(2)
    before, pids = world.run(state), world.run(bodies.pid)
    with pytest.raises(RankRaised):
        world.run(change, "default dtype", then_raise=True)
    assert world.run(state) == before
    assert world.run(bodies.pid) == pids
    with pytest.raises(RankRaised):
        world.run(change, "inference mode", then_raise=True)
    assert set(world.run(bodies.pid)).isdisjoint(pids)


def sum_in_kept_group(ctx: Context) -> float:
    if not KEPT:
        KEPT.append(dist.new_group([0, 1]))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=KEPT[-1])
    return tensor.item()


def test_a_group_that_is_kept_works_until_the_default_group_breaks(worlds: Worlds):
    worlds.drop(None)
    world = worlds.world(2)
    for _ in range(2):
        assert world.run(sum_in_kept_group) == [2.0, 2.0]
    pids = world.run(bodies.pid)
    with pytest.raises(RankRaised):
        world.run(change, "default dtype", then_raise=True)
    assert set(world.run(bodies.pid)).isdisjoint(pids), "half of its groups would belong to nobody"


def destroy(ctx: Context) -> None:
    dist.barrier()
    dist.destroy_process_group()


def test_a_body_may_destroy_the_default_group(worlds: Worlds):
    world = worlds.world(2)
    pids = world.run(bodies.pid)
    world.run(destroy)
    assert [total.tolist() for total in world.run(bodies.total, [1.0])] == [[3.0]] * 2
    assert world.run(bodies.pid) == pids
