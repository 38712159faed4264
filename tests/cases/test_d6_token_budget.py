"""Case D6: a token budget below the longest sequence is an error before any model loads, with the fix."""

import json

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.config.token_budget import (
    check_batch_kinds,
    check_token_budgets,
    longest_sequence,
    token_budgets,
)
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import place

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
LONGEST = 8192 + 32768

GIVEN = {
    "trainer.use_v1": True,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "data.train_batch_size": 256,
    "data.max_prompt_length": 8192,
    "data.max_response_length": 32768,
    "actor_rollout_ref.model.path": "/no/such/model",
    "actor_rollout_ref.model.use_remove_padding": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.prompt_length": 8192,
    f"{ROLLOUT}.response_length": 32768,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{REF}.strategy": "fsdp",
    f"{REF}.log_prob_use_dynamic_bsz": True,
    f"{REF}.log_prob_max_token_len_per_gpu": 16384,
    f"{REF}.ulysses_sequence_parallel_size": 1,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 16384,
    "critic.strategy": "fsdp",
    "critic.ppo_mini_batch_size": 64,
    "critic.use_dynamic_bsz": True,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.model.path": "/no/such/model",
    "critic.model.use_remove_padding": True,
    "critic.fsdp.ulysses_sequence_parallel_size": 1,
}
"""The case, with what verl 0.9.1 makes of the keys that it leaves out."""

