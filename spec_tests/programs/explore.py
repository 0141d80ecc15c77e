"""Explore: draw situations, judge them, shrink what fails, until the time is over.

    python -m spec_tests explore --impl mine.py --minutes 20 --worlds 2,3,4 --only 'held two'

It prints one line of progress, and for each cause one finding: the smallest situation found, the
message, and the command that shows it again. `--seeds FILE` tries the situations of a file first
and appends the shrunk ones. The exit status is 1 if anything was found, and 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests import impls
from spec_tests.programs import declared, law, seeds
from spec_tests.programs.draw import covering, programs
from spec_tests.programs.scene import AXES_OF, Scene
from spec_tests.programs.shrink import cause_of, smallest
from spec_tests.rig import judge, target
from spec_tests.rig.judge import Situation, Violation
from spec_tests.rig.outcomes import LEVELS
from spec_tests.rig.ranks.errors import NotOffered, RankDied, RankHung, RankRaised, RigError
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import start_zygote

_HANGING_TRIES = 4
"""Shrinking a hang costs some seconds for each try that hangs."""


FAILURES: Any = (Violation, RankRaised, RankDied, RankHung)


@dataclass(frozen=True)
class Drawn:
    """A situation, of which function, on how many ranks."""

    subject: str
    size: int
    line: str


@dataclass
class Exploration:
    """What was tried and found.

    Args:
        impl: the implementation as `--impl` takes it.
        level: the level of the contract up to which situations are drawn.
        entries: deviations that the implementation declares; nothing is shrunk to one of them.
    """

    impl: target.Target
    worlds: Worlds
    level: str
    entries: Sequence[declared.Declared] = ()
    tried: int = 0
    found: dict[str, str] = field(default_factory=dict)
    """Causes, each with the line that shows it."""

    def failure(self, drawn: Drawn) -> Exception | None:
        """Return what a situation comes to; None if it holds, or is not offered."""
        self.tried += 1
        world = self.worlds.world(drawn.size, self.impl)
        try:
            with judge.judging(Situation(clause=f"{drawn.subject}.programs.any-situation")):
                law.same_as_alone(world, drawn.subject, drawn.line, looks=self.level == LEVELS[-1])
        except NotOffered:
            return None
        except FAILURES as failure:
            return failure
        return None

    def shrink(self, drawn: Drawn, failure: Exception) -> tuple[Drawn, Exception]:
        """Return the smallest situation found that fails as this one does, and how it fails."""
        hangs = itertools.count()

        def judged(line: str) -> Exception | None:
            if isinstance(failure, RankHung) and next(hangs) > _HANGING_TRIES * 4:
                return None
            return self.failure(Drawn(drawn.subject, drawn.size, line))

        line, failure = smallest(
            drawn.line,
            failure,
            judged,
            subject=drawn.subject,
            size=drawn.size,
            is_avoided=declared.avoided(self.entries, drawn.subject),
        )
        return Drawn(drawn.subject, drawn.size, line), failure

    def judge(self, drawn: Drawn) -> str:
        """Judge a situation; return the report of a new finding, or nothing."""
        failure = self.failure(drawn)
        if failure is None or cause_of(failure) in self.found:
            return ""
        smaller, failure = self.shrink(drawn, failure)
        self.found[cause_of(failure)] = smaller.line
        return "\n".join(
            (
                f"{smaller.subject} on {smaller.size} ranks: {smaller.line}",
                f"  in words: {law.in_words(smaller.line)}",
                _indented(str(failure)),
                f"  again: python -m spec_tests explore --impl {self.impl.name} --functions "
                f"{smaller.subject} --worlds {smaller.size} --line '{smaller.line}'",
                "",
            )
        )


def _indented(text: str, lines: int = 12) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[1 : lines + 1])


def situations(
    subjects: Sequence[str],
    sizes: Sequence[int],
    level: str,
    only: str,
    seed: int,
    entries: Sequence[declared.Declared],
) -> Iterator[Drawn]:
    """Yield situations without end: for each function and size rows of covering arrays.

    Args:
        only: words that each scene has.
    """
    chance = random.Random(seed)
    avoid = {subject: declared.avoided(entries, subject) for subject in subjects}
    while True:
        arrays = [
            (subject, size, list(covering(subject, size, level, chance.randrange(1, 2**31))))
            for subject in subjects
            for size in sizes
        ]
        for _, _, rows in arrays:
            chance.shuffle(rows)
        for subject, size, row in itertools.chain(
            *zip(*([(s, n, row) for row in rows] for s, n, rows in arrays), strict=False)
        ):
            scene = _with(row, only)
            if scene is not None and scene.exists(subject, size):
                program = programs(scene, subject, size, level, chance, avoid[subject])
                line = law.written(scene, program)
                if not avoid[subject](line):
                    yield Drawn(subject, size, line)


def _with(row: Scene, only: str) -> Scene | None:
    """Return the row with these words in the place of its own."""
    wanted = Scene.of(only)
    usual = Scene()
    words = zip(wanted.words, usual.words, row.words, strict=True)
    return Scene(tuple(mine if w == u else w for w, u, mine in words))


def main(argv: Sequence[str]) -> int:
    """Explore as the arguments say; return the exit status."""
    arguments = _parser().parse_args(argv)
    start_zygote()  # imports torch for the ranks while this process goes on
    try:
        impl = impls.parse(arguments.impl)
        sizes = [int(size) for size in arguments.worlds.split(",")]
        entries = declared.of(impl)
        listed = seeds.load(arguments.seeds) if arguments.seeds else ()
        if arguments.line:
            law.read(arguments.line)
        Scene.of(arguments.only)
    except (ValueError, OSError) as error:
        print(f"explore: {error}", file=sys.stderr)
        return 2
    worlds = Worlds()
    try:
        offered = worlds.world(sizes[0], impl).offered()
        subjects = [s for s in arguments.functions.split(",") if s in offered and s in AXES_OF]
        if not subjects:
            print(f"explore: {impl.name} offers none of {', '.join(AXES_OF)}", file=sys.stderr)
            return 2
        exploration = Exploration(impl, worlds, arguments.level, entries)
        if arguments.line:
            first = [Drawn(s, size, arguments.line) for s in subjects for size in sizes]
            try:
                for one in first:
                    law.legal(one.line, one.subject, one.size)
            except ValueError as error:
                print(f"explore: {error}", file=sys.stderr)
                return 2
            drawn: Iterator[Drawn] = iter(first)
        else:
            known = [Drawn(e.judges, e.size, e.line) for e in listed if e.judges in subjects]
            more = situations(
                subjects, sizes, arguments.level, arguments.only, arguments.seed, entries
            )
            drawn = itertools.chain(known, more)
        seconds = arguments.minutes * 60
        _run(exploration, drawn, seconds, arguments.seeds, one=arguments.first)
    except RigError as error:
        print(f"explore: {error}", file=sys.stderr)
        return 2
    finally:
        worlds.close()
    return 1 if exploration.found else 0


def _run(
    exploration: Exploration,
    drawn: Iterator[Drawn],
    seconds: float,
    file: Path | None,
    *,
    one: bool,
) -> None:
    begun = time.monotonic()
    for each in drawn:
        spent = time.monotonic() - begun
        if spent > seconds:
            break
        if sys.stderr.isatty():
            counts = f"{exploration.tried} situations, {len(exploration.found)} findings"
            print(f"{counts}, {spent:.0f} s ", end="\r", file=sys.stderr)
        before = len(exploration.found)
        report = exploration.judge(each)
        if report:
            print(report, flush=True)
        if file is not None and len(exploration.found) > before:
            line = [*exploration.found.values()][-1]
            seeds.append(file, seeds.Seed(each.subject, line, "found by explore", each.size))
        if report and one:
            break
    print(
        f"{exploration.tried} situations in {time.monotonic() - begun:.0f} s: "
        f"{len(exploration.found)} findings"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spec_tests explore", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--impl", required=True, help="as for the other commands")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--first", action="store_true", help="end with the first finding")
    parser.add_argument("--worlds", default="2,3", help="numbers of ranks, with commas (2,3)")
    parser.add_argument("--only", default="", help="words that every scene has: 'held two'")
    parser.add_argument(
        "--functions", default=",".join(AXES_OF), help="with commas; all if left out"
    )
    parser.add_argument("--level", choices=LEVELS, default="correct")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other situations")
    parser.add_argument("--seeds", type=Path, help="a file of situations: see seeds.toml")
    parser.add_argument("--line", help="one situation, in place of drawn ones")
    return parser
