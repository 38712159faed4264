"""Case S5: activation offload of layers that save a tuple. Stock verl stops at an assertion; ours takes them, so no other
measure is needed. The model is Qwen3.5, whose gated delta nets are the layers of verl#7472.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.verl

GIVEN = ("delta_offload", "delta_verls_keys")
"""By our key without checkpointing; by verl's `enable_activation_offload` and `enable_gradient_checkpointing`."""


@pytest.fixture(scope="module")
def runs(engines):
    return engines(1)


@pytest.mark.parametrize("name", GIVEN)
def test_such_layers_train_as_they_do_without_offload(name, runs):
    assert set(runs[name]["difference"].values()) == {0.0}
    assert runs[name]["steps"][-1]["grad_norm"] == runs["delta"]["steps"][-1]["grad_norm"]


@pytest.mark.parametrize(("name", "share"), [("delta_offload", 0.4), ("delta_verls_keys", 0.1)])
def test_their_activations_are_on_the_host_between_forward_and_backward(name, share, runs):
    kept = runs[name]["kept"]
    assert kept["host"] > 0
    assert kept["device"] < share * runs["delta"]["kept"]["device"]
    assert kept["host_afterwards"] == 0
