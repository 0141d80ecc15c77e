"""Near-misses of checkpoints: options, errors and attempts that are taken for others."""

from __future__ import annotations

from spec_tests.impostors.card import Patched, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint


@near_miss(
    "checkpoint.options-of-one-group", rejected_by="checkpoint.content.optimizer-as-it-stands"
)
class OptionsOfOneGroup(PlainCheckpoint):
    """Saves the options of the first group for all.

    From: `optimizer.param_groups[0]`
    Unseen: Until a layer gets a rate of its own, or biases no weight decay.
    """

    def of_optimizer(self, model, optimizer):
        found = super().of_optimizer(model, optimizer)
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        return {name: {**entry, "options": options} for name, entry in found.items()}


@near_miss(
    "checkpoint.moments-of-what-trains", rejected_by="checkpoint.content.optimizer-as-it-stands"
)
class MomentsOfWhatTrains(PlainCheckpoint):
    """Leaves out the moments of what is frozen at the moment.

    From: `if parameter.requires_grad`: frozen layers have none
    Unseen: They had some while they trained, and go on from zero when they thaw.
    """

    def of_optimizer(self, model, optimizer):
        found = super().of_optimizer(model, optimizer)
        for name, parameter in getattr(model, "module", model).named_parameters():
            if name in found and not parameter.requires_grad:
                found[name]["state"] = {}
        return found


@near_miss("checkpoint.loader-by-its-truth", rejected_by="checkpoint.content.loader-at-its-end")
class LoaderByItsTruth(PlainCheckpoint):
    """Asks `if loader:`, which asks for its length.

    From: `if loader:`
    Unseen: Lengths are above zero but for a loader that counts what is left.
    """

    def of_rank(self, model, loader):
        return super().of_rank(model, loader or None)

    def restore_rank(self, everyone, loader):
        super().restore_rank(everyone, loader or None)


@near_miss("checkpoint.counts-its-attempts", rejected_by="checkpoint.save.again-and-again")
class CountsItsAttempts(Patched):
    """Names an attempt by how many there are, though older ones are removed.

    From: `len(list(folder.glob(...)))`
    Unseen: Until a step is saved a third time.
    """

    module = "solution.checkpoint.folder"
    find = "{max(taken) + 1}"
    replace = "{len(taken)}"


@near_miss(
    "checkpoint.errors-by-their-words",
    rejected_by="checkpoint.failure.of-a-loader",
    outcomes=("hang",),
)
class ErrorsByTheirWords(Patched):
    """Tells other ranks the text of an error, and takes one without for none.

    From: `str(error)`
    Unseen: Most errors say something; `assert` does not.
    """

    module = "solution.checkpoint.errors"
    find = 'return f"{type(error).__name__}: {error}"'
    replace = "return str(error)"


@near_miss("checkpoint.wrappers-by-class", rejected_by="checkpoint.names.of-a-whole-model")
class WrappersByClass(Patched):
    """Knows wrappers by their class, of which one is forgotten.

    From: `isinstance(model, DistributedDataParallel)`
    Unseen: Until a sharded run is looked at without its wrapper.
    """

    module = "solution.checkpoint.named"
    find = """            and not isinstance(model, FSDPModule)
"""
    replace = """            and type(model).__name__ != "FullySharded"
            and not isinstance(model, FSDPModule)
"""


@near_miss("checkpoint.forgets-attempts", rejected_by="checkpoint.crash.next-save-works")
class ForgetsAttempts(Patched):
    """Clears away what killed saves left, but not those of a step that was saved again.

    From: a pattern that is older than the names
    Unseen: Until a run is killed in a save after it had gone back a step.
    """

    module = "solution.checkpoint.folder"
    find = r"(\.\d+)?\.(tmp|old)"
    replace = r"\.(tmp|old)"


@near_miss("checkpoint.each-rank-skips", rejected_by="checkpoint.damage.under-its-step")
class EachRankSkips(Patched):
    """Each rank passes over what it found damaged itself, and tells nobody.

    From: a check that was divided over the ranks to be quick
    Unseen: Until a disk flips a bit: then ranks go on from different steps.
    """

    module = "solution.checkpoint.load"
    find = "comm.gather_objects(_damage(candidate.path, group), group)"
    replace = "[_damage(candidate.path, group)]"
