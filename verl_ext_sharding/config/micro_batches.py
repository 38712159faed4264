"""Fixed micro-batches as verl's own checks want them, also where no engine reads them (the same in verl 0.9.0 and 0.9.1).

With `actor.use_dynamic_bsz=False` verl asks for a micro-batch of actor, rollout log-probs and reference, whatever the last
one uses (`validate_config`, verl/utils/config.py), and each role's own switch asks for its own (`__post_init__` in
verl/workers/config/actor.py and critic.py). The switches of reference and critic follow the actor's. So a request for one
role can make verl refuse another: what our keys would break is set with them, what the job itself leaves open is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.schema import RoleConfig, ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import TRAINED_ROLES, JobFacts

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"


@dataclass(kw_only=True, frozen=True)
class _Computation:
    """One computation with micro-batches.

    Args:
        role: Whose it is.
        key: verl's key of its micro-batch, for each GPU.
        old: The deprecated key, for all GPUs together, which the engines of verl 0.9 don't read.
        dynamic: verl's key that switches token budgets on.
    """

    role: str
    key: str
    old: str
    dynamic: str

    def given(self, values: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether `key` and `old` have a value."""
        return values.get(self.key) is not None, values.get(self.old) is not None


_TRAINING = _Computation(
    role="actor",
    key=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    old=f"{_ACTOR}.ppo_micro_batch_size",
    dynamic=_ACTOR_DYNAMIC,
)
_LOG_PROBS = _Computation(
    role="actor",
    key=f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    old=f"{_ROLLOUT}.log_prob_micro_batch_size",
    dynamic=_ACTOR_DYNAMIC,
)
_REFERENCE = _Computation(
    role="ref",
    key=f"{_REF}.log_prob_micro_batch_size_per_gpu",
    old=f"{_REF}.log_prob_micro_batch_size",
    dynamic=f"{_REF}.log_prob_use_dynamic_bsz",
)
_CRITIC = _Computation(
    role="critic",
    key="critic.ppo_micro_batch_size_per_gpu",
    old="critic.ppo_micro_batch_size",
    dynamic="critic.use_dynamic_bsz",
)
_COMPUTATIONS = (_TRAINING, _LOG_PROBS, _REFERENCE, _CRITIC)


def accompanying_changes(request: ShardingConfig, facts: JobFacts, current: Mapping[str, Any]) -> Iterator[KeyChange]:
    """The keys that verl's checks want beside those of `micro_batch_size` and `max_tokens`; to be set after these.

    Args:
        request: The user's request.
        facts: The job.
        current: verl's resolved values by dotted key, before the request.
    """
    for computation in (_TRAINING, _LOG_PROBS, _REFERENCE):
        asked = getattr(request.roles, computation.role).micro_batch_size
        if asked is not None and computation.given(current)[1]:
            yield KeyChange(key=computation.old, new=None, why=f"sharding.roles.{computation.role}.micro_batch_size")
    if "ref" in facts.engines:
        yield from _for_reference(request, current)
    if "critic" in facts.engines:
        yield from _for_critic(request, current)


def _for_reference(request: ShardingConfig, current: Mapping[str, Any]) -> Iterator[KeyChange]:
    actor, ref = request.roles.actor, request.roles.ref
    dynamic = actor.max_tokens is not None or (actor.micro_batch_size is None and current.get(_ACTOR_DYNAMIC))
    if dynamic or ref.micro_batch_size is not None:
        return
    size, old = _REFERENCE.given(current)
    switched_off = _switches_off(request, current)
    if ref.max_tokens is not None and not size and not old:
        new = actor.micro_batch_size or current.get(_TRAINING.key) or 1
        why = "sharding.roles.ref.max_tokens (verl wants this one too where the actor has fixed micro-batches)"
        yield KeyChange(key=_REFERENCE.key, new=new, why=why)
    why = "sharding.roles.actor.micro_batch_size (verl then wants one of the reference too)"
    if ref.max_tokens is None and switched_off and not size:
        yield KeyChange(key=_REFERENCE.key, new=actor.micro_batch_size, why=why)
    if switched_off and old and (size or ref.max_tokens is None):
        yield KeyChange(key=_REFERENCE.old, new=None, why=why)


def _for_critic(request: ShardingConfig, current: Mapping[str, Any]) -> Iterator[KeyChange]:
    critic = request.roles.critic
    yield from _unread_of_critic(critic)
    size, old = _CRITIC.given(current)
    if size != old:
        return  # verl takes one of them, and the engine's own keys are what counts
    dynamic, follows = current.get(_CRITIC.dynamic), _switches_off(request, current)
    if critic.max_tokens is not None:
        yield KeyChange(key=_CRITIC.dynamic, new=True, why="sharding.roles.critic.max_tokens")
    elif critic.micro_batch_size is not None:
        if follows or not dynamic:
            why = "sharding.roles.critic.micro_batch_size"
            if old:
                yield KeyChange(key=_CRITIC.old, new=None, why=why)
            yield KeyChange(key=_CRITIC.key, new=critic.micro_batch_size, why=why)
    elif follows and dynamic:
        why = "sharding.roles.actor.micro_batch_size (the critic keeps its token budget)"
        yield KeyChange(key=_CRITIC.dynamic, new=True, why=why)


