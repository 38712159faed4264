import math
import random
from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCAB, engine, generate, prompt, qwen2, row
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import MinPLogitsWarper

from verl_ext_sharding.rollout import sampling
from verl_ext_sharding.rollout.batches import SamplingRules
from verl_ext_sharding.rollout.requests import SamplingParams
from verl_ext_sharding.rollout.sampling import choose_tokens

HISTORY = [3, 3, 0, 7]


def _row(seed=0, **params):
    return SimpleNamespace(
        params=SamplingParams(max_tokens=8, **params), rng=random.Random(seed), history=lambda: HISTORY
    )


def _logits(rows, vocab=12, seed=0):
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 2


def _transformers(logits, params):
    """The processed scores of transformers' own `generate`, in its order."""
    steps = LogitsProcessorList()
    if params.get("repetition_penalty", 1.0) != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if params.get("temperature", 1.0) != 1.0:
        steps.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        steps.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(MinPLogitsWarper(params["min_p"]))
    return steps(torch.tensor([HISTORY] * logits.shape[0]), logits)


PARAMS = (
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tokens_follow_the_distribution_of_transformers_processors(params):
    """Chi-square over 4000 seeds against the processed softmax; at most 11 degrees of freedom, p about 1e-6."""
    logits, draws = _logits(1), 4000
    expected = _transformers(logits, params).softmax(-1)[0]
    rows = [_row(seed, **params) for seed in range(draws)]
    tokens, _ = choose_tokens(logits.expand(draws, -1), rows)
    counts = torch.bincount(torch.tensor(tokens), minlength=logits.shape[1]).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - draws * expected) ** 2 / (draws * expected))[kept].sum()
    assert statistic < 45


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_log_probs_are_the_log_softmax_of_the_processed_logits(params):
    logits = _logits(5)
    tokens, log_probs = choose_tokens(logits, [_row(seed, **params) for seed in range(5)])
    expected = _transformers(logits, params).log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(-1))
    torch.testing.assert_close(torch.tensor(log_probs), expected.squeeze(-1), atol=1e-6, rtol=0)


def test_raw_log_probs_are_those_of_the_models_own_logits():
    logits = _logits(5)
    rows = [_row(seed, temperature=0.3, top_k=3, repetition_penalty=1.5) for seed in range(5)]
    tokens, log_probs = choose_tokens(logits, rows, raw_logprobs=True)
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-6, rtol=0)


def test_a_greedy_row_reports_temperature_one_after_its_penalty():
    logits = _logits(1)
    tokens, log_probs = choose_tokens(logits, [_row(temperature=0.0, repetition_penalty=3.0)])
    penalised = _transformers(logits, {"repetition_penalty": 3.0})
    assert tokens == [int(penalised.argmax())]
    assert log_probs[0] == pytest.approx(float(penalised.log_softmax(-1).max()), abs=1e-6)


def test_rows_with_different_parameters_in_one_batch_get_what_they_get_alone():
    logits = _logits(len(PARAMS) * 3)
    settings = [*PARAMS, {"temperature": 0.0}, *PARAMS, *PARAMS][: logits.shape[0]]
    together = choose_tokens(logits, [_row(index, **params) for index, params in enumerate(settings)])
    alone = [choose_tokens(logits[index : index + 1], [_row(index, **params)]) for index, params in enumerate(settings)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([log_probs[0] for _, log_probs in alone], abs=1e-6)


def test_sampling_in_turns_changes_nothing(monkeypatch):
    logits = _logits(9)
    whole = choose_tokens(logits, [_row(seed, top_p=0.9) for seed in range(9)])
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 2 * sampling._BYTES_PER_ENTRY * logits.shape[1])
    assert choose_tokens(logits, [_row(seed, top_p=0.9) for seed in range(9)]) == whole


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}], ids=str)
def test_a_banned_id_is_never_drawn(params):
    logits = _logits(1)
    best = int(logits.argmax())
    tokens, log_probs = choose_tokens(
        logits.expand(200, -1), [_row(seed, **params) for seed in range(200)], banned=torch.tensor([best])
    )
    assert best not in tokens
    assert all(map(math.isfinite, log_probs))


def test_log_probs_without_truncation_count_banned_ids_as_the_actor_does():
    logits = _logits(1)
    tokens, log_probs = choose_tokens(logits, [_row()], banned=torch.tensor([int(logits.argmax())]))
    assert log_probs[0] == pytest.approx(float(logits.log_softmax(-1)[0, tokens[0]]), abs=1e-6)


def test_the_inverse_cdf_takes_every_id_on_its_own_interval_and_none_of_probability_zero():
    scores = torch.tensor([[-math.inf, math.log(0.25), -math.inf, math.log(0.75), -math.inf]])
    draws = [0.0, 0.2499999, 0.2500001, 0.999999, math.nextafter(1.0, 0.0), 1.0]
    tokens = [int(sampling._inverse_cdf(scores, torch.tensor([[u]], dtype=torch.float64))) for u in draws]
    assert tokens == [1, 1, 3, 3, 3, 3]


def test_bfloat16_logits_are_sampled_in_float32():
    logits = _logits(4).bfloat16()
    rows = lambda: [_row(seed, temperature=0.9) for seed in range(4)]  # noqa: E731
    assert choose_tokens(logits, rows()) == choose_tokens(logits.float(), rows())


def test_the_repetition_penalty_sees_prompt_and_response():
    model = qwen2()
    target = engine(model)
    try:
        free = generate(target, [row(prompt(6), temperature=0.0, max_tokens=30)])[0].token_ids
        done = generate(target, [row(prompt(6), temperature=0.0, max_tokens=30, repetition_penalty=1e6)])[0]
    finally:
        target.close()
    ids = torch.tensor([prompt(6)])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, repetition_penalty=1e6
    )
    assert done.token_ids == expected[0, 6:].tolist() != free


def test_a_server_bans_ids_in_every_response():
    banned = torch.arange(10, VOCAB)
    target = engine(qwen2(), rules=SamplingRules(banned=banned))
    try:
        done = generate(target, [row(prompt(5, index), seed=index) for index in range(6)])
    finally:
        target.close()
    assert max(max(item.token_ids) for item in done) < 10
