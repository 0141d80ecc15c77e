"""Near-misses of a trace's times: numbers that look right on the trace that somebody looked at."""

from spec_tests.museum.card import Source

TRACE = Source("spec_tests.plain.trace", alone=True)

TRACE.near_miss(
    "measure.sums-durations",
    ("measure.trace.computation-is-a-union", "measure.trace.any-intervals"),
    "          found[name] += (end - begin) * counts",
    "- return found",
    '+ return found | {"compute_us": sum(e - b for b, e in working)}',
    does="Computation is the sum of durations.",
    seen="`events.groupby('name').dur.sum()` over operators that nest.",
    unseen="On one stream without nesting it is right.",
)

TRACE.near_miss(
    "measure.sums-communication",
    ("measure.trace.communication-is-a-union", "measure.trace.any-intervals"),
    "          found[name] += (end - begin) * counts",
    "- return found",
    "+ sent = sum(e - b for b, e in sending)",
    '+ return found | {"communication_us": sent, "exposed_us": sent - found["overlap_us"]}',
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
    "- return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]",
    "+ return [(b, e) for b, e in spans if begin <= b < end]",
    does="Whole events count where they begin.",
    seen="Holistic Trace Analysis, which gives each event an iteration.",
    unseen="Steps that end with a synchronisation have nothing across their border.",
)

TRACE.near_miss(
    "measure.wrappers-compute",
    "measure.trace.wrappers-do-not-compute",
    "- return bool(separator) and namespace not in wrappers",
    '+ return "c10d" not in name',
    does="Autograd nodes count as computation.",
    seen="Outermost operators projected onto a stream.",
    unseen="Communication looks well hidden, which pleases.",
)

TRACE.near_miss(
    "measure.waiting-computes",
    "measure.trace.inside-a-collective",
    '- return [e for e in (*asked, *self.gloo()) if e["tid"] == thread]',
    "+ return []",
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
    '- found.append((int(mark["name"].split("#")[1]), begin, max(end, late, begin)))',
    "+ found.append((len(found), begin, max(end, late, begin)))",
    does="Steps are numbered anew.",
    seen="`enumerate`.",
    unseen="Traces that begin with step 0.",
)

TRACE.near_miss(
    "measure.ends-with-host",
    "measure.trace.late-kernels",
    "- return max(ends, default=end)",
    "+ return end",
    does="A step ends with the host's mark.",
    seen="ProfilerStep's own duration.",
    unseen="A loop that prints the loss waits for its device in every step.",
)

TRACE.near_miss(
    "measure.step-per-micro-batch",
    "measure.trace.optimizer-steps",
    '- return sum(name.startswith("Optimizer.step#") for name in names)',
    "+ return 1",
    does="Takes every ProfilerStep for an optimizer step.",
    seen=(
        "A course steps its profiler per micro-batch and compares 6 of them with 6 of another run."
    ),
    unseen="The numbers are of the right size.",
)
