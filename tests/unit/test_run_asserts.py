"""What verl or torch would assert once processes run is refused before anything starts."""

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.cli.plan import parse_overrides
from verl_ext_sharding.config.run_asserts import check_asserts
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import EngineFacts, ServerFacts

KEYS = {
    "actor": "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "ref": "actor_rollout_ref.ref.fsdp_config.fsdp_size",
    "critic": "critic.fsdp.fsdp_size",
}


SCORED = {"reward.reward_model.model_path": "/models/reward"}


def refusal(values, facts, devices=None, **how):
    with pytest.raises(ConfigError) as caught:
        check_asserts(values, facts, place(devices or {}, facts, **how))
    assert "does not start" in caught.value.consequence
    return caught.value


def accept(values, facts, devices=None, **how):
    check_asserts(values, facts, place(devices or {}, facts, **how))


# Meshes


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("role", KEYS)
def test_groups_that_leave_ranks_out_are_refused_with_sizes_that_do_not(role, strategy, job):
    engines = {role: EngineFacts(strategy=strategy)}
    error = refusal({KEYS[role]: 3}, job(engines=engines, devices=8))
    assert error.subject == KEYS[role]
    assert error.expected == f"-1, or a size that divides the 8 ranks of {role}"
    assert error.found == "3: 2 ranks would be in no group"
    assert error.remedy == f"{KEYS[role]}=-1 (one group of all), or {KEYS[role]}=2"


def test_groups_are_counted_in_the_ranks_of_the_role_and_not_of_the_job(job):
    facts, critic = job(devices=8), {"critic": "0-5"}
    assert refusal({KEYS["critic"]: 4}, facts, critic).found == "4: 2 ranks would be in no group"
    accept({KEYS["critic"]: 3, KEYS["actor"]: 4}, facts, critic)


def test_groups_of_no_rank_are_refused(job):
    """verl divides by it."""
    assert refusal({KEYS["critic"]: 0}, job()).remedy == "critic.fsdp.fsdp_size=-1 (one group of all)"


@pytest.mark.parametrize("size", [None, -1, 1, 2, 4, 8, 16])
def test_groups_that_cover_all_ranks_are_accepted(size, job):
    accept(dict.fromkeys(KEYS.values(), size), job(devices=8))


def test_the_one_rank_of_a_spread_role_is_a_group_whatever_its_size(job):
    accept({KEYS["critic"]: 3}, job(), layouts={"critic": "device_map"})


def test_a_reference_inside_the_actor_has_no_ranks(job):
    accept({KEYS["ref"]: 3}, job(ref_in_actor=True))


def test_the_ranks_of_veomni_are_those_without_its_sequence_parallelism(job):
    facts = job(("critic",), engines={"critic": EngineFacts(strategy="veomni", model_parallel_size=2)}, devices=8)
    key = "critic.veomni.fsdp_size"
    accept({key: 2}, facts)
    error = refusal({key: 3}, facts)
    assert (error.subject, error.found) == (key, "3: 1 ranks would be in no group")
    assert "4 data-parallel ranks of critic" in error.expected


@pytest.mark.parametrize("strategy", ["megatron", "torchtitan"])
def test_other_engines_have_no_such_groups(strategy, job):
    accept({KEYS["actor"]: 3}, job(engines={"actor": EngineFacts(strategy=strategy)}))


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ((4, 1), None),
        ((2, 2), None),
        ((1, 1), "_shard_size=4"),
        ((-1, 1), "_shard_size=4"),
        ((1, 2), "_shard_size=2"),
        ((1, 3), "_shard_size=4 {}_replicate_size=1"),
    ],
    ids=str,
)
def test_shards_and_replicas_of_torchtitan_are_the_ranks_of_the_role(sizes, remedy, job):
    block = "critic.torchtitan.data_parallel"
    facts = job(engines={"critic": EngineFacts(strategy="torchtitan", model_parallel_size=2)}, devices=16)
    values = dict(zip((f"{block}_shard_size", f"{block}_replicate_size"), sizes, strict=True))
    devices = {"critic": "0-7"}
    if remedy is None:
        accept(values, facts, devices)
    else:
        assert refusal(values, facts, devices).remedy == f"{block}{remedy.format(block)}"


# The trainer of separate_async

BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
APART = "actor_rollout_ref.rollout.disaggregation.enabled"


@pytest.fixture
def apart(job):
    """`apart(batch, **fields)`: a job of separate_async with four updates of 24 prompts in a step."""

    def facts(batch=96, **fields):
        rollout = ServerFacts(name="vllm", own_nodes=(2,))
        fields = {"mode": "separate_async", "rollout": rollout, "parameter_sync_step": 4, **fields}
        return job(train_batch_size=batch, **fields)

    return facts


