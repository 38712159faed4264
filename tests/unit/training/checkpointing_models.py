"""Tiny models, batches and comparisons that the checkpointing and offload tests share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl_ext_sharding.training.compile_layers import compile_obstacle

CODEGEN = "torch._inductor.compile_fx.compile_fx"
"""What a test replaces to have all of the compiler but the C++."""

needs_compiler = pytest.mark.skipif(compile_obstacle("cpu") is not None, reason=str(compile_obstacle("cpu")))

SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}


def qwen2(num_layers: int = 4, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_hidden_layers=num_layers, num_key_value_heads=2, **changes)
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config).train()


def llama(num_layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=num_layers, num_key_value_heads=2)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).train()


def gpt_neox(num_layers: int = 4, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        **SHAPE, num_hidden_layers=num_layers, hidden_dropout=dropout, attention_dropout=dropout, use_cache=True
    )
    config._attn_implementation = "sdpa"
    return GPTNeoXForCausalLM(config).train()


MODELS = {"qwen2": qwen2, "llama": llama, "gpt_neox_with_dropout": gpt_neox}


def batch(num_tokens: int = 40, num_rows: int = 2, padded: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, SHAPE["vocab_size"], (num_rows, num_tokens), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if padded:
        attention_mask[0, :padded] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def packed(num_tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, SHAPE["vocab_size"], (1, num_tokens), generator=generator)}


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], **options) -> torch.Tensor:
    torch.manual_seed(7)  # dropout
    logits = model(**inputs, **options).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())


def step(model: nn.Module, inputs: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, inputs, **options)
    loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same(one, other, rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=atol)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        torch.testing.assert_close(
            grad, other[1][name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def decoder(model: nn.Module) -> list[nn.Module]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return list((base.gpt_neox if hasattr(base, "gpt_neox") else base.model).layers)


def hidden_bytes(inputs: dict[str, torch.Tensor]) -> int:
    """Bytes of the hidden states of one layer, fp32."""
    return inputs["input_ids"].numel() * SHAPE["hidden_size"] * 4
