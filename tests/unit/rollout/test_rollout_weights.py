import asyncio

import pytest
import torch
from tiny_models import llama, mamba, moe, prompt, qwen2, save, sliding

from verl_ext_sharding.rollout import memory
from verl_ext_sharding.rollout.modeling import build, host
from verl_ext_sharding.rollout.requests import RolloutError
from verl_ext_sharding.rollout.settings import ModelSpec
from verl_ext_sharding.rollout.transport import WeightReceiver, send_weights
from verl_ext_sharding.rollout.weights import WeightLoader, WeightSyncError

CPU = torch.device("cpu")
MODELS = {"tied": qwen2, "untied": llama, "experts": moe, "sliding": lambda seed=0: sliding(window=8, seed=seed)}
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class LocalEndpoint:
    """The server's side in this process. A bucket is overwritten once `load` has returned, as the sender may."""

    def __init__(self, model, *, fail_at=None):
        self.model, self.fail_at = model, fail_at
        self.bucket_sizes, self.finished, self.cancelled = [], False, False

    async def begin(self, handle, proof):
        self._loader = WeightLoader(self.model)
        self._receiver = WeightReceiver(self._loader, CPU, handle, proof)
        return self._receiver.shares_memory

    def load(self, pieces, host_bucket):
        self.bucket_sizes.append(host_bucket.numel())
        copy = host_bucket.clone().numpy()
        copy.flags.writeable = False  # as Ray's object store gives it

        async def later():
            if len(self.bucket_sizes) == self.fail_at:
                raise OSError("the server is gone")
            self._receiver.load(pieces, copy)

        return later()

    async def finish(self):
        self._loader.finish()
        self.finished = True

    async def cancel(self):
        self.cancelled = True
        if self.fail_at:
            raise ConnectionError("the server does not hear that the update failed")


def _send(weights, endpoint, bucket_bytes=1 << 20):
    asyncio.run(send_weights(weights, endpoint, bucket_bytes=bucket_bytes, device=CPU))


def _one_by_one(model):
    """The state dict with fused experts taken apart, one tensor an expert, as verl sends them."""
    for name, tensor in model.state_dict().items():
        base, _, fused = name.rpartition(".")
        if not base.endswith(".experts"):
            yield name, tensor
            continue
        parts = EXPERT_PARTS[fused]
        for expert, whole in enumerate(tensor):
            for part, piece in zip(parts, whole.chunk(len(parts)), strict=True):
                yield f"{base}.{expert}.{part}.weight", piece


def _empty(tmp_path, model, dtype="float32"):
    """The same architecture as a server builds it before its first update."""
    return build(ModelSpec(path=save(model, tmp_path), dtype=dtype), CPU)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_built_without_weights_equals_the_trainers_after_an_update(kind, tmp_path):
    trained = MODELS[kind](seed=3)
    hosted = _empty(tmp_path, MODELS[kind](seed=1))
    hosted.allocate()
    endpoint = LocalEndpoint(hosted.model)
    _send(_one_by_one(trained), endpoint)
    ids = torch.tensor([prompt(20)])
    assert endpoint.finished
    assert torch.equal(hosted.model(input_ids=ids).logits, trained(input_ids=ids).logits)


@pytest.mark.parametrize("bucket_bytes", [16, 100, 4096, 1 << 20])
def test_tensors_larger_than_a_bucket_are_split_and_whole_again(bucket_bytes):
    trained, model = qwen2(seed=3), qwen2(seed=1)
    endpoint = LocalEndpoint(model)
    _send(trained.state_dict().items(), endpoint, bucket_bytes)
    assert max(endpoint.bucket_sizes) <= bucket_bytes
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_dtypes_are_converted_to_the_servers(tmp_path):
    trained = qwen2(seed=3)
    hosted = _empty(tmp_path, trained, dtype="bfloat16")
    hosted.allocate()
    _send(trained.state_dict().items(), LocalEndpoint(hosted.model), 1000)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(hosted.model.state_dict()[name], tensor.bfloat16())


