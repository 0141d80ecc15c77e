"""Near-misses of what is saved and loaded: missing, another's, or by another name."""

from __future__ import annotations

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.checkpoint")
NAMED = Source("solution.checkpoint.named")

PLAIN.near_miss(
    "checkpoint.step-before-counting",
    ("checkpoint.content.step", "checkpoint.resume.equals-uninterrupted"),
    '- "step": step,',
    '+ "step": max(0, step - 1),',
    does="Stores the step as it was before it was counted.",
    seen="a course's trainer: one more update than asked for after each restart",
    unseen="Off by one, and only after a restart.",
)

PLAIN.near_miss(
    "checkpoint.first-ranks-random-state",
    ("checkpoint.content.random-state", "checkpoint.resume.wrapped"),
    "- own = everyone[rank() if is_same_size else 0]",
    "+ own = everyone[0]",
    does="Gives the first rank's generators and loader to all ranks.",
    seen="torchtitan issue 291: one key, many ranks, one survivor",
    unseen="On one rank it is right.",
)

PLAIN.near_miss(
    "checkpoint.no-loader",
    ("checkpoint.content.loader", "checkpoint.resume.equals-uninterrupted"),
    "- if loader is not None:",
    "+ if False:",
    does="Starts the data anew after each restart.",
    seen="nanoGPT issue 467",
    unseen="The loss is even better than before.",
)

PLAIN.near_miss(
    "checkpoint.loader-after-generators",
    "checkpoint.content.loader-that-draws",
    "- if loader is not None:",
    '-     loader.load_state_dict(own["loader"])',
    "...",
    '  random.setstate(own["python"])',
    "+ if loader is not None:",
    '+     loader.load_state_dict(own["loader"])',
    does="Restores the generators, and then the loader, which draws from them.",
    seen="restoring in the order in which the save wrote",
    unseen="Most loaders draw nothing while they take up a state.",
)

PLAIN.near_miss(
    "checkpoint.no-moments",
    ("checkpoint.content.optimizer", "checkpoint.resume.equals-uninterrupted"),
    '- found[names[id(parameter)]] = {"options": options, "state": entries}',
    '+ found[names[id(parameter)]] = {"options": options, "state": {}}',
    does="Saves options of the optimizer, not its state.",
    seen="KempnerForge pull request 115",
    unseen="A bump in the loss that looks like noise.",
)

PLAIN.near_miss(
    "checkpoint.state-in-the-weights-dtype",
    "checkpoint.content.optimizer-dtypes",
    '  restore_optimizer(model, optimizer, state["optimizer"])',
    "+ optimizer.load_state_dict(optimizer.state_dict())",
    does="Hands state to the optimizer's own `load_state_dict`, which casts it.",
    seen="torch.optim.Optimizer.load_state_dict, which knows `step` alone by name",
    unseen="Moments of AdamW have the dtype of their parameters.",
)

PLAIN.near_miss(
    "checkpoint.first-ranks-moments",
    "checkpoint.sharded-optimizer.any-world-size",
    "- moments = joined(gather(state_of_optimizer(model, optimizer)))",
    "+ moments = gather(state_of_optimizer(model, optimizer))[0]",
    does="Saves the state that the first rank has of a sharded optimizer.",
    seen="`if rank == 0: torch.save(optimizer.state)`, from before the optimizer was sharded",
    unseen="It saves, it loads, and a part of the moments is warm.",
)

NAMED.near_miss(
    "checkpoint.child-for-a-wrapped",
    "checkpoint.content.child-called-module",
    '- hasattr(model, "no_sync")',
    "- and not isinstance(model, FSDPModule)",
    '- and isinstance(getattr(model, "module", None), nn.Module)',
    '+ isinstance(getattr(model, "module", None), nn.Module)',
    does="Takes a model that has a child called `module` for a wrapper.",
    seen='`getattr(model, "module", model)`',
    unseen="Few models have such a child; of one that has, all the rest is left out.",
)

PLAIN.near_miss(
    "checkpoint.no-buffers",
    "checkpoint.content.model",
    '- restore_model(bare(model), state["model"])',
    "+ own = {name: each.clone() for name, each in bare(model).named_buffers()}",
    '+ restore_model(bare(model), {**state["model"], **own})',
    does="Leaves buffers as they were built.",
    seen="checkpoints made of named_parameters()",
    unseen="Transformers have none that matter.",
)

