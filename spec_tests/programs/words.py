"""What calls are, and the words that they take, by kind."""

from __future__ import annotations

from spec_tests.programs.scene import MODELS, OPTIMIZER, REPLICAS, SHARDS, TRAINERS, WHOLE

EVERY = MODELS + OPTIMIZER
SAVED = REPLICAS + SHARDS + OPTIMIZER + TRAINERS
BEFORE_A_FINISH = ("evaluate", "evaluate_apart", "infer", "finish")
"""Calls between a backward and its finish of which the contract says what follows."""
WORDS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    # word: the functions that have it, its level
    "how": {
        "none": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "zero": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "of-the-model": (REPLICAS + SHARDS, "production"),
    },
    "order": dict.fromkeys(("two", "largest"), (REPLICAS + SHARDS, "correct")),
    "which": dict.fromkeys(("first", "second"), (REPLICAS + SHARDS + WHOLE, "correct")),
    "layer": dict.fromkeys(("first", "middle", "last"), (MODELS + TRAINERS, "correct")),
    "flag": dict.fromkeys(("True", "False"), (SHARDS, "correct")),
    "at_once": {"now": (SHARDS, "correct"), "in-flight": (SHARDS, "production")},
    "where": {
        "parameters": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "local-tensors": (SHARDS, "correct"),
        "one-parameter": (REPLICAS + SHARDS + WHOLE + OPTIMIZER, "correct"),
        "elsewhere": (OPTIMIZER, "correct"),  # to memory of its own, which it then has
    },
    "number": dict.fromkeys(("0", "1", "2"), (SHARDS + WHOLE + OPTIMIZER + TRAINERS, "correct"))
    | {"3": (TRAINERS, "production")},
    "assigns": {
        "copied": (SAVED, "correct"),
        "assigned": (SHARDS, "correct"),
        "in-parts": (SHARDS, "correct"),
    },
    "whose": dict.fromkeys(("all", "half", "one", "none"), (OPTIMIZER, "correct")),
    "does": dict.fromkeys(("deals", "sets-the-rate", "raises"), (OPTIMIZER, "correct")),
    "factor": dict.fromkeys(("2", "0.5"), (OPTIMIZER + TRAINERS, "correct"))
    | {"0": (TRAINERS, "production")},
    "count": dict.fromkeys(("1", "3"), (TRAINERS, "correct")),
    "rank": dict.fromkeys(("0", "1"), (EVERY + TRAINERS, "correct")),
}
"""The words that a call may take, by kind."""

MEANS = {
    "accumulate N": "forward and backward without a reduction: the gradients stay on this rank",
    "add_group": "the optimizer gets two parameters more, in a group of their own",
    "another_lives": "another model is wrapped, trained for a step and dropped",
    "another_steps RANK": "this rank alone trains a model of its own",
    "aside N": "an evaluation inside `no_sync`",
    "backward N": "forward and reduced backward of micro-batch N, and its finish",
    "begun N": "forward and reduced backward of micro-batch N, whose finish is a later call",
    "both N M": "two forwards, one backward of the sum of their losses, and its finish",
    "clip ORDER": "gradients are clipped, by the norm of order two or by the largest, then cleared",
    "closure N DOES": "a step with a closure: it gives gradients, sets a rate as well, or raises",
    "deal N WHOSE": "gradients of step N are given to all, half, one or none of the parameters",
    "decay": "from now on weights decay by a quarter of the rate",
    "directly N": "forward and backward of the module itself, cleared before and after",
    "early N": "forward and reduced backward that is said not to be the last one",
    "evaluate N": "a forward under `no_grad`",
    "evaluate_apart N": "a forward under `no_grad`, in evaluation mode for that time",
    "fails N LAYER": "a caught exception in a forward: in that layer, or micro-batch of a trainer",
    "fails_backward N LAYER": "a caught exception in a backward: in that layer, or micro-batch",
    "fails_evaluating N": "a caught exception in the forward of an evaluation",
    "finish": "the finish of a backward, once more if there was one",
    "forward N": "a forward whose backward is a later call, `pending`",
    "freeze N": "parameter number N requires no gradient from now on",
    "infer N": "a forward in inference mode",
    "keep FLAG": "whether full weights stay after a backward",
    "late RANK": "this rank comes late to the next call",
    "leave": "an exception ends a `no_sync`",
    "load HOW": "what was saved is loaded: copied, assigned, or one by one",
    "local": "the sums of this rank that wait for their reduction are looked at",
    "locally N": "forward and backward of a whole model, without a reduction",
    "nested N M": "two backwards in `no_sync`, the first in an inner one, which an odd N raises in",
    "outermost_waits N": "a backward that reduces all units but the outermost one",
    "partly N": "a backward that reduces over the ranks that share one copy of the weights, alone",
    "pending": "the backward of the last `forward`",
    "rate FACTOR": "by this the first group's rate is multiplied, or a trainer's first rates are",
    "read": "the trainer's full weights are looked at",
    "record N": "a forward of training whose loss is dropped",
    "reshard": "every unit is resharded by hand",
    "resumed": "the backward of the last `forward`, where another backward raised between the two",
    "save": "the state is saved: the weights, an optimizer's state, or a trainer's folder",
    "several N M": "two backwards before one finish",
    "step": "every optimizer steps: it turns the sign of its trained weights",
    "step_one WHICH": "the first optimizer steps, or the others do",
    "thaw N": "parameter number N requires a gradient again",
    "train N": "a step of the trainer on the micro-batches of number N",
    "train_of N COUNT": "a step of the trainer on so many micro-batches",
    "twice N": "two backwards of one forward",
    "unshard HOW": "every unit is unsharded by hand, at once or in flight",
    "update": "the optimizer steps",
    "wait": "the wait for what `unshard in-flight` started",
    "write WHERE": "the sign of the parameters, or of one, is turned, in place or in new memory",
    "zero_grad HOW": "gradients are cleared to None or to zero, or by the model",
}
"""Each call in words. Trainers and optimizers have some of them, see `calls.VERBS`."""
