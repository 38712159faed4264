"""Clipping where gradients lie on the host: the norm is that of fp64, the rest as torch does it."""

from __future__ import annotations

import pytest
import torch

from verl_ext_sharding.training import gradient_norm


def parameters(*gradients):
    made = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.clone()
    return made


def test_the_norm_of_many_elements_is_exact_where_torchs_is_not():
    torch.manual_seed(0)
    gradient = torch.randn(1 << 24) * 1e-4
    exact = torch.linalg.vector_norm(gradient.double()).item()
    assert gradient_norm.clip(parameters(gradient), 1.0) == pytest.approx(exact, rel=1e-6)
    torchs = torch.nn.utils.clip_grad_norm_(parameters(gradient), 1.0).item()
    assert abs(torchs / exact - 1) > 1e-5, "torch is exact now: this module can go"


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_are_scaled_as_torch_scales_them(max_norm):
    torch.manual_seed(0)
    gradients = [torch.randn(7, 5), torch.randn(3).to(torch.bfloat16)]
    ours, torchs = parameters(*gradients), parameters(*gradients)
    norm = gradient_norm.clip(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(torchs, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-3)
    for mine, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=0)


def test_parameters_without_a_gradient_are_skipped():
    assert gradient_norm.clip([*parameters(torch.full((4,), 3.0)), torch.nn.Parameter(torch.ones(2))], 1.0) == 6.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_told_and_left(value):
    (parameter,) = parameters(torch.tensor([1.0, value]))
    assert not torch.isfinite(torch.tensor(gradient_norm.clip([parameter], 1.0)))
    assert parameter.grad[0] == 1.0


@pytest.mark.parametrize("given", [[], [torch.nn.Parameter(torch.ones(2))]], ids=["nothing", "no gradient"])
def test_without_any_gradient_the_norm_is_0_as_torchs(given):
    assert gradient_norm.clip(given, 1.0) == torch.nn.utils.clip_grad_norm_(given, 1.0) == 0.0
