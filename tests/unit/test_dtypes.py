"""A dtype that a card can't compute in is an error before anything loads; what is unknown is no error."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_ext_sharding.config import dtypes
from verl_ext_sharding.config.dtypes import DtypeUse, check_dtypes, device_capabilities, dtype_finding, dtype_uses
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError

TURING, AMPERE = (7, 5), (8, 0)
KEY = "sharding.roles.actor.compute_dtype"


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
@pytest.mark.parametrize("capability", [(6, 1), (7, 0), TURING])
def test_bfloat16_before_ampere_is_an_error_with_what_to_write(dtype, capability):
    found = dtype_finding("actor", dtype, capability)
    assert found.subject == KEY
    assert f"{dtype} on its device, of compute capability {capability[0]}.{capability[1]}" in found.found
    assert f"{KEY}=float16 (or float32)" in found.remedy


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [("bfloat16", AMPERE), ("bfloat16", (9, 0)), ("bfloat16", None), ("float16", TURING), ("fp32", TURING)],
)
def test_what_a_card_can_and_what_is_unknown_is_no_error(dtype, capability):
    assert dtype_finding("actor", dtype, capability) is None


@pytest.mark.parametrize(("role", "better"), [("actor", "float32"), ("critic", "float32"), ("ref", "float16")])
def test_weights_that_are_trained_are_better_stored_in_float32(role, better):
    key = f"sharding.roles.{role}.dtype"
    assert dtype_finding(role, "bfloat16", TURING, key=key).remedy.startswith(f"{key}={better} ")


def uses(values=None, hf_rollout=False, **roles):
    request = ShardingConfig.parse({"roles": roles})
    return {use.key: use.dtype for use in dtype_uses(request, values or {}, hf_rollout=hf_rollout)}


def test_every_dtype_that_the_user_asks_of_a_role_is_looked_at():
    asked = uses(actor={"compute_dtype": "bfloat16"}, critic={"dtype": "float32", "compute_dtype": "float16"})
    assert asked == {
        KEY: "bfloat16",
        "sharding.roles.critic.dtype": "float32",
        "sharding.roles.critic.compute_dtype": "float16",
    }


@pytest.mark.parametrize(("written", "dtype"), [({}, "bfloat16"), ({"dtype": "half"}, "half")])
def test_so_is_that_of_our_rollout_whose_default_is_bfloat16(written, dtype):
    values = {f"actor_rollout_ref.rollout.{name}": value for name, value in written.items()}
    assert uses(values, hf_rollout=True) == {"actor_rollout_ref.rollout.dtype": dtype}
    assert uses(values) == {}


def test_a_run_on_the_cpu_uses_no_card():
    assert uses({"trainer.device": "cpu"}, hf_rollout=True, actor={"compute_dtype": "bfloat16"}) == {}


def check(capabilities, devices, names=None):
    use = DtypeUse(role="actor", key=KEY, dtype="bfloat16")
    check_dtypes([use], {"actor": devices}.get, capabilities, names)


def test_only_the_devices_of_the_role_count():
    check({0: AMPERE, 1: TURING}, (0,))
    with pytest.raises(ConfigError, match=r"device 1 \(node 10.0.0.2\), of compute capability 7.5"):
        check({0: AMPERE, 1: TURING}, (0, 1), {1: "10.0.0.2"})


def test_an_unknown_device_is_no_error():
    check({0: None}, (0, 1))


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([[TURING, TURING]], [None] * 4),
        ([[TURING, AMPERE], [AMPERE, AMPERE]], [TURING, AMPERE, AMPERE, AMPERE]),
        ([[TURING] * 8, [TURING] * 8], [TURING] * 4),
        ([[TURING] * 8, [AMPERE] * 8], [TURING, TURING, AMPERE, AMPERE]),
        ([[TURING, AMPERE, AMPERE], [AMPERE] * 3], [None, None, AMPERE, AMPERE]),
        ([[TURING] * 2, [AMPERE] * 2, [AMPERE] * 2], [None] * 4),
        ([[TURING] * 2] * 3, [TURING] * 4),
        ([], [None] * 4),
    ],
)
def test_a_device_is_known_where_there_is_no_choice_of_nodes_and_cards(nodes, found):
    assert list(device_capabilities(nodes, num_nodes=2, devices_per_node=2).values()) == found


def notes(stored, computed, roles=("actor",)):
    block = "actor_rollout_ref.actor.fsdp_config"
    values = {f"{block}.model_dtype": stored, f"{block}.mixed_precision.param_dtype": computed}
    return dtypes.float16_notes(values, roles)


def test_float16_weights_without_the_scaler_of_verl_are_told():
    (note,) = notes("fp16", None)
    assert "verl scales the loss only for float16 computation, and here it is bf16" in note
    assert "sharding.roles.actor.dtype=float32 sharding.roles.actor.compute_dtype=float16" in note


def test_float16_weights_with_the_scaler_are_told_for_their_states():
    (note,) = notes("fp16", "fp16")
    assert "scales" not in note
    assert "eps" in note


@pytest.mark.parametrize("pair", [("fp32", "fp16"), ("fp32", None), (None, "fp16"), ("bf16", "bf16")])
def test_other_dtypes_are_not_told(pair):
    assert notes(*pair) == []


def test_a_role_that_never_trains_is_not_told():
    assert notes("fp16", None, roles=("ref",)) == []


# The probe


@pytest.fixture
def probe():
    pytest.importorskip("ray")
    from verl_ext_sharding.workers import probe

    return probe


def test_nvml_is_asked_for_each_gpu_and_left_again(probe, monkeypatch):
    calls = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: [7 + gpu, 5],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probe.compute_capabilities() == [(7, 5), (8, 5)]
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(("printed", "found"), [("7.5\n8.0\n", [(7, 5), (8, 0)]), ("[N/A]\n", []), ("", [])])
def test_nvidia_smi_is_asked_where_nvml_does_not_answer(printed, found, probe, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=printed))
    assert probe.compute_capabilities() == found


def test_a_node_without_either_has_nothing_to_say(probe, monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", missing)
    assert probe.compute_capabilities() == []
