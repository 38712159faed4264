"""What ranks of `test_merged_weights` run: engines whose model is sharded as verl shards one with adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_ext_sharding.engines import merged_weights
from verl_ext_sharding.engines.merged_weights import MergedExportMixin

Q_PROJ = {"target_modules": ["q_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": Q_PROJ,
    "rsLoRA": {**Q_PROJ, "use_rslora": True},
    "DoRA": {**Q_PROJ, "use_dora": True},
    "LoRA with a bias": {**Q_PROJ, "lora_bias": True},
    "trained biases": {**Q_PROJ, "bias": "lora_only"},
    "a head trained whole": {**Q_PROJ, "modules_to_save": ["lm_head"]},
    "norms trained whole": {**Q_PROJ, "modules_to_save": ["norm", "input_layernorm"]},
    "an embedding": {"target_modules": ["embed_tokens"]},
    "DoRA of an embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "DoRA of the head": {"target_modules": ["lm_head"], "use_dora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "trained tokens": {**Q_PROJ, "trainable_token_indices": [3, 4]},
    "two parameters": {"target_parameters": ["mlp.down_proj.weight", "mlp.up_proj.weight"]},
}
EMBEDDINGS = {"an embedding", "DoRA of an embedding", "embedding and head"}
UNITS = EMBEDDINGS | {"DoRA of the head", "trained tokens"}
"""Adapters of what is an FSDP2 unit by itself unless weights are tied, which verl can't make one of them."""

IN_PART_TRAINED = EMBEDDINGS | {"trained biases", "trained tokens"}
"""Trained beside what is not in one parameter of FSDP1, which takes that with `use_orig_params` alone."""


class Sharded(MergedExportMixin, FSDPEngine):
    """What sends."""


def adapted(tied: bool = False, **options: Any) -> Any:
    """A tiny Qwen2 with adapters that change it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied))
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def shard(model: Any, wrapping: str) -> Any:
    """As verl does for `strategy=fsdp` and `fsdp2`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if wrapping == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh}, {})
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, is_lora=True),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=wrapping == "fsdp1_orig_params",
    )


def sending(model: Any) -> Any:
    """An engine with a model on the host."""
    made = object.__new__(Sharded)
    made.role, made.module, made._is_offload_param = "actor", model, False
    made.model_config = SimpleNamespace(lora={"merge": True}, hf_config=SimpleNamespace(model_type="qwen2"))
    return made


def local_tensors(model: Any) -> dict[str, Any]:
    """What this rank holds, by name."""
    return {
        name: getattr(tensor, "_local_tensor", tensor).detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def check_merged(rank: int, wrapping: str) -> None:
    """Each kind of adapters, tied and not: what is sent is what PEFT leaves, and nothing has changed."""
    with (
        mock.patch.object(merged_weights, "get_device_id", return_value=torch.device("cpu")),
        mock.patch.object(transformer_impl, "get_device_id", return_value=torch.device("cpu")),
    ):
        for name, options in ADAPTERS.items():
            for tied in (False, True):
                if _can_be_sharded(name, tied, wrapping):
                    _check_one(f"{name}, {'tied' if tied else 'untied'}", options, tied, wrapping)


def _can_be_sharded(name: str, tied: bool, wrapping: str) -> bool:
    if wrapping == "fsdp2":
        return tied or name not in UNITS
    return wrapping == "fsdp1_orig_params" or name not in IN_PART_TRAINED


def _check_one(words: str, options: dict[str, Any], tied: bool, wrapping: str) -> None:
    model = shard(adapted(tied, **options), wrapping)
    before = local_tensors(model)
    expected = adapted(tied, **options).merge_and_unload().state_dict()
    sent = dict(sending(model)._merged_lora_per_tensor_param())
    assert sent.keys() == expected.keys(), (words, sent.keys() ^ expected.keys())
    for name, tensor in expected.items():
        found = sent[name].float()
        torch.testing.assert_close(
            found, tensor, rtol=1e-2, atol=1e-5, msg=lambda text, name=name: f"{words}: {name}: {text}"
        )
    after = local_tensors(model)
    assert after.keys() == before.keys(), words
    assert all(torch.equal(after[name], value) for name, value in before.items()), words
    assert not any(getattr(module, "merged", False) for module in model.modules()), words
