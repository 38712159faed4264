"""Tiny models of three architectures, batches in verl's packed and padded form, and a stand-in for torch's kernel."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    modeling_flash_attention_utils,
)

from verl_ext_sharding.training import attention, packed_flash

VOCABULARY = 97
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}

CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2),
    "qwen2-sliding": lambda: Qwen2Config(
        **SHAPE,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "llama": lambda: LlamaConfig(**SHAPE, num_attention_heads=8, num_key_value_heads=2),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE, num_attention_heads=4),
}
"""qwen2-sliding has one full and one sliding layer."""

LENGTHS = (7, 1, 150, 12, 5, 149, 9)


def tiny_model(name: str, implementation: str, dtype: torch.dtype = torch.float32):
    """A model with fixed weights; the same for every implementation and dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)
    return model.to(dtype).train()


def sequences(lengths=LENGTHS, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def packed_inputs(samples):
    """One row, positions that restart, no mask: what verl's engine passes with remove-padding."""
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
    }


def padded_inputs(samples, *, left: bool = False):
    longest = max(len(sample) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        place = slice(longest - len(sample), None) if left else slice(len(sample))
        ids[row, place], mask[row, place] = sample, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}


def token_logprobs(logits, samples):
    """Log-probs of each next token, all sequences end to end, from packed or padded logits."""
    if logits.shape[0] == 1:
        rows = logits[0].split([len(sample) for sample in samples])
    else:
        rows = [row[: len(sample)] for row, sample in zip(logits, samples, strict=True)]
    parts = [
        row.float().log_softmax(-1)[:-1].gather(-1, sample[1:, None])[:, 0]
        for row, sample in zip(rows, samples, strict=True)
    ]
    return torch.cat(parts)


def reference_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Plain attention with the signature of torch 2.13, grouped heads refused unless asked for as there."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert query.shape[1] == key.shape[1] or enable_gqa
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    bounds = cu_seq_q.tolist()
    for start, end in itertools.pairwise(bounds):
        q, k, v = (states[start:end].transpose(0, 1).float() for states in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        place = torch.arange(end - start)
        distance = place[:, None] - place[None]
        left, right = (1 << 30 if side < 0 else side for side in window_size)
        scores = (q @ k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill((distance > left) | (-distance > right), float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def flash_attn_of(attend):
    """flash-attn's function for packed sequences, by its names, around a kernel with the signature of torch 2.13."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        deterministic=False,
    ):
        assert causal
        assert not dropout_p
        lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
        return attend(q, k, v, *lengths, scale=softmax_scale, window_size=(window_size[0], 0), enable_gqa=True)

    return flash_attn_varlen_func


def install_flash_attn(monkeypatch, attend):
    """Makes transformers find a stand-in for flash-attn, under its own implementation and under `fa2_packed`."""
    functions = (None, flash_attn_of(attend), None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    attention.register()
    packed_flash.prepare()
    stand_in = packed_flash.FlashKernel(dtypes=frozenset({torch.float32}), device_type="cpu")
    AttentionInterface.register(packed_flash.NAME, partial(packed_flash.packed_flash_attention, kernel=stand_in))
