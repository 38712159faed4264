import asyncio
import contextlib
import threading

import httpx
import pytest
import tiny_reward_models as tiny
import torch

from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.rollout.reward_server import HFRewardServer
from verl_ext_sharding.rollout.reward_settings import RewardServing

RAW = {"use_activation": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tiny.llama(positions=64), tmp_path_factory.mktemp("reward"))


@contextlib.asynccontextmanager
async def _serving(path, **options):
    """A loaded server and a client of its routes, without a socket between them."""
    server = HFRewardServer(RewardServing(path=path, **{"dtype": "float32", **options}))
    await server.load()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=server.http.app), base_url="http://reward"
    ) as client:
        yield server, client
    await server.close()


def serving(**options):
    """Turns an async test of a server and its client into one that pytest runs."""

    def decorate(scenario):
        def test(folder):
            async def run():
                async with _serving(folder, **options) as (server, client):
                    await scenario(server, client, folder)

            asyncio.run(asyncio.wait_for(run(), timeout=60))

        test.__name__ = scenario.__name__
        return test

    return decorate


async def _score(client, given, **fields):
    return await client.post("/classify", json={"input": given, **RAW, **fields})


@serving()
async def test_verl_finds_the_score_of_a_text_where_it_looks_for_it(server, client, folder):
    (ids,) = tiny.sequences(9)
    answer = await client.post("/classify", json={"model": folder, "input": tiny.text(ids), "use_activation": False})
    expected = tiny.alone(tiny.llama(positions=64), [tiny.BOS, *ids])
    assert answer.json()["data"][-1]["probs"][-1] == pytest.approx(expected[-1], abs=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == 10
    assert answer.json()["data"][0]["num_classes"] == 1


@serving()
async def test_texts_ids_and_lists_of_them_score_the_same(server, client, folder):
    rows = tiny.sequences(9, 4)
    texts = [tiny.text(ids) for ids in rows]
    with_bos = [[tiny.BOS, *ids] for ids in rows]
    answers = [await _score(client, given) for given in (texts, with_bos)]
    answers.append(await _score(client, [f"<s> {text}" for text in texts], add_special_tokens=False))
    scores = [[row["probs"] for row in answer.json()["data"]] for answer in answers]
    assert scores[0] == scores[1] == scores[2]
    assert [row["index"] for row in answers[0].json()["data"]] == [0, 1]
    single = (await _score(client, with_bos[0])).json()["data"]
    assert single[0]["probs"] == pytest.approx(scores[0][0], abs=1e-6)


@serving()
async def test_a_probability_is_the_default(server, client, folder):
    logit = (await _score(client, "w7 w8")).json()["data"][0]["probs"][0]
    probability = (await client.post("/classify", json={"input": "w7 w8"})).json()["data"][0]["probs"][0]
    assert probability == pytest.approx(torch.tensor(logit).sigmoid().item())


@serving(max_num_batched_tokens=64, max_num_seqs=3)
async def test_every_one_of_many_requests_at_once_gets_its_own_score(server, client, folder):
    rows = tiny.sequences(*range(1, 41))
    answers = await asyncio.gather(*[_score(client, ids) for ids in rows])
    model = tiny.llama(positions=64)
    for answer, ids in zip(answers, rows, strict=True):
        assert answer.json()["data"][0]["probs"] == pytest.approx(tiny.alone(model, ids), abs=1e-5)


@pytest.mark.parametrize(
    ("determinism", "sizes"), [(False, [1, 3]), (True, [1, 1, 1, 1])], ids=["batched", "full_determinism"]
)
def test_requests_that_wait_share_a_pass_unless_the_run_must_repeat_bit_for_bit(determinism, sizes, folder):
    async def scenario():
        async with _serving(folder, full_determinism=determinism) as (server, client):
            held, seen = Held(server), []
            server._model._model.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
            )
            first = asyncio.create_task(_score(client, "w5"))
            await asyncio.to_thread(held.wait)
            others = [asyncio.create_task(_score(client, text)) for text in ("w6 w7", "w8", "w9 w10 w11")]
            while len(server._engine._waiting) < 3:
                await asyncio.sleep(0.01)
            health = await client.get("/health")  # the loop is free while the model works
            held.release()
            await asyncio.gather(first, *others)
            return health.status_code, seen

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        assert asyncio.run(asyncio.wait_for(scenario(), 60)) == (200, sizes)
    finally:
        torch.use_deterministic_algorithms(deterministic)


class Held:
    """Holds the model's first forward pass until `release`."""

    def __init__(self, server):
        self._reached, self._released = threading.Event(), threading.Event()
        server._model._model.register_forward_pre_hook(self)

    def __call__(self, *_):
        self._reached.set()
        assert self._released.wait(30)

    def wait(self):
        assert self._reached.wait(30)

    def release(self):
        self._released.set()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        ({"input": 5}, 400, "input must be"),
        ({"input": [5] * 65}, 400, "65 tokens and the reward model takes at most 64"),
        ({"input": " ".join(["w5"] * 64)}, 400, "65 tokens"),
        ({"input": [5, 120]}, 400, "token id 120 at position 1"),
        ({"input": [[5], [-1]]}, 400, "token id -1"),
        ({"input": "w5", "model": "another"}, 404, "'another' is not served here"),
    ],
    ids=["json", "type", "long_ids", "long_text", "id", "negative_id", "model"],
)
def test_a_bad_request_is_answered_in_words(body, status, words, folder):
    async def scenario():
        async with _serving(folder) as (_, client):
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            refused, after = await client.post("/classify", **sent), await _score(client, "w5")
            return refused, after

    refused, after = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (refused.status_code, after.status_code) == (status, 200)
    assert words in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == status


