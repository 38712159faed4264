"""An engine's log-probs and entropy take the role's way, whatever other roles of the process do and whenever it runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
import verl.utils.torch_functional as verl_functional
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.config.schema import ActorConfig, RefConfig
from verl_ext_sharding.config.translate import role_changes
from verl_ext_sharding.engines import measured
from verl_ext_sharding.engines.cpu import CpuEngineWithLMHead
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.patch_points import logprobs as patch

LENGTHS = (4, 2)
VOCABULARY = 50


def engine(logits, **settings):
    made = object.__new__(CpuEngineWithLMHead)
    given = {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False, "use_torch_compile": False}
    made.engine_config = SimpleNamespace(**given | settings)
    made.model_config = SimpleNamespace(use_fused_kernels=False)
    made.measures, made.role, made.applied, made._fused = RoleMeasures(logits=logits), "ref", {}, False
    made._choose_entropy()
    return made


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY))


# Which key is whose


@pytest.mark.parametrize(("role", "config", "sets"), [("actor", ActorConfig, True), ("ref", RefConfig, False)])
def test_the_actor_alone_switches_verls_fused_kernels_off_for_all_roles(role, config, sets):
    facts = SimpleNamespace(engines={role: SimpleNamespace(strategy="fsdp2")}, ref_in_actor=False)
    keys = [change.key for change in role_changes(role, config(logits="chunked"), facts)]
    assert ("actor_rollout_ref.model.use_fused_kernels" in keys) is sets


@pytest.mark.parametrize("logits", ["auto", "fused", "chunked", "full"])
def test_a_reference_has_its_logits_where_verls_fused_kernels_of_the_actor_replace_the_forward_of_its_class(
    logits, monkeypatch
):
    from verl.models.transformers.dense_common import forward_with_torch_backend

    reference, ids = model(), torch.arange(8)[None]
    expected = reference(input_ids=ids).logits
    engine(logits)._apply_logits(reference, logits)
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward_with_torch_backend)
    assert torch.equal(reference(input_ids=ids, use_cache=False).logits, expected)


def test_an_error_while_the_model_is_built_names_the_engines_role(monkeypatch):
    fields = {"expected": "a", "found": "b", "consequence": "the run stops"}
    error = ConfigError("x", **fields, remedy="set sharding.roles.<role>.logits=chunked")

    def fails(self):
        raise error

    monkeypatch.setattr(FSDPEngine, "initialize", fails)
    with pytest.raises(ConfigError, match=r"set sharding\.roles\.ref\.logits=chunked"):
        engine("fused").initialize()


@pytest.mark.parametrize(
    ("on_ray", "ulysses", "padding"),
    [
        (True, "actor_rollout_ref.ref.ulysses_sequence_parallel_size", "actor_rollout_ref.model.use_remove_padding"),
        (False, "engine.ulysses_sequence_parallel_size", "model.use_remove_padding"),
    ],
)
def test_errors_of_attention_name_the_keys_of_the_trainer_that_runs(on_ray, ulysses, padding, monkeypatch):
    monkeypatch.setattr(measured.spec, "current", lambda: SimpleNamespace(on_ray=on_ray))
    assert engine(None)._attention_keys() == {"ulysses_key": ulysses, "padding_key": padding}


@pytest.mark.parametrize(("per_step", "moved"), [(True, False), (False, True)])
def test_optimizer_states_that_come_for_the_step_alone_stay_where_they_are_when_the_engine_is_moved(
    per_step, moved, monkeypatch
):
    asked = {}
    monkeypatch.setattr(FSDPEngine, "to", lambda self, **given: asked.update(given))
    made = engine(None)
    made.measures = RoleMeasures(optimizer_per_step=per_step)
    made.to("cpu")
    assert asked == {"device": "cpu", "model": True, "optimizer": moved, "grad": True}


# Entropy that is computed again in the backward pass


@pytest.fixture
def stock_calls(monkeypatch):
    """Calls of verl's own entropy, behind the function that stands in its place."""
    calls, stock = [], verl_functional.entropy_from_logits

    def counted(logits):
        calls.append(logits.shape)
        return stock(logits)

    monkeypatch.setattr(patch, "original", lambda _: counted)
    monkeypatch.setattr(verl_functional, "entropy_from_logits", patch.entropy_from_logits)
    return calls


def padded_entropy(made, weight):
    """Entropy as verl's engine has it of a padded batch, with the gradient of its sum."""
    ids = torch.nested.nested_tensor([torch.arange(length) for length in LENGTHS], layout=torch.jagged)
    flags = {"use_remove_padding": False, "calculate_entropy": True, "distillation_only": True}
    batch = get_tensordict({"input_ids": ids}, non_tensor_dict=flags)
    arguments = {"temperature": torch.ones(2), "input_ids_rmpad_rolled": ids.values(), "temperature_is_one": True}
    weight.grad = None
    with patch.logits_path(made._logits_path(batch)):
        output = SimpleNamespace(logits=weight * 1.0)
        entropy = made.prepare_model_outputs(output, arguments, batch, None)["entropy"]
    entropy.values().sum().backward()
    return entropy.values().detach(), weight.grad.clone()


@pytest.mark.parametrize(("logits", "num_stock"), [("chunked", 0), ("full", 2), (None, 2)])
def test_a_checkpointed_entropy_of_padded_batches_is_computed_one_way_in_both_passes(logits, num_stock, stock_calls):
    weight = torch.randn(2, 4, VOCABULARY, requires_grad=True)
    expected = padded_entropy(engine("full"), weight)
    stock_calls.clear()
    found = padded_entropy(engine(logits, entropy_checkpointing=True), weight)
    assert len(stock_calls) == num_stock
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Logits that the loss reads beside the log-probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_leave_the_logits_to_a_chunked_distillation_loss_of_the_same_batch(dtype):
    from verl.trainer.distillation.fsdp.losses import _chunked_topk_log_probs

    batch = get_tensordict({"input_ids": torch.zeros(2, 2)}, non_tensor_dict={"distillation_use_topk": True})
    weight = torch.randn(6, VOCABULARY, dtype=dtype, requires_grad=True)
    labels, topk = torch.arange(6), torch.arange(12).view(1, 6, 2)
    gradients = []
    for logprobs in (verl_functional.logprobs_from_logits_naive, patch.logprobs_from_logits):
        weight.grad = None
        with patch.logits_path(engine("chunked")._logits_path(batch)):
            logits = weight * 1.0
            distilled = _chunked_topk_log_probs(logits[None], topk)
            loss = distilled.float().sum() + logprobs(logits, labels).float().sum()
        loss.backward()
        gradients.append(weight.grad.float())
    tolerance = 1e-6 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)
