"""Device maps in the driver: models are built on meta, a wrong map is an error before anything starts."""

import copy
import functools
import json
import logging
import math
import shlex
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver, layer_plans, model_configs
from verl_ext_sharding.cli import main
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.measures import ENGINE_BLOCK, LayerSpread, RoleMeasures
from verl_ext_sharding.demo.assets import build
from verl_ext_sharding.placement.bundles import place

pytest.importorskip("torch")

JOB = [
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.use_kl_in_reward=True",
]
SPREAD_CRITIC = ["sharding.roles.critic.layout=device_map", "sharding.roles.critic.devices=[2,3]"]
SPREAD_ACTOR = ["sharding.roles.actor.layout=device_map", "sharding.roles.actor.devices=[0,1]"]
FP32, BF16, STATES = 4, 2, 2
NUM_EMBEDDED = 320 * 64


@functools.cache
def job():
    files = build()
    return [*JOB, f"actor_rollout_ref.model.path={files.model}", f"critic.model.path={files.critic}"]


@functools.cache
def num_parameters(name):
    """Elements in the checkpoint of the demo's `model` or `critic`."""
    from safetensors import safe_open

    with safe_open(getattr(build(), name) / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


@pytest.fixture(scope="module")
def planned(compose):
    """The plan of the demo's job with settings."""

    @functools.cache
    def made(*settings):
        overrides = [*job(), *settings]
        return driver.prepare(compose(*overrides), explicit=parse_overrides(overrides))

    return made


def layers_of(plan, role):
    return plan.measures[role].layers


# What is planned


def test_without_a_spread_role_no_model_is_read(planned, monkeypatch):
    monkeypatch.setattr(layer_plans, "meta_model_of", pytest.fail)
    plan = planned("sharding.roles.critic.devices=[1]")
    assert (plan.maps, plan.measures) == ({}, {})


def test_the_map_of_a_role_covers_its_model_in_order_and_names_its_devices(planned):
    layer_map = planned(*SPREAD_CRITIC).maps["critic"]
    assert list(layer_map.modules)[:3] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert layer_map.device_numbers == (2, 3)
    assert set(layer_map.modules.values()) == {0, 1}
    stored = sum(layer_map.num_bytes[name] for name in layer_map.modules if name != "model.rotary_emb")
    assert stored == FP32 * num_parameters("critic")


def test_nothing_of_a_model_but_its_config_is_read(planned, tmp_path):
    (tmp_path / "config.json").write_bytes((build().critic / "config.json").read_bytes())
    plan = planned(*SPREAD_CRITIC, f"critic.model.path={tmp_path}")
    assert plan.maps["critic"].bytes_by_place == planned(*SPREAD_CRITIC).maps["critic"].bytes_by_place


def test_the_worker_is_told_map_and_devices_beside_the_other_measures(planned):
    settings = ["critic.device_map=balanced_low_0", "actor.logits=full", "actor.devices=[0,1]"]
    plan = planned(*SPREAD_CRITIC, *(f"sharding.roles.{setting}" for setting in settings))
    assert plan.measures == {
        "critic": RoleMeasures(layers=LayerSpread(device_map="balanced_low_0", devices=(2, 3), reserved_bytes=(0, 0))),
        "actor": RoleMeasures(logits="full"),
    }


def test_a_models_overridden_config_and_dtype_are_what_is_planned(planned):
    override = "+critic.model.override_config.num_hidden_layers=1"
    layer_map = planned(*SPREAD_CRITIC, override, "sharding.roles.critic.dtype=bfloat16").maps["critic"]
    assert "model.layers.0" in layer_map.modules
    assert "model.layers.1" not in layer_map.modules
    assert layer_map.num_bytes["model.embed_tokens"] == BF16 * NUM_EMBEDDED  # in the dtype in which it is stored


def test_an_override_of_a_block_in_a_models_config_changes_that_block():
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig()
    model_configs._override(config, {"text_config": {"num_hidden_layers": 3}, "tie_word_embeddings": True})
    assert (config.text_config.num_hidden_layers, config.tie_word_embeddings) == (3, True)


def test_a_reference_in_the_actors_process_follows_the_actors_map(planned):
    plan = planned(*SPREAD_ACTOR, "sharding.roles.actor.device_map=balanced_low_0")
    assert layers_of(plan, "ref").device_map == "balanced_low_0"
    assert layers_of(plan, "ref").devices == (0, 1)
    assert plan.maps["ref"].role == "ref"


def test_a_reference_with_a_map_of_its_own_keeps_it(planned):
    own = ["sharding.roles.ref.layout=device_map", "sharding.roles.ref.devices=[0,1]"]
    plan = planned(*SPREAD_ACTOR, "sharding.roles.actor.device_map=balanced_low_0", *own)
    assert layers_of(plan, "ref").device_map == "auto"
    assert plan.placement.pool_of("ref") is plan.placement.pool_of("actor")


def test_with_lora_a_base_model_needs_no_room_for_gradients_and_states(planned, refused):
    least = f"sharding.memory.gpu_gib={1.3 * FP32 * num_parameters('model') / 2 / 2**30}"
    spread = [*SPREAD_ACTOR, "sharding.memory.headroom=0", "algorithm.adv_estimator=grpo", least]
    spread += ["algorithm.use_kl_in_reward=False"]
    assert "GiB needed" in refused(*spread).found
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=safetensors"]
    assert set(planned(*spread, *lora).maps["actor"].modules.values()) == {0, 1}


# What other roles keep


def test_a_role_keeps_its_shards_and_optimizer_states_on_its_own_devices(planned):
    plan = planned(*SPREAD_CRITIC, "sharding.roles.actor.devices=[1,3]")
    kept = num_parameters("model") * FP32 * (1 + STATES) // 2
    assert layers_of(plan, "critic").reserved_bytes == (0, kept)


def test_a_role_reserves_nothing_for_itself_and_a_spread_reference_keeps_its_weights(planned):
    plan = planned(*SPREAD_ACTOR, "sharding.roles.critic.devices=[2]")
    weights = FP32 * num_parameters("model") // 2
    assert layers_of(plan, "actor").reserved_bytes == (weights, weights)
    trained = weights * (1 + STATES)
    assert layers_of(plan, "ref").reserved_bytes == (trained, trained)


@pytest.fixture(scope="module")
def kept(compose):
    """Bytes for each parameter that a role on devices 0 and 1 keeps, with settings of verl's own."""
    from verl_ext_sharding.config.facts import job_facts

    config = compose(*job())
    facts, model = job_facts(config), model_configs.meta_model_of(config, "actor", valued=False)

    def found(role, layout, **settings):
        changed = copy.deepcopy(config)
        for key, value in settings.items():
            OmegaConf.update(changed, f"{ENGINE_BLOCK[role]}.{key}", value)
        placement = place({"actor": [2, 3], role: [0, 1]}, facts, layouts={role: layout})
        return 2 * layer_plans._kept_bytes(changed, role, model, placement) / num_parameters("model")

    return found


@pytest.mark.parametrize("layout", ["fsdp", "device_map"])
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, FP32 * (1 + STATES)),
        ({"param_offload": True}, FP32 * STATES),
        ({"optimizer_offload": True}, FP32),
        ({"param_offload": True, "optimizer_offload": True}, 0),
        ({"model_dtype": "bf16"}, BF16 * (1 + STATES)),
    ],
    ids=str,
)
def test_what_a_role_offloads_is_not_kept(layout, role, settings, expected, kept):
    assert kept(role, layout, **settings) == expected


