"""Saved tensors are on the host between forward and backward, come back the same, and leave nothing behind."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from checkpointing_models import MODELS, assert_same, batch, decoder, hidden_bytes, loss_of, qwen2, step
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from verl_ext_sharding.training.checkpointing import Budget, EveryN, Full, Selective, applied
from verl_ext_sharding.training.host_buffers import BlockingTransfer, HostPool, Transfer, transfer_for
from verl_ext_sharding.training.layers import Slot, installed
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.saved_bytes import LiveStorages, SavedTensors

OFFLOAD = ActivationOffload(min_bytes=0)
POLICIES = [None, Full(), EveryN(2), Selective(), Budget(share=0.4)]


class MarkedTransfer(BlockingTransfer):
    """Counts what is copied, and keeps the bytes that stand for host memory apart from the compute device's."""

    def __init__(self):
        self.to_host_bytes = 0
        self.to_device_bytes = 0

    def to_host(self, source, buffer):
        self.to_host_bytes += source.numel()
        return super().to_host(source, buffer)

    def to_device(self, buffer, num_bytes, device):
        self.to_device_bytes += num_bytes
        return super().to_device(buffer, num_bytes, device)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_loss_and_gradients_are_bit_identical_with_every_policy(name, policy):
    model = MODELS[name]()
    reference = step(model, batch(), use_cache=False)
    if policy is not None:
        policy.apply(model)
    offloader = OFFLOAD.apply(model)
    for _ in range(2):
        assert_same(reference, step(model, batch(), use_cache=False))
    assert offloader.pool.total_bytes > 0


def test_what_layers_save_is_on_the_host_and_the_compute_device_holds_none_of_it():
    model, inputs = qwen2(), batch(padded=0)
    with LiveStorages() as made:
        loss = loss_of(model, inputs, use_cache=False)
    with_everything = made.total_bytes()
    with SavedTensors(exclude=model.parameters()) as saved:
        loss = loss_of(model, inputs, use_cache=False)
    saved_bytes = saved.total_bytes()
    offloader = OFFLOAD.apply(model)
    with LiveStorages() as made:
        loss = loss_of(model, inputs, use_cache=False)
    on_device = made.total_bytes() - offloader.pool.in_use_bytes  # host buffers are CPU storages here as well
    layer_bytes = with_everything - on_device
    assert 0.8 * saved_bytes < layer_bytes <= offloader.pool.in_use_bytes < 2 * layer_bytes
    logits = inputs["input_ids"].numel() * 97 * 4
    assert on_device < 4 * logits + 4 * hidden_bytes(inputs)
    loss.backward()
    del loss
    assert offloader.pool.in_use_bytes == 0


def test_with_checkpointing_the_inputs_of_layers_are_what_is_offloaded():
    model, inputs = qwen2(), batch(padded=0)
    offloader = OFFLOAD.apply(model)
    offloader.transfer = MarkedTransfer()
    Full().apply(model)
    loss = loss_of(model, inputs, use_cache=False)
    large = 4 * hidden_bytes(inputs)
    small = offloader.transfer.to_host_bytes - large
    assert 0 <= small < 0.1 * large
    loss.backward()
    assert offloader.transfer.to_device_bytes == offloader.transfer.to_host_bytes


def test_d5_checkpointing_of_transformers_becomes_non_reentrant_and_outside_of_the_offload():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        qwen2(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    offloader = OFFLOAD.apply(model)
    assert applied(model).policy == Full()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "None of the inputs have requires_grad=True"
        loss = loss_of(model, batch(), use_cache=False)
        assert offloader.pool.in_use_bytes >= 4 * hidden_bytes(batch())
        model.zero_grad()
        loss.backward()
    result = loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    OFFLOAD.remove(model)
    assert model.base_model.model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    reference = step(model, batch(), use_cache=False)
    assert result[1]
    assert_same(reference, result, rtol=1e-5)


class Recurrence(torch.autograd.Function):
    """Saves a tuple of tensors and returns one, as the state of a gated delta net does (verl#7472)."""

    @staticmethod
    def forward(ctx, hidden, state, decay):
        ctx.save_for_backward(hidden, state, decay)
        return hidden + decay * state, state * decay + hidden

    @staticmethod
    def backward(ctx, grad_hidden, grad_state):
        _, state, decay = ctx.saved_tensors
        return (
            grad_hidden + grad_state,
            grad_hidden * decay + grad_state * decay,
            (grad_hidden * state + grad_state * state).sum(),
        )


class TupleLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.decay = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden, state=None):
        state = torch.zeros_like(hidden) if state is None else state[0]
        hidden, state = Recurrence.apply(torch.tanh(self.linear(hidden)), state, self.decay)
        return hidden, (state,)


class TupleModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([TupleLayer() for _ in range(4)])

    def forward(self, hidden):
        state = None
        for layer in self.layers:
            hidden, state = layer(hidden, state)
        return hidden.square().sum() + state[0].sum()


@pytest.mark.parametrize("policy", [None, Full()], ids=str)
def test_s5_layers_that_save_and_pass_tuples_train_under_offload(policy):
    model = TupleModel()
    hidden = torch.randn(8, 16)
    model(hidden).backward()
    reference = {name: p.grad.clone() for name, p in model.named_parameters()}
    if policy is not None:
        policy.apply(model)
    offloader = OFFLOAD.apply(model)
    model.zero_grad()
    loss = model(hidden)
    assert offloader.pool.in_use_bytes > 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, reference[name])


def test_a_storage_saved_many_times_is_copied_once():
    class Layer(nn.Module):
        def forward(self, hidden):
            return hidden * hidden.exp() + hidden.view(-1).sin().view_as(hidden) + hidden[:6] ** 3

    layer = Layer()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    offloader = OFFLOAD.apply(model, layers=[layer])
    offloader.transfer = MarkedTransfer()
    hidden = torch.randn(8, 1024, requires_grad=True)
    hidden_copy = hidden * 1.0
    output = layer(hidden_copy[:6].clone().contiguous())
    once = 6 * 1024 * 4
    assert offloader.transfer.to_host_bytes == 2 * once  # the input, and exp's result
    output.sum().backward()
    assert hidden.grad is not None


def test_a_small_view_of_a_large_tensor_does_not_take_the_large_one_along():
    class Layer(nn.Module):
        def forward(self, hidden):
            return hidden[:, :8].sin()

    layer = Layer()
    offloader = OFFLOAD.apply(layer, layers=[layer])
    offloader.transfer = MarkedTransfer()
    hidden = torch.randn(4, 1024, requires_grad=True)
    layer(hidden * 1.0).sum().backward()
    assert offloader.transfer.to_host_bytes == 4 * 8 * 4
    torch.testing.assert_close(hidden.grad[:, :8], hidden[:, :8].cos())


def test_parameters_and_their_views_stay_where_they_are():
    layer = nn.Linear(256, 256)
    offloader = OFFLOAD.apply(layer, layers=[layer])
    offloader.transfer = MarkedTransfer()
    hidden = torch.randn(2, 256, requires_grad=True)
    layer(hidden * 1.0).sum().backward()
    assert offloader.transfer.to_host_bytes == 2 * 256 * 4


def test_the_copies_of_weights_that_autocast_makes_are_not_moved():
    layer = nn.Linear(512, 256)
    offloader = OFFLOAD.apply(layer, layers=[layer])
    offloader.transfer = MarkedTransfer()
    hidden = torch.randn(2, 512, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden * 1.0)
    assert offloader.transfer.to_host_bytes == 2 * 512 * 2
    output.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("tokens", [255, 256, 257])
def test_activations_of_the_shape_of_a_weight_are_moved_as_any_others(tokens, frozen):
    layer = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(not frozen)
    adapter = nn.Parameter(torch.ones(256))
    offloader = OFFLOAD.apply(layer, layers=[layer])
    offloader.transfer = MarkedTransfer()
    with torch.autocast("cpu", torch.bfloat16):
        # LoRA's input: an activation with a gradient, in the compute dtype
        output = layer((torch.randn(tokens, 256) * adapter).bfloat16())
    inputs_of_linears = 0 if frozen else 2
    assert offloader.transfer.to_host_bytes == inputs_of_linears * tokens * 256 * 2
    output.sum().backward()


@pytest.mark.parametrize("made", [True, False], ids=["of others", "the model's first"])
def test_an_activation_of_the_shape_of_a_frozen_weight_is_moved(made):
    class Layer(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden.sin())

    layer = Layer(256, 256).requires_grad_(False)
    offloader = OFFLOAD.apply(layer, layers=[layer])
    offloader.transfer = MarkedTransfer()
    hidden = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden * 1.0 if made else hidden)
    assert offloader.transfer.to_host_bytes == 256 * 256 * 2
    output.sum().backward()


def test_small_tensors_and_tensors_elsewhere_stay():
    model, inputs = qwen2(), batch(padded=0)
    offloader = ActivationOffload(min_bytes=1 << 30).apply(model)
    step(model, inputs, use_cache=False)
    assert offloader.pool.total_bytes == 0
    OFFLOAD.apply(model, device_type="cpu").device_type = "cuda"
    step(model, inputs, use_cache=False)
    assert next(installed(model, Slot.OFFLOAD))[1].offloader.pool.total_bytes == 0


