"""From the `sharding` block to verl's own keys: every key acts, or is refused by its name."""

import copy

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.changes import apply_changes
from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.config.measures import handled_keys
from verl_ext_sharding.config.micro_batches import check_micro_batches
from verl_ext_sharding.config.offload import offload_notes
from verl_ext_sharding.config.reward_keys import acting_keys
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.config.translate import _without_effect, request_of, role_changes, translate, values_of
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import place

ROLES = ("actor", "rollout", "ref", "critic", "reward", "teacher")
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))


@pytest.fixture(scope="module")
def everything(compose):
    """A job with every role, resolved by nobody yet."""
    return compose(
        "algorithm.use_kl_in_reward=True",
        "reward.reward_model.enable=True",
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=4",
    )


def requested(key, value):
    block = value
    for name in reversed(key.split(".")[1:]):
        block = {name: block}
    return ShardingConfig.parse(block)


_read = {}
"""Facts and values of configs that don't change, by identity: reading them is what takes time."""


def translated(request, config, explicit=()):
    if id(config) not in _read:
        _read[id(config)] = config, job_facts(config), values_of(config)
    _, facts, values = _read[id(config)]
    placement = place({role: getattr(request.roles, role).devices for role in ROLES}, facts)
    return translate(request, facts, placement, values, explicit)


def new_values(key, value, config):
    return {change.key: change.new for change in translated(requested(key, value), config) if change.why == key}


def refusal(key, value, config):
    with pytest.raises(ConfigError) as caught:
        translated(requested(key, value), config)
    return caught.value


# What has a key in verl


def engine(role):
    return {"actor": f"{ACTOR}.fsdp_config", "ref": f"{REF}.fsdp_config", "critic": "critic.fsdp"}[role]


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
@pytest.mark.parametrize(("dtype", "verls"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_dtypes_become_the_names_of_verl(role, dtype, verls, everything):
    assert new_values(f"sharding.roles.{role}.dtype", dtype, everything) == {f"{engine(role)}.model_dtype": verls}
    precision = {"param_dtype": verls, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    compute = new_values(f"sharding.roles.{role}.compute_dtype", dtype, everything)
    assert compute == {f"{engine(role)}.mixed_precision": precision}


@pytest.mark.parametrize(("role", "model"), [("actor", "actor_rollout_ref.model"), ("critic", "critic.model")])
@pytest.mark.parametrize("value", [True, False])
def test_checkpointing_switches_the_models_own_key(role, model, value, everything):
    key = f"sharding.roles.{role}.gradient_checkpointing"
    assert new_values(key, value, everything) == {f"{model}.enable_gradient_checkpointing": value}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("value", [True, False])
def test_offload_switches_the_engines_own_keys(role, value, everything):
    offload = f"sharding.roles.{role}.offload"
    policy = {} if value else {f"{engine(role)}.offload_policy": False}  # which would keep both on the host
    assert new_values(f"{offload}.params", value, everything) == {f"{engine(role)}.param_offload": value} | policy
    keys = {f"{engine(role)}.optimizer_offload": value} | policy
    assert new_values(f"{offload}.optimizer", value, everything) == keys


@pytest.mark.parametrize(("role", "model"), [("actor", "actor_rollout_ref.model"), ("critic", "critic.model")])
def test_activations_that_shall_stay_switch_verls_own_offload_off(role, model, everything):
    key = f"sharding.roles.{role}.offload.activations"
    assert new_values(key, False, everything) == {f"{model}.enable_activation_offload": False}


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        (
            "actor",
            {
                f"{ACTOR}.use_dynamic_bsz": False,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 2,
            },
        ),
        ("ref", {f"{REF}.log_prob_use_dynamic_bsz": False, f"{REF}.log_prob_micro_batch_size_per_gpu": 2}),
        (
            "critic",
            {
                "critic.fsdp.use_dynamic_bsz": False,
                "critic.fsdp.micro_batch_size_per_gpu": 2,
                "critic.fsdp.infer_micro_batch_size_per_gpu": 2,
                "critic.ppo_micro_batch_size_per_gpu": 2,
                "critic.use_dynamic_bsz": False,  # these two as what nothing may contradict
            },
        ),
    ],
)
def test_a_micro_batch_sets_all_keys_that_its_role_reads_and_switches_token_budgets_off(role, keys, everything):
    assert new_values(f"sharding.roles.{role}.micro_batch_size", 2, everything) == keys


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        (
            "actor",
            {
                f"{ACTOR}.use_dynamic_bsz": True,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
                f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096,
            },
        ),
        ("ref", {f"{REF}.log_prob_use_dynamic_bsz": True, f"{REF}.log_prob_max_token_len_per_gpu": 4096}),
        (
            "critic",
            {
                "critic.fsdp.use_dynamic_bsz": True,
                "critic.use_dynamic_bsz": True,
                "critic.ppo_infer_max_token_len_per_gpu": 4096,
            },
        ),
    ],
)
def test_a_token_budget_sets_all_keys_that_its_role_reads_and_switches_it_on(role, keys, everything):
    assert new_values(f"sharding.roles.{role}.max_tokens", 4096, everything) == keys


