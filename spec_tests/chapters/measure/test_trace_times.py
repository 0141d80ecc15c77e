"""Times of a trace: what computes, what communicates, what of it at once, and what neither.

All are lengths of unions of intervals. Operators nest, streams and threads run side by side: who
sums durations finds more computation than there was time, and an overlap above 100 percent.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spec_tests.chapters.measure.timeline import DEVICES, TIMES, TRACE, Timeline, judged
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


@clause(
    "measure.trace.computation-is-a-union",
    source="contract: computation, operators, times; operators nest and streams run side by side",
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_computes_at_once_counts_once(world, subject, device):
    """Computation MUST be the time in which something computes, however much of it at once."""
    line = Timeline.of("step 0 0-1000", device)
    line.work(100, 300, name="aten::linear")
    line.work(150, 250, name="aten::addmm")  # inside the first
    line.play("work 200-400 @1, work 400-500, work 700-750")  # beside it, next to it
    judged(world, line, compute_us=450, idle_us=550, duration_us=1000)


@clause(
    "measure.trace.communication-is-a-union",
    source="contract: communication, times; gloo has two workers, nccl a stream per group",
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_at_once_counts_once(world, subject, device):
    """Communication MUST be the time in which a collective is under way, or several are."""
    script = "step 0 0-1000, all_reduce 100-500, all_reduce 200-600 @1, all_gather 800-900"
    line = Timeline.of(script, device)
    sent = {"communication_us": 600, "exposed_us": 600, "overlap_us": 0, "overlap_fraction": 0}
    judged(world, line, compute_us=0, **sent)


@clause(
    "measure.trace.overlap",
    source="contract: times; Holistic Trace Analysis finds 33.33 percent in the same trace",
)
@pytest.mark.parametrize("device", DEVICES)
def test_overlap_is_communication_while_something_computes(world, subject, device):
    """Overlap MUST be the part of communication in which something computes."""
    line = Timeline.of("step 0 0-1000, work 100-300, work 300-500, work 800-900", device)
    line.play("work 420-480 @1")  # at once with the second: no overlap of its own
    line.play("all_reduce 400-700")
    sent = {"communication_us": 300, "overlap_us": 100, "exposed_us": 200}
    judged(world, line, compute_us=500, idle_us=300, overlap_fraction=1 / 3, **sent)


@clause(
    "measure.trace.no-communication", source="contract: fraction; Holistic Trace Analysis gives NaN"
)
@pytest.mark.parametrize("device", DEVICES)
def test_without_communication_there_is_no_fraction(world, subject, device):
    """Without communication the fraction MUST be None: zero, or NaN, would be a measurement."""
    expected = {"communication_us": 0, "overlap_us": 0, "exposed_us": 0, "overlap_fraction": None}
    line = Timeline.of("step 0 0-100, work 10-40", device)
    judged(world, line, steps={0: expected}, idle_us=70, **expected)


@clause(
    "measure.trace.only-inside-steps",
    source="contract: times; a profiler records what runs before the first step, and evaluations",
)
def test_what_lies_outside_of_steps_does_not_count(world, subject):
    """A time MUST hold the work inside the step, and of work across its border the inner part."""
    # Across the begin; across the end and into the next, twice; out of all.
    script = "work 0-50, work 80-120, work 180-320, all_reduce 190-310, work 490-600"
    steps = {
        4: {"duration_us": 100, "compute_us": 40, "communication_us": 10, "overlap_us": 10},
        5: {"duration_us": 200, "compute_us": 30, "communication_us": 10, "idle_us": 170},
    }
    total = {"duration_us": 300, "compute_us": 70, "communication_us": 20}
    judged(world, Timeline.of(f"step 4 100-200, step 5 300-500, {script}"), steps=steps, **total)


@clause(
    "measure.trace.wrappers-do-not-compute",
    source="contract: wrappers; a hook that waits lies inside its autograd node",
)
def test_what_only_calls_others_does_not_compute(world, subject):
    """Nodes of autograd, annotations and bare names MUST NOT count as computation.

    A backward hook that waits for a collective lies inside its node: counted as computation, the
    dearest communication there is looks hidden.
    """
    line = Timeline.of("step 0 0-1000, work 120-220 @1, all_reduce 310-590")
    line.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 100, 600, thread=2)
    line.add("cpu_op", "MmBackward0", 110, 590, thread=2)
    line.add("cpu_op", "torch::autograd::AccumulateGrad", 300, 600, thread=2)
    line.add("user_annotation", "FSDP::post_backward_reduce (0)", 300, 600, thread=2)

    judged(world, line, compute_us=100, overlap_us=0, exposed_us=280)


@clause(
    "measure.trace.inside-a-collective",
    source="contract: inside; gloo's workers copy with operators",
)
def test_operators_inside_a_collective_do_not_compute(world, subject):
    """Operators inside a collective on its thread MUST NOT count as computation."""
    # Another thread goes on.
    line = Timeline.of("step 0 0-1000, all_reduce 100-400, work 350-450 @1")
    line.add("cpu_op", "aten::copy_", 150, 250, thread=100)  # gloo's own worker
    line.add("cpu_op", "_c10d_functional::wait_tensor", 300, 500)
    line.add("cpu_op", "aten::empty", 310, 320)
    line.add("cpu_op", "aten::to", 480, 700)  # half of it waits

    sent = {"communication_us": 300, "overlap_us": 50, "exposed_us": 250}
    judged(world, line, compute_us=300, **sent)


@clause(
    "measure.trace.device-annotations",
    source="contract: steps, kernels; "
    "torch.profiler repeats annotations on the device's time line (gpu_user_annotation)",
)
def test_annotations_on_the_device_are_no_work(world, subject):
    """Annotations repeated on the device's time line MUST NOT count as kernels, nor as steps."""
    line = Timeline.of("step 3 0-1000, work 100-300, all_reduce 500-600", "cuda")
    line.add("gpu_user_annotation", "ProfilerStep#3", 100, 900, thread=7)
    line.add("gpu_user_annotation", "nccl:all_reduce", 400, 800, thread=20)
    line.kernel("Memcpy HtoD (Pageable -> Device)", 300, 350, 7, category="gpu_memcpy")
    line.add("cpu_op", "aten::mm", 0, 1000)  # the host is not what computes here

    judged(world, line, steps={3: {}}, compute_us=250, communication_us=100, idle_us=650)


