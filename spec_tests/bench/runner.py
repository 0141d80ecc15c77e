"""One declaration per benchmark, and what runs them all.

A `Benchmark` says what is measured, beside what, and what must hold; `Comparison` is the common
form of it: in the ranks `arms` builds the things that are compared, in the parent every case
becomes a table of `columns` and every bound a line of `bounds`. `run` reads the options, measures
section by section and writes `NAME.md` to read and `NAME.json` to compute with.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.bench import machine, paired
from spec_tests.bench.paired import Arm, Found, Ratio
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.text import grid

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Section:
    """A part of the page: Markdown below a heading (or none), and the same as data."""

    heading: str
    blocks: Sequence[str]
    record: Any = None

    @property
    def text(self) -> str:
        """The Markdown, without a newline at its end."""
        return "\n\n".join(
            [f"## {self.heading}"] * bool(self.heading) + [*filter(None, self.blocks)]
        )


class Benchmark:
    """What is measured, and what must hold; `note` and `device` may be set while measuring."""

    name: str  # of the module and of the files that are written
    title: str  # of the page
    note: str = ""  # what the page says about how it was measured
    device: str = ""  # what the page names instead of the CPU
    options: Mapping[str, Any] = {}  # of the command, each with what `add_argument` takes

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's options."""
        for name, how in self.options.items():
            parser.add_argument(name, **how)

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """Measure; yield each part of the page as soon as it is done."""
        raise NotImplementedError

    def chosen(self, options: argparse.Namespace) -> Benchmark:
        """Return the benchmark that the options ask for: another one on another device."""
        return self


# ----------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """What is measured, how, and what must hold of its median: "at least" or "at most" a bound."""

    label: str
    measure: Callable[[Worlds], float]
    relation: str = ""
    bound: float = 0.0

    def row(self, values: Sequence[float]) -> list[str]:
        """Return median and range."""
        form = ".3g" if statistics.median(values) < 100 else ".0f"
        shown = (statistics.median(values), min(values), max(values))
        return [self.label, *(f"{value:{form}}" for value in shown)]

    def verdict(self, values: Sequence[float]) -> str:
        """Return whether the median holds."""
        middle, is_least = statistics.median(values), self.relation == "at least"
        holds = middle >= self.bound if is_least else middle <= self.bound
        return verdict(holds, f"{self.label} {middle:.3g}, {self.relation} {self.bound:g}")


class Figures(Benchmark):
    """Figures that are compared with bounds, and with nothing else; by the name in the data."""

    figures: Mapping[str, Figure]
    options = {"--repetitions": {"type": int, "default": 5, "help": "of each figure"}}

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """All figures, in turn, so that a slow moment meets all of them."""
        found: dict[str, list[float]] = {name: [] for name in self.figures}
        for _ in range(options.repetitions):
            for name, figure in self.figures.items():
                found[name].append(figure.measure(worlds))
        rows = [["what", "median", "lowest", "highest"]]
        rows += [figure.row(found[name]) for name, figure in self.figures.items()]
        said = [f.verdict(found[name]) for name, f in self.figures.items() if f.relation]
        yield Section("", [grid(rows), bullets(said)], found)


# ----------------------------------------------------------------------------- paired comparisons


@dataclass(frozen=True)
class Case:
    """One table: on how many ranks, how much is timed, and what must hold.

    `limits` is base to what the upper end of an implementation's ratio to it may be.
    """

    heading: str  # empty where there is one table only
    size: str = ""  # of the model, where there are several
    num_ranks: int = 2
    num_steps: int = 1  # that an arm runs in a round
    num_rounds: int = 20
    limits: Mapping[str, float] = field(default_factory=dict)


Column = Callable[[Found, str], str]


def milliseconds(form: str, clock: str = "seconds") -> Column:
    """Return the column of medians: of a step, on the slowest rank or on all cores."""
    return lambda found, label: format(found.ms(clock)[label], form)


def against(base: str) -> Column:
    """Return the column of ratios to an arm."""
    return lambda found, label: str(found.against(base).get(label, 1))


def times(form: str, *bases: str) -> dict[str, Column]:
    """Return the usual columns: medians by both clocks, and the ratios to each base."""
    ratios = {f"against {base}": against(base) for base in bases}
    return {"ms": milliseconds(form), "core ms": milliseconds(form, "core_seconds"), **ratios}


