"""Mutants of a module, judged: the meter that nobody writes.

    python -m spec_tests mutants --of solution.parallel.ddp --count 20 --seed 0

Each is judged by the seeds of the world model, by its drawn rows, then with `--clauses` by the
clauses of the chapter, until something rejects it. What survives is printed as a difference: it is
equal, or the world model lacks a word, a verb or a look. Of PyTorch's own modules
(`--of torch.distributed.fsdp._fully_shard._fsdp_param`) a third of the functions is a hold-out:
`--hold-out` counts their mutants and shows none.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from unittest import SkipTest

from spec_tests.impls import parse
from spec_tests.museum.mutants import Mutant, of, source
from spec_tests.programs import declared, draw, law, seeds
from spec_tests.programs.shrink import FAILURES
from spec_tests.rig import judge
from spec_tests.rig.judge import Situation
from spec_tests.rig.outcomes import LEVELS
from spec_tests.rig.ranks.errors import NotOffered, RigError
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import start_zygote

SERVES = {
    "ddp": ("ddp", ("ddp", "ddp_bucketed")),
    "reducer": ("ddp", ("ddp_bucketed", "ddp")),
    "fsdp": ("fsdp", ("fully_shard", "fsdp")),
    "fully_shard": ("fsdp", ("fully_shard", "fsdp")),
    "zero1": ("zero1", ("sharded_optimizer",)),
    "distributed": ("ddp", ("ddp", "ddp_bucketed")),
    "clip": ("clip", ("fully_shard", "ddp", "build_fsdp_trainer")),
    "inventory": ("ddp fsdp", ("ddp", "fully_shard", "fsdp")),
    "agreement": ("ddp zero1 fsdp", ("ddp", "sharded_optimizer", "fully_shard", "fsdp")),
}
"""The chapters and the functions that a module serves, by a part of its name."""
ROOTS = {"solution": "solution", "spec_tests": "plain", "torch": "torch"}
"""The implementation of which a module is, by the first part of its name."""


def told_by(mutant: Mutant, *, seconds: float, clauses: bool) -> str:
    """Return what rejects a mutant: a seed, a row or a clause, or nothing."""
    chapters, subjects = next(v for k, v in SERVES.items() if k in mutant.module.split("."))
    worlds, deadline, is_offered = Worlds(max_pools=2), time.monotonic() + seconds, False
    target = parse(f"impostor:{mutant.id}")
    root = mutant.module.partition(".")[0]
    try:
        for kind, subject, size, level, line in _situations(subjects, root):
            if time.monotonic() > deadline:
                break
            try:
                with judge.judging(Situation()):
                    looks = level == LEVELS[-1]
                    law.same_as_alone(worlds.world(size, target), subject, line, looks=looks)
                is_offered = True
            except (NotOffered, SkipTest):  # the latter where it asks for a GPU
                continue
            except RigError:
                return "load: it is not imported"
            except FAILURES:
                return f"{kind}: {subject} on {size}: {line}"
    finally:
        worlds.close()
    if not is_offered:
        return "refusal: nothing is offered any more"
    return _told_by_clause(mutant, chapters) if clauses else ""


def _situations(subjects: Sequence[str], root: str) -> Iterator[tuple[str, str, int, str, str]]:
    """Yield seeds, then rows: kind, function, number of ranks, level, line.

    Those are left out that the unchanged implementation does not promise, or declares.
    """
    target, levels = parse(ROOTS[root]), LEVELS[1 : 2 + (root != "spec_tests")]
    for subject in subjects:
        is_avoided = declared.avoided(target, subject)
        for seed in seeds.load():
            if seed.judges == subject and seed.level in levels and not is_avoided(seed.line):
                yield "seed", subject, seed.size, seed.level, seed.line
    for level, subject in itertools.product(levels, subjects):
        is_avoided = declared.avoided(target, subject)
        for size in (2, 3):
            for number, row in enumerate(draw.covering(subject, size, level)[::2]):
                chance = random.Random(f"{subject} {size} {level} {number}")
                line = draw.situation_in(row, subject, size, level, chance, is_avoided)
                if not is_avoided(line):
                    yield "row", subject, size, level, line


def _told_by_clause(mutant: Mutant, chapters: str) -> str:
    command = [sys.executable, "-m", "spec_tests", "--impl", f"impostor:{mutant.id}"]
    # All but `programs`: those are seeds and rows once more.
    asked = ",".join(f"{chapter}.[!p]*,{chapter}.pre*" for chapter in chapters.split())
    command += ["--clause", asked, "--level", "production", "-x"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^(?:failed|died|hang): \[(.+?)\]", ended.stdout, re.MULTILINE)
    return f"clause: {found[1]}" if found else ""


def drawn(module: str, count: int, options: argparse.Namespace) -> list[Mutant]:
    """Return so many mutants as are asked for, no two alike, of the hold-out or of the rest."""
    numbers = random.Random(options.seed).sample(range(count), count)
    found: dict[str, Mutant] = {}
    for mutant in (of(module, number) for number in numbers):
        is_asked = not module.startswith("torch.") or mutant.is_held_out is options.hold_out
        if is_asked and mutant.after != mutant.before:
            found.setdefault(mutant.after, mutant)
        if len(found) >= options.count:
            break
    return [*found.values()]


def main(argv: Sequence[str]) -> int:
    """Judge mutants as the arguments say; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--of", required=True, help="a module, such as solution.parallel.ddp")
    parser.add_argument("--count", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=0, help="another seed takes others")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the situations of one")
    parser.add_argument("--clauses", action="store_true", help="let clauses judge what survives")
    parser.add_argument("--hold-out", action="store_true", help="those of the hold-out instead")
    options = parser.parse_args(argv)
    try:
        count = len(source(options.of).changes)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    root, *parts = options.of.split(".")
    if root not in ROOTS or not any(part in SERVES for part in parts):
        parser.error(
            f"expected a module of {', '.join(ROOTS)} that has one of {', '.join(SERVES)} in its "
            f"name, got {options.of}"
        )
    if options.clauses and root != "solution":
        parser.error("expected --clauses with a module of the reference, whose chapters all hold")
    start_zygote()
    chosen = drawn(options.of, count, options)
    kinds: Counter[str] = Counter()
    for mutant in chosen:
        said = told_by(mutant, seconds=options.seconds, clauses=options.clauses)
        kinds[said.partition(":")[0] or "survives"] += 1
        shown = said or ("survives" if options.hold_out else mutant.difference())
        print(f"{mutant.id}  {shown}", flush=True)
    counted = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
    print(f"{len(chosen)} of {count} mutants of {options.of}: {counted}")
    return int(kinds["survives"] > 0)
