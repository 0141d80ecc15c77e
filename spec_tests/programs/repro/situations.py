"""From a situation of the world model to a script: the words of its scene, and its calls as code.

A script has one function, `steps`, which is called twice: on a rank, with what the judged function
makes of a toy; and in one process with the batches of all ranks, which is what every rank must see.
The toy's source is that of `rig/toys.py`, the calls' is in verbs.toml, the rest is in templates
whose marks name a word of the scene, the function, or a piece of the program that a line is for.

Of models and sharded optimizers a clause is shown by the failed case's situation, or by those that
verbs.toml names for a clause that is none. The templates of clipping, attention and loaders have
defaults, of which a clause names in recipes.toml what it changes.
"""

from __future__ import annotations

import contextlib
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from torch import nn

from spec_tests.programs.calls import VERBS, Program, after
from spec_tests.programs.on_ranks import chosen, leaves
from spec_tests.programs.repro.script import Recipe
from spec_tests.programs.scene import AXIS_OF, OPTIMIZER, SHARDS, Scene
from spec_tests.programs.units import units_of
from spec_tests.rig.toys import TOYS

FOLDER = Path(__file__).resolve().parent
RECIPES = FOLDER / "recipes.toml"
OWN = ("of-iterators", "with-a-buffer", "may-raise")
"""Words beside those of a scene: groups of generators, a buffer that differs between ranks, and an
error that is as good as the right answer.
"""
BUILT = {
    **dict.fromkeys(("toy", "seeds", "mesh", "group", "reshard", "divisor", "trained", "mode")),
    **dict.fromkeys(("bucket", "groups", "precision")),
    "units": ("children", "layers", "nested", "root"),
    "moments": ("sgd", "momentum", "adam", "adamw", "adagrad"),
}
"""What a script can build: axes, and of some their words. What else a scene says is left out."""
GROUPS = {
    "one-group": "[*weights]",
    "two-groups": "[{'params': weights[0::2]}, {'params': weights[1::2]}]",
    "group-each": "[{'params': [weight]} for weight in weights]",
    "own-options": "[{'params': weights[:1], 'lr': 0.5}, "
    "{'params': weights[1:], 'weight_decay': 0.25}]",
    "one-rate": "[{'params': weights, 'lr': 0.5}]",
    "of-iterators": "[{'params': iter(weights)}]",
}
TORCHS = {
    "ddp": ("DistributedDataParallel", "model"),
    "ddp_bucketed": ("DistributedDataParallel", "model, gradient_as_bucket_view=True"),
    "fully_shard": ("fully_shard", "model"),
    "sharded_optimizer": ("ZeroRedundancyOptimizer", ""),
}
"""PyTorch's own behind each function, and what it is given first."""


def recipes_of(clause: str, subject: str, ranks: int, situation: Any = "") -> Iterator[Recipe]:
    """Yield what may show a clause.

    Args:
        situation: of the case that failed, if it has one; what is no line has no script.
    """
    lines = (situation if isinstance(situation, str) else "", *_table()["clauses"].get(clause, ()))
    for line in filter(None, lines):
        with contextlib.suppress(ValueError):  # a word that no script can build
            yield recipe_of(line, subject, ranks)
    chapter, _, rest = clause.partition(".")
    of_chapter = tomllib.loads(RECIPES.read_text(encoding="utf-8")).get(chapter, {"changes": {}})
    if rest in of_chapter["changes"]:
        changes = of_chapter["changes"][rest]
        settings = {"RANKS": str(max(ranks, 2))} if chapter == "clip" else {}
        settings |= of_chapter["defaults"] | changes
        tags = {*map(str.lower, changes), "must-answer", "file"}
        if changes.get("SHARDED") != "False":
            tags.add("sharded")
        frame = "ranks" if chapter == "clip" else "one"
        values = {"function": subject}
        yield Recipe(frame, chapter, frozenset(tags), settings, values=values)


