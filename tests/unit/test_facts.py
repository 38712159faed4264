"""What placement knows of a job, read from verl's config without importing verl."""

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.facts import job_facts, needs_critic, needs_reference, uses_lora
from verl_ext_sharding.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
KL = "algorithm.use_kl_in_reward=True"


@pytest.fixture(scope="module")
def config(compose):
    """A config of verl with some keys set: `config("trainer.nnodes=2", engine="megatron")`. One is composed per engine."""
    composed = {}

    def build(*settings, engine="dp"):
        if engine not in composed:
            composed[engine] = compose(f"model_engine={engine}")
        built = copy.deepcopy(composed[engine])
        for line in settings:
            key, _, value = line.partition("=")
            OmegaConf.update(built, key, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)
        return built

    return build


@pytest.fixture(scope="module")
def facts(config):
    def read(*settings, engine="dp"):
        return job_facts(config(*settings, engine=engine))

    return read


def refusal(facts, *settings):
    with pytest.raises(ConfigError) as caught:
        facts(*settings)
    return caught.value


# Roles


def test_verls_defaults_are_one_node_of_eight_devices_with_actor_and_critic(facts):
    job = facts()
    assert (job.num_nodes, job.devices_per_node, job.mode) == (1, 8, "sync")
    assert list(job.engines) == ["actor", "critic"]
    assert {role: engine.strategy for role, engine in job.engines.items()} == {"actor": "fsdp", "critic": "fsdp"}
    assert (job.reward, job.teacher, job.ref_in_actor, job.hybrid_rollout) == (None, None, False, True)
    assert (job.train_batch_size, job.rollout_n, job.parameter_sync_step) == (1024, 1, 1)
    assert job.transfer_queue_units == 9


@pytest.mark.parametrize("override", [KL, "actor_rollout_ref.actor.use_kl_loss=True"])
def test_either_kl_term_needs_a_reference(override, facts):
    assert list(facts(override).engines) == ["actor", "ref", "critic"]


_ASK_VERL = """
import json, sys
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
config, cases = json.load(sys.stdin)
config = OmegaConf.create(config)
answers = []
for case in cases:
    for key, value in case.items():
        OmegaConf.update(config, key, value)
    answers.append([bool(need_critic(config)), bool(need_reference_policy(config))])
print("answers", json.dumps(answers))
"""


