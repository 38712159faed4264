"""Batch sizes that verl could not run with are refused before anything starts, and what the error says to type works.

`verl_stops` is what verl 0.9 itself does with a batch, written down apart from the checks.
"""

import itertools
import math
import random
from dataclasses import replace

import pytest

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.batches import check_batches
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import EngineFacts, MicroBatch

BATCH = "data.train_batch_size"
MINI = {"actor": "actor_rollout_ref.actor.ppo_mini_batch_size", "critic": "critic.ppo_mini_batch_size"}


def engine(mini=None, *, dynamic=True, **fields):
    return EngineFacts(
        strategy=fields.pop("strategy", "fsdp2"), mini_batch_size=mini, dynamic_batches=dynamic, **fields
    )


def refusal(devices, facts):
    with pytest.raises(PlacementError) as caught:
        check_batches(place(devices, facts), facts)
    assert "does not start" in caught.value.consequence
    return caught.value


def accepted(devices, facts):
    check_batches(place(devices, facts), facts)


def typed(error, facts):
    """The job once the error's first remedy is typed."""
    lines = dict(line.split("=") for line in error.remedy.split(", or ")[0].split())
    values = {key: int(value) for key, value in lines.items()}
    engines = {}
    for role, old in facts.engines.items():
        micros = [replace(m, samples=values.get(m.override or m.key, m.samples)) for m in old.micro_batches]
        mini = values.get(MINI.get(role), old.mini_batch_size)
        engines[role] = replace(old, mini_batch_size=mini, micro_batches=tuple(micros))
    return replace(facts, engines=engines, train_batch_size=values.get(BATCH, facts.train_batch_size))


def all_ranks(*counts):
    return {role: list(range(count)) for role, count in zip(("actor", "ref", "critic"), counts, strict=True)}


# What verl pads, it may have


def test_a_batch_that_verl_pads_to_whole_mini_batches_is_accepted(job):
    facts = job(("actor",), devices=8, train_batch_size=100, engines={"actor": engine(32)})
    accepted({}, facts)


def test_a_fixed_batch_is_not_padded_before_verls_own_check(job):
    facts = job(("actor",), devices=8, train_batch_size=100, engines={"actor": engine(32, dynamic=False)})
    error = refusal({}, facts)
    assert error.subject == BATCH
    assert "actor.use_dynamic_bsz is off" in error.expected
    assert "100 prompts x 1 responses = 100 samples" in error.found
    assert error.remedy.startswith("data.train_batch_size=104, or")
    accepted({}, typed(error, facts))


def test_verls_check_of_a_fixed_batch_counts_sequence_parallel_ranks_too(job):
    actor = engine(4, dynamic=False, model_parallel_size=2)
    facts = job(("actor",), devices=8, train_batch_size=12, engines={"actor": actor})
    assert "divides by 8" in refusal({}, facts).expected
    accepted({}, replace(facts, engines={"actor": replace(actor, dynamic_batches=True)}))


def test_megatrons_fixed_batch_counts_its_micro_batches(job):
    micro = MicroBatch(key="k", samples=4, of_step=False)
    actor = engine(8, dynamic=False, strategy="megatron", micro_batches=(micro,), model_parallel_size=2)
    facts = job(("actor",), devices=4, train_batch_size=12, engines={"actor": actor})
    error = refusal({}, facts)
    assert "divides by 8" in error.expected
    accepted({}, typed(error, facts))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_fixed_batch_smaller_than_a_mini_batch_is_refused_and_the_mini_batch_is_lowered(role, job):
    engines = {name: engine(256 if name == role else 4, dynamic=name != role) for name in ("actor", "critic")}
    facts = job(("actor", "critic"), train_batch_size=8, engines=engines)
    error = refusal({}, facts)
    assert f"{MINI[role]}=256" in error.expected
    assert f"{MINI[role]}=8" in error.remedy
    assert BATCH not in error.remedy
    accepted({}, typed(error, facts))


def test_a_dynamic_batch_smaller_than_a_mini_batch_is_padded(job):
    accepted({}, job(("actor",), train_batch_size=8, engines={"actor": engine(256)}))


def test_micro_batches_of_log_probs_divide_the_padded_batch(job):
    def facts(size):
        micro = MicroBatch(key="k", samples=size, of_step=True)
        actor = engine(256, dynamic=False, micro_batches=(micro,))
        return job(("actor",), devices=8, train_batch_size=1000, engines={"actor": actor})

    accepted({}, facts(16))  # 1024 / 8
    error = refusal({}, facts(5))  # divides 1000 / 8
    assert "the 128 samples that each of the 8 ranks of actor gets from one update" in error.expected
    assert error.remedy == "k=4"


