"""Collectives that NCCL takes and gloo refuses: "not here", or done where CUDA is stood in for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from spec_tests.rig import target
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.sim import hooks
from spec_tests.tests.rig.helpers import CHECKOUTS, judged

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

def ddp(module):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = 1.0 + rank + torch.arange(6.0)
    both = torch.stack([1.0 + torch.arange(6.0), 2.0 + torch.arange(6.0)])
    total = both.sum(0)
"""
TAIL = "\n    return DistributedDataParallel(module)\n"

REFUSED = {
    "a gather into rows": "rows = torch.empty(2, 6); dist.all_gather_into_tensor(rows, own)\n"
    "    assert rows.equal(both)",
    "a gather into more dims": "rows = torch.empty(2, 3, 2)\n"
    "    work = dist.all_gather_into_tensor(rows, input_tensor=own.view(3, 2), async_op=True)\n"
    "    work.wait(); assert rows.equal(both.view(2, 3, 2))",
    "a flat gather of a matrix": "flat = torch.empty(12); dist.all_gather_into_tensor(\n"
    "        output_tensor=flat, input_tensor=own.view(3, 2)); assert flat.equal(both.view(-1))",
    "a gather of numbers": "found = torch.empty(2); dist.all_gather_into_tensor(found, own[0])\n"
    "    assert found.tolist() == [1.0, 2.0]",
    "a scatter of rows": "mine = torch.empty(3); dist.reduce_scatter_tensor(mine, own.view(2, 3))\n"
    "    assert mine.equal(total.view(2, 3)[rank])",
    "a scatter of a matrix": "mine = torch.empty(3, 1)\n"
    "    dist.reduce_scatter_tensor(mine, own, op=dist.ReduceOp.AVG)\n"
    "    assert mine.equal(total.view(2, 3, 1)[rank] / 2)",
    "a future of a scatter": "mine = torch.empty(3)\n"
    "    work = dist.reduce_scatter_tensor(mine, own, async_op=True)\n"
    "    work.get_future().then(lambda future: mine.div_(2)).wait()\n"
    "    assert mine.equal(total.view(2, 3)[rank] / 2)",
    "a gather of unequal sizes": "found = [torch.empty(1), torch.empty(2)]\n"
    "    dist.all_gather(found, own[: 1 + rank], async_op=True).wait()\n"
    "    assert found[0].equal(both[0, :1]) and found[1].equal(both[1, :2])",
    "a gather of other shapes": "found = [torch.empty(2, 3), torch.empty(2, 3)]\n"
    "    dist.all_gather(found, own); assert torch.cat(found).view(2, 6).equal(both)",
    "an exchange of unequal sizes": "found = [torch.empty(1 + rank), torch.empty(1 + rank)]\n"
    "    dist.all_to_all(found, [own[:1], own[1:3]])\n"
    "    assert all(f.equal(b[:1] if rank == 0 else b[1:3]) for f, b in zip(found, both))",
    "a factor for each rank": "factor = dist._make_nccl_premul_sum(0.5); mine = torch.empty(3)\n"
    "    dist.all_reduce(own, op=factor); assert own.equal(total / 2)\n"
    "    dist.reduce_scatter_tensor(mine, both.view(-1)[:6], factor); assert mine.equal(\n"
    "        both[0].view(2, 3)[rank])",
    "float8": "small = own.to(torch.float8_e4m3fn); dist.broadcast(small, 0)\n"
    "    assert small.float().equal(both[0])",
    "a wait on the stream": "dist.all_reduce(own, async_op=True).block_current_stream()\n"
    "    assert own.equal(total)",
}
TAKEN = {
    "gathers in one message": "rows = [torch.empty(2, 6), torch.empty(2, 6)]\n"
    "    with dist._coalescing_manager(async_ops=True) as works:\n"
    "        for each in rows: dist.all_gather_into_tensor(each, own)\n"
    "    works.wait(); assert rows[0].equal(both) and rows[1].equal(both)",
    "functional": "assert functional.all_reduce(own, 'sum', dist.group.WORLD).equal(total)",
    "flat": "flat = torch.empty(12); dist.all_gather_into_tensor(flat, own)\n"
    "    assert flat.equal(both.view(-1))",
    "a sub-group": "group = dist.new_group([0]); rows = torch.empty(1, 6)\n"
    "    if rank == 0: dist.all_gather_into_tensor(rows, own, group)\n"
    "    assert rank or rows[0].equal(own)",
}
WRONG = {
    "too small an output": "dist.all_gather_into_tensor(torch.empty(2, 5), own)",
    "too large an output": "dist.all_gather_into_tensor(torch.empty(13), own)",
    "another dtype": "dist.all_gather_into_tensor(torch.empty(2, 6).double(), own)",
    "rows that do not divide": "dist.reduce_scatter_tensor(torch.empty(4), own)",
    "a list that is too short": "dist.all_gather([torch.empty(6)], own)",
    "unequal sizes, and not one's own": "dist.all_gather([torch.empty(4), torch.empty(5)], own)",
    "a gather to one rank": "dist.gather(own, [torch.empty(2, 3)] * 2 if rank == 0 else None)",
}
"""What NCCL refuses as well."""


