"""Both models against those of `transformers`, randomly initialised, offline, in float64."""

import pytest

from spec_tests.reference_tests.launch import answer

pytest.importorskip("transformers")

# Weights far from symmetric and of size 0.3: a missing transpose, a swapped half of a head or a
# forgotten scale moves the logits by tenths.
PROGRAM = """
import json

import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama

from solution.config import GPT2Config, LlamaConfig
from solution.models.gpt2 import GPT2
from solution.models.hugging_face import from_hugging_face_state_dict, to_hugging_face_state_dict
from solution.models.llama import Llama

# Theirs normalises in float32 whatever the model's dtype; here the rest shall be seen.
modeling_llama.LlamaRMSNorm.forward = lambda self, x: F.rms_norm(
    x, self.weight.shape, self.weight, self.variance_epsilon
)

def compare(theirs, ours):
    torch.manual_seed(1)
    theirs = theirs.double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3) if p.ndim > 1 else p.uniform_(0.5, 1.5)
    ours = ours.double()
    ours.load_state_dict(from_hugging_face_state_dict(theirs.state_dict(), ours.config))
    ids = torch.randint(0, ours.config.vocab_size, (2, 24))
    expected, got = theirs(ids).logits, ours(ids)
    back = to_hugging_face_state_dict(ours)
    refusals = []
    for name in ("lm_head.weight", next(k for k in back if "norm" in k or "ln_" in k)):
        other = {k: v for k, v in back.items() if k != name} | {"unknown." + name: back[name]}
        try:
            from_hugging_face_state_dict(other, ours.config)
        except ValueError as error:
            refusals.append(str(error))
    return {
        "difference": (expected - got).abs().max().item(),
        "size": expected.abs().max().item(),
        "back": back.keys() == theirs.state_dict().keys()
        and all(torch.equal(back[k], v) for k, v in theirs.state_dict().items()),
        "refusals": refusals,
    }

gpt2 = GPT2Config(
    vocab_size=101, max_sequence_length=32, num_layers=3, num_heads=4, embedding_dim=32
)
llama = LlamaConfig(
    vocab_size=101, max_sequence_length=32, num_layers=3, num_heads=8, num_kv_heads=2,
    embedding_dim=64, ffn_multiplier=1.3, ffn_multiple_of=16,
)
print(json.dumps({
    "gpt2": compare(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=101, n_positions=32, n_layer=3, n_head=4, n_embd=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )),
        GPT2(gpt2),
    ),
    "llama": compare(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=101, max_position_embeddings=32, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=2, hidden_size=64,
            intermediate_size=llama.ffn_dim, rms_norm_eps=llama.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": llama.rope_theta},
            tie_word_embeddings=False, attn_implementation="sdpa",
        )),
        Llama(llama),
    ),
}))
"""


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    return answer(PROGRAM, folder=tmp_path_factory.mktemp("conversion"))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_logits_are_theirs_up_to_rounding(compared, model):
    found = compared[model]

    # float64; three layers of sums of at most 256 terms lose a few hundred units, not millions.
    assert found["difference"] <= 1e-12 * found["size"]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_weights_come_back_bit_for_bit_under_their_names(compared, model):
    assert compared[model]["back"]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_key_too_many_or_too_few_is_named(compared, model):
    assert len(compared[model]["refusals"]) == 2
    assert all("unknown." in text for text in compared[model]["refusals"])
