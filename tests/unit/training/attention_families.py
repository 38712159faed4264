"""Tiny models of many families, and flash attention as far as it keeps packed sequences apart, on CPU.

What a family does only beyond a size (windows, chunks, scales that grow with the position) is made to happen within 20 tokens.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import transformers
from attention_cases import install_flash_attn, packed_inputs, padded_inputs, reference_kernel, sequences
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from verl_ext_sharding.training import packing, varlen

LENGTHS = (13, 1, 7, 9, 4)
SHAPE = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}

FAMILIES = {
    "afmoe": ("AfmoeConfig", {**GROUPED, **EXPERTS, **SLIDING}),
    "deepseek_v3": ("DeepseekV3Config", {**SHAPE, **EXPERTS, **LATENT}),
    "deepseek_v4": ("DeepseekV4Config", {**SHAPE, **EXPERTS, **LATENT, "sliding_window": 5}),
    "doge": ("DogeConfig", GROUPED),
    "falcon_alibi": ("FalconConfig", {**SHAPE, "alibi": True}),
    "falcon_h1": ("FalconH1Config", {**GROUPED, **MAMBA}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, **SLIDING}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**SHAPE, **EXPERTS, **LATENT, "index_topk": 4, "index_head_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "gpt_oss": ("GptOssConfig", {**GROUPED, **EXPERTS, **SLIDING}),
    "lfm2": ("Lfm2Config", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "llama4": (
        "Llama4TextConfig",
        {
            **{**GROUPED, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "floor_scale": 3},
            **{"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
        },
    ),
    "llama4_full": (
        "Llama4TextConfig",
        {
            **{**GROUPED, **EXPERTS, "intermediate_size_mlp": 48, "floor_scale": 3},
            **{"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]},
        },
    ),
    "minimax": ("MiniMaxConfig", {**GROUPED, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    "ministral3": ("Ministral3Config", {**GROUPED, "sliding_window": 5, "rope_parameters": YARN}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 5}),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS, "sliding_window": 5}),
    "phi3": ("Phi3Config", {**SHAPE, "num_key_value_heads": 2, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3MoeConfig", {**GROUPED, **EXPERTS, "use_sliding_window": True, "sliding_window": 5}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**GROUPED, **EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "starcoder2": ("Starcoder2Config", {**SHAPE, "num_key_value_heads": 2, "sliding_window": 5}),
}
"""Config class and its arguments."""


def flash(module, query, key, value, attention_mask, *, position_ids=None, **options):
    """What transformers' flash attention does with the restarts of `position_ids`; no mask tells it of them."""
    assert attention_mask is None
    assert options.get("softcap") is None
    assert options.get("s_aux") is None
    num_rows, _, num_tokens, _ = query.shape
    starts = torch.arange(0, num_rows * num_tokens, num_tokens)
    if position_ids is not None and num_rows == 1:
        starts = (position_ids.flatten() == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([num_rows * num_tokens])]).int()
    mask = packing.PackedMask(bounds, int(bounds.diff().max()), options.get("sliding_window"), None)
    return varlen.varlen_attention(
        module, query, key, value, mask, scaling=options.get("scaling"), kernel=STAND_IN_KERNEL
    )


STAND_IN_KERNEL = varlen.VarlenKernel.of(reference_kernel, dtypes=frozenset({torch.float32}), device_type="cpu")
STAND_INS = {"flash_attention_2": "by_positions", "varlen": "varlen_stand_in"}


def register(monkeypatch):
    """Makes the implementations and their stand-ins known to transformers."""
    install_flash_attn(monkeypatch, reference_kernel)
    AttentionInterface.register("by_positions", flash)
    AttentionMaskInterface.register("by_positions", flash_attention_mask)
    AttentionInterface.register("varlen_stand_in", partial(varlen.varlen_attention, kernel=STAND_IN_KERNEL))
    AttentionMaskInterface.register("varlen_stand_in", packing.packed_mask)


def family_config(family):
    name, arguments = FAMILIES[family]
    return getattr(transformers, name)(**arguments)


@cache
def _weights(family):
    torch.manual_seed(0)
    weights = _model(family, "eager").state_dict()
    # Norms, biases and sinks are no more the same in all places, and attention is not nearly uniform.
    return {
        key: value * 4 if value.dim() > 1 else torch.randn_like(value) * 0.1 + 1 if value.is_floating_point() else value
        for key, value in weights.items()
    }


def _model(family, implementation):
    config = family_config(family)
    config._attn_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@torch.no_grad()
def packed_logits(family, implementation, samples):
    """Logits of each sample in a packed row."""
    model = _model(family, STAND_INS.get(implementation, implementation))
    model.load_state_dict(_weights(family))
    logits = model(**packed_inputs(samples)).logits[0]
    return logits.split([len(sample) for sample in samples])


@torch.no_grad()
def padded_logits(family, samples, implementation="eager"):
    """Logits of each sample padded on the right."""
    model = _model(family, STAND_INS.get(implementation, implementation))
    model.load_state_dict(_weights(family))
    logits = model(**padded_inputs(samples)).logits
    return [row[: len(sample)] for row, sample in zip(logits, samples, strict=True)]


def mixing(family, implementation):
    """How far a changed sample reaches into the others of a packed row, and packed logits are from padded ones.

    Returns:
        Both as a share of the largest logit.
    """
    samples, others = sequences(LENGTHS), sequences(LENGTHS, seed=2)
    before = packed_logits(family, implementation, samples)
    after = packed_logits(family, implementation, [others[0], *samples[1:]])
    padded = padded_logits(family, samples)
    scale = max(row.abs().max() for row in padded)
    reach = max((one - other).abs().max() for one, other in zip(before[1:], after[1:], strict=True))
    distance = max((one - other).abs().max() for one, other in zip(before, padded, strict=True))
    return (reach / scale).item(), (distance / scale).item()
