"""What the demo trains and how: files built once and without a download, and a command that verl's config accepts."""

import dataclasses
import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.demo import assets, command
from verl_ext_sharding.demo.assets import TinyModel

SMALL = TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("the demo opened a connection"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return assets.build(SMALL, tmp_path_factory.mktemp("cache"))


def weights(folder):
    return load_file(folder / "model.safetensors")


# The model


def test_the_model_is_a_real_one_of_the_shape_that_was_asked_for(built):
    model = AutoModelForCausalLM.from_pretrained(built.model)
    assert model.config.model_type == "qwen2"
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (16, 1)
    assert model.config.num_key_value_heads == 1
    assert not model.config.tie_word_embeddings
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_vocabulary_holds_every_token_and_is_padded(built):
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    rows = weights(built.model)["model.embed_tokens.weight"].shape[0]
    assert len(tokenizer) == 259
    assert rows == 320


def test_a_larger_vocabulary_has_a_token_for_each_id_that_rollout_may_sample(tmp_path):
    files = assets.build(dataclasses.replace(SMALL, vocab_size=2000), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    rows = weights(files.model)["model.embed_tokens.weight"].shape[0]
    assert len(tokenizer) == rows == 2000
    assert len({tokenizer.decode([token]) for token in range(259, 2000)}) == 2000 - 259
    small = AutoTokenizer.from_pretrained(assets.build(SMALL, tmp_path).model)
    text = "<|im_start|>user\naaaa!!!!1+1=<|im_end|>"
    assert tokenizer(text)["input_ids"] == small(text)["input_ids"]
    assert tokenizer.eos_token_id == small.eos_token_id


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size is 100.*259"):
        assets.build(dataclasses.replace(SMALL, vocab_size=100), tmp_path)


def test_the_critic_starts_from_the_policys_weights_with_a_head_of_one_value(built):
    critic = AutoModelForTokenClassification.from_pretrained(built.critic)
    assert critic.num_labels == 1
    policy = weights(built.model)
    for name, value in weights(built.critic).items():
        if name.startswith("model."):
            assert torch.equal(value, policy[name]), name


@pytest.mark.parametrize("text", ["1+2=", "Ümläut 漢字 🙂", "a\n\tb  c", "", "<|im_end|> is text here"])
def test_any_text_survives_the_tokenizer(text, built):
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= token < 259 for token in ids)


def test_a_chat_ends_where_the_assistant_begins(built):
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token != tokenizer.eos_token
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_building_leaves_torchs_random_numbers_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assets.build(SMALL, tmp_path)
    assert torch.equal(torch.rand(4), expected)


# The data


def test_every_row_has_what_verl_reads_and_a_right_answer(built):
    for path, count in ((built.train_files, 256), (built.val_files, 8)):
        frame = pd.read_parquet(path)
        assert len(frame) == count
        assert set(frame.columns) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        for row in frame.itertuples():
            (message,) = row.prompt
            left, right = message["content"].rstrip("=").split("+")
            assert row.reward_model["ground_truth"] == str(int(left) + int(right))


def test_prompts_fit_the_length_that_the_command_allows(built):
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    for prompt in pd.read_parquet(built.train_files)["prompt"]:
        text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        assert len(tokenizer.encode(text)) <= 64


@pytest.mark.parametrize(("response", "score"), [("7", 2.0), ("xx7 ", 1.75), ("8", 1.0), ("..", 0.0), ("", 0.0)])
def test_the_reward_values_readable_answers_and_the_right_one_more(response, score, built):
    scope = {}
    exec(built.reward.read_text(), scope)
    assert scope["compute_score"]("tiny/add", response, "7")["score"] == score


# Built once


def test_the_same_shape_gives_the_same_bytes_everywhere(built, tmp_path):
    again = assets.build(SMALL, tmp_path)
    for name in ("model", "critic"):
        one, other = weights(getattr(built, name)), weights(getattr(again, name))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert again.model.parent.name == built.model.parent.name


def test_a_second_call_finds_the_files_and_builds_nothing(built, monkeypatch):
    monkeypatch.setattr(assets, "_write_models", lambda *arguments: pytest.fail("built again"))
    assert assets.build(SMALL, built.model.parent.parent) == built


@pytest.mark.parametrize(
    "fields",
    [{"seed": 1}, {"hidden_size": 32}, {"tied": True}, {"num_layers": 2}, {"architecture": "llama"}],
    ids=str,
)
def test_another_shape_is_another_folder(fields, tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "_write_models", lambda *arguments: None)
    one = assets.build(SMALL, tmp_path)
    other = assets.build(TinyModel(**{**vars(SMALL), **fields}), tmp_path)
    assert one.model != other.model
    assert len([folder for folder in tmp_path.iterdir() if not folder.name.startswith(".")]) == 2


def test_an_interrupted_build_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assets, "_write_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            assets.build(SMALL, tmp_path)
    whole = assets.build(SMALL, tmp_path)
    assert whole.train_files.exists()
    assert whole.model.is_dir()


def test_of_two_builds_at_once_one_wins_and_both_find_the_files(tmp_path, monkeypatch):
    write = assets._write_data

    def overtaken(folder):
        write(folder)
        with monkeypatch.context() as patch:
            patch.setattr(assets, "_write_data", write)
            assets.build(SMALL, tmp_path)

    monkeypatch.setattr(assets, "_write_data", overtaken)
    found = assets.build(SMALL, tmp_path)
    assert found.train_files.exists()
    assert [folder.name for folder in tmp_path.iterdir()] == [found.model.parent.name]


@pytest.mark.parametrize("value", ["{}/cache", ""])
def test_the_cache_is_where_the_user_keeps_caches(value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value.format(tmp_path))
    base = tmp_path / ("cache" if value else ".cache")
    assert assets.cache_root() == base / "verl-ext-sharding"


def test_a_tied_model_shares_its_embeddings(tmp_path):
    tied = assets.build(TinyModel(**{**vars(SMALL), "tied": True}), tmp_path)
    assert json.loads((tied.model / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in weights(tied.model)


# The command


def places_of(overrides, compose):
    plan = driver.prepare(compose(*overrides), explicit=parse_overrides(overrides))
    return {row.role: list(row.devices) for row in plan.table.rows}


@pytest.mark.parametrize(
    ("device", "num_devices", "devices"),
    [
        ("cpu", 1, {"actor": [0], "rollout": [0], "critic": [0], "ref": [0]}),
        ("cpu", 2, {"actor": [0], "rollout": [0], "critic": [1], "ref": [1]}),
        ("cpu", 3, {"actor": [0], "rollout": [0], "critic": [1], "ref": [2]}),
        ("cpu", 4, {"actor": [0, 1], "rollout": [0, 1], "critic": [2], "ref": [3]}),
        ("cuda", 1, {"actor": [0], "rollout": [0], "critic": [0], "ref": [0]}),
        ("cuda", 4, {"actor": [0, 1], "rollout": [0, 1], "critic": [2], "ref": [3]}),
    ],
)
def test_the_command_is_accepted_and_spreads_the_roles_over_what_there_is(device, num_devices, devices, built, compose):
    overrides = command.overrides(built, device=device, num_devices=num_devices, steps=3)
    assert places_of(overrides, compose) == devices


def test_the_command_trains_the_built_files_for_the_steps_that_were_asked_for(built, compose):
    config = compose(*command.overrides(built, device="cpu", num_devices=4, steps=5))
    assert config.trainer.total_training_steps == 5
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.model.path == str(built.model)
    assert config.critic.model.path == str(built.critic)
    assert config.data.train_files == str(built.train_files)


def test_a_cache_folder_with_a_space_in_its_name_is_fine(built, tmp_path, compose):
    folder = tmp_path / "my cache"
    shutil.copytree(built.model.parent, folder / built.model.parent.name)
    found = assets.build(SMALL, folder)
    config = compose(*command.overrides(found, device="cpu", num_devices=4, steps=1))
    assert config.actor_rollout_ref.model.path == str(found.model)


@pytest.mark.parametrize(("installed", "attention"), [(True, False), (False, True)])
def test_on_gpus_without_flash_attention_another_one_is_asked_for(installed, attention, built, monkeypatch):
    monkeypatch.setattr(command.util, "find_spec", lambda name: object() if installed else None)
    lines = command.overrides(built, device="cuda", num_devices=2, steps=1)
    assert any("attn_implementation=sdpa" in line for line in lines) is attention
    assert f"actor_rollout_ref.rollout.name={'vllm' if installed else 'hf'}" in lines
