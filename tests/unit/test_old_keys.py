"""Keys of older verl releases: every one is answered, every replacement exists, nothing else is answered."""

import functools
import importlib.util
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding import versions
from verl_ext_sharding.config.old_keys import REPLACEMENTS, answer, answer_unread, refusal
from verl_ext_sharding.config.unread_keys import BLOCKS
from verl_ext_sharding.errors import ConfigError

DATA = Path(__file__).parent / "data"
PRIMARY = {
    "dp": ("ppo_trainer", "dp"),
    "megatron": ("ppo_megatron_trainer", "megatron"),
    "veomni": ("ppo_trainer", "veomni"),
    "torchtitan": ("ppo_trainer", "torchtitan"),
    "mindspeed": ("ppo_trainer", "megatron"),  # its engine is Megatron's on NPUs since 0.9.1
}


def config_dir() -> str:
    spec = importlib.util.find_spec("verl")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    return str(Path(spec.submodule_search_locations[0], "trainer", "config"))


def _walk(config: DictConfig, prefix: str = ""):
    for key in config:
        node = config._get_node(key)
        yield f"{prefix}{key}"
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation() or node._is_missing()):
            yield from _walk(node, f"{prefix}{key}.")


@functools.cache
def tree(engine: str) -> frozenset[str]:
    """Every key of the installed verl's composed config for a model engine."""
    name, model_engine = PRIMARY[engine]
    with initialize_config_dir(config_dir=config_dir(), version_base=None):
        return frozenset(_walk(compose(name, overrides=[f"model_engine={model_engine}"])))


@functools.cache
def removed(file: str) -> list[tuple[str, str, str]]:
    """`(key, last release that had it, engine)` of a list in `data/`."""
    lines = [line.split() for line in (DATA / file).read_text().splitlines() if not line.startswith("#")]
    return [(key, last, engine) for key, last, engines in lines for engine in engines.split(",")]


LISTS = ("keys_removed_since_0_7.txt", "keys_removed_before_0_7.txt", "keys_removed_before_0_4_1.txt")


@pytest.mark.parametrize("file", LISTS)
def test_every_removed_key_is_answered(file):
    unanswered = [
        key for key, _, engine in removed(file) if key not in tree(engine) and answer(key, "1", tree(engine)) is None
    ]
    assert unanswered == []


@pytest.mark.skipif(versions.installed("verl") != "0.9.1", reason="the lists are made against verl 0.9.1")
@pytest.mark.parametrize("file", LISTS)
def test_the_lists_hold_only_keys_that_verl_lacks(file):
    assert [key for key, _, engine in removed(file) if key in tree(engine)] == []


def test_the_list_since_0_7_is_whole():
    keys = {key for key, _, _ in removed(LISTS[0])}
    assert len(keys) == 410
    assert {"critic.model.fsdp_config.param_offload", "reward_manager.name", "data.sampler.class_path"} <= keys


@pytest.mark.parametrize("file", LISTS)
def test_every_replacement_exists_in_verl(file):
    everywhere = frozenset().union(*map(tree, PRIMARY))
    answers = [answer(key, "1", tree(engine)) for key, _, engine in removed(file)]
    places = {a.new_key for a in answers if a is not None and a.new_key is not None}
    missing = [place for place in places if not place.startswith("+") and place not in everywhere]
    assert missing == []


@pytest.mark.parametrize("file", LISTS[:2])  # of the others none must be added
def test_hydra_accepts_each_replacement_that_it_must_add(file):
    answers = [answer(key, "1", tree(engine)) for key, _, engine in removed(file)]
    added = sorted({f"{a.new_key}.x=1" for a in answers if a is not None and a.new_key and a.new_key[0] == "+"})
    assert added
    with initialize_config_dir(config_dir=config_dir(), version_base=None):
        for override in added:
            compose("ppo_trainer", overrides=[override])


