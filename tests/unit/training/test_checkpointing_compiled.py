"""Compiled budgets: same numbers, fewer bytes, no recompilation for new lengths, and a way out where compiling fails."""

from __future__ import annotations

import logging

import pytest
import torch
from checkpointing_models import CODEGEN, SHAPE, assert_same, batch, decoder, needs_compiler, packed, qwen2, step
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from verl_ext_sharding.training import compile_layers
from verl_ext_sharding.training.checkpointing import Auto, Budget, Full, Off, applied, recompiles, remove
from verl_ext_sharding.training.compile_layers import BudgetBackend, CompiledVariant, compile_obstacle
from verl_ext_sharding.training.saved_bytes import SavedTensors

LENGTHS = (40, 56, 72)


def saved_bytes(model, inputs) -> int:
    with SavedTensors(exclude=model.parameters()) as saved:
        logits = model(**inputs, use_cache=False).logits
    assert logits.requires_grad
    return saved.total_bytes()


@pytest.fixture(scope="module")
def no_codegen():
    """Traces, partitions by the budget and guards as ever, and runs the graphs without generating C++: seconds less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CODEGEN, aot_eager_decomp_partition)
        yield


@pytest.fixture(scope="module")
def compiled(no_codegen):
    """Two models with budgets of their own, run at three packed lengths: their numbers, bytes and recompilations."""
    models = {share: qwen2(2) for share in (0.1, 1.0)}
    references = {n: step(models[0.1], packed(n), use_cache=False) for n in LENGTHS}
    everything = {n: saved_bytes(models[0.1], packed(n)) for n in LENGTHS}
    for share, model in models.items():
        Budget(share=share, compile=True).apply(model)
    results, kept = {}, {}
    for n in LENGTHS:
        for share, model in models.items():
            results[share, n] = step(model, packed(n), use_cache=False)
            kept[share, n] = saved_bytes(model, packed(n))
    yield models, references, results, everything, kept
    for model in models.values():
        remove(model)


@needs_compiler
def test_generated_kernels_have_the_loss_and_gradients_of_eager_layers_and_serve_all_lengths():
    model = qwen2(2)
    references = {n: step(model, packed(n), use_cache=False) for n in LENGTHS}
    Budget(share=0.1, compile=True).apply(model)
    for n in LENGTHS:
        assert_same(references[n], step(model, packed(n), use_cache=False), rtol=1e-5, atol=1e-6)
    assert recompiles(model) == 0
    assert applied(model).reason is None


def test_compiled_layers_have_the_loss_and_gradients_of_eager_ones(compiled):
    _, references, results, _, _ = compiled
    for (_, n), result in results.items():
        assert_same(references[n], result, rtol=1e-5, atol=1e-6)


def test_two_models_of_one_process_keep_their_own_budgets(compiled):
    _, _, _, everything, kept = compiled
    for n in LENGTHS:
        outside = n * (SHAPE["vocab_size"] * 2 + SHAPE["hidden_size"] * 4) * 4  # logits, embeddings, last norm
        layers = 2 * n * SHAPE["hidden_size"] * 4
        assert kept[0.1, n] < layers + outside + 0.1 * everything[n]
        assert kept[0.1, n] < 0.5 * kept[1.0, n]
        assert kept[1.0, n] <= everything[n]
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_new_packed_lengths_are_not_compiled_anew(compiled):
    models, _, _, _, _ = compiled
    for model in models.values():
        before = recompiles(model)
        for n in (33, 47, 91):
            step(model, packed(n), use_cache=False)
        assert recompiles(model) == before == 0


def test_padded_batches_and_runs_without_gradients_compile_once_more_and_no_more(compiled):
    model = compiled[0][0.1]
    for n in LENGTHS:
        step(model, batch(n), use_cache=False)
    once = recompiles(model)
    assert once > 0
    with torch.no_grad():
        model(**packed(40), use_cache=False)
        after = recompiles(model)
        for n in (34, 63):
            model(**packed(n), use_cache=False)
    step(model, batch(90, num_rows=3), use_cache=False)
    assert recompiles(model) == after <= once + 1


def _cut(model):
    """Breaks the compiler's trace before the MLP of each layer."""
    for layer in model.model.layers:
        mlp = layer.mlp.forward

        def forward(hidden, mlp=mlp):
            torch._dynamo.graph_break()
            return mlp(hidden)

        layer.mlp.forward = forward


@needs_compiler
@pytest.mark.parametrize(("share", "eager"), [(0.0, True), (0.7, False)])
def test_layers_that_the_compiler_cuts_run_eagerly_where_the_pieces_keep_too_much(share, eager, no_codegen, caplog):
    model = qwen2(2)
    _cut(model)
    everything, reference = saved_bytes(model, packed(40)), step(model, packed(40), use_cache=False)
    Budget(share=share, compile=True).apply(model)
    with caplog.at_level(logging.INFO):
        assert_same(reference, step(model, packed(40), use_cache=False), rtol=1e-5, atol=1e-6)
    assert "the compiler cuts a layer into" in caplog.text
    assert ("pieces, which keep" in (applied(model).reason or "")) is eager
    assert_same(reference, step(model, packed(40), use_cache=False), rtol=1e-5, atol=1e-6)
    outside = 40 * (SHAPE["vocab_size"] * 2 + SHAPE["hidden_size"] * 4) * 4
    assert saved_bytes(model, packed(40)) <= share * everything + outside + 2 * 40 * SHAPE["hidden_size"] * 4
    remove(model)


