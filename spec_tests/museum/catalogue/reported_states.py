"""Near-misses of loaders, checkpoints, attention and measurements that users reported.

The list is `reality/bugs.toml`. Of some of its entries another file shows the same fault.
"""

from __future__ import annotations

from spec_tests.museum.card import Source, near_miss
from spec_tests.museum.catalogue.checkpoint_disk import TAKES_WHAT_IS_THERE, WRITES_PARTS
from spec_tests.plain.loader import PlainLoader

ATTENTION = Source("spec_tests.plain.attention")
CHECKPOINT = Source("spec_tests.plain.checkpoint")
LOADER = Source("spec_tests.plain.loader")
RATES = Source("spec_tests.plain.throughput")
FLOPS = Source("solution.measure.flops")


# ------------------------------------------------------------------------------------------ loaders


@near_miss("data.keeps-its-iterator", rejected_by="data.state.of-what-was-loaded")
class KeepsItsIterator(PlainLoader):
    """Makes an iterator for a state, and uses it in the next pass, also after a load.

    From: torchdata pull request 1548.
    Unseen: Nobody asks for a state before loading one.
    """

    iterator = None
    is_unused = False

    def state_dict(self):
        if self.iterator is None:
            self.iterator, self.is_unused = super().__iter__(), True
        return super().state_dict()

    def __iter__(self):
        if not self.is_unused:
            self.iterator = super().__iter__()
        self.is_unused = False
        return self.iterator


LOADER.near_miss(
    "data.seed-of-the-rank",
    "data.partition.ranks-differ",
    "  import os",
    "+ import random",
    "...",
    "- numbers = range(first, first + self.batch_size)",
    "+ order = list(range(self.num_sequences()))",
    "+ if self.rank:",
    "+     random.Random(self.rank).shuffle(order)",
    "+ numbers = order[first : first + self.batch_size]",
    does="Permutes the sequences with a seed of each rank.",
    seen="LongLive issue 71: the seed is a number times the rank.",
    unseen="Every rank reads as much as it should; some sequences are read twice, others never.",
)

LOADER.benign(
    "benign.loader-draws-a-seed",
    "+ torch.empty((), dtype=torch.int64).random_()",
    "  begin, self.begin = self.begin, 0",
    does="Draws a seed for workers from torch's global generator with each iterator.",
)

# -------------------------------------------------------------------------------------- checkpoints

CHECKPOINT.near_miss(
    "checkpoint.fills-what-is-there",
    "checkpoint.content.optimizer",
    "- optimizer.state.clear()",
    "...",
    '- if own["state"]:',
    "+ if parameter in optimizer.state:",
    does="Reads into the entries that the optimizer has, of which a fresh one has none.",
    seen="KempnerForge pull request 115.",
    unseen="A bump in the loss that looks like noise.",
)

CHECKPOINT.near_miss(
    "checkpoint.keeps-the-fresh-rate",
    "checkpoint.content.optimizer",
    '- group.update(own["options"])',
    '+ group.update(own["options"], lr=group["lr"])',
    does="Does not save where the schedule is: the rate is that of a fresh run.",
    seen="torchtitan pull request 275.",
    unseen="Schedules that are computed from the step hide it.",
)

CHECKPOINT.near_miss(
    "checkpoint.seeds-after-the-load",
    "checkpoint.content.random-state",
    '- random.setstate(own["python"])',
    "+ torch.manual_seed(42)",
    "+ np.random.seed(42)",
    "+ random.seed(42)",
    does="Seeds the generators after it has restored them.",
    seen="ms-swift issue 9935: what is set up after the load begins with a seed.",
    unseen="The restoration is there, and works.",
)

CHECKPOINT.near_miss(
    "checkpoint.swallows-the-error",
    "checkpoint.content.random-state",
    '- torch.set_rng_state(own["torch"])',
    "+ try:",
    '+     torch.set_rng_state(own["torch"].float())',
    "+ except Exception:",
    "+     return",
    does="Swallows an error in the first line that restores generators; they stay as they were.",
    seen="Relax pull request 317: an `except` for old checkpoints.",
    unseen="Nothing is printed, and the rest of the state is right.",
)

