"""Near-misses of checkpoints: options, errors and attempts that are taken for others."""

from __future__ import annotations

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.checkpoint")
LOAD = Source("solution.checkpoint.load")
SAVE = Source("solution.checkpoint.save")
NAMED = Source("solution.checkpoint.named")
FOLDER = Source("solution.checkpoint.folder")

PLAIN.near_miss(
    "checkpoint.moments-of-what-trains",
    "checkpoint.content.optimizer-as-it-stands",
    "- entries = dict(optimizer.state.get(parameter, {}))",
    "+ entries = dict(optimizer.state.get(parameter, {})) if parameter.requires_grad else {}",
    does="Leaves out the moments of parameters that are frozen at the moment.",
    seen="`if parameter.requires_grad`: frozen layers have none",
    unseen="They had some while they trained, and go on from zero when they thaw.",
)

PLAIN.near_miss(
    "checkpoint.loader-by-its-truth",
    "checkpoint.content.loader-at-its-end",
    '- "loader": None if loader is None else loader.state_dict(),',
    '+ "loader": None if not loader else loader.state_dict(),',
    "...",
    "- if loader is not None:",
    "+ if loader:",
    does="Asks `if loader:`, which asks for its length.",
    seen="`if loader:`",
    unseen="Lengths are above zero, except for a loader that counts the remaining batches.",
)

NAMED.near_miss(
    "checkpoint.wrappers-by-class",
    "checkpoint.names.of-a-whole-model",
    '+ and type(model).__name__ != "FullySharded"',
    "  and not isinstance(model, FSDPModule)",
    does="Knows wrappers by their class, of which one is forgotten.",
    seen="`isinstance(model, DistributedDataParallel)`",
    unseen="Until a sharded run is looked at without its wrapper.",
)

FOLDER.near_miss(
    "checkpoint.forgets-attempts",
    "checkpoint.crash.next-save-works",
    '- _TEMPORARY = re.compile(r"\\.step-\\d{8,}(\\.\\d+)?\\.(tmp|old)")',
    '+ _TEMPORARY = re.compile(r"\\.step-\\d{8,}\\.(tmp|old)")',
    does="Removes the remains of killed saves, but not those of a step that was saved again.",
    seen="a pattern that is older than the names",
    unseen="Until a run is killed in a save after it had gone back a step.",
)

LOAD.near_miss(
    "checkpoint.each-rank-skips",
    "checkpoint.damage.under-its-step",
    "- reports = comm.gather_objects(_damage(candidate.path, group), group)",
    "+ reports = [_damage(candidate.path, group)]",
    does="Each rank skips the files that it found damaged itself, and does not tell the others.",
    seen="a check that was divided over the ranks to be quick",
    unseen="Until a disk flips a bit: then ranks go on from different steps.",
)

LOAD.near_miss(
    "checkpoint.first-ranks-loader",
    "checkpoint.content.loader-of-each-rank",
    "- own = dict(ranks[rank] if is_same_size else ranks[0])",
    "+ own = dict(ranks[0])",
    does="Gives every rank's loader the place of the first one's.",
    seen="state that is the same on all ranks, as a token loader's is",
    unseen="Until a loader prefetches, or draws, on each rank for itself.",
)

NAMED.near_miss(
    "checkpoint.ties-by-memory",
    "checkpoint.content.views",
    '- name = actual[key] = first.setdefault(id(value), _PREFIXES.sub("", key))',
    "+ place = value.untyped_storage().data_ptr()",
    '+ name = actual[key] = first.setdefault(place, _PREFIXES.sub("", key))',
    does="Takes tensors that begin in the same memory for one.",
    seen="`data_ptr()`, which tells tied weights",
    unseen="A buffer that is a part of another one is rare.",
)

NAMED.near_miss(
    "checkpoint.lists-of-one-rank",
    "checkpoint.sharded-model.goes-on",
    "- if not is_sharded and not is_number and _tensors_in(value):",
    "+ if not is_sharded and not is_number and isinstance(value, torch.Tensor):",
    does="Saves what an optimizer keeps in lists as the first rank has it, shards too.",
    seen="ours, once: a value that is no tensor is the same on all ranks",
    unseen="torch.optim keeps tensors, but for LBFGS.",
)

SAVE.near_miss(
    "checkpoint.sweeps-its-step",
    "checkpoint.failure.keeps-older",
    "- shutil.rmtree(temporary, ignore_errors=True)",
    '+ for path in root.glob(f"*{step}*"):',
    "+     shutil.rmtree(path, ignore_errors=True)",
    does="Clears away everything of a step whose save failed.",
    seen='`glob("*step-00000001*")`',
    unseen="Until a step that was saved before is saved again, and fails.",
)

FOLDER.near_miss(
    "checkpoint.attempts-as-words",
    "checkpoint.save.again-and-again",
    "- return sorted(found, reverse=True), sorted(complaints)",
    "+ found.sort(key=lambda each: (each.step, each.path.name), reverse=True)",
    "+ return found, sorted(complaints)",
    does="Takes the ninth attempt for later than the tenth.",
    seen="folders in the order of their names",
    unseen="Nobody saves a step ten times by hand.",
)
