"""Code that insists on CUDA is judged on a CPU, and the verdict says how.

Collectives that NCCL takes and gloo refuses are "not here", or done where CUDA is stood in for.
"""

from __future__ import annotations

import builtins
import dataclasses
import unittest
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spec_tests import impls
from spec_tests.chapters.attention import test_operator
from spec_tests.rig import plugin, target
from spec_tests.rig.judge import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks import world
from spec_tests.rig.ranks.cuda_runtime import PRETENDED_CUDA
from spec_tests.rig.ranks.errors import RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.wire import Frame, RemoteError
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.data import as_report
from spec_tests.rig.report.ending import render_ending
from spec_tests.rig.report.page import render_page
from spec_tests.rig.report.text import render_summary
from spec_tests.rig.sim import hooks
from spec_tests.tests.rig import bodies
from spec_tests.tests.rig.helpers import CHECKOUTS, MEAN, MEAN_CASE, judged
from spec_tests.tests.rig.logs import log

GPU = impls.parse(f"cs336:{CHECKOUTS / 'cs336_2026'}")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
TRANSPORTS = pytest.mark.parametrize("transport", ["gloo"] if hooks.needs() else ["gloo", "sim"])

# ----------------------------------------------------------------------------- one habit at a time

HABITS = {
    "asserts without words": "assert all(p.is_cuda for p in module.parameters())",
    "refuses": "if not weight.is_cuda: raise ValueError('Linear only support CUDA')",
    "device of a tensor": "assert weight.device.type == 'cuda' and weight.get_device() >= 0",
    "moves": "module = module.cuda()",
    "moves by name": "module.to('cuda:0', non_blocking=True)",
    "moves by number": "module.to(dist.get_rank())",
    "allocates": "torch.empty_like(weight, device='cuda') + torch.zeros((), device='cuda:0')",
    "types": "assert isinstance(weight, torch.cuda.FloatTensor) and weight.type() == "
    "torch.cuda.IntTensor([3]).type('torch.cuda.FloatTensor').type() == 'torch.cuda.FloatTensor'",
    "a generator": "torch.rand(2, generator=torch.Generator('cuda').manual_seed(1), device='cuda')",
    "pins": "weight.detach().pin_memory().to('cuda', non_blocking=True)",
    "a stream": "torch.cuda.current_stream().wait_stream(torch.cuda.Stream())",
    "an event": "torch.cuda.Event(enable_timing=True).record()",
    "nvtx": "torch.cuda.nvtx.range_push('x'); torch.cuda.nvtx.range_pop()",
    "a block on a stream": "with torch.cuda.nvtx.range('x'), torch.cuda.stream(None):\n"
    "        weight.detach().record_stream(torch.cuda.current_stream())",
    "a clock": "clock = torch.cuda.Event(enable_timing=True); clock.record(); "
    "clock.elapsed_time(clock)",
    "waits": "torch.cuda.synchronize()",
    "memory": "torch.cuda.reset_peak_memory_stats(); torch.cuda.mem_get_info()",
    "chooses its device": "torch.cuda.set_device(dist.get_rank())",
    "properties": "assert torch.cuda.get_device_properties(weight.device).multi_processor_count",
    "random state": "torch.cuda.set_rng_state(torch.cuda.get_rng_state())",
    "autocast": "weight = weight.float()\n"
    "    with torch.autocast('cuda'): assert (weight @ weight.T).dtype is torch.float16",
    "a group of nccl": "dist.new_group(backend='nccl')",
    "a mesh": "init_device_mesh('cuda', (2,)).get_group()",
    "loads": "file = io.BytesIO(); torch.save(weight, file); file.seek(0); "
    "torch.load(file, map_location='cuda')",
    "DDP on a device": "return DistributedDataParallel(module, device_ids=[dist.get_rank()])",
    "refuses in one line": "if not weight.is_cuda: raise TypeError('expected a CUDA tensor')",
    "is one device per rank": "assert torch.cuda.device_count() == dist.get_world_size()",
}
OTHERS = {
    "a copy leaves the GPU": "kept = weight.cpu(); weight += 0; assert kept is not weight; "
    "assert weight.cpu().data_ptr() != weight.data_ptr() != weight.to('cpu').data_ptr()",
    "a tensor stays where it is": "assert weight.cuda() is weight is weight.to(weight.device)",
    "nothing is compiled": "assert torch.compile(ddp) is torch.compile(dynamic=True)(ddp) is ddp",
    "other threads": "errors = []\n"
    "    def work():\n"
    "        try: assert torch.ones(2, device='cuda').is_cuda\n"
    "        except BaseException as error: errors.append(error)\n"
    "    thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    "    assert not errors, errors",
    "hooks": "next(module.parameters()).register_hook("
    "lambda grad: grad + torch.zeros_like(grad, device='cuda') if grad.is_cuda else 1 / 0)",
    "a tuned kernel": "x = own.cuda() + 1; copy = own - own\n"
    "    from spec_tests.tests.rig.kernels import tuned\n"
    "    tuned[lambda meta: (1,)](x, copy, 0, N=4); assert copy[0] == x[0]",
    "meta stays meta": "assert not torch.empty(2, device='meta').is_cuda",
    "a fused optimizer": "torch.optim.AdamW(module.parameters(), fused=True, lr=0.0)",
}
"""What is not refused on a CPU, or not alone."""
if find_spec("triton") is None:
    del OTHERS["a tuned kernel"]


