"""Near-misses of checkpoints: options, errors and attempts that are taken for others."""

from __future__ import annotations

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint


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


@near_miss("checkpoint.first-ranks-loader", rejected_by="checkpoint.content.loader-of-each-rank")
class FirstRanksLoader(Patched):
    """Gives every rank's loader the place of the first one's.

    From: state that is the same on all ranks, as a token loader's is
    Unseen: Until a loader prefetches, or draws, on each rank for itself.
    """

    module = "solution.checkpoint.load"
    find = "own = dict(ranks[rank] if is_same_size else ranks[0])"
    replace = "own = dict(ranks[0])"


@near_miss("checkpoint.ties-by-memory", rejected_by="checkpoint.content.views")
class TiesByMemory(Patched):
    """Takes tensors that begin in the same memory for one.

    From: `data_ptr()`, which tells tied weights
    Unseen: A buffer that is a part of another one is rare.
    """

    module = "solution.checkpoint.named"
    find = "first.setdefault(id(value)"
    replace = "first.setdefault(value.untyped_storage().data_ptr()"


@near_miss("checkpoint.lists-of-one-rank", rejected_by="checkpoint.sharded-model.goes-on")
class ListsOfOneRank(Patched):
    """Saves what an optimizer keeps in lists as the first rank has it, shards too.

    From: ours, once: what is no tensor is the same on all ranks
    Unseen: torch.optim keeps tensors, but for LBFGS.
    """

    module = "solution.checkpoint.named"
    find = "and _tensors_in(value):\n        raise"
    replace = "and isinstance(value, torch.Tensor):\n        raise"


@near_miss("checkpoint.sweeps-its-step", rejected_by="checkpoint.failure.keeps-older")
class SweepsItsStep(Patched):
    """Clears away everything of a step whose save failed.

    From: `glob("*step-00000001*")`
    Unseen: Until a step that was saved before is saved again, and fails.
    """

    module = "solution.checkpoint.save"
    find = "            shutil.rmtree(temporary, ignore_errors=True)"
    replace = """            for path in root.glob(f"*{step}*"):
                shutil.rmtree(path, ignore_errors=True)"""


@near_miss("checkpoint.attempts-as-words", rejected_by="checkpoint.save.again-and-again")
class AttemptsAsWords(Patched):
    """Takes the ninth attempt for later than the tenth.

    From: folders in the order of their names
    Unseen: Nobody saves a step ten times by hand.
    """

    module = "solution.checkpoint.folder"
    find = "sorted(found, reverse=True)"
    replace = "sorted(found, key=lambda each: (each.step, each.path.name), reverse=True)"