LESS = {f"{ACTOR}.ppo_max_token_len_per_gpu": 1024, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 1024}
ONLY_ACTOR = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model(32, 8)`: settings for a model with 32 attention heads and 8 key/value heads."""

    def settings(query, key_value, role=None):
        folder = tmp_path_factory.mktemp("model")
        heads = {"num_attention_heads": query, "num_key_value_heads": key_value}
        (folder / "config.json").write_text(json.dumps(heads))
        paths = {"policy": "actor_rollout_ref.model.path", "critic": "critic.model.path"}
        return {key: str(folder) for name, key in paths.items() if role in (None, name)}

    return settings


@pytest.fixture(scope="module")
def eight(model):
    return model(32, 8)


def facts_of(values):
    nested = OmegaConf.create({"algorithm": {}, "actor_rollout_ref": {}})
    for key, value in values.items():
        OmegaConf.update(nested, key, value)
    return job_facts(nested)


def budgets(**changed):
    values = {**GIVEN, **changed}
    return token_budgets(values, facts_of(values))


def check(devices=None, **changed):
    values = {**GIVEN, **changed}
    facts = facts_of(values)
    check_token_budgets(values, facts, place(devices or {}, facts))


def error(devices=None, **changed):
    with pytest.raises(ConfigError) as caught:
        check(devices, **changed)
    return caught.value


def choices(found):
    """Each choice of the remedy as `{key: value}`."""
    lines = [choice.split() for choice in found.remedy.split("\n  or:       ")]
    return [{key.lstrip("+"): int(value) for key, _, value in (line.partition("=") for line in c)} for c in lines]


def by_size(found):
    """Choices by the actor's sequence-parallel size; the present ones first."""
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    return {choice.get(key, 1): choice for choice in choices(found)}


# The case


def test_the_longest_sequence_is_prompt_and_response():
    assert longest_sequence(GIVEN) == LONGEST
    assert longest_sequence({"data.max_prompt_length": 1, "data.max_response_length": 2}) == 3


def test_the_error_names_each_role_with_its_budget_and_the_longest_sequence():
    found = error()
    for part in ("actor 16384", "ref 16384", "rollout log-prob 16384", "critic 32768"):
        assert part in found.found
    assert "40960" in found.expected


@pytest.mark.parametrize(("sp_size", "tokens"), [(1, 40960), (2, 20480), (4, 10240)])
def test_the_fix_is_the_longest_sequence_over_the_sequence_parallel_size(sp_size, tokens, eight):
    choice = by_size(error(**eight))[sp_size]
    budget_keys = {
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        "critic.ppo_infer_max_token_len_per_gpu",
    }
    sizes = {f"{block}.ulysses_sequence_parallel_size" for block in (ACTOR, REF, "critic.fsdp")}
    assert {key for key, value in choice.items() if value == tokens} == budget_keys
    assert {key for key, value in choice.items() if value == sp_size} == (sizes if sp_size > 1 else set())


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{REF}.ulysses_sequence_parallel_size": 2},
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        {
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2,
            f"{ACTOR}.ulysses_sequence_parallel_size": 4,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 1024,
        },
        {f"{REF}.log_prob_use_dynamic_bsz": False, f"{REF}.log_prob_micro_batch_size_per_gpu": 4},
        {"sharding.roles.actor.max_tokens": 16384},
    ],
    ids=str,
)
def test_every_choice_really_fits(changed, eight):
    changed = {**eight, **changed}
    found = choices(error(**changed))
    assert len(found) > 2
    for choice in found:
        ours = choice.pop("sharding.roles.actor.max_tokens", None)
        if ours:  # sets both of verl's keys
            choice |= {f"{ACTOR}.ppo_max_token_len_per_gpu": ours, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": ours}
        check(**{**changed, **choice})


@pytest.mark.parametrize(("tokens", "fits"), [(40960, True), (40959, False)])
def test_a_budget_of_exactly_the_longest_sequence_fits(tokens, fits):
    changed = {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 40960}
    if fits:
        check(**ONLY_ACTOR, **changed)
    else:
        assert "40959" in error(**ONLY_ACTOR, **changed).found


def test_an_uneven_length_is_rounded_up(eight):
    changed = {f"{ROLLOUT}.response_length": 32769, **ONLY_ACTOR, **eight}
    assert by_size(error(**changed))[4][f"{ACTOR}.ppo_max_token_len_per_gpu"] == 10241


# Which sequence-parallel sizes are offered


def test_the_present_sizes_are_kept_in_the_first_choice(eight):
    sizes = {f"{block}.ulysses_sequence_parallel_size": 2 for block in (ACTOR, REF)}
    first = choices(error(**sizes, **eight))[0]
    assert first == {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 20480,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 20480,
        f"{REF}.log_prob_max_token_len_per_gpu": 20480,
        "critic.ppo_infer_max_token_len_per_gpu": 40960,
    }


def test_a_larger_present_size_is_kept_too():
    changed = {f"{ACTOR}.ulysses_sequence_parallel_size": 8, f"{ACTOR}.ppo_max_token_len_per_gpu": 1024}
    assert choices(error(**ONLY_ACTOR, **changed))[0] == {f"{ACTOR}.ppo_max_token_len_per_gpu": 5120}


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        ((32, 8), [1, 2, 4]),
        ((28, 4), [1, 2, 4]),
        ((14, 2), [1, 2]),
        ((12, 2), [1, 2, 4]),
        ((12, 3), [1]),
        ((7, 1), [1]),
        (None, [1]),
    ],
)
def test_only_sequence_parallel_sizes_that_divide_the_heads_are_offered(heads, sizes, model):
    assert list(by_size(error(**(model(*heads) if heads else {})))) == sizes


def test_a_size_that_does_not_divide_one_roles_heads_is_not_offered_for_all(eight, model):
    assert list(by_size(error(**{**eight, **model(14, 2, "critic")}))) == [1, 2]


def test_a_size_that_does_not_divide_the_gpus_of_a_role_is_not_offered(eight):
    devices = {"actor": [0, 1, 2, 3], "critic": [4, 5]}
    assert list(by_size(error(devices, **eight))) == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        {"actor_rollout_ref.model.use_remove_padding": False},
        {"critic.model.override_config.attn_implementation": "sdpa"},
        {"sharding.roles.critic.attn_implementation": "eager"},
    ],
    ids=str,
)
def test_a_role_whose_attention_can_not_share_a_sequence_is_offered_no_other_size(changed, eight):
    assert list(by_size(error(**eight, **changed))) == [1]


@pytest.mark.parametrize("name", ["auto", "varlen", "flash_attention_2"])
def test_a_role_whose_attention_shares_a_sequence_is_offered_other_sizes(name, eight):
    assert len(by_size(error(**eight, **{"sharding.roles.critic.attn_implementation": name}))) > 1


def test_a_size_is_offered_only_if_its_batches_run(eight):
    changed = {f"{ACTOR}.ulysses_sequence_parallel_size": 4, f"{ACTOR}.ppo_mini_batch_size": 2, **ONLY_ACTOR, **eight}
    sizes = [c.get(f"{ACTOR}.ulysses_sequence_parallel_size", 4) for c in choices(error(**changed, **LESS))]
    assert sizes == [4]  # at 1 or 2 a mini-batch would have fewer samples than ranks


def test_a_reference_without_a_budget_keeps_its_size_when_the_actors_changes(eight):
    fixed = {f"{REF}.log_prob_use_dynamic_bsz": False, f"{REF}.log_prob_micro_batch_size_per_gpu": 4}
    assert by_size(error(**eight, **fixed))[2][f"{REF}.ulysses_sequence_parallel_size"] == 1


def test_context_parallelism_need_not_divide_the_heads(model):
    changed = {f"{ACTOR}.strategy": "megatron", **ONLY_ACTOR, **model(7, 1)}
    key = f"{ACTOR}.megatron.context_parallel_size"
    assert [choice.get(key, 1) for choice in choices(error(**changed))] == [1, 2, 4]


def test_context_parallelism_leaves_room_for_the_other_parallel_sizes(model):
    tensor = {f"{ACTOR}.megatron.tensor_model_parallel_size": 4}
    changed = {f"{ACTOR}.strategy": "megatron", **tensor, **ONLY_ACTOR}
    key = f"{ACTOR}.megatron.context_parallel_size"
    assert [choice.get(key, 1) for choice in choices(error(**changed))] == [1, 2]


def test_torchtitans_sizes_are_kept_since_all_of_them_go_together(eight):
    changed = {f"{ACTOR}.strategy": "torchtitan", f"{ACTOR}.torchtitan.tensor_parallel_size": 2}
    (choice,) = choices(error(**changed, **ONLY_ACTOR, **eight))
    assert set(choice.values()) == {20480}


@pytest.mark.parametrize(
    ("role", "override"),
    [("critic", "sharding.roles.critic.max_tokens"), ("ref", "sharding.roles.ref.max_tokens")],
)
def test_a_budget_that_our_key_sets_is_repaired_there(role, override):
    assert choices(error(**{override: 4096}))[0][override] == 40960


# Which computations have a budget


def test_a_fixed_batch_size_has_no_budget():
    changed = {
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{REF}.log_prob_use_dynamic_bsz": False,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
        "critic.fsdp.use_dynamic_bsz": False,
    }
    assert budgets(**changed) == []


def test_a_role_that_the_job_lacks_is_not_asked():
    assert {budget.name for budget in budgets(**ONLY_ACTOR)} == {"actor", "rollout log-prob"}


def test_with_lora_the_reference_is_the_actor_and_its_own_budget_is_not_read():
    names = {budget.name for budget in budgets(**{"actor_rollout_ref.model.lora_rank": 8})}
    assert names == {"actor", "rollout log-prob", "critic"}


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        (ONLY_ACTOR, False),
        ({}, False),
        ({"actor_rollout_ref.model.lora_rank": 8}, True),
        ({"actor_rollout_ref.model.lora_rank": 8, **ONLY_ACTOR}, False),
    ],
    ids=str,
)
def test_in_bypass_mode_log_probs_are_asked_of_the_actor_only_as_a_reference(changed, asked):
    found = budgets(**changed, **{"algorithm.rollout_correction.bypass_mode": True})
    assert ("rollout log-prob" in {budget.name for budget in found}) == asked


def test_dynamic_context_parallelism_has_a_budget_of_its_own():
    changed = {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.dynamic_context_parallel": True}
    assert budgets(**changed, **ONLY_ACTOR) == []


def test_the_v1_trainer_packs_the_critics_sequences_even_when_its_batch_size_is_fixed():
    assert [b.tokens_per_gpu for b in budgets(**{"critic.use_dynamic_bsz": False}) if b.role == "critic"] == [32768]


def test_the_v1_trainer_does_not_read_the_critics_training_budget_and_the_error_says_so():
    found = error(**{"critic.ppo_max_token_len_per_gpu": 65536}).found
    assert "critic.ppo_max_token_len_per_gpu=65536 is not read" in found


# Batches that are neither fixed nor dynamic


@pytest.mark.parametrize("actor", [True, False])
def test_log_probs_are_batched_as_the_actor_is_since_one_engine_computes_both(actor):
    changed = {f"{ACTOR}.use_dynamic_bsz": actor, f"{ROLLOUT}.log_prob_use_dynamic_bsz": not actor}
    changed |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2}
    found = error(**changed)
    assert found.subject == f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    lines = dict(line.split("=") for line in found.remedy.split())
    assert lines.pop(f"{ROLLOUT}.log_prob_use_dynamic_bsz") == str(actor)
    assert lines == ({} if actor else {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "2"})
    values = {**GIVEN, **changed, f"{ROLLOUT}.log_prob_use_dynamic_bsz": actor}
    check_batch_kinds(values, facts_of(values))


@pytest.mark.parametrize(
    ("switch", "sizes"),
    [
        (f"{REF}.log_prob_use_dynamic_bsz", [f"{REF}.log_prob_micro_batch_size_per_gpu"]),
        ("critic.fsdp.use_dynamic_bsz", [f"critic.fsdp.{part}micro_batch_size_per_gpu" for part in ("", "infer_")]),
    ],
)
def test_a_fixed_batch_that_verl_does_not_check_needs_its_size(switch, sizes):
    found = error(**{switch: False})
    assert found.subject == sizes[0]
    assert switch in found.expected
    first, second = found.remedy.split(", or ")
    assert second == f"{'++' if switch.startswith('critic') else ''}{switch}=True"  # no yaml lists the critic's
    typed = {line.lstrip("+").partition("=")[0]: 1 for line in first.split()}
    assert list(typed) == sizes
    values = {**GIVEN, switch: False, **typed}
    check_batch_kinds(values, facts_of(values))


# What is no number


@pytest.mark.parametrize("value", ["16k", None, 0, 1.5], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        "critic.ppo_infer_max_token_len_per_gpu",
        "data.max_prompt_length",
        f"{ROLLOUT}.response_length",
    ],
)
def test_what_is_no_number_of_tokens_is_refused_with_its_key_and_one_that_holds_the_sequence(key, value):
    found = error(**{key: value})
    assert found.subject == key
    assert found.expected == "a whole number, 1 or more"
    ((typed, number),) = choices(found)[0].items()
    assert typed == key
    assert number >= (512 if key == "data.max_prompt_length" else 32768)
