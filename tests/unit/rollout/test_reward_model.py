from types import SimpleNamespace

import pytest
import tiny_reward_models as tiny
import torch
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.reward_model import ParkedWeights, load
from verl_ext_sharding.rollout.reward_settings import RewardServing

MIXED = tiny.sequences(3, 17, 9, 1, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes each kind of model once."""
    written = {}

    def get(name, model):
        if name not in written:
            written[name] = tiny.save(model, tmp_path_factory.mktemp(name))
        return written[name]

    return get


def _load(path, *, asked=None, **options):
    return load(RewardServing(path=path, dtype="float32", asked=RewardServerSettings(**(asked or {})), **options))


def _by_transformers(path):
    return AutoModelForSequenceClassification.from_pretrained(path).eval()


MODELS = {
    "llama": tiny.llama,
    "llama_without_pad_token": lambda: tiny.llama(pad=None),
    "llama_padded_with_eos": lambda: tiny.llama(pad=tiny.EOS),
    "gpt2": tiny.gpt2,
    "roberta": tiny.roberta,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_score_does_not_depend_on_the_batch_that_it_came_in(name, folder):
    model = MODELS[name]()
    served = _load(folder(name, model))
    assert served.pads
    torch.testing.assert_close(
        torch.tensor(served.score(MIXED)), torch.tensor([tiny.alone(model, ids) for ids in MIXED]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", MODELS)
def test_one_sequence_gets_exactly_the_score_of_transformers(name, folder):
    path = folder(name, MODELS[name]())
    assert _load(path).score(MIXED[1:2]) == [tiny.alone(_by_transformers(path), MIXED[1])]


def test_a_batch_of_one_length_gets_exactly_the_scores_of_transformers(folder):
    path, rows = folder("llama", tiny.llama()), tiny.sequences(12, 12, 12)
    tensor = torch.tensor(rows)
    expected = _by_transformers(path)(input_ids=tensor, attention_mask=torch.ones_like(tensor)).logits.tolist()
    assert _load(path).score(rows) == expected


@pytest.mark.parametrize("last", [tiny.EOS, tiny.VOCAB - 1])
@pytest.mark.parametrize("name", ["llama_without_pad_token", "gpt2"])
def test_without_a_pad_token_the_last_token_is_scored_whatever_it_is(name, last, folder):
    model = MODELS[name]()
    rows = [[*ids, last] for ids in tiny.sequences(4, 11)]
    torch.testing.assert_close(
        torch.tensor(_load(folder(name, model)).score(rows)),
        torch.tensor([tiny.alone(model, ids) for ids in rows]),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["xlnet", "nystromformer"])
def test_a_model_that_looks_at_padded_columns_is_never_padded(name, folder):
    assert not _load(folder(name, getattr(tiny, name)())).pads


@pytest.mark.parametrize(
    ("name", "limit"), [("llama", 256), ("gpt2", 64), ("roberta", 512)], ids=["rotary", "table", "table_with_offset"]
)
def test_the_limit_is_what_the_positions_hold(name, limit, folder):
    served = _load(folder(name, MODELS[name]()))
    assert served.max_model_len == limit
    served.score(tiny.sequences(limit))


def test_max_model_len_lowers_the_limit(folder):
    assert _load(folder("roberta", tiny.roberta()), max_model_len=100).max_model_len == 100


def test_max_model_len_beyond_the_positions_is_refused(folder):
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len=512"):
        _load(folder("roberta", tiny.roberta()), max_model_len=514)


def test_a_model_that_generates_is_refused_before_its_weights_are_read(folder, tmp_path):
    config = tiny.llama().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        _load(str(tmp_path))


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    model = tiny.llama()
    path = tiny.save(model, tmp_path)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=r"no weights for score\.weight"):
        _load(path)


def test_a_model_that_gives_no_score_for_each_sequence_is_refused(folder, monkeypatch):
    monkeypatch.setattr(LlamaForSequenceClassification, "forward", lambda self, **_: SimpleNamespace(logits=None))
    with pytest.raises(ConfigError, match="no logits"):
        _load(folder("llama", tiny.llama()))


@pytest.mark.parametrize(("name", "stay_bytes"), [("llama", 0), ("deberta", 2 * 16 * 32 * 4)])
def test_layers_that_visit_from_the_host_score_the_same(name, stay_bytes, folder):
    path = folder(name, getattr(tiny, name)())
    served = _load(path, asked={"offload_params": True, "execution_device": "cpu"})
    assert served.weight_bytes == stay_bytes  # the table of relative positions, which is read past its module
    assert served.score(MIXED) == _load(path).score(MIXED)


def test_an_execution_device_that_the_process_has_not_is_refused(folder):
    with pytest.raises(ConfigError, match="execution_device=cpu"):
        _load(folder("llama", tiny.llama()), asked={"execution_device": "cuda:0"})


@pytest.mark.parametrize(
    ("device_map", "message"),
    [({"model": 0}, r"score\.weight"), ({"model": 0, "score": 1, "modle": 0}, "modle")],
)
def test_a_map_that_does_not_fit_the_model_is_refused(device_map, message, folder):
    with pytest.raises(ConfigError, match=message):
        _load(folder("llama", tiny.llama()), asked={"device_map": device_map}, num_devices=2)


def test_a_map_of_logical_devices_scores_the_same(folder):
    asked = {"device_map": {"model.embed_tokens": 0, "layers 0-1": 0, "model.norm": 1, "score": 1}}
    path = folder("llama", tiny.llama())
    assert _load(path, asked=asked, num_devices=2).score(MIXED) == _load(path).score(MIXED)


@pytest.mark.parametrize("chunk_bytes", [256, 1 << 20], ids=["tensors_over_many_chunks", "one_chunk"])
def test_parked_weights_take_no_bytes_and_come_back_the_same(chunk_bytes):
    model = tiny.gpt2().half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = ParkedWeights(model.parameters(), pin=False, chunk_bytes=chunk_bytes)
    for _ in range(2):
        weights.park()
        weights.park()
        assert sum(parameter.nbytes for parameter in model.parameters()) == 0
        weights.restore()
        weights.restore()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_weights_that_find_no_room_stay_parked(monkeypatch):
    model = tiny.gpt2()
    weights = ParkedWeights(model.parameters(), pin=False)
    weights.park()
    before = tiny.gpt2().state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _no_memory)
        with pytest.raises(RuntimeError, match=r"sharding\.roles\.reward\.devices"):
            weights.restore()
    assert sum(parameter.nbytes for parameter in model.parameters()) == 0
    weights.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("architecture", ["TokenClassification", "QuestionAnswering", "MultipleChoice"])
def test_a_head_of_another_kind_is_refused_though_its_weights_have_the_same_name(architecture, tmp_path):
    """verl saves critics as token classifiers: their head has a bias, which a sequence classifier would drop."""
    model = tiny.llama()
    path = tiny.save(model, tmp_path)
    model.config.architectures = [f"LlamaFor{architecture}"]
    model.config.save_pretrained(path)
    with pytest.raises(ConfigError, match=architecture):
        _load(path)


def test_a_head_with_more_weights_than_the_models_class_has_is_refused(tmp_path):
    model = tiny.llama()
    path = tiny.save(model, tmp_path)
    model.save_pretrained(path, state_dict={**model.state_dict(), "score.bias": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"no place for score\.bias"):
        _load(path)


def test_weights_of_another_task_beside_the_head_are_left_out(tmp_path):
    model = tiny.llama()
    path = tiny.save(model, tmp_path)
    model.save_pretrained(path, state_dict={**model.state_dict(), "lm_head.weight": torch.ones(tiny.VOCAB, 32)})
    assert _load(path).score(MIXED[:1]) == [tiny.alone(model, MIXED[0])]


def test_a_negative_pad_token_means_none(folder):
    model = tiny.llama(pad=-1)
    served = _load(folder("llama_minus_one", model))
    torch.testing.assert_close(
        torch.tensor(served.score(MIXED)), torch.tensor([tiny.alone(model, ids) for ids in MIXED]), atol=1e-5, rtol=0
    )


def test_a_tokenizer_whose_first_token_has_no_row_is_refused_as_the_server_loads(tmp_path):
    path = tiny.save(tiny.llama(), tmp_path, bos=tiny.VOCAB + 7)
    with pytest.raises(ConfigError, match=f"id {tiny.VOCAB + 7}"):
        _load(path)
