"""`trainer.device=cpu`: how it is written, what it refuses and sets, and whether Ray is there already."""

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver
from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.errors import ConfigError


def config_of(device=None, address=None):
    return OmegaConf.create({"trainer": {"device": device}, "ray_kwargs": {"ray_init": {"address": address}}})


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False), (None, False), ("cpu:0", False)])
def test_whether_a_run_asks_for_the_cpu_is_answered_whatever_stands_there(device, expected):
    assert cpu.is_cpu(config_of(device)) is expected
    assert not cpu.is_cpu(OmegaConf.create({}))


@pytest.mark.parametrize("device", ["cpu:0", "CPU", "Cpu:1", " cpu"])
def test_the_cpu_by_a_name_that_verl_does_not_know_is_refused(device):
    with pytest.raises(ConfigError) as caught:
        cpu.check_device(config_of(device))
    assert caught.value.remedy == "trainer.device=cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "npu", None])
def test_other_devices_are_left_to_verl(device):
    cpu.check_device(config_of(device))


@pytest.mark.parametrize("name", ["driver", "trainer", "sft"])
def test_each_way_in_refuses_such_a_name(name, compose, tmp_path):
    from verl_ext_sharding import sft
    from verl_ext_sharding.launchers import Program
    from verl_ext_sharding.patch_points import auto_set_device

    config = compose("trainer.device=cpu:0", config_name="sft_trainer_engine" if name == "sft" else "ppo_trainer")
    ways = {
        "driver": lambda: driver.prepare(config, explicit={}),
        "trainer": lambda: auto_set_device.auto_set_device(config),
        "sft": lambda: sft.prepare(config, {}, {}, Program(target=("-m", "verl.trainer.sft_trainer"))),
    }
    with pytest.raises(ConfigError, match="cpu, without a number"):
        ways[name]()


@pytest.fixture
def no_ray(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda *args: None)
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", set)


@pytest.mark.parametrize(
    ("address", "exported", "there"),
    [
        (None, None, False),
        ("local", None, False),
        ("local", "10.0.0.1:6379", False),
        ("10.0.0.1:6379", None, True),
        (None, "10.0.0.1:6379", True),
        ("ray://10.0.0.1:10001", None, True),
        (None, "ray://10.0.0.1:10001", True),
        ("auto", None, True),
    ],
)
def test_a_cluster_is_there_where_the_config_or_the_environment_names_one(
    address, exported, there, no_ray, monkeypatch
):
    if exported:
        monkeypatch.setenv("RAY_ADDRESS", exported)
    assert cpu.finds_ray(config_of(address=address)) is there


# What is refused and set

CPU = ("trainer.device=cpu", "actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.n_gpus_per_node=1")
ATTENTION = "critic.model.override_config.attn_implementation"


def plan(compose, *overrides):
    lines = [*CPU, *overrides]
    return driver.prepare(compose(*lines), explicit=parse_overrides(lines))


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("critic.strategy=fsdp", "critic.strategy=fsdp2"),
        ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.name=hf"),
        (f"+{ATTENTION}=flash_attention_2", f"+{ATTENTION}=sdpa"),
    ],
)
def test_what_a_cpu_can_not_do_is_refused_with_what_it_can(override, instead, compose):
    with pytest.raises(ConfigError) as caught:
        plan(compose, override)
    assert caught.value.remedy == f"{instead}, or remove trainer.device=cpu"
    plan(compose, instead)


def test_verls_defaults_give_way_to_what_a_cpu_can_do(compose):
    changes = {change.key: change.new for change in plan(compose).changes}
    assert changes["actor_rollout_ref.rollout.name"] == "hf"
    assert changes["critic.strategy"] == "fsdp2"
    assert changes[ATTENTION] == "sdpa"
