"""Environment of collective communication: each decision from fake hardware, the user's word first, one value for all nodes."""

import subprocess
import sys
import types

import pytest

from verl_ext_sharding.communication import hygiene, topology
from verl_ext_sharding.communication.hygiene import (
    ASYNC_ERROR_HANDLING,
    ASYNC_ERROR_HANDLING_OLD,
    IB_DISABLE,
    NAMES,
    P2P_DISABLE,
    Setting,
    as_env,
    check_exports,
    decide,
    exported,
    merge,
)
from verl_ext_sharding.communication.topology import P2PMatrix
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.errors import ConfigError

AUTO = CommunicationConfig()

LEGEND = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
CONSUMER = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n" + LEGEND
SERVER = "\x1b[4mGPU0\tGPU1\tGPU2\x1b[0m\nGPU0\tX\tOK\tOK\nGPU1\tOK\tX\tOK\nGPU2\tOK\tOK\tX\n" + LEGEND


def matrix(*rows):
    return P2PMatrix(codes=tuple(tuple(row.split()) for row in rows))


NO_PAIR = matrix("X GNS", "GNS X")
ALL_PAIRS = matrix("X OK", "OK X")
BRIDGED = matrix("X OK CNS", "OK X CNS", "CNS CNS X")


@pytest.fixture
def infiniband(tmp_path):
    """A folder like /sys/class/infiniband; the function fills it with devices."""

    def make(*devices):
        folder = tmp_path / "class" / "infiniband"
        folder.parent.mkdir(exist_ok=True)
        for device in devices:
            (folder / device / "ports" / "1").mkdir(parents=True)
        return folder

    return make


def setting(settings, name):
    (found,) = [each for each in settings if each.name == name]
    return found


# Asynchronous error handling


def test_async_error_handling_is_on_by_default(infiniband):
    found = setting(decide(AUTO, {}, sys_class_infiniband=infiniband()), ASYNC_ERROR_HANDLING)
    assert (found.value, found.source) == ("1", "config")


def test_async_error_handling_can_be_switched_off(infiniband):
    config = CommunicationConfig(async_error_handling=False)
    found = setting(decide(config, {}, sys_class_infiniband=infiniband()), ASYNC_ERROR_HANDLING)
    assert (found.value, found.source) == ("0", "config")


def test_the_old_name_is_translated_with_its_value(infiniband):
    environ = {ASYNC_ERROR_HANDLING_OLD: "2"}
    found = setting(decide(AUTO, environ, sys_class_infiniband=infiniband()), ASYNC_ERROR_HANDLING)
    assert (found.value, found.source) == ("2", "user")
    assert ASYNC_ERROR_HANDLING_OLD in found.reason


def test_the_new_name_wins_over_the_old_one(infiniband):
    environ = {ASYNC_ERROR_HANDLING_OLD: "1", ASYNC_ERROR_HANDLING: "3"}
    assert as_env(decide(AUTO, environ, sys_class_infiniband=infiniband()))[ASYNC_ERROR_HANDLING] == "3"


# InfiniBand


def test_infiniband_is_disabled_where_no_device_exists(infiniband):
    found = setting(decide(AUTO, {}, sys_class_infiniband=infiniband()), IB_DISABLE)
    assert (found.value, found.source) == ("1", "auto")


def test_infiniband_is_disabled_where_the_folder_is_empty(infiniband):
    folder = infiniband()
    folder.mkdir()
    assert setting(decide(AUTO, {}, sys_class_infiniband=folder), IB_DISABLE).value == "1"


@pytest.mark.parametrize("device", ["mlx5_0", "rocep1s0", "efa_0"])
def test_any_rdma_device_leaves_infiniband_alone(infiniband, device):
    settings = decide(AUTO, {}, sys_class_infiniband=infiniband(device))
    assert setting(settings, IB_DISABLE).value is None
    assert device in setting(settings, IB_DISABLE).reason
    assert IB_DISABLE not in as_env(settings)


def test_a_system_without_sysfs_leaves_infiniband_alone(tmp_path):
    found = setting(decide(AUTO, {}, sys_class_infiniband=tmp_path / "no" / "infiniband"), IB_DISABLE)
    assert found.value is None


def test_a_folder_that_is_no_folder_leaves_infiniband_alone(tmp_path):
    file = tmp_path / "infiniband"
    file.write_text("")
    assert setting(decide(AUTO, {}, sys_class_infiniband=file), IB_DISABLE).value is None


@pytest.mark.parametrize(("wanted", "value"), [(True, "0"), (False, "1")])
def test_infiniband_follows_the_config_where_a_device_exists(infiniband, wanted, value):
    config = CommunicationConfig(infiniband=wanted)
    found = setting(decide(config, {}, sys_class_infiniband=infiniband("mlx5_0")), IB_DISABLE)
    assert (found.value, found.source) == (value, "config")


