"""Case D6: a token budget below the longest sequence is an error before any model loads, with the fix."""

import pytest

from verl_ext_sharding.config.token_budget import (
    Heads,
    TokenBudget,
    check_token_budgets,
    fixes,
    longest_sequence,
    token_budgets,
)
from verl_ext_sharding.errors import ConfigError

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
ROLES = ("actor", "ref", "critic")
LONGEST = 8192 + 32768
EIGHT = {role: Heads(query=32, key_value=8) for role in ROLES}

GIVEN = {
    "trainer.use_v1": True,
    "data.max_prompt_length": 8192,
    "data.max_response_length": 32768,
    f"{ROLLOUT}.prompt_length": 8192,
    f"{ROLLOUT}.response_length": 32768,
    f"{ACTOR}.strategy": "fsdp",
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
    "critic.use_dynamic_bsz": True,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.fsdp.ulysses_sequence_parallel_size": 1,
}
"""The case, with what verl 0.9.1 makes of the keys that it leaves out."""


def budgets(heads=EIGHT, roles=ROLES, num_ranks=None, **changed):
    values = {**GIVEN, **changed}
    return token_budgets(values, roles, heads, num_ranks)


def error(found):
    with pytest.raises(ConfigError) as caught:
        check_token_budgets(found, LONGEST)
    return caught.value


def test_the_longest_sequence_is_prompt_and_response():
    assert longest_sequence(GIVEN) == LONGEST
    assert longest_sequence({"data.max_prompt_length": 1, "data.max_response_length": 2}) == 3


def test_the_error_names_each_role_with_its_budget():
    found = error(budgets()).found
    for part in ("actor 16384", "ref 16384", "rollout log-prob 16384", "critic 32768"):
        assert part in found


def test_the_error_names_the_longest_sequence():
    assert "40960" in error(budgets()).expected


@pytest.mark.parametrize(("sp_size", "tokens"), [(1, 40960), (2, 20480), (4, 10240)])
def test_the_fix_is_the_longest_sequence_over_the_sequence_parallel_size(sp_size, tokens):
    overrides = fixes(budgets(), LONGEST)[sp_size]
    assert set(overrides) >= {
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"{REF}.log_prob_max_token_len_per_gpu={tokens}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={tokens}",
        f"++critic.ppo_infer_max_token_len_per_gpu={tokens}",
    }


def test_another_sequence_parallel_size_is_part_of_the_fix():
    overrides = fixes(budgets(), LONGEST)
    sizes = {
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{REF}.ulysses_sequence_parallel_size",
        "critic.fsdp.ulysses_sequence_parallel_size",
    }
    assert {line for line in overrides[2] if line.endswith("=2")} == {f"{key}=2" for key in sizes}
    assert not any("ulysses" in line for line in overrides[1])


def test_every_fix_stands_in_the_remedy():
    remedy = error(budgets()).remedy
    assert all(line in remedy for lines in fixes(budgets(), LONGEST).values() for line in lines)


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        (Heads(query=32, key_value=8), [1, 2, 4]),
        (Heads(query=28, key_value=4), [1, 2, 4]),
        (Heads(query=14, key_value=2), [1, 2]),
        (Heads(query=12, key_value=2), [1, 2, 4]),
        (Heads(query=12, key_value=3), [1]),
        (Heads(query=7, key_value=1), [1]),
        (None, [1]),
    ],
)
def test_only_sequence_parallel_sizes_that_divide_the_heads_are_offered(heads, sizes):
    found = budgets(heads=dict.fromkeys(ROLES, heads) if heads else None)
    assert list(fixes(found, LONGEST)) == sizes


def test_a_size_that_does_not_divide_one_roles_heads_is_not_offered_for_all():
    heads = {**EIGHT, "critic": Heads(query=14, key_value=2)}
    assert list(fixes(budgets(heads=heads), LONGEST)) == [1, 2]


def test_a_size_that_does_not_divide_the_gpus_of_a_role_is_not_offered():
    assert list(fixes(budgets(num_ranks={"actor": 4, "ref": 4, "critic": 2}), LONGEST)) == [1, 2]