def recipe_of(line: str, subject: str, size: int, *, is_torchs: bool = False) -> Recipe:
    """Return the script of a situation before it is written.

    Args:
        subject: the contract's function that is judged.
        is_torchs: PyTorch's own wrapper is meant, and not that of a file.

    Raises:
        ValueError: a call or a toy has no source that stands alone.
    """
    said, _, program = line.rpartition(":")
    scene = Scene.of(" ".join(word for word in said.split() if _is_built(word)))
    for word in scene.said():
        size = size if size in (word.sizes or (size,)) else word.sizes[0]
    own = frozenset({*said.split()} & {*OWN})
    situation = _Situation(scene, own, subject, size, is_torchs)
    calls = tuple(tuple(call.split()) for call in program.split(",") if call.strip())
    left = after(calls, scene, subject, size) if all(call[0] in VERBS for call in calls) else None
    is_refusable = scene.may_be_refused_by(subject) or (left is not None and left.may_refuse)
    is_refusable = is_refusable or "may-raise" in own
    tags = {*scene.words, *own, subject, "torch" if is_torchs else "file"}
    tags |= {"units"} if situation.units else set()
    return Recipe(
        "ranks",
        "optimizer" if subject in OPTIMIZER else "model",
        frozenset(tags | {"may-raise" if is_refusable else "must-answer"}),
        {"RANKS": str(size), "Toy": _toy_source(scene["toy"][0])},
        situation.program(calls),
        situation.values(),
    )