def test_tensors_that_are_not_contiguous_arrive_right():
    trained, model = llama(seed=3), llama(seed=1)
    _send(
        (
            (name, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor)
            for name, tensor in trained.state_dict().items()
        ),
        LocalEndpoint(model),
        512,
    )
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_wrapper_prefixes_of_the_trainer_are_ignored():
    trained, model = llama(seed=3), llama(seed=1)
    weights = ((f"_fsdp_wrapped_module._orig_mod.{name}", tensor) for name, tensor in trained.state_dict().items())
    _send(weights, LocalEndpoint(model))
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight)


@pytest.mark.parametrize("leave_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_name_of_a_tied_weight_is_enough(leave_out):
    trained, model = qwen2(seed=3), qwen2(seed=1)
    _send(((name, tensor) for name, tensor in trained.state_dict().items() if name != leave_out), LocalEndpoint(model))
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_tied_weights_that_the_trainer_keeps_apart_are_not_mixed(bucket_bytes):
    weights = qwen2(seed=3).state_dict()
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    broken = weights[embedding].clone()
    broken[0, 0] = float("nan")  # of a run that diverged, which is no mistake of names
    _send((weights | {head: broken, embedding: broken}).items(), LocalEndpoint(qwen2(seed=1)), bucket_bytes)
    apart = weights | {head: weights[head] * 2}
    for names in (apart, dict(reversed(apart.items()))):
        with pytest.raises(WeightSyncError) as caught:
            _send(names.items(), LocalEndpoint(qwen2(seed=1)), bucket_bytes)
        assert {head, embedding} == set(caught.value.subject.split("'")[1::2])
        assert "tie_word_embeddings=False" in caught.value.remedy


def test_a_missing_tensor_is_named():
    weights = ((name, tensor) for name, tensor in llama().state_dict().items() if "layers.1.mlp.up" not in name)
    with pytest.raises(WeightSyncError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        _send(weights, LocalEndpoint(llama()))


def test_half_a_tensor_is_missing_too():
    loader, sent = WeightLoader(llama()), {}

    class Stop(LocalEndpoint):
        async def begin(self, handle, proof):
            return False

        def load(self, pieces, host_bucket):
            kept = [piece for piece in pieces if piece.name != "lm_head.weight" or piece.start == 0]
            loader.load(kept, host_bucket)
            sent.update(dict.fromkeys(piece.name for piece in kept))
            return asyncio.sleep(0)

        async def finish(self):
            loader.finish()

    with pytest.raises(WeightSyncError, match="missing lm_head"):
        _send(llama().state_dict().items(), Stop(None), 1024)
    assert "lm_head.weight" in sent


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "merged into"),
        ("lm_head.modules_to_save.default.weight", "merged into"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta.default", "merged into"),
        ("model.layers.0.mlp.gate.weight", "one model"),
    ],
)
def test_an_unexpected_tensor_is_named_and_merging_is_not_offered_where_it_was_done(name, remedy):
    weights = [*llama().state_dict().items(), (name, torch.ones(2))]
    with pytest.raises(WeightSyncError) as caught:
        _send(weights, LocalEndpoint(llama()))
    assert f"not in the model {name}" in caught.value.found
    assert remedy in caught.value.remedy
    assert "lora.merge" not in caught.value.remedy


def test_a_tensor_of_another_shape_is_named():
    weights = {**llama().state_dict(), "lm_head.weight": torch.ones(4, 32)}
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight.*\n.*\(97, 32\)"):
        _send(weights.items(), LocalEndpoint(llama()))


@pytest.mark.parametrize("fail_at", [1, 3])
def test_the_weights_are_drained_when_the_server_fails(fail_at):
    drained = []

    def weights():
        for name, tensor in llama().state_dict().items():
            drained.append(name)
            yield name, tensor

    endpoint = LocalEndpoint(llama(), fail_at=fail_at)
    with pytest.raises(OSError, match="gone"):
        _send(weights(), endpoint, 4096)
    assert len(drained) == len(llama().state_dict())
    assert endpoint.cancelled
    assert not endpoint.finished


