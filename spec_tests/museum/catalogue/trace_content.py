"""Near-misses of what else a trace holds: collectives, memory, the file itself."""

import math

from spec_tests.museum.card import benign, near_miss
from spec_tests.museum.catalogue.trace_times import Trace


@near_miss("measure.rank-of-file", rejected_by="measure.trace.rank")
class RankOfFile(Trace):
    """The rank is that of the file's name.

    From: `int(path.stem[4])`.
    Unseen: Nobody renames a trace.
    """

    def summary(self):
        return {
            **super().summary(),
            "rank": int(self.path.name[4]) if "rank" in self.path.name else 0,
        }


@near_miss(
    "measure.counts-twice",
    rejected_by=(
        "measure.trace.collectives",
        "measure.trace.collective-bytes",
        "measure.trace.lists-of-tensors",
        "measure.trace.of-a-run",
    ),
)
class CountsBoth(Trace):
    """A collective counts as operator and as annotation.

    From: A search for reduce in the names of all events.
    Unseen: Ratios between runs are right.
    """

    def collectives(self, begin, end):
        found = super().collectives(begin, end)
        return found if self.kernels else found + [e for e in self.gloo() if e not in found]


@near_miss("measure.counts-functional", rejected_by="measure.trace.functional-collectives")
class CountsFunctional(Trace):
    """A functional collective and the one that it asks for count both.

    From: Two namespaces, one list.
    Unseen: Few wrappers use DTensor's collectives.
    """

    def collectives(self, begin, end):
        functional = [
            e for e in self.spans if "_c10d_functional" in e["name"] and "wait" not in e["name"]
        ]
        return super().collectives(begin, end) + functional


@near_miss("measure.counts-outside", rejected_by="measure.trace.collectives-outside")
class CountsOutside(Trace):
    """Collectives of the warm-up count.

    From: Counting over the whole file.
    Unseen: The profiler's schedule hides most of them.
    """

    def collectives(self, begin, end):
        return super().collectives(-math.inf, math.inf)


@near_miss(
    "measure.size-of-input",
    rejected_by=("measure.trace.collectives", "measure.trace.collective-bytes"),
)
class SizeOfInput(Trace):
    """A gather has the size of what a rank gives.

    From: The first size that a trace shows.
    Unseen: Right for all-reduce.
    """

    def payload(self, *sizes):
        return sizes[0] if "dtype" in str(self.kernels) else sizes[-1]


@near_miss("measure.four-bytes", rejected_by="measure.trace.collective-bytes")
class FourBytes(Trace):
    """Every element has four bytes.

    From: `numel * 4`.
    Unseen: Right for float32.
    """

    def size(self, dtype):
        return 4


@near_miss("measure.first-of-list", rejected_by="measure.trace.lists-of-tensors")
class FirstOfList(Trace):
    """Of a list of tensors the first one counts.

    From: `dims[0]`.
    Unseen: Most lists hold one tensor.
    """

    def of_list(self, dims, kinds):
        return super().of_list(dims[:1], kinds[:1])


@near_miss("measure.unknown-is-zero", rejected_by="measure.trace.unknown-bytes")
class UnknownIsZero(Trace):
    """Unknown bytes are zero.

    From: `args.get('Out msg nelems', 0)`.
    Unseen: Somebody else recorded the shapes.
    """

    def added(self, total, more):
        return (total or 0) + (more or 0)


@near_miss("measure.kinds-of-zero", rejected_by="measure.trace.no-collectives")
class EveryKind(Trace):
    """A run of one rank has all-reduces, none of them.

    From: A table with a fixed row.
    Unseen: Zero is right, in a way.
    """

    def counted(self, events):
        none = {"all_reduce": {"count": 0, "bytes": 0}}
        return super().counted(events) or none


@near_miss("measure.no-peak-is-zero", rejected_by="measure.trace.peak-memory")
class NoPeakIsZero(Trace):
    """Without a record of memory the peak is zero.

    From: A course promises a memory analysis of traces recorded without profile_memory.
    Unseen: Whoever looks for it has recorded it.
    """

    def peak(self):
        return super().peak() or 0


@near_miss("measure.needs-blanks", rejected_by="measure.trace.any-form")
class NeedsBlanks(Trace):
    """The rank is read with a pattern that wants a blank.

    From: Holistic Trace Analysis: compact files all belong to rank 0.
    Unseen: PyTorch writes blanks.
    """

    def parsed(self, data):
        found = super().parsed(data)
        if b'"rank": ' not in data:
            found.pop("distributedInfo", None)
        return found


@near_miss("measure.trusts-the-order", rejected_by="measure.trace.any-order")
class FirstIsBegin(Trace):
    """Steps are taken in the order of the file.

    From: A file that happened to be sorted.
    Unseen: Most are.

    Trusts that events lie in the order of time.
    """

    def step_marks(self):
        return [e for e in self.notes if e["name"].startswith("ProfilerStep#")]


@near_miss("measure.repairs-cut-files", rejected_by="measure.trace.refuses")
class RepairsCut(Trace):
    """What is cut off is an empty trace.

    From: `except Exception: return None` in a course's notebook.
    Unseen: Zeros look like a fast run.

    Leaves out what is missing at the end: zeros for whatever was lost.
    """

    def parsed(self, data):
        try:
            return super().parsed(data)
        except ValueError:
            empty = {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#0",
                "ts": 0,
                "dur": 1,
            }
            return {"traceEvents": [{**empty, "args": {}, "tid": 1}]}


@near_miss("measure.no-name-in-error", rejected_by="measure.trace.names-the-file")
class NoNameInError(Trace):
    """The message does not say which file.

    From: A bare JSONDecodeError.
    Unseen: With one file it is known.
    """

    def summary(self):
        try:
            return super().summary()
        except ValueError:
            raise ValueError("expected a trace") from None

    def parsed(self, data):
        try:
            return super().parsed(data)
        except ValueError:
            raise ValueError("expected a trace") from None


@benign("benign.trace-plain")
class TracePlain(Trace):
    """The base of the traces' near-misses: all of the file, border by border."""
