"""Near-misses of what else a trace holds: collectives, memory, the file itself."""

from spec_tests.museum.card import Source

TRACE = Source("spec_tests.plain.trace")

TRACE.near_miss(
    "measure.rank-of-file",
    "measure.trace.rank",
    '- "rank": info["rank"],',
    '+ "rank": int(self.path.name[4]) if "rank" in self.path.name else 0,',
    does="The rank is that of the file's name.",
    seen="`int(path.stem[4])`.",
    unseen="Nobody renames a trace.",
)

TRACE.near_miss(
    "measure.counts-functional",
    "measure.trace.functional-collectives",
    '- asked = [e for e in self.operators if e["name"].startswith("c10d::")]',
    '+ asked = [e for e in self.operators if "c10d" in e["name"] and "wait" not in e["name"]]',
    does="A functional collective and the one that it asks for count both.",
    seen="Two namespaces, one list.",
    unseen="Few wrappers use DTensor's collectives.",
)

TRACE.near_miss(
    "measure.counts-outside",
    "measure.trace.collectives-outside",
    '- for event in [e for e in sent if begin <= e["ts"] <= end]:',
    "+ for event in sent:",
    does="Collectives of the warm-up count.",
    seen="Counting over the whole file.",
    unseen="The profiler's schedule hides most of them.",
)

TRACE.near_miss(
    "measure.size-of-input",
    ("measure.trace.collectives", "measure.trace.collective-bytes"),
    '- return max(args["In msg nelems"], args["Out msg nelems"]) * size_of(args["dtype"])',
    '+ return args["In msg nelems"] * size_of(args["dtype"])',
    "...",
    "- return max(sizes)",
    "+ return sizes[-1]",
    does="Counts for a gather the size of one rank's input.",
    seen="The first size that a trace shows.",
    unseen="Right for all-reduce.",
)

TRACE.near_miss(
    "measure.first-of-list",
    "measure.trace.lists-of-tensors",
    '- pairs = zip(dims, noted[0]["Input type"], strict=True)',
    '+ pairs = zip(dims[:1], noted[0]["Input type"][:1], strict=True)',
    does="Of a list of tensors the first one counts.",
    seen="`dims[0]`.",
    unseen="Most lists hold one tensor.",
)

TRACE.near_miss(
    "measure.unknown-is-zero",
    "measure.trace.unknown-bytes",
    '- entry["bytes"] = None if size is None or total is None else total + size',
    '+ entry["bytes"] = total + (size or 0)',
    does="Unknown bytes are zero.",
    seen="`args.get('Out msg nelems', 0)`.",
    unseen="Somebody else recorded the shapes.",
)

TRACE.near_miss(
    "measure.kinds-of-zero",
    "measure.trace.no-collectives",
    '      entry["bytes"] = None if size is None or total is None else total + size',
    "- return found",
    '+ return found or {"all_reduce": {"count": 0, "bytes": 0}}',
    does="A run of one rank has all-reduces, none of them.",
    seen="A table with a fixed row.",
    unseen="Zero is right, in a way.",
)

TRACE.near_miss(
    "measure.no-peak-is-zero",
    "measure.trace.peak-memory",
    "- return max(totals, default=None)",
    "+ return max(totals, default=0)",
    does="Without a record of memory the peak is zero.",
    seen="A course promises a memory analysis of traces recorded without profile_memory.",
    unseen="Users who look for it have recorded it.",
)

TRACE.near_miss(
    "measure.needs-blanks",
    "measure.trace.any-form",
    '      raise ValueError(f"{self.path}: expected traceEvents, got {str(found)[:80]}")',
    "+ if b'\"rank\": ' not in data:",
    '+     found.pop("distributedInfo", None)',
    does="The rank is read with a pattern that wants a blank.",
    seen="Holistic Trace Analysis: compact files all belong to rank 0.",
    unseen="PyTorch writes blanks.",
)

TRACE.near_miss(
    "measure.trusts-the-order",
    "measure.trace.any-order",
    '- for mark in sorted(marks, key=lambda e: e["ts"]):',
    "+ for mark in marks:",
    does="Steps are taken in the order of the file.",
    seen="A file that happened to be sorted.",
    unseen="Most are.",
)

TRACE.near_miss(
    "measure.repairs-cut-files",
    "measure.trace.refuses",
    '- raise ValueError(f"{self.path}: expected a whole trace, got {error}") from error',
    '+ mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 1}',
    '+ return {"traceEvents": [{**mark, "args": {}, "tid": 1}]}',
    does="Reads a trace that is cut off as an empty one.",
    seen="`except Exception: return None` in a course's notebook.",
    unseen="Zeros look like a fast run.",
)

TRACE.near_miss(
    "measure.no-name-in-error",
    "measure.trace.names-the-file",
    '- raise ValueError(f"{self.path}: expected a whole trace, got {error}") from error',
    '+ raise ValueError("expected a trace") from error',
    "...",
    '- raise ValueError(f"{self.path}: expected traceEvents, got {str(found)[:80]}")',
    '+ raise ValueError("expected a trace")',
    "...",
    '- raise ValueError(f"{self.path}: expected a ProfilerStep, got none")',
    '+ raise ValueError("expected a trace")',
    does="The message does not say which file.",
    seen="A bare JSONDecodeError.",
    unseen="With one file it is known.",
)

TRACE.benign(
    "benign.trace-plain",
    does="The base of the traces' near-misses: all of the file, border by border.",
)
