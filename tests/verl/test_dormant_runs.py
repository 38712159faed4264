"""Installed is not active: a stock run is the same with the plugin installed as with it kept out."""

from __future__ import annotations

import re

import pytest

from tests.verl import harness

pytestmark = pytest.mark.verl


def _stock_overrides() -> list[str]:
    """What a user of stock verl would write, were there a CPU platform: nothing of ours."""
    ours = ("trainer.plugin", "sharding.", "algorithm.adv_estimator", "algorithm.use_kl_in_reward")
    lines = [line for line in harness.base_overrides(steps=1, num_devices=1) if not line.startswith(ours)]
    fp32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    return [
        *lines,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={fp32}",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class="
        "verl_ext_sharding.rollout.agent_loop.SeededAgentLoopManager",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=16",
    ]


def _run(folder, **env) -> harness.Job:
    from pathlib import Path

    common = {"VERL_USE_EXTERNAL_MODULES": "tests.verl.stock_cpu", "VERL_PLATFORM": "cpu"}
    common["VERL_SHARDING_EVENTS"] = "0"
    common["PYTHONPATH"] = str(Path(__file__).parents[2])
    return harness.run_trainer(folder, _stock_overrides(), env={**common, **env})


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("dormant"))


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("stock"), VERL_USE_EXTERNAL_PLUGINS="none")


def _classes(job: harness.Job) -> list[str]:
    return sorted(set(re.findall(r"@classes (\[.*?\])", job.output)))


def test_a_stock_run_has_the_same_metrics_with_the_plugin_installed(with_plugin, without_plugin):
    harness.assert_trained(with_plugin, 1)
    harness.assert_trained(without_plugin, 1)
    assert (
        harness.differences(with_plugin.metrics[1], without_plugin.metrics[1], rel=1e-6) == {}
    )  # samples finish in another order, and sums round


def test_a_stock_run_has_verls_own_worker_classes(with_plugin, without_plugin):
    assert _classes(with_plugin) == _classes(without_plugin) == ["[('actor_rollout', 'ActorRolloutRefWorker')]"]


def test_a_stock_run_applies_no_patch_in_any_worker_and_says_nothing(with_plugin):
    assert "patch trainer-role-pools" not in with_plugin.output
    assert "patch worker-bundle" not in with_plugin.output
    assert "Roles and devices" not in with_plugin.output
    assert "@sharding" not in with_plugin.output