def test_tensor_subclasses_are_left_alone():
    class Layer(nn.Module):
        def forward(self, hidden):
            return hidden.sin()

    layer = Layer()
    offloader = OFFLOAD.apply(layer, layers=[layer])
    hidden = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    layer(hidden).sum().backward()
    assert isinstance(hidden.grad, TwoTensor)
    assert torch.equal(hidden.grad.b, hidden.b.cos())
    assert offloader.pool.total_bytes == 0


class DelayedTransfer(Transfer):
    """A side stream that runs as late as it may: a copy happens when something waits for it or for a later one."""

    pin = False

    def __init__(self):
        self.pending = []
        self.most_waiting_bytes = 0

    def to_host(self, source, buffer):
        reference = weakref.ref(source)

        def copy():
            if reference() is None:
                buffer.fill_(255)  # freed before its copy was waited for: what the host has is NaN
            else:
                buffer[: reference().numel()].copy_(reference())

        self.pending.append((copy, source.numel(), reference))
        alive = sum(num_bytes for _, num_bytes, reference in self.pending if reference() is not None)
        self.most_waiting_bytes = max(self.most_waiting_bytes, alive)
        return len(self.pending)

    def to_device(self, buffer, num_bytes, device):
        target = torch.full((num_bytes,), 255, dtype=torch.uint8)  # bytes that were not waited for are NaN
        self.pending.append((lambda: target.copy_(buffer[:num_bytes]), 0, lambda: None))
        return target, len(self.pending)

    def wait(self, event, device):
        if event is None:
            return
        for index, (copy, num_bytes, reference) in enumerate(self.pending[:event]):
            if copy is not None:
                copy()
                self.pending[index] = (None, num_bytes, reference)


@pytest.mark.parametrize("policy", [None, Full(), EveryN(2), Selective()], ids=str)
def test_copies_that_run_late_are_waited_for_and_at_most_two_layers_are_on_the_device(policy):
    model, inputs = qwen2(8), batch(padded=0)
    reference = step(model, inputs, use_cache=False)
    if policy is not None:
        policy.apply(model)
    offloader = OFFLOAD.apply(model)
    step(model, inputs, use_cache=False)
    all_layers = offloader.pool.total_bytes
    for _ in range(2):
        offloader.transfer = DelayedTransfer()
        assert_same(reference, step(model, inputs, use_cache=False))
        assert offloader.transfer.most_waiting_bytes <= 2.5 / 8 * all_layers
        assert offloader.transfer.most_waiting_bytes > 0


