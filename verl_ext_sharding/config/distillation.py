"""What verl checks of teachers and their loss only where the actor is built, with all that Ray has started by then.

`DistillationConfig` and its parts (workers/config/distillation.py, verl 0.9.0 and 0.9.1) are made in the actor's worker
after the reference is loaded (workers/engine_workers.py, `init_model`). `placement.servers` sees to a teacher's devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ext_sharding.config.facts import TEACHER, teacher_names
from verl_ext_sharding.config.token_budget import longest_sequence
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError

_MODELS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"

_TOP_K = "forward_kl_topk"
"""The loss of verl's that asks teachers for the log-probs of more than one token."""

_LENGTH = 512
"""verl's default of both lengths, for a teacher whose block a `+` added (`RolloutConfig`)."""


def check_teachers(values: Mapping[str, Any]) -> None:
    """Refuses teachers that verl would refuse once the actor is built.

    Args:
        values: verl's resolved values by dotted key, with what the request set: it may change the response length.

    Raises:
        ConfigError: Names the key and what to write.
    """
    if not values.get("distillation.enabled"):
        return
    _check_loss(values)
    names = teacher_names(sorted({key.split(".")[2] for key in values if key.startswith(f"{_MODELS}.")}))
    for name in names:
        _check_context(f"{_MODELS}.{name}.inference", values)
        _check_top_k(f"{_MODELS}.{name}.inference", values)
    for key, expected, found, remedy in _unnamed(names, values):
        raise _refusal(key, expected, found, remedy)


def _check_context(block: str, values: Mapping[str, Any]) -> None:
    """As `validate_and_prepare_for_distillation`: a teacher reads prompt and response, and generates one token.

    verl counts the teacher's own lengths, which don't follow the student's where a `+` added its block; a longer sample then
    ends the run in the teacher's server (workers/rollout/vllm_rollout/vllm_async_server.py, `generate`).
    """
    key = f"{block}.max_model_len"
    limit = values.get(key)
    if limit is None:
        return  # the model's own
    lengths = [f"{block}.{name}_length" for name in ("prompt", "response")]
    own = sum(whole_number(name, values.get(name, _LENGTH), instead=_LENGTH) for name in lengths)
    needed = max(own, longest_sequence(values)) + 1
    if whole_number(key, limit, instead=needed) < needed:
        expected = f"at least {needed} tokens: prompt and response of the student, {needed - 1}, and one to generate"
        raise _refusal(key, expected, str(limit), f"{key}={needed}")


def _check_top_k(block: str, values: Mapping[str, Any]) -> None:
    """As `_validate_topk_logprobs`."""
    if values.get(f"{_LOSS}.loss_mode") != _TOP_K:
        return
    key = f"{_LOSS}.topk"
    top_k = whole_number(key, values.get(key), instead=32)
    name = f"{block}.name"
    if values.get(name) not in ("vllm", "sglang"):
        raise _refusal(name, f"vllm or sglang with {_LOSS}.loss_mode={_TOP_K}", str(values.get(name)), f"{name}=vllm")
    most = f"{block}.engine_kwargs.vllm.max_logprobs"
    limit = values.get(most)
    if values[name] == "vllm" and limit is not None and whole_number(most, limit, instead=top_k) < top_k:
        raise _refusal(most, f"at least {key}={top_k}", str(limit), f"{most}={top_k}, or {key}={limit}")


def _unnamed(names: Sequence[str], values: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """As `check_configured`, and `_resolve_teacher_models`, which gives a single teacher its key and its servers."""
    routes: dict[Any, str] = {}
    for name in names:
        block = f"{_MODELS}.{name}"
        if values.get(path := f"{block}.model_path") is None:
            yield path, "the teacher's model, since distillation.enabled=True", "null", f"{path}=<its folder or name>"
        if names == [TEACHER]:
            return
        key, of_samples = f"{block}.key", values.get("distillation.teacher_key")
        route = values.get(key)
        if route is None:
            yield key, f"the {of_samples} of the samples that this teacher gets", "null", f"++{key}=<a {of_samples}>"
        if route in routes:
            yield key, f"another than {routes[route]}={route}", str(route), f"++{key}=<another {of_samples}>"
        routes[route] = key


def _check_loss(values: Mapping[str, Any]) -> None:
    """As `DistillationLossConfig.__post_init__`; a misspelt name is seen to by `config.choices`."""
    key = f"{_LOSS}.policy_loss_mode"
    if (mode := values.get(key, "vanilla")) != "vanilla":
        raise _refusal(key, "vanilla, the one policy loss that verl distils with", str(mode), f"{key}=vanilla")
    key = f"{_LOSS}.use_policy_gradient"
    if values.get(f"{_LOSS}.loss_mode") == "k1" and not values.get(key, True):
        expected = f"True with {_LOSS}.loss_mode=k1, whose own gradient does not depend on the teacher"
        raise _refusal(key, expected, "False", f"{key}=True, or {_LOSS}.loss_mode=k3")


def _refusal(key: str, expected: str, found: str, remedy: str) -> ConfigError:
    now = "the run does not start; verl would refuse it once the models are loaded"
    return ConfigError(key, expected=expected, found=found, consequence=now, remedy=remedy)