BEYOND = {
    "a graph": "torch.cuda.CUDAGraph()",
    "a sum of float8": "dist.all_reduce(own.to(torch.float8_e4m3fn))",
}
"""What cannot be stood in for."""


def uncompiled(*bodies: str) -> dict[str, str]:
    """Statements that hand such a body to torch.compile."""
    return {each: f"double = torch.compile(lambda t: {each}); double(weight)" for each in bodies}


OPEN = ("t @ t.T.double()", "t.view(-1)[1:].copy_(t.view(-1)[:-1])")
"""Of an operator that raises in what was to be compiled nobody knows whether it would."""
MISTAKEN = ("t.view(-1, 7919)", "t @ t", "torch.distributed.all_gather([t], t[:1])", "[][0]")


# ------------------------------------------------- collectives that NCCL takes and gloo refuses

REFUSED = {
    "a gather into rows": "rows = torch.empty(2, 6); dist.all_gather_into_tensor(rows, own)\n"
    "    assert rows.equal(both)",
    "a scatter of rows": "mine = torch.empty(3); dist.reduce_scatter_tensor(mine, own.view(2, 3))\n"
    "    assert mine.equal(total.view(2, 3)[rank])",
    "a future of a scatter": "mine = torch.empty(3)\n"
    "    work = dist.reduce_scatter_tensor(mine, own, async_op=True)\n"
    "    work.get_future().then(lambda future: mine.div_(2)).wait()\n"
    "    assert mine.equal(total.view(2, 3)[rank] / 2)",
    "a gather of unequal sizes": "found = [torch.empty(1), torch.empty(2)]\n"
    "    dist.all_gather(found, own[: 1 + rank], async_op=True).wait()\n"
    "    assert found[0].equal(both[0, :1]) and found[1].equal(both[1, :2])",
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
    "an average": "dist.all_reduce(own, dist.ReduceOp.AVG, dist.new_group(backend='nccl'))\n"
    "    assert own.equal(total / 2)",
    "gathers in one message": "rows = [torch.empty(2, 6), torch.empty(2, 6)]\n"
    "    with dist._coalescing_manager(async_ops=True) as works:\n"
    "        for each in rows: dist.all_gather_into_tensor(each, own)\n"
    "    works.wait(); assert rows[0].equal(both) and rows[1].equal(both)",
    "a sub-group": "group = dist.new_group([0]); rows = torch.empty(1, 6)\n"
    "    if rank == 0: dist.all_gather_into_tensor(rows, own, group)\n"
    "    assert rank or rows[0].equal(own)",
}
WRONG = {
    "too small an output": "dist.all_gather_into_tensor(torch.empty(2, 5), own)",
    "another dtype": "dist.all_gather_into_tensor(torch.empty(2, 6).double(), own)",
    "rows that do not divide": "dist.reduce_scatter_tensor(torch.empty(4), own)",
    "a list that is too short": "dist.all_gather([torch.empty(6)], own)",
    "unequal sizes, and not one's own": "dist.all_gather([torch.empty(4), torch.empty(5)], own)",
    "a gather to one rank": "dist.gather(own, [torch.empty(2, 3)] * 2 if rank == 0 else None)",
}
"""What NCCL refuses as well."""


FAULTY = {"a key": "weight.is_cuda or {}['cuda']", "an attribute": "module.gpu_buffer"}
"""What speaks of a device, and would fail on one as well."""