@pytest.mark.parametrize("file", LISTS)
def test_no_answer_claims_that_a_key_left_before_its_last_release(file):
    def release(text):
        return tuple(int(part) for part in (text + ".0.0").split(".")[:3])

    early = [
        (key, last, found.since)
        for key, last, engine in removed(file)
        if (found := answer(key, "1", tree(engine))) and release(found.since) <= release(last)
    ]
    assert early == []


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda replacement: replacement.old)
def test_each_entry_gives_a_reason_without_a_full_stop(replacement):
    assert replacement.reason
    assert not replacement.reason.endswith(".")


def test_no_entry_stands_in_the_shadow_of_an_earlier_one():
    olds = [replacement.old for replacement in REPLACEMENTS]
    blocks = [old.removesuffix("*") for old in olds if old.endswith(".*")]
    shadowed = [
        old for i, old in enumerate(olds) for block in blocks if old.startswith(block) and olds.index(f"{block}*") < i
    ]
    assert shadowed == []
    assert len(olds) == len(set(olds))


@pytest.mark.parametrize(
    ("written", "value", "remedy"),
    [
        ("critic.model.fsdp_config.param_offload", "True", "write critic.fsdp.param_offload=True"),
        ("critic.fsdp_config.offload_policy", "true", "write critic.fsdp.offload_policy=true"),
        (
            "actor_rollout_ref.actor.offload_policy",
            "True",
            "write actor_rollout_ref.actor.fsdp_config.offload_policy=True",
        ),
        (
            "+critic.model.fsdp_config.mixed_precision.param_dtype",
            "bf16",
            "write +critic.fsdp.mixed_precision.param_dtype=bf16",
        ),
        ("critic.nccl_timeout", "1200", "write actor_rollout_ref.nccl_timeout=1200"),
        ("reward_manager.name", "dapo", "write reward.reward_manager.name=dapo"),
        ("actor_rollout_ref.rollout.skip_rollout", "True", "write skip.rollout_tq.enable=True"),
        ("actor_rollout_ref.rollout.skip.max_dump_step", "3", "write skip.rollout_tq.steps=[1,2,3]"),
        ("actor_rollout_ref.rollout.skip.action", "repeat_last", "write skip.rollout_tq.action=repeat"),
        (
            "critic.profiler.tool_config.torch.step_start",
            "3",
            "write critic.profiler.tool_config.torch.schedule.wait=2",
        ),
        (
            "algorithm.rollout_correction.rollout_token_veto_threshold",
            "1e-4",
            "write algorithm.rollout_correction.rollout_rs=seq_max_k2 "
            "algorithm.rollout_correction.rollout_rs_threshold=42.42",
        ),
        ("trainer.profile_steps", "[1,2]", "write global_profiler.steps=[1,2]"),
        ("ray_init.num_cpus", "16", "write ray_kwargs.ray_init.num_cpus=16"),
        ("trainer.remove_previous_ckpt_in_save", "True", "write trainer.max_actor_ckpt_to_keep=1"),
        ("trainer.remove_previous_ckpt_in_save", "False", "write trainer.max_actor_ckpt_to_keep=null"),
        # keys that only verl's examples and recipes had
        ("actor_rollout_ref.model.use_rmpad", "True", "write actor_rollout_ref.model.use_remove_padding=True"),
        ("profile.options.save_path", "/p", "write global_profiler.save_path=/p"),
        (
            "custom_reward_function.overlong_buffer.len",
            "4096",
            "write +reward.reward_kwargs.overlong_buffer_cfg.len=4096",
        ),
        ("reward_model.model_path", "/m", "write reward.reward_model.model_path=/m"),
        ("reward_model.inference.name", "vllm", "write reward.reward_model.rollout.name=vllm"),
        (
            "actor_rollout_ref.actor.use_token_level_loss",
            "True",
            "write actor_rollout_ref.actor.loss_agg_mode=token-mean",
        ),
    ],
)
def test_the_answer_is_what_to_type(written, value, remedy):
    found = answer(written, value, tree("dp"))
    assert found is not None
    assert found.remedy == remedy
    assert found.available


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("actor_rollout_ref.actor.fsdp_config.grad_offload", "param_offload"),
        ("critic.model.fsdp_config.grad_offload", "critic.fsdp.param_offload"),
        ("reward_model.model.fsdp_config.param_offload", "vLLM or SGLang server"),
        ("trainer.use_legacy_worker_impl", "trainer.use_v1"),
        ("data.datagen.path", "data.custom_cls.path"),
    ],
)
def test_a_key_without_successor_says_why_it_is_gone(written, why):
    found = answer(written, "True", tree("dp"))
    assert found is not None
    assert found.overrides == ()
    assert found.remedy == f"remove {written}"
    assert why in found.reason


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_the_plus_of_hydra_does_not_hide_an_old_key(prefix):
    found = answer(f"{prefix}critic.model.fsdp_config.fsdp_size", "2", tree("dp"))
    assert found is not None
    assert found.overrides == ("critic.fsdp.fsdp_size=2",)