def test_without_the_actors_mini_batches_a_warm_up_pads_less(job):
    ref = engine(dynamic=False, micro_batches=(MicroBatch(key="k", samples=3, of_step=True),))
    engines = {"actor": engine(12), "critic": engine(4), "ref": ref}
    facts = job(devices=1, train_batch_size=8, engines=engines)
    accepted({}, facts)  # padded to 12
    error = refusal({}, replace(facts, critic_warmup=2))  # 8 until the actor is trained
    assert "the 8 samples" in error.expected
    accepted({}, typed(error, replace(facts, critic_warmup=2)))
    accepted({}, replace(facts, critic_warmup=1))


# What verl splits without a word


def test_the_padded_batch_divides_by_the_ranks_of_the_reference(job):
    engines = {"actor": engine(4), "ref": engine()}
    facts = job(("actor", "ref"), train_batch_size=7, engines=engines)
    error = refusal({"actor": [0], "ref": [1, 2, 3]}, facts)
    assert error.subject == BATCH
    assert "ref has 3 data-parallel ranks on devices" in error.expected
    assert "7 prompts x 1 responses = 7 samples in one update, padded by verl to 8" in error.found
    assert error.remedy.endswith("sharding.roles.ref.devices=[0,1,2,3]")
    accepted({"actor": [0], "ref": [0, 1, 2, 3]}, facts)
    accepted({"actor": [0], "ref": [1, 2, 3]}, typed(error, facts))
    accepted({"actor": [0], "ref": [1, 2, 3]}, replace(facts, train_batch_size=9))


@pytest.mark.parametrize(("role", "mini"), [("critic", 24), ("critic", 10), ("ref", 28), ("ref", 25)])
def test_the_devices_that_are_offered_suit_the_sizes_as_they_are(role, mini, job):
    engines = {"actor": engine(mini), "ref": engine(), "critic": engine(mini)}
    facts = job(devices=8, train_batch_size=mini, engines=engines)
    error = refusal({"actor": [0], "critic": [0], "ref": [0], role: "1-7" if mini != 28 else "1-3"}, facts)
    offered = error.remedy.partition(f"sharding.roles.{role}.devices=")[2].strip('"')
    accepted({"actor": [0], "critic": [0], "ref": [0], role: offered}, facts)


def test_with_lora_the_reference_has_no_ranks_to_check(job):
    facts = job(ref_in_actor=True, train_batch_size=8, engines={"actor": engine(8), "critic": engine(8)})
    accepted({"actor": [0], "critic": [1]}, facts)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_mini_batch_divides_by_its_roles_ranks_also_when_batches_are_dynamic(role, job):
    engines = {"actor": engine(8), "critic": engine(8)}
    devices = {"actor": [0], "critic": [0]} | {role: [1, 2, 3]}
    facts = job(("actor", "critic"), train_batch_size=24, engines=engines)
    error = refusal(devices, facts)
    assert error.subject == MINI[role]
    assert f"{role} has 3 data-parallel ranks on devices [1,2,3]" in error.expected
    assert "8 prompts x 1 responses = 8 samples" in error.found
    accepted(devices, typed(error, facts))


def test_ranks_are_counted_without_the_model_parallel_ones(job):
    engines = {"actor": engine(8), "critic": engine(8, model_parallel_size=3)}
    accepted({"actor": [0], "critic": [1, 2, 3]}, job(("actor", "critic"), train_batch_size=8, engines=engines))


def test_responses_count_as_samples(job):
    facts = job(train_batch_size=4, rollout_n=3, engines={"actor": engine(4), "ref": engine(), "critic": engine(4)})
    accepted({"actor": [0], "ref": [0], "critic": [1, 2, 3]}, facts)


def test_the_updates_of_one_step_share_its_prompts(job):
    engines = {"actor": engine(8), "critic": engine(8)}
    facts = job(("actor", "critic"), train_batch_size=25, parameter_sync_step=3, engines=engines)
    error = refusal({}, facts)
    assert "a multiple of the 3 updates of one step" in error.expected
    assert typed(error, facts).train_batch_size % 3 == 0


