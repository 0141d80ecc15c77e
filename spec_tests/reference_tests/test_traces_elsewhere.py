"""Ours beside Holistic Trace Analysis (package `traceinsight`), where that is installed.

On traces of a GPU both must find the same; on traces of a CPU ours has an answer and the other has
none. It counts kernels by where they were launched, leaves out the last step unless told otherwise,
and counts idle time from the first kernel to the last only.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest

from spec_tests.measure.timeline import Timeline
from spec_tests.reference_tests.launch import answer, fresh_lines

pytestmark = pytest.mark.skipif(
    find_spec("hta") is None,
    reason="Holistic Trace Analysis is not installed: pip install 'trainspec[analysis]'",
)

THEIRS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis

def numbers(**options):
    analysis = TraceAnalysis(trace_dir=sys.argv[1], **options)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    times = analysis.get_temporal_breakdown(visualize=False)
    return [overlap.comp_comm_overlap_pctg.tolist(), times["compute_time(us)"].tolist(),
            times["non_compute_time(us)"].tolist()]

found = {"all": numbers(include_last_profiler_step=True), "default": numbers()}
on_cpu = TraceAnalysis(trace_dir=sys.argv[2])
overlap = on_cpu.get_comm_comp_overlap(visualize=False)
found["overlap on a CPU"] = str(overlap.comp_comm_overlap_pctg.tolist()[0])
try:
    on_cpu.get_temporal_breakdown(visualize=False)
except Exception as error:
    found["breakdown on a CPU"] = type(error).__name__
print(json.dumps(found))
"""
OURS = """
import json, sys
from solution import summarize_trace
print(json.dumps([summarize_trace(path) for path in sys.argv[1:]]))
"""


def write(folder, device, *, num_steps=3):
    """Two ranks, each with steps of the same known content."""
    folder.mkdir()
    for rank in range(2):
        line = Timeline(device, rank=rank, world_size=2)
        for number in range(num_steps):
            begin = 1000 * number
            line.step(number, begin, begin + 1000)
            for start, end in ((100, 300), (300, 500), (800, 900)):
                line.work(begin + start, begin + end)
            line.send(begin + 400, begin + 700)
        (folder / f"rank{rank}_trace.json").write_bytes(line.data())
    return folder


def test_both_find_what_was_computed_by_hand(tmp_path):
    gpu, cpu = write(tmp_path / "gpu", "cuda"), write(tmp_path / "cpu", "cpu")

    theirs = json.loads(fresh_lines(THEIRS, gpu, cpu, environment=os.environ)[-1])
    files = [gpu / "rank0_trace.json", gpu / "rank1_trace.json", cpu / "rank0_trace.json"]
    ours = answer(OURS, *files, folder=tmp_path)

    for rank in range(2):
        total = ours[rank]["total"]
        found = [each[rank] for each in theirs["all"]]
        assert found == [33.33, total["compute_us"], total["exposed_us"]] == [33.33, 1500, 600]
        assert round(100 * total["overlap_fraction"], 2) == 33.33
        assert [each[rank] for each in theirs["default"]] == [33.33, 1000, 400], "two of three"
    assert theirs["overlap on a CPU"] == "nan"
    assert theirs["breakdown on a CPU"] == "IndexError"
    assert ours[2]["total"] == ours[0]["total"]
