"""Guards around an engine: token ids are checked before it computes, what was replaced counts in no loss."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import TensorDict  # noqa: E402

from verl_ext_sharding import envs  # noqa: E402
from verl_ext_sharding.config.guards import Guards  # noqa: E402
from verl_ext_sharding.config.spec import RunSpec  # noqa: E402
from verl_ext_sharding.engines.guarded import GuardedEngineMixin, without  # noqa: E402
from verl_ext_sharding.errors import ConfigError, TokenIdError  # noqa: E402
from verl_ext_sharding.placement.bundles import place  # noqa: E402

ROWS, TOKENS, PAD = 10, 8, 1
"""Rows of the embedding, tokens of the tokenizer, its pad id."""


def jagged(*rows, dtype=torch.int64):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def rows_of(nested):
    return [row.tolist() for row in nested.unbind()]


# Masks


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_replaced_tokens_leave_a_mask_of_the_whole_sequence_where_they_are(dtype):
    mask = jagged([0, 1, 1], [1, 1, 1, 1, 0], dtype=dtype)
    replaced = jagged([0, 0, 1], [1, 0, 0, 1, 1], dtype=torch.bool)
    found = without(mask, replaced)
    assert rows_of(found) == [[0, 1, 0], [0, 1, 1, 0, 0]]
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_replaced_tokens_leave_a_mask_of_the_response_counted_from_the_end(dtype):
    mask = jagged([1, 1], [1, 1, 1], dtype=dtype)
    replaced = jagged([1, 0, 0, 1], [0, 1, 0, 0], dtype=torch.bool)
    found = without(mask, replaced)
    assert rows_of(found) == [[1, 0], [0, 1, 1]]
    assert found.dtype == dtype


def test_a_response_without_a_token_keeps_its_empty_row():
    found = without(jagged([], [1, 1]), jagged([1, 1], [0, 0, 1], dtype=torch.bool))
    assert rows_of(found) == [[], [1, 0]]


def test_the_new_mask_can_be_used_with_tensors_that_lie_as_the_old_one():
    mask = jagged([1, 1], [1, 1, 1])
    found = without(mask, jagged([0, 1], [0, 0, 0], dtype=torch.bool))
    assert found.offsets() is mask.offsets()
    assert rows_of(found * mask) == [[1, 0], [1, 1, 1]]


def test_the_mask_that_was_given_is_not_changed():
    mask = jagged([1, 1])
    without(mask, jagged([1, 1], dtype=torch.bool))
    assert rows_of(mask) == [[1, 1]]


def test_a_padded_mask_is_refused_with_a_policy_that_needs_none():
    with pytest.raises(TokenIdError) as caught:
        without(torch.ones(2, 3), jagged([0, 1], [0, 0], dtype=torch.bool))
    assert "[2, 3]" in caught.value.found
    assert caught.value.remedy == "sharding.guards.token_ids=error"


# An engine


class Stock:
    """What stands below the guards: builds a model, computes, and remembers the batches that it was given."""

    role = "critic"

    def __init__(self, *, packed=True, pad=PAD, vocabulary=None, hf_config=None):
        names = {"pad_token_id": pad, "__len__": lambda self: TOKENS}
        if vocabulary is not None:
            names["get_vocab"] = lambda self: vocabulary
        tokenizer = type("Tokenizer", (), names)()
        self.model_config = SimpleNamespace(tokenizer=tokenizer, use_remove_padding=packed, hf_config=hf_config)
        self.seen, self.failure = [], None

    def _build_module(self):
        embedding = torch.nn.Embedding(ROWS, 2)
        module = torch.nn.Sequential(embedding)
        module.get_input_embeddings = lambda: embedding
        return module

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        self.seen.append({name: data[name] for name in data.keys()} | {"forward_only": forward_only})  # noqa: SIM118
        if self.failure is not None:
            raise self.failure
        return "computed"

    def train_batch(self, data, loss_function):
        self.forward_backward_batch(data, loss_function)
        self.forward_backward_batch(data, loss_function)
        return {"metrics": {}}

    def is_mp_src_rank_with_outputs(self):
        return True


class Engine(GuardedEngineMixin, Stock):
    pass


@pytest.fixture
def engine(job, monkeypatch):
    """An engine of a run with a policy for token ids, its model built."""

    def made(policy, *, bundle_cpus=3, **options):
        guards = Guards(token_ids=policy)
        run = RunSpec(placement=place({}, job()), bundle_cpus=bundle_cpus, seed=11, guards=guards)
        monkeypatch.setenv(envs.SPEC, run.to_json())
        built = Engine(**options)
        built._build_module()
        return built

    return made


def batch(*sequences):
    """As verl's trainer sends it: whole sequences, a mask of each kind, responses of two tokens."""
    ids = jagged(*sequences)
    fields = {
        "input_ids": ids,
        "loss_mask": jagged(*([0] + [1] * (len(row) - 1) for row in sequences)),
        "response_mask": jagged(*([1, 1] for _ in sequences), dtype=torch.bool),
        "advantages": jagged(*([0.5, 0.5] for _ in sequences), dtype=torch.float32),
    }
    return TensorDict(fields, batch_size=len(sequences))