def _unread_of_critic(critic: RoleConfig) -> Iterator[KeyChange]:
    """What the user wrote by keys of the critic that the v1 trainer does not read must not say otherwise."""
    if critic.micro_batch_size is not None:
        why = "sharding.roles.critic.micro_batch_size"
        yield KeyChange(key=_CRITIC.dynamic, new=False, why=why, implied=True)
        yield KeyChange(key=_CRITIC.key, new=critic.micro_batch_size, why=why, implied=True)
    elif critic.max_tokens is not None:
        yield KeyChange(key=_CRITIC.dynamic, new=True, why="sharding.roles.critic.max_tokens", implied=True)


def _switches_off(request: ShardingConfig, current: Mapping[str, Any]) -> bool:
    """Whether the request ends the actor's token budgets, and with them those of roles that follow it."""
    return request.roles.actor.micro_batch_size is not None and bool(current.get(_ACTOR_DYNAMIC))


def check_micro_batches(request: ShardingConfig, facts: JobFacts, values: Mapping[str, Any]) -> None:
    """Refuses what verl would refuse of the micro-batches once its processes run, where the request sets any of them.

    Args:
        request: The user's request.
        facts: The job.
        values: verl's resolved values by dotted key, the request's changes included.

    Raises:
        ConfigError: Names the keys without a value that verl needs, or a deprecated key that has one.
    """
    roles = [getattr(request.roles, role) for role in TRAINED_ROLES]
    sizes = [role.micro_batch_size for role in roles if role.micro_batch_size is not None]
    if not sizes and all(role.max_tokens is None for role in roles):
        return
    fixed = [c for c in _COMPUTATIONS if c.role in facts.engines and _switch(c, facts, values) is not None]
    for computation in fixed:
        given, deprecated = computation.given(values)
        if deprecated and (given or _is_read(computation, facts, values)):
            raise _deprecated(computation, values)
    unset = [computation for computation in fixed if not any(computation.given(values))]
    if unset:
        raise _unset(unset, facts, values, sizes[0] if sizes else values.get(_TRAINING.key) or 1)
    for computation in fixed:
        _check_mini_batch(computation, values)


def _switch(computation: _Computation, facts: JobFacts, values: Mapping[str, Any]) -> str | None:
    """The switch that is off, for whose sake verl wants a fixed micro-batch; None: it wants none."""
    switches = [computation.dynamic]
    if computation is _REFERENCE:  # with LoRA the actor computes it, so that its own switch is not read
        switches = [_ACTOR_DYNAMIC] if facts.ref_in_actor else [computation.dynamic, _ACTOR_DYNAMIC]
    return next((switch for switch in switches if not values.get(switch)), None)


def _is_read(computation: _Computation, facts: JobFacts, values: Mapping[str, Any]) -> bool:
    """Whether an engine reads the fixed micro-batch; the critic's has keys of its own (`critic.fsdp`)."""
    if computation is _REFERENCE:
        return not facts.ref_in_actor and not values.get(computation.dynamic)
    return computation is not _CRITIC


def _check_mini_batch(computation: _Computation, values: Mapping[str, Any]) -> None:
    """With fixed micro-batches verl refuses a mini-batch above the batch; with token budgets it pads the batch."""
    key = {_TRAINING: f"{_ACTOR}.ppo_mini_batch_size", _CRITIC: "critic.ppo_mini_batch_size"}.get(computation)
    prompts = values.get("data.train_batch_size")
    mini = values.get(key) if key else None
    if key is None or not isinstance(prompts, int) or not isinstance(mini, int) or mini <= prompts:
        return
    raise ConfigError(
        key,
        expected=f"at most data.train_batch_size={prompts}, since {computation.dynamic}=False",
        found=str(mini),
        consequence="the run does not start",
        remedy=f"{key}={prompts}",
    )


def _unset(unset: list[_Computation], facts: JobFacts, values: Mapping[str, Any], size: int) -> ConfigError:
    keys = " ".join(f"{computation.key}={size}" for computation in unset)
    roles = dict.fromkeys(computation.role for computation in unset)
    ours = " ".join(f"sharding.roles.{role}.micro_batch_size={size}" for role in roles)
    switches = dict.fromkeys(f"{_switch(computation, facts, values)}=False" for computation in unset)
    has_blocks = "ref" not in roles or not facts.ref_in_actor
    return ConfigError(
        ", ".join(computation.key for computation in unset),
        expected=f"a number of samples, since {' and '.join(switches)}",
        found="null",
        consequence="the run does not start; verl would refuse it once its processes run",
        remedy=f"{keys}, or {ours}" if has_blocks else keys,
    )


def _deprecated(computation: _Computation, values: Mapping[str, Any]) -> ConfigError:
    size = values.get(computation.key)
    size = 1 if size is None or size == values[computation.old] else size
    return ConfigError(
        computation.old,
        expected=f"null: the micro-batch of each GPU is {computation.key}",
        found=str(values[computation.old]),
        consequence="the run does not start; verl would refuse it once its processes run",
        remedy=f"{computation.old}=null {computation.key}={size}",
    )
