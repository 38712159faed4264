"""Each memory measure in verl's own engines: the same training, within the bytes that it promises, and said in the log."""

from __future__ import annotations

import math

import pytest

from tests.verl.engine_cases import CASES, KEPT_BYTES, POLICIES

pytestmark = pytest.mark.verl

MIB = 2**20
NUM_LAYERS = 4
HIDDEN_SIZE = 64
VOCABULARY = 320

EXACT = [
    *POLICIES,
    "step",
    "actor_padded_eager",
    "critic_padded_eager",
    "large_full",
    "offload",
    "offload_full",
    "offload_selective",
    "offload_verls_keys",
    "delta_offload",
    "delta_verls_keys",
    "lora_full_offload",
    "critic_lora_all",
    "critic_all",
    "ref_verls_keys",
    "spread",
    "spread_explicit",
    "spread_tied",
    "spread_offload",
    "spread_bf16",
    "spread_lora",
    "spread_critic",
    "spread_ref",
]
"""Cases that only recompute or move what their reference computes."""

COMPARED = [case for case in CASES if case.like is not None]
CLOSE = [case for case in COMPARED if case.name not in EXACT]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, engines):
    return engines(request.param)


def each(cases):
    """A parameter for each case and each number of ranks that it is run on."""
    pairs = [(num_ranks, case) for num_ranks in (1, 2) for case in cases if case.runs_on(num_ranks)]
    ids = [f"{case.name} on {num_ranks}" for num_ranks, case in pairs]
    return pytest.mark.parametrize(("runs", "case"), pairs, indirect=["runs"], ids=ids)


def steps(runs, name, key):
    return [step[key] for step in runs[name].get("steps", ())]


def device_bytes(runs, name):
    return runs[name]["kept"]["device"]


# The same training


@each([case for case in COMPARED if case.name in EXACT])
def test_what_only_recomputes_or_moves_changes_no_bit_of_losses_gradients_weights_and_outputs(case, runs):
    assert set(runs[case.name]["difference"].values()) == {0.0}
    for key in ("loss", "grad_norm"):
        assert steps(runs, case.name, key) == steps(runs, case.like, key)


@each(CLOSE)
def test_what_computes_in_another_order_agrees_to_one_in_a_hundred_thousand(case, runs):
    differences = dict(runs[case.name]["difference"])
    if case.name == "spread_merged":
        assert differences.pop("exported") < 5e-3  # verl sends merged weights in bfloat16
    assert max(differences.values()) < (3e-5 if case.compiled else 1e-5)  # compiled kernels add up in another order
    for key in ("loss", "grad_norm"):
        assert steps(runs, case.name, key) == pytest.approx(steps(runs, case.like, key), rel=1e-5)


def test_both_kinds_of_cases_are_all_there_are():
    assert {case.name for case in COMPARED} == {*EXACT, *(case.name for case in CLOSE)}
    assert len(EXACT) + len(CLOSE) == len(COMPARED)


def test_training_moves_the_weights_so_that_equal_weights_mean_something(runs):
    first, second = steps(runs, "none", "loss")
    assert first != second
    assert all(norm > 0.1 for norm in steps(runs, "none", "grad_norm"))


def test_a_row_over_two_ranks_keeps_half_of_the_activations_on_each(engines):
    runs = engines(2)
    assert device_bytes(runs, "ulysses") == pytest.approx(device_bytes(runs, "rows") / 2, rel=0.02)


@each([case for case in CASES if case.flash_attn and case.compiled])
def test_layers_with_flash_attn_are_compiled_whole_whether_a_row_is_on_one_rank_or_two(case, runs):
    found = runs[case.name]
    assert found["applied"]["attention"].startswith("fa2_packed (")
    assert found["layers"]["failure"] is None
    assert found["layers"]["pieces"] == 1
    assert found["layers"]["graphs"] <= 6  # with gradients and without, and lengths that were not known to change


@each(COMPARED)
def test_parameters_keep_their_names_in_checkpoints_and_on_their_way_to_the_rollout(case, runs):
    found, reference = runs[case.name], runs[case.like]
    assert found["names"] == reference["names"]
    assert found.get("exported") == reference.get("exported")


# Bytes of activations


def outside_layers(runs, reference, full):
    """Bytes that are kept whatever the layers do: `full` keeps their inputs, and nothing else of them."""
    hidden = runs[full]["kept"]["tokens"] * HIDDEN_SIZE * 4
    return device_bytes(runs, full) - NUM_LAYERS * hidden


def of_layers(runs, name):
    return device_bytes(runs, name) - outside_layers(runs, "none", "full")


def test_full_checkpointing_keeps_the_inputs_of_layers_alone(runs):
    assert of_layers(runs, "full") < 0.05 * of_layers(runs, "none")