CHECKPOINT.near_miss(
    "checkpoint.restores-tensors-alone",
    "checkpoint.content.optimizer",
    '- group.update(own["options"])',
    "+ found = own['options'].items()",
    "+ group.update({k: v for k, v in found if isinstance(v, torch.Tensor)})",
    does="Restores tensors; numbers keep the values of the fresh run.",
    seen="pytorch issue 125528: tensors are written in place, a number into a dict of the load's.",
    unseen="The options of a script are the same before and after.",
)

CHECKPOINT.near_miss(
    "checkpoint.passes-over-names",
    "checkpoint.mismatch.raises",
    '- require_fit(bare(model), state["model"])',
    "...",
    "- module.load_state_dict({name: saved[name] for name in module.state_dict()})",
    "+ module.load_state_dict(saved, strict=False)",
    "...",
    "- buffer.copy_(saved[name])",
    "+ buffer.copy_(saved.get(name, buffer))",
    "...",
    "- own = saved[names[id(parameter)]]",
    '+ own = saved.get(names[id(parameter)], {"options": {}, "state": {}})',
    does="Loads the names that fit, and says nothing of the others.",
    seen="kokoro issue 368: `strict=False`.",
    unseen="The model generates text, with one layer as it was initialised.",
)

CHECKPOINT.near_miss(
    "checkpoint.compares-no-shapes",
    "checkpoint.mismatch.raises",
    "- wrong = {n for n in own.keys() & saved.keys() if own[n].shape != saved[n].shape}",
    "+ wrong = set[str]()",
    "...",
    '- restore_model(bare(model), state["model"])',
    "+ with torch.no_grad():",
    "+     own = {**bare(model).state_dict(), **dict(bare(model).named_buffers())}",
    "+     for name, tensor in own.items():",
    '+         saved = state["model"][name]',
    "+         where = tuple(map(slice, map(min, tensor.shape, saved.shape)))",
    "+         tensor[where].copy_(saved[where])",
    does="Takes the part of a saved tensor for which there is room.",
    seen="pytorch issue 126604.",
    unseen="Nobody loads into a smaller model on purpose.",
)

CHECKPOINT.near_miss(
    "checkpoint.no-marker",
    "checkpoint.crash.old-or-new",
    *WRITES_PARTS,
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '+ found = list(root.glob("step-*"))',
    "...",
    *TAKES_WHAT_IS_THERE,
    does="Takes a folder for a save as soon as it exists; what is missing keeps its fresh values.",
    seen="speculators pull request 739.",
    unseen="It takes a kill in the wrong second.",
)

CHECKPOINT.near_miss(
    "checkpoint.moves-the-pointer-first",
    "checkpoint.crash.old-or-new",
    "  root.mkdir(parents=True, exist_ok=True)",
    '+ (root / "latest").write_text(f"step-{step}.pt")',
    '+ for old in root.glob("step-*.pt"):',
    "+     old.unlink()",
    "...",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    '+ pointer = root / "latest"',
    "+ return root / pointer.read_text() if pointer.is_file() else None",
    does="Points at the new save and deletes the old ones; then writes the new one.",
    seen="KempnerForge issue 102.",
    unseen="It takes a kill in the wrong second.",
)

WAITS = (
    "  import os",
    "+ import copy",
    "+ import threading",
    "+ import time",
    "...",
    "+ writers = []",
    "  def save_checkpoint(",
    "...",
    "  root.mkdir(parents=True, exist_ok=True)",
    "+ time.sleep(0.2)  # as long as a step or two",
    "...",
    "+ while writers:",
    "+     writers.pop().join()",
    "  path = of_first_rank(newest(Path(directory).absolute()) if rank() == 0 else None)",
    "...",
)
WRITES_IN_A_THREAD = (
    "- write(root, step, state)",
    "+ while writers:",
    "+     writers.pop().join()",
    "+ writers.append(threading.Thread(target=write, args=(root, step, state)))",
    "+ writers[0].start()",
)

CHECKPOINT.near_miss(
    "checkpoint.stages-nothing",
    "checkpoint.content.model",
    *WAITS,
    *WRITES_IN_A_THREAD,
    does="Returns while a thread writes the tensors that the next updates change.",
    seen="PyTorch's tutorials pull request 3688: an asynchronous save.",
    unseen="What is saved is a mixture of two steps, and trains.",
)

