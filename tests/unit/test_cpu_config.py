"""`trainer.device=cpu`: what the user wrote and a CPU can't do is refused, whatever is not written is set."""

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.errors import ConfigError

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