def _spans(limit):
    pairs = st.tuples(st.integers(0, limit), st.integers(0, limit // 2))
    return st.lists(pairs.map(lambda p: (p[0], min(limit, p[0] + p[1]))), max_size=6)


@clause(
    "measure.trace.any-intervals", source="contract: times; compute + exposed + idle is the step"
)
@given(work=_spans(40), sent=_spans(40), is_cuda=st.booleans())
@example(work=[(0, 10), (0, 10), (10, 20)], sent=[(5, 10), (10, 15)], is_cuda=True)
@example(work=[], sent=[(0, 40)], is_cuda=False)
def test_any_intervals_are_counted_right(world, subject, work, sent, is_cuda):
    """For any intervals, every time MUST equal a count microsecond by microsecond."""
    line = Timeline("cuda" if is_cuda else "cpu")
    line.step(0, 0, 40)
    for number, (begin, end) in enumerate(work):
        line.work(begin, end, lane=number % 2)
    for number, (begin, end) in enumerate(sent):
        line.send(begin, end, lane=number % 2)

    busy = {at for begin, end in work for at in range(begin, end)}
    sending = {at for begin, end in sent for at in range(begin, end)}
    counted = (40, len(busy), len(sending), len(busy & sending), len(sending - busy))
    expected = dict(zip(TIMES, (*counted, 40 - len(busy | sending)), strict=True))
    judged(world, line, **expected, given=f"computes {work}, communicates {sent}")
