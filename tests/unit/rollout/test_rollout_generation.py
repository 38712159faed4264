import threading

import pytest
import torch
from tiny_models import (
    MAX_LEN,
    VOCAB,
    Held,
    engine,
    generate,
    greedy_reference,
    latent,
    llama,
    mamba,
    prompt,
    qwen2,
    recomputed_log_probs,
    row,
    sliding,
)
from transformers import Gemma3TextConfig, LlamaConfig, MambaConfig, MistralConfig, Qwen3NextConfig

from verl_ext_sharding.rollout import generation
from verl_ext_sharding.rollout.kv_cache import bytes_per_token, can_merge
from verl_ext_sharding.rollout.requests import RolloutError

LENGTHS = (3, 17, 8, 1, 30, 8, 12, 5, 21, 2)
MODELS = {
    "qwen2": qwen2,
    "llama": llama,
    "sliding window that matters": lambda: sliding(window=6),
    "sliding window longer than any sequence": lambda: sliding(window=MAX_LEN),
    "state space": mamba,
}


@pytest.fixture(params=MODELS, ids=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def serve():
    """Makes engines, and closes them."""
    made = []

    def make(model, **options):
        made.append(engine(model, **options))
        return made[-1]

    yield make
    for target in made:
        target.close()


def test_a_greedy_response_is_the_one_of_transformers_generate(model, serve):
    rows = [row(prompt(length), temperature=0.0, max_tokens=4 + index) for index, length in enumerate(LENGTHS)]
    done = generate(serve(model, max_num_seqs=4), rows)
    assert [item.token_ids for item in done] == [
        greedy_reference(model, item.prompt_ids, item.params.max_tokens) for item in rows
    ]


def test_log_probs_equal_a_full_forward_without_a_cache(model, serve):
    rows = [row(prompt(length), temperature=0.7, seed=length, max_tokens=20) for length in LENGTHS]
    for done in generate(serve(model, max_num_seqs=4), rows):
        expected = recomputed_log_probs(model, done, temperature=0.7)
        torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-5, rtol=0)


def test_a_request_keeps_its_tokens_whatever_arrives_first_and_with_it(model, serve):
    def requests():
        return [row(prompt(length, index), seed=index, top_p=0.9) for index, length in enumerate(LENGTHS)]

    together = generate(serve(model, max_num_seqs=16), requests())
    backwards = generate(serve(model, max_num_seqs=3), requests()[::-1])[::-1]
    alone = [generate(serve(model), [item])[0] for item in requests()]
    tokens = [item.token_ids for item in together]
    assert tokens == [item.token_ids for item in backwards] == [item.token_ids for item in alone]


def test_a_request_that_arrives_while_others_run_keeps_its_tokens(serve):
    model = qwen2()
    alone = generate(serve(model), [row(prompt(9), seed=5)])[0].token_ids
    target = serve(model, max_num_seqs=4)
    started = threading.Event()
    running = [target.submit(row(prompt(20, index), seed=index, max_tokens=60)) for index in range(3)]
    target.call(started.set)
    assert started.wait(30)
    late = target.submit(row(prompt(9), seed=5)).result(timeout=60)
    assert late.token_ids == alone
    assert all(len(future.result(timeout=60).token_ids) == 60 for future in running)


def test_repeats_of_a_prompt_are_prefilled_once_and_sampled_apart(serve):
    model = qwen2()
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    target = serve(model)
    release = threading.Event()
    target.call(release.wait)  # holds the engine until all eight wait
    futures = [target.submit(row(prompt(11), seed=index)) for index in range(8)]
    release.set()
    responses = {tuple(future.result(timeout=60).token_ids) for future in futures}
    assert shapes[0] == (1, 11)
    assert len(responses) == 8


def test_full_determinism_computes_each_request_alone(serve):
    model = qwen2()
    batches = set()
    model.register_forward_pre_hook(lambda _, args, kwargs: batches.add(kwargs["input_ids"].shape[0]), with_kwargs=True)
    rows = [row(prompt(length, index), seed=index) for index, length in enumerate(LENGTHS)]
    together = generate(serve(model, full_determinism=True), rows)
    again = generate(
        serve(model, full_determinism=True),
        [row(prompt(length, index), seed=index) for index, length in enumerate(LENGTHS)][::-1],
    )[::-1]
    assert batches == {1}
    assert [item.log_probs for item in together] == [item.log_probs for item in again]


