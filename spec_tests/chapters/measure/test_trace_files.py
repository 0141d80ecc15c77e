"""Files of traces: any form of a right one gives the same answer, what is none is refused.

A run that was killed leaves half a file; a tool that shrinks traces leaves a compact one; somebody
gives the config in place of the trace. An analysis that answers all the same, with zeros, is worse
than none.
"""

from __future__ import annotations

import json
import random

import pytest

from spec_tests.chapters.measure.timeline import DEVICES, TRACE, Timeline, observed, summary
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


def example_of(device="cpu"):
    """A timeline with something of everything."""
    first = "step 0 0-1000, work 100-500, all_reduce 400-700, update 800-900"
    second = "step 1 1000-2000, work 1100-1500, all_reduce 1400-1700, update 1800-1900"
    line = Timeline.of(f"{first}, {second}", device, rank=1, world_size=2)
    line.memory(100, 5000, device_type=device == "cuda")
    return line


@clause(
    "measure.trace.any-form",
    source="contract: steps; another tool finds rank 0 in every compact file",
)
@pytest.mark.parametrize("form", ["compact", "gzip"])
def test_every_form_of_a_file_says_the_same(world, subject, form):
    """A compact or gzipped trace MUST give the same results as the trace that PyTorch writes."""
    line = example_of()

    found = observed(world, line, form=form)

    judge.equal([found], observed(world, line), quantity=f"summary of the {form} file")


@clause(
    "measure.trace.any-order",
    source="contract: steps; "
    "torch.profiler writes events thread by thread, steps after what is inside them",
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_order_of_events_does_not_matter(world, subject, device):
    """The order of events MUST NOT matter: files are ordered by thread, not by time."""
    line = example_of(device)
    expected = observed(world, line)

    random.Random(7).shuffle(line.events)

    judge.equal([observed(world, line)], expected, quantity="summary of shuffled events")


NAME = "the_bad_one.json"
BAD = {
    "missing": lambda: None,
    "empty": lambda: b"",
    "no-text": lambda: bytes(range(128, 256)),
    "no-json": lambda: b"step 1 | loss 11.04\n",
    "cut-off": lambda: example_of().data()[:-700],
    "cut-off-compact": lambda: example_of().data("compact")[:-200],
    "cut-off-gzip": lambda: example_of().data("gzip")[:-40],
    "foreign": lambda: json.dumps({"model": "gpt2", "steps": 20}).encode(),
    "list": lambda: json.dumps(list(range(5))).encode(),
    "no-events": lambda: json.dumps({"schemaVersion": 1, "traceEvents": []}).encode(),
    "no-steps": lambda: Timeline.of("work 100-200").data(),
}


@clause(
    "measure.trace.refuses", source="contract: refuses; a run too short to record leaves no step"
)
@pytest.mark.parametrize("bad", list(BAD))
def test_what_is_no_whole_trace_is_refused(world, subject, bad):
    """A file without a whole trace and a step MUST be a ValueError or OSError, never zeros."""
    ranks = world.run(refusal.raised, summary, BAD[bad](), NAME)
    refusal.of_kinds(ranks, "ValueError", "OSError", given=f"a file that is {bad}")


@clause(
    "measure.trace.names-the-file",
    level="production",
    source="contract: names-file; sixteen files of one folder: which?",
)
@pytest.mark.parametrize("bad", list(BAD))
def test_the_refusal_names_the_file(world, subject, bad):
    """The message about a bad trace MUST name the file."""
    (found,) = world.run(refusal.raised, summary, BAD[bad](), NAME)

    said = repr(found["text"]) if found["error"] else f"no error, but {found['returned']}"
    judge.holds(NAME in found["text"], f"expected the name in {said}")
