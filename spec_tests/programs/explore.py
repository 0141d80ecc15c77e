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
from dataclasses import dataclass, field, replace
from pathlib import Path

from spec_tests import impls
from spec_tests.programs import declared, law, seeds
from spec_tests.programs.draw import covering, situation_in
from spec_tests.programs.scene import AXES_OF, Scene
from spec_tests.programs.seeds import Seed
from spec_tests.programs.shrink import FAILURES, cause_of, smallest
from spec_tests.rig import judge, target
from spec_tests.rig.judge import Situation
from spec_tests.rig.outcomes import LEVELS
from spec_tests.rig.ranks.errors import NotOffered, RigError
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import start_zygote

FOUND = "found by explore"


@dataclass
class Exploration:
    """What was tried and found.

    Args:
        impl: the implementation as `--impl` takes it; nothing is shrunk to what it declares.
        level: the level of the contract up to which situations are drawn.
    """

    impl: target.Target
    worlds: Worlds
    level: str
    tried: int = 0
    causes: set[str] = field(default_factory=set)

    def failure(self, drawn: Seed) -> Exception | None:
        """Return what a situation comes to; None if it holds, or is not offered."""
        self.tried += 1
        world = self.worlds.world(drawn.size, self.impl)
        try:
            with judge.judging(Situation(clause=f"{drawn.judges}.programs.any-situation")):
                law.same_as_alone(world, drawn.judges, drawn.line, looks=self.level == LEVELS[-1])
        except NotOffered:
            return None
        except FAILURES as failure:
            return failure
        return None

    def judge(self, drawn: Seed) -> str:
        """Judge a situation; print a new finding, and return the smallest line that shows it."""
        failure = self.failure(drawn)
        if failure is None or cause_of(failure) in self.causes:
            return ""
        line, shown = smallest(
            drawn.line,
            failure,
            lambda line: self.failure(replace(drawn, line=line)),
            subject=drawn.judges,
            size=drawn.size,
            is_avoided=declared.avoided(self.impl, drawn.judges),
        )
        self.causes.add(cause_of(shown))
        print(
            f"{drawn.judges} on {drawn.size} ranks: {line}",
            f"  in words: {law.in_words(line)}",
            *(f"  {each}" for each in str(shown).strip().splitlines()[1:13]),
            f"  again: python -m spec_tests explore --impl {self.impl.name} --functions "
            f"{drawn.judges} --worlds {drawn.size} --line '{line}'\n",
            sep="\n",
            flush=True,
        )
        return line


def situations(
    subjects: Sequence[str],
    sizes: Sequence[int],
    level: str,
    only: str,
    seed: int,
    impl: target.Target,
) -> Iterator[Seed]:
    """Yield situations without end: for each function and size rows of covering arrays.

    Args:
        only: words that each scene has.
    """
    chance = random.Random(seed)
    avoid = {subject: declared.avoided(impl, subject) for subject in subjects}
    while True:
        arrays = []
        for subject, size in itertools.product(subjects, sizes):
            rows = covering(subject, size, level, chance.randrange(1, 2**31))
            arrays.append([(subject, size, row) for row in rows])
        for array in arrays:
            chance.shuffle(array)
        for subject, size, row in itertools.chain(*zip(*arrays, strict=False)):
            scene = _with(row, only)
            if scene.exists(subject, size):
                line = situation_in(scene, subject, size, level, chance, avoid[subject])
                if not avoid[subject](line):
                    yield Seed(subject, line, FOUND, size)


def _with(row: Scene, only: str) -> Scene:
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
        listed = seeds.load(arguments.seeds) if arguments.seeds else ()
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
        exploration = Exploration(impl, worlds, arguments.level)
        if arguments.line:
            asked = [Seed(s, arguments.line, FOUND, size) for s in subjects for size in sizes]
            try:
                for one in asked:
                    law.legal(one.line, one.judges, one.size)
            except ValueError as error:
                print(f"explore: {error}", file=sys.stderr)
                return 2
            drawn: Iterator[Seed] = iter(asked)
        else:
            known = [seed for seed in listed if seed.judges in subjects]
            more = situations(
                subjects, sizes, arguments.level, arguments.only, arguments.seed, impl
            )
            drawn = itertools.chain(known, more)
        _run(exploration, drawn, arguments)
    except RigError as error:
        print(f"explore: {error}", file=sys.stderr)
        return 2
    finally:
        worlds.close()
    return 1 if exploration.causes else 0


def _run(exploration: Exploration, drawn: Iterator[Seed], arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    for each in drawn:
        spent = time.monotonic() - begun
        if spent > arguments.minutes * 60:
            break
        if sys.stderr.isatty():
            counts = f"{exploration.tried} situations, {len(exploration.causes)} findings"
            print(f"{counts}, {spent:.0f} s ", end="\r", file=sys.stderr)
        found = exploration.judge(each)
        if found and arguments.seeds:
            seeds.append(arguments.seeds, Seed(each.judges, found, FOUND, each.size))
        if found and arguments.first:
            break
    print(
        f"{exploration.tried} situations in {time.monotonic() - begun:.0f} s: "
        f"{len(exploration.causes)} findings"
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
