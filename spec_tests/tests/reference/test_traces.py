"""Recording and analysis of traces: what a run did is what its trace says, and nothing is lost."""

import json
import shutil
from collections import Counter

import pytest

from spec_tests.chapters.measure.timeline import Timeline
from spec_tests.impls import parse
from spec_tests.tests.reference.launch import ROOT, run, run_ranks, solution
from spec_tests.tests.reference.training import BASELINE, DDP, FSDP, summary

NUM_STEPS, RECORDED, MICRO_BATCHES = 5, [4, 5], 2
SMALL = (
    *("--vocab-size", 64, "--sequence-length", 8, "--device", "cpu", "--steps", NUM_STEPS),
    *("--out", "run", "--traces", "traces"),
)


def trained(folder, data, module, *flags, num_ranks):
    """A run that records its last two steps; each step has two micro-batches per rank."""
    sizes = ("--global-batch-size", 2 * MICRO_BATCHES * num_ranks, "--micro-batch-size", 2)
    flags = (*SMALL, *sizes, "--data", data, "--profile-steps", 2, *flags)
    run_ranks(module, *flags, num_ranks=num_ranks, folder=folder)


@pytest.fixture(scope="session")
def recorded(data, tmp_path_factory):
    """A folder with the traces of a baseline, of our DDP and of PyTorch's FSDP."""
    folder = tmp_path_factory.mktemp("recorded")
    trained(folder, data, BASELINE, num_ranks=1)
    trained(folder, data, DDP, num_ranks=2)
    trained(folder, data, FSDP, "--impl", "torch", num_ranks=2)
    return folder


