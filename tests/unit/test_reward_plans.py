"""The reward model in the driver: what its servers are asked, what they can't do, which samples may not fit."""

import functools
import json

import pytest

from verl_ext_sharding import driver, reward_plans
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.config.reward_limits import ENABLE
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.placement.bundles import place

ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1, "vocab_size": 50265}
ROLLOUT = "reward.reward_model.rollout"
KEY = "sharding.roles.reward"
JOB = [
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "data.max_prompt_length=300",
    "data.max_response_length=400",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "config.json").write_text(json.dumps(ROBERTA))
    return str(folder)


@pytest.fixture(scope="module")
def planned(compose, model):
    """The plan of a job whose reward model, RoBERTa's shape, is served by a backend."""

    @functools.cache
    def made(*settings, name="hf"):
        overrides = [*JOB, "reward.reward_model.enable=True", f"reward.reward_model.model_path={model}"]
        overrides += [f"{ROLLOUT}.name={name}", *settings]
        if f"{KEY}.layout=device_map" not in settings:
            overrides += [f"{ROLLOUT}.tensor_model_parallel_size=1"]  # verl's default is 2
        return driver.prepare(compose(*overrides), explicit=parse_overrides(overrides))

    return made


def changed(plan):
    return {change.key: change.new for change in plan.changes}


def notes(plan):
    return [note for note in plan.table.notes if note.startswith("reward:")]


# What the servers are asked


def test_without_a_request_the_servers_of_hf_have_their_defaults(planned):
    assert planned().reward == RewardServerSettings()


def test_servers_of_other_backends_get_nothing_from_us(planned):
    assert planned(name="vllm").reward is None


def test_what_is_asked_of_the_servers_is_in_the_plan_and_reaches_them_unchanged(planned):
    plan = planned(f"{KEY}.attn_implementation=eager", f"{KEY}.offload.params=true", f"{KEY}.execution_device='cuda:0'")
    expected = RewardServerSettings(attn_implementation="eager", offload_params=True, execution_device="cuda:0")
    assert plan.reward == expected
    assert RewardServerSettings.from_dict(json.loads(json.dumps(plan.reward.to_dict()))) == expected


def test_layers_over_several_devices_make_one_server_of_all_of_them(planned):
    plan = planned(f"{KEY}.layout=device_map", f"{KEY}.devices=[1,2,3]", "sharding.roles.actor.devices=[0]")
    assert plan.reward == RewardServerSettings(device_map="auto", own_pool=True)
    assert changed(plan)[f"{ROLLOUT}.tensor_model_parallel_size"] == 3
    assert plan.facts.reward.ranks_per_replica == 3


@pytest.mark.parametrize(("actor", "apart"), [("[0,1]", True), ("[1,2]", False)])
def test_servers_are_told_whether_their_devices_are_their_own(actor, apart, planned):
    assert planned(f"sharding.roles.actor.devices={actor}", f"{KEY}.devices=[2,3]").reward.own_pool is apart


def test_keys_that_verl_has_are_set_by_verls_name(planned):
    plan = planned(f"{KEY}.dtype=float32", f"{KEY}.micro_batch_size=4", f"{KEY}.max_tokens=512", f"{KEY}.devices=[3]")
    set_for_it = {key: value for key, value in changed(plan).items() if key.startswith(f"{ROLLOUT}.")}
    assert set_for_it == {
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.max_num_seqs": 4,
        f"{ROLLOUT}.max_num_batched_tokens": 512,
    }


def test_a_server_of_vllm_gets_the_length_that_the_model_can_take_unless_the_user_wrote_another(planned):
    assert changed(planned(name="vllm"))[f"{ROLLOUT}.max_model_len"] == 512
    assert f"{ROLLOUT}.max_model_len" not in changed(planned(f"{ROLLOUT}.max_model_len=256", name="vllm"))
    assert f"{ROLLOUT}.max_model_len" not in changed(planned())


