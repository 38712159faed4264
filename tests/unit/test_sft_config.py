"""The request in the keys of verl's SFT trainer: each setting of the actor, each refusal, and the spec of the run."""

import sys
import types

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver, sft
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.launchers import Program, Ranks
from verl_ext_sharding.patch_points import logprobs

PROGRAM = Program(target=("-m", "verl.trainer.sft_trainer"))
ACTOR = "sharding.roles.actor"


def ranks(world_size, *, rank=0, local_world_size=None):
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % (local_world_size or world_size)}
    return {
        name: str(number) for name, number in (numbers | {"LOCAL_WORLD_SIZE": local_world_size or world_size}).items()
    }


@pytest.fixture
def prepare(compose):
    """Composes a config of SFT and prepares it: the plan and the config as it is then."""

    def prepared(*overrides, written=(), **environ):
        config = compose(*overrides, *written, config_name="sft_trainer_engine")
        explicit = dict(line.lstrip("+").split("=", 1) for line in written)
        added = parse_overrides(line for line in written if line.startswith("+"))
        return sft.prepare(config, explicit, environ or ranks(2), PROGRAM, added), config

    return prepared


def changed(plan):
    return {change.key: change.new for change in plan.changes}


def refusal(prepare, *overrides, **options):
    with pytest.raises(ConfigError) as caught:
        prepare(*overrides, **options)
    return caught.value


def test_a_run_that_asks_for_nothing_changes_nothing(prepare):
    plan, _ = prepare()
    assert plan.changes == ()
    assert plan.spec.measures == {}


BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ("dtype=bfloat16", {"engine.model_dtype": "bf16"}),
        ("compute_dtype=bfloat16", {"engine.mixed_precision": BF16}),
        ("gradient_checkpointing=false", {"model.enable_gradient_checkpointing": False}),
        ("offload.params=true", {"engine.param_offload": True}),
        ("offload.optimizer=true", {"engine.optimizer_offload": True}),
        ("micro_batch_size=2", {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 2}),
        ("max_tokens=2048", {"data.max_token_len_per_gpu": 2048}),
    ],
)
def test_each_setting_of_the_actor_becomes_the_key_that_sft_has_for_it(prepare, setting, keys):
    plan, config = prepare(f"{ACTOR}.{setting}")
    assert changed(plan) == keys
    found = {key: OmegaConf.select(config, key) for key in keys}
    assert {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in found.items()} == keys


def test_a_token_budget_switches_verls_fixed_micro_batches_off(prepare):
    plan, _ = prepare(f"{ACTOR}.max_tokens=2048", "data.use_dynamic_bsz=False")
    assert changed(plan) == {"data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 2048}


@pytest.mark.parametrize(
    ("setting", "measures"),
    [
        ("attn_implementation=eager", RoleMeasures(attention="eager")),
        ("logits=fused", RoleMeasures(logits="fused")),
        (
            "gradient_checkpointing={policy: every_n, every: 2}",
            RoleMeasures(checkpointing={"policy": "every_n", "every": 2}),
        ),
        ("offload.activations=true", RoleMeasures(offload_activations=True)),
        ("offload.optimizer=step", RoleMeasures(optimizer_per_step=True)),
    ],
)
def test_what_verl_has_no_key_for_travels_in_the_spec_as_a_measure_of_the_actor(prepare, setting, measures):
    plan, _ = prepare(f"{ACTOR}.{setting}")
    assert plan.spec.measures == {"actor": measures}
    assert RunSpec.from_json(plan.spec.to_json()) == plan.spec


@pytest.mark.parametrize("logits", ["auto", "chunked", "full", "fused"])
def test_the_patch_of_log_probs_is_needed_wherever_they_are_asked_for(prepare, logits):
    plan, _ = prepare(f"{ACTOR}.logits={logits}")
    assert "sharding.roles.*.logits" in plan.spec.needed


def test_log_probs_that_nobody_asked_for_stay_verls_own(prepare):
    plan, _ = prepare()
    assert "sharding.roles.*.logits" not in plan.spec.needed


def test_the_spec_has_one_role_on_every_process_of_the_launcher(prepare):
    plan, _ = prepare(**ranks(8, rank=5, local_world_size=4))
    assert plan.spec.placement.roles == ("actor",)
    assert plan.spec.placement.devices_of("actor") == tuple(range(8))
    assert (plan.spec.placement.topology.num_nodes, plan.spec.placement.topology.devices_per_node) == (2, 4)
    assert (plan.ranks.rank, plan.ranks.local_rank) == (5, 1)


# What SFT can't do


@pytest.mark.parametrize("devices", ["[0]", "0-1", "first_half"])
def test_devices_are_refused_since_the_launcher_gives_them(prepare, devices):
    error = refusal(prepare, f"{ACTOR}.devices={devices}")
    assert error.subject == f"{ACTOR}.devices"
    assert "torchrun" in error.expected
    assert "CUDA_VISIBLE_DEVICES" in error.remedy


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("critic.dtype=bfloat16", f"{ACTOR}.dtype"),
        ("ref.offload.params=true", f"{ACTOR}.offload.params"),
        ("rollout.batch_size=4", None),
        ("reward.execution_device=cpu", None),
        ("teacher.devices=[0]", f"{ACTOR}.devices"),
    ],
)
def test_settings_of_other_roles_are_refused_with_the_block_that_sft_reads(prepare, setting, instead):
    error = refusal(prepare, f"sharding.roles.{setting}")
    assert error.subject == f"sharding.roles.{setting.partition('=')[0]}"
    assert ACTOR in error.expected
    assert error.remedy.endswith(f"or write {instead}") if instead else ACTOR not in error.remedy


