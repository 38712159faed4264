"""Parameters that are shared stay shared, on the meta device and off it."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from verl_ext_sharding.engines.meta_init import empty_parameters, reserve, share, shared_names  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, tied=True, device="meta"):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4, device=device)
        self.layer = torch.nn.Linear(4, 4, device=device)
        self.head = torch.nn.Linear(4, 8, bias=False, device=device)
        if tied:
            self.head.weight = self.embedding.weight


PAIR = [("embedding.weight", "head.weight")]


def test_shared_names_come_in_the_order_of_the_module():
    assert shared_names(Model()) == PAIR
    assert shared_names(Model(tied=False)) == []


@pytest.mark.parametrize("groups", [PAIR, []])
@pytest.mark.parametrize("tied", [True, False])
def test_a_module_follows_the_one_whose_weights_were_read(tied, groups):
    module = Model(tied=tied)
    share(module, groups)
    assert shared_names(module) == groups
    assert module.head.weight.shape == (8, 4)


def test_a_parameter_with_values_is_never_split():
    with pytest.raises(AssertionError, match="shared here and not where"):
        share(Model(device="cpu"), [])


def test_memory_is_reserved_for_shared_parameters_alone_and_they_stay_one():
    module = Model()
    reserve(module, shared_names(module))
    assert shared_names(module) == PAIR
    assert (module.head.weight.is_meta, module.layer.weight.is_meta) == (False, True)


def test_what_has_memory_stays_shared_when_each_module_is_given_memory_of_its_own():
    module = Model()
    reserve(module, shared_names(module))
    for part in module.children():
        part.to_empty(device="cpu", recurse=False)  # as verl's init function for FSDP1 does
    assert shared_names(module) == PAIR


def test_inside_parameters_are_empty_buffers_real_and_equality_is_not_looked_at():
    with empty_parameters():
        linear = torch.nn.Linear(2, 2)
        norm = torch.nn.BatchNorm1d(2)
        assert torch.equal(linear.weight, torch.nn.Linear(2, 2).weight)
        assert not torch.equal(norm.running_var, norm.running_mean)
        assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
    assert linear.weight.is_meta
    assert not norm.running_mean.is_meta


@pytest.mark.parametrize("before", [None, "0"])
def test_outside_everything_is_as_before(before, monkeypatch):
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
    register = torch.nn.Module.register_parameter
    with pytest.raises(RuntimeError), empty_parameters():
        raise RuntimeError
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before
    assert torch.nn.Module.register_parameter is register