# What verl's checks want of the other roles then; all cases against verl itself: tests/verl/test_micro_batch_keys.py.


FIXED = [
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    f"{REF}.log_prob_micro_batch_size_per_gpu=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
]
KL = "algorithm.use_kl_in_reward=True"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=True"


def other_keys(roles, *overrides, compose):
    """Changes of keys that are not among those by which the asked roles are given micro-batches."""
    config = compose(KL, *overrides)
    changes = apply_changes(config, translated(ShardingConfig.parse({"roles": roles}), config), {})
    checked = ShardingConfig.parse({"roles": roles}), job_facts(config), values_of(config)
    check_micro_batches(*checked)
    facts = job_facts(config)
    own = {change.key for role in roles for change in role_changes(role, getattr(checked[0].roles, role), facts)}
    return {change.key: change.new for change in changes if change.key not in own}


@pytest.mark.parametrize(
    ("roles", "overrides", "keys"),
    [
        ({"actor": {"micro_batch_size": 2}}, FIXED, {}),
        ({"actor": {"max_tokens": 4096}}, FIXED, {}),
        ({"critic": {"micro_batch_size": 2}}, FIXED, {}),
        ({"critic": {"micro_batch_size": 2}}, FIXED[:3], {"critic.ppo_micro_batch_size_per_gpu": 2}),
        ({"critic": {"micro_batch_size": 2}}, [DYNAMIC], {}),
        ({"critic": {"max_tokens": 4096}}, FIXED, {}),
        ({"critic": {"max_tokens": 4096}}, FIXED[:3], {"critic.use_dynamic_bsz": True}),
        ({"ref": {"max_tokens": 4096}}, FIXED, {}),
        (
            {"ref": {"max_tokens": 4096}},
            [*FIXED[:2], FIXED[3]],
            {f"{REF}.log_prob_micro_batch_size_per_gpu": 4},
        ),
        ({"ref": {"max_tokens": 4096}}, [DYNAMIC], {}),
        ({"ref": {"micro_batch_size": 2}}, [DYNAMIC], {}),
        (
            {"actor": {"micro_batch_size": 2}},
            [DYNAMIC],
            {f"{REF}.log_prob_micro_batch_size_per_gpu": 2, "critic.use_dynamic_bsz": True},
        ),
        (
            {"actor": {"micro_batch_size": 2}, "ref": {"max_tokens": 4096}, "critic": {"micro_batch_size": 3}},
            [DYNAMIC],
            {f"{REF}.log_prob_micro_batch_size_per_gpu": 2, "critic.ppo_micro_batch_size_per_gpu": 3},
        ),
        (
            {"actor": {"micro_batch_size": 2}, "ref": {"micro_batch_size": 1}},
            [DYNAMIC, f"{ACTOR}.ppo_micro_batch_size=8", f"{REF}.log_prob_micro_batch_size=8"],
            {
                f"{ACTOR}.ppo_micro_batch_size": None,
                f"{REF}.log_prob_micro_batch_size": None,
                "critic.use_dynamic_bsz": True,
            },
        ),
    ],
)
def test_what_a_role_is_given_takes_no_more_keys_of_others_than_verl_asks_for(roles, overrides, keys, compose):
    assert other_keys(roles, *overrides, compose=compose) == keys


