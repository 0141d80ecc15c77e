"""A scene: what exists before the first call of a program, as a set of words.

    Scene.of("stack nested 2x2 half two held")

A word belongs to one axis. An axis that is not named has its first word, the ordinary one. A scene
is written in a clause, printed in a failure, given to `explore` and drawn, all in the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from spec_tests.programs.optimizers import FUSED, SGD, AsIs, Counting, Hooked, dealt, with_options
from spec_tests.rig.outcomes import is_within
from spec_tests.rig.toys import TOYS

HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Word:
    """A value of an axis.

    Attributes:
        value: what it stands for.
        level: the level of the contract that promises it.
        sizes: world sizes at which it exists; all if empty.
        toys: toys with which it goes; all if empty.
        refusable: functions that may refuse it with an error.
        of: functions that have it; all that have its axis if empty.
        is_drawn: whether the generator has it, and not clauses alone.
    """

    value: Any = None
    level: str = "correct"
    sizes: tuple[int, ...] = ()
    toys: tuple[str, ...] = ()
    refusable: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    is_drawn: bool = True

    def fits(self, subject: str, size: int, toy: str) -> bool:
        """Return whether a function has it, on so many ranks and with this toy."""
        named = ((self.of, subject), (self.sizes, size), (self.toys, toy))
        return all(not known or one in known for known, one in named)

    def is_drawn_at(self, level: str) -> bool:
        """Return whether the generator has it at this level."""
        return self.is_drawn and is_within(self.level, level)


def toy(name: str, use: Sequence[str] = (), *, by_rank: bool = False, **word: Any) -> Word:
    """Return a toy's word: micro-batches use these branches in turn; `by_rank`: so do ranks."""
    return Word((name, tuple(use), by_rank), **word)


REPLICAS = ("ddp", "ddp_bucketed")
SHARDS = ("fully_shard",)
WHOLE = ("fsdp",)
MODELS = REPLICAS + SHARDS + WHOLE
OPTIMIZER = ("sharded_optimizer",)
TRAINERS = ("build_trainer", "build_zero1_trainer", "build_fsdp_trainer")
REPLICATED = (*REPLICAS, "build_trainer", "build_zero1_trainer")
NARROW = ("narrow",)
TWO_DTYPES, MIXED = "two-dtypes", "mixed"
STEPPED = ("stack", "even", "mlp", "ragged", "tied", "conv", "strided", "gapped", TWO_DTYPES, MIXED)
THREE_USED = ("stack", "even", "mlp", "ragged", "narrow")  # parameters, or more
ALL_USED = (*THREE_USED, "conv", "strided")
WITH_BUFFERS = ("stack", "even", "mlp", "tied", "conv", "strided", "unused")
COMPILED = ("even",)  # a compiler takes its time
SMALL_BUCKET_MB = 32 * 4 / 2**20
REACH = {HALF: 64, BRAIN: 8}
"""`Toy.reach` of the toy 'narrow' in dtypes of few bits."""