def test_in_separate_async_a_batch_stays_as_many_mini_batches_as_there_are_updates(job):
    engines = {"actor": engine(8), "critic": engine(8)}
    facts = job(("actor", "critic"), train_batch_size=24, parameter_sync_step=3, mode="separate_async", engines=engines)
    repaired = typed(refusal({"actor": [0], "critic": [1, 2, 3]}, facts), facts)
    assert (repaired.train_batch_size, repaired.engines["actor"].mini_batch_size) == (27, 9)


# Micro-batches


@pytest.mark.parametrize(("of_step", "what", "samples"), [(True, "update", 12), (False, "mini-batch", 4)])
def test_a_micro_batch_that_does_not_divide_what_a_rank_gets_is_refused(of_step, what, samples, job):
    micro = MicroBatch(key="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", samples=5, of_step=of_step)
    actor = engine(8, dynamic=False, micro_batches=(micro,))
    error = refusal({"actor": [0, 1]}, job(("actor",), train_batch_size=24, engines={"actor": actor}))
    assert error.subject == micro.key
    assert f"{samples} samples" in error.expected
    assert what in error.expected
    assert error.found == "5"
    assert error.remedy == f"{micro.key}=4"


def test_a_micro_batch_is_a_number_of_samples_and_not_of_prompts(job):
    micros = tuple(MicroBatch(key=str(of_step), samples=6, of_step=of_step) for of_step in (True, False))
    actor = engine(8, dynamic=False, micro_batches=micros)
    accepted({"actor": [0, 1]}, job(("actor",), train_batch_size=8, rollout_n=3, engines={"actor": actor}))


def test_micro_batches_of_one_request_get_one_size_that_fits_all(job):
    ours = "sharding.roles.actor.micro_batch_size"
    micros = tuple(MicroBatch(key=str(step), samples=6, of_step=step, override=ours) for step in (True, False))
    actor = engine(8, dynamic=False, micro_batches=micros)
    error = refusal({"actor": [0]}, job(("actor",), train_batch_size=24, engines={"actor": actor}))
    assert error.remedy == f"{ours}=4"


def test_all_that_is_wrong_is_repaired_at_once(job):
    micro = MicroBatch(key="k", samples=7, of_step=False)
    engines = {"actor": engine(256), "critic": engine(256, dynamic=False, micro_batches=(micro,))}
    facts = job(("actor", "critic"), devices=8, train_batch_size=1024, engines=engines)
    devices = {"actor": "0-5", "critic": "2-7"}
    error = refusal(devices, facts)
    keys = {line.partition("=")[0] for line in error.remedy.split(", or ")[0].split()}
    assert keys == {BATCH, *MINI.values(), "k"}
    accepted(devices, typed(error, facts))


def test_equal_mini_batches_stay_equal_since_verl_pads_to_multiples_of_both(job):
    facts = job(("actor", "critic"), devices=8, train_batch_size=1024, engines={r: engine(256) for r in MINI})
    repaired = typed(refusal({"critic": [0, 1, 2]}, facts), facts)
    assert {e.mini_batch_size for e in repaired.engines.values()} == {264}
    assert repaired.train_batch_size == 4 * 264
    padded = job(("actor", "critic"), train_batch_size=20, engines={role: engine(8) for role in MINI})
    repaired = typed(refusal({"actor": [0, 1, 2], "critic": [0, 1]}, padded), padded)
    assert {e.mini_batch_size for e in repaired.engines.values()} == {12}
    assert repaired.train_batch_size == 20


def test_the_critics_mini_batch_is_typed_with_the_actors_which_it_follows(job):
    facts = job(("actor", "critic"), train_batch_size=97, engines={"actor": engine(8), "critic": engine(32)})
    error = refusal({"actor": [0, 1, 2], "critic": [0]}, facts)
    assert error.remedy.startswith(f"{MINI['actor']}=9 {MINI['critic']}=32, or")


def test_where_only_a_micro_batch_is_wrong_nothing_else_is_changed(job):
    micro = MicroBatch(key="k", samples=2, of_step=False)
    engines = {"actor": engine(3), "ref": engine(), "critic": engine(2, dynamic=False, micro_batches=(micro,))}
    facts = job(train_batch_size=3, mode="separate_async", engines=engines)
    assert refusal(all_ranks(1, 3, 2), facts).remedy == "k=1"  # the mini-batches alone don't divide by all ranks


# Against what verl does


