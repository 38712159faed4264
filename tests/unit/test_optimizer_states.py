"""States of an optimizer come to where the run keeps them; on a CPU, the meta device stands for the other one."""

import pytest

torch = pytest.importorskip("torch")

from verl_ext_sharding.engines.optimizer_states import load_optimizer  # noqa: E402

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def trained(optimizer_class=torch.optim.AdamW, dtype=torch.float32, **settings):
    """An optimizer after one step, and what it saves."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2, dtype=dtype)) for _ in range(2)]
    optimizer = optimizer_class(parameters, lr=0.1, **settings)
    step(optimizer)
    return optimizer, optimizer.state_dict()


def step(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def fresh(optimizer):
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    return type(optimizer)(parameters, lr=0.5)


def tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_step_after_it_is_the_step_after_load_state_dict(optimizer_class):
    source, saved = trained(optimizer_class, **({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}))
    ours, torchs = fresh(source), fresh(source)
    load_optimizer(ours, saved, step_device=CPU, state_device=CPU)
    torchs.load_state_dict(saved)
    for optimizer in (ours, torchs):
        step(optimizer)
    for one, other in zip(ours.param_groups[0]["params"], torchs.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
    assert ours.param_groups[0]["lr"] == 0.1


def test_states_go_to_their_device_and_not_to_that_of_the_parameters():
    source, saved = trained()
    optimizer = fresh(source)
    load_optimizer(optimizer, saved, step_device=CPU, state_device=OTHER)
    for state in optimizer.state.values():
        assert (state["exp_avg"].device, state["exp_avg_sq"].device) == (OTHER, OTHER)


@pytest.mark.parametrize(("fused", "device"), [(False, CPU), (True, OTHER)])
def test_step_counters_are_where_the_optimizer_looks_for_them(fused, device):
    source, saved = trained()
    saved["param_groups"][0]["fused"] = fused
    optimizer = fresh(source)
    load_optimizer(optimizer, saved, step_device=OTHER, state_device=OTHER)
    assert {state["step"].device for state in optimizer.state.values()} == {device}


def test_states_take_the_dtype_of_the_parameters_and_step_counters_keep_theirs():
    source, saved = trained(dtype=torch.bfloat16)
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].float()
    optimizer = fresh(source)
    load_optimizer(optimizer, saved, step_device=CPU, state_device=CPU)
    for state in optimizer.state.values():
        assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)


def test_nothing_that_was_loaded_is_kept():
    source, saved = trained()
    optimizer = fresh(source)
    load_optimizer(optimizer, saved, step_device=CPU, state_device=CPU)
    loaded = {value.data_ptr() for state in saved["state"].values() for value in state.values()}
    assert len(tensors(optimizer)) == 6
    assert not loaded & {value.data_ptr() for value in tensors(optimizer)}


def test_states_from_before_are_gone_when_the_new_ones_come():
    source, saved = trained()
    seen = []
    source.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(len(state["state"])))
    load_optimizer(source, saved, step_device=CPU, state_device=CPU)
    assert seen == [0]
    assert len(source.state) == 2


def test_hooks_after_loading_see_the_states_and_ours_is_taken_away():
    source, saved = trained()
    optimizer, seen = fresh(source), []
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(len(tensors(loaded))))
    load_optimizer(optimizer, saved, step_device=CPU, state_device=CPU)
    optimizer.load_state_dict({**saved, "state": {}})
    assert seen == [6, 0]


def test_an_optimizer_with_a_way_of_its_own_to_load_goes_that_way():
    class Own(torch.optim.AdamW):
        calls = 0

        def load_state_dict(self, state_dict):
            self.calls += 1
            super().load_state_dict(state_dict)

    source, saved = trained(Own)
    optimizer = fresh(source)
    load_optimizer(optimizer, saved, step_device=CPU, state_device=OTHER)
    assert optimizer.calls == 1
    assert {state["exp_avg"].device for state in optimizer.state.values()} == {OTHER}


def test_a_file_with_other_parameters_is_refused():
    source, saved = trained()
    saved["param_groups"][0]["params"].append(2)
    with pytest.raises(ValueError, match="parameter group"):
        load_optimizer(fresh(source), saved, step_device=CPU, state_device=CPU)
