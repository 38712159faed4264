"""The keys of verl that take one of a few names: a misspelt one ends the run minutes later, or does nothing at all.

The names are those of verl 0.9.0 and 0.9.1, each read where verl compares it. Many are names of a registry, to which a user's
code may add. So a name is refused only where it is without doubt a misspelling, and what is merely unknown is left to verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext_sharding.config.arguments import as_argument, as_override
from verl_ext_sharding.errors import ConfigError, did_you_mean, same_letters


@dataclass(kw_only=True, frozen=True)
class Choice:
    """One such key, or several of one kind.

    Args:
        key: Dotted key, or the end of it that all of the kind have.
        names: What verl knows.
        registry: Users can register names of their own: only case, hyphens and underscores count as misspelt.
        renamed: Names of an older verl -> what they are called now.
    """

    key: str
    names: tuple[str, ...]
    registry: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def meant_by(self, name: str) -> str | None:
        """The right name for a wrong one; None: it is right, or the user's own."""
        if name in self.names:
            return None
        if name in self.renamed:
            return self.renamed[name]
        same = next((known for known in self.names if same_letters(name, known)), None)
        return same if same or self.registry else did_you_mean(name.lower(), self.names, at_least=0.8)


_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
_KL_NAMES = (*_KL, *(f"{name}+" for name in _KL))  # `+`: kl_penalty, trainer/ppo/core_algos.py
_DTYPES = ("fp16", "float16", "fp32", "float32", "bf16", "bfloat16")
_NO_WEIGHTS = ("dummy_dtensor", "dummy_hf", "dummy_megatron")

CHOICES = (
    Choice(
        key="algorithm.adv_estimator",
        names=(
            "gae",
            "grpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "rloo",
            "opo",
            "grpo_passk",
            "gpg",
            "rloo_vectorized",
            "grpo_vectorized",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
            "gdpo",
        ),
        registry=True,
    ),
    Choice(
        key="policy_loss.loss_mode",
        names=(
            "vanilla",
            "dppo_tv",
            "dppo_kl",
            "gspo",
            "sapo",
            "gpg",
            "clip_cov",
            "kl_cov",
            "geo_mean",
            "dro",
            "cispo",
            "bypass_mode",
        ),
        registry=True,
    ),
    Choice(key="reward.reward_manager.name", names=("naive", "dapo", "remote", "gdpo"), registry=True),
    Choice(
        key="actor.loss_agg_mode",
        names=("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
    Choice(key="actor.kl_loss_type", names=_KL_NAMES),
    Choice(key="algorithm.kl_penalty", names=_KL_NAMES),
    Choice(key="algorithm.kl_ctrl.type", names=("fixed", "adaptive")),
    Choice(key="algorithm.pf_ppo.reweight_method", names=("pow", "max_min", "max_random")),
    Choice(key="algorithm.rollout_correction.rollout_is", names=("token", "sequence")),
    Choice(key="algorithm.rollout_correction.loss_type", names=("ppo_clip", "reinforce")),
    Choice(key="distillation_loss.loss_mode", names=("forward_kl_topk", *_KL[:-1]), registry=True),
    Choice(key="data.truncation", names=("error", "left", "right", "middle")),
    Choice(
        key="optim.lr_scheduler_type",
        names=("constant", "cosine", "linear", "inverse-square-root"),  # the last two: not with FSDP
    ),
    Choice(
        key="rollout.load_format",
        names=("auto", "dummy", "safetensors"),
        registry=True,
        renamed=dict.fromkeys(_NO_WEIGHTS, "dummy") | dict.fromkeys(("dtensor", "hf", "megatron"), "auto"),
    ),
    Choice(
        key="rollout.checkpoint_engine.backend",
        names=("naive", "nccl", "nixl", "mooncake", "kimi_ckpt_engine", "delta_sharded"),
        registry=True,
        renamed={"hccl": "nccl"},
    ),
    Choice(key="multi_turn.format", names=("hermes", "gpt-oss", "qwen3_coder"), registry=True),
    Choice(key="agent.default_agent_loop", names=("single_turn_agent", "tool_agent"), registry=True),
    *(Choice(key=key, names=_DTYPES) for key in ("model_dtype", "mixed_precision.param_dtype")),
    Choice(key="trainer.device", names=("cuda", "npu", "cpu"), registry=True, renamed={"gpu": "cuda"}),
    Choice(key="trainer.resume_mode", names=("auto", "disable", "resume_path")),
    Choice(
        key="trainer.logger",
        names=(
            "wandb",
            "mlflow",
            "swanlab",
            "vemlp_wandb",
            "tensorboard",
            "console",
            "clearml",
            "trackio",
            "file",
            "rl_insight",
            "tracking",
        ),
    ),
)
"""Each of these keys, in the order of verl's config. A list as its value is a list of such names."""


def check_choices(values: Mapping[str, Any]) -> None:
    """Refuses a misspelt name.

    Args:
        values: A composed config by dotted key, lists included.

    Raises:
        ConfigError: Names the first such key and the right name.
    """
    imported = values.get("reward.reward_manager.source") == "importlib"  # its name is a class of the user's module
    for key, value in values.items():
        choice = next((c for c in CHOICES if key == c.key or key.endswith(f".{c.key}")), None)
        if choice is None or (imported and key == "reward.reward_manager.name"):
            continue
        for name in value if isinstance(value, list) else [value]:
            right = choice.meant_by(name) if isinstance(name, str) else None
            if right is not None:
                raise _misspelt(key, value, name, right, choice)


def _misspelt(key: str, value: Any, name: str, right: str, choice: Choice) -> ConfigError:
    repaired = [right if item == name else item for item in value] if isinstance(value, list) else right
    return ConfigError(
        key,
        expected=", ".join(choice.names) + (", or a name that your code registers" if choice.registry else ""),
        found=as_override(value),
        consequence="the run does not start; verl would refuse it once its processes run, or ignore it",
        remedy=as_argument(f"{key}={as_override(repaired)}"),
    )
