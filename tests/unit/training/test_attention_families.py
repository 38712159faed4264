"""Whether packed sequences stay apart in a family: what its source says, held against what its logits show."""

from __future__ import annotations

import pytest
import torch
from attention_cases import sequences
from attention_families import FAMILIES, LENGTHS, family_config, mixing, padded_logits, register

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention
from verl_ext_sharding.training.attention import model_support, resolve_attention
from verl_ext_sharding.training.attention_support import IMPLEMENTATIONS

EXACT = 1e-5
MIXED = 1e-4

POSITIONS = "hands no position_ids to its masks"
READS = "reads its mask"
ALWAYS = dict.fromkeys(IMPLEMENTATIONS)
REFUSED = {
    "afmoe": dict.fromkeys(("varlen", "sdpa", "eager"), POSITIONS),
    "deepseek_v4": ALWAYS | {"eager": "layers .heavily_compressed_attention"},
    "doge": ALWAYS | dict.fromkeys(("sdpa", "eager"), READS),
    "falcon_alibi": ALWAYS | {"eager": POSITIONS, "flash_attention_2": "alibi", "sdpa": "alibi"},
    "falcon_h1": ALWAYS | dict.fromkeys(("flash_attention_2", "sdpa", "eager"), "layers .hybrid"),
    "glm_moe_dsa": ALWAYS | {"sdpa": "mask of numbers", "eager": READS},
    "gpt_bigcode": {
        "varlen": "not built on transformers' attention interface",
        "flash_attention_2": "with position_ids",
    },
    "gpt_oss": ALWAYS | {"flash_attention_2": "from the hub", "eager": POSITIONS},
    "lfm2": dict.fromkeys(IMPLEMENTATIONS, "layers .conv"),
    "llama4": ALWAYS | dict.fromkeys(("sdpa", "eager"), "chunks by places in the row"),
    "llama4_full": ALWAYS | dict.fromkeys(("sdpa", "eager"), "counts tokens in the row"),
    "minimax": dict.fromkeys(IMPLEMENTATIONS, "layers .linear_attention|reads its mask"),
    "ministral3": {"flash_attention_2": "with position_ids"},
    "qwen3_next": ALWAYS | dict.fromkeys(("flash_attention_2", "sdpa", "eager"), "layers .linear_attention"),
}
"""Implementations that can't run packed sequences of a family, and a part of the reason; None for any."""

MIXES = {
    **{
        "afmoe": "sdpa_packed",
        "falcon_h1": "flash_attention_2",
        "gpt_bigcode": "flash_attention_2",
        "gpt_oss": "eager",
    },
    **{"deepseek_v4": "eager", "glm_moe_dsa": "sdpa", "lfm2": "flash_attention_2", "llama4": "sdpa_packed"},
    **{"llama4_full": "sdpa_packed", "minimax": "sdpa_packed", "ministral3": "flash_attention_2"},
    "qwen3_next": "flash_attention_2",
}
"""An implementation that is refused although it would run."""


@pytest.fixture(autouse=True, scope="module")
def _registered():
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch)
        yield
    attention.register()


def resolve(family, name, packed=True):
    return resolve_attention(
        name,
        use_remove_padding=packed,
        device_capability=(9, 0),
        flash_attn_importable=True,
        torch_version="2.13.0",
        model_supports=model_support(family_config(family)),
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_implementations_that_are_accepted_keep_packed_sequences_apart_and_equal_padded_ones(family):
    accepted = [name for name in IMPLEMENTATIONS if name not in REFUSED.get(family, {})]
    for implementation in {resolve(family, name).name for name in accepted}:
        reach, distance = mixing(family, implementation)
        assert reach < EXACT, implementation
        assert distance < EXACT, implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_implementations_that_are_accepted_compute_the_eager_model_of_padded_batches(family):
    samples, support = sequences(LENGTHS), model_support(family_config(family))
    eager = torch.cat(padded_logits(family, samples))
    names = [name for name in IMPLEMENTATIONS if support.obstacle(name, packed=False) is None]
    for implementation in {resolve(family, name, packed=False).name for name in names}:
        if implementation != "flash_attention_2":  # transformers' own has a stand-in for packed sequences alone
            logits = torch.cat(padded_logits(family, samples, implementation))
            assert (logits - eager).abs().max() < EXACT * eager.abs().max(), implementation


@pytest.mark.parametrize(
    ("family", "name", "why"), [(family, name, why) for family in REFUSED for name, why in REFUSED[family].items()]
)
def test_implementations_that_are_refused_say_what_the_family_does(family, name, why):
    with pytest.raises(ConfigError) as caught:
        resolve(family, name)
    caught.match(why or name)


@pytest.mark.parametrize(("family", "implementation"), MIXES.items())
def test_what_is_refused_would_have_mixed_packed_sequences(family, implementation):
    reach, distance = mixing(family, implementation)
    assert max(reach, distance) > MIXED


@pytest.mark.parametrize("implementation", ["sdpa_packed", "varlen"])
def test_layers_that_read_their_mask_fail_on_boundaries(implementation):
    with pytest.raises(AttributeError):
        mixing("doge", implementation)
