"""Both models against those of `transformers`, randomly initialised, offline, in float64."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from spec_tests.tests.reference.launch import on_ranks, solution

transformers: Any = pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "max_sequence_length": 32, "num_layers": 3}
THEIR_NAMES = {
    "GPT2Config": {
        "blocks": "transformer.h",
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "LlamaConfig": {
        "blocks": "model.layers",
        "token_embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}
"""Words of our parameters' names to theirs, by the kind of our config."""


def gpt2():
    """Return their GPT-2 and our config of it."""
    theirs = transformers.GPT2Config(
        vocab_size=101,
        n_positions=32,
        n_layer=3,
        n_head=4,
        n_embd=32,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    ours = solution("config").GPT2Config(**SIZES, num_heads=4, embedding_dim=32)
    return transformers.GPT2LMHeadModel(theirs), ours


def llama():
    """Return their Llama and our config of it."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "embedding_dim": 64}
    multiples = {"ffn_multiplier": 1.3, "ffn_multiple_of": 16}
    ours = solution("config").LlamaConfig(**SIZES, **shape, **multiples)
    theirs = transformers.LlamaConfig(
        vocab_size=101,
        max_position_embeddings=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_size=64,
        intermediate_size=ours.ffn_dim,
        rms_norm_eps=ours.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(theirs), ours


def their_name(name, config):
    """Their name of a parameter of ours."""
    for ours, theirs in THEIR_NAMES[type(config).__name__].items():
        name = name.replace(ours, theirs)
    return name


def turned(tensor, name):
    """A weight of theirs as ours: their GPT-2's Conv1D holds `[in, out]`."""
    is_conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.t().contiguous() if is_conv else tensor


@pytest.mark.parametrize("models", [gpt2, llama])
@on_ranks(1)
def test_logits_are_theirs(ctx, models):
    theirs, config = models()
    torch.manual_seed(1)
    theirs = theirs.double().eval()
    # Weights far from symmetric and of size 0.3: a missing transpose, a swapped half of a head or a
    # forgotten scale moves the logits by tenths.
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3) if p.ndim > 1 else p.uniform_(0.5, 1.5)
    state = theirs.state_dict()
    ours = solution("models.families").build(config).double()
    names = {name: their_name(name, config) for name in ours.state_dict()}
    assert set(names.values()) == set(state)
    ours.load_state_dict({name: turned(state[key], key) for name, key in names.items()})
    ids = torch.randint(0, 101, (2, 24))
    # Theirs normalises in float32 whatever the model's dtype; here the rest shall be seen.
    with mock.patch.object(
        transformers.models.llama.modeling_llama.LlamaRMSNorm,
        "forward",
        lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon),
    ):
        expected, got = theirs(ids).logits, ours(ids)
    # float64; three layers of sums of at most 256 terms lose a few hundred units, not millions.
    assert (expected - got).abs().max() <= 1e-12 * expected.abs().max()