@pytest.mark.parametrize("key", ["critic.model.fsdp_config", "critic.fsdp_config.fsdp_size", "reward_manager.module"])
def test_a_deletion_of_an_old_key_is_not_repeated_in_its_new_place(key):
    found = answer(f"~{key}", None, tree("dp"))
    assert found is not None
    assert found.overrides == ()
    assert found.remedy == f"remove ~{key}"
    assert found.error().found == f"~{key}"


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("actor_rollout_ref.actor.offload_policy", "actor_rollout_ref.actor.fsdp_config.offload_policy"),
        ("actor_rollout_ref.ref.offload_policy", "actor_rollout_ref.ref.fsdp_config.offload_policy"),
        ("critic.offload_policy", "critic.fsdp.offload_policy"),
    ],
)
def test_an_fsdp_setting_beside_the_block_of_its_role_is_answered_with_the_block(key, new):
    found = answer(key, "True", tree("dp"))
    assert found is not None
    assert found.overrides == (f"{new}=True",)


@pytest.mark.parametrize(
    "block", ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"]
)
def test_gradient_offload_is_gone_from_the_block_that_each_role_has_now(block):
    found = answer(f"{block}.grad_offload", "True", tree("dp"))
    assert found is not None
    assert found.remedy == f"remove {block}.grad_offload"
    assert "param_offload" in found.reason


def test_several_old_keys_are_repaired_at_once():
    keys = {
        "critic.model.fsdp_config.param_offload": "True",
        "critic.model.fsdp_config.grad_offload": "True",
        "critic.nccl_timeout": "600",
        "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_method": "block",
    }
    error = refusal([answer(key, value, tree("dp")) for key, value in keys.items()])
    for key, value in keys.items():
        assert f"{key}={value}" in error.found
    assert error.remedy.startswith("write critic.fsdp.param_offload=True actor_rollout_ref.nccl_timeout=600; remove ")
    assert "remove critic.model.fsdp_config.grad_offload;" in error.remedy
    assert "with model_engine=megatron" in error.remedy


@pytest.mark.parametrize("block", ["custom_reward_function.overlong_buffer", "reward_model.overlong_buffer"])
def test_the_overlong_buffer_of_dapo_goes_where_its_manager_reads_all_that_it_needs(block):
    written = {f"{block}.log": "True", f"{block}.enable": "True", f"{block}.len": "64"}
    error = refusal([answer(key, value, tree("dp")) for key, value in written.items()])
    overrides = shlex.split(error.remedy.removeprefix("write "))
    with initialize_config_dir(config_dir=config_dir(), version_base=None):
        reward = compose("ppo_trainer", overrides=[*overrides, "data.max_response_length=128"]).reward
    assert reward.reward_kwargs == {
        "overlong_buffer_cfg": {"log": True, "enable": True, "len": 64},
        "max_resp_len": 128,
    }


# Keys that verl's yaml still has, and its trainer reads no more


LEGACY = "legacy_reward_impl.yaml"


