"""What a refused plan says to type is typed, through Hydra and all checks, and the plan is made."""

import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
EIGHT = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1")
LONG = (f"{ACTOR}.use_dynamic_bsz=True", "data.max_prompt_length=8192", "data.max_response_length=32768")


MEGATRON = ("model_engine=megatron", f"{ACTOR}.megatron.expert_model_parallel_size=8")
APART = (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.disaggregation.enabled=True")
PARALLEL = [
    (*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"),
    (*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2"),
    (*MEGATRON, f"{ACTOR}.megatron.expert_tensor_parallel_size=16"),
    (f"{ROLLOUT}.data_parallel_size=16",),
    (f"{ROLLOUT}.data_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size=3"),
    (f"{ROLLOUT}.pipeline_model_parallel_size=2",),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=3"),
    (*APART, f"{ROLLOUT}.disaggregation.decode_replicas=2"),
    (*APART, f"{ROLLOUT}.tensor_model_parallel_size=8"),
    (*APART, f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"),
    (*APART, "trainer.n_gpus_per_node=4", "trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=4"),
    (*APART, f"{ROLLOUT}.disaggregation.prefill_replicas=3"),
    (*APART, f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.disaggregation.decode_replicas=1"),
    (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.disaggregation.enabled=True"),
    (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=2", "sharding.roles.actor.devices=[3]"),
    (
        "trainer.nnodes=4",
        "trainer.n_gpus_per_node=2",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.data_parallel_size=2",
    ),
    (f"{ROLLOUT}.data_parallel_size=4", "sharding.roles.actor.layout=device_map"),
    (*APART, f"{ROLLOUT}.tensor_model_parallel_size=1", "sharding.roles.actor.layout=device_map"),
]
ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "data.train_batch_size=256",
    f"{ROLLOUT}.nnodes=2",
    f"{ROLLOUT}.n_gpus_per_node=2",
)
REWARD = (
    "reward.reward_model.enable=True",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=1",
    "reward.reward_model.model_path=/models/reward",
)
POOLS = [
    (*ASYNC, f"{ROLLOUT}.tensor_model_parallel_size=4"),
    (*ASYNC, *APART, f"{ROLLOUT}.tensor_model_parallel_size=2"),
    (*ASYNC, *REWARD, "sharding.roles.reward.devices=[6,7]"),
    (*ASYNC, *REWARD, "sharding.roles.reward.devices={node0:[6]}"),
    (*ASYNC, *REWARD, "sharding.roles.reward.devices=[3,6]", "sharding.roles.actor.devices=0-3"),
    (*ASYNC, *REWARD, "reward.reward_model.enable_resource_pool=True"),
    (*REWARD, "reward.reward_model.enable_resource_pool=True", "sharding.roles.actor.devices=0-3"),
]
LISTS = [
    ("sharding.roles.critic.devices=auto",),
    ("sharding.roles.critic.devices=last",),
    ("sharding.roles.critic.devices=cpu",),
    ("sharding.roles.critic.devices={node0:second_haf}",),
    ("sharding.roles.critic.devices={node0:cpu}",),
    ("sharding.roles.critic.devices={node0:'2-1'}",),
    ("sharding.roles.critic.devices={gpu01:[0,1]}",),
    ("sharding.roles.critic.devices='{node0:[0,1]}'",),
    ("sharding.roles.critic.devices={node0:[0,1,9]}",),
    ("sharding.roles.critic.devices='node0:0-3'",),
    (
        "trainer.nnodes=2",
        "sharding.roles.actor.devices={node0:[0,1,2],node1:[0]}",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
    (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.nnodes=2",
        "sharding.roles.actor.devices='6-9'",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=4",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.checkpoint_engine.backend=nccl",
    ),
]
"""Each is refused, and with the first thing that the refusal says to type it is planned."""


@pytest.fixture
def planned(compose):
    """Plans a job of eight devices."""

    def run(*overrides):
        lines = [*EIGHT, *overrides]
        config = compose(*lines)
        assert driver.asked_for(config)
        return driver.prepare(config, explicit=parse_overrides(lines))

    return run


def choices(error):
    """Each thing to type, as a list of overrides; words without one are left out."""
    texts = error.remedy.replace("\n  or:       ", ", or ").split(", or ")
    words = [[word for word in shlex.split(text) if "=" in word] for text in texts if "<" not in text]
    return [overrides for overrides in words if overrides]


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
        ("trainer.n_gpus_per_node=8.0",),
        ("trainer.n_gpus_per_node='8'",),
        ("sharding.roles.rollout.batch_size=64", "data.max_response_length=2e3"),
        ("sharding.roles.rollout.batch_size=64", f"{ROLLOUT}.max_num_batched_tokens=8k"),
        ("ray_kwargs.ray_init.num_cpus=8",),
        (f"{ACTOR}.use_kl_loss=no",),
        (f"{ROLLOUT}.mode=sync",),
        (f"{ROLLOUT}.name=vLLM",),
        *PARALLEL,
        *LISTS,
        *POOLS,
    ],
    ids=" ".join,
)
def test_the_first_thing_to_type_is_enough(overrides, planned, refused):
    typed = choices(refused(*overrides))[0]
    keys = {line.partition("=")[0] for line in typed if "{" in line or "[" in line}  # a list is typed in place of a map
    planned(*(line for line in overrides if line.partition("=")[0] not in keys), *typed)


def test_a_list_for_what_is_a_map_already_is_answered_with_the_text_that_takes_its_place(planned, refused):
    before = "sharding.roles.critic.devices={node0:[0]}"
    typed = choices(refused(before, "sharding.roles.critic.devices=[1,2]"))[0]
    assert planned(before, *typed).placement.devices_of("critic") == (1, 2)


def test_a_pool_of_its_own_for_rollout_can_be_typed_as_it_is_offered(planned, refused):
    lists = ("sharding.roles.actor.devices=0-3", "sharding.roles.rollout.devices=4-7")
    apart = refused(*lists).remedy.partition(": ")[2]
    plan = planned(*lists, *shlex.split(apart))
    assert plan.placement.reserved == {"rollout": (1,) * 4}


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


RECIPES = Path(next(iter(find_spec("verl").submodule_search_locations)), "experimental")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("fully_async_policy", "fully_async_ppo_trainer"), ("one_step_off_policy", "one_step_off_ppo_trainer")],
)
def test_a_recipe_whose_trainer_places_its_roles_itself_is_refused_with_its_name(recipe, name, compose):
    overrides = ["hydra.searchpath=[pkg://verl.trainer.config]", "sharding.roles.actor.devices=0-3"]
    config = compose(*overrides, config_name=name, config_path=str(RECIPES / recipe / "config"))
    with pytest.raises(ConfigError) as caught:
        driver.prepare(config, explicit=parse_overrides(overrides))
    assert f"verl.experimental.{recipe}" in caught.value.found
    assert "trainer.v1.trainer_mode=separate_async" in caught.value.remedy


def test_cpus_that_the_config_names_are_compared_before_ray_starts(planned, refused):
    four = ("trainer.n_gpus_per_node=4", "data.train_batch_size=1024")
    error = refused(*four, "ray_kwargs.ray_init.num_cpus=8")
    assert "4 devices x 3 worker processes = 12 CPUs" in error.expected
    assert error.remedy.startswith("ray_kwargs.ray_init.num_cpus=14")
    planned(*four, "ray_kwargs.ray_init.num_cpus=16")
    planned(*four, "ray_kwargs.ray_init.num_cpus=8", "trainer.nnodes=2")  # Ray is joined there
    pool = (
        "reward.reward_model.enable=True",
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.nnodes=1",
    )
    pool += ("reward.reward_model.n_gpus_per_node=2", "reward.reward_model.rollout.tensor_model_parallel_size=1")
    pool += ("reward.reward_model.rollout.name=vllm", "reward.reward_model.model_path=/models/reward")
    error = refused(*four, *pool, "ray_kwargs.ray_init.num_cpus=12", "sharding.placement.max_colocate_count=3")
    assert "reward 2" in error.expected
    assert error.remedy.startswith("ray_kwargs.ray_init.num_cpus=20")


@pytest.mark.parametrize("overrides", POOLS, ids=" ".join)
def test_each_other_way_out_of_a_pool_that_does_not_do_is_enough(overrides, planned, refused):
    for typed in choices(refused(*overrides))[1:]:
        keys = {line.partition("=")[0] for line in typed}
        planned(*(line for line in overrides if line.partition("=")[0] not in keys), *typed)