def test_each_key_that_verl_asks_for_is_shown_with_the_setting_that_needs_it(compose):
    config = compose(KL, DYNAMIC)
    changes = translated(requested("sharding.roles.actor.micro_batch_size", 2), config)
    whys = {change.key: change.why for change in changes}
    for key in (f"{REF}.log_prob_micro_batch_size_per_gpu", "critic.use_dynamic_bsz"):
        assert whys[key].startswith("sharding.roles.actor.micro_batch_size (")


@pytest.mark.parametrize(
    ("roles", "overrides", "missing"),
    [
        (
            {"critic": {"micro_batch_size": 2}},
            [FIXED[0], FIXED[1]],
            {f"{REF}.log_prob_micro_batch_size_per_gpu": "ref"},
        ),
        ({"actor": {"micro_batch_size": 2}}, [FIXED[2]], {"critic.ppo_micro_batch_size_per_gpu": "critic"}),
        (
            {"ref": {"micro_batch_size": 2}},
            [],
            {
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": "actor",
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "actor",
                "critic.ppo_micro_batch_size_per_gpu": "critic",
            },
        ),
    ],
)
def test_a_micro_batch_that_the_job_leaves_open_is_refused_with_verls_key_and_ours(roles, overrides, missing, compose):
    with pytest.raises(ConfigError) as caught:
        other_keys(roles, *overrides, compose=compose)
    assert caught.value.subject == ", ".join(missing)
    keys, ours = caught.value.remedy.split(", or ")
    assert keys == " ".join(f"{key}={caught.value.remedy.partition('=')[2].split()[0].rstrip(',')}" for key in missing)
    for role in missing.values():
        assert f"sharding.roles.{role}.micro_batch_size=" in ours


@pytest.mark.parametrize("repaired_by", [0, 1], ids=["verl's keys", "ours"])
def test_what_the_refusal_offers_is_enough(repaired_by, compose):
    overrides = [FIXED[0], FIXED[1], "sharding.roles.critic.micro_batch_size=2"]
    with pytest.raises(ConfigError) as caught:
        other_keys({"critic": {"micro_batch_size": 2}}, *overrides, compose=compose)
    typed = caught.value.remedy.split(", or ")[repaired_by].split()
    config = compose(KL, *overrides, *typed)
    request = request_of(config)
    apply_changes(config, translated(request, config), {})
    check_micro_batches(request, job_facts(config), values_of(config))


def test_a_job_that_asks_for_no_micro_batch_is_left_to_verls_own_checks(compose):
    assert other_keys({}, compose=compose) == {}


def test_a_deprecated_size_that_verl_refuses_beside_the_new_one_is_named(compose):
    overrides = [*FIXED, f"{ACTOR}.ppo_micro_batch_size=8"]
    with pytest.raises(ConfigError) as caught:
        other_keys({"critic": {"micro_batch_size": 2}}, *overrides, compose=compose)
    assert caught.value.subject == f"{ACTOR}.ppo_micro_batch_size"
    assert caught.value.remedy.startswith(f"{ACTOR}.ppo_micro_batch_size=null ")