# Rows that two, three and four ranks do not divide, ties, and layers called twice may be refused
# by `fsdp`.
AXES: Mapping[str, Mapping[str, Word]] = {
    "toy": {
        "stack": toy("stack", refusable=WHOLE),
        "even": toy("even"),
        **{name: toy(name, refusable=WHOLE) for name in ("mlp", "ragged")},
        "tied": toy("tied", refusable=WHOLE + SHARDS),
        **{n: toy(n, refusable=WHOLE, sizes=(1, 2, 3)) for n in ("reused", "reordered")},
        "branches": toy("branches", refusable=WHOLE),
        "branches-in-turn": toy("branches", ("abc", "ba"), refusable=MODELS + TRAINERS),
        "branches-by-rank": toy(
            *("branches", ("abc", "ba")),
            by_rank=True,
            level="production",
            refusable=MODELS + TRAINERS,
        ),
        # Ranks use branches in other orders, or other branches.
        **{
            name: toy(name.split("-")[0], use, by_rank=True, of=of, refusable=may, is_drawn=False)
            for name, use, of, may in (
                ("branches-in-any-order", ("abc", "cab", "bca", "acb"), REPLICATED, TRAINERS),
                ("branches-apart", ("b", "c", "a"), REPLICAS, REPLICAS),
                ("branches-one-each", ("ab", "ac"), REPLICATED, REPLICATED),
                ("strided-one-each", ("ts", "s"), REPLICAS, REPLICAS),
            )
        },
        "branches-later": toy(
            "branches", ("ab", "abc"), refusable=TRAINERS, of=TRAINERS, is_drawn=False
        ),
        "ladder": toy("ladder", ("abcd", "ad", "abc"), refusable=MODELS, is_drawn=False),
        "unused": toy("unused", refusable=MODELS + TRAINERS),
        "frozen": toy("frozen", of=TRAINERS, is_drawn=False),
        "normalised": toy("buffers", refusable=TRAINERS, of=TRAINERS, is_drawn=False),
        "conv": toy("conv", refusable=WHOLE + SHARDS + TRAINERS),
        "strided": toy("strided", refusable=WHOLE + SHARDS + TRAINERS),
        "narrow": toy("narrow", refusable=WHOLE),
        # Of float32 and float64 in one unit; large numbers, which float32 would round.
        TWO_DTYPES: toy("double", refusable=WHOLE + SHARDS + OPTIMIZER),
        MIXED: toy("mixed", of=REPLICAS + OPTIMIZER, refusable=OPTIMIZER),
        "shifted": toy("shifted", of=REPLICAS + TRAINERS),
        "viewed": toy("viewed", level="production", of=REPLICAS),
        "twins": toy("twins", level="production", of=REPLICAS, is_drawn=False),
        "gapped": toy("gapped", level="production", of=REPLICAS + OPTIMIZER),
    },
    # Replicas start from the first rank's weights, whatever the others have.
    "seeds": {
        "one-seed": Word(0),
        "seed-by-rank": Word(1, of=REPLICAS),
        "own-seeds": Word(1, of=TRAINERS, is_drawn=False),
    },
    # Listed: every two children are one unit.
    "units": dict.fromkeys(("children", "layers", "nested", "root"), Word())
    | {"listed": Word(level="production", toys=(*ALL_USED, TWO_DTYPES))},
    "mesh": {
        "line": Word(),
        "2x2": Word((2, 2), sizes=(4,), refusable=SHARDS),
        "replicas": Word((None, 1), refusable=SHARDS),
        "shards": Word((1, None), refusable=SHARDS),
    },
    "group": {
        "world": Word(),
        # Ranks 0 and 2 are one group, rank 1 is a group of its own.
        "apart": Word(([0, 2], [1]), sizes=(3,)),
        "every-second": Word(([0, 2], [1, 3]), sizes=(4,)),
        "not-from-zero": Word(([1, 2], [0], [3]), sizes=(4,), is_drawn=False),
        "last-two": Word(([0], [1, 2]), sizes=(3,), is_drawn=False),
        "rows": Word(([0, 1], [2, 3]), sizes=(4,), of=SHARDS, is_drawn=False),  # of a mesh of two
    },
    "reshard": {
        "usual": Word(),
        "freed": Word(True),
        "held": Word(False),
        "held-by-one": Word(1, level="production", refusable=SHARDS),
        "in-part": Word(2, sizes=(2, 4), refusable=SHARDS),
    },
    # What is exact in float32 is so in float64; narrower dtypes need a toy of small numbers.
    "precision": {
        "plain": Word({}),
        "wide": Word({"param_dtype": DOUBLE, "reduce_dtype": DOUBLE}),
        "wide-reduced": Word({"reduce_dtype": DOUBLE}),
        "half": Word({"param_dtype": HALF, "reduce_dtype": HALF}, toys=NARROW),
        "half-reduced-wide": Word({"param_dtype": HALF, "reduce_dtype": FLOAT}, toys=NARROW),
        "brain": Word({"param_dtype": BRAIN}, toys=NARROW),
        "brain-reduced-wide": Word(
            {"param_dtype": BRAIN, "reduce_dtype": FLOAT, "output_dtype": FLOAT}, toys=NARROW
        ),
        "reduced-half": Word({"reduce_dtype": HALF}, toys=NARROW),
    },
    # By what the sum over ranks is divided: by their number, unless a setter says otherwise.
    "divisor": {
        "mean": Word(),
        "undivided": Word(1.0, level="production"),
        "by-four": Word(4.0, level="production"),
        "by-two": Word(2.0, level="production", is_drawn=False),
        "by-a-half": Word(0.5, level="production", is_drawn=False),
    },
    "weights": {
        "float32": Word(FLOAT),
        "float64": Word(DOUBLE),
        "bfloat16": Word(BRAIN, toys=NARROW),
        "float16": Word(HALF, toys=NARROW),
    },
    # A step turns the sign of every weight: exact, and no forward is as it was before.
    "optimizer": {
        "loop": Word((partial(SGD, foreach=False), 1)),
        "foreach": Word((partial(SGD, foreach=True), 1)),
        "fused": Word((FUSED, 1)),
        "two": Word((partial(SGD, foreach=False), 2)),  # each has every second parameter
        "two-foreach": Word((partial(SGD, foreach=True), 2)),
    },
    "trained": {
        "all": Word(()),
        "not-the-first": Word((0,), refusable=WHOLE, is_drawn=False),
        "not-the-ends": Word((0, -1), refusable=WHOLE),
        "not-the-middle": Word((1, 2), refusable=WHOLE),
        "not-the-second": Word((2, 3), of=TRAINERS, is_drawn=False),  # layer of "mlp"
    },
    # `ignored_params`: they stay plain, and each rank trains its own by its own gradient.
    "ignored": {
        "none-ignored": Word(()),
        "one-ignored": Word((2,), level="production", toys=THREE_USED),
        "two-ignored": Word((0, 1), level="production", toys=ALL_USED),
    },
    "output": dict.fromkeys(("tensor", "in-a-dict", "second-of-two"), Word())
    | {"in-a-named-tuple": Word(), "in-a-dataclass": Word(refusable=SHARDS + WHOLE)}
    | {"in-a-late-field": Word(refusable=SHARDS + WHOLE), "written-to": Word()},
    "entrance": {
        "forward": Word(),
        "keyword": Word(),
        "method": Word(of=SHARDS),
        # `checkpoint` inside the layers, around each, or around all: then hooks run again too.
        "recomputed": Word(level="production", refusable=WHOLE),
        "called-again": Word(level="production", refusable=WHOLE),
        "called-again-reentrant": Word(level="production", refusable=WHOLE, is_drawn=False),
        "all-again": Word(level="production", refusable=WHOLE),
        # With a backend without a code generator: each unit before it is wrapped, or the whole.
        "compiled": Word(level="production", toys=COMPILED),
        "compiled-whole": Word(level="production", toys=COMPILED),
    },
    # Each unit names the next, in forward and in backward, as to be gathered ahead.
    "hints": {"unhinted": Word(), "hinted": Word(toys=(*ALL_USED, "ladder"), refusable=SHARDS)},
    "mode": {"training": Word(True), "evaluating": Word(False)},
    # A training forward adds the buffer to its output, and then changes it by the batch.
    "buffers": {
        "no-buffer": Word(),
        "counting": Word("in place", level="production", toys=WITH_BUFFERS),
        "replacing": Word("by assignment", level="production", toys=WITH_BUFFERS),
        # The buffer is an integer, beside one of truth values; the output gets their sum.
        "counting-integers": Word(
            "integers", level="production", toys=WITH_BUFFERS, of=REPLICAS, is_drawn=False
        ),
    },
    "built": {"here": Word(), "on-meta": Word()},
    # Powers of two: of integer gradients each step of SGD is exact, however it is divided.
    "moments": {
        "sgd": Word((torch.optim.SGD, {"lr": 2.0**-6})),
        "momentum": Word((torch.optim.SGD, {"lr": 2.0**-6, "momentum": 0.5})),
        "tensor-rate": Word((torch.optim.SGD, {"lr": torch.tensor(2.0**-6)}), is_drawn=False),
        "adam": Word((torch.optim.Adam, {"lr": 0.01})),
        "adamw": Word((torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5})),
        "adagrad": Word((torch.optim.Adagrad, {"lr": 0.5}), refusable=OPTIMIZER),
        "counts-steps": Word((Counting, {"lr": 2.0**-6}), refusable=OPTIMIZER),
        "counts-later": Word(
            (Counting, {"lr": 2.0**-6, "begins": False}), refusable=OPTIMIZER, is_drawn=False
        ),
        "adafactor": Word(
            (torch.optim.Adafactor, {"lr": 0.5}), refusable=OPTIMIZER, is_drawn=False
        ),
        "as-is": Word((AsIs, {"lr": 2.0**-6}), is_drawn=False),
        "hooked": Word((Hooked, {"lr": 2.0**-6}), is_drawn=False),
        # Of trainers, see `one_trainer.OPTIMIZERS`.
        "slow": Word(of=TRAINERS, is_drawn=False),
        "lasting": Word(of=TRAINERS, is_drawn=False),
    },
    "groups": {
        "one-group": Word(lambda held: [{"params": held}]),
        "two-groups": Word(partial(dealt, number=2)),
        "group-each": Word(partial(dealt, number=64)),
        "own-options": Word(with_options),
        "one-rate": Word(lambda held: [{"params": held, "lr": 0.5}], is_drawn=False),
        "first-two": Word(lambda held: [{"params": held[:2]}], is_drawn=False),
    },
    # Of a step of a trainer, whose gradient's norm may be bounded.
    "micro-batches": {"of-one": Word(1), "of-two": Word(2), "of-three": Word(3)}
    | {"of-four": Word(4, is_drawn=False)},
    "clipping": {"unclipped": Word(), "clipped": Word(0.5), "hardly-clipped": Word(8.0)},
    # So small that every toy needs several.
    "bucket": {
        "small": Word(SMALL_BUCKET_MB),
        "tiny": Word(4 / 2**20),
        "one": Word(1.0),
        "of-a-branch": Word(15 * 4 / 2**20),  # two branches have equal sizes, and can be mixed up
    },
}
"""The language of scenes: words by axis. The first word of an axis is the ordinary one."""

