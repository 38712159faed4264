"""What a refused plan says to type is typed, through Hydra and all checks, and the plan is made."""

import json
import shlex

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
EIGHT = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1")
LONG = (f"{ACTOR}.use_dynamic_bsz=True", "data.max_prompt_length=8192", "data.max_response_length=32768")


@pytest.fixture
def planned(compose):
    """Plans a job of eight devices."""

    def run(*overrides):
        lines = [*EIGHT, *overrides]
        config = compose(*lines)
        assert driver.asked_for(config)
        return driver.prepare(config, explicit=parse_overrides(lines))

    return run


@pytest.fixture
def refused(planned):
    def run(*overrides):
        with pytest.raises(ConfigError) as caught:
            planned(*overrides)
        return caught.value

    return run


def choices(error):
    """Each thing to type, as a list of overrides; words without one are left out."""
    texts = error.remedy.replace("\n  or:       ", ", or ").split(", or ")
    return [shlex.split(text) for text in texts if "=" in text and "<" not in text]


@pytest.mark.parametrize(
    "overrides",
    [
        ("sharding.roles.actor.devices=0-5", "sharding.roles.critic.devices=2-7"),
        ("sharding.roles.ref.devices=0-2", "algorithm.use_kl_in_reward=True", "data.train_batch_size=1000"),
        ("data.train_batch_size=8",),
        ("data.train_batch_size=1000", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5"),
        ("sharding.roles.critic.micro_batch_size=3", f"{ACTOR}.use_dynamic_bsz=True"),
        (
            "+critic.fsdp.use_dynamic_bsz=False",
            "+critic.fsdp.micro_batch_size_per_gpu=3",
            "+critic.fsdp.infer_micro_batch_size_per_gpu=7",
        ),
        ("+critic.fsdp.use_dynamic_bsz=False",),
        ("data.train_batch_size=null",),
        ("trainer.v1.trainer_mode=async",),
        (f"{ACTOR}.strategy=deepspeed",),
        (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_use_dynamic_bsz=False"),
        (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=16k"),
        (*LONG, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
        (*LONG, "model_engine=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"),
        (*LONG, "sharding.roles.actor.max_tokens=4096", "sharding.roles.critic.max_tokens=4096"),
    ],
    ids=" ".join,
)
def test_the_first_thing_to_type_is_enough(overrides, planned, refused):
    planned(*overrides, *choices(refused(*overrides))[0])


def test_each_sequence_parallel_size_that_is_offered_runs(planned, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 28, "num_key_value_heads": 4}))
    models = [f"{model}.path={tmp_path}" for model in ("actor_rollout_ref.model", "critic.model")]
    job = [*LONG, *models, "sharding.roles.ref.devices=0-3", "algorithm.use_kl_in_reward=True"]
    offered = choices(refused(*job))
    assert len(offered) == 3
    for lines, size in zip(offered, (1, 2, 4), strict=True):
        engines = planned(*job, *lines).facts.engines.values()
        assert {engine.sequence_parallel_size for engine in engines} == {size}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train_batch_size=${nope}", "data.train_batch_size"),
        ("trainer.n_gpus_per_node=${oc.env:NO_SUCH_VARIABLE}", "trainer.n_gpus_per_node"),
        ("data.train_files=${oc.env:NO_SUCH_VARIABLE}/train.parquet", "data.train_files"),
        ("sharding.roles.critic.devices=${nope}", "sharding.roles.critic.devices"),
        ("trainer.plugin=${nope}", "trainer.plugin"),
        ("model_engine=${nope}", "the overrides"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_an_error_with_its_key(override, key, refused):
    assert refused(override).subject == key


def test_a_batch_that_verl_pads_is_planned(planned):
    planned("data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.use_dynamic_bsz=True")


def test_with_lora_the_references_own_budget_does_not_matter(planned):
    planned(
        f"{ACTOR}.use_dynamic_bsz=True",
        "actor_rollout_ref.model.lora_rank=8",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=16",
    )