def test_a_mini_batch_above_the_batch_is_refused_where_fixed_micro_batches_take_the_place_of_budgets(compose):
    small = [DYNAMIC, "data.train_batch_size=64"]
    assert other_keys({"actor": {"max_tokens": 4096}}, *small, compose=compose) == {}
    with pytest.raises(ConfigError) as caught:
        other_keys({"actor": {"micro_batch_size": 2}}, *small, compose=compose)
    assert caught.value.remedy == f"{ACTOR}.ppo_mini_batch_size=64"


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_samples_and_tokens_at_once_are_refused(role, everything):
    request = ShardingConfig.parse({"roles": {role: {"micro_batch_size": 2, "max_tokens": 4096}}})
    with pytest.raises(ConfigError) as caught:
        translated(request, everything)
    assert caught.value.subject == f"sharding.roles.{role}"
    for key in ("micro_batch_size", "max_tokens"):
        assert f"sharding.roles.{role}.{key}" in caught.value.remedy


@pytest.mark.parametrize(
    ("limit", "value", "keys"),
    [
        ("batch_size", 8, {f"{ROLLOUT}.max_num_seqs": 8}),
        ("max_new_tokens", 64, {"data.max_response_length": 64, f"{ROLLOUT}.response_length": 64}),
        ("gpu_memory_utilization", 0.25, {f"{ROLLOUT}.gpu_memory_utilization": 0.25}),
    ],
)
def test_limits_of_rollout_set_verls_keys(limit, value, keys, everything):
    assert new_values(f"sharding.roles.rollout.{limit}", value, everything) == keys


def test_a_request_for_nothing_changes_nothing(compose):
    assert translated(ShardingConfig(), compose()) == []


# Pools of servers


@pytest.mark.parametrize(("devices", "apart"), [([2, 3], True), ([1, 2], False)])
def test_the_reward_models_pool_is_its_own_where_the_actor_is_not(devices, apart, everything):
    request = ShardingConfig.parse({"roles": {"actor": {"devices": [0, 1]}, "reward": {"devices": devices}}})
    changes = {change.key: change.new for change in translated(request, everything)}
    assert changes["reward.reward_model.enable_resource_pool"] is apart
    assert changes["reward.reward_model.nnodes"] == 1
    assert changes["reward.reward_model.n_gpus_per_node"] == 2


def test_the_teachers_pool_has_the_size_of_its_list(everything):
    request = ShardingConfig.parse({"roles": {"teacher": {"devices": [0, 1, 3]}}})
    changes = {change.key: change.new for change in translated(request, everything)}
    assert changes["distillation.nnodes"] == 1
    assert changes["distillation.n_gpus_per_node"] == 3


@pytest.mark.parametrize(("per_node", "tensor", "expected"), [(2, 4, 2), (2, 2, None), (4, 8, 4), (4, 4, None)])
def test_a_rollout_server_across_nodes_is_told_how_many_ranks_a_node_has(per_node, tensor, expected, compose):
    config = compose("trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size={tensor}", "trainer.n_gpus_per_node=8")
    devices = {f"node{node}": list(range(per_node)) for node in range(2)}
    request = ShardingConfig.parse({"roles": {"actor": {"devices": devices}}})
    changes = {change.key: change.new for change in translated(request, config)}
    assert changes.get(f"{ROLLOUT}.n_gpus_per_node") == expected


@pytest.mark.parametrize(
    ("name", "written", "accepted"),
    [("vllm", 2, False), ("vllm", 4, True), ("vllm", 8, True), ("sglang", 2, True), ("sglang", 3, False)],
)
def test_rollout_servers_on_the_actors_devices_are_not_cut_otherwise_by_a_key_that_was_written(
    name, written, accepted, compose
):
    lines = [f"{ROLLOUT}.name={name}", f"{ROLLOUT}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"]
    config = compose(*lines, f"{ROLLOUT}.n_gpus_per_node={written}")
    changes = {change.key: change for change in translated(ShardingConfig(), config)}
    if accepted:
        assert f"{ROLLOUT}.n_gpus_per_node" not in changes
    else:
        assert changes[f"{ROLLOUT}.n_gpus_per_node"].new == 8
        assert changes[f"{ROLLOUT}.n_gpus_per_node"].why == "trainer.n_gpus_per_node"