def test_asking_for_infiniband_without_a_device_is_refused(infiniband):
    with pytest.raises(ConfigError, match=r"infiniband=true[\s\S]*infiniband=auto"):
        decide(CommunicationConfig(infiniband=True), {}, sys_class_infiniband=infiniband())


# Peer access


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (NO_PAIR, "1"),
        (ALL_PAIRS, None),
        (BRIDGED, None),
        (matrix("X U", "U X"), None),
        (matrix("X GNS U", "GNS X GNS", "U GNS X"), None),
        (matrix("X"), None),
        (matrix(), None),
        (None, None),
    ],
)
def test_peer_access_is_disabled_only_where_no_pair_has_it(infiniband, found, value):
    settings = decide(AUTO, {}, sys_class_infiniband=infiniband(), p2p_matrix=found)
    assert setting(settings, P2P_DISABLE).value == value
    assert setting(settings, P2P_DISABLE).source == "auto"


def test_the_reason_says_how_many_gpus_and_why(infiniband):
    found = setting(decide(AUTO, {}, sys_class_infiniband=infiniband(), p2p_matrix=NO_PAIR), P2P_DISABLE)
    assert "2 GPUs" in found.reason
    assert "GPU not supported" in found.reason


@pytest.mark.parametrize(("wanted", "value"), [(True, "0"), (False, "1")])
def test_peer_access_follows_the_config(infiniband, wanted, value):
    config = CommunicationConfig(p2p=wanted)
    found = setting(decide(config, {}, sys_class_infiniband=infiniband(), p2p_matrix=ALL_PAIRS), P2P_DISABLE)
    assert (found.value, found.source) == (value, "config")


def test_asking_for_peer_access_that_no_pair_has_is_refused(infiniband):
    with pytest.raises(ConfigError, match=r"p2p=true[\s\S]*GPU not supported[\s\S]*NCCL_P2P_DISABLE=0"):
        decide(CommunicationConfig(p2p=True), {}, sys_class_infiniband=infiniband(), p2p_matrix=NO_PAIR)


# The user's word


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["0", "1"])
def test_what_the_user_exported_wins_over_hardware_and_defaults(infiniband, name, value):
    settings = decide(AUTO, {name: value}, sys_class_infiniband=infiniband(), p2p_matrix=NO_PAIR)
    assert setting(settings, name) == Setting(name=name, value=value, source="user", reason="exported")
    assert as_env(settings)[name] == value


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize(("key", "name"), [("infiniband", IB_DISABLE), ("p2p", P2P_DISABLE)])
def test_a_key_that_says_the_opposite_of_an_export_is_refused(infiniband, key, name, value):
    opposite, same = value == "1", value == "0"
    with pytest.raises(ConfigError) as caught:
        decide(CommunicationConfig(**{key: opposite}), {name: value}, sys_class_infiniband=infiniband())
    assert caught.value.subject == f"sharding.communication.{key}={str(opposite).lower()}"
    assert caught.value.found == f"{name}={value} exported"
    assert caught.value.remedy.startswith(f"sharding.communication.{key}=auto, or unset {name}")
    settings = decide(CommunicationConfig(**{key: same}), {name: value}, sys_class_infiniband=infiniband())
    assert setting(settings, name).value == value


@pytest.mark.parametrize("name", [ASYNC_ERROR_HANDLING, ASYNC_ERROR_HANDLING_OLD])
def test_error_handling_that_is_switched_off_and_exported_on_is_refused(infiniband, name):
    off = CommunicationConfig(async_error_handling=False)
    with pytest.raises(ConfigError, match=r"async_error_handling=false[\s\S]*async_error_handling=true, or unset"):
        decide(off, {name: "3"}, sys_class_infiniband=infiniband())
    assert as_env(decide(off, {name: "0"}, sys_class_infiniband=infiniband()))[ASYNC_ERROR_HANDLING] == "0"


def test_an_export_beside_the_default_of_error_handling_is_the_users_word(infiniband):
    settings = decide(AUTO, {ASYNC_ERROR_HANDLING: "0"}, sys_class_infiniband=infiniband())
    assert as_env(settings)[ASYNC_ERROR_HANDLING] == "0"


def test_an_empty_export_is_no_export(infiniband):
    settings = decide(AUTO, {IB_DISABLE: ""}, sys_class_infiniband=infiniband())
    assert setting(settings, IB_DISABLE).source == "auto"


def test_every_variable_is_in_the_table_also_when_it_is_left_alone(infiniband):
    settings = decide(AUTO, {}, sys_class_infiniband=infiniband("mlx5_0"), p2p_matrix=ALL_PAIRS)
    assert [each.name for each in settings] == list(NAMES)
    assert all(each.reason for each in settings)
    assert as_env(settings) == {ASYNC_ERROR_HANDLING: "1"}


def test_only_variables_that_are_decided_travel_from_the_driver():
    environ = {"HOME": "/root", IB_DISABLE: "1", "NCCL_DEBUG": "INFO", ASYNC_ERROR_HANDLING_OLD: "1"}
    assert exported(environ) == {IB_DISABLE: "1", ASYNC_ERROR_HANDLING_OLD: "1"}