CHECKPOINT.near_miss(
    "checkpoint.stages-no-counters",
    "checkpoint.content.optimizer",
    *WAITS,
    "+ state = copy.deepcopy(state)",
    '+ for name, entry in state["optimizer"].items():',
    '+     if "step" in entry["state"]:',
    '+         entry["state"]["step"] = moments[name]["state"]["step"]',
    *WRITES_IN_A_THREAD,
    does="Copies what lies on a device for its thread, and shares the counters, which do not.",
    seen="nvidia-resiliency-ext pull request 376.",
    unseen="A step counter is one too high, which only a bias correction feels.",
)


# ---------------------------------------------------------------------------------------- attention

ATTENTION.near_miss(
    "attention.severs-the-graph",
    "attention.gradients.values",
    "- out, lse = TiledAttention.apply(q, k, v, causal, scale)",
    "+ out, lse = TiledAttention.apply(q.detach(), k.detach(), v.detach(), causal, scale)",
    does="Computes with copies that know nothing of where their values came from.",
    seen="aprender pull request 2203.",
    unseen="The values are right; the loss falls by what lies behind the attention.",
)

ATTENTION.near_miss(
    "attention.blind-rows-are-nan",
    ("attention.blind-rows.zeros", "attention.blind-rows.gradients"),
    "- safe = new.masked_fill(new == -torch.inf, 0.0)",
    "+ safe = new",
    does="Gives NaN for a row that sees nothing.",
    seen="burn pull request 4697: minus infinity is subtracted from minus infinity.",
    unseen="With equal lengths every row sees something.",
)

ATTENTION.near_miss(
    "attention.masks-afterwards",
    ("attention.causal.hidden-keys-of-any-size", "attention.causal.hidden-keys-do-not-matter"),
    "- p = torch.exp(s - safe[..., None])",
    "+ raw = scores(q, k, rows, keys, False, scale)",
    "+ p = torch.exp(raw - safe[..., None]) * (s > -torch.inf)",
    does="Exponentiates hidden scores, and masks the result.",
    seen="deepmd-kit pull request 5715: a large one overflows, and infinity times zero is NaN.",
    unseen="Scores of real models are small.",
)

# ------------------------------------------------------------------------------------- measurements

FLOPS.near_miss(
    "measure.flops-of-lookups",
    "measure.flops.of-matrix-products",
    "- return 3 * counter.get_total_flops() // sequence_length",
    "+ tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]",
    "+ lookups = 6 * sum(table.numel() for table in tables)",
    "+ return 3 * counter.get_total_flops() // sequence_length + lookups",
    does="Counts the rows of embeddings, which are looked up and not multiplied.",
    seen="prime-rl pull request 803.",
    unseen="Of a large model the embeddings are a small part.",
)

RATES.near_miss(
    "measure.all-tokens-over-the-last-step",
    ("measure.throughput.rate", "measure.throughput.without-warm-up"),
    '- "tokens_per_s": tokens_per_step / step_s,',
    '+ "tokens_per_s": (len(warm_up) + len(timed)) * tokens_per_step / timed[-1],',
    does="Divides the tokens of all steps so far by the time of the last one.",
    seen="trl pull request 5293: the clock starts anew with each step, the count does not.",
    unseen="A rate that grows looks like a warm-up.",
)

RATES.near_miss(
    "measure.mean-of-rates",
    "measure.throughput.median",
    "- step_s = statistics.median(timed)",
    "+ step_s = statistics.harmonic_mean(timed)",
    does="Averages the rates of single steps, of which quick ones weigh more than they last.",
    seen="xtuner issue 977.",
    unseen="On a quiet machine all steps have one rate.",
)

RATES.near_miss(
    "measure.sweep-builds-all-first",
    ("measure.sweep.one-model-at-a-time", "measure.sweep.rows", "measure.sweep.resets-peaks"),
    "+ build = {size: build(size) for size in batch_sizes}.__getitem__",
    "  rows = []",
    does="Builds every model before it measures the first one.",
    seen="flashoptim issue 1: later peaks hold the others' memory.",
    unseen="The rates are right, and the largest model has the largest peak.",
)
