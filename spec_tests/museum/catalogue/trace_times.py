"""Near-misses of a trace's times: numbers that look right on the trace that somebody looked at."""

from spec_tests.museum.card import Source

TRACE = Source("spec_tests.plain.trace")

TRACE.near_miss(
    "measure.sums-durations",
    ("measure.trace.computation-is-a-union", "measure.trace.any-intervals"),
    "  times = times_of(begin, end, working, sending)",
    "+ works = sum(max(0, min(e, end) - max(b, begin)) for b, e in working)",
    '+ times |= {"compute_us": works, "idle_us": end - begin - works - times["exposed_us"]}',
    does="Computation is the sum of durations.",
    seen="`events.groupby('name').dur.sum()` over operators that nest.",
    unseen="On one stream without nesting it is right.",
)

TRACE.near_miss(
    "measure.sums-communication",
    ("measure.trace.communication-is-a-union", "measure.trace.any-intervals"),
    "  times = times_of(begin, end, working, sending)",
    "+ sent = sum(max(0, min(e, end) - max(b, begin)) for b, e in sending)",
    '+ times |= {"communication_us": sent, "exposed_us": sent - times["overlap_us"]}',
    does="Each collective counts by itself.",
    seen="The same sum over nccl kernels of several groups.",
    unseen="With one group they follow one another.",
)

TRACE.near_miss(
    "measure.fraction-of-step",
    "measure.trace.overlap",
    '- return times["overlap_us"] / sent if sent else None',
    '+ return times["overlap_us"] / times["duration_us"] if sent else None',
    does="The fraction is of the step, not of the communication.",
    seen="A plot of shares of a step.",
    unseen="It lies between 0 and 1.",
)

TRACE.near_miss(
    "measure.nan-fraction",
    "measure.trace.no-communication",
    '- return times["overlap_us"] / sent if sent else None',
    '+ return times["overlap_us"] / sent if sent else math.nan',
    does="Without communication the fraction is NaN.",
    seen="Holistic Trace Analysis on a baseline; a course's notebook plots it.",
    unseen="Everybody looks at runs that communicate.",
)

TRACE.near_miss(
    "measure.by-begin",
    "measure.trace.only-inside-steps",
    "- inside = {at for span in (*working, *sending) for at in span if begin < at < end}",
    "+ working = [span for span in working if begin <= span[0] < end]",
    "+ sending = [span for span in sending if begin <= span[0] < end]",
    "+ inside = {at for span in (*working, *sending) for at in span}",
    does="Whole events count where they begin.",
    seen="Holistic Trace Analysis, which gives each event an iteration.",
    unseen="Steps that end with a synchronisation have nothing across their border.",
)

TRACE.near_miss(
    "measure.wrappers-compute",
    "measure.trace.wrappers-do-not-compute",
    '- named = [e for e in self.operators if "::" in e["name"]]',
    '- working = [e for e in named if e["name"].split("::")[0] not in WRAPPERS]',
    '+ working = [e for e in self.operators if "c10d" not in e["name"]]',
    does="Autograd nodes count as computation.",
    seen="Outermost operators projected onto a stream.",
    unseen="Communication looks well hidden, which pleases.",
)

TRACE.near_miss(
    "measure.waiting-computes",
    "measure.trace.inside-a-collective",
    '- waiting = [e for e in self.operators if "c10d" in e["name"]] + self.gloo',
    "+ waiting = []",
    does="Operators inside a collective count as computation.",
    seen="gloo's workers copy with operators of their own.",
    unseen="On a GPU there is no such thing.",
)

TRACE.near_miss(
    "measure.steps-of-device",
    "measure.trace.device-annotations",
    '- marks = [e for e in self.notes if e["name"].startswith("ProfilerStep#")]',
    '+ marks = [e for e in self.spans if e["name"].startswith("ProfilerStep#")]',
    does="Steps are counted on host and device.",
    seen="A search by name over all events.",
    unseen="On a CPU it is right.",
)

TRACE.near_miss(
    "measure.numbers-from-zero",
    ("measure.trace.every-step", "measure.trace.of-a-run"),
    '- found.append((int(mark["name"].split("#")[1]), begin, end))',
    "+ found.append((len(found), begin, end))",
    does="Steps are numbered anew.",
    seen="`enumerate`.",
    unseen="Traces that begin with step 0.",
)

TRACE.near_miss(
    "measure.ends-with-host",
    "measure.trace.late-kernels",
    '- end = max(begin, end, *(e["ts"] + e["dur"] for e in kernels))',
    "+ end = max(begin, end)",
    does="A step ends with the host's mark.",
    seen="ProfilerStep's own duration.",
    unseen="A loop that prints the loss waits for its device in every step.",
)

TRACE.near_miss(
    "measure.step-per-micro-batch",
    "measure.trace.optimizer-steps",
    '- updates = sum(name.startswith("Optimizer.step#") for name in names)',
    "+ updates = 1",
    does="Takes every ProfilerStep for an optimizer step.",
    seen=(
        "A course steps its profiler per micro-batch and compares 6 of them with 6 of another run."
    ),
    unseen="The numbers are of the right size.",
)
