"""Both models against those of `transformers`, randomly initialised, offline, in float64."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from spec_tests.tests.reference.launch import solution

transformers: Any = pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "max_sequence_length": 32, "num_layers": 3}


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


def compared(ctx, models):
    """How far the logits are apart, of what size; whether weights come back; what is refused."""
    names = solution("models.hugging_face")
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
    ours.load_state_dict(names.from_hugging_face_state_dict(state, config))
    ids = torch.randint(0, 101, (2, 24))
    # Theirs normalises in float32 whatever the model's dtype; here the rest shall be seen.
    with mock.patch.object(
        transformers.models.llama.modeling_llama.LlamaRMSNorm,
        "forward",
        lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon),
    ):
        expected, got = theirs(ids).logits, ours(ids)
    back, refusals = names.to_hugging_face_state_dict(ours), []
    is_back = back.keys() == state.keys() and all(torch.equal(back[k], v) for k, v in state.items())
    for name in ("lm_head.weight", next(k for k in back if "norm" in k or "ln_" in k)):
        other = {k: v for k, v in back.items() if k != name} | {"unknown." + name: back[name]}
        with pytest.raises(ValueError) as refusal:
            names.from_hugging_face_state_dict(other, config)
        refusals.append(str(refusal.value))
    return (expected - got).abs().max().item(), expected.abs().max().item(), is_back, refusals


@pytest.mark.parametrize("models", [gpt2, llama])
def test_logits_and_weights_are_theirs_and_a_key_too_many_or_too_few_is_named(in_rank, models):
    difference, size, is_back, refusals = in_rank(compared, models)

    # float64; three layers of sums of at most 256 terms lose a few hundred units, not millions.
    assert difference <= 1e-12 * size
    assert is_back, "weights come back bit for bit under their names"
    assert len(refusals) == 2
    assert all("unknown." in text for text in refusals)