@pytest.mark.parametrize(("sp_size", "tokens"), [(1, 40960), (2, 20480), (4, 10240)])
def test_each_fix_really_fits(sp_size, tokens):
    changed = {
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        f"{REF}.log_prob_max_token_len_per_gpu": tokens,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": tokens,
        "critic.ppo_infer_max_token_len_per_gpu": tokens,
        f"{ACTOR}.ulysses_sequence_parallel_size": sp_size,
        f"{REF}.ulysses_sequence_parallel_size": sp_size,
        "critic.fsdp.ulysses_sequence_parallel_size": sp_size,
    }
    check_token_budgets(budgets(**changed), LONGEST)


@pytest.mark.parametrize(("tokens", "fits"), [(40960, True), (40959, False)])
def test_a_budget_of_exactly_the_longest_sequence_fits(tokens, fits):
    found = TokenBudget(role="actor", key="key", tokens_per_gpu=tokens, sp_key="sp")
    if fits:
        check_token_budgets([found], LONGEST)
    else:
        assert "40959" in error([found]).found


def test_an_uneven_length_is_rounded_up():
    found = TokenBudget(role="actor", key="key", tokens_per_gpu=1, sp_key="sp", heads=Heads(query=4, key_value=4))
    assert fixes([found], 10)[4] == ("sp=4", "key=3")


def test_a_fixed_batch_size_has_no_budget():
    changed = {
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{REF}.log_prob_use_dynamic_bsz": False,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
        "critic.fsdp.use_dynamic_bsz": False,
    }
    assert budgets(**changed) == []


def test_a_role_that_the_job_lacks_is_not_asked():
    assert {budget.role for budget in budgets(roles=("actor",))} == {"actor", "rollout log-prob"}


# What verl 0.9 reads for the critic


def test_the_v1_trainer_packs_the_critics_sequences_even_when_its_batch_size_is_fixed():
    (critic,) = budgets(roles=("critic",), **{"critic.use_dynamic_bsz": False})
    assert critic.tokens_per_gpu == 32768


def test_the_v1_trainer_does_not_read_the_critics_training_budget_and_the_error_says_so():
    found = budgets(roles=("critic",), **{"critic.ppo_max_token_len_per_gpu": 65536})
    assert "critic.ppo_max_token_len_per_gpu=65536 is not read" in error(found).found


def test_the_older_trainer_has_one_budget_for_training_and_one_for_values():
    found = budgets(roles=("critic",), **{"trainer.use_v1": False, "critic.ppo_max_token_len_per_gpu": 65536})
    assert [(budget.role, budget.tokens_per_gpu) for budget in found] == [("critic", 65536), ("critic values", 32768)]


# Sequence parallelism of each engine


@pytest.mark.parametrize(
    ("outer", "inner", "effective"), [(1, 1, 1), (2, 1, 2), (1, 4, 4), (2, 4, 2), (None, 2, 2), (None, None, 1)]
)
def test_fsdps_size_beside_the_engine_block_wins_unless_it_is_one(outer, inner, effective):
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    changed = {key: outer, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": inner}
    assert budgets(roles=("actor",), **changed)[0].sp_size == effective


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ("megatron", "megatron.context_parallel_size"),
        ("veomni", "veomni.ulysses_parallel_size"),
        ("torchtitan", "torchtitan.tensor_parallel_size"),
    ],
)
@pytest.mark.parametrize(("role", "block"), [("actor", ACTOR), ("ref", REF), ("critic", "critic")])
def test_each_engine_has_its_own_key_for_the_sequence_parallel_size(role, block, strategy, key):
    found = budgets(roles=(role,), **{f"{block}.strategy": strategy, f"{block}.{key}": 4})
    assert all((budget.sp_key, budget.sp_size) == (f"{block}.{key}", 4) for budget in found)


def test_context_parallelism_need_not_divide_the_heads():
    changed = {f"{ACTOR}.strategy": "megatron"}
    assert list(fixes(budgets(roles=("actor",), heads={"actor": Heads(query=7, key_value=1)}, **changed), LONGEST)) == [
        1,
        2,
        4,
    ]


def test_a_larger_present_size_is_offered_too():
    found = budgets(
        roles=("actor",), **{f"{ACTOR}.ulysses_sequence_parallel_size": 8, f"{ACTOR}.ppo_max_token_len_per_gpu": 1024}
    )
    assert fixes(found[:1], LONGEST)[8] == (f"{ACTOR}.ppo_max_token_len_per_gpu=5120",)
