"""See that the suite has teeth, and bites nobody else.

python -m spec_tests impostors                      named clauses of every impostor
python -m spec_tests impostors --repeat 20          20 times each: a rejection by luck shows
python -m spec_tests impostors --accepted           benign ones, and a sample of other chapters
python -m spec_tests impostors --only 'ddp.no-*'    some of them
python -m spec_tests impostors --only 'reality.*'   bugs that users reported, see `bugs`
python -m spec_tests impostors --margins            and how far errors and noise are from tolerances
python -m spec_tests impostors --transport sim      on simulated ranks: how each fault is noticed
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import random
import zlib
from collections.abc import Sequence

from spec_tests.museum import CATALOGUE, FORCED_FAILURE, REFERENCE, bugs
from spec_tests.museum.card import Impostor
from spec_tests.museum.crew import Crew, Job, Verdict, serve
from spec_tests.museum.matrix import owed_by_benign, unrelated_clauses

SAMPLE, SAMPLED = 2, 8
"""`--accepted`: clauses of other chapters that a near-miss is held against, and how many are."""

SHARE = 12
"""Clauses that one job asks about at most, so that the last job is no long one."""


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if everything is rejected and accepted as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests impostors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeat", type=int, default=1, help="times that each must be rejected")
    parser.add_argument(
        "--accepted",
        action="store_true",
        help="only what must be accepted: benign ones by all, some others by a sample of clauses",
    )
    parser.add_argument(
        "--brief",
        action="store_true",
        help="with --accepted: one case of each clause, on two ranks",
    )
    parser.add_argument("--margins", action="store_true", help="of each clause about numbers")
    parser.add_argument("--transport", choices=("gloo", "sim"), help="gloo; --brief: by turns")
    parser.add_argument("--only", default="*", help="glob over impostor ids")
    parser.add_argument(
        "--side-by-side", type=int, default=os.cpu_count() or 1, help="processes; one per core"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # see `crew`
    options = parser.parse_args(arguments)
    if options.serve:
        return serve_as_ranks_expect()
    known = bugs.cards() if options.only.startswith(bugs.PREFIX) else CATALOGUE
    chosen = [i for i in known.values() if fnmatch.fnmatchcase(i.id, options.only)]
    if not chosen:
        chapters = sorted({f"{name.partition('.')[0]}.*" for name in CATALOGUE})
        print(f"--only {options.only}: no impostor matches; try one of {', '.join(chapters)}")
        return 2
    if options.accepted:
        chosen = _sampled(chosen)
    with Crew(max(1, min(options.side_by_side, len(chosen)))) as crew:
        asked = [(card, [crew.submit(job) for job in jobs(card, options)]) for card in chosen]
        complaints, verdicts = [], []
        for card, futures in asked:
            found = [future.result() for future in futures]
            complaints += _report(card, found, options)
            verdicts += found
        if options.margins:
            lines, others = margins(verdicts, crew)
            complaints += others
            print("", *lines, sep="\n")
    print("\n".join(["", *complaints]) if complaints else "")
    rejected = sum(not i.is_benign for i in chosen)
    print(f"{rejected} impostors, {len(chosen) - rejected} benign: {len(complaints)} complaints")
    return 1 if complaints else 0


def serve_as_ranks_expect() -> int:
    """Be a process of a crew: judge with the first failure as the end, nothing shrunk."""
    from hypothesis import settings

    from spec_tests.rig.strategies import register_profiles

    register_profiles()
    settings.load_profile("impostors")
    return serve()


def _sampled(impostors: Sequence[Impostor]) -> list[Impostor]:
    """All benign ones and some of the rest, the same ones each time."""
    near_misses = [i for i in impostors if not i.is_benign]
    kept = {i.id for i in random.Random(0).sample(near_misses, min(SAMPLED, len(near_misses)))}
    return [i for i in impostors if i.is_benign or i.id in kept]


def jobs(impostor: Impostor, options: argparse.Namespace) -> list[Job]:
    """What is to be found out about it."""
    clauses = [clause.id for clause in _owed(impostor, options)]
    shares = [tuple(clauses[i : i + SHARE]) for i in range(0, len(clauses), SHARE)]
    repeat = 0 if impostor.is_benign or options.accepted else options.repeat
    by_turns = "sim" if options.brief and zlib.crc32(impostor.id.encode()) % 2 else "gloo"
    how = (options.transport or by_turns, options.brief)
    return [
        Job(impostor.id, repeat if not i else 0, share, *how)
        for i, share in enumerate(shares or [()])
    ]


def _owed(impostor: Impostor, options: argparse.Namespace):
    if not options.accepted or impostor is FORCED_FAILURE:
        return []
    return owed_by_benign(impostor) if impostor.is_benign else unrelated_clauses(impostor, SAMPLE)


def _report(impostor: Impostor, verdicts: Sequence[Verdict], options: argparse.Namespace):
    """Print one line; the complaints."""
    complaints = [line for verdict in verdicts for line in verdict.complaints]
    word = "COMPLAINT" if complaints else "ok"
    modes = {name: mode for verdict in verdicts for name, mode in verdict.modes.items()}
    names = ", ".join(_with(name, modes.get(name, "")) for name in impostor.rejected_by)
    names = names or "accepted by all"
    if options.accepted:
        names = f"accepted by {len(_owed(impostor, options))} clauses"
    duration_s = sum(verdict.duration_s for verdict in verdicts)
    print(f"{word:9} {impostor.id:36} {duration_s:6.1f} s  {names}", flush=True)
    return complaints


def _with(clause: str, mode: str) -> str:
    """The clause and how it noticed."""
    return f"{clause} ({mode})" if mode else clause


def margins(verdicts: Sequence[Verdict], crew: Crew) -> tuple[list[str], list[str]]:
    """A line per clause that compared numbers, the narrowest first; and complaints.

    Right code is the reference. A near-miss counts in the first case where its error was compared
    and was too large; one that fails otherwise, by a missing tensor say, has no margin.
    """
    nearest: dict[str, tuple[float, str]] = {}
    for verdict in verdicts:
        for clause, ratio in verdict.margins.items():
            if ratio > 1.0:
                known = (ratio, verdict.impostor)
                nearest[clause] = min(nearest.get(clause, known), known)
    asked = sorted({clause for verdict in verdicts for clause in verdict.judged})
    shares = [tuple(asked[i : i + SHARE]) for i in range(0, len(asked), SHARE)]
    jobs = [crew.submit(Job(REFERENCE.id, accepted_by=share)) for share in shares]
    found = [job.result() for job in jobs]
    noise = {clause: m for verdict in found for clause, m in verdict.margins.items()}
    lines = ["error over tolerance, where 1 is allowed; the narrowest first"]
    lines += [f"{'right code':>10} {'near-miss':>10}  clause (the near-miss that comes nearest)"]
    numeric = noise.keys() | nearest.keys()
    for clause in sorted(numeric, key=lambda c: (_room(c, noise, nearest), c)):
        right = f"{noise[clause]:.3g}" if clause in noise else "-"
        ratio, impostor = nearest.get(clause, (math.nan, "none was compared"))
        wrong = "-" if math.isnan(ratio) else f"{ratio:.3g}"
        lines.append(f"{right:>10} {wrong:>10}  {clause} ({impostor})")
    exact = len(asked) - len(numeric)
    lines.append(f"{exact} other clauses have no tolerance: they ask for bits, counts or orders")
    return lines, [line for verdict in found for line in verdict.complaints]


def _room(clause: str, noise: dict[str, float], nearest: dict[str, tuple[float, str]]) -> float:
    """By what factor the tolerance could move before it would be wrong."""
    above = nearest[clause][0] if clause in nearest else math.inf
    below = 1.0 / noise[clause] if noise.get(clause) else math.inf
    return min(above, below)