class Chain(nn.Module):
    """Layers that share no saved tensor: each copy is waited for by its own layer or by none."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, hidden):
            return torch.tanh(self.linear(hidden)) * 1.5

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Chain.Layer() for _ in range(4)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().sum()


def test_a_kept_graph_can_be_run_again_though_copies_run_late():
    model, hidden = Chain(), torch.randn(8, 16)
    model(hidden).backward()
    reference = [p.grad.clone() for p in model.parameters()]
    OFFLOAD.apply(model).transfer = DelayedTransfer()
    model.zero_grad()
    loss = model(hidden)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), reference, strict=True))


def test_the_layer_before_is_fetched_while_a_layer_runs_backward():
    model, inputs = qwen2(3), batch(padded=0)
    Full().apply(model)
    offloader = OFFLOAD.apply(model)
    loss = loss_of(model, inputs, use_cache=False)
    groups = []
    group = offloader._last
    while group is not None:
        groups.append(group)
        group = group.previous
    order = []
    for index, layer in enumerate(decoder(model)):
        layer.mlp.register_forward_pre_hook(
            lambda *_, index=index: order.append(
                (index, [any(r.on_device is not None for r in g.records if not r.shared) for g in reversed(groups)])
            )
        )
    loss.backward()
    assert order == [(2, [False, True, True]), (1, [True, True, False]), (0, [True, False, False])]


def test_lazily_conjugated_and_broadcast_tensors_come_back_the_same():
    class Layer(nn.Module):
        def forward(self, hidden):
            wave = torch.complex(hidden, hidden.cos())
            return (wave.conj() * wave.sin()).real + hidden[:1].expand(4, 8).exp() * hidden

    layer = Layer()
    hidden = torch.randn(4, 8, requires_grad=True)
    layer(hidden * 1.0).sum().backward()
    reference, hidden.grad = hidden.grad, None
    OFFLOAD.apply(layer, layers=[layer])
    layer(hidden * 1.0).sum().backward()
    assert torch.equal(hidden.grad, reference)


def test_a_graph_that_is_kept_can_be_run_backward_again():
    model, inputs = qwen2(), batch()
    reference = step(model, inputs, use_cache=False)
    offloader = OFFLOAD.apply(model)
    model.zero_grad()
    loss = loss_of(model, inputs, use_cache=False)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same(reference, (loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert offloader.pool.in_use_bytes == 0


def test_two_forward_passes_before_their_backward_passes_stay_apart():
    model = qwen2()
    first, second = batch(24, seed=1), batch(40, seed=2)
    model.zero_grad()
    (loss_of(model, first, use_cache=False) + loss_of(model, second, use_cache=False)).backward()
    reference = {name: p.grad.clone() for name, p in model.named_parameters()}
    OFFLOAD.apply(model)
    model.zero_grad()
    (loss_of(model, first, use_cache=False) + loss_of(model, second, use_cache=False)).backward()
    assert all(torch.equal(p.grad, reference[name]) for name, p in model.named_parameters())


def test_without_gradients_nothing_is_moved():
    model = qwen2()
    offloader = OFFLOAD.apply(model)
    with torch.no_grad():
        model(**batch(), use_cache=False)
    assert offloader.pool.total_bytes == 0


def test_host_memory_does_not_grow_over_steps_and_lengths_and_is_freed_on_remove():
    model = qwen2()
    offloader = OFFLOAD.apply(model)
    peaks = []
    for n in (40, 37, 120, 39, 61, 118, 40, 90, 23, 120, 119, 45):
        loss = loss_of(model, batch(n), use_cache=False)
        peaks.append(offloader.pool.in_use_bytes)
        loss.backward()
        assert offloader.pool.in_use_bytes == 0
        assert offloader.pool.total_bytes <= max(peaks)
    OFFLOAD.remove(model)
    assert offloader.pool.total_bytes == 0


def test_buffers_in_use_at_remove_are_freed_when_their_graph_goes():
    model, inputs = qwen2(), batch()
    reference = step(model, inputs, use_cache=False)
    offloader = OFFLOAD.apply(model)
    model.zero_grad()
    loss = loss_of(model, inputs, use_cache=False)
    OFFLOAD.remove(model)
    assert offloader.pool.total_bytes == offloader.pool.in_use_bytes > 0
    loss.backward()
    assert_same(reference, (loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert offloader.pool.total_bytes == 0


def test_a_graph_that_never_runs_backward_gives_its_buffers_back():
    model = qwen2()
    offloader = OFFLOAD.apply(model)
    loss = loss_of(model, batch(), use_cache=False)
    assert offloader.pool.in_use_bytes > 0
    del loss
    gc.collect()
    assert offloader.pool.in_use_bytes == 0


def test_tensors_that_stay_on_the_device_are_freed_with_a_graph_that_never_runs_backward():
    model = qwen2()
    ActivationOffload(min_bytes=1 << 30).apply(model)
    with LiveStorages() as made:
        loss = loss_of(model, batch(), use_cache=False)
    assert made.total_bytes() > 10 * hidden_bytes(batch())
    del loss
    gc.collect()
    assert made.total_bytes() < hidden_bytes(batch())


@pytest.mark.parametrize("order", ["offload first", "policy first"])
def test_apply_and_remove_in_any_order_leave_the_layers_as_they_were(order):
    model = qwen2()
    before = [dict(layer.__dict__) for layer in decoder(model)]
    policy = Full()
    for one in [OFFLOAD, policy] if order == "offload first" else [policy, OFFLOAD]:
        one.apply(model)
    assert OFFLOAD.apply(model) is OFFLOAD.apply(model)
    loss_of(model, batch(), use_cache=False).backward()
    for one in (OFFLOAD, OFFLOAD, policy, policy):
        one.remove(model)
    for layer, attributes in zip(decoder(model), before, strict=True):
        assert layer.__dict__.keys() == attributes.keys()
        assert all(layer.__dict__[name] is value for name, value in attributes.items())


def test_a_policy_of_the_user_survives_the_removal_of_the_offload():
    model = qwen2()
    Full().apply(model)
    OFFLOAD.apply(model)
    Selective().apply(model)
    OFFLOAD.remove(model)
    assert applied(model).policy == Selective()


def test_a_pool_reuses_buffers_and_never_exceeds_the_most_that_was_in_use():
    pool = HostPool(pin=False)
    small = [pool.acquire(5000) for _ in range(8)]
    most = pool.total_bytes
    for buffer in small:
        pool.release(buffer)
    again = pool.acquire(8000)
    assert any(again is buffer for buffer in small)
    pool.release(again)
    large = pool.acquire(40_000)
    assert large.numel() == 65536
    assert pool.total_bytes <= most
    pool.release(large)
    pool.close()
    assert pool.total_bytes == 0


def test_layers_on_the_cpu_copy_at_once():
    assert isinstance(transfer_for("cpu"), BlockingTransfer)