NEEDS = ("not here: needs a CUDA device: ", "; --pretend-cuda stands in for one")
GLOO = ("not here: gloo refuses ", "which torch documents and NCCL takes; --pretend-cuda stands in")
NOT_COMPILED = ("is handed to torch.compile, which compiles nothing here",)
Row = tuple[str, bool, Outcome, tuple[str, ...]]


def rows(
    statements: dict[str, str], pretends: bool, outcome: Outcome, said: tuple[str, ...] = ()
) -> dict[str, Row]:
    """A row of each statement: with CUDA stood in for or without, the outcome, and its words."""
    how = "stood in for" if pretends else "without"
    return {f"{name}, {how}": (each, pretends, outcome, said) for name, each in statements.items()}


# A build for CUDA has labels, and asks for a driver before gloo is asked.
OF_A_BUILD = ("nvtx", "a wait on the stream") if torch.version.cuda else ()


def without_those_of_a_build(statements: dict[str, str]) -> dict[str, str]:
    return {name: each for name, each in statements.items() if name not in OF_A_BUILD}


ROWS: dict[str, Row] = {
    **rows(without_those_of_a_build(HABITS), False, Outcome.NOT_HERE, NEEDS),
    **rows(without_those_of_a_build(REFUSED), False, Outcome.NOT_HERE, GLOO),
    **rows(WRONG | FAULTY, False, Outcome.FAILED),
    **rows(WRONG, True, Outcome.FAILED),
    **rows(BEYOND, True, Outcome.NOT_HERE, ("CUDA device",)),
    **rows(uncompiled(*OPEN), True, Outcome.NOT_HERE, NOT_COMPILED),
    **rows(uncompiled(*MISTAKEN), True, Outcome.FAILED),
}
DONE = [*(HABITS | OTHERS | REFUSED | TAKEN | uncompiled("t + t")).values()]
STATEMENTS = [*DONE, *{statement for statement, *_ in ROWS.values()} - {*DONE}]
THING = """
def thing_{}(module):
    weight = next(module.parameters()).detach()
    rank, world = dist.get_rank(), dist.get_world_size()
    own = 1.0 + rank + torch.arange(6.0)
    both = torch.stack([1.0 + torch.arange(6.0), 2.0 + torch.arange(6.0)])
    total = both.sum(0)
    {}
"""
WRAPPER = """
import io, threading
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
{things}
def ddp(given):
    if isinstance(given, int):
        globals()[f"thing_{{given}}"](torch.nn.Linear(6, 5))
        return None
    for number in range({done}):
        globals()[f"thing_{{number}}"](given)
    return DistributedDataParallel(given)
"""


@pytest.fixture(scope="module")
def habits(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, target.Target]:
    """An implementation, with CUDA stood in for or without.

    Its ddp does the statement of a number, or to a module all that is to be done.
    """
    file = tmp_path_factory.mktemp("habits") / "mine.py"
    things = "".join(THING.format(*each) for each in enumerate(STATEMENTS))
    file.write_text(WRAPPER.format(things=things, done=len(DONE)), encoding="utf-8")
    which = impls.parse(str(file))
    return {
        pretends: dataclasses.replace(which, pretends_cuda=pretends) for pretends in (False, True)
    }


@ON_CPU
@pytest.mark.parametrize(("statement", "pretends", "outcome", "said"), ROWS.values(), ids=ROWS)
def test_what_code_for_gpus_does_comes_to(
    module_worlds: Worlds, habits, statement: str, pretends: bool, outcome: Outcome, said
):
    world = module_worlds.world(2, habits[pretends])
    with pytest.raises((RankRaised, unittest.SkipTest)) as caught:
        world.run(bodies.call_ddp, STATEMENTS.index(statement))
    message = runner.message_of(caught.value)
    assert runner.outcome_of(caught.value) is outcome, message
    assert [words for words in said if words not in message] == [], message
    assert not pretends or "stands in for one" not in message, "it does already"


@TRANSPORTS
def test_all_of_it_is_done_where_cuda_is_stood_in_for(
    module_worlds: Worlds, habits, transport: str
):
    known = len(module_worlds.leaks)
    found = judged(habits[True], module_worlds, transport=transport)
    assert found.outcome is Outcome.PASSED, found.message
    # Groups may be kept; a file is open while another rank's thread reads the source of an error.
    others = [leak for leak in module_worlds.leaks[known:] if not leak.endswith("(kept)")]
    assert others == [], "what the stand-in replaces is not the implementation's doing"