AXIS_OF = {word: axis for axis, words in AXES.items() for word in words}
if len(AXIS_OF) != sum(map(len, AXES.values())):
    raise ValueError("a word belongs to two axes")

_COMMON = ("toy", "trained", "output", "mode", "optimizer")
AXES_OF: Mapping[str, tuple[str, ...]] = {
    "ddp": (*_COMMON, "entrance", "weights", "group", "buffers", "seeds"),
    "ddp_bucketed": (*_COMMON, "entrance", "weights", "group", "buffers", "seeds", "bucket"),
    "fsdp": (*_COMMON, "entrance"),
    "fully_shard": (
        *("toy", "units", "mesh", "reshard", "precision", "optimizer", "trained", "output"),
        *("entrance", "mode", "built", "weights", "group", "divisor", "buffers", "hints"),
        "ignored",
    ),
    "sharded_optimizer": ("toy", "moments", "groups", "trained", "weights", "group"),
    **dict.fromkeys(
        TRAINERS,
        ("toy", "moments", "groups", "trained", "group", "micro-batches", "clipping", "seeds"),
    ),
}
"""The axes of each function of the contract."""

_ORDINARY = tuple(next(iter(words)) for words in AXES.values())
_PLACE = {axis: place for place, axis in enumerate(AXES)}