@serving()
async def test_a_pass_that_fails_is_answered_with_its_cause_and_the_server_goes_on(server, client, folder):
    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    hook = server._model._model.register_forward_pre_hook(fail)
    failed = await _score(client, "w5 w6")
    hook.remove()
    assert failed.status_code == 500
    assert "OutOfMemoryError: tried to allocate 7 GiB" in failed.json()["error"]["message"]
    assert (await _score(client, "w5 w6")).status_code == 200


@serving()
async def test_a_sleeping_server_says_so_and_answers_when_woken(server, client, folder):
    before = (await _score(client, "w5 w6")).json()["data"]
    await server.sleep()
    asleep = await _score(client, "w5 w6")
    health = await client.get("/health")
    await server.wake_up()
    assert asleep.status_code == 503
    assert "sleeps" in asleep.json()["error"]["message"]
    assert health.json() == {"status": "ok", "sleeping": True}
    assert (await _score(client, "w5 w6")).json()["data"] == before


@serving(sleeps=False)
async def test_a_server_that_must_always_answer_does_not_sleep(server, client, folder):
    await server.sleep()
    assert (await _score(client, "w5")).status_code == 200


@serving()
async def test_sleep_waits_for_requests_that_have_not_reached_the_model_yet(server, client, folder):
    tokenized, reached, released = server._model.tokenized, threading.Event(), threading.Event()

    def held(*args):
        reached.set()
        assert released.wait(30)
        return tokenized(*args)

    server._model.tokenized = held
    scoring = asyncio.create_task(_score(client, "w5"))
    await asyncio.to_thread(reached.wait, 30)
    sleeping = asyncio.create_task(server.sleep())
    while (await client.get("/health")).json()["sleeping"] is False:
        await asyncio.sleep(0.01)
    await asyncio.wrap_future(server._engine.call(int))  # behind the call that frees the weights, had there been one
    await asyncio.sleep(0.01)
    assert not sleeping.done()
    released.set()
    assert (await scoring).status_code == 200
    await sleeping


@serving()
async def test_a_paused_server_refuses_requests_until_it_resumes(server, client, folder):
    assert await server.abort_all_requests(reject_request=True) == {"aborted_count": 0, "request_ids": []}
    assert (await _score(client, "w5")).status_code == 503
    await server.resume_generation()
    assert (await _score(client, "w5")).status_code == 200


@serving()
async def test_a_generative_request_is_told_where_to_go(server, client, folder):
    answer = await client.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 404
    assert "rollout.name=vllm" in answer.json()["error"]["message"]


@serving()
async def test_the_model_is_listed_with_its_limit(server, client, folder):
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [(folder, 64)]


@serving(asked=RewardServerSettings(offload_params=True))
async def test_a_server_whose_weights_stay_on_the_host_answers_before_and_after_sleep(server, client, folder):
    before = (await _score(client, "w5 w6")).json()["data"]
    await server.sleep()
    await server.wake_up()
    assert (await _score(client, "w5 w6")).json()["data"] == before
    assert await server.weight_bytes() == 0


def test_a_model_that_padding_changes_is_scored_in_batches_of_equal_lengths(tmp_path):
    path = tiny.save(tiny.xlnet(), tmp_path)
    rows = tiny.sequences(3, 8, 8, 5)

    async def scenario():
        async with _serving(path) as (_, client):
            return await _score(client, rows)

    answer = asyncio.run(asyncio.wait_for(scenario(), 60)).json()
    model = tiny.xlnet()
    for row, ids in zip(answer["data"], rows, strict=True):
        assert row["probs"] == pytest.approx(tiny.alone(model, ids), abs=1e-5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_server_listens_on_a_free_port_of_its_address(host, folder):
    async def scenario():
        async with _serving(folder) as (server, _):
            address = await server.http.listen(host)
            async with httpx.AsyncClient() as client:
                return address, await client.post(f"http://{address}/classify", json={"input": "w5"})

    address, answer = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert answer.status_code == 200
    assert address.startswith("[::1]:" if host == "::1" else "127.0.0.1:")


@pytest.mark.parametrize("labels", [1, 3])
def test_a_model_of_several_outputs_is_told_which_one_is_the_score(labels, tmp_path, caplog):
    async def scenario():
        async with _serving(tiny.save(tiny.llama(labels=labels), tmp_path)):
            return [record.message for record in caplog.records if record.levelname == "WARNING"]

    warned = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert warned == [
        f"{tmp_path} has 3 outputs (LABEL_0, LABEL_1, LABEL_2); verl takes the last one, LABEL_2, as the score"
    ] * (labels > 1)