def test_an_async_iterator_of_weights_is_taken_too():
    trained, model = llama(seed=3), llama(seed=1)

    async def weights():
        for item in trained.state_dict().items():
            yield item

    _send(weights(), LocalEndpoint(model))
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight)


def test_a_model_that_waits_for_its_weights_holds_none(tmp_path):
    hosted = _empty(tmp_path, qwen2())
    assert hosted.weight_bytes == 0
    with pytest.raises(RolloutError, match="never sent"):
        hosted.require_weights()
    hosted.allocate()
    assert hosted.weight_bytes == sum(parameter.nbytes for parameter in qwen2().parameters())  # tied ones count once


def test_sleep_frees_the_weights_to_the_byte_and_keeps_parameters_buffers_and_ties():
    model = qwen2()
    hosted = host(model, CPU)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    full = sum(parameter.nbytes for parameter in model.parameters())
    assert hosted.weight_bytes == full
    hosted.discard()
    assert hosted.weight_bytes == 0
    hosted.allocate()
    assert hosted.weight_bytes == full
    with pytest.raises(RolloutError, match="no complete update"):
        hosted.require_weights()
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_tokenizer_and_the_generation_config_say_what_ends_a_response(tmp_path):
    model = qwen2()
    model.generation_config.eos_token_id = [5, 6]
    _, eos, tokenizer = build(ModelSpec(path=save(model, tmp_path, known_ids=90, eos=4), load_weights=True), CPU)
    assert eos == {4, 5, 6}
    assert len(tokenizer) == 90


def test_a_checkpoint_is_loaded_where_no_update_will_come(tmp_path):
    model = qwen2(seed=4)
    hosted, _, _ = build(ModelSpec(path=save(model, tmp_path), dtype="float32", load_weights=True), CPU)
    ids = torch.tensor([prompt(9)])
    hosted.require_weights()
    assert torch.equal(hosted.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_config_overrides_reach_the_rollouts_model(tmp_path):
    spec = ModelSpec(
        path=save(qwen2(), tmp_path), override_config={"attn_implementation": "eager", "rms_norm_eps": 0.25}
    )
    hosted, _, _ = build(spec, CPU)
    assert hosted.model.config.rms_norm_eps == hosted.model.model.norm.variance_epsilon == 0.25
    assert hosted.model.config._attn_implementation == "sdpa"


def test_memory_that_was_freed_leaves_the_process():
    blocks = [torch.ones(1 << 13) for _ in range(2048)]  # 64 MiB in blocks that malloc keeps by default
    before = memory.resident_bytes()
    del blocks
    memory.give_back(CPU)
    assert before - memory.resident_bytes() > 50 << 20


def test_file_pages_that_the_kernel_takes_back_count_as_available(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_proc_kib", lambda path, key: 1 << 30)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("950\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 750\ninactive_file 700\nactive_file 50\n")
    assert memory.available_bytes(CPU) == 1000 - (950 - 700)


def test_a_model_without_sdpa_is_served_with_the_attention_that_it_has(tmp_path):
    trained = mamba(seed=3)
    hosted = _empty(tmp_path, mamba(seed=1))
    hosted.allocate()
    _send(trained.state_dict().items(), LocalEndpoint(hosted.model))
    ids = torch.tensor([prompt(20)])
    assert torch.equal(hosted.model(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_without_a_generation_config_the_models_own_list_ends_a_response(tmp_path):
    model = qwen2()
    model.config.eos_token_id = [5, 6]
    path = save(model, tmp_path, eos=4)
    (tmp_path / "generation_config.json").unlink()
    assert build(ModelSpec(path=path), CPU)[1] == {4, 5, 6}