def test_every_second_layer_checkpointed_keeps_half_and_the_inputs_of_the_others(runs):
    expected = (of_layers(runs, "none") + of_layers(runs, "full")) / 2
    assert of_layers(runs, "every_2") == pytest.approx(expected, rel=0.03)
    assert of_layers(runs, "every_2") < 0.6 * of_layers(runs, "none")


def test_selective_checkpointing_keeps_less_than_all_and_more_than_inputs(runs):
    assert 2 * of_layers(runs, "full") < of_layers(runs, "selective") < 0.6 * of_layers(runs, "none")


def test_a_share_of_the_activations_is_not_exceeded_and_not_left_unused(runs):
    assert 0.25 * of_layers(runs, "none") < of_layers(runs, "share") <= 0.5 * of_layers(runs, "none")


def test_a_budget_in_bytes_is_not_exceeded_and_not_left_unused(runs):
    budget = int(KEPT_BYTES.removesuffix("MiB")) * MIB
    assert 0.6 * budget < of_layers(runs, "bytes") <= budget


def test_auto_keeps_on_a_cpu_what_full_keeps(runs):
    assert device_bytes(runs, "auto") == device_bytes(runs, "full")


def test_offloaded_activations_are_on_the_host_until_the_backward_pass_and_not_after_it(runs):
    kept = runs["offload"]["kept"]
    assert kept["device"] < 0.15 * device_bytes(runs, "large")
    assert kept["host"] > 0.85 * device_bytes(runs, "large")
    assert kept["host_afterwards"] == 0


def test_with_checkpointing_it_is_the_inputs_of_layers_that_go_to_the_host(runs):
    kept = runs["offload_full"]["kept"]
    inputs = NUM_LAYERS * kept["tokens"] * HIDDEN_SIZE * 4
    assert inputs <= kept["host"] < 2.5 * inputs  # buffers are powers of two; and the mask, which all layers share
    assert kept["device"] <= device_bytes(runs, "large_full") - inputs
    assert kept["host_afterwards"] == 0


def test_what_selective_checkpointing_keeps_goes_to_the_host_too_but_for_keys_and_values_of_less_than_a_mebibyte(runs):
    small = 2 * NUM_LAYERS * MIB
    assert device_bytes(runs, "offload_selective") < device_bytes(runs, "offload_full") + small
    assert runs["offload_selective"]["kept"]["host"] > 5 * runs["offload_full"]["kept"]["host"]
    assert runs["offload_selective"]["kept"]["host_afterwards"] == 0


@pytest.mark.parametrize(("name", "share"), [("lora_full_offload", 0.15), ("lora_all", 0.15), ("critic_all", 0.05)])
def test_together_they_leave_little_on_the_device_for_adapters_and_critics_too(name, share, runs):
    like = next(case.like for case in CASES if case.name == name)
    assert device_bytes(runs, name) < share * device_bytes(runs, like)


# Bytes of log-probs


def logits_bytes(runs, name):
    return runs[name]["kept"]["tokens"] * VOCABULARY * 4


@pytest.mark.parametrize("padding", ["", "packed_"])
def test_log_probs_in_chunks_keep_no_copy_of_the_logits(padding, runs):
    like = padding.rstrip("_") or "none"
    assert device_bytes(runs, f"{padding}logits_chunked") < device_bytes(runs, like)


@pytest.mark.parametrize("padding", ["", "packed_"])
def test_log_probs_fused_into_the_head_keep_no_logits(padding, runs):
    fused, chunked = (f"{padding}logits_{name}" for name in ("fused", "chunked"))
    assert device_bytes(runs, fused) <= device_bytes(runs, chunked) - 0.9 * logits_bytes(runs, fused)


@each([case for case in CASES if case.measures.logits is not None])
def test_no_way_to_log_probs_walks_the_logits_row_by_row(case, runs):
    assert runs["none"]["row_loops"] > 0
    assert runs[case.name]["row_loops"] == 0


# Bytes of the optimizer


def test_optimizer_states_are_on_the_host_between_steps(runs):
    for name in ("step", "critic_all", "combined"):
        assert runs[name]["optimizer_bytes"] == {"host": 2 * runs[name]["parameter_bytes"], "device": 0}


def test_each_of_two_ranks_holds_half_of_parameters_and_optimizer_states(engines):
    one, two = (engines(num_ranks)["step"] for num_ranks in (1, 2))
    assert two["parameter_bytes"] == one["parameter_bytes"] // 2
    assert two["optimizer_bytes"]["host"] == one["optimizer_bytes"]["host"] // 2


# What the engine says