NEGATIVE, BEYOND, UNMAPPED = -100, ROWS, TOKENS


def test_with_mask_the_engine_computes_with_the_pad_id_and_without_the_tokens_in_any_loss(engine):
    guarded = engine("mask")
    data = batch([2, 3, 4, BEYOND], [5, NEGATIVE, UNMAPPED], [2, 3])
    assert guarded.forward_backward_batch(data, None, forward_only=True) == "computed"
    (seen,) = guarded.seen
    assert seen["forward_only"]
    assert rows_of(seen["input_ids"]) == [[2, 3, 4, PAD], [5, PAD, PAD], [2, 3]]
    assert rows_of(seen["loss_mask"]) == [[0, 1, 1, 0], [0, 0, 0], [0, 1]]
    assert rows_of(seen["response_mask"]) == [[True, False], [False, False], [True, True]]
    assert rows_of(seen["advantages"]) == [[0.5, 0.5]] * 3


def test_a_batch_without_masks_has_only_its_ids_replaced(engine):
    guarded = engine("mask")
    data = TensorDict({"input_ids": jagged([2, BEYOND])}, batch_size=1)
    guarded.forward_backward_batch(data, None)
    assert rows_of(guarded.seen[0]["input_ids"]) == [[2, PAD]]
    assert set(data.keys()) == {"input_ids"}


def test_with_error_the_run_stops_before_the_engine_computes(engine):
    guarded = engine("error")
    with pytest.raises(TokenIdError) as caught:
        guarded.forward_backward_batch(batch([2, 3], [4, BEYOND]), None)
    assert caught.value.subject == "token ids of the critic"
    assert "id 10 at sequence 1, position 1" in caught.value.found
    assert guarded.seen == []


@pytest.mark.parametrize("policy", ["error", "mask", "off"])
def test_a_clean_batch_is_the_very_batch_that_came(policy, engine):
    guarded, data = engine(policy), batch([2, 3, 4], [5, 6])
    before = dict(data.items())
    guarded.forward_backward_batch(data, None)
    assert all(guarded.seen[0][name] is value for name, value in before.items())


def test_with_off_nothing_is_looked_at(engine):
    guarded = engine("off")
    guarded.forward_backward_batch(batch([2, BEYOND]), None)
    assert guarded.token_guard is None
    assert rows_of(guarded.seen[0]["input_ids"]) == [[2, BEYOND]]


def test_outside_a_run_that_asked_nothing_is_guarded(monkeypatch):
    monkeypatch.delenv(envs.SPEC, raising=False)
    guarded = Engine()
    guarded._build_module()
    guarded.forward_backward_batch(batch([2, BEYOND]), None)
    assert (guarded.guards.align_inputs, guarded.token_guard) == (False, None)


def test_a_batch_without_token_ids_is_computed_as_it_is(engine):
    guarded = engine("error")
    guarded.forward_backward_batch(TensorDict({"pixels": torch.zeros(1, 2)}, batch_size=1), None)
    assert len(guarded.seen) == 1


def test_a_model_without_an_embedding_is_not_guarded(engine, monkeypatch):
    monkeypatch.setattr(Stock, "_build_module", lambda self: torch.nn.Linear(2, 2))
    assert engine("error").token_guard is None


@pytest.mark.parametrize(
    ("options", "pad"),
    [({}, PAD), ({"pad": ROWS}, 0), ({"pad": ROWS - 1}, ROWS - 1), ({"pad": None}, None), ({"packed": False}, PAD)],
    ids=str,
)
def test_a_pad_id_without_a_row_does_no_harm_where_sequences_are_packed(options, pad, engine):
    assert engine("mask", **options).token_guard.pad_token_id == pad