def verl_stops(devices, facts):
    """Why verl 0.9 would stop, or None: the rules of the table in `placement.batches`, stage by stage."""
    n, engines = facts.rollout_n, facts.engines
    ranks = {role: len(devices[role]) // engines[role].model_parallel_size for role in engines}
    for role, one in engines.items():
        if one.dynamic_batches or one.mini_batch_size is None:
            continue
        if role == "actor":
            unit = len(devices[role])
            if one.strategy == "megatron":
                unit = ranks[role] * next(micro.samples for micro in one.micro_batches if not micro.of_step)
            if facts.train_batch_size * n % unit:
                return "validate_config"
        if facts.train_batch_size < one.mini_batch_size:
            return f"validate of {role}"
    for step in (1, 1000):
        trains = facts.critic_warmup <= step
        minis = {role: one.mini_batch_size * n for role, one in engines.items() if one.mini_batch_size is not None}
        multiple = math.lcm(ranks["actor"], *(mini for role, mini in minis.items() if trains or role != "actor"))
        samples = math.ceil(facts.train_batch_size // facts.parameter_sync_step * n / multiple) * multiple
        for role, one in engines.items():
            if samples % ranks[role]:
                return f"chunk of {role}"
            if any(micro.of_step and samples // ranks[role] % micro.samples for micro in one.micro_batches):
                return f"infer_batch of {role}"
            if role not in minis or (role == "actor" and not trains):
                continue
            part = minis[role] // ranks[role]
            if minis[role] % ranks[role] or samples // ranks[role] % part:
                return f"train_mini_batch of {role}"
            if any(not micro.of_step and part % micro.samples for micro in one.micro_batches):
                return f"train_batch of {role}"
    return None


def random_job(draw, job):
    """A job with random sizes, and its devices."""
    mode, strategy = draw.choice(["sync", "sync", "separate_async"]), draw.choice(["fsdp2", "fsdp2", "megatron"])
    roles = ["actor", *(role for role in ("ref", "critic") if draw.random() < 0.6)]
    mini, devices, engines = draw.choice([1, 3, 5, 8, 12, 32]), {}, {}
    for role in roles:
        parallel, dynamic = draw.choice([1, 1, 2]), draw.random() < 0.5
        devices[role] = list(range(parallel * draw.choice([1, 2, 3, 4])))
        micros = [] if dynamic else [MicroBatch(key=f"{role}.step", samples=draw.choice([1, 2, 3, 16]), of_step=True)]
        if not dynamic and role != "ref":
            micros.append(MicroBatch(key=f"{role}.mini", samples=draw.choice([1, 2, 3, 16]), of_step=False))
            if draw.random() < 0.3:
                micros = [replace(micro, samples=micros[0].samples, override=role) for micro in micros]
        size = None if role == "ref" else mini if draw.random() < 0.7 else draw.choice([1, 3, 8, 32])
        fields = {"strategy": strategy, "model_parallel_size": parallel, "micro_batches": tuple(micros)}
        engines[role] = engine(size, dynamic=dynamic, **fields)
    updates = draw.choice([1, 4]) if mode == "separate_async" else 1
    step = updates * engines["actor"].mini_batch_size
    batch = step if mode == "separate_async" else draw.choice([1, 7, 24, 32, 100, 1000])
    sizes = {"train_batch_size": batch, "parameter_sync_step": updates, "rollout_n": draw.choice([1, 1, 2, 3, 8])}
    return devices, job(roles, devices=8, mode=mode, engines=engines, critic_warmup=draw.choice([0, 0, 5]), **sizes)


def test_refused_is_what_verl_would_stop_at_and_what_is_typed_then_runs(job):
    draw = random.Random(0)
    refused = 0
    for _ in range(2500):
        devices, facts = random_job(draw, job)
        if verl_stops(devices, facts) is None:
            accepted(devices, facts)
            continue
        refused += 1
        repaired = typed(refusal(devices, facts), facts)
        assert verl_stops(devices, repaired) is None, (devices, facts)
        accepted(devices, repaired)
        if facts.mode == "separate_async":
            assert repaired.train_batch_size == repaired.parameter_sync_step * repaired.engines["actor"].mini_batch_size
    assert 1000 < refused < 2400


def test_every_number_of_devices_has_a_batch_that_runs(job):
    for counts in itertools.product((1, 2, 3, 4), repeat=3):
        engines = {"actor": engine(256, dynamic=False), "ref": engine(), "critic": engine(256, dynamic=False)}
        facts = job(train_batch_size=1024, engines=engines)
        devices = all_ranks(*counts)
        if verl_stops(devices, facts):
            facts = typed(refusal(devices, facts), facts)
        assert verl_stops(devices, facts) is None
        assert facts.train_batch_size < 1.1 * 1024
