"""What an engine with its layers over several devices refuses before it builds anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from transformers import Qwen2Config

from verl_ext_sharding import envs, loading
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.engines.cpu import CpuDeviceMapEngineWithLMHead
from verl_ext_sharding.engines.device_map import DeviceMapEngineMixin
from verl_ext_sharding.engines.meta_models import meta_model
from verl_ext_sharding.engines.optimizer_states import move_states
from verl_ext_sharding.placement.bundles import Promise


class Config(SimpleNamespace):
    """verl's configs are read by attribute and by `get`."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def refused(measures=None, qat=False, **engine):
    given = {"offload_policy": False, "use_fused_kernels": False, "forward_only": False, "model_dtype": "fp32"}
    one = SimpleNamespace(
        role="actor",
        measures=measures or RoleMeasures(),
        engine_config=Config(**{**given, **engine}),
        _qat_enabled=qat,
    )
    one._stored_dtype = lambda: DeviceMapEngineMixin._stored_dtype(one)
    return [(setting, remedy) for setting, on, remedy in DeviceMapEngineMixin._impossible(one) if on]


def test_settings_that_can_be_honoured_are_not_refused():
    assert refused() == []
    assert refused(RoleMeasures(logits="fused"), use_fused_kernels=True) == []
    assert refused(forward_only=True, model_dtype="fp16") == []


@pytest.mark.parametrize(
    ("given", "setting", "remedy"),
    [
        ({"offload_policy": True}, "offload_policy", "offload.params=true"),
        ({"use_fused_kernels": True}, "use_fused_kernels", "sharding.roles.actor.logits=fused"),
        ({"qat": True}, "QAT", "sharding.roles.actor.layout=fsdp"),
        ({"model_dtype": "fp16"}, "float16", "sharding.roles.actor.compute_dtype=float16"),
    ],
    ids=str,
)
def test_settings_that_only_fsdp_honours_are_refused_with_another_way(given, setting, remedy):
    ((found, way),) = refused(**given)
    assert setting in found
    assert remedy in way


def test_a_pad_id_without_a_row_does_not_stop_the_check_of_a_map():
    config = Qwen2Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=8)
    config.architectures = ["Qwen2ForCausalLM"]
    assert meta_model(config, role="actor").get_input_embeddings().weight.shape[0] == 8
    assert config.pad_token_id == 8


@pytest.mark.parametrize("counts_on_device", [True, False])
def test_step_counters_move_with_optimizers_that_count_on_the_device_alone(counts_on_device):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["fused"] = counts_on_device
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}
    move_states(optimizer, torch.device("meta"), counters=True)
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert (optimizer.state[parameter]["step"].device.type == "meta") == counts_on_device


def test_step_counters_stay_where_they_are_when_a_run_resumes():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["fused"] = True
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}
    move_states(optimizer, torch.device("meta"), copy=True)
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.state[parameter]["step"].device.type == "cpu"


@pytest.mark.parametrize("second", ["cuda:0", "cpu"])
def test_gradients_on_host_and_devices_are_clipped_by_their_exact_norm(second):
    module = torch.nn.Linear(1 << 12, 1 << 12)
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    exact = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in module.parameters()])).item()
    before = module.weight.detach().clone()
    engine = object.__new__(CpuDeviceMapEngineWithLMHead)
    engine.module, engine.scaler, engine._qat_enabled = module, None, False
    engine.optimizer, engine.optimizer_config = torch.optim.SGD(module.parameters(), lr=1.0), Config(clip_grad=1.0)
    engine.homes = {"weight": torch.device("cpu"), "bias": torch.device(second)}
    norm = engine.optimizer_step()
    assert (abs(norm / exact - 1) < 1e-6) == (second == "cuda:0")
    change = torch.linalg.vector_norm(module.weight.detach() - before, dtype=torch.float64).item()
    assert change == pytest.approx(1.0, rel=1e-3)


def test_a_process_shows_its_devices_in_every_variable_that_verl_compares(monkeypatch):
    promise = Promise(
        device=2, node_id="n", accelerator_id="2", visible=("2", "3"), visible_variable="CUDA_VISIBLE_DEVICES"
    )
    monkeypatch.setenv(envs.BUNDLE, promise.to_json())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    loading.show_devices()
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == "2,3"


def test_a_worker_that_sees_several_devices_counts_them_without_starting_cuda(monkeypatch):
    from verl_ext_sharding.patch_points import worker_group

    made = []
    monkeypatch.setattr(worker_group, "original", lambda spec: lambda *args: made.append(args[7]))
    for visible in ((), ("2", "3")):
        promise = Promise(device=2, node_id="n", accelerator_id="2", visible=visible)
        bundle = SimpleNamespace(promise=promise, group="group", index=0)
        worker_group.create_worker(None, 0, 0, SimpleNamespace(bundles=[bundle]), 0, None, None, None, False)
    assert [envs.COUNT_BY_NVML in env for env in made] == [False, True]