def test_a_job_as_verl_wants_it_is_accepted(apart):
    accept({BACKEND: "nccl"}, apart())


@pytest.mark.parametrize(
    ("name", "values", "refused"),
    [
        ("vllm", {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size"),
        ("own", {"pipeline_model_parallel_size": 2}, None),
        ("vllm", {"expert_parallel_size": 4, "tensor_model_parallel_size": 2}, "expert_parallel_size"),
        ("vllm", {"expert_parallel_size": 4, "tensor_model_parallel_size": 2, "data_parallel_size": 2}, None),
        ("trtllm", {"expert_parallel_size": 4, "tensor_model_parallel_size": 8}, None),
    ],
    ids=str,
)
def test_parallel_sizes_that_a_backend_has_not_are_refused(name, values, refused, job):
    facts = job(("actor",), devices=8, rollout=ServerFacts(name=name, block="rollout"))
    values = {f"rollout.{key}": value for key, value in values.items()}
    if refused is None:
        accept(values, facts)
    else:
        assert refusal(values, facts).subject == f"rollout.{refused}"


@pytest.mark.parametrize(("nodes", "refused"), [(0, True), (None, True), (1, False)])
def test_a_pool_without_devices_is_refused_where_it_has_no_reward_model_either(nodes, refused, job):
    block = "reward.reward_model"
    values = {f"{block}.enable_resource_pool": True, f"{block}.nnodes": nodes, f"{block}.n_gpus_per_node": 8}
    if refused:
        assert refusal(values, job()).remedy == f"{block}.enable_resource_pool=False"
    else:
        accept(values, job())
    accept(values | {f"{block}.enable_resource_pool": False}, job())


@pytest.mark.parametrize(("batch", "other"), [(48, f", or {MINI}=12"), (50, "")])
def test_a_batch_that_is_not_all_updates_of_a_step_is_refused(batch, other, apart):
    error = refusal({BACKEND: "nccl"}, apart(batch))
    assert (error.subject, error.found) == ("data.train_batch_size", str(batch))
    assert error.remedy == f"data.train_batch_size=96{other}"


def test_weights_must_travel_to_other_devices(apart):
    assert refusal({BACKEND: "naive"}, apart()).remedy == f"{BACKEND}=nccl"


def test_a_reward_model_without_a_pool_of_its_own_is_refused(apart):
    values = {BACKEND: "nccl"} | SCORED
    error = refusal(values, apart(reward=ServerFacts(name="vllm", ranks_per_replica=2)))
    assert error.subject == "reward.reward_model.enable_resource_pool"
    assert "rollout never pauses" in error.expected
    assert "reward.reward_model.n_gpus_per_node=2" in error.remedy
    accept(values, apart(reward=ServerFacts(name="vllm", own_nodes=(2,))))


REWARD_LIST = "sharding.roles.reward.devices"


@pytest.mark.parametrize(
    ("devices", "lists", "ways"),
    [
        ({"actor": [0, 1], "reward": [1, 2]}, {}, [f"{REWARD_LIST}=[2,3]", f"{REWARD_LIST}=null"]),
        ({"reward": "2-3"}, {REWARD_LIST: "2-3"}, [f"{REWARD_LIST}=null"]),
        ({"actor": [0, 1, 2]}, {REWARD_LIST: None}, ["reward.reward_model"]),  # and one device is none for two ranks
        ({}, {REWARD_LIST: None}, ["reward.reward_model"]),
    ],
    ids=str,
)
def test_a_reward_model_is_offered_devices_without_the_actor_and_a_pool_without_a_list(devices, lists, ways, apart):
    values = {BACKEND: "nccl", **SCORED, **lists}
    error = refusal(values, apart(reward=ServerFacts(name="vllm", ranks_per_replica=2)), devices)
    offered = error.remedy.split(", or ")
    assert [way.startswith(start) for way, start in zip(offered, ways, strict=True)] == [True] * len(ways)


def test_lending_devices_to_a_rollout_that_prefills_apart_is_refused(apart):
    values = {BACKEND: "nccl", SWITCH: True, APART: True}
    assert refusal(values, apart()).remedy == f"{SWITCH}=False, or {APART}=False"
    accept(values, apart(hybrid_rollout=False))
    accept(values | {APART: False}, apart())


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_other_trainers_ask_for_none_of_this(mode, apart):
    values = {BACKEND: "naive", SWITCH: True, APART: True} | SCORED
    accept(values, apart(48, mode=mode, reward=ServerFacts(name="vllm")))


# Through the driver

JOB = (
    "trainer.n_gpus_per_node=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
)
ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    f"{BACKEND}=nccl",
)
REWARD = (
    "reward.reward_model.enable=True",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.model_path=x",
)


def prepare(compose, *overrides):
    lines = [*JOB, *overrides]
    return driver.prepare(compose(*lines), explicit=parse_overrides(lines))


@pytest.mark.parametrize(
    ("overrides", "subject"),
    [
        (["critic.fsdp.fsdp_size=3"], "critic.fsdp.fsdp_size"),
        ([*ASYNC, "data.train_batch_size=512"], "data.train_batch_size"),
        ([*ASYNC, "actor_rollout_ref.rollout.nnodes=0"], "actor_rollout_ref.rollout.nnodes"),
        ([*ASYNC, *REWARD], "reward.reward_model.enable_resource_pool"),
        (
            [*ASYNC, *REWARD, "sharding.roles.reward.devices=0-7"],  # which sets enable_resource_pool=False
            "reward.reward_model.enable_resource_pool",
        ),
        ([*REWARD, "reward.reward_model.enable_resource_pool=True"], "reward.reward_model.nnodes"),
        (["distillation.enabled=True"], "distillation.nnodes"),
        (
            [
                "actor_rollout_ref.model.lora_rank=8",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
                "trainer.save_freq=10",
            ],
            "actor_rollout_ref.actor.checkpoint.save_contents",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_driver_refuses_before_ray_starts(overrides, subject, compose):
    with pytest.raises(ConfigError) as caught:
        prepare(compose, *overrides)
    assert caught.value.subject == subject


def test_a_reward_model_apart_from_the_actor_goes_with_separate_async_and_its_workers(compose):
    batches = f"{MINI}=192", "data.train_batch_size=768", "critic.ppo_mini_batch_size=192"
    devices = "sharding.roles.actor.devices=0-5", "sharding.roles.reward.devices=[6,7]"
    plan = prepare(compose, *ASYNC, *REWARD, *devices, *batches)
    assert plan.table.rows[0].worker_class == "DetachActorWorker"


# Addresses of nodes


def test_a_plan_without_a_cluster_numbers_named_nodes_and_the_launch_numbers_them_again(compose):
    lines = [*JOB, "trainer.nnodes=2", "sharding.roles.critic.devices={10.0.0.9:[0,1]}"]
    config = compose(*lines)
    plan = driver.prepare(config, explicit=parse_overrides(lines))
    assert plan.placement.devices_of("critic") == (0, 1)
    assert any("once Ray runs" in note for note in plan.table.notes)
    again = driver.prepare(config, parse_overrides(lines), node_names=("10.0.0.1", "10.0.0.9"))
    assert again.placement.devices_of("critic") == (8, 9)
    assert again.placement.topology.node_names == ("10.0.0.1", "10.0.0.9")
    assert driver.prepare(config) is again


def test_a_plan_whose_nodes_are_all_named_stands_at_the_launch(compose):
    lines = [*JOB, "trainer.nnodes=2", "sharding.roles.critic.devices={10.0.0.9:[0,1],10.0.0.1:[0,1]}"]
    config = compose(*lines)
    plan = driver.prepare(config, explicit=parse_overrides(lines))
    assert plan.placement.devices_of("critic") == (0, 1, 8, 9)
    assert driver.prepare(config, node_names=("10.0.0.1", "10.0.0.9")) is plan


# Servers


def test_the_rollout_mode_of_verl_0_6_is_refused_with_the_one_that_is_left(job):
    rollout = ServerFacts(name="vllm", block="actor_rollout_ref.rollout")
    error = refusal({"actor_rollout_ref.rollout.mode": "sync"}, job(rollout=rollout))
    assert error.remedy.startswith("actor_rollout_ref.rollout.mode=async")
    accept({"actor_rollout_ref.rollout.mode": "async"}, job(rollout=rollout))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("vLLM", "vllm"), ("vlm", "vllm"), ("sg_lang", "sglang"), ("HF", "hf"), ("sglang_async", "sglang")],
)
def test_a_misspelt_backend_is_refused_with_the_one_that_was_meant(written, meant, job):
    error = refusal({}, job(rollout=ServerFacts(name=written, block="actor_rollout_ref.rollout")))
    assert error.remedy == f"actor_rollout_ref.rollout.name={meant}"


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "hf", "vllm_omni", "my_server", "unset"])
def test_backends_of_verl_ours_and_a_recipes_own_are_accepted(name, job):
    accept({}, job(rollout=ServerFacts(name=name, block="actor_rollout_ref.rollout")))


def test_a_reward_model_without_a_path_or_a_server_is_refused(job):
    facts = job(reward=ServerFacts(name="vllm", block="reward.reward_model.rollout"))
    assert refusal({}, facts).subject == "reward.reward_model.model_path"
    accept(SCORED, facts)
    unserved = job(reward=ServerFacts(name="unset", block="reward.reward_model.rollout"))
    assert refusal(SCORED, unserved).remedy == "reward.reward_model.rollout.name=vllm"
