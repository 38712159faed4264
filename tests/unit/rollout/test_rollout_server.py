import asyncio

import pytest
import torch
from tiny_models import VOCAB, moe, prompt, qwen2, recomputed_log_probs, row, save

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.requests import RolloutError
from verl_ext_sharding.rollout.server import HFServer
from verl_ext_sharding.rollout.settings import ModelSpec, ServerSettings
from verl_ext_sharding.rollout.transport import send_weights
from verl_ext_sharding.rollout.weights import WeightSyncError

CPU = torch.device("cpu")
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 3}


class DirectEndpoint:
    """Calls a server's methods in this process."""

    def __init__(self, server, global_steps=None):
        self._server, self._global_steps = server, global_steps

    def begin(self, handle, proof):
        return self._server.begin_weights_update(handle, proof)

    def load(self, pieces, host_bucket):
        return self._server.load_weights_bucket(pieces, host_bucket.clone().numpy())

    def finish(self):
        return self._server.finish_weights_update(self._global_steps)

    def cancel(self):
        return self._server.cancel_weights_update()


async def _update(server, model, global_steps=None, *, leave_out=()):
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name not in leave_out]
    await send_weights(weights, DirectEndpoint(server, global_steps), bucket_bytes=4096, device=CPU)


def _settings(path, **options):
    model = ModelSpec(path=path, dtype="float32", load_weights=options.pop("load_weights", False))
    return ServerSettings(model=model, **{"max_num_seqs": 8, "prompt_length": 32, "response_length": 16, **options})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(qwen2(seed=1), tmp_path_factory.mktemp("model"), eos=0)


def serving(scenario):
    """Turns an async test into one that pytest runs."""

    def test(checkpoint):
        asyncio.run(asyncio.wait_for(scenario(checkpoint), timeout=60))

    test.__name__ = scenario.__name__
    return test


async def _started(path, **options):
    server = HFServer(_settings(path, **options))
    await server.start()
    return server


async def _ready(path, **options):
    server = await _started(path, **options)
    await _update(server, qwen2(seed=2), 1)
    return server


@serving
async def test_log_probs_equal_the_trainers_after_several_updates(checkpoint):
    server = await _started(checkpoint)
    trained = qwen2(seed=2)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step in range(3):
        await server.wake_up(["weights"])
        await _update(server, trained, step)
        await server.wake_up(["kv_cache"])
        outputs = await asyncio.gather(
            *[server.generate(prompt(5 + n), {**SAMPLED, "temperature": 0.8}, str(n)) for n in range(6)]
        )
        for n, output in enumerate(outputs):
            done = row(prompt(5 + n))
            done.token_ids = output.token_ids
            expected = recomputed_log_probs(trained, done, temperature=0.8)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)
            assert output.extra_fields["global_steps"] == step
        await server.sleep()
        for parameter in trained.requires_grad_(True).parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        trained.requires_grad_(False)


@serving
async def test_a_seeded_request_gets_the_same_tokens_from_any_server_in_any_order(checkpoint):
    first, second = await _ready(checkpoint, replica_rank=0), await _ready(checkpoint, replica_rank=1)
    requests = [(prompt(3 + n % 4, n % 4), {**SAMPLED, "seed": n}, str(n)) for n in range(12)]
    here = await asyncio.gather(*[first.generate(*request) for request in requests])
    there = await asyncio.gather(*[second.generate(*request) for request in requests[::-1]])
    assert [output.token_ids for output in here] == [output.token_ids for output in there[::-1]]


@serving
async def test_one_seed_gives_another_turn_other_random_numbers(checkpoint):
    server = await _ready(checkpoint)
    assert server._seed(7, prompt(4)) != server._seed(7, (*prompt(4), 1))
    assert server._seed(7, prompt(4)) == server._seed(7, prompt(4))