@pytest.mark.parametrize(
    "setting",
    [
        "sharding.placement.timeout_s=9",
        f"{ACTOR}.layout=device_map",
        "sharding.guards.reward_length=error",
        "sharding.fit=report",
    ],
)
def test_what_nothing_in_sft_acts_on_is_refused(prepare, setting):
    assert refusal(prepare, setting).subject == setting.partition("=")[0]


def test_guards_reach_the_engine(prepare):
    plan, _ = prepare("sharding.guards.token_ids=mask", "sharding.guards.align_inputs=false")
    assert (plan.spec.guards.token_ids, plan.spec.guards.align_inputs) == ("mask", False)


@pytest.mark.parametrize("setting", [f"{ACTOR}.layout=fsdp", "sharding.fit=off", "sharding.communication.p2p=false"])
def test_what_happens_anyway_or_acts_elsewhere_is_accepted(prepare, setting):
    plan, _ = prepare(setting)
    assert plan.changes == ()


def test_settings_of_the_model_need_the_fsdp_engine(prepare):
    error = refusal(prepare, f"{ACTOR}.dtype=bfloat16", "engine=megatron", "optim=megatron")
    assert error.found == "megatron"
    assert "engine=fsdp" in error.expected


@pytest.mark.parametrize(
    ("batch", "processes", "ulysses", "asked", "fitting"),
    [(8, 2, 1, 3, 2), (8, 2, 1, 8, 4), (12, 4, 2, 4, 3), (7, 2, 1, 2, 1)],
)
def test_a_micro_batch_that_does_not_divide_what_a_rank_gets_is_refused_with_one_that_does(
    prepare, batch, processes, ulysses, asked, fitting
):
    overrides = [f"data.train_batch_size={batch}", f"engine.ulysses_sequence_parallel_size={ulysses}"]
    error = refusal(prepare, f"{ACTOR}.micro_batch_size={asked}", *overrides, **ranks(processes))
    assert error.remedy == f"{ACTOR}.micro_batch_size={fitting}"
    prepare(f"{ACTOR}.micro_batch_size={fitting}", *overrides, **ranks(processes))


@pytest.mark.parametrize(("ulysses", "asked", "enough"), [(1, 1022, 1023), (2, 511, 512), (4, 255, 256)])
def test_a_token_budget_below_the_longest_sequence_is_refused_with_one_that_holds_it(prepare, ulysses, asked, enough):
    overrides = ["data.max_length=1023", f"engine.ulysses_sequence_parallel_size={ulysses}"]
    error = refusal(prepare, f"{ACTOR}.max_tokens={asked}", *overrides, **ranks(4))
    assert error.remedy == f"{ACTOR}.max_tokens={enough}, or data.max_length={asked * ulysses}"
    prepare(f"{ACTOR}.max_tokens={enough}", *overrides, **ranks(4))