@pytest.mark.parametrize(
    ("layout", "settings", "expected"),
    [
        ("fsdp", {}, 0),
        ("device_map", {}, FP32),
        ("device_map", {"model_dtype": None}, BF16),
        ("device_map", {"param_offload": True}, 0),
    ],
    ids=str,
)
def test_a_sharded_reference_lives_on_the_host_and_one_that_is_spread_keeps_its_weights(
    layout, settings, expected, kept
):
    assert kept("ref", layout, **settings) == expected


def test_memory_that_others_keep_is_taken_from_what_a_device_has(refused, planned):
    alone = FP32 * num_parameters("critic") * (2 + STATES)
    memory = ["sharding.memory.headroom=0", f"sharding.memory.gpu_gib={alone / 2**30}"]
    assert planned(*SPREAD_CRITIC, *memory).maps
    error = refused(*SPREAD_CRITIC, *memory, "sharding.roles.actor.devices=[2,3]")
    assert error.subject == "sharding.roles.critic.device_map"


# What is refused before launch


def test_a_map_that_leaves_layers_out_is_refused_and_the_map_of_the_error_works(refused, planned):
    error = refused(*SPREAD_CRITIC, "sharding.roles.critic.device_map={model.embed_tokens:0,model.layers.0:1}")
    assert error.subject == "sharding.roles.critic.device_map"
    assert "model.layers.1" in error.found
    (typed,) = shlex.split(error.remedy)
    assert planned(*SPREAD_CRITIC, typed).maps["critic"].modules["model.layers.0"] == 1


def test_layers_that_the_given_memory_has_no_room_for_are_refused(refused):
    error = refused(*SPREAD_CRITIC, "sharding.memory.gpu_gib=0.0001")
    assert error.subject == "sharding.roles.critic.device_map"
    assert "device 2" in error.found
    assert "sharding.roles.critic.dtype=bfloat16" in error.remedy


def test_sequential_is_checked_here_though_only_the_worker_knows_its_devices(planned):
    layer_map = planned(*SPREAD_CRITIC, "sharding.roles.critic.device_map=sequential").maps["critic"]
    assert set(layer_map.modules.values()) == {0}