@dataclass(frozen=True)
class _Situation:
    """A scene, and words of `OWN`, for a function and a number of ranks."""

    scene: Scene
    own: frozenset[str]
    subject: str
    size: int
    is_torchs: bool

    @property
    def impl(self) -> str:
        """The name of what is None in one process."""
        return "is_wrapped" if self.is_torchs else "impl"

    @property
    def module(self) -> nn.Module:
        """The toy."""
        return TOYS[self.scene["toy"][0]].build(0)

    @property
    def units(self) -> list[str]:
        """Names of the modules to shard before the whole."""
        return units_of(self.module, self.scene.word("units")) if self.subject in SHARDS else []

    def values(self) -> dict[str, str]:
        """Return what stands in the place of a template's names."""
        scene, wrap = self.scene, self._wrap()
        toy, (_, use, by_rank) = TOYS[scene["toy"][0]], scene["toy"]
        kind, options = scene["moments"]
        peers = "len(peers)" if scene["group"] else "RANKS"
        return {
            "impl": self.impl,
            "toy": type(self.module).__name__,
            "weights": f"{-toy.weights - 1}, {toy.weights + 2}",
            "inputs": f"{-toy.inputs}, {toy.inputs + 1}",
            "first": "peers[0]" if scene["group"] else "0",
            "branch": f", {use}[({'r + ' * by_rank}micro) % {len(use)}]" if use else "",
            "groups": str(scene["group"]),
            "trained": str(scene["trained"]),
            "divisor": str(scene["divisor"] or peers),
            "shape": str(tuple(self.size if n is None else n for n in scene["mesh"] or ())),
            "units": str(self.units),
            "wrap": wrap,
            "unit": wrap.replace("(model", "(model.get_submodule(name)"),
            "quiet": "DistributedDataParallel.no_sync" if self.is_torchs else "impl.no_sync",
            "kind": f"torch.optim.{kind.__name__}",
            "options": ", ".join(f"{name}={value}" for name, value in options.items()),
            "parts": GROUPS["of-iterators" if "of-iterators" in self.own else scene.word("groups")],
        }

    def _wrap(self) -> str:
        """Return the call of the judged function."""
        scene, subject = self.scene, self.subject
        kind, moments = scene["moments"]
        kind = f"torch.optim.{kind.__name__}"
        function, first = TORCHS[subject] if self.is_torchs else (f"impl.{subject}", "model")
        options = {}
        if subject in OPTIMIZER:
            first = f"groups, optimizer_class={kind}" if self.is_torchs else f"groups, {kind}"
            options = dict(moments)
        if subject == "ddp_bucketed":
            options["bucket_cap_mb" if self.is_torchs else "bucket_size_mb"] = scene["bucket"]
        if scene["group"]:
            options["process_group"] = "group"
        if subject in SHARDS:
            options |= self._options()
        return f"{function}({', '.join([first, *(f'{n}={v}' for n, v in options.items())])})"

    def _options(self) -> dict[str, Any]:
        """Return what the scene gives `fully_shard` beside a module."""
        options: dict[str, Any] = {"mesh": "mesh"} if self.scene["mesh"] else {}
        if self.scene["reshard"] is not None:
            options["reshard_after_forward"] = self.scene["reshard"]
        if self.scene["precision"]:
            given = ", ".join(f"{name}={dtype}" for name, dtype in self.scene["precision"].items())
            policy = "MixedPrecisionPolicy" if self.is_torchs else "impl.MixedPrecisionPolicy"
            options["mp_policy"] = f"{policy}({given})"
        return options

    def program(self, calls: Program) -> str:
        """Return the calls as code."""
        sources = [self.source(number, *call) for number, call in enumerate(calls, start=1)]
        if self.subject == "fsdp" and any("backward()" in source for source in sources):
            sources.append("torch.optim.SGD(held, lr=0.5**6).step()")
            sources.append('show("a step of SGD", weights())')
        return "\n".join(sources)

    def source(self, number: int, verb: str, *words: str) -> str:
        """Return a call as code.

        Raises:
            ValueError: it has none.
        """
        call = " ".join((verb, *words))
        table = _table()["optimizer" if self.subject in OPTIMIZER else "model"]
        others = [word for word in words if not word.isdecimal()]
        keys = [f"{self.subject} {verb}", " ".join([verb, *others]), verb]
        source = next((table[key] for key in keys if key in table), None)
        if source is None:
            raise ValueError(f"the call {call!r} takes the suite's own world model")
        if self.subject != "fsdp":
            source = source.replace("weights()", "held")
            source = source.replace("gradients()", "[p.grad for p in held]")
        elif "gradients()" in source:  # whose form is open: a step at the end says what they are
            source = source.replace('show("$call", gradients())', "")
        ends = "" if self.is_torchs or self.subject in SHARDS else "finish(wrapped)\n"
        values = {
            **dict(zip(("n", "m"), words, strict=False)),
            "w": words[0] if words else "",
            "impl": self.impl,
            "call": f"call {number}, {call}",
            "part": f"model.{self._layer(words[-1])}" if "$part" in source else "",
        }
        return Template(source.replace("$finish\n", ends).strip()).substitute(values)

    def _layer(self, which: str) -> str:
        """Return the name of the first, middle or last layer that runs."""
        name: str = chosen([n for n in leaves(self.module) if "unused" not in n], which)
        return name


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "verbs.toml").read_text(encoding="utf-8"))


def _is_built(word: str) -> bool:
    axis = AXIS_OF.get(word, "")
    return axis in BUILT and word in (BUILT[axis] or (word,))


def _toy_source(name: str) -> str:
    """Return the source of a toy's class and of those that it is made of, without docstrings."""
    model = TOYS[name].model
    if not isinstance(model, type):
        raise ValueError(f"the toy {name!r} is no class of its own")
    kinds = dict.fromkeys(type(part) for part in [*model().modules()][::-1])
    own = [kind for kind in kinds if kind.__module__ == model.__module__]
    return "\n\n\n".join(map(_without_docstring, own))


def _without_docstring(kind: type) -> str:
    def kept() -> Iterator[str]:
        head, _, rest = inspect.getsource(kind).partition('"""')
        _, _, body = rest.partition('"""')
        yield head.rstrip()
        yield body.strip("\n").replace("factors: ClassVar[dict[str, int]]", "factors")

    return "\n".join(kept())