@pytest.mark.parametrize(
    ("overrides", "subject", "remedy"),
    [
        (["data.max_length=16384"], "data.max_token_len_per_gpu", "data.max_token_len_per_gpu=16384"),
        (
            ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=48"],
            "data.micro_batch_size_per_gpu",
            "data.micro_batch_size_per_gpu=32",
        ),
        (["data.train_batch_size=3"], "data.train_batch_size", "data.train_batch_size=4"),
        (
            ["engine.ulysses_sequence_parallel_size=3"],
            "engine.ulysses_sequence_parallel_size",
            "engine.ulysses_sequence_parallel_size=1",
        ),
        (["data.max_length=8k"], "data.max_length", "data.max_length=1024"),
        (["data.train_batch_size=64.0"], "data.train_batch_size", "data.train_batch_size=64"),
        (["data.use_dynamic_bsz=no"], "data.use_dynamic_bsz", "data.use_dynamic_bsz=false"),
    ],
)
def test_verls_own_keys_of_batches_are_held_to_the_same(overrides, subject, remedy, prepare):
    error = refusal(prepare, *overrides, **ranks(4))
    assert error.subject == subject
    assert error.remedy.split(", or ")[0] == remedy
    prepare(*overrides, remedy, **ranks(4))


MEGATRON, VEOMNI, TORCHTITAN, AUTOMODEL = (
    [f"engine={name}", f"optim={name}"] for name in ("megatron", "veomni", "torchtitan", "automodel")
)
SHARDS = "engine.data_parallel_shard_size"


@pytest.mark.parametrize(
    ("engine", "longest"),
    [
        (["engine.strategy=fsdp2", "engine.ulysses_sequence_parallel_size=2"], 8192 * 2),
        (MEGATRON, 8192),
        ([*MEGATRON, "engine.context_parallel_size=2"], 8192 * 2),
        ([*MEGATRON, "engine.tensor_model_parallel_size=2", "engine.pipeline_model_parallel_size=2"], 8192),
        (VEOMNI, 8192),
        ([*VEOMNI, "engine.ulysses_parallel_size=4"], 8192 * 4),
        ([*TORCHTITAN, f"{SHARDS}=4"], 8192),
        ([*TORCHTITAN, f"{SHARDS}=2", "engine.tensor_parallel_size=2"], 8192 * 2),
        (AUTOMODEL, 8192),
        ([*AUTOMODEL, "engine.tp_size=2", "engine.cp_size=2"], 8192),
    ],
)
def test_each_engine_is_held_to_the_longest_sequence_that_its_token_budget_takes(prepare, engine, longest):
    prepare(*engine, f"data.max_length={longest}", **ranks(4))
    error = refusal(prepare, *engine, f"data.max_length={longest + 1}", **ranks(4))
    assert error.subject == "data.max_token_len_per_gpu"
    for way in error.remedy.split(", or "):
        prepare(*engine, f"data.max_length={longest + 1}", way, **ranks(4))


FIXED = ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=3"]


@pytest.mark.parametrize(
    ("engine", "per_rank"),
    [
        ([], 6),
        (MEGATRON, 6),
        ([*MEGATRON, "engine.tensor_model_parallel_size=2"], 12),
        ([*MEGATRON, "engine.tensor_model_parallel_size=2", "engine.context_parallel_size=2"], 24),
        (VEOMNI, 6),
        ([*VEOMNI, "engine.ulysses_parallel_size=2"], 12),
        ([*TORCHTITAN, f"{SHARDS}=2", "engine.data_parallel_replicate_size=2"], 6),
        ([*TORCHTITAN, f"{SHARDS}=2", "engine.pipeline_parallel_size=2"], 12),
        (AUTOMODEL, 6),
        ([*AUTOMODEL, "engine.tp_size=2"], 12),
        ([*AUTOMODEL, "engine.tp_size=2", "engine.distributed_strategy=megatron_fsdp"], 12),
        ([*AUTOMODEL, "engine.tp_size=2", "engine.distributed_strategy=ddp"], 6),
        ([*AUTOMODEL, "engine.tp_size=null"], 6),
    ],
)
def test_each_engine_is_held_to_what_its_data_parallel_rank_gets(prepare, engine, per_rank):
    parallel = 24 // per_rank
    prepare(*engine, *FIXED, "data.train_batch_size=24", **ranks(4))
    error = refusal(prepare, *engine, *FIXED, f"data.train_batch_size={2 * parallel}", **ranks(4))
    assert error.remedy == "data.micro_batch_size_per_gpu=2"
    prepare(*engine, *FIXED, f"data.train_batch_size={2 * parallel}", error.remedy, **ranks(4))
    if parallel > 1:
        error = refusal(prepare, *engine, f"data.train_batch_size={parallel - 1}", **ranks(4))
        assert error.remedy == f"data.train_batch_size={parallel}"


