"""usage: python -m spec_tests.bench NAME [options]

Measure side by side with PyTorch's own, and write tables to `results/`.

NAME: rig, answer, ddp, zero1, fsdp, attention, loader, trainer, watch;
`NAME --help` lists its options.
"""

import sys

BENCHMARKS = (
    *("rig", "answer", "ddp", "zero1", "fsdp"),
    *("attention", "loader", "trainer", "watch"),
)


def main(argv: list[str]) -> int:
    """Run one benchmark; 0 when it holds, 1 when a bound is missed or void, 2 for usage."""
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        given = repr(argv[0]) if argv else "nothing"
        print(
            f"expected one of {', '.join(BENCHMARKS)}, got {given}; "
            "as in: python -m spec_tests.bench ddp --rounds 40",
            file=sys.stderr,
        )
        return 2
    from spec_tests.bench.runner import run

    return run(argv[0], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
