"""The critic honours its attention setting: verl hard-codes `flash_attention_2` for it, and hides what then fails.

Without flash-attn every critic ends in "please install trl", whatever went wrong. The replacement loads with the
attention that the model config carries, and lets the real error through.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching.spec import PatchSpec

STOCK_ATTENTION = "flash_attention_2"
"""What verl asks transformers for where `override_config` names nothing (workers/config/model.py), and for every critic."""


def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """As verl's: a token-classification model where the architecture has one, else trl's value head."""
    from transformers import AutoModelForTokenClassification

    loading = {
        "torch_dtype": torch_dtype,
        "config": model_config,
        "attn_implementation": getattr(model_config, "_attn_implementation", None) or STOCK_ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    remote = trust_remote_code and "AutoModelForTokenClassification" in (getattr(model_config, "auto_map", None) or {})
    if remote or type(model_config) in AutoModelForTokenClassification._model_mapping:
        return AutoModelForTokenClassification.from_pretrained(local_path, **loading)
    return _load_with_trl(local_path, model_config, loading)


def _load_with_trl(local_path: str, model_config: Any, loading: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from verl.utils.import_utils import is_trl_available
    from verl.utils.model import AutoModelForVision2Seq, patch_valuehead_model

    if not is_trl_available():
        raise RuntimeError(
            f"{local_path} ({type(model_config).__name__}) has no token-classification head in transformers, so the critic "
            "needs trl's value head: pip install trl"
        )
    try:
        from trl.experimental.ppo import AutoModelForCausalLMWithValueHead
    except ImportError:
        from trl import AutoModelForCausalLMWithValueHead

    is_vision = type(model_config) in AutoModelForVision2Seq._model_mapping
    auto_class = AutoModelForVision2Seq if is_vision else AutoModelForCausalLM
    backbone = auto_class.from_pretrained(local_path, **loading)
    if hasattr(model_config, "text_config"):
        backbone.config.hidden_size = model_config.text_config.hidden_size
    model = AutoModelForCausalLMWithValueHead.from_pretrained(backbone)
    patch_valuehead_model(model)
    return model


SPEC = PatchSpec(
    id="critic-attention",
    target="verl.utils.model:load_valuehead_model",
    replacement=load_valuehead_model,
    signature=("local_path", "torch_dtype", "model_config", "trust_remote_code"),
    fingerprints={"0.9.0": "4a0660e86d4a4ead", "0.9.1": "7d5cde7ff9c25fde"},
    processes=frozenset({"worker"}),
    needed_by="critic.model.override_config.attn_implementation",
    upstream_issue="none filed",
    remove_when="verl passes the configured attn_implementation to the critic and raises what from_pretrained raised",
)