def test_an_id_behind_a_gap_in_the_tokenizers_ids_is_one_of_its_tokens(engine):
    vocabulary = {
        **{str(n): n for n in range(TOKENS - 1)},
        "<last>": TOKENS,
    }  # as many tokens as before, one id skipped
    guarded = engine("mask", vocabulary=vocabulary)
    guarded.forward_backward_batch(batch([2, 3, TOKENS]), None)
    assert rows_of(guarded.seen[0]["input_ids"]) == [[2, 3, TOKENS]]


def test_a_model_that_can_not_tell_its_embedding_is_built_without_a_guard(engine, monkeypatch):
    def build(self):
        module = torch.nn.Linear(2, 2)
        module.get_input_embeddings = lambda: (_ for _ in ()).throw(NotImplementedError)
        return module

    monkeypatch.setattr(Stock, "_build_module", build)
    assert engine("error").token_guard is None


def test_a_pad_id_that_the_model_can_not_be_built_with_is_refused_with_the_key_that_changes_it(engine, monkeypatch):
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(vocab_size=ROWS, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=ROWS)
    monkeypatch.setattr(Stock, "_build_module", lambda self: Qwen2Model(config))
    with pytest.raises(TokenIdError) as caught:
        engine("error", hf_config=config)
    assert caught.value.subject == "pad token of the critic"
    assert (caught.value.expected.split(",")[0], caught.value.found.split(",")[0]) == (
        f"an id from 0 to {ROWS - 1}",
        f"pad_token_id {ROWS}",
    )
    assert caught.value.remedy.endswith("+critic.model.override_config.pad_token_id=0")


# What is counted and said


def test_each_step_counts_the_ids_of_all_its_batches_by_their_kind(engine):
    guarded = engine("mask")
    outputs = guarded.train_batch(batch([2, NEGATIVE, BEYOND, UNMAPPED]), None)
    again = guarded.train_batch(batch([2, UNMAPPED, UNMAPPED]), None)
    counts = {name: metric.aggregate() for name, metric in outputs["metrics"].items()}
    assert counts == {"guards/negative_ids": 1, "guards/out_of_rows_ids": 1, "guards/unmapped_ids": 1}
    assert again["metrics"]["guards/unmapped_ids"].aggregate() == 2
    assert again["metrics"]["guards/negative_ids"].aggregate() == 0


def test_ids_that_no_token_has_but_a_row_are_counted_and_kept_with_error(engine):
    guarded = engine("error")
    outputs = guarded.train_batch(batch([2, UNMAPPED]), None)
    assert outputs["metrics"]["guards/unmapped_ids"].aggregate() == 2  # its batch was computed twice
    assert rows_of(guarded.seen[0]["input_ids"]) == [[2, UNMAPPED]]


def test_only_the_rank_that_reports_has_the_counts(engine, monkeypatch):
    monkeypatch.setattr(Stock, "is_mp_src_rank_with_outputs", lambda self: False)
    assert engine("mask").train_batch(batch([2, BEYOND]), None)["metrics"] == {}


def test_where_no_trainer_of_verl_aggregates_them_there_are_no_counts(engine):
    assert engine("mask", bundle_cpus=0).train_batch(batch([2, BEYOND]), None)["metrics"] == {}


def test_the_log_names_such_ids_once(engine, caplog):
    guarded = engine("mask")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            guarded.forward_backward_batch(batch([2, BEYOND]), None)
    (record,) = (r for r in caplog.records if "token ids of critic" in r.getMessage())
    assert "'out_of_rows': 1" in record.getMessage()


def test_an_assert_of_the_device_is_explained_with_role_batch_and_seed(engine):
    guarded = engine("error")
    guarded.failure = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError) as caught:
        guarded.forward_backward_batch(batch([2, 3, 4], [5, 6]), None)
    text = str(caught.value)
    assert "critic: a kernel's assert stopped the GPU" in text
    assert "2 sequences, 5 tokens, ids 2 to 6" in text
    assert "data.seed=11" in text
    assert caught.value.__cause__ is guarded.failure


def test_an_error_of_ours_names_the_engines_role(engine):
    guarded = engine("error")
    fields = {"expected": "a", "found": "b", "consequence": "the run stops"}
    guarded.failure = ConfigError("x", **fields, remedy="sharding.roles.<role>.gradient_checkpointing=full")
    with pytest.raises(ConfigError) as caught:
        guarded.forward_backward_batch(batch([2, 3]), None)
    assert caught.value.remedy == "sharding.roles.critic.gradient_checkpointing=full"


def test_other_errors_are_raised_as_they_are(engine):
    guarded = engine("error")
    guarded.failure = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory") as caught:
        guarded.forward_backward_batch(batch([2, 3]), None)
    assert caught.value is guarded.failure