def mebibytes(fact: str, form: str) -> Column:
    """Return the column of a fact that is a number of bytes."""
    return lambda found, label: format(found.most(label, fact) / 2**20, form)


class Comparison(Benchmark):
    """Arms measured round by round, all in the same ranks."""

    bases: Sequence[str]  # arms that others are compared with
    again: str  # the arm that repeats the first of them
    columns: Mapping[str, Column]
    judged = "{name}"  # the arm of an implementation for which the limits of a case hold
    kept = "{found.num_kept} rounds kept, {found.num_dropped} dropped as noisy."
    clock = "seconds"  # or "core_seconds": of what the ratios are
    seconds = float("inf")  # that the rounds of a table may take
    max_others = paired.MAX_OTHERS  # rounds in which others used more of the cores are dropped
    all_cases: Sequence[Any] = ()

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, Arm]:
        """In the ranks: return the arms in the order of an even round, equal things far apart."""
        raise NotImplementedError

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Yield a verdict for each limit of the case; more where a benchmark has more."""
        arm = self.judged.format(name=name)
        for base, bound in found.case.limits.items():
            if base in found.labels:
                yield at_most(found.ratio(arm, base), bound, f"{arm} against {base} at most {{}}")

    def cases(self, options: argparse.Namespace) -> Iterator[Any]:
        """Yield the tables that the options ask for."""
        for case in self.all_cases:
            if options.case in case.heading:
                yield case

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Add what all comparisons take, and the benchmark's options."""
        parser.add_argument("--rounds", type=int, help="at most; default: as the case has it")
        for option, default, what in (
            ("--seconds", self.seconds, "for the rounds of a table"),
            ("--max-others", self.max_others, "part of the cores; noisier rounds are dropped"),
        ):
            parser.add_argument(option, type=float, default=default, help=what)
        parser.add_argument("--case", default="", help="words of a table's heading; default: all")
        parser.add_argument("--add", action="store_true", help="keep --out's tables of other cases")
        super().declare(parser)

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """Measure case by case."""
        for case in self.cases(options):
            yield self.section(self.compare(worlds, case, options))

    def compare(self, worlds: Worlds, case: Any, options: argparse.Namespace) -> Found:
        """Measure one case in its ranks."""
        wanted = case.num_rounds if options.rounds is None else options.rounds
        # A case without rounds of its own is not timed, however many are asked for.
        arguments = (self.name, case, options.impl, min(wanted, case.num_rounds * wanted))
        ranks = self.run(worlds, case, (*arguments, options.seconds))
        return Found.of(case, options.impl, ranks, self.clock, options.max_others)

    def run(self, worlds: Worlds, case: Any, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """Return what `measured` returns on each rank."""
        world = worlds.world(case.num_ranks)
        return list(world.run(measured, *arguments, timeout_s=3600.0, grace_s=60.0))

    def verdicts(self, found: Found) -> list[str]:
        """Return a verdict for each bound, or why there is none."""
        return found.voids(self.bases[0], self.again) or [
            said for name in found.impls for said in self.bounds(found, name)
        ]

    def section(self, found: Found) -> Section:
        """Return the table of one case with its verdicts."""
        verdicts = self.verdicts(found)
        blocks = [self.table(found), self.kept.format(found=found), bullets(verdicts)]
        return Section(found.case.heading, blocks, self.record(found, verdicts))

    def table(self, found: Found) -> str:
        """Return a row for each arm."""
        rows = [[label, *(cell(found, label) for cell in self.columns.values())]
                for label in found.labels]  # fmt: skip
        return grid([["arm", *self.columns], *rows])

    def record(self, found: Found, verdicts: list[str]) -> dict[str, Any]:
        """Return the case as data."""
        return {
            "heading": found.case.heading,
            "num_ranks": found.case.num_ranks,
            "labels": found.labels,
            "ms": found.ms(),
            "core_ms": found.ms("core_seconds"),
            "against": {base: found.against(base) for base in self.bases},
            "facts": found.facts,
            "num_rounds": found.num_kept,
            "num_dropped": found.num_dropped,
            "verdicts": verdicts,
        }


def measured(
    ctx: Context | None, name: str, case: Any, impls: list[str], num_rounds: int, seconds: float
) -> dict[str, Any]:
    """Rank body: build the arms of a case and run its rounds."""
    arms = find(name).arms(ctx, case, impls)
    rounds = paired.run_rounds(ctx, list(arms.values()), case.num_steps, num_rounds, seconds)
    return {"facts": {label: arm.facts for label, arm in arms.items()}, "rounds": rounds}


# ----------------------------------------------------------------------------------------- a page


def verdict(holds: bool, words: str) -> str:
    """Return one bound in words."""
    return f"{'holds' if holds else 'missed'}: {words}"


def at_most(ratio: Ratio, bound: float, words: str) -> str:
    """Return the verdict on the upper end of a ratio; `words` has a place for it."""
    return verdict(ratio.high <= bound, f"{words.format(f'{ratio.high:.3f}')}, bound {bound}")


def bullets(lines: Sequence[str]) -> str:
    """Return Markdown of a list."""
    return "\n".join(f"- {line}" for line in lines)


def pivot(title: str, found: Sequence[Found], labels: Sequence[str], cell: Column) -> str:
    """Return a table with a row for each case and a column for each arm that was measured."""
    rows = [[one.case.heading, *(cell(one, a) if a in one.labels else "-" for a in labels)]
            for one in found]  # fmt: skip
    return grid([[title, *labels], *rows])


def find(name: str) -> Any:
    """Return the declaration of a benchmark."""
    return importlib.import_module(f"spec_tests.bench.{name}").BENCHMARK


def earlier(folder: Path, name: str) -> Iterator[Section]:
    """Yield the tables that are there, each with when and how it was measured."""
    record = json.loads((folder / f"{name}.json").read_text())
    how = "measured: {date}, {command}".format(**record["environment"])
    _, *texts = re.split(r"^## ", (folder / f"{name}.md").read_text(), flags=re.MULTILINE)
    for text, result in zip(texts, record["results"], strict=True):
        heading, _, body = text.strip().partition("\n\n")
        body += "" if "\n- measured: " in body else f"\n- {how}"
        yield Section(heading, [body], {"measured": how, **result})


def run(name: str, arguments: Sequence[str]) -> int:
    """Measure and write the page; return 1 where a bound is missed or a measurement void."""
    benchmark = find(name)
    parser = argparse.ArgumentParser(prog=f"python -m spec_tests.bench {name}")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    benchmark.declare(parser)
    options = parser.parse_args(arguments)
    options.impl = options.impl or ["solution"]
    benchmark = benchmark.chosen(options)
    kept = [*earlier(options.out, benchmark.name)] if getattr(options, "add", False) else []
    sections: list[Section] = []
    worlds = Worlds(max_pools=1)  # at 124M the ranks of one take half of 24 GiB
    status = 0
    try:
        for section in benchmark.sections(options, worlds):
            sections.append(section)
            sys.stderr.write(f"measured: {section.heading or name}\n")
    finally:  # who interrupts a long run keeps the tables that are done
        worlds.close()
        if sections:
            new = {section.heading: section for section in sections}
            replaced = [new.pop(old.heading, old) for old in kept]
            sections = replaced + [section for section in sections if section.heading in new]
            environment = machine.environment([name, *arguments])
            environment["device"] = benchmark.device or environment["device"]
            status = write(benchmark, options.out, sections, environment)
    return status


def write(
    benchmark: Benchmark, folder: Path, sections: Sequence[Section], environment: dict[str, str]
) -> int:
    """Print and write the page; return 1 where anything on it is missed or void."""
    facts = [f"{key}: {value}" for key, value in environment.items()]
    head = bullets([*facts, benchmark.note] if benchmark.note else facts)
    blocks = [f"# {benchmark.title}", head, *(section.text for section in sections)]
    text = "\n\n".join(blocks) + "\n"
    print(text)
    results = [section.record for section in sections if section.record is not None]
    record = {"environment": environment, "results": results}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{benchmark.name}.md").write_text(text)
    (folder / f"{benchmark.name}.json").write_text(
        json.dumps(record, indent=1, default=vars) + "\n"
    )
    return int(bool(re.search(r"^- (?:missed|void): ", text, flags=re.MULTILINE)))