def _leaves(config, prefix=""):
    for key, value in config.items():
        if OmegaConf.is_config(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_the_blocks_of_verls_old_reward_keys_are_known_and_all_null():
    legacy = OmegaConf.load(f"{config_dir()}/{LEGACY}")
    assert set(legacy) == set(BLOCKS)
    assert {value for _, value in _leaves(legacy)} == {None}


def test_every_old_reward_key_is_answered_with_a_key_that_verl_has_or_with_why_it_is_gone():
    gone = {"reward_model.model.external_lib", "reward_model.model.trust_remote_code"}
    for key, _ in _leaves(OmegaConf.load(f"{config_dir()}/{LEGACY}")):
        found = answer_unread(key, "1", tree("dp"))
        assert found is not None, key
        assert (found.new_key in tree("dp")) == (key not in gone), key
        assert found.new_key is None or found.new_key.startswith("reward."), key


def test_values_go_where_verls_own_migration_puts_them():
    moved = {
        "custom_reward_function.path": "reward.custom_reward_function.path",
        "reward_model.enable": "reward.reward_model.enable",
        "reward_model.model.path": "reward.reward_model.model_path",
        "reward_model.num_workers": "reward.num_workers",
        "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
        "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
        "reward_model.reward_loop_source": "reward.reward_manager.source",
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": "+reward.reward_kwargs.overlong_buffer_cfg.len",
        "reward_model.rollout.dtype": "reward.reward_model.rollout.dtype",
        "sandbox_fusion.url": "reward.sandbox_fusion.url",
    }
    for old, new in moved.items():
        found = answer_unread(old, "7", tree("dp"))
        assert found is not None
        assert found.remedy == f"write {new}=7"


@pytest.mark.parametrize(("old", "new"), [("dapo", "dapo"), ("prime", "remote"), ("batch", "<value>")])
def test_a_reward_manager_that_is_gone_is_not_offered_again(old, new):
    found = answer_unread("reward_model.reward_manager", old, tree("dp"))
    assert found.overrides == (f"reward.reward_manager.name={new}",)


def test_a_null_that_needs_another_form_is_just_removed():
    found = answer("algorithm.rollout_correction.rollout_rs_threshold_lower", "null", tree("dp"))
    assert found is not None
    assert found.remedy == "remove algorithm.rollout_correction.rollout_rs_threshold_lower"


def test_a_typo_in_a_moved_block_gets_the_nearest_key_of_the_new_one():
    found = answer("critic.model.fsdp_config.parm_offload", "True", tree("dp"))
    assert found is not None
    assert found.overrides == ("critic.fsdp.param_offload=True",)
    assert "critic.fsdp has no parm_offload" in found.reason


def test_router_replay_goes_to_the_engine_of_the_run():
    written = "actor_rollout_ref.actor.router_replay.mode"
    assert answer(written, "R3", tree("megatron")).overrides == (
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
    )
    assert answer(written, "R3", tree("veomni")).overrides == ("actor_rollout_ref.actor.veomni.router_replay.mode=R3",)
    elsewhere = answer(written, "R3", tree("dp"))
    assert not elsewhere.available
    assert "with model_engine=megatron" in elsewhere.remedy


@pytest.mark.parametrize(
    "key",
    [
        "trainer.plugn",
        "actor_rollout_ref.actor.lrr",
        "critic.model.pathh",
        "reward.nothing",
        "sharding.roles.critc.devices",
        "critic.model.fsdp_configs.param_offload",
        "actor_rollout_ref.rollout.load_weight",
        "critic",
        "",
    ],
)
def test_a_key_that_never_existed_is_not_answered(key):
    assert answer(key, "1", tree("dp") - {"critic"}) is None


def test_keys_that_verl_still_has_are_not_answered():
    assert [key for key in tree("dp") if answer(key, "1", tree("dp")) is not None] == []


def test_a_key_that_verl_still_has_for_this_engine_is_not_answered_with_a_plus_either():
    assert answer("+critic.nccl_timeout", "1", tree("megatron")) is None
    assert answer("+critic.nccl_timeout", "1", tree("dp")) is not None


def test_the_error_names_key_value_reason_and_remedy():
    error = answer("critic.model.fsdp_config.param_offload", "True", tree("dp")).error()
    assert isinstance(error, ConfigError)
    text = str(error)
    for part in ("critic.model.fsdp_config.param_offload=True", "does not start", "critic.fsdp.param_offload=True"):
        assert part in text


# SFT

REMOVED_FROM_SFT = [
    "data.micro_batch_size",
    "data.prompt_key",
    "data.response_key",
    "data.prompt_dict_keys",
    "data.response_dict_keys",
    "data.multiturn.enable",
    "data.multiturn.messages_key",
    "data.multiturn.tools_key",
    "data.multiturn.enable_thinking_key",
    "data.chat_template",
    "model.partial_pretrain",
    "model.fsdp_config.model_dtype",
    "model.fsdp_config.wrap_policy.min_num_params",
    "model.fsdp_config.cpu_offload",
    "model.fsdp_config.offload_params",
    "model.strategy",
    "optim.warmup_steps_ratio",
    "optim.lr_scheduler",
    "ulysses_sequence_parallel_size",
    "use_remove_padding",
    "trainer.resume_path",
    "trainer.checkpoint.save_contents",
    "trainer.checkpoint.load_contents",
    "checkpoint.mbridge_config",
]


@functools.cache
def sft_tree(engine: str = "fsdp") -> frozenset[str]:
    with initialize_config_dir(config_dir=config_dir(), version_base=None):
        return frozenset(_walk(compose("sft_trainer_engine", overrides=[f"engine={engine}", f"optim={engine}"])))


@pytest.mark.parametrize("key", REMOVED_FROM_SFT)
def test_every_key_that_sft_lost_is_answered_with_one_that_it_has_or_a_reason(key):
    found = answer(key, "1", sft_tree())
    assert found is not None
    assert key not in sft_tree()
    assert found.reason
    assert not found.reason.endswith(".")
    assert found.new_key is None or found.new_key in sft_tree()


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("model.fsdp_config.cpu_offload=True", "write engine.strategy=fsdp2 engine.offload_policy=True"),
        ("model.fsdp_config.cpu_offload=False", "write engine.offload_policy=False"),
        (
            "model.strategy=fsdp model.fsdp_config.cpu_offload=False",
            "write engine.strategy=fsdp engine.offload_policy=False",
        ),
        (
            "model.strategy=fsdp model.fsdp_config.cpu_offload=True",
            "write engine.strategy=fsdp2 engine.offload_policy=True",
        ),
        ("data.micro_batch_size=4", "write data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=<samples>"),
        ("data.micro_batch_size=null", "remove data.micro_batch_size"),
        ("optim.lr_scheduler=cosine", "write optim.lr_scheduler_type=cosine"),
        ("optim.lr_scheduler=wsd", "write optim.lr_scheduler_type=<value>"),
        ("model.fsdp_config.wrap_policy.min_num_params=2", "write engine.wrap_policy.min_num_params=2"),
        (
            "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[A]",
            "write +engine.wrap_policy.transformer_layer_cls_to_wrap=[A]",
        ),
    ],
)
def test_what_takes_the_place_of_an_old_key_of_sft_acts_as_the_key_did(written, remedy):
    """verl's defaults, `engine.strategy=fsdp` and `data.use_dynamic_bsz=True`, would leave some of them without effect."""
    answers = [answer(*line.split("="), sft_tree()) for line in written.split()]
    error = refusal(answers)
    assert error.remedy == remedy
    typed = [line.replace("<samples>", "2") for line in remedy.split()[1:] if "<value>" not in line]
    with initialize_config_dir(config_dir=config_dir(), version_base=None):
        compose("sft_trainer_engine", overrides=typed if remedy.startswith("write") else [])


def test_the_old_flag_of_parameters_names_what_offloads_them():
    found = answer("model.fsdp_config.offload_params", "True", sft_tree())
    assert "offload_policy acts with engine.strategy=fsdp2 alone, for parameters too" in found.reason


def test_a_key_is_not_answered_with_one_of_another_meaning_because_it_is_spelt_alike():
    megatron = sft_tree("megatron")
    assert "engine.forward_only" in megatron
    assert answer("model.fsdp_config.cpu_offload", "True", megatron).remedy == "remove model.fsdp_config.cpu_offload"


def test_keys_of_ppo_and_of_sft_are_not_mistaken_for_each_other():
    assert answer("model.partial_pretrain", "/m", tree("dp")) is None
    assert answer("critic.fsdp_config.fsdp_size", "2", sft_tree()) is None