@serving
async def test_requests_without_a_seed_repeat_from_run_to_run_and_differ_from_repeat_to_repeat(checkpoint):
    unseeded = {key: value for key, value in SAMPLED.items() if key != "seed"}
    runs = []
    for _ in range(2):
        server = await _ready(checkpoint)
        outputs = [await server.generate(prompt(6), unseeded, str(n)) for n in range(4)]
        await server.set_global_steps(2)
        outputs.append(await server.generate(prompt(6), unseeded, "next step"))
        runs.append([tuple(output.token_ids) for output in outputs])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 5


@serving
async def test_log_probs_come_only_when_asked_for(checkpoint):
    server = await _ready(checkpoint)
    output = await server.generate(prompt(4), {**SAMPLED, "logprobs": False}, "a")
    assert output.log_probs is None
    assert output.stop_reason == "completed"


@serving
async def test_a_sleeping_hybrid_server_holds_no_weights_and_refuses_requests(checkpoint):
    server = await _ready(checkpoint)
    before = (await server.resident_bytes())["weight_bytes"]
    await server.sleep()
    asleep = await server.resident_bytes()
    with pytest.raises(RolloutError, match="freed by sleep"):
        await server.generate(prompt(4), SAMPLED, "a")
    await server.wake_up(["weights"])
    with pytest.raises(RolloutError, match="no complete update"):
        await server.generate(prompt(4), SAMPLED, "a")
    await _update(server, qwen2(seed=2))
    with pytest.raises(RolloutError, match="a sleeping one"):
        await server.generate(prompt(4), SAMPLED, "a")
    await server.wake_up(["kv_cache"])
    assert (await server.generate(prompt(4), SAMPLED, "a")).token_ids
    assert before == sum(parameter.nbytes for parameter in qwen2().parameters())
    assert (asleep["weight_bytes"], asleep["kv_cache_bytes"]) == (0, 0)


@serving
async def test_sleep_waits_for_the_requests_in_flight(checkpoint):
    server = await _ready(checkpoint)
    running = [asyncio.ensure_future(server.generate(prompt(4, n), SAMPLED, str(n))) for n in range(4)]
    await asyncio.sleep(0)
    await server.sleep()
    assert [len((await output).token_ids) > 0 for output in running] == [True] * 4


@serving
async def test_sleep_changes_nothing_in_standalone_mode_or_without_free_cache_engine(checkpoint):
    for options in ({"mode": "standalone"}, {"free_cache_engine": False}):
        server = await _ready(checkpoint, **options)
        await server.sleep()
        assert (await server.generate(prompt(4), SAMPLED, "a")).token_ids


@serving
async def test_a_colocated_server_wakes_with_its_weights_and_no_update(checkpoint):
    server = await _started(checkpoint, mode="colocated", load_weights=True)
    before = (await server.generate(prompt(4), SAMPLED, "a")).token_ids
    await server.sleep()
    with pytest.raises(RolloutError, match="sleeping"):
        await server.generate(prompt(4), SAMPLED, "a")
    await server.wake_up(["kv_cache"])
    assert (await server.generate(prompt(4), SAMPLED, "a")).token_ids == before


@serving
async def test_requests_wait_at_a_closed_gate_until_it_opens(checkpoint):
    server = await _ready(checkpoint)
    assert await server.abort_all_requests() == {"aborted_count": 0, "request_ids": []}
    parked = asyncio.ensure_future(server.generate(prompt(4), SAMPLED, "a"))
    await asyncio.sleep(0.05)
    await server.sleep()
    await server.wake_up(["weights"])
    await _update(server, qwen2(seed=2), 9)
    await server.wake_up(["kv_cache"])
    assert not parked.done()
    await server.resume_generation()
    output = await parked
    assert output.token_ids
    assert output.extra_fields["global_steps"] == 9


@serving
async def test_a_server_that_leaves_rotation_answers_aborted_to_late_and_parked_requests(checkpoint):
    server = await _ready(checkpoint)
    await server.abort_all_requests()
    parked = asyncio.ensure_future(server.generate(prompt(4), SAMPLED, "parked"))
    await asyncio.sleep(0.05)
    await server.abort_all_requests(reject_request=True)
    late = await server.generate(prompt(4), SAMPLED, "late")
    for output in (await parked, late):
        assert (output.token_ids, output.stop_reason) == ([], "aborted")
    await server.resume_generation()
    assert (await server.generate(prompt(4), SAMPLED, "again")).stop_reason == "completed"