def test_critic_and_reference_are_needed_exactly_when_verl_needs_them(config):
    choices = {
        "algorithm.adv_estimator": ["gae", "grpo", "rloo"],
        "critic.enable": [None, True, False],
        "algorithm.use_kl_in_reward": [True, False],
        "actor_rollout_ref.actor.use_kl_loss": [True, False],
    }
    cases = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    composed = config("actor_rollout_ref.rollout.name=vllm")
    sent = json.dumps([OmegaConf.to_container(composed), cases])
    command = [sys.executable, "-W", "ignore", "-c", _ASK_VERL]
    done = subprocess.run(command, input=sent, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = []
    for case in cases:
        for key, value in case.items():
            OmegaConf.update(composed, key, value)
        ours.append([needs_critic(composed), needs_reference(composed)])
    assert ours == json.loads(done.stdout.rpartition("answers")[2])


@pytest.mark.parametrize(
    ("override", "lora"),
    [
        ("actor_rollout_ref.model.lora_rank=0", False),
        ("actor_rollout_ref.model.lora_rank=8", True),
        ("actor_rollout_ref.model.lora_adapter_path=/some/adapter", True),
    ],
)
def test_lora_keeps_the_reference_inside_the_actor(override, lora, config, facts):
    assert uses_lora(config(override, KL)) is lora
    assert facts(override, KL).ref_in_actor is lora


def test_megatrons_own_lora_block_counts_as_well(config):
    assert not uses_lora(config(engine="megatron"))
    assert uses_lora(config("actor_rollout_ref.model.lora={rank: 16}", engine="megatron"))


# Ranks that one sample takes


@pytest.mark.parametrize(
    ("engine", "settings", "sizes"),
    [
        ("dp", [], (1, 1, 1)),
        ("dp", ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"], (2, 1, 1)),
        ("dp", ["actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=4"], (1, 4, 1)),
        ("dp", ["critic.fsdp.ulysses_sequence_parallel_size=2"], (1, 1, 2)),
        ("dp", ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], (2, 2, 1)),
        ("dp", ["critic.ulysses_sequence_parallel_size=2"], (1, 1, 1)),
        (
            "dp",
            [
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4",
            ],
            (2, 2, 1),
        ),
        (
            "megatron",
            [
                "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
                "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
                "critic.megatron.context_parallel_size=4",
                "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1",
                "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1",
            ],
            (4, 1, 4),
        ),
        ("veomni", ["actor_rollout_ref.actor.veomni.ulysses_parallel_size=2"], (2, 2, 1)),
        ("torchtitan", ["critic.torchtitan.tensor_parallel_size=2"], (1, 1, 2)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_model_parallelism_is_read_where_each_engine_reads_it(engine, settings, sizes, facts):
    engines = facts(KL, *settings, engine=engine).engines
    assert tuple(engines[role].model_parallel_size for role in ("actor", "ref", "critic")) == sizes


ULYSSES = "ulysses_sequence_parallel_size"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("engine", "settings", "size", "keys"),
    [
        ("dp", [], 1, [ULYSSES]),
        ("dp", [f"{ACTOR}.{ULYSSES}=2"], 2, [ULYSSES]),
        ("dp", [f"{ACTOR}.fsdp_config.{ULYSSES}=4"], 4, [f"fsdp_config.{ULYSSES}"]),
        ("dp", [f"{ACTOR}.{ULYSSES}=2", f"{ACTOR}.fsdp_config.{ULYSSES}=4"], 2, [ULYSSES, f"fsdp_config.{ULYSSES}"]),
        (
            "megatron",
            [f"{ACTOR}.megatron.context_parallel_size=2", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
            2,
            ["megatron.context_parallel_size"],
        ),
        ("veomni", [f"{ACTOR}.veomni.ulysses_parallel_size=2"], 2, ["veomni.ulysses_parallel_size"]),
        ("torchtitan", [f"{ACTOR}.torchtitan.tensor_parallel_size=2"], 2, ["torchtitan.tensor_parallel_size"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_size_by_which_a_token_budget_grows_is_read_with_the_keys_that_change_it(
    engine, settings, size, keys, facts
):
    actor = facts(*settings, engine=engine).engines["actor"]
    assert actor.sequence_parallel_size == size
    assert actor.sequence_parallel_keys == tuple(f"{ACTOR}.{key}" for key in keys)
    to_eight = facts(*settings, *(f"{key}=8" for key in actor.sequence_parallel_keys), engine=engine).engines["actor"]
    assert to_eight.sequence_parallel_size == 8
    assert to_eight.model_parallel_size * size == actor.model_parallel_size * 8


@pytest.mark.parametrize(("role", "block"), [("ref", "actor_rollout_ref.ref"), ("critic", "critic")])
@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_every_role_has_its_own_keys_for_that_size(role, block, engine, facts):
    (key,) = facts(KL, engine=engine).engines[role].sequence_parallel_keys
    assert key.startswith(f"{block}.")
    assert facts(KL, f"{key}=2", engine=engine).engines[role].sequence_parallel_size == 2


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_the_strategy_is_the_engines_name(engine, facts):
    found = {role.strategy for role in facts(KL, engine=engine).engines.values()}
    assert found == {engine}


# Batches


def test_mini_batches_are_those_of_the_roles_that_train(facts):
    engines = facts(KL, "actor_rollout_ref.actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=32").engines
    assert {role: engine.mini_batch_size for role, engine in engines.items()} == {
        "actor": 64,
        "ref": None,
        "critic": 32,
    }


def micro_batches(engines):
    return {
        role: {micro.key: (micro.samples, micro.of_step) for micro in engine.micro_batches}
        for role, engine in engines.items()
    }


def test_fixed_micro_batches_are_those_that_verl_reads(facts):
    engines = facts(
        KL,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "critic.ppo_micro_batch_size_per_gpu=16",
    ).engines
    assert micro_batches(engines) == {
        "actor": {
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (2, False),
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (4, True),
        },
        "ref": {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (8, True)},
        "critic": {},
    }


def test_the_critics_micro_batches_are_those_of_its_engine_once_token_budgets_are_off(facts):
    sizes = ["critic.fsdp.micro_batch_size_per_gpu=2", "critic.fsdp.infer_micro_batch_size_per_gpu=4"]
    assert micro_batches(facts(*sizes).engines)["critic"] == {}
    assert micro_batches(facts(*sizes, "critic.fsdp.use_dynamic_bsz=False").engines)["critic"] == {
        "critic.fsdp.micro_batch_size_per_gpu": (2, False),
        "critic.fsdp.infer_micro_batch_size_per_gpu": (4, True),
    }


def test_token_budgets_have_no_fixed_micro_batches(facts):
    engines = facts(
        KL,
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    ).engines
    assert micro_batches(engines) == {"actor": {}, "ref": {}, "critic": {}}


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_the_critics_micro_batches_stand_in_the_block_of_its_engine(engine, facts):
    sizes = [f"critic.{engine}.use_dynamic_bsz=False", f"critic.{engine}.micro_batch_size_per_gpu=2"]
    found = micro_batches(facts(*sizes, "critic.fsdp.micro_batch_size_per_gpu=8", engine=engine).engines)
    assert found["critic"] == {f"critic.{engine}.micro_batch_size_per_gpu": (2, False)}


@pytest.mark.parametrize(
    ("lora", "read"), [([], False), (["actor_rollout_ref.model.lora_rank=8"], True)], ids=["full", "lora"]
)
def test_in_bypass_mode_micro_batches_of_log_probs_are_read_only_where_the_actor_is_the_reference(lora, read, facts):
    key = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    job = facts(KL, "algorithm.rollout_correction.bypass_mode=True", f"{key}=4", *lora)
    assert job.actor_log_probs is read
    assert (key in micro_batches(job.engines)["actor"]) is read


def test_a_micro_batch_is_changed_where_it_was_asked_for(facts):
    engine, key = "critic.fsdp", "critic.fsdp.micro_batch_size_per_gpu"
    sizes = [f"{engine}.use_dynamic_bsz=False", f"{key}=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
    engines = facts(*sizes).engines
    assert [micro.override for micro in engines["critic"].micro_batches] == [f"++{key}"]
    assert [micro.override for micro in engines["actor"].micro_batches] == [sizes[2].partition("=")[0]]
    ours = "sharding.roles.critic.micro_batch_size"
    assert [micro.override for micro in facts(*sizes, f"{ours}=2").engines["critic"].micro_batches] == [ours]


def test_dynamic_batches_are_those_of_each_roles_own_switch(facts):
    switches = {
        "actor": "actor_rollout_ref.actor.use_dynamic_bsz",
        "ref": "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "critic": "critic.use_dynamic_bsz",
    }
    for role, switch in switches.items():
        others = [f"{other}=False" for other in switches.values() if other != switch]
        engines = facts(KL, f"{switch}=True", *others).engines
        assert [name for name, engine in engines.items() if engine.dynamic_batches] == [role]


@pytest.mark.parametrize(
    ("engine", "sizes", "expected"),
    [
        ("megatron", ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"], (1, 1)),
        ("megatron", ["expert_model_parallel_size=4", "tensor_model_parallel_size=2"], (4, 8)),
        (
            "megatron",
            ["expert_model_parallel_size=4", "tensor_model_parallel_size=2", "expert_tensor_parallel_size=1"],
            (4, 4),
        ),
        ("megatron", ["expert_model_parallel_size=4", "pipeline_model_parallel_size=2"], (4, 8)),
        ("veomni", ["expert_parallel_size=4", "ulysses_parallel_size=2"], (4, 4)),
    ],
)
def test_experts_take_their_parts_times_their_tensor_parallelism_times_the_pipeline(engine, sizes, expected, facts):
    actor = facts(*(f"actor_rollout_ref.actor.{engine}.{size}" for size in sizes), engine=engine).engines["actor"]
    assert (actor.expert_parallel_size, actor.expert_ranks) == expected


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ([], 0),
        (["reward.reward_manager.name=remote"], 64),
        (["reward.reward_manager.name=remote", "reward.num_workers=3"], 9),
        (["reward.reward_manager.name=remote", "reward.reward_manager.source=importlib"], 0),
    ],
)
def test_one_reward_manager_holds_a_cpu_for_each_of_its_workers_in_each_of_them(settings, cpus, facts):
    assert facts(*settings).reward_cpus == cpus


# Modes and servers


@pytest.mark.parametrize(("mode", "steps"), [("sync", 1), ("colocate_async", 1), ("separate_async", 4)])
def test_the_updates_of_a_step_are_those_of_the_mode(mode, steps, facts):
    job = facts(f"trainer.v1.trainer_mode={mode}")
    assert (job.mode, job.parameter_sync_step) == (mode, steps)


def test_rollouts_own_devices_count_in_separate_async_only(facts):
    own = [f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4"]
    assert facts(*own).rollout.own_devices == 0
    assert facts(*own, "trainer.v1.trainer_mode=separate_async").rollout.own_devices == 8


@pytest.mark.parametrize(
    ("mode", "engine", "hybrid"),
    [("sync", False, True), ("separate_async", True, True), ("separate_async", False, False)],
)
def test_only_separate_async_without_hybrid_engine_leaves_the_actors_devices_without_rollout(
    mode, engine, hybrid, facts
):
    job = facts(f"trainer.v1.trainer_mode={mode}", f"actor_rollout_ref.hybrid_engine={engine}")
    assert job.hybrid_rollout is hybrid


def test_the_ranks_of_a_rollout_server_are_the_product_of_its_parallel_sizes(facts):
    server = facts(
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.data_parallel_size=2",
        f"{ROLLOUT}.pipeline_model_parallel_size=3",
    ).rollout
    assert (server.name, server.ranks_per_replica, server.tensor_parallel_size) == ("sglang", 12, 2)


def test_a_replica_that_prefills_and_decodes_apart_counts_both(facts):
    server = facts(
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.disaggregation.enabled=True",
        f"{ROLLOUT}.disaggregation.prefill_replicas=3",
        f"{ROLLOUT}.disaggregation.decode_replicas=1",
        f"{ROLLOUT}.disaggregation.decode_tensor_model_parallel_size=4",
    ).rollout
    assert server.ranks_per_replica == 3 * 2 + 4


def test_a_reward_model_does_not_prefill_apart_whatever_its_block_says(facts):
    block = "reward.reward_model.rollout"
    overrides = "reward.reward_model.enable=True", f"{block}.name=vllm", f"{block}.tensor_model_parallel_size=2"
    server = facts(*overrides, f"{block}.disaggregation.enabled=True").reward
    assert (server.ranks_per_replica, server.decoders) == (2, None)


@pytest.mark.parametrize(
    ("name", "tensor", "data", "unit"), [("vllm", 4, 2, 4), ("vllm", 4, 1, 1), ("sglang", 4, 2, 1), ("hf", 2, 1, 2)]
)
def test_the_ranks_that_lie_on_one_node_together_are_those_that_a_backend_asks_for(name, tensor, data, unit, facts):
    sizes = f"{ROLLOUT}.tensor_model_parallel_size={tensor}", f"{ROLLOUT}.data_parallel_size={data}"
    assert facts(f"{ROLLOUT}.name={name}", *sizes).rollout.node_unit == unit


def test_a_rollout_without_a_name_is_unset_and_not_an_error(facts):
    assert facts().rollout.name == "unset"


def test_a_reward_model_counts_its_own_pool_only_when_it_has_one(facts):
    on = ["reward.reward_model.enable=True", "reward.reward_model.nnodes=1", "reward.reward_model.n_gpus_per_node=2"]
    assert facts(*on).reward.own_devices == 0
    assert facts(*on, "reward.reward_model.enable_resource_pool=True").reward.own_devices == 2


def test_a_teacher_is_read_with_its_pool(facts):
    teacher = facts(
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=4",
        f"{ROLLOUT}.name=vllm",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=4",
    ).teacher
    assert (teacher.name, teacher.ranks_per_replica, teacher.own_devices) == ("vllm", 4, 4)


def test_of_several_teachers_the_default_one_does_not_count(facts):
    teacher = facts(
        "distillation.enabled=True",
        "distillation.teacher_models.math.inference={name: sglang, tensor_model_parallel_size: 1}",
    ).teacher
    assert (teacher.name, teacher.ranks_per_replica) == ("sglang", 1)


def test_servers_of_several_teachers_are_in_the_order_of_their_blocks(facts):
    several = "distillation.enabled=True", "distillation.nnodes=2", "distillation.n_gpus_per_node=4"
    block = "distillation.teacher_models"
    one = f"{block}.math={{num_replicas: 1, inference: {{name: vllm, tensor_model_parallel_size: 4}}}}"
    two = f"{block}.code={{num_replicas: 2, inference: {{name: vllm}}}}"  # of verl's two ranks
    three = f"{block}.none={{inference: {{name: vllm}}}}"
    teacher = facts(*several, one, two, three).teacher
    assert teacher.replicas == (4, 2, 2)
    assert teacher.replica_units == (1, 1, 1)
    assert teacher.own_nodes == (4, 4)
    assert facts(*several).teacher.replicas is None


@pytest.mark.parametrize("size", ["nnodes", "n_gpus_per_node"])
def test_a_pool_of_its_own_without_a_size_is_not_no_pool(size, facts):
    reward = "reward.reward_model"
    own = f"{reward}.enable=True", f"{reward}.nnodes=1", f"{reward}.n_gpus_per_node=2"
    assert facts(*own).reward.own_nodes is None
    assert facts(*own, f"{reward}.enable_resource_pool=True", f"{reward}.{size}=0").reward.own_nodes == ()


@pytest.mark.parametrize("value", ["-1", "two", "1.5"])
def test_a_pool_of_its_own_has_a_whole_number_of_nodes(value, facts):
    with pytest.raises(ConfigError) as caught:
        facts("distillation.enabled=True", f"distillation.nnodes={value}")
    assert caught.value.subject == "distillation.nnodes"


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        (["transfer_queue.backend.SimpleStorage.num_data_storage_units=2"], 3),
        (["transfer_queue.backend.storage_backend=MooncakeStore"], 1),
    ],
)
def test_transfer_queue_holds_a_cpu_for_its_controller_and_each_unit(settings, units, facts):
    assert facts(*settings).transfer_queue_units == units


# Mistakes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.nnodes", "0"),
        ("trainer.nnodes", "two"),
        ("trainer.n_gpus_per_node", "0"),
        ("trainer.n_gpus_per_node", "-1"),
        ("trainer.n_gpus_per_node", "1.5"),
        ("data.train_batch_size", "0"),
        ("data.train_batch_size", "many"),
        (f"{ROLLOUT}.n", "0"),
        (f"{ROLLOUT}.tensor_model_parallel_size", "0"),
        ("critic.ppo_mini_batch_size", "x"),
        ("transfer_queue.backend.SimpleStorage.num_data_storage_units", "many"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "0"),
    ],
)
def test_what_is_no_number_is_refused_with_its_key(key, value, facts):
    error = refusal(facts, f"{key}={value}")
    assert error.subject == key
    assert error.expected == "a whole number, 1 or more"
    assert error.found == value
    assert error.remedy.startswith(f"{key}=")


@pytest.mark.parametrize(
    "key",
    [
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "data.train_batch_size",
        f"{ROLLOUT}.n",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "critic.ppo_mini_batch_size",
        "trainer.critic_warmup",
    ],
)
def test_null_is_no_number_where_verl_counts_with_it_and_verls_default_is_offered(key, facts):
    error = refusal(facts, f"{key}=null")
    assert (error.subject, error.found) == (key, "null")
    assert facts(error.remedy) == facts()


@pytest.mark.parametrize("key", ["lora_rank", "lora.rank"])
def test_a_rank_of_lora_that_is_no_number_is_refused_with_its_key(key, facts):
    key = f"actor_rollout_ref.model.{key}"
    error = refusal(facts, f"{key}=abc")
    assert (error.subject, error.found) == (key, "abc")
    assert not facts(error.remedy, KL).ref_in_actor
    assert not facts(f"{key}=-1", KL).ref_in_actor


@pytest.mark.parametrize("mode", ["async", "snyc", "separate", ""])
def test_a_trainer_that_verl_has_not_is_refused_with_one_that_it_has(mode, facts):
    error = refusal(facts, f"trainer.v1.trainer_mode={mode or chr(39) * 2}")
    assert error.subject == "trainer.v1.trainer_mode"
    assert error.found == mode
    assert facts(error.remedy.split(", or")[0]).mode in ("sync", "colocate_async", "separate_async")


def test_a_recipes_own_trainer_is_one_with_settings(facts):
    assert facts("trainer.v1.trainer_mode=mine", "trainer.v1.mine={parameter_sync_step: 2}").parameter_sync_step == 2


@pytest.mark.parametrize(
    ("key", "strategy", "first"),
    [
        ("actor_rollout_ref.actor.strategy", "deepspeed", "actor_rollout_ref.actor.strategy=fsdp"),
        ("actor_rollout_ref.actor.strategy", "fsdp3", "actor_rollout_ref.actor.strategy=fsdp"),
        ("actor_rollout_ref.ref.strategy", "fspd", "actor_rollout_ref.ref.strategy=fsdp"),
        ("critic.strategy", "fsdp_turbo", "critic.strategy=fsdp"),
        ("critic.strategy", "megatron", "model_engine=megatron"),
    ],
)
def test_an_engine_that_verl_does_not_build_from_the_block_is_refused_with_one_that_it_does(
    key, strategy, first, facts
):
    error = refusal(facts, KL, f"{key}={strategy}")
    assert (error.subject, error.found) == (key, strategy)
    assert error.remedy.split(", or")[0] == first
    if first.startswith("model_engine="):
        facts(KL, f"{key}={strategy}", engine=strategy)
    else:
        facts(KL, first)
    role = key.split(".")[-2]
    model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
    assert facts(KL, f"{key}={strategy}", f"{model}.external_lib=mine").engines[role].strategy == strategy


def test_a_config_of_another_trainer_is_refused_since_nothing_would_act(compose):
    with pytest.raises(ConfigError) as caught:
        job_facts(compose(config_name="sft_trainer_engine"))
    error = caught.value
    assert error.subject == "trainer.plugin"
    assert "verl.trainer.main_ppo" in error.expected
    assert error.remedy == "trainer.plugin=null"
