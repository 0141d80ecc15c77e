"""What the reference's models promise beyond the contract: meta device, counts, checkpointing."""

import pytest

from spec_tests.reference_tests.launch import answer

PROGRAM = """
import collections
import functools
import json

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from solution.attention import attention
from solution.config import GPT2Config, LlamaConfig
from solution.models import families
from solution.models.gpt2 import GPT2
from solution.models.llama import Llama
from solution.optim import decay_groups

LENGTH = 48  # of the sequences: no other size of these models, so that T x T is recognised
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=50, max_sequence_length=64, num_layers=2, num_heads=4, embedding_dim=32
    ),
    "llama": LlamaConfig(
        vocab_size=50, max_sequence_length=64, num_layers=2, num_heads=4, num_kv_heads=2,
        embedding_dim=32, ffn_multiple_of=8,
    ),
}
CLASSES = {"gpt2": GPT2, "llama": Llama}


class Made(TorchDispatchMode):
    # Every tensor that an operation made, by its storage, as long as someone keeps it.
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.append((StorageWeakRef(storage), tuple(tensor.shape), storage.nbytes()))
        return out

    def kept(self):
        storages = {ref.cdata: n for ref, shape, n in self.made if not ref.expired()}
        squares = {
            ref.cdata for ref, shape, n in self.made
            if not ref.expired() and shape[-2:] == (LENGTH, LENGTH)
        }
        return sum(storages.values()), len(squares)


class Drawn(TorchDispatchMode):
    # How often each storage was drawn at random.
    def __init__(self):
        super().__init__()
        self.times = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.times[args[0].untyped_storage()._cdata] += 1
        return function(*args, **(kwargs or {}))


def draws(name):
    model = families.build(CONFIGS[name])
    with Drawn() as drawn:
        model.reset_parameters(torch.Generator().manual_seed(5))
    return {n: drawn.times[p.untyped_storage()._cdata] for n, p in model.named_parameters()}


def decays(name):
    model = families.build(CONFIGS[name])
    names = {id(p): n for n, p in model.named_parameters()}
    groups = decay_groups(model, weight_decay=0.1)
    return [[names[id(p)], group["weight_decay"]] for group in groups for p in group["params"]]


def checkpointing(name, backend, dtype):
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 50
    found, gradients = {}, []
    for mode in ("none", "full", "selective"):
        torch.manual_seed(3)
        attend = functools.partial(attention, backend=backend)
        model = CLASSES[name](CONFIGS[name], attention=attend, activation_checkpointing=mode)
        with Made() as made, torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(ids).float().square().mean()
        kept, squares = made.kept()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        found[mode] = {
            "kept": kept,
            "squares": squares,
            "equal": all(map(torch.equal, gradients[0], gradients[-1])),
        }
    return found


def meta(name):
    torch.manual_seed(0)
    model = families.build(CONFIGS[name])
    ids = torch.randint(0, 50, (2, LENGTH))
    with torch.device("meta"):
        empty = families.build(CONFIGS[name])
    empty.to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        if tensor.is_floating_point() and tensor.requires_grad:
            tensor.data.fill_(torch.nan)
    empty.load_state_dict(model.state_dict())
    drawn = [families.build(CONFIGS[name]).reset_parameters(torch.Generator().manual_seed(5))
             .state_dict() for _ in range(2)]
    return {
        "equal": torch.equal(empty(ids), model(ids)),
        "reset": all(torch.equal(drawn[0][k], drawn[1][k]) for k in drawn[0]),
        "tables": sorted({str(b.dtype) for b in empty.to(torch.bfloat16).buffers()}),
        "state": [k for k in model.state_dict() if k not in dict(model.named_parameters())],
    }


def counts(config):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = families.build(config)
        model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    size = sum(p.numel() for p in model.parameters())
    return {
        "parameters": [size, families.parameter_count(config)],
        "flops": [
            counter.get_total_flops(),
            2 * LENGTH * families.flops_per_token(config, sequence_length=LENGTH),
        ],
    }


def causal(name):
    torch.manual_seed(0)
    model = families.build(CONFIGS[name]).double()
    ids = torch.randint(0, 50, (1, LENGTH))
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 50
    a, b = model(ids)[0], model(other)[0]
    return [torch.equal(a[:20], b[:20]), bool((a[20:] != b[20:]).any(dim=-1).all())]


presets = {
    "gpt2 small": GPT2Config.preset("small"),
    "llama debug": LlamaConfig.preset("debug"),
    "llama 1b": LlamaConfig.preset("1b"),
}
print(json.dumps({
    "checkpointing": {
        f"{name} {backend} {dtype}": checkpointing(name, backend, dtype)
        for name in CONFIGS
        for backend in ("sdpa", "plain", "tiled")
        for dtype in (None, torch.bfloat16)
    },
    "meta": {name: meta(name) for name in CONFIGS},
    "counts": {name: counts(config) for name, config in (CONFIGS | presets).items()},
    "causal": {name: causal(name) for name in CONFIGS},
    "draws": {name: draws(name) for name in CONFIGS},
    "decays": {name: decays(name) for name in CONFIGS},
}))
"""


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    return answer(PROGRAM, folder=tmp_path_factory.mktemp("models"))


def test_checkpointing_changes_no_bit_of_a_gradient(found):
    for case, modes in found["checkpointing"].items():
        assert all(mode["equal"] for mode in modes.values()), case


def test_checkpointing_keeps_no_scores_and_less_of_everything(found):
    for case, modes in found["checkpointing"].items():
        assert modes["full"]["squares"] == modes["selective"]["squares"] == 0, case
        assert modes["full"]["kept"] < modes["selective"]["kept"] < modes["none"]["kept"], case
    # Else the line above would have looked for nothing.
    assert found["checkpointing"]["gpt2 plain None"]["none"]["squares"] > 0


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_model_comes_whole_from_the_meta_device(found, model):
    assert found["meta"][model]["equal"]
    assert found["meta"][model]["reset"]
    assert found["meta"][model]["tables"] == (["torch.float32"] if model == "llama" else [])


def test_parameters_and_operations_are_counted_exactly(found):
    for name, counts in found["counts"].items():
        for counted, formula in counts.values():
            assert counted == formula, name
    assert found["counts"]["gpt2 small"]["parameters"][0] == 124_439_808
    assert found["counts"]["llama debug"]["parameters"][0] == 6_163_712
    assert found["counts"]["llama 1b"]["parameters"][0] == 1_498_482_688


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_token_changes_its_own_logits_and_later_ones_only(found, model):
    assert found["causal"][model] == [True, True]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_initialisation_draws_every_matrix_once_and_nothing_else(found, model):
    drawn = found["draws"][model]
    matrices = {name for name in drawn if not name.endswith(("norm.weight", ".bias"))}
    assert drawn == {name: int(name in matrices) for name in drawn}
    assert matrices < set(drawn)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_matrices_decay_and_biases_and_norms_do_not(found, model):
    decayed = dict(found["decays"][model])
    assert len(decayed) == len(found["decays"][model])
    assert set(decayed) == set(found["draws"][model])
    assert decayed == {
        name: 0.0 if name.endswith(("norm.weight", ".bias")) else 0.1 for name in decayed
    }