def test_a_dtype_that_can_not_be_stored_is_refused(refused):
    error = refused(*SPREAD_CRITIC, "critic.fsdp.model_dtype=fp8")
    assert (error.subject, error.found) == ("critic.fsdp.model_dtype", "fp8")
    assert error.remedy == "sharding.roles.critic.dtype=float32"


def test_a_model_that_the_driver_can_not_read_is_left_to_the_worker_with_a_warning(planned, caplog):
    with caplog.at_level(logging.WARNING):
        plan = planned(*SPREAD_CRITIC, "critic.model.path=/no/such/folder", "sharding.roles.actor.devices=[2,3]")
    assert plan.maps == {}
    kept = num_parameters("model") * FP32 * (1 + STATES) // 2
    assert layers_of(plan, "critic") == LayerSpread(device_map="auto", devices=(2, 3), reserved_bytes=(kept, kept))
    (record,) = (record for record in caplog.records if record.name == layer_plans.__name__)
    assert "device map of critic: checked in the worker" in record.getMessage()
    assert "/no/such/folder" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "subject"),
    [
        (
            ["actor_rollout_ref.actor.fsdp_config.offload_policy=True"],
            "actor_rollout_ref.actor.fsdp_config.offload_policy",
        ),
        (["actor_rollout_ref.ref.fsdp_config.offload_policy=True"], "actor_rollout_ref.ref.fsdp_config.offload_policy"),
        (["actor_rollout_ref.model.use_fused_kernels=True"], "actor_rollout_ref.model.use_fused_kernels"),
        (["actor_rollout_ref.actor.fsdp_config.qat.enable=True"], "actor_rollout_ref.actor.fsdp_config.qat.enable"),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=fp16"], "actor_rollout_ref.actor.fsdp_config.model_dtype"),
        (["sharding.roles.actor.dtype=float16"], "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    ],
    ids=str,
)
def test_settings_that_fsdp_alone_honours_are_refused_and_each_way_out_is_planned(settings, subject, refused, planned):
    error = refused(*SPREAD_ACTOR, *settings)
    assert error.subject == subject
    for way in error.remedy.split(", or "):
        planned(*SPREAD_ACTOR, *settings, *shlex.split(way))


def test_a_spread_critic_is_told_what_it_has_a_key_for(refused, planned):
    for key in ("critic.fsdp.offload_policy", "critic.model.use_fused_kernels"):
        error = refused(*SPREAD_CRITIC, f"{key}=True")
        assert error.subject == key
        planned(*SPREAD_CRITIC, f"{key}=True", *shlex.split(error.remedy))


@pytest.mark.parametrize(
    "settings",
    [
        ["sharding.roles.actor.logits=fused"],
        ["actor_rollout_ref.ref.fsdp_config.model_dtype=fp16"],  # it never trains
        ["critic.fsdp.offload_policy=True"],  # it is sharded
        ["actor_rollout_ref.model.lora.merge=True"],
    ],
    ids=str,
)
def test_settings_that_a_spread_model_honours_are_planned(settings, planned):
    planned(*SPREAD_ACTOR, *settings)


# What is shown


def test_the_plan_prints_the_layers_of_each_device_with_what_training_adds(capsys):
    assert main.main(["plan", "--placement", *job(), *SPREAD_CRITIC]) == 0
    text = capsys.readouterr().out
    assert "Layers of critic (planned)" in text
    line = next(line.split() for line in text.splitlines() if "model.embed_tokens" in line)
    assert line == ["model.embed_tokens", "2", "0.08", "MiB", "0.31", "MiB"]


def test_json_has_the_layers_of_each_spread_role(capsys):
    assert main.main(["plan", "--placement", "--json", *job(), *SPREAD_CRITIC]) == 0
    (layers,) = json.loads(capsys.readouterr().out)["layers"]
    assert layers["role"] == "critic"
    assert {row["device"] for row in layers["rows"]} == {2, 3}
    assert layers["rows"][0]["num_bytes"] == FP32 * NUM_EMBEDDED
    assert layers["rows"][0]["training_bytes"] == FP32 * NUM_EMBEDDED * (2 + STATES)


def test_json_without_a_spread_role_has_no_layers(capsys):
    assert main.main(["plan", "--placement", "--json", *job()]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == []


@pytest.mark.parametrize(
    ("role", "rank", "copies"), [("actor", 0, 4), ("ref", 0, 1), ("actor", 8, 1), ("critic", 0, 4)]
)
def test_only_what_trains_has_gradients_and_states_in_the_table(role, rank, copies, planned, compose):
    layer_map = planned(*SPREAD_ACTOR, "sharding.roles.critic.devices=[2]").maps["actor"]
    config = compose(*job(), f"actor_rollout_ref.model.lora_rank={rank}")
    shown = layer_plans.planned_rows(config, replace(layer_map, role=role))
    assert {row.training_bytes for row in shown} == {copies * row.num_bytes for row in shown}