def test_more_requests_than_places_all_get_their_answer(serve):
    rows = [row(prompt(1 + index % 13, index), seed=index, max_tokens=1 + index % 9) for index in range(60)]
    done = generate(serve(qwen2(), max_num_seqs=4, max_prefill_tokens=20), rows)
    assert [len(item.token_ids) for item in done] == [item.params.max_tokens for item in rows]


def test_rows_beyond_the_memory_budget_wait_and_one_always_runs(serve):
    model = qwen2()
    batches = set()
    model.register_forward_pre_hook(lambda _, args, kwargs: batches.add(kwargs["input_ids"].shape[0]), with_kwargs=True)
    generate(serve(model, kv_cache_bytes=lambda: 0), [row(prompt(5, index), seed=index) for index in range(4)])
    assert batches == {1}


def test_the_memory_budget_counts_what_a_token_really_takes(serve):
    """Latent attention keeps something else than heads times head size, and what it is differs by release."""
    model = latent()
    target = serve(model)
    sizes = []
    model.register_forward_pre_hook(lambda *_: sizes.append(target.kv_cache_bytes))
    generate(target, [row(prompt(5))])
    columns = 5 + 64
    assert max(sizes) == target._merging._token_bytes * columns != bytes_per_token(model.config, model.dtype) * columns


def test_a_stop_token_ends_the_response_and_is_its_last_token(model, serve):
    free = generate(serve(model), [row(prompt(7), temperature=0.0)])[0].token_ids
    stop = free[4]
    done = generate(serve(model), [row(prompt(7), temperature=0.0, stop_token_ids=frozenset({stop}))])[0]
    assert done.token_ids == free[: free.index(stop) + 1]
    assert done.stop_reason == "completed"


def test_abort_ends_what_runs_with_its_tokens_and_what_waits_with_none(model, serve):
    held = Held(model, forward=6)
    target = serve(model, max_num_seqs=2)
    rows = [row(prompt(4, index), name=str(index), seed=index, max_tokens=50) for index in range(3)]
    futures = [target.submit(item) for item in rows]
    held.wait()
    aborted = target.abort()
    held.release()
    assert set(aborted.result(timeout=30)) == {"0", "1", "2"}
    done = [future.result(timeout=30) for future in futures]
    assert [item.stop_reason for item in done] == ["aborted"] * 3
    assert all(0 < len(item.token_ids) == len(item.log_probs) < 50 for item in done[:2])
    assert done[2].token_ids == []


def test_a_resumed_request_continues_as_if_never_aborted(serve):
    whole = generate(serve(qwen2()), [row(prompt(6), temperature=0.0, max_tokens=40)])[0].token_ids
    model = qwen2()
    held = Held(model, forward=15)
    target = serve(model)
    future = target.submit(row(prompt(6), temperature=0.0, max_tokens=40))
    held.wait()
    target.abort()
    held.release()
    part = future.result(timeout=30).token_ids
    rest = row((*prompt(6), *part), temperature=0.0, max_tokens=40 - len(part))
    assert part + generate(target, [rest])[0].token_ids == whole


def test_aborting_one_request_leaves_the_others(serve):
    model = qwen2()
    held = Held(model, forward=6)
    target = serve(model)
    futures = [target.submit(row(prompt(4, index), name=str(index), seed=index, max_tokens=50)) for index in range(3)]
    held.wait()
    aborted = target.abort(["1"])
    held.release()
    assert aborted.result(timeout=30) == ["1"]
    assert [future.result(timeout=60).stop_reason for future in futures] == ["completed", "aborted", "completed"]


def test_a_request_whose_caller_left_frees_its_place(serve):
    model = qwen2()
    held = Held(model, forward=4)
    target = serve(model, max_num_seqs=1)
    gone = row(prompt(4), max_tokens=MAX_LEN - 4)
    future = target.submit(gone)
    held.wait()
    assert future.cancel()
    held.release()
    assert len(generate(target, [row(prompt(3), seed=1)])[0].token_ids) == 12
    assert len(gone.token_ids) < MAX_LEN - 4