def test_generation_with_a_cache_is_not_compiled(compiled):
    model = compiled[0][0.1]
    before = recompiles(model)
    model.eval().generate(**packed(8), attention_mask=torch.ones(1, 8), max_new_tokens=4, do_sample=False)
    model.train()
    assert recompiles(model) == before


def test_inputs_past_the_recompilation_limit_run_within_the_bound(no_codegen, caplog):
    model = qwen2(2)
    Full().apply(model)
    least = saved_bytes(model, batch(24, padded=2))
    reference = step(model, batch(24, padded=2), use_cache=False)
    Budget(share=0.1, compile=True).apply(model)
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING, "verl_ext_sharding"):
        step(model, packed(24), use_cache=False)
        assert_same(reference, step(model, batch(24, padded=2), use_cache=False), rtol=1e-5, atol=1e-6)
        assert saved_bytes(model, batch(24, padded=2)) <= 1.5 * least
    assert sum("recompilation limit" in record.message for record in caplog.records) == 1
    assert applied(model).reason is None


def test_a_byte_budget_mixes_compiled_variants_and_holds_for_every_length(no_codegen):
    model = qwen2(6)
    inputs = {n: packed(n) for n in (32, 64, 128)}
    Full().apply(model)
    floor = {n: saved_bytes(model, inputs[n]) for n in inputs}
    Off().apply(model)
    everything = {n: saved_bytes(model, inputs[n]) for n in inputs}
    budget = 0.4 * (everything[128] - floor[128])
    Budget(kept_bytes=int(budget), compile=True).apply(model)
    hidden = {n: 6 * n * SHAPE["hidden_size"] * 4 for n in inputs}
    kept = {n: saved_bytes(model, inputs[n]) - floor[n] + hidden[n] for n in (128, 64, 32)}
    assert all(num_bytes <= budget for num_bytes in kept.values())
    assert kept[128] > 0.6 * budget
    assert kept[64] > 0.6 * kept[128]  # half the tokens, and still little is recomputed


def broken(self, graph, inputs, **options):
    raise RuntimeError("no compiler today")


@pytest.mark.parametrize("policy", [Auto(), Budget(share=0.2, compile=True)], ids=str)
def test_a_failing_compilation_falls_back_within_the_bound_and_says_so_once(policy, monkeypatch, caplog):
    monkeypatch.setattr(BudgetBackend, "__call__", broken)
    monkeypatch.setattr("verl_ext_sharding.training.checkpointing.compile_obstacle", lambda device_type: None)
    model, inputs = qwen2(), batch(padded=0)
    reference = step(model, inputs, use_cache=False)
    everything = saved_bytes(model, inputs)
    policy.apply(model, device_type="cuda")
    with caplog.at_level(logging.WARNING, "verl_ext_sharding"):
        assert_same(reference, step(model, inputs, use_cache=False))
        step(model, inputs, use_cache=False)
    assert saved_bytes(model, inputs) < 0.4 * everything
    assert "no compiler today" in applied(model).reason
    assert sum("no compiler today" in record.message for record in caplog.records) == 1


def test_an_error_of_the_model_itself_is_raised_and_does_not_end_compilation(monkeypatch):
    model = qwen2(2)
    Budget(share=0.2, compile=True).apply(model)

    def fails(*args, **kwargs):
        raise ZeroDivisionError("the model's own")

    monkeypatch.setattr(CompiledVariant, "__call__", fails)
    monkeypatch.setattr(decoder(model)[0].mlp, "forward", fails)
    with pytest.raises(ZeroDivisionError):
        step(model, packed(16), use_cache=False)
    assert applied(model).reason is None


def test_running_out_of_memory_is_no_reason_to_run_eagerly(monkeypatch):
    model = qwen2(2)
    Budget(share=0.2, compile=True).apply(model)

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(CompiledVariant, "__call__", fails)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, packed(16), use_cache=False)
    assert applied(model).reason is None


def test_layers_that_liger_patched_are_not_compiled(monkeypatch):
    monkeypatch.setattr("verl_ext_sharding.training.checkpointing.compile_obstacle", lambda device_type: None)

    def forward(self, hidden):
        return type(self).forward(self, hidden)

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    model = qwen2(2)
    for policy in (Auto(), Budget(share=0.2)):
        assert "Liger" not in (policy.apply(model, device_type="cuda").reason or "")
    norm = decoder(model)[1].input_layernorm
    norm.forward = forward.__get__(norm)
    remove(model)
    for policy in (Auto(), Budget(share=0.2)):
        assert "Liger" in policy.apply(model, device_type="cuda").reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("torch.__version__", "2.5.1"), "older than 2.6"),
        (("torch._dynamo.is_dynamo_supported", lambda: False), "does not support"),
        (("shutil.which", lambda name: None), "compiler"),
    ],
)
def test_each_obstacle_to_compiling_is_named(change, said, monkeypatch):
    monkeypatch.setattr(*change)
    assert said in compile_obstacle.__wrapped__("cpu")


def test_a_switched_off_compiler_is_an_obstacle(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert "switched off" in compile_obstacle.__wrapped__("cpu")


def test_missing_python_headers_are_an_obstacle_on_cuda(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "triton", type(compile_layers)("triton"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "Python headers" in compile_obstacle.__wrapped__("cuda")
    (tmp_path / "Python.h").touch()
    assert compile_obstacle.__wrapped__("cuda") is None