# Nothing is skipped silently


SAMPLES = [True, False, 2, 0.25, "auto", "off", "report", "fsdp", "device_map", "float16", "sdpa", "fused", "full", [1]]
SAMPLES += ["mask", "error", "cpu", "step", {"policy": "full"}, {"use_reentrant": False}]
ACT_ELSEWHERE = (
    "sharding.placement.",
    "sharding.communication.",
    "sharding.guards.align_inputs",
    "sharding.guards.token_ids",
)
ALREADY_SO = {
    "sharding.fit": ["off", False],
    "sharding.roles.actor.layout": ["fsdp"],
    "sharding.roles.critic.layout": ["fsdp"],
    "sharding.roles.ref.layout": ["fsdp"],
    "sharding.roles.ref.gradient_checkpointing": [False],
    "sharding.roles.ref.offload.params": [True],
    "sharding.roles.ref.offload.optimizer": [False],
    "sharding.roles.ref.offload.activations": [False],
}
"""Values that ask for what happens anyway, without any key of verl."""


def names_of_keys():
    keys = []
    stack = [("sharding", ShardingConfig())]
    while stack:
        path, config = stack.pop()
        for name, value in vars(config).items():
            if hasattr(value, "__dataclass_fields__"):
                stack.append((f"{path}.{name}", value))
            else:
                keys.append(f"{path}.{name}")
    return sorted(keys)


@pytest.mark.parametrize("key", names_of_keys())
def test_each_key_sets_a_key_of_verl_or_acts_elsewhere_or_is_refused_by_its_name(key, everything):
    requests = [(sample, request_for(key, sample)) for sample in SAMPLES]
    requests = [(sample, request) for sample, request in requests if request is not None and key in request.changed()]
    assert requests, f"no sample is a value of {key}"
    for sample, request in requests:
        refused, whys = outcome(request, everything)
        if refused is not None:
            assert key.startswith(refused.subject), sample
            assert key in str(refused), sample
            continue
        acts = key.endswith(".devices") or key.startswith(ACT_ELSEWHERE) or sample in ALREADY_SO.get(key, [])
        acts |= key in acting_keys(request, job_facts(everything), values_of(everything))
        assert acts or key in whys or key in handled_keys(request), f"{key}={sample} was skipped"


def request_for(key, sample):
    """The request with a sample as the value of a key, or None if it is no value of that key."""
    try:
        return requested(key, sample)
    except ConfigError:
        return None


def outcome(request, config):
    """The error that a request ends in, if any, and the keys that became keys of verl."""
    try:
        whys = {change.why for change in translated(request, config)}
        _, facts, values = _read[id(config)]
        offload_notes(request, facts, values)
        return None, whys
    except ConfigError as error:
        return error, set()


@pytest.mark.parametrize("key", ALREADY_SO)
def test_a_value_that_asks_for_what_happens_anyway_is_accepted(key, everything):
    for value in ALREADY_SO[key]:
        assert outcome(requested(key, value), everything) == (None, set())


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("teacher", {"dtype": "bfloat16", "layout": "fsdp", "micro_batch_size": 2}),
        ("reward", {"compute_dtype": "bfloat16", "layout": "fsdp", "gradient_checkpointing": True}),
    ],
)
def test_settings_that_only_a_trained_role_has_are_refused_for_servers(role, settings, everything):
    for setting, value in settings.items():
        error = refusal(f"sharding.roles.{role}.{setting}", value, everything)
        assert error.subject == f"sharding.roles.{role}.{setting}"
        assert error.remedy == f"remove sharding.roles.{role}.{setting}"


