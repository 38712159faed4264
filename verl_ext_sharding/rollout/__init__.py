"""`rollout.name=hf`: a rollout backend that generates with transformers. Importing this room imports neither torch nor
verl; the registries below name what to load, and verl loads it when a run asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from verl_ext_sharding.errors import ConfigError

NAME = "hf"
ADAPTER = "verl_ext_sharding.rollout.adapter.ServerAdapter"
SEEDED_AGENT_LOOP = "verl_ext_sharding.rollout.agent_loop.SeededAgentLoopManager"

BASE_MODULE = "verl.workers.rollout.base"
REPLICA_MODULE = "verl.workers.rollout.replica"

_KEY = (NAME, "async")


def load_replica() -> type:
    """verl's loader of a replica class."""
    from verl_ext_sharding.rollout.replica import HFReplica

    return HFReplica


def register_adapter(base: Any) -> None:
    """Adds the adapter to verl's registry.

    Args:
        base: The module `verl.workers.rollout.base`: a post-import hook on it has it at hand.

    Raises:
        ConfigError: When another package has taken the name.
    """
    _require_ours(base._ROLLOUT_REGISTRY.setdefault(_KEY, ADAPTER), ADAPTER)


def register_replica(replica: Any) -> None:
    """Adds the replica to verl's registry.

    Args:
        replica: The module `verl.workers.rollout.replica`.

    Raises:
        ConfigError: When another package has taken the name.
    """
    _require_ours(replica.RolloutReplicaRegistry._registry.setdefault(NAME, load_replica), load_replica)


def register() -> None:
    """Adds the backend to both registries, importing verl's modules for it. Idempotent."""
    register_adapter(importlib.import_module(BASE_MODULE))
    register_replica(importlib.import_module(REPLICA_MODULE))


def unregister() -> None:
    """Takes the backend out of both registries, unless another package has put its own there. Idempotent."""
    adapters = importlib.import_module(BASE_MODULE)._ROLLOUT_REGISTRY
    if adapters.get(_KEY) == ADAPTER:
        del adapters[_KEY]
    replicas = importlib.import_module(REPLICA_MODULE).RolloutReplicaRegistry._registry
    if replicas.get(NAME) is load_replica:
        del replicas[NAME]


def _require_ours(found: object, ours: object) -> None:
    if found != ours:
        raise ConfigError(
            "rollout backend 'hf'",
            expected="a name that no other package registers",
            found=str(found),
            consequence="the backend of this package is not registered",
            remedy="VERL_USE_EXTERNAL_PLUGINS with the plugins that should load, this one among them",
        )
