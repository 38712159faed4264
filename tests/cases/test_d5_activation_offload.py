"""Case D5: verl's keys for activation offload and checkpointing together; stock verl makes checkpointing reentrant."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.verl

GIVEN = "offload_verls_keys"
"""`enable_activation_offload: true`, `enable_gradient_checkpointing: true`, and nothing of `sharding` for offload."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, engines):
    return engines(request.param)


def test_the_keys_lead_to_offload_around_checkpointing_that_is_not_reentrant(runs):
    applied = runs[GIVEN]["applied"]
    assert "on the host between forward and backward" in applied["activations"]
    assert applied["gradient checkpointing"].startswith("full")


def test_no_input_without_gradient_is_warned_of(runs):
    for name in (GIVEN, "ref_verls_keys"):
        assert not [text for text in runs[name]["warnings"] if "requires_grad" in text]


def test_gradients_equal_the_run_without_offload(runs):
    assert [step["grad_norm"] for step in runs[GIVEN]["steps"]] == [
        step["grad_norm"] for step in runs["large"]["steps"]
    ]
    assert runs[GIVEN]["difference"]["weights"] == 0.0


def test_saved_tensors_are_on_the_host_between_forward_and_backward(runs):
    kept, everything = runs[GIVEN]["kept"], runs["large"]["kept"]
    inputs_bytes = 4 * kept["tokens"] * 64 * 4
    assert kept["host"] >= inputs_bytes
    assert kept["device"] <= runs["large_full"]["kept"]["device"] - inputs_bytes
    assert kept["device"] < 0.2 * everything["device"]
    assert kept["host_afterwards"] == 0


def test_a_reference_that_never_runs_backward_offloads_nothing(runs):
    assert runs["ref_verls_keys"]["applied"] == {}
