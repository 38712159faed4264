"""What the trainer is given in place of verl's own choice of pools, without a running Ray."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import ServerFacts

pytest.importorskip("verl")


@pytest.fixture
def placed(job):
    """`placed(devices)`: a trainer on two nodes of four devices, as verl leaves it, with its roles placed."""
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.utils import Role

    from verl_ext_sharding.workers import trainer

    def roles(devices):
        facts = job(("actor",), nodes=2, devices=4, reward=ServerFacts(name="vllm", ranks_per_replica=4))
        mapping = {Role.ActorRollout: "global_pool", Role.RewardModel: "global_pool"}
        block = {"enable": True, "nnodes": 2, "n_gpus_per_node": 4}
        found = SimpleNamespace(
            config=OmegaConf.create({"reward": {"reward_model": block}}),
            mapping=mapping,
            role_worker_mapping={},
            replay_buffer=object(),
            resource_pool_manager=ResourcePoolManager(resource_pool_spec={"global_pool": [4, 4]}, mapping=mapping),
        )
        trainer.place_roles(found, RunSpec(placement=place(devices, facts), bundle_cpus=3))
        return found

    return roles


@pytest.mark.parametrize(
    ("devices", "sizes"), [("2-5", (2, 2)), ("0-3", (1, 4)), ([0, 1, 4, 5], (2, 2)), ("all", (2, 4))], ids=str
)
def test_servers_of_a_reward_model_span_nodes_by_the_devices_that_it_has_on_each(devices, sizes, placed):
    block = placed({"reward": devices}).config.reward.reward_model
    assert (block.nnodes, block.n_gpus_per_node) == sizes


def test_each_role_has_the_pool_of_its_devices(placed):
    from verl.trainer.ppo.utils import Role

    found = placed({"reward": "4-7"})
    assert found.mapping == {Role.ActorRollout: "actor_pool", Role.RewardModel: "reward_pool"}
    assert found.resource_pool_manager.resource_pool_spec == {"actor_pool": [4, 4], "reward_pool": [4]}
