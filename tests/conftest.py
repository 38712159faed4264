"""Fixtures that several folders share. Nothing here imports torch, ray or verl."""

import pytest

from verl_ext_sharding.placement.job import EngineFacts, JobFacts, ServerFacts


def _job(roles=("actor", "ref", "critic"), *, nodes=1, devices=4, engines=None, **fields):
    defaults = {role: EngineFacts(strategy="fsdp2", mini_batch_size=None if role == "ref" else 24) for role in roles}
    return JobFacts(
        num_nodes=nodes,
        devices_per_node=devices,
        engines={**defaults, **(engines or {})},
        rollout=fields.pop("rollout", ServerFacts(name="vllm")),
        train_batch_size=fields.pop("train_batch_size", 24),
        transfer_queue_units=fields.pop("transfer_queue_units", 9),
        **fields,
    )


@pytest.fixture(scope="session")
def job():
    """Builds the facts of a PPO job: `job(("actor", "critic"), nodes=2, devices=4, rollout_n=5)`."""
    return _job


@pytest.fixture(scope="session")
def compose():
    """Composes a config of verl as `verl-sharding plan` does: `compose("trainer.nnodes=2", config_name="ppo_trainer")`.

    The plugin is switched on unless an override says otherwise.
    """
    from verl_ext_sharding.cli.plan import compose as compose_config

    def composed(*overrides, config_name="ppo_trainer", config_path=None):
        return compose_config(list(overrides), config_name, config_path)

    return composed