PLAIN.near_miss(
    "checkpoint.buffers-of-any-rank",
    "checkpoint.resume.buffers-of-first-rank",
    "+ names = enumerate(bare(model).named_buffers())",
    '+ buffers = {name: everyone[i % size()]["buffers"][name] for i, (name, _) in names}',
    "  state = {",
    "...",
    '- "model": {**bare(model).state_dict(), **everyone[0]["buffers"]},',
    '+ "model": {**bare(model).state_dict(), **buffers},',
    does="Saves each buffer from another rank.",
    seen="torch.distributed.checkpoint balances who writes which name of a replicated state",
    unseen="The statistics of each rank look plausible.",
)

PLAIN.near_miss(
    "checkpoint.new-parameters",
    "checkpoint.content.reaches-live-objects",
    "- module.load_state_dict({name: saved[name] for name in module.state_dict()})",
    "+ module.load_state_dict({name: saved[name] for name in module.state_dict()}, assign=True)",
    does="Puts new Parameter objects into the model.",
    seen="load_state_dict(assign=True) with an optimizer that was built before",
    unseen="The loaded values are right; they only never change again.",
)

PLAIN.near_miss(
    "checkpoint.shared-cache",
    "checkpoint.content.shares-no-memory",
    "+ import functools",
    "  import os",
    "...",
    "+ read = functools.cache(torch.load)",
    "  def newest(root: Path) -> Path | None:",
    "...",
    "- state = torch.load(path, weights_only=True)",
    "+ state = read(path, weights_only=True)",
    does="Hands out the same tensors at each load.",
    seen="a cache of the files read, with optimizers that keep the tensors they are given",
    unseen="Needs two runs in one process.",
)

PLAIN.near_miss(
    "checkpoint.leaves-it-evaluating",
    "checkpoint.save.changes-nothing",
    "  everyone = gather(state_of_rank(model, loader))",
    "+ model.eval()",
    does="Switches the model to evaluation for the save, and leaves it so.",
    seen="a trainer that validates and saves in one function",
    unseen="Toys have neither dropout nor batch norms, and weights go on moving.",
)

PLAIN.near_miss(
    "checkpoint.wrappers-names",
    ("checkpoint.names.across-torch-wrapper", "checkpoint.names.across-own-wrappers"),
    '- "model": {**bare(model).state_dict(), **everyone[0]["buffers"]},',
    '+ "model": model.state_dict(),',
    "...",
    '- require_fit(bare(model), state["model"])',
    "...",
    '- restore_model(bare(model), state["model"])',
    '+ model.load_state_dict(state["model"])',
    does="Saves the wrapper's state dict, `module.` prefix included.",
    seen="the course's distributed trainer; half of all forum threads on loading",
    unseen="It loads where it was saved.",
)

PLAIN.near_miss(
    "checkpoint.optimizer-by-position",
    "checkpoint.names.optimizer-by-parameter",
    "- moments = joined(gather(state_of_optimizer(model, optimizer)))",
    "+ moments = optimizer.state_dict()",
    "...",
    '- restore_optimizer(model, optimizer, state["optimizer"])',
    '+ optimizer.load_state_dict(state["optimizer"])',
    does="Keys optimizer state by the number of the parameter.",
    seen="torch.optim's own state_dict",
    unseen="The same script in the same order loads it.",
)

PLAIN.near_miss(
    "checkpoint.file-per-rank",
    "checkpoint.world-size.any",
    "- root = Path(directory).absolute()",
    '+ root = Path(directory).absolute() / f"rank-{rank()}"',
    "...",
    "- moments = joined(gather(state_of_optimizer(model, optimizer)))",
    "+ moments = state_of_optimizer(model, optimizer)",
    "...",
    "- if rank() == 0:",
    "+ if True:",
    "...",
    "- path = of_first_rank(newest(Path(directory).absolute()) if rank() == 0 else None)",
    '+ path = newest(Path(directory).absolute() / f"rank-{rank()}")',
    does="Each rank saves and loads a file of its own.",
    seen="the first version of every sharded checkpoint",
    unseen="It is right as long as the world stays the same.",
)