# What is refused before anything starts


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ([f"{ROLLOUT}.data_parallel_size=2", f"{KEY}.devices=[2,3]"], [f"{ROLLOUT}.data_parallel_size", "one server"]),
        ([f"{ROLLOUT}.load_format=dummy"], [f"{ROLLOUT}.load_format", "nobody sends weights"]),
        ([f"{ROLLOUT}.quantization=fp8"], [f"{ROLLOUT}.quantization", "off"]),
        ([f"{KEY}.execution_device='cuda:1'"], [f"{KEY}.execution_device", "numbers start at 0"]),
        ([f"{KEY}.execution_device=cuda"], [f"{KEY}.execution_device", "cuda:0"]),
        ([f"{KEY}.attn_implementation=varlen"], [f"{KEY}.attn_implementation", "flash_attention_2"]),
        ([f"{ROLLOUT}.max_model_len=514"], [f"{ROLLOUT}.max_model_len=512", "less the 2 that come before"]),
        ([f"{KEY}.max_input_tokens=513"], [f"{KEY}.max_input_tokens", "at most 512"]),
        ([f"{KEY}.layout=device_map", f"{KEY}.offload.params=true"], ["layout=device_map", "no offload.params"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_such_a_server_can_not_do_is_refused(settings, parts, refused):
    error = str(refused(*settings))
    for part in parts:
        assert part in error


def test_a_model_that_generates_is_refused_before_anything_starts(tmp_path, refused):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    error = refused(f"reward.reward_model.model_path={tmp_path}")
    assert error.subject == f"reward.reward_model.model_path={tmp_path}"
    assert error.found == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_implementation", "eager"), ("offload.params", "true"), ("execution_device", "'cuda:0'")],
)
def test_what_only_our_server_can_do_is_refused_for_others(key, value, refused):
    error = refused(f"{KEY}.{key}={value}", name="sglang")
    assert error.subject == f"{KEY}.{key}"
    assert f"{ROLLOUT}.name=hf" in error.remedy


@pytest.mark.parametrize("setting", [f"{KEY}.dtype=float32", "sharding.guards.reward_length=error"])
def test_settings_of_a_reward_model_that_the_job_has_not_are_refused(setting, refused):
    error = refused("reward.reward_model.enable=False", setting)
    assert error.subject == setting.partition("=")[0]
    assert "reward.reward_model.enable=True" in error.remedy


# Samples that may not fit


def test_samples_that_can_exceed_the_limit_are_noted_with_the_numbers_and_what_happens(planned):
    (note,) = notes(planned())
    assert "prompt 300 + response 400 + about 32 of the template = 732 tokens" in note
    assert "the reward model's 512" in note
    assert "truncate: longer samples lose the beginning of their prompt" in note
    assert "data.max_response_length=180 avoids it" in note


@pytest.mark.parametrize(("policy", "then"), [("error", "ends the run"), ("off", "sent as it is")])
def test_the_note_says_what_the_chosen_guard_does(policy, then, planned):
    (note,) = notes(planned(f"sharding.guards.reward_length={policy}"))
    assert then in note


def test_the_users_own_limit_counts_where_it_is_smaller(planned):
    (note,) = notes(planned(f"{KEY}.max_input_tokens=100"))
    assert "the reward model's 100" in note


@pytest.mark.parametrize(
    "settings",
    [
        ("data.max_response_length=180",),
        ("reward.custom_reward_function.path=my.py",),
        ("reward.reward_model.model_path=some/model-of-the-hub",),
        ("reward.reward_model.enable=False",),
    ],
    ids=str,
)
def test_nothing_is_noted_where_every_sample_fits_or_nothing_is_known(settings, planned):
    assert notes(planned(*settings)) == []


def test_a_config_is_read_only_where_the_job_has_a_reward_model_on_this_machine(compose, model):
    path = f"reward.reward_model.model_path={model}"
    assert reward_plans.hf_config_of(compose("reward.reward_model.enable=True", path)) == ROBERTA
    assert reward_plans.hf_config_of(compose(path)) is None
    assert reward_plans.hf_config_of(compose("reward.reward_model.enable=True")) is None


# What workers are told


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ((), True),
        (("reward.custom_reward_function.path=my.py",), False),
        (("reward.reward_model.enable=False",), False),
    ],
    ids=str,
)
def test_the_reward_loop_is_patched_only_where_verl_itself_asks_a_model_for_scores(settings, needed, planned):
    plan = planned(*settings)
    assert plan.scores_by_model is needed
    assert (ENABLE in driver.needed_keys(plan, plan.placement)) is needed


@pytest.fixture
def run(job):
    return functools.partial(RunSpec, placement=place({}, job()), bundle_cpus=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": RewardServerSettings()},
        {"reward": RewardServerSettings(device_map={"roberta.embeddings": 0, "": 1}, own_pool=True)},
        {"reward": RewardServerSettings(attn_implementation="sdpa", offload_params=True, execution_device="cpu")},
        {"guards": Guards(align_inputs=False, token_ids="mask")},
        {"guards": Guards(token_ids="off")},
        {"seed": 7},
    ],
    ids=str,
)
def test_server_settings_and_guards_survive_the_way_through_the_environment(fields, run):
    assert RunSpec.from_json(run(**fields).to_json()) == run(**fields)
    assert run(**fields).digest() != run().digest()
