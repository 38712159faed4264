"""Optimizer states are on the host between steps, with the same values and the same `state_dict`."""

from __future__ import annotations

import copy
import socket

import pytest
import torch
import torch.distributed as dist
from checkpointing_models import batch, qwen2, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verl_ext_sharding.engines.optimizer_states import load_optimizer
from verl_ext_sharding.training.optimizer_offload import OptimizerStateOffload

OFFLOAD = OptimizerStateOffload(min_bytes=0)


def train(model, optimizer, num_steps=3, watch=lambda: None):
    for index in range(num_steps):
        step(model, batch(seed=index), use_cache=False)
        watch()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=False),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    ],
    ids=["adamw", "amsgrad", "momentum"],
)
def test_updated_weights_are_bit_identical_and_states_are_away_between_steps(make):
    model = qwen2(2)
    reference = train(model, make(model.parameters()))
    model = qwen2(2)
    optimizer = make(model.parameters())
    offloader = OFFLOAD.apply(optimizer)
    seen = []
    result = train(model, optimizer, watch=lambda: seen.append(offloader.device_bytes(optimizer)))
    assert seen == [0, 0, 0]
    assert all(torch.equal(result[name], value) for name, value in reference.items())


def test_the_bytes_of_adam_are_on_the_host_between_steps_and_on_the_device_within():
    model = qwen2(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offloader = OptimizerStateOffload(min_bytes=1024).apply(optimizer)
    within = []
    train(model, optimizer, 1)
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: within.append((offloader.host_bytes(optimizer), offloader.device_bytes(optimizer)))
    )
    large = [p for p in model.parameters() if p.numel() * 4 >= 1024]
    expected = 8 * sum(p.numel() for p in large)
    assert offloader.host_bytes(optimizer) == expected
    assert offloader.device_bytes(optimizer) == 0
    train(model, optimizer, 1)
    assert within == [(0, expected)]
    assert offloader.host_bytes(optimizer) == expected


def test_host_buffers_are_the_same_in_every_step():
    model = qwen2(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    OFFLOAD.apply(optimizer)
    train(model, optimizer, 1)
    before = [value.data_ptr() for states in optimizer.state.values() for value in states.values()]
    train(model, optimizer, 2)
    assert [value.data_ptr() for states in optimizer.state.values() for value in states.values()] == before


def test_state_dict_is_that_of_the_plain_optimizer_and_loads_into_it_and_back():
    plain_model, model = qwen2(1), qwen2(1)
    plain, optimizer = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain_model, model))
    OFFLOAD.apply(optimizer)
    train(plain_model, plain, 2)
    train(model, optimizer, 2)
    ours, theirs = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    optimizer.load_state_dict(theirs)
    plain.load_state_dict(ours)
    first, second = train(plain_model, plain, 2), train(model, optimizer, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loaded_states_go_to_the_host_at_once():
    model = qwen2(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offloader = OFFLOAD.apply(fresh)
    fresh.load_state_dict(state)
    assert offloader.device_bytes(fresh) == 0
    assert offloader.host_bytes(fresh) > 0


def test_states_too_small_to_be_moved_come_to_the_step_after_a_checkpoint_was_loaded_to_the_host():
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (400, 3)]
    saved = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    # the meta device stands for the compute device
    optimizer = torch.optim.AdamW([torch.nn.Parameter(parameter.to("meta")) for parameter in parameters])
    offloader = OptimizerStateOffload(min_bytes=1024).apply(optimizer)
    host = torch.device("cpu")
    load_optimizer(optimizer, saved.state_dict(), step_device=torch.device("meta"), state_device=host)
    offloader.to_device(optimizer)
    for states in optimizer.state.values():
        assert {name: value.device.type for name, value in states.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


class Quantised(torch.Tensor):
    """A state in codes that can be copied and moved, and nothing else, as those of torchao's optimizers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        assert func is torch.ops.aten._to_copy.default, func
        return cls(args[0].codes.to(kwargs.get("device"), copy=True))


class Counting(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            new = Quantised(torch.zeros(parameter.shape, dtype=torch.uint8))
            self.state[parameter].setdefault("exp_avg", new).codes.add_(1)


def test_quantised_states_are_away_between_steps_and_keep_their_values():
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = Counting([parameter])
    offloader = OFFLOAD.apply(optimizer)
    within = []
    optimizer.register_step_pre_hook(lambda *_: within.append(offloader.device_bytes(optimizer)))
    optimizer.step()
    optimizer.step()
    assert within == [0, 4000]
    assert (offloader.host_bytes(optimizer), offloader.device_bytes(optimizer)) == (4000, 0)
    assert (optimizer.state[parameter]["exp_avg"].codes == 2).all()


def test_apply_and_remove_are_idempotent_and_remove_brings_the_states_back():
    model = qwen2(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    before = copy.deepcopy(optimizer.state_dict())
    offloader = OFFLOAD.apply(optimizer)
    assert OFFLOAD.apply(optimizer) is offloader
    assert offloader.device_bytes(optimizer) == 0
    OFFLOAD.remove(optimizer)
    OFFLOAD.remove(optimizer)
    assert offloader.host_bytes(optimizer) == 0
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_sharded_states_stay_sharded_and_give_the_same_update():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        results = []
        for offload in (False, True):
            model = fully_shard(qwen2(1), mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if offload:
                offloader = OFFLOAD.apply(optimizer)
            results.append(train(model, optimizer, 2))
        parameter, states = next(iter(optimizer.state.items()))
        assert type(states["exp_avg"]) is type(parameter.data)
        assert states["exp_avg"].placements == parameter.placements
        assert offloader.device_bytes(optimizer) == 0
        for name, value in results[0].items():
            assert torch.equal(value.full_tensor(), results[1][name].full_tensor())
    finally:
        dist.destroy_process_group()