@pytest.mark.parametrize(
    ("engine", "subject", "remedy"),
    [
        (
            [*MEGATRON, "engine.tensor_model_parallel_size=3"],
            "engine.tensor_model_parallel_size",
            "engine.tensor_model_parallel_size=1",
        ),
        (
            [*MEGATRON, "engine.tensor_model_parallel_size=4", "engine.pipeline_model_parallel_size=2"],
            "engine.tensor_model_parallel_size x engine.pipeline_model_parallel_size",
            "engine.pipeline_model_parallel_size=1",
        ),
        ([*VEOMNI, "engine.ulysses_parallel_size=6"], "engine.ulysses_parallel_size", "engine.ulysses_parallel_size=2"),
        ([*AUTOMODEL, "engine.cp_size=3"], "engine.cp_size", "engine.cp_size=1"),
        (TORCHTITAN, SHARDS, f"{SHARDS}=4"),
        (
            [*TORCHTITAN, "engine.tensor_parallel_size=6", "engine.data_parallel_replicate_size=4"],
            "engine.tensor_parallel_size",
            f"engine.tensor_parallel_size=2 {SHARDS}=2 engine.data_parallel_replicate_size=1",
        ),
    ],
)
def test_parallel_sizes_that_leave_processes_out_are_refused_with_some_that_do_not(prepare, engine, subject, remedy):
    error = refusal(prepare, *engine, **ranks(4))
    assert (error.subject, error.remedy) == (subject, remedy)
    prepare(*engine, *remedy.split(), **ranks(4))


@pytest.mark.parametrize(
    "engine",
    [
        [*MEGATRON, "engine.dynamic_context_parallel=True", "engine.max_seqlen_per_dp_cp_rank=4096"],
        ["engine.strategy=fsdp_turbo"],
        ["engine.strategy=of_my_own"],
    ],
)
def test_engines_that_cut_their_batches_otherwise_are_not_held_to_them(prepare, engine):
    plan, _ = prepare(*engine, *FIXED, "data.train_batch_size=7", "data.max_length=16384", **ranks(4))
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("engine", "trained", "each"),
    [
        ([], 4, "each of 4 ranks takes 1"),
        ([*MEGATRON, "engine.tensor_model_parallel_size=2"], 6, "each of 2 ranks takes 3"),
    ],
)
def test_samples_that_no_rank_takes_are_told(prepare, engine, trained, each):
    plan, _ = prepare(*engine, "data.train_batch_size=7", **ranks(4))
    assert plan.notes == (f"a step trains {trained} samples, not data.train_batch_size=7: {each}",)
    assert prepare(*engine, f"data.train_batch_size={trained}", **ranks(4))[0].notes == ()


# What verl does otherwise than a key says

POLICY = ["engine.strategy=fsdp2", "engine.offload_policy=True"]
SLOW = "with offload_policy the optimizer steps on the CPU, slower than on the device"


@pytest.mark.parametrize(
    ("flags", "dropped"),
    [
        (["engine.param_offload=True"], "param_offload"),
        (["engine.param_offload=True", "engine.optimizer_offload=True"], "param_offload and optimizer_offload"),
        ([f"{ACTOR}.offload.params=true"], "param_offload"),
        ([f"{ACTOR}.offload.params=true", f"{ACTOR}.offload.optimizer=step"], "param_offload and optimizer_offload"),
    ],
)
def test_offload_flags_that_the_policy_drops_are_told(prepare, flags, dropped):
    plan, _ = prepare(*POLICY, *flags)
    wins = f"engine.offload_policy wins on FSDP2: verl keeps it alone and drops {dropped} (verl#5995)"
    assert plan.notes == (wins, SLOW)