@pytest.mark.parametrize(
    ("setting", "value", "key"),
    [
        ("dtype", "float32", "dtype"),
        ("micro_batch_size", 4, "max_num_seqs"),
        ("max_tokens", 4096, "max_num_batched_tokens"),
    ],
)
def test_settings_of_the_reward_model_are_keys_of_its_server(setting, value, key, everything):
    found = new_values(f"sharding.roles.reward.{setting}", value, everything)
    assert found == {f"reward.reward_model.rollout.{key}": value}


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_implementation", "sdpa"), ("execution_device", "cuda:0"), ("layout", "device_map")],
)
def test_settings_of_our_reward_server_are_refused_for_others(key, value, compose):
    config = compose("reward.reward_model.enable=True", "reward.reward_model.rollout.name=vllm")
    error = refusal(f"sharding.roles.reward.{key}", value, config)
    assert error.subject == f"sharding.roles.reward.{key}"
    assert "reward.reward_model.rollout.name=hf" in error.remedy


def test_a_limit_for_inputs_is_refused_where_the_users_own_function_prepares_them(compose):
    config = compose("reward.reward_model.enable=True", "reward.custom_reward_function.path=my.py")
    error = refusal("sharding.guards.reward_length", "error", config)
    assert error.subject == "sharding.guards.reward_length"
    assert "custom_reward_function" in error.expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sharding.fit", "report", "apply, the default, or off in this version"),
        ("sharding.monitor.interval_s", 2.0, "1.0 in this version"),
        ("sharding.memory.headroom", 0.5, "0.08 in this version"),
        ("sharding.roles.teacher.dtype", "bfloat16", "null in this version"),
    ],
)
def test_a_key_that_nothing_acts_on_yet_is_refused_with_a_value_that_it_takes(key, value, expected, everything):
    error = refusal(key, value, everything)
    assert error.subject == key
    assert error.expected.startswith(expected)


@pytest.mark.parametrize("key", [k for k in names_of_keys() if k != "sharding.fit"])
def test_the_value_that_such_a_refusal_expects_is_the_default(key):
    text = _without_effect(key)
    assert requested(key, OmegaConf.from_dotlist([f"x={text}"]).x) == ShardingConfig()


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_a_map_without_its_layout_is_refused(role, everything):
    error = refusal(f"sharding.roles.{role}.device_map", "balanced", everything)
    assert f"sharding.roles.{role}.layout=device_map" in error.remedy


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_settings_for_a_role_that_the_job_has_not_are_refused(role, compose):
    error = refusal(f"sharding.roles.{role}.dtype", "bfloat16", compose("algorithm.adv_estimator=grpo"))
    assert error.subject == f"sharding.roles.{role}"
    assert role in error.expected


def test_with_lora_settings_of_the_reference_are_refused_since_the_actor_computes_it(compose):
    config = compose("algorithm.use_kl_in_reward=True", "actor_rollout_ref.model.lora_rank=8")
    assert "LoRA" in refusal("sharding.roles.ref.micro_batch_size", 2, config).expected


def test_memory_settings_of_another_engine_are_refused_with_its_name(compose):
    error = refusal("sharding.roles.actor.dtype", "bfloat16", compose("model_engine=megatron"))
    assert error.subject == "sharding.roles.actor"
    assert "megatron" in error.found
    assert "model_engine=dp" in error.remedy


def test_devices_can_be_set_for_any_engine(compose):
    config = compose("model_engine=megatron")
    assert translated(ShardingConfig.parse({"roles": {"critic": {"devices": [0]}}}), config) == []


# Against what the user wrote