@serving
async def test_abort_tells_what_it_ended(checkpoint):
    server = await _ready(checkpoint, response_length=200, max_num_seqs=2)
    running = [asyncio.ensure_future(server.generate(prompt(4, n), SAMPLED, str(n))) for n in range(3)]
    await asyncio.sleep(0)
    one = await server.abort_request("1")
    rest = await server.abort_all_requests()
    unknown = await server.abort_request("nobody")
    assert one == {"aborted": True, "request_id": "1"}
    assert set(rest["request_ids"]) <= {"0", "2"}
    assert unknown["aborted"] is False
    assert (await running[1]).stop_reason == "aborted"


@serving
async def test_an_incomplete_update_leaves_a_server_that_refuses(checkpoint):
    server = await _ready(checkpoint)
    with pytest.raises(WeightSyncError, match=r"missing model\.norm\.weight"):
        await _update(server, qwen2(seed=2), leave_out=("model.norm.weight",))
    with pytest.raises(RolloutError, match="no complete update"):
        await server.generate(prompt(4), SAMPLED, "a")
    await _update(server, qwen2(seed=2))
    assert (await server.generate(prompt(4), SAMPLED, "a")).token_ids


@serving
async def test_another_model_at_the_trainer_is_an_error(checkpoint):
    server = await _started(checkpoint)
    with pytest.raises(WeightSyncError, match="not in the model"):
        await _update(server, moe())


@serving
async def test_an_update_needs_no_wake_up_where_the_server_never_sleeps(checkpoint):
    server = await _started(checkpoint, free_cache_engine=False)
    await _update(server, qwen2(seed=2))
    assert (await server.generate(prompt(4), SAMPLED, "a")).token_ids


@serving
async def test_images_are_refused(checkpoint):
    server = await _ready(checkpoint)
    with pytest.raises(ConfigError, match="images, video or audio"):
        await server.generate(prompt(4), SAMPLED, "a", image_data=["an image"])
    assert (await server.generate(prompt(4), SAMPLED, "a", image_data=[])).token_ids


@serving
async def test_a_context_beyond_the_models_is_refused_at_the_start(checkpoint):
    with pytest.raises(ConfigError, match="max_model_len"):
        await _started(checkpoint, max_model_len=4096)


def test_ids_that_the_tokenizer_does_not_know_are_never_sampled(tmp_path):
    async def scenario():
        server = await _ready(save(qwen2(), tmp_path, known_ids=12))
        outputs = await asyncio.gather(*[server.generate(prompt(4), {**SAMPLED, "seed": n}, "a") for n in range(8)])
        assert max(max(output.token_ids) for output in outputs) < 12 < VOCAB

    asyncio.run(scenario())


async def _runs_as_an_update_begins(server):
    """A request that runs, and the tokens that it has while an update is open."""
    running = asyncio.ensure_future(server.generate(prompt(4), {**SAMPLED, "ignore_eos": True, "max_tokens": 200}, "a"))
    while not server._engine._merging.rows:
        await asyncio.sleep(0)
    await server.begin_weights_update()
    (row,) = server._engine._merging.rows
    before = len(row.token_ids)
    for _ in range(20):
        await server._call(int)  # a turn of the engine's thread
    assert len(row.token_ids) == before < 200
    return running


@serving
async def test_a_request_that_runs_gets_no_token_of_half_updated_weights(checkpoint):
    server = await _ready(checkpoint, max_model_len=256)
    running = await _runs_as_an_update_begins(server)
    await _update(server, qwen2(seed=3))
    assert len((await running).token_ids) == 200


@serving
async def test_a_request_that_an_update_held_fails_with_it(checkpoint):
    server = await _ready(checkpoint, max_model_len=256)
    running = await _runs_as_an_update_begins(server)
    await server.cancel_weights_update()
    with pytest.raises(RolloutError, match="an update that failed"):
        await running