def test_the_policy_on_fsdp1_is_told_to_have_no_effect_with_the_keys_that_have_one(prepare):
    (note,) = prepare("engine.offload_policy=True")[0].notes
    assert note.startswith("engine.offload_policy has no effect on FSDP1")
    assert note.endswith("write engine.param_offload=True engine.optimizer_offload=True, or engine.strategy=fsdp2")
    assert prepare("engine.param_offload=True", "engine.optimizer_offload=True")[0].notes == ()
    assert prepare("engine.offload_policy=True", "engine.strategy=fsdp2")[0].notes == (SLOW,)


def test_the_policy_without_resharding_is_refused_with_ways_out(prepare):
    flags = [*POLICY, "engine.reshard_after_forward=False"]
    error = refusal(prepare, *flags)
    assert "verl#4974" in error.consequence
    for way in error.remedy.split(", or "):
        prepare(*flags, *way.split())


def test_weights_trained_in_float16_are_told(prepare):
    (note,) = prepare("engine.model_dtype=fp16")[0].notes
    assert note.startswith("actor trains weights stored in float16: verl scales the loss only for float16 computation")
    assert prepare(f"{ACTOR}.dtype=float32", f"{ACTOR}.compute_dtype=float16")[0].notes == ()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine.param_offload=True", "engine.reshard_after_forward=False"],
        ["trainer.device=cpu", *POLICY],
        [*AUTOMODEL, "engine.model_dtype=fp16"],  # which does not scale as FSDP's engine does
    ],
)
def test_what_does_as_it_says_is_not_told(prepare, overrides):
    assert prepare(*overrides)[0].notes == ()


def test_rank_0_alone_prints_the_notes(monkeypatch, capsys, compose):
    config = compose(*POLICY, config_name="sft_trainer_engine")
    monkeypatch.setattr(sft, "_select_device", lambda config, ranks: None)
    monkeypatch.setattr(sft.loading, "install_for_roles", lambda spec: None)
    monkeypatch.setattr(sft, "_communication", None)
    monkeypatch.setattr(sft.logging.getLogger("verl_ext_sharding"), "setLevel", lambda level: None)
    monkeypatch.setattr(Program, "current", lambda: PROGRAM)
    for rank in (0, 1):
        monkeypatch.setattr(sft.os, "environ", ranks(2, rank=rank))
        sft.launch(lambda config: None, config)
        assert (f"  - {SLOW}" in capsys.readouterr().out) is (rank == 0)


def test_both_kinds_of_micro_batch_at_once_are_refused(prepare):
    assert refusal(prepare, f"{ACTOR}.micro_batch_size=2", f"{ACTOR}.max_tokens=2048").subject == ACTOR


def test_what_the_user_wrote_against_the_request_is_refused(prepare):
    error = refusal(prepare, f"{ACTOR}.dtype=bfloat16", written=["engine.model_dtype=fp32"])
    assert error.subject == "engine.model_dtype"
    assert f"{ACTOR}.dtype" in error.expected


# On a CPU

CPU = "trainer.device=cpu"


def test_verls_defaults_that_a_cpu_can_not_run_are_replaced(prepare):
    plan, _ = prepare(CPU)
    assert changed(plan) == {
        "engine.strategy": "fsdp2",
        "engine.use_torch_compile": False,
        "engine.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "model.use_remove_padding": False,
        "model.override_config.attn_implementation": "sdpa",
        "data.num_workers": 0,
    }


def test_the_platform_in_the_environment_asks_for_the_cpu_as_well(prepare):
    plan, config = prepare(**ranks(1), VERL_PLATFORM="cpu")
    assert config.trainer.device == "cpu"
    assert changed(plan)["engine.strategy"] == "fsdp2"


def test_the_platform_and_a_device_that_differs_can_not_both_hold(prepare):
    error = refusal(prepare, written=["trainer.device=cuda"], **ranks(1), VERL_PLATFORM="cpu")
    assert error.subject == "trainer.device"


def test_what_the_user_wrote_wins_over_the_defaults_of_a_cpu(prepare):
    plan, config = prepare(
        CPU,
        written=[
            "data.num_workers=2",
            "+model.override_config.attn_implementation=eager",
            "engine.use_torch_compile=True",
        ],
    )
    assert not changed(plan).keys() & {"data.num_workers", "model.override_config.attn_implementation"}
    assert (config.data.num_workers, config.engine.use_torch_compile) == (2, True)