def steps_of(path):
    """Step number to the names of what begins in it."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    marks = {e["name"]: e for e in spans if e["name"].startswith("ProfilerStep#")}
    return {
        int(name.partition("#")[2]): Counter(
            e["name"] for e in spans if 0 <= e["ts"] - mark["ts"] < mark["dur"]
        )
        for name, mark in marks.items()
    }


SETUPS = {"baseline": 1, "ddp_bucketed": 2, "fsdp_full_shard_torch": 2}


@pytest.mark.parametrize("setup", SETUPS)
def test_every_optimizer_step_is_one_step_of_the_trace(recorded, setup):
    found = sorted((recorded / "traces" / setup).iterdir())

    assert [path.name for path in found] == [f"rank{r}_trace.json" for r in range(SETUPS[setup])]
    for rank, path in enumerate(found):
        steps = steps_of(path)
        assert [*steps] == RECORDED, "by their numbers in the log, the last one too"
        for names in steps.values():
            updates = sum(n for name, n in names.items() if name.startswith("Optimizer.step#"))
            assert updates == 1
            assert names["aten::_scaled_dot_product_flash_attention_for_cpu"] % MICRO_BATCHES == 0
            assert names["aten::cross_entropy_loss"] == MICRO_BATCHES
        info = json.loads(path.read_text())["distributedInfo"]
        assert (info["rank"], info["world_size"]) == (rank, SETUPS[setup])


def named(ctx, folder, name):
    """The named collectives of a step of rank 0: those the run counted, and those of its trace."""
    path = folder / "traces" / name / "rank0_trace.json"
    traced = solution("measure.trace").summarize_trace(path)
    told = json.loads((folder / "run" / f"{name}.rank0.json").read_text())["collectives"]
    pairs = (told, 1), (traced["collectives"], len(traced["steps"]))
    return [
        {kind: one["count"] / steps for kind, one in collectives.items() if "calls" in one}
        for collectives, steps in pairs
    ]


# Four blocks and the root, which stays unsharded until the backward; gradients are reduced once.
GATHERS = {"FULL_SHARD": 5 + 4, "SHARD_GRAD_OP": 5}


@pytest.mark.parametrize(("strategy", "num_ranks"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2)])
def test_a_gather_is_read_off_by_name_whatever_carries_it(
    worlds, data, tmp_path, strategy, num_ranks
):
    trained(tmp_path, data, FSDP, "--strategy", strategy, num_ranks=num_ranks)

    world, name = worlds.world(1, parse("solution")), f"fsdp_{strategy.lower()}"
    told, traced = world.run(named, tmp_path, name, timeout_s=120.0)[0]

    expected = {"all_gather_rows": GATHERS[strategy] * MICRO_BATCHES, "reduce_scatter_sum": 5}
    assert told == traced == expected


def test_the_trace_holds_what_was_sent(recorded):
    # Two instruments that know nothing of each other: a dispatch mode, and the profiler.
    for setup in ("ddp_bucketed", "fsdp_full_shard_torch"):
        told = summary(recorded / "run", f"{setup}.rank0")
        steps = steps_of(recorded / "traces" / setup / "rank0_trace.json")
        expected = told["messages_per_step"] + told["control_messages_per_step"]
        for names in steps.values():
            sent = {name: n for name, n in names.items() if name.startswith("c10d::")}
            assert sum(sent.values()) == expected, sent


def test_the_profiler_says_nothing_between_the_steps(recorded):
    said = "".join(path.read_text() for path in recorded.glob("rank*.err"))
    assert "USDT" not in said


def test_recording_changes_no_number_and_replaces_no_trace(recorded, data, tmp_path):
    before = summary(recorded / "run")
    flags = (*SMALL, "--global-batch-size", 4, "--micro-batch-size", 2, "--data", data)

    run(BASELINE, *flags, folder=tmp_path)
    says = "expected no rank*_trace.json* in traces/baseline, got 1 of an earlier run"
    again = run(BASELINE, *flags, "--profile-steps", 1, folder=recorded, status=2, says=says)

    assert summary(tmp_path / "run")["weights_sha256"] == before["weights_sha256"]
    assert not (tmp_path / "traces").exists()
    assert "rank0_trace.json" in again.err


REFUSED = {
    "--profile-steps=3": "expected at least 6 steps to record 3 after 3 of warm-up, got 5",
    "--memory-snapshot": "expected a GPU for memory_snapshot, got cpu",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_cannot_be_recorded_is_refused_before_training(data, tmp_path, flag):
    flags = (*SMALL, "--global-batch-size", 4, "--micro-batch-size", 2, "--data", data, flag)

    ended = run(BASELINE, *flags, folder=tmp_path, status=2, says=REFUSED[flag])

    assert "step " not in ended.out


def test_a_run_that_goes_on_and_cannot_record_any_more_says_so(data, tmp_path):
    sizes = ("--global-batch-size", 4, "--micro-batch-size", 2, "--data", data)
    flags = (*SMALL, *sizes, "--checkpoint-dir", "saved", "--save-every", 2, "--profile-steps", 1)
    run(BASELINE, *flags, folder=tmp_path)
    ended = {"done": run(BASELINE, *flags, folder=tmp_path).out}
    for why in ("no rank*_trace.json* in", "at least 4 steps to record 1 after 3 of warm-up"):
        shutil.rmtree(tmp_path / "saved" / "step-00000005")
        ended[why] = run(BASELINE, *flags, folder=tmp_path).out
        shutil.rmtree(tmp_path / "traces", ignore_errors=True)

    assert "recording" not in ended.pop("done"), "there was nothing left to do"
    for why, out in ended.items():
        assert f"going on without a recording: expected {why}" in out
        assert "step     5 |" in out


# ---------------------------------------------------------------------------------------- analysis


def test_the_analysis_says_where_the_time_went(recorded, tmp_path):
    traces = recorded / "traces"
    ended = run("solution.analyze_traces", traces, "--out", "an", folder=tmp_path)

    lines = ended.out.splitlines()
    assert [line.split()[:3] for line in lines[1:6]] == [
        ["baseline", "0", "2"],
        *(["ddp_bucketed", str(rank), "2"] for rank in range(2)),
        *(["fsdp_full_shard_torch", str(rank), "2"] for rank in range(2)),
    ]
    found = json.loads((tmp_path / "an" / "traces.json").read_text())
    for ranks in found["setups"].values():
        for rank in ranks:
            total = rank["total"]
            parts = total["compute_us"] + total["exposed_us"] + total["idle_us"]
            assert parts == pytest.approx(total["duration_us"])
            assert rank["peak_memory_bytes"] > 0


PROGRAM = """
import json, sys
from solution.analyze_traces import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), file=sys.stderr)
"""


def test_what_is_no_run_is_refused(tmp_path):
    def write(setup, *ranks, steps=(1,), world_size=2, cut=0):
        (tmp_path / setup / "run").mkdir(parents=True)
        for rank in ranks:
            line = Timeline(rank=rank, world_size=world_size if rank else 2)
            for step in steps if rank else (1,):
                line.step(step, 100 * step, 100 * step + 100)
            data = line.data()
            path = tmp_path / setup / "run" / f"rank{rank}_trace.json"
            path.write_bytes(data[: len(data) - cut])

    write("whole", 0, 1)
    write("absent", 0)
    write("mixed", 0, 1, world_size=4)
    write("other-steps", 0, 1, steps=(1, 2))
    write("cut", 0, cut=40)
    write("unreadable", 1)
    (tmp_path / "unreadable" / "run" / "rank0_trace.json").mkdir()  # as no right lets root fail
    (tmp_path / "none").mkdir()
    cases = {
        "whole": "",
        "absent": "expected the traces of ranks {0, 1}, once each, got those of [0]; copy the",
        "mixed": "expected the files of one run, got world size, device and steps [(2, 'cpu', [1])",
        "other-steps": "[1]), (2, 'cpu', [1, 2])]; files of different runs lie in one folder",
        "cut": "rank0_trace.json: expected the whole JSON of a trace",
        "unreadable": "rank0_trace.json: expected a trace, got Is a directory; see which files",
        "none": "expected SETUP/rankN_trace.json, got no such file; record some with",
        "no-folder": "expected SETUP/rankN_trace.json, got no such file; record some with",
    }
    says = [*cases.values()]

    arguments = json.dumps([[name, "--out", f"out/{name}"] for name in cases])
    ended = run(PROGRAM, arguments, folder=tmp_path)

    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    statuses = [int(line) for line in lines if line.isdigit()]
    errors = [line for line in lines if not line.isdigit()]
    assert statuses == [0] + [2] * (len(says) - 1)
    assert len(errors) == len(says) - 1
    for error, wanted in zip(errors, says[1:], strict=True):
        assert wanted in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


# ---------------------------------------------------------------------------------------- notebook

NOTEBOOK = ROOT / "solution" / "analyze_traces.ipynb"
CELLS = """
import sys
names = {"__name__": "__main__"}
import json
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
print(sorted(names["setups"]))
"""


def test_the_notebook_runs_as_it_stands(recorded):
    folder = recorded / "elsewhere"
    folder.mkdir()
    (folder / "outputs").mkdir()
    (folder / "outputs" / "traces").symlink_to(recorded / "traces")

    ended = run(CELLS, NOTEBOOK, folder=folder)

    assert ended.out.splitlines()[-1] == str(sorted(SETUPS))
    assert "ddp_bucketed" in ended.out
