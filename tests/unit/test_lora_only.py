"""Checkpoints of adapters alone: saved where they are all that is trained, and not resumed from where they are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist
from merged_on_ranks import ADAPTERS, adapted, shard

from verl_ext_sharding.engines import checkpoints
from verl_ext_sharding.engines.checkpoints import HostCheckpointManager
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.platforms.cpu import PlatformCPU

BLOCK = "actor_rollout_ref.actor.checkpoint"
ALONE = ["LoRA", "DoRA", "LoRA with a bias"]
MORE = ["a head trained whole", "norms trained whole", "trained tokens", "trained biases"]


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """A process group of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """What verl takes this machine for depends on which test asked it first."""
    monkeypatch.setattr(checkpoints, "get_platform", PlatformCPU)


def manager(name, *, lora_only=True, wrapping="fsdp2", seed_offset=0.0):
    model = shard(adapted(tied=True, **ADAPTERS[name]), wrapping)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(seed_offset)
    contents = ["model"]
    config = SimpleNamespace(save_contents=contents, load_contents=contents, save_lora_only=lora_only)
    config.get = lambda key, default=None: getattr(config, key, default)
    cpu = torch.device("cpu")
    return HostCheckpointManager(model=model, checkpoint_config=config, step_device=cpu, state_device=cpu, block=BLOCK)


def weights(made):
    return {
        name: tensor.full_tensor().clone()
        for name, tensor in made.model.state_dict().items()
        if hasattr(tensor, "full_tensor")
    }


@pytest.mark.parametrize("name", ALONE)
def test_adapters_that_are_all_that_is_trained_are_saved_and_resumed_alone(name, tmp_path):
    first = manager(name, seed_offset=1.0)
    first.save_checkpoint(str(tmp_path))
    again = manager(name)
    again.load_checkpoint(str(tmp_path))
    expected = weights(first)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(again).items())


@pytest.mark.parametrize("wrapping", ["fsdp1_orig_params", "fsdp2"])
@pytest.mark.parametrize("name", MORE)
def test_more_than_adapters_is_not_saved_in_part(name, wrapping, tmp_path):
    with pytest.raises(ConfigError) as caught:
        manager(name, wrapping=wrapping).save_checkpoint(str(tmp_path))
    assert caught.value.remedy == f"++{BLOCK}.save_lora_only=False"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MORE)
def test_more_than_adapters_is_resumed_from_a_checkpoint_that_has_all_of_it(name, tmp_path):
    first = manager(name, lora_only=False, seed_offset=1.0)
    first.save_checkpoint(str(tmp_path))
    again = manager(name)
    again.load_checkpoint(str(tmp_path))
    expected = weights(first)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(again).items())


def test_more_than_adapters_does_not_resume_from_adapters_alone(tmp_path):
    manager("LoRA").save_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        manager("a head trained whole").load_checkpoint(str(tmp_path))
    assert "lm_head" in caught.value.found
    assert caught.value.remedy == f"trainer.resume_mode=disable ++{BLOCK}.save_lora_only=False"