def test_the_request_wins_over_the_defaults_of_a_cpu(prepare):
    _, config = prepare(CPU, f"{ACTOR}.compute_dtype=bfloat16")
    assert OmegaConf.to_container(config.engine.mixed_precision) == BF16


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"written": ["engine.strategy=fsdp"]}, "engine.strategy"),
        ({"written": ["engine=megatron", "optim=megatron"]}, "engine.strategy"),
        (
            {"written": ["+model.override_config.attn_implementation=flash_attention_2"]},
            "model.override_config.attn_implementation",
        ),
    ],
)
def test_what_a_cpu_can_not_do_is_refused(prepare, options, subject):
    error = refusal(prepare, CPU, **options)
    assert error.subject == subject
    assert "trainer.device=cpu" in error.expected


# The process's own device, and the engine that it has imported already


@pytest.fixture
def platform(monkeypatch):
    """A machine with two accelerators, and what was selected of them."""
    platforms = pytest.importorskip("verl.plugin.platform")
    selected = []
    machine = types.SimpleNamespace(device_count=lambda: 2, set_device=selected.append)
    monkeypatch.setattr(platforms, "get_platform", lambda: machine)
    return selected


ON_GPU = OmegaConf.create({"trainer": {"device": "cuda"}})


def test_the_device_is_that_of_the_local_rank(platform):
    sft._select_device(ON_GPU, Ranks(rank=5, world_size=8, local_rank=1, local_world_size=2))
    assert platform == [1]


def test_more_processes_than_devices_are_refused_before_cuda_is_asked(platform):
    with pytest.raises(ConfigError, match="2 visible cuda devices") as caught:
        sft._select_device(ON_GPU, Ranks(rank=2, world_size=4, local_rank=2, local_world_size=4))
    assert caught.value.remedy == "torchrun --nproc_per_node=2"
    assert platform == []


def test_on_a_cpu_an_engine_that_was_imported_for_cuda_is_told(platform, monkeypatch):
    engine = types.ModuleType(sft._ENGINE_MODULE)
    engine.device_name = "cuda"
    monkeypatch.setitem(sys.modules, sft._ENGINE_MODULE, engine)
    monkeypatch.setattr(driver, "select_cpu", lambda: None)
    sft._select_device(OmegaConf.create({"trainer": {"device": "cpu"}}), Ranks(rank=1, world_size=2, local_rank=1))
    assert engine.device_name == "cpu"
    assert platform == []


def test_log_probs_reach_an_engine_that_took_them_by_name_before_the_patch_came(monkeypatch):
    functions = pytest.importorskip("verl.utils.torch_functional")
    engine = types.ModuleType(sft._ENGINE_MODULE)
    engine.logprobs_from_logits = functions.logprobs_from_logits
    engine.entropy_from_logits = own = print
    monkeypatch.setitem(sys.modules, sft._ENGINE_MODULE, engine)
    sft._reach_engine()
    assert engine.logprobs_from_logits is logprobs.logprobs_from_logits
    assert engine.entropy_from_logits is own


def test_an_old_key_that_a_plus_added_is_answered(prepare):
    error = refusal(prepare, written=["+model.partial_pretrain=/m", "+data.prompt_key=question"])
    assert error.remedy == "write model.path=/m; remove data.prompt_key"
    prepare(written=["model.path=/m", "+data.my_own_key=1"])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("+data.max_lenght=4096", "data.max_length=4096, or +mine.max_lenght if it is one that code of yours reads"),
        ("+engin.strategy=fsdp", "engine.strategy=fsdp, or +mine.strategy if it is one that code of yours reads"),
    ],
)
def test_a_misspelt_key_that_a_plus_added_is_answered_with_the_right_one(prepare, line, remedy):
    assert refusal(prepare, written=[line]).remedy == remedy
    prepare(written=["+data.lengths_of_mine=1", "++data.max_length=4096", "model.lora.dtype=null"])


def test_a_model_with_adapters_is_not_saved_under_names_that_nothing_loads(prepare):
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]", "trainer.save_freq=10"
    assert refusal(prepare, *contents, "model.lora_rank=8").subject == "checkpoint.save_contents"
    prepare(*contents)