def test_on_a_node_the_drivers_exports_win_over_the_nodes_own(monkeypatch):
    monkeypatch.setattr(topology, "detect", lambda: NO_PAIR)
    monkeypatch.setenv(IB_DISABLE, "1")
    monkeypatch.setenv(P2P_DISABLE, "1")
    env = as_env(hygiene.decide_here(AUTO, {IB_DISABLE: "0"}))
    assert (env[IB_DISABLE], env[P2P_DISABLE]) == ("0", "1")


# Several nodes


def node(infiniband, environ=None, devices=(), peers=None):
    return decide(AUTO, environ or {}, sys_class_infiniband=infiniband(*devices), p2p_matrix=peers)


def one(name, value, source="auto", reason="because"):
    others = [Setting(name=other, value=None, source="auto", reason="unknown") for other in NAMES if other != name]
    return [Setting(name=name, value=value, source=source, reason=reason), *others]


def test_one_node_is_its_own_answer(infiniband):
    settings = node(infiniband, peers=NO_PAIR)
    assert merge({"a": settings}) == settings


@pytest.mark.parametrize("name", [IB_DISABLE, P2P_DISABLE])
def test_what_one_node_lacks_is_disabled_on_all(name):
    merged = setting(merge({"a": one(name, None), "b": one(name, "1"), "c": one(name, None)}), name)
    assert merged.value == "1"
    assert "on b of 3 nodes" in merged.reason


def test_what_all_nodes_have_is_left_alone():
    merged = merge({"a": one(IB_DISABLE, None), "b": one(IB_DISABLE, None)})
    assert as_env(merged) == {}


def test_an_export_on_one_node_holds_for_all_against_the_hardware():
    merged = merge({"a": one(IB_DISABLE, "0", "user", "exported"), "b": one(IB_DISABLE, "1")})
    assert setting(merged, IB_DISABLE).value == "0"
    assert setting(merged, IB_DISABLE).source == "user"


def test_nodes_that_export_different_values_are_refused():
    with pytest.raises(ConfigError, match=r"NCCL_IB_DISABLE[\s\S]*0 on a, 1 on b"):
        merge({"a": one(IB_DISABLE, "0", "user"), "b": one(IB_DISABLE, "1", "user")})


# Reading the topology


@pytest.mark.parametrize(
    ("text", "codes"),
    [(CONSUMER, (("X", "GNS"), ("GNS", "X"))), (SERVER, (("X", "OK", "OK"), ("OK", "X", "OK"), ("OK", "OK", "X")))],
)
def test_the_matrix_of_nvidia_smi_is_read_with_and_without_escape_codes(text, codes):
    assert topology.from_nvidia_smi(text) == P2PMatrix(codes=codes)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\tGPU0\tGPU1\nGPU0\tX\tOK\n", "GPU0\tGPU1\n"])
def test_a_matrix_that_is_not_whole_is_unknown(text):
    assert topology.from_nvidia_smi(text) is None


class NVMLError(Exception):
    pass


def fake_nvml(status):
    calls = []

    def p2p_status(first, second, index):
        assert index == 0
        if isinstance(status, Exception):
            raise status
        return status

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_READ=0,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetP2PStatus=p2p_status,
    )
    return module, calls


@pytest.mark.parametrize(
    ("status", "possible"),
    [(0, True), (1, False), (2, False), (3, False), (4, False), (5, False), (6, None), (99, None), (NVMLError(), None)],
)
def test_nvml_says_whether_a_pair_has_peer_access(status, possible):
    module, calls = fake_nvml(status)
    assert topology.from_nvml(module).possible is possible
    assert calls == ["init", "shutdown"]


def test_without_nvml_and_nvidia_smi_the_topology_is_unknown(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", missing)
    assert topology.detect() is None


def test_nvidia_smi_is_asked_where_nvml_does_not_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    done = subprocess.CompletedProcess(topology.NVIDIA_SMI, 0, stdout=CONSUMER, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert topology.detect() == NO_PAIR


def test_an_nvidia_smi_that_hangs_leaves_the_topology_unknown(monkeypatch):
    def hang(command, *, timeout, **kwargs):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", hang)
    assert topology.detect(timeout_s=0.1) is None


@pytest.mark.parametrize("name", [IB_DISABLE, P2P_DISABLE, ASYNC_ERROR_HANDLING, ASYNC_ERROR_HANDLING_OLD])
@pytest.mark.parametrize(("word", "number"), [("true", 1), ("Yes", 1), ("False", 0), ("off", 0)])
def test_an_exported_word_is_refused_with_the_number_that_it_means(name, word, number):
    """NCCL reads numbers alone, and takes its default for anything else."""
    with pytest.raises(ConfigError) as caught:
        check_exports(AUTO, {name: word})
    assert caught.value.subject == f"{name}={word}"
    assert caught.value.remedy.startswith(f"export {name}={number}")
    check_exports(AUTO, {name: f" {number} "})
