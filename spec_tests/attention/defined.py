"""The shape that most clauses of this chapter have: a problem, and the definition's answer."""

from __future__ import annotations

from spec_tests.attention import bodies, rules
from spec_tests.attention.problem import Problem
from spec_tests.rig.world import World

GRADIENTS = rules.GRADIENTS
OUTPUT_AND_GRADIENTS = ("O", *GRADIENTS)
OUTPUT_AND_LSE = ("O", "L")
ALL = ("O", "L", *GRADIENTS)


def is_tf32(world: World) -> bool:
    """A GPU may form float32 products of eleven bits; level production asks for honest ones."""
    return world.transport == "cuda"


def as_defined(world: World, subject: str, problem: Problem, *names: str) -> None:
    """What the subject answers must be the definition's: those of O, L, dQ, dK and dV.

    Raises:
        Violation: it names the tensor, the broken rule and what the values look like.
    """
    __tracebackhide__ = True
    if not {*GRADIENTS} & {*names}:
        seen = bodies.observe(world, subject, bodies.forward, problem, lse="L" in names)
    else:
        body = bodies.everything if "L" in names else bodies.gradients
        seen = bodies.observe(world, subject, body, problem)
    rules.close(seen, problem, names=names, tf32=is_tf32(world))