@pytest.fixture
def does(mine):
    """Writes an implementation whose ddp does this, and names it."""

    def write(statement: str, pretends_cuda: bool) -> target.Target:
        which = mine(f"{HEAD}    {statement}{TAIL}")
        return dataclasses.replace(which, pretends_cuda=pretends_cuda)

    return write


@pytest.mark.parametrize("statement", REFUSED.values(), ids=REFUSED)
def test_on_gloo_such_a_form_is_not_here(module_worlds: Worlds, does, statement: str):
    found = judged(does(statement, pretends_cuda=False), module_worlds)
    assert found.outcome is Outcome.NOT_HERE, found.message
    assert "not here: gloo refuses " in found.message
    assert "which torch documents and NCCL takes; --pretend-cuda stands in for" in found.message


@pytest.mark.parametrize("statement", [*REFUSED.values(), *TAKEN.values()], ids=[*REFUSED, *TAKEN])
def test_where_cuda_is_stood_in_for_it_is_done(module_worlds: Worlds, does, statement: str):
    found = judged(does(statement, pretends_cuda=True), module_worlds)
    assert found.outcome is Outcome.PASSED, found.message


@pytest.mark.skipif(bool(hooks.needs()), reason="this torch cannot be simulated")
@pytest.mark.parametrize("form", ["a gather into rows", "a gather of unequal sizes"])
def test_simulated_ranks_do_it_too(module_worlds: Worlds, does, form: str):
    found = judged(does(REFUSED[form], pretends_cuda=True), module_worlds, transport="sim")
    assert found.outcome is Outcome.PASSED, found.message


@pytest.mark.parametrize("pretends_cuda", [False, True], ids=["gloo", "stood in for"])
@pytest.mark.parametrize("statement", WRONG.values(), ids=WRONG)
def test_sizes_that_nccl_refuses_as_well_are_a_fault(
    module_worlds: Worlds, does, statement: str, pretends_cuda: bool
):
    found = judged(does(statement, pretends_cuda), module_worlds)
    assert found.outcome is Outcome.FAILED, found.message


def test_what_cannot_be_stood_in_for_names_a_device(module_worlds: Worlds, does):
    statement = "dist.all_reduce(own.to(torch.float8_e4m3fn))"
    found = judged(does(statement, pretends_cuda=True), module_worlds)
    assert found.outcome is Outcome.NOT_HERE, found.message
    assert "run it on a machine with a CUDA device" in found.message


def recorded(ctx: Context) -> list[list[tuple[str, int, int]]]:
    """Kinds and sizes that are recorded of forms that gloo takes, and of those that it refuses."""
    own, found = torch.ones(6), []
    for rows, mine in ((torch.empty(12), own), (torch.empty(2, 6), own.view(2, 3))):
        with ctx.recording() as recorder:
            dist.all_gather_into_tensor(rows, own)
            dist.reduce_scatter_tensor(torch.empty(3), mine)
        log = recorder.log()
        found.append([(str(e.kind), e.numel, e.bytes) for e in log.collectives()])
    return found


def test_what_is_recorded_is_the_same(module_worlds: Worlds):
    gpu = target.parse(f"cs336:{CHECKOUTS / 'cs336_gpu'}")
    for flat, stacked in module_worlds.world(2, gpu).run(recorded):
        assert flat == stacked == [("gather", 12, 48), ("reduction", 6, 24)]
