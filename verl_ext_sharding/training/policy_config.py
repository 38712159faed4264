"""From what `sharding.roles.<role>.gradient_checkpointing` says to the policy that does it."""

from __future__ import annotations

from verl_ext_sharding.config.checkpointing_policy import read_policy
from verl_ext_sharding.training.checkpointing import Auto, Budget, EveryN, Full, Off, Policy, Selective


def parse_policy(value: object, *, role: str = "<role>") -> Policy | None:
    """The policy that a config value means, or None: verl's setting is left alone.

    Args:
        value: As `config.checkpointing_policy.read_policy` takes it.
        role: For messages.

    Raises:
        ConfigError: The value names no policy, or one that can't be had.
    """
    choice = read_policy(value, key=f"sharding.roles.{role}.gradient_checkpointing")
    if choice is None:
        return None
    if choice.name == "every_n":
        return EveryN(choice.every)
    if choice.name == "selective":
        return Selective(choice.keep)
    if choice.name == "budget":
        return Budget(share=choice.share, kept_bytes=choice.kept_bytes, compile=choice.compile)
    return {"auto": Auto(), "off": Off(), "full": Full()}[choice.name]
