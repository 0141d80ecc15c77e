"""What the reference's models promise beyond the contract: meta device, counts, checkpointing."""

import collections
import functools
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from spec_tests.tests.reference.launch import on_ranks, solution

LENGTH = 48  # of the sequences: no other size of these models, so that T x T is recognised
SIZES = {
    "gpt2": {"max_sequence_length": 64, "num_layers": 2, "num_heads": 4, "embedding_dim": 32},
    "llama": {"num_kv_heads": 2, "ffn_multiple_of": 8},
}
MODELS = pytest.mark.parametrize("model", SIZES)


def config_of(name: str) -> Any:
    """Return a small configuration, or a preset that is named behind the kind of model."""
    kind, _, preset = name.partition(" ")
    made = getattr(solution("config"), {"gpt2": "GPT2Config", "llama": "LlamaConfig"}[kind])
    return made.preset(preset) if preset else made(vocab_size=50, **SIZES["gpt2"] | SIZES[kind])


def built(name: str) -> Any:
    """Return the model of a configuration."""
    return solution("models.families").build(config_of(name))


# ----------------------------------------------------------------------------------- checkpointing


class Made(TorchDispatchMode):
    """Notes every tensor that an operation made, by its storage, as long as someone keeps it."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.append((StorageWeakRef(storage), tuple(tensor.shape), storage.nbytes()))
        return out

    def kept(self):
        """Return the bytes that are kept, and how many matrices of T x T are among them."""
        alive = [(ref.cdata, shape, size) for ref, shape, size in self.made if not ref.expired()]
        squares = {storage for storage, shape, _ in alive if shape[-2:] == (LENGTH, LENGTH)}
        return sum({storage: size for storage, _, size in alive}.values()), len(squares)


@MODELS
@pytest.mark.parametrize("backend", ["sdpa", "plain", "tiled"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@on_ranks(1)
def test_checkpointing_keeps_no_scores_and_changes_no_bit(ctx, model, backend, dtype):
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 50
    attend = functools.partial(solution("attention").attention, backend=backend)
    kept, scores, gradients = {}, {}, []
    for mode in ("none", "full", "selective"):
        torch.manual_seed(3)
        config = config_of(model)
        tried = type(built(model))(config, attention=attend, activation_checkpointing=mode)
        with Made() as made, torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = tried(ids).float().square().mean()
        kept[mode], scores[mode] = made.kept()
        loss.backward()
        gradients.append([p.grad for p in tried.parameters()])
        assert all(map(torch.equal, gradients[0], gradients[-1])), mode

    assert scores["full"] == scores["selective"] == 0
    assert kept["full"] < kept["selective"] < kept["none"]
    # Else the search for scores would have looked for nothing.
    assert scores["none"] > 0 or backend != "plain" or (model, dtype) != ("gpt2", None)


@MODELS
@on_ranks(1)
def test_every_backend_counts_the_same_operations(ctx, model):
    build, flops = solution("models.families").build, solution("measure.flops").flops_per_token
    ways = ("plain", "sdpa", "tiled", "triton")
    counts = {flops(build(config_of(model), attention=w), sequence_length=LENGTH) for w in ways}

    assert len(counts) == 1, counts


@on_ranks(1)
def test_a_tangent_is_refused_and_not_dropped(ctx):
    attend = functools.partial(solution("attention").attention, backend="tiled")
    q = torch.ones(1, 1, 8, 4)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(q, q, q), (q,), (q,))


# ----------------------------------------------------------------- initialisation, counts, decay


@MODELS
@on_ranks(1)
def test_a_model_comes_whole_from_the_meta_device(ctx, model):
    torch.manual_seed(0)
    whole, ids = built(model), torch.randint(0, 50, (2, LENGTH))
    with torch.device("meta"):
        empty = built(model)
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(torch.nan)
    empty.load_state_dict(whole.state_dict())
    assert torch.equal(empty(ids), whole(ids))
    tables = {b.dtype for b in empty.to(torch.bfloat16).buffers()}
    assert tables == ({torch.float32} if model == "llama" else set())
    drawn = [
        built(model).reset_parameters(torch.Generator().manual_seed(5)).state_dict().values()
        for _ in range(2)
    ]
    assert all(map(torch.equal, *drawn))


PUBLISHED = {"gpt2 small": 124_439_808, "llama debug": 6_163_712, "llama 1b": 1_498_482_688}


@pytest.mark.parametrize("model", [*SIZES, *PUBLISHED])
@on_ranks(1)
def test_parameters_and_operations_of_a_whole_step_are_counted_exactly(ctx, model):
    families, config = solution("models.families"), config_of(model)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        whole = families.build(config)
        whole(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    told = solution("measure.flops").flops_per_token(whole, sequence_length=LENGTH)
    assert counter.get_total_flops() == 2 * LENGTH * told
    num_parameters = families.parameter_count(config)
    assert num_parameters == PUBLISHED.get(model, num_parameters)


class Drawn(TorchDispatchMode):
    """Counts how often each storage was drawn at random."""

    def __init__(self):
        super().__init__()
        self.times: collections.Counter[int] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.times[args[0].untyped_storage()._cdata] += 1
        return func(*args, **(kwargs or {}))


@MODELS
@on_ranks(1)
def test_only_matrices_are_drawn_each_once_and_decay(ctx, model):
    made = built(model)
    with Drawn() as drawn:
        made.reset_parameters(torch.Generator().manual_seed(5))
    groups = solution("optim").decay_groups(made, weight_decay=0.1)
    decays = [(id(p), group["weight_decay"]) for group in groups for p in group["params"]]
    assert len(dict(decays)) == len(decays), "each once"
    found = {
        n: (drawn.times[p.untyped_storage()._cdata], dict(decays)[id(p)])
        for n, p in made.named_parameters()
    }
    matrices = {name for name in found if not name.endswith(("norm.weight", ".bias"))}
    assert matrices < set(found)
    assert found == {name: (1, 0.1) if name in matrices else (0, 0.0) for name in found}