@ON_CPU
def test_a_clause_about_compiled_code_is_not_here(module_worlds: Worlds):
    test = test_operator.test_it_is_part_of_one_compiled_graph
    which = dataclasses.replace(impls.parse("solution"), pretends_cuda=True)
    found = judged(which, module_worlds, test, {"world": 1, "subject": "flash_attention"})
    assert found.outcome is Outcome.NOT_HERE, found.message
    assert "torch.compile is not judged where CUDA is stood in for" in found.message


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
    for flat, stacked in module_worlds.world(2, GPU).run(recorded):
        assert flat == stacked == [("gather", 12, 48), ("reduction", 6, 24)]


# ----------------------------------------------------------------------------- who gets the truth


def seen_by_the_suite(ctx: Context) -> list[object]:
    weight = torch.ones(2, requires_grad=True)
    devices = torch.cuda.is_available(), torch.cuda.device_count(), weight.is_cuda
    return [*devices, str(weight.device), weight.cpu() is weight, str(ctx.device)]


@ON_CPU
@TRANSPORTS
def test_the_suite_itself_is_told_the_truth(module_worlds: Worlds, transport: str):
    (seen,) = module_worlds.world(1, GPU, transport=transport).run(seen_by_the_suite)
    assert seen == [False, 0, False, "cpu", True, "cpu"]


MISSING = [
    ("RuntimeError", "0 active drivers ([]). There should only be one."),
    ("ValueError", "q, k and v must be on the GPU"),
]
"""Errors of code that finds no device."""
FAULTS = [
    ("AssertionError", ""),
    ("FileNotFoundError", "no such file: 'data/cuda/weights.bin'"),
    (
        "NotImplementedError",
        "Could not run 'aten::mm' with arguments from the 'SparseCPU' backend. 'aten::mm' "
        "is only available for these backends: [CPU, CUDA, Meta].",
    ),
    ("ValueError", "expected 2, got 3\nnote: set by cuda.py"),
    ("KeyError", "'cuda_streams'"),
    ("UnboundLocalError", "cannot access local variable 'gpu' where it is not associated"),
    ("TypeError", "wrap() got an unexpected keyword argument 'cuda'"),
]
"""Errors that would be raised on a device as well."""


@pytest.mark.parametrize(
    ("kind", "message"), [*MISSING, *FAULTS], ids=lambda words: words[:40] or "no words"
)
def test_a_missing_device_is_told_from_a_fault(kind: str, message: str):
    frames = (Frame("mine.py", 1, "ddp"),)
    bases = tuple(base.__name__ for base in getattr(builtins, kind).__mro__)
    error = RemoteError(kind, bases, message, frames, "", 0)
    assert bool(world._needs_cuda(error)) == ((kind, message) in MISSING)


# --------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("pretends", "transport", "noticed"),
    [(True, "gloo", ["torch", GPU.name]), (False, "gloo", [GPU.name]), (False, "cuda", [])],
    ids=["asked for", "not asked for", "a real device is there"],
)
def test_the_option_pretends_for_all_and_a_courses_layout_does_anyway(
    pretends: bool, transport: str, noticed: list[str]
):
    options = {"--impl": ["torch", GPU.name], "--transport": transport, "--pretend-cuda": pretends}
    run = plugin._make_run(SimpleNamespace(getoption=options.get))  # type: ignore[arg-type]  # all that it asks for
    assert [which.pretends_cuda for which in run.targets] == [pretends, True]
    assert run.notices == [f"{name}: {PRETENDED_CUDA}" for name in noticed]


def test_the_line_to_run_a_clause_again_has_the_option():
    torchs = impls.parse("torch")
    pretending = dataclasses.replace(torchs, pretends_cuda=True)
    for which, has in ((pretending, True), (torchs, False), (GPU, False)):
        rerun = runner.situation(MEAN, which, MEAN_CASE, "").rerun
        assert rerun.endswith("--pretend-cuda") == has


def test_every_report_says_once_that_cuda_was_stood_in_for():
    notice = f"mine.py: {PRETENDED_CUDA}"
    events = log(implementations=["mine.py"], notices=[notice])
    assert as_report(events)["run"]["notices"] == [notice]
    assert render_ending(events).count(notice) == 1
    assert f"- notice: {notice}" in render_summary(events)
    assert render_page(events).count(f'<p class="small">{notice}</p>') == 1