def test_an_error_reaches_every_request_and_the_engine_goes_on(model, serve):
    target = serve(model, max_num_seqs=2)
    fail = model.register_forward_pre_hook(_raise)
    futures = [target.submit(row(prompt(4, index), name=str(index))) for index in range(5)]
    for future in futures:
        with pytest.raises(RuntimeError, match="out of something"):
            future.result(timeout=30)
    fail.remove()
    assert len(generate(target, [row(prompt(4))])[0].token_ids) == 12


@pytest.mark.parametrize("lost", [True, False])
def test_an_engine_whose_device_is_lost_says_so_and_why(lost, model, serve, monkeypatch):
    monkeypatch.setattr(generation, "_answers", lambda device: not lost)
    target = serve(model)
    assert not target.errored
    model.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match="out of something"):
        generate(target, [row(prompt(4))])
    assert target.errored is lost
    assert lost is ("out of something" in str(target.dead_error))


def _raise(*_):
    raise RuntimeError("out of something")


def test_logits_that_are_not_finite_are_an_error_not_a_token(model, serve):
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(RolloutError, match="finite numbers"):
        generate(serve(model), [row(prompt(4))])


def test_a_call_whose_caller_left_is_dropped_and_an_error_in_a_call_is_its_own(serve):
    model = qwen2()
    held = Held(model, forward=2)
    target = serve(model)
    running = target.submit(row(prompt(4)))
    held.wait()
    left, failing = target.call(_raise), target.call(_raise)
    assert left.cancel()
    held.release()
    with pytest.raises(RuntimeError, match="out of something"):
        failing.result(timeout=30)
    assert len(running.result(timeout=30).token_ids) == 12


def test_a_closed_engine_fails_what_it_held_and_refuses_more(serve):
    target = engine(qwen2(), max_num_seqs=1)
    held = [target.submit(row(prompt(4, index), max_tokens=MAX_LEN - 4)) for index in range(2)]
    target.close()
    for future in held:
        with pytest.raises(RolloutError, match="closed"):
            future.result(timeout=30)
    with pytest.raises(RolloutError, match="closed"):
        target.submit(row(prompt(4)))


def test_the_cache_is_freed_when_nothing_runs(serve):
    target = serve(qwen2())
    generate(target, [row(prompt(4, index), seed=index) for index in range(3)])
    target.call(lambda: None).result(timeout=30)
    assert target.kv_cache_bytes == 0


def test_long_runs_of_joining_and_leaving_rows_keep_the_buffer_small(serve):
    """Rows come and go for longer than any buffer is wide; the columns that nobody needs are given up."""
    model = qwen2()
    target = serve(model, max_num_seqs=2)
    sizes = []
    model.register_forward_pre_hook(lambda *_: sizes.append(target.kv_cache_bytes))
    rows = [row(prompt(4, index), seed=index, max_tokens=20 + index % 7) for index in range(40)]
    done = generate(target, rows)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert max(sizes) <= 2 * (30 + 64) * per_token
    expected = [generate(serve(model), [row(prompt(4, i), seed=i, max_tokens=20 + i % 7)])[0] for i in (0, 17, 39)]
    assert [done[i].token_ids for i in (0, 17, 39)] == [item.token_ids for item in expected]
    assert max(max(item.token_ids) for item in done) < VOCAB


@pytest.mark.parametrize(
    ("config", "merges"),
    [
        (LlamaConfig(), True),
        (LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}), True),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), False),
        (MistralConfig(sliding_window=64), False),
        (MistralConfig(sliding_window=MAX_LEN), True),
        (MambaConfig(), False),
        (Qwen3NextConfig(), False),
        (Gemma3TextConfig(), True),  # a window of 4096
    ],
    ids=lambda value: f"{getattr(value, 'model_type', value)}",
)
def test_rows_join_a_running_batch_only_where_no_row_can_change_another(config, merges):
    assert can_merge(config, MAX_LEN) is merges


def test_two_aborts_at_once_each_tell_their_own(model, serve):
    held = Held(model, forward=6)
    target = serve(model)
    futures = [target.submit(row(prompt(4, index), name=str(index), seed=index, max_tokens=50)) for index in range(3)]
    held.wait()
    told = [target.abort([name]) for name in ("0", "2")]
    held.release()
    assert [future.result(timeout=30) for future in told] == [["0"], ["2"]]
    assert [future.result(timeout=60).stop_reason for future in futures] == ["aborted", "completed", "aborted"]