CLASHES = [
    ("sharding.roles.critic.dtype", "bfloat16", "critic.fsdp.model_dtype", "fp32"),
    ("sharding.roles.actor.compute_dtype", "float16", f"{ACTOR}.fsdp_config.mixed_precision", "{param_dtype:bf16}"),
    (
        "sharding.roles.actor.gradient_checkpointing",
        False,
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "true",
    ),
    ("sharding.roles.critic.offload.params", True, "critic.fsdp.param_offload", "false"),
    ("sharding.roles.critic.offload.optimizer", True, "critic.fsdp.optimizer_offload", "false"),
    ("sharding.roles.ref.micro_batch_size", 4, f"{REF}.log_prob_micro_batch_size_per_gpu", "8"),
    ("sharding.roles.actor.micro_batch_size", 4, f"{ACTOR}.use_dynamic_bsz", "true"),
    ("sharding.roles.actor.max_tokens", 4096, f"{ROLLOUT}.log_prob_use_dynamic_bsz", "false"),
    ("sharding.roles.critic.max_tokens", 4096, "critic.ppo_infer_max_token_len_per_gpu", "8192"),
    ("sharding.roles.rollout.batch_size", 8, f"{ROLLOUT}.max_num_seqs", "16"),
    ("sharding.roles.rollout.max_new_tokens", 64, "data.max_response_length", "128"),
    ("sharding.roles.actor.offload.params", False, f"{ACTOR}.fsdp_config.offload_policy", "true"),
    # ours acts in the place of these
    (
        "sharding.roles.critic.gradient_checkpointing",
        {"policy": "full"},
        "critic.model.enable_gradient_checkpointing",
        "false",
    ),
    (
        "sharding.roles.actor.offload.activations",
        True,
        "actor_rollout_ref.model.enable_activation_offload",
        "false",
    ),
    (
        "sharding.roles.critic.attn_implementation",
        "sdpa",
        "critic.model.override_config.attn_implementation",
        "eager",
    ),
    ("sharding.roles.critic.micro_batch_size", 2, "critic.use_dynamic_bsz", "true"),
    ("sharding.roles.critic.micro_batch_size", 2, "critic.ppo_micro_batch_size_per_gpu", "4"),
    ("sharding.roles.critic.max_tokens", 65536, "critic.use_dynamic_bsz", "false"),
]


def applied(key, value, written, everything):
    config = copy.deepcopy(everything)
    for name, text in written.items():
        OmegaConf.update(config, name, OmegaConf.from_dotlist([f"x={text}"]).x, force_add=True)
    explicit = {name: str(text) for name, text in written.items()}
    apply_changes(config, translated(requested(key, value), config, explicit), explicit)
    return config


@pytest.mark.parametrize(("key", "value", "verls", "written"), CLASHES)
def test_another_value_for_verls_key_on_the_command_line_is_refused_and_both_are_named(
    key, value, verls, written, everything
):
    with pytest.raises(ConfigError) as caught:
        applied(key, value, {verls: written}, everything)
    assert verls in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(("key", "value", "verls", "_"), CLASHES)
def test_the_same_value_for_verls_key_on_the_command_line_is_fine(key, value, verls, _, everything):
    wanted = new_values(key, value, everything)[verls]
    text = str(wanted).replace("'", "").lower() if isinstance(wanted, bool | dict) else wanted
    config = applied(key, value, {verls: text}, everything)
    assert OmegaConf.to_container(OmegaConf.create({"x": OmegaConf.select(config, verls)}))["x"] == wanted


# Reading a config


def test_values_are_read_by_dotted_key_with_references_resolved():
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}", "d": [1, 2], "e": "???", "f": None}, "g": {}})
    assert values_of(config) == {"a.b": 1, "a.c": 1, "a.e": None, "a.f": None}


@pytest.mark.parametrize(
    "config", [{"trainer": {}}, {"sharding": None}, {"sharding": {"roles": {"critic": None}}}], ids=str
)
def test_a_config_without_our_block_or_with_null_for_it_asks_for_nothing(config):
    assert request_of(OmegaConf.create(config)) == ShardingConfig()


def test_the_request_resolves_references():
    config = OmegaConf.create({"n": [1], "sharding": {"roles": {"critic": {"devices": "${n}"}}}})
    assert request_of(config).roles.critic.devices == [1]