SAID = {
    "full": ("gradient checkpointing", "full, only the inputs of layers are kept"),
    "share": ("gradient checkpointing", "under 50% (on the CPU layers are compiled only with compile: true)"),
    "auto": ("gradient checkpointing", "auto, only the inputs of layers are kept (on the CPU"),
    "actor_packed_auto": ("attention", "sdpa_packed (not flash_attention_2: flash-attn can't be imported; not varlen"),
    "critic_padded_auto": ("attention", "sdpa (not flash_attention_2"),
    "actor_packed_eager": ("attention", "eager (as asked for)"),
    "logits_auto": ("log-probs", "fused (the head can return log-probs itself)"),
    "logits_chunked": ("log-probs", "chunked (as asked for)"),
    "offload_verls_keys": ("activations", "in place of verl's, which forces reentrant checkpointing"),
    "step": ("optimizer states", "on the host but for the step"),
}


@each([case for case in CASES if case.name in SAID])
def test_the_log_says_for_each_role_what_was_done_and_why(case, runs):
    found = runs[case.name]
    measure, words = SAID[case.name]
    assert words in found["applied"][measure]
    said = [message for message in found["messages"] if message.startswith(f"memory of {case.role}: ")]
    assert len(said) == 1
    assert f"{measure}: {found['applied'][measure]}" in said[0]


def test_a_role_without_measures_says_nothing(runs):
    for name in ("none", "critic", "ref", "tied"):
        assert runs[name]["applied"] == {}
        assert not [message for message in runs[name]["messages"] if message.startswith("memory of")]


def test_recompilations_are_a_metric_of_roles_with_a_policy_and_stay_at_none(runs):
    for name in POLICIES:
        assert steps(runs, name, "layer_recompiles") == [0.0, 0.0]
    assert "layer_recompiles" not in runs["none"]["steps"][0]


@each(COMPARED)
def test_no_measure_adds_a_warning_of_torch(case, runs):
    added = set(runs[case.name]["warnings"]) - set(runs[case.like]["warnings"])
    assert not [text for text in added if "requires_grad" in text or "view tensor" in text]


# Batches that read the logits


@pytest.mark.parametrize("name", ["logits_auto", "packed_logits_auto"])
def test_auto_makes_logits_for_a_batch_that_reads_them_and_says_so_once(name, runs):
    assert runs[name]["difference"]["inferred from logits"] < 1e-5
    said = [message for message in runs[name]["messages"] if "calculate_sum_pi_squared reads the logits" in message]
    assert len(said) == 1
    assert "chunked" in said[0]


def test_fused_refuses_a_batch_that_reads_the_logits_and_names_the_way_out(runs):
    assert "calculate_sum_pi_squared reads the logits" in runs["logits_fused"]["error"]
    assert "sharding.roles.actor.logits=chunked" in runs["logits_fused"]["error"]


# Neighbours


@each([case for case in CASES if case.measures.attention is not None])
def test_what_a_role_shares_with_others_of_its_process_is_left_as_it_was(case, runs):
    assert runs[case.name]["shared"] == {"attention": "sdpa", "fused": bool(case.model.get("use_fused_kernels"))}


# Checkpoints


def test_a_checkpoint_of_a_run_with_every_measure_continues_bit_for_bit(runs):
    resumed = runs["combined"]["resumed"]["measured"]
    assert (resumed["loaded"], resumed["loss"], resumed["weights"]) == (0.0, 0.0, 0.0)
    assert resumed["optimizer_bytes"] == runs["combined"]["optimizer_bytes"]


def test_it_continues_without_any_measure_too(runs):
    resumed = runs["combined"]["resumed"]["bare"]
    assert resumed["loaded"] == 0.0
    assert math.isclose(resumed["loss"], 0.0, abs_tol=1e-6)
    assert resumed["weights"] < 1e-5


def test_a_saved_config_names_no_attention_that_only_this_package_has(runs):
    config = runs["combined"]["resumed"]["config"]
    assert "sdpa_packed" not in config
    assert '"model_type": "qwen2"' in config


# One process with the layers on several devices


def test_a_checkpoint_of_fsdp2_resumes_with_the_layers_spread(engines):
    combined = engines(1)["combined"]
    resumed = combined["resumed"]["spread"]
    assert resumed["loaded"] == 0.0
    assert math.isclose(resumed["loss"], 0.0, abs_tol=1e-6)
    assert resumed["weights"] < 1e-5
    assert resumed["optimizer_bytes"] == combined["optimizer_bytes"]


def test_adapters_of_spread_layers_go_to_the_rollout_under_the_same_names(engines):
    runs = engines(1)
    assert runs["spread_lora"]["exported"] == runs["lora"]["exported"]
    assert runs["spread"]["exported"] == runs["none"]["exported"]
