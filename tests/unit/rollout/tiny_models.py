"""Tiny random models, rows and engines for the rollout tests."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verl_ext_sharding.rollout.batches import BatchLimits, Row, SamplingRules
from verl_ext_sharding.rollout.generation import GenerationEngine
from verl_ext_sharding.rollout.modeling import host
from verl_ext_sharding.rollout.requests import SamplingParams

VOCAB = 97
MAX_LEN = 96
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def qwen2(*, tied: bool = True, seed: int = 0) -> torch.nn.Module:
    return _made(Qwen2ForCausalLM, Qwen2Config(**_SIZES, **_HEADS, tie_word_embeddings=tied), seed)


def llama(*, seed: int = 0) -> torch.nn.Module:
    return _made(LlamaForCausalLM, LlamaConfig(**_SIZES, **_HEADS), seed)


def sliding(*, window: int, seed: int = 0) -> torch.nn.Module:
    config = Gemma3TextConfig(**_SIZES, **_HEADS, head_dim=8, sliding_window=window, sliding_window_pattern=2)
    return _made(Gemma3ForCausalLM, config, seed)


def moe(*, seed: int = 0) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        **_SIZES, **_HEADS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    return _made(Qwen3MoeForCausalLM, config, seed)


def latent(*, seed: int = 0) -> torch.nn.Module:
    heads = {**_HEADS, "num_key_value_heads": 4}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    config = DeepseekV3Config(**_SIZES, **heads, **ranks, first_k_dense_replace=2, n_group=1, topk_group=1)
    return _made(DeepseekV3ForCausalLM, config, seed)


def mamba(*, seed: int = 0) -> torch.nn.Module:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4)
    return _made(MambaForCausalLM, config, seed)


def _made(cls: Any, config: Any, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = cls(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # random models are near uniform: sharper logits make a wrong cache visible
    return host(model, torch.device("cpu")).model


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(f"{length}-{seed}")
    return tuple(generator.randrange(VOCAB) for _ in range(length))


def save(model: torch.nn.Module, folder: Any, *, known_ids: int = VOCAB, eos: int = 2) -> str:
    """Writes a checkpoint with a tokenizer that knows the first ids."""
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(known_ids)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    special = {"eos_token": f"w{eos}", "unk_token": "w0", "pad_token": "w0", "bos_token": "w1"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)


def row(prompt_ids: tuple[int, ...], *, name: str = "r", seed: int = 0, **params: Any) -> Row:
    settings = {"max_tokens": 12, **params}
    return Row(request_id=name, prompt_ids=prompt_ids, params=SamplingParams(**settings), rng=random.Random(seed))


def engine(model: torch.nn.Module, *, rules: SamplingRules | None = None, **options: Any) -> GenerationEngine:
    limits = BatchLimits(
        max_num_seqs=options.pop("max_num_seqs", 8),
        max_prefill_tokens=options.pop("max_prefill_tokens", 256),
        kv_cache_bytes=options.pop("kv_cache_bytes", lambda: 1 << 30),
    )
    return GenerationEngine(model, limits=limits, rules=rules or SamplingRules(), max_model_len=MAX_LEN, **options)


def generate(target: GenerationEngine, rows: list[Row]) -> list[Row]:
    """Submits rows at once and waits for all."""
    return [future.result(timeout=60) for future in [target.submit(item) for item in rows]]


def greedy_reference(model: torch.nn.Module, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([prompt_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt_ids) :].tolist()


def recomputed_log_probs(model: torch.nn.Module, done: Row, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a response by one full forward without a cache, as verl's actor computes them."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(done.history())], device=device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(done.prompt_ids) - 1 : -1].float() / temperature
    tokens = torch.tensor(done.token_ids, device=device)
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class Held:
    """Holds a model's n-th forward until `release`, so that a test acts while requests run."""

    def __init__(self, model: torch.nn.Module, *, forward: int) -> None:
        self._left = forward
        self._reached, self._released = threading.Event(), threading.Event()
        model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._reached.set()
            assert self._released.wait(30)

    def wait(self) -> None:
        assert self._reached.wait(30)

    def release(self) -> None:
        self._released.set()
