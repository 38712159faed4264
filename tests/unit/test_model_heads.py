"""Attention heads are read from a model's config.json, where the driver finds one, and never guessed."""

import json

import pytest

from verl_ext_sharding.config.model_heads import Heads, heads_of

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8}
HEADS = Heads(query=32, key_value=8)


@pytest.fixture
def folder(tmp_path):
    """`folder(config)`: a model folder with that config."""

    def made(config, where="model"):
        path = tmp_path / where
        path.mkdir(parents=True)
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return made


def heads(path, role="actor", **values):
    model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
    return heads_of({f"{model}.path": path, **{f"{model}.{key}": value for key, value in values.items()}}, role)


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_heads_are_those_of_the_roles_model(role, folder):
    assert heads(folder(LLAMA), role) == HEADS


def test_a_config_apart_from_the_weights_wins_as_in_verl(folder):
    assert heads("/no/such/model", hf_config_path=folder(LLAMA)) == HEADS


def test_a_model_of_several_parts_has_the_heads_of_its_text_part(folder):
    assert heads(folder({"num_attention_heads": 16, "text_config": LLAMA})) == HEADS


def test_an_overridden_config_counts(folder):
    path = folder(LLAMA)
    assert heads(path, **{"override_config.num_key_value_heads": 4}) == Heads(query=32, key_value=4)
    assert heads(path, **{"override_config.model_config.num_attention_heads": 16}) == Heads(query=16, key_value=8)


@pytest.mark.parametrize(
    "config",
    [{"num_attention_heads": 32}, {"n_head": 12}, {**LLAMA, "num_key_value_heads": "8"}, [], "{", {"text_config": 1}],
    ids=str,
)
def test_heads_that_the_config_does_not_say_are_unknown(config, folder):
    assert heads(folder(config)) is None


@pytest.mark.parametrize("path", ["/no/such/model", "hdfs://host/model", "org/name", None])
def test_a_model_that_is_not_here_has_unknown_heads(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert heads(path) is None


@pytest.mark.parametrize(("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", "."), ("XDG_CACHE_HOME", "")])
def test_a_model_of_the_hub_is_read_from_the_local_cache(variable, below, folder, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = tmp_path / (below or "huggingface/hub") / "models--org--name"
    folder(LLAMA, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc\n")
    assert heads("org/name") == HEADS
    assert heads("org/other") is None


@pytest.mark.parametrize(
    ("query", "key_value", "size", "possible"),
    [(32, 8, 4, True), (32, 8, 16, True), (32, 8, 3, False), (12, 3, 2, False), (7, 1, 2, False), (28, 4, 8, False)],
)
def test_heads_divide_as_verl_asserts_it(query, key_value, size, possible):
    assert Heads(query=query, key_value=key_value).divide(size) is possible
