"""Parameters of a model are counted from the files that are here, and unknown where none of them says it."""

import json
import math
import struct

import pytest

from verl_ext_sharding.config.model_size import num_parameters

LLAMA_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
}


def configured(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(folder, name, *shapes):
    tensors = {f"t{i}": {"dtype": "BF16", "shape": list(s), "data_offsets": [0, 0]} for i, s in enumerate(shapes)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)


def indexed(folder, *names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {f"w{n}": n for n in names}}))


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_3B, 3_212_749_824),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (PHI3_MINI, 3_821_079_552),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_config_alone_gives_the_parameters_of_a_dense_decoder(config, published, tmp_path):
    assert math.isclose(num_parameters(str(configured(tmp_path, config))), published, rel_tol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL_7B | {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "llama", "hidden_size": 4096},
        {name: value for name, value in QWEN3_06B.items() if name != "head_dim"},
        {},
        [],
    ],
    ids=["experts", "a part", "Qwen3 without its heads' size", "empty", "no config"],
)
def test_of_what_the_formula_does_not_describe_nothing_is_said(config, tmp_path):
    assert num_parameters(str(configured(tmp_path, config))) is None


def test_headers_of_weights_count_before_any_formula(tmp_path):
    weights(configured(tmp_path, LLAMA_3B), "model.safetensors", (3, 5), (7,), ())
    assert num_parameters(str(tmp_path)) == 3 * 5 + 7 + 1


def test_shards_of_the_index_count_and_copies_in_another_format_do_not(tmp_path):
    configured(tmp_path, LLAMA_3B)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        weights(tmp_path, name, (10,))
    indexed(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert num_parameters(str(tmp_path)) == 20


def test_weights_that_are_not_all_here_do_not_count(tmp_path):
    weights(configured(tmp_path, MISTRAL_7B), "model-00001-of-00002.safetensors", (10,))
    indexed(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert num_parameters(str(tmp_path)) > 7e9


def test_packed_weights_of_a_quantized_model_do_not_count(tmp_path):
    weights(configured(tmp_path, MISTRAL_7B | {"quantization_config": {"bits": 4}}), "model.safetensors", (10,))
    assert num_parameters(str(tmp_path)) > 7e9


def test_a_model_of_the_hub_is_read_from_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert num_parameters("mistralai/Mistral-7B-v0.1") is None
    cached = tmp_path / "models--mistralai--Mistral-7B-v0.1"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    configured(cached / "snapshots" / "abc", MISTRAL_7B)
    assert num_parameters("mistralai/Mistral-7B-v0.1") == 7_241_732_096


def test_what_is_not_here_or_not_readable_is_unknown(tmp_path):
    assert num_parameters(None) is None
    assert num_parameters(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert num_parameters(str(tmp_path)) is None
    (configured(tmp_path, LLAMA_3B) / "model.safetensors").write_bytes(b"\xff" * 16)
    assert num_parameters(str(tmp_path)) is None