@cache
def num_parameters(toy: str) -> int:
    """Return the number of a toy's parameters."""
    return len(list(TOYS[toy].build(0).parameters()))


@dataclass(frozen=True)
class Scene:
    """A word of every axis, in the order of `AXES`."""

    words: tuple[str, ...] = _ORDINARY

    @classmethod
    def of(cls, text: str | Scene = "") -> Scene:
        """Return the scene with these words, and the ordinary word on every other axis.

        Raises:
            ValueError: A word belongs to no axis, or two words belong to one axis.
        """
        if isinstance(text, Scene):
            return text
        said: dict[str, str] = {}
        for word in text.split():
            axis = AXIS_OF.get(word)
            if axis is None:
                raise ValueError(f"scene {text!r}: {word!r} is no word; known: {' '.join(AXIS_OF)}")
            if axis in said:
                raise ValueError(f"scene {text!r}: {word!r} and {said[axis]!r} are both of {axis}")
            said[axis] = word
        return cls(tuple(map(said.get, AXES, _ORDINARY)))  # type: ignore[arg-type]  # a default for each

    def word(self, axis: str) -> str:
        """Return the scene's word on an axis."""
        return self.words[_PLACE[axis]]

    def __getitem__(self, axis: str) -> Any:
        """Return the value of the scene's word on an axis."""
        return AXES[axis][self.word(axis)].value

    @property
    def weights(self) -> torch.dtype | None:
        """The dtype that the toy's parameters are cast to; None where they keep their own."""
        return None if self.word("toy") in (TWO_DTYPES, MIXED) else self["weights"]

    @property
    def is_held(self) -> bool:
        """Whether full weights stay from a forward to its backward."""
        return self.word("reshard") in ("held", "held-by-one")

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler is at work."""
        return self.word("entrance") in ("compiled", "compiled-whole")

    def without(self, word: str) -> Scene:
        """Return the smaller scene that has the ordinary word in this word's place."""
        return Scene.of(" ".join(w for w in str(self).split() if w != word))

    def said(self) -> Iterator[Word]:
        """Yield the words, as their axes have them."""
        for axis, word in zip(AXES, self.words, strict=True):
            yield AXES[axis][word]

    def may_be_refused_by(self, subject: str) -> bool:
        """Return whether an error is as good as the right answer."""
        return any(subject in word.refusable for word in self.said())

    def exists(self, subject: str, size: int) -> bool:
        """Return whether so many ranks can build it, and its words go together."""
        toy, axes = self.word("toy"), {AXIS_OF[word] for word in str(self).split()}
        if subject == "ddp":  # which takes no size of a bucket: the word says nothing there
            axes.discard("bucket")
        return (
            axes <= {*AXES_OF[subject]}
            and all(word.fits(subject, size, toy) for word in self.said())
            and (subject not in OPTIMIZER or self._is_stepped())
            and (subject not in TRAINERS or self._is_trained())
            and (not self["toy"][2] or self._meets(subject))
            and self.most(size) >= 1
            and self._goes_together()
        )

    def _meets(self, subject: str) -> bool:
        """Whether ranks that use other branches gather and reduce the same."""
        return subject in REPLICATED or (subject in SHARDS and self.word("units") == "root")

    def peers(self, size: int, rank: int) -> tuple[int, ...]:
        """Return the ranks of so many that a rank trains with, itself among them."""
        groups = self["group"] or [range(size)]
        return next(tuple(group) for group in groups if rank in group)

    def frozen(self) -> frozenset[int] | None:
        """Return the numbers of the frozen parameters; None where none exists or none is left."""
        count = num_parameters(self["toy"][0])
        numbers = self["trained"]
        if any(not -count <= number < count for number in numbers):
            return None
        found = frozenset(number % count for number in numbers)
        return found if len(found) < count else None

    def _is_stepped(self) -> bool:
        """Whether the gradients are dealt: no forward, so no branches and no narrow reduction."""
        return self.word("toy") in STEPPED and self.word("weights") in ("float32", "float64")

    def _is_trained(self) -> bool:
        """Whether an update follows its gradient smoothly, so that rounding stays rounding."""
        toy, grouped = self.word("toy"), self.word("groups") in ("one-group", "two-groups")
        # Rounding grows from step to step, unless steps are short.
        steep = ("stack", "reordered") + ("ragged",) * (self["micro-batches"] > 1)
        is_steep = toy in steep and self.word("clipping") != "clipped"
        smooth = ("adamw", "slow") if is_steep else ("sgd", "momentum", "adamw", "slow", "lasting")
        return self.word("moments") in smooth and grouped and toy not in (TWO_DTYPES, MIXED)

    def _goes_together(self) -> bool:
        is_cast, is_narrow = self.word("weights") != "float32", self["weights"] in (HALF, BRAIN)
        is_tied, is_on_meta = self.word("toy") == "tied", self.word("built") == "on-meta"
        is_in_part = self.word("reshard") == "in-part"
        return self.frozen() is not None and not (
            (is_cast and self["precision"])  # rounded twice
            or (self.weights is None and (is_cast or self["precision"]))  # it has dtypes of its own
            # `to_empty` unties, and nobody fills a buffer.
            or (is_on_meta and (is_tied or self["buffers"]))
            # What is recomputed changes them once more.
            or (self["buffers"] and self.word("entrance") == "all-again")
            # One rank shards: there is no part.
            or (is_in_part and self.word("mesh") == "replicas")
            or (self["ignored"] and not self._goes_with_ignored())
            # A group is a line, and its ranks have no parts.
            or (self["group"] and (self["mesh"] or is_in_part))
            or (is_narrow and self.word("optimizer") == "fused")  # its numbers end at 2**16
        )

    def _goes_with_ignored(self) -> bool:
        """Whether plain tensors may be beside shards: no list has both, and no input is cast."""
        is_looped = self.word("optimizer") in ("loop", "two")
        return is_looped and not self["precision"] and self.word("built") == "here"

    def most(self, size: int) -> int:
        """Return how many micro-batches stay exact in a gradient."""
        policy = self["precision"]
        one = policy.get("param_dtype", self["weights"])  # of a backward; sums are of the other
        dtypes = {self["weights"], policy.get("reduce_dtype", one)}
        reach = min(TOYS[self["toy"][0]].reach, *(REACH.get(d, 2**24) for d in (*dtypes, FLOAT)))
        part = size**2 * (4 if self["divisor"] and self.word("toy") == "narrow" else 1)
        return reach // part if REACH.get(one, 2**24) >= 2 * part else 0

    def __str__(self) -> str:
        return " ".join(w for w, usual in zip(self.words, _ORDINARY, strict=True) if w != usual)
