"""The reward loop worker against an HTTP server of this process: verl's own constructor and dispatch, real requests."""

import asyncio
import json
import socket
import threading
import time

import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from reward_tokenizers import byte_level, words
from tensordict import TensorDict
from verl.protocol import DataProto

from verl_ext_sharding.errors import ConfigError, RewardInputError, RewardServerError
from verl_ext_sharding.rollout import reward_metrics, reward_worker
from verl_ext_sharding.rollout.reward_worker import NUM_TOKENS, TRUNCATED, ShardingRewardLoopWorker

ROBERTA = {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1, "vocab_size": 600}
LIMIT = 64


class Server:
    """A reward server whose answers a test chooses; remembers what it was asked."""

    def __init__(self):
        self.asked, self.answers = [], []
        app = FastAPI()
        app.post("/{path:path}")(self._answer)
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.address = f"127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _answer(self, request: Request, path: str):
        self.asked.append((path, await request.json()))
        status, body = self.answers.pop(0) if self.answers else (200, scored(path, 0.5))
        return Response(json.dumps(body), status_code=status, media_type="application/json")  # NaN too

    def stop(self):
        self._server.should_exit = True
        self._thread.join()


def scored(path, *values):
    return {"data": [{"embedding" if "embeddings" in path else "probs": list(values)}]}


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running, monkeypatch):
    running.asked.clear()
    running.answers.clear()
    monkeypatch.setattr(reward_worker, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    return running


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a policy and of reward models: tokenizers and configs, no weights."""
    folder = tmp_path_factory.mktemp("models")
    byte_level().save_pretrained(folder / "policy")
    for name, tokenizer, config in (
        ("reward", words(), ROBERTA),
        ("few_rows", words(), {**ROBERTA, "vocab_size": 100}),
        ("no_template", words(None), ROBERTA),
    ):
        tokenizer.save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def config_of(models, engine="hf", *, reward="reward", function=None, sharding=None, enable=True):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"path": str(models / "policy"), "tokenizer_path": None}},
            "reward": {
                "custom_reward_function": {"path": function, "name": "compute_score"},
                "reward_manager": {"source": "register", "name": "naive"},
                "reward_model": {
                    "enable": enable,
                    "model_path": str(models / reward),
                    "rollout": {"name": engine, "max_model_len": None},
                },
            },
            "sharding": sharding or {},
        }
    )


def worker(models, server, *args, **kwargs):
    return ShardingRewardLoopWorker(config_of(models, *args, **kwargs), getattr(server, "address", server))


def sample(response="w1 w2", prompt="w3", padding=3, **names):
    """One sample as verl's colocated path builds it: prompt and response padded on the right."""
    tokenizer = byte_level()
    ids = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, response)]
    rows = [torch.nn.functional.pad(row, (0, padding), value=7) for row in ids]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (0, padding)) for row in ids]
    batch = {"prompts": rows[0][None], "responses": rows[1][None], "attention_mask": torch.cat(masks)[None]}
    raw = np.empty(1, dtype=object)
    raw[0] = [{"role": "user", "content": prompt}]
    named = {name: np.array([value], dtype=object) for name, value in names.items()}
    return DataProto(batch=TensorDict(batch, batch_size=1), non_tensor_batch={"raw_prompt": raw, **named})


def score(made, data):
    return asyncio.run(made.compute_score(data))


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compute_score(**_):
    """What `function=__file__` names."""


# What is asked and what comes back


@pytest.mark.parametrize(
    ("engine", "path", "extra"),
    [
        ("hf", "classify", {"use_activation": False}),
        ("vllm", "classify", {"use_activation": False}),
        ("sglang", "v1/embeddings", {}),
    ],
)
def test_each_server_is_asked_in_its_own_form(engine, path, extra, models, server):
    score(worker(models, server, engine), sample())
    text = "<|user|>w3<|end|><|assistant|>w1 w2<|end|>"
    assert server.asked == [(path, {"model": str(models / "reward"), "input": text, **extra})]


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_the_last_value_is_the_score(engine, models, server):
    server.answers.append((200, scored("embeddings" if engine == "sglang" else "classify", 9.0, -1.25)))
    assert score(worker(models, server, engine), sample())["reward_score"] == -1.25


def test_a_sample_that_fits_is_counted_as_not_cut(models, server):
    assert score(worker(models, server), sample())["reward_extra_info"] == {TRUNCATED: 0, NUM_TOKENS: 9}


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_an_over_long_sample_is_cut_to_the_models_limit_and_counted(engine, models, server):
    info = score(worker(models, server, engine), sample(response="w4 " * 300))["reward_extra_info"]
    assert info == {TRUNCATED: 1, NUM_TOKENS: LIMIT}
    assert len(words()(server.asked[0][1]["input"])["input_ids"]) == info[NUM_TOKENS]


def test_the_users_own_limit_holds(models, server):
    made = worker(models, server, sharding={"roles": {"reward": {"max_input_tokens": 20}}})
    assert score(made, sample(response="w4 " * 300))["reward_extra_info"][NUM_TOKENS] == 20


def test_off_sends_what_verl_would_send(models, server):
    made = worker(models, server, sharding={"guards": {"reward_length": "off"}})
    info = score(made, sample(response="w4 " * 300))["reward_extra_info"]
    assert (info[TRUNCATED], info[NUM_TOKENS] > LIMIT) == (0, True)


def test_error_ends_in_an_error_and_asks_nothing(models, server):
    made = worker(models, server, sharding={"guards": {"reward_length": "error"}})
    with pytest.raises(RewardInputError, match="at most 64 tokens") as caught:
        score(made, sample(response="w4 " * 300))
    assert server.asked == []
    assert made.first_error is caught.value


def test_the_length_that_the_agent_loop_gives_wins_over_a_mask_of_several_outputs(models, server):
    data = sample(response="w1 w2", padding=6)
    data.batch["attention_mask"][:] = 1
    data.non_tensor_batch["response_len"] = np.array([5])
    score(worker(models, server), data)
    assert "<|assistant|>w1 w2<|end|>" in server.asked[0][1]["input"]


def test_the_end_of_sequence_token_is_not_part_of_the_response(models, server):
    score(worker(models, server), sample(response="w1 w2</s>"))
    assert "</s>" not in server.asked[0][1]["input"]


def test_a_batch_is_scored_in_order(models, server):
    made = worker(models, server)
    outputs = asyncio.run(made.compute_score_batch(DataProto.concat([sample(response=f"w{n}") for n in range(4)])))
    assert [output["reward_score"] for output in outputs] == [0.5] * 4
    assert len(server.asked) == 4


# What is refused before a sample is scored


def test_a_tokenizer_of_another_vocabulary_is_refused_at_construction(models, server):
    with pytest.raises(ConfigError, match="has 100"):
        worker(models, server, reward="few_rows")


def test_a_tokenizer_without_a_template_is_refused_at_construction(models, server):
    with pytest.raises(ConfigError, match="chat template"):
        worker(models, server, reward="no_template")


def test_an_engine_that_scores_no_text_is_refused(models, server):
    with pytest.raises(ConfigError, match="trtllm"):
        score(worker(models, server, "trtllm"), sample())


@pytest.mark.parametrize("settings", [{"enable": False}, {"function": __file__}])
def test_a_rule_and_a_function_of_the_users_are_left_as_they_are(settings, models, server):
    assert worker(models, server, reward="no_template", **settings).template is None


# Servers that fail


def test_a_dead_server_ends_in_an_error_after_a_few_attempts(models, server, unused_port):
    with pytest.raises(RewardServerError) as caught:
        score(worker(models, f"127.0.0.1:{unused_port}"), sample())
    assert "4 attempts" in caught.value.found


@pytest.mark.parametrize("part", ["/classify", "reward", "hf reward server", "session_latest/logs"])
def test_the_error_names_address_model_and_where_to_look(part, models, server, unused_port):
    with pytest.raises(RewardServerError, match=part):
        score(worker(models, f"127.0.0.1:{unused_port}"), sample())


def test_the_pauses_between_attempts_are_seconds_in_all():
    assert sum(reward_worker.RETRY_DELAYS_S) < 10


def test_an_error_of_the_server_is_repeated(models, server):
    server.answers += [(500, {}), (503, {})]
    assert score(worker(models, server), sample())["reward_score"] == 0.5
    assert len(server.asked) == 3


def test_a_server_that_stays_broken_is_told_with_what_it_said(models, server):
    server.answers += [(500, {"error": "CUDA out of memory"})] * 4
    with pytest.raises(RewardServerError, match=r"HTTP 500.*CUDA out of memory"):
        score(worker(models, server), sample())


def test_a_request_that_the_server_refuses_is_not_repeated(models, server):
    server.answers += [(400, {"error": "no such model"})]
    with pytest.raises(RewardServerError, match=r"no such model.*after 1 attempt"):
        score(worker(models, server), sample())
    assert len(server.asked) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_an_error_that_names_the_sample(value, models, server):
    server.answers.append((200, {"data": [{"probs": [value]}]}))
    with pytest.raises(RewardServerError, match=r"uid q-17.*w1 w2"):
        score(worker(models, server), sample(uid="q-17"))


def test_the_first_error_is_kept_for_the_trainer_to_ask(models, server):
    made = worker(models, server)
    score(made, sample())
    assert made.first_error is None
    for value in (float("nan"), float("inf")):
        server.answers.append((200, scored("classify", value)))
        with pytest.raises(RewardServerError):
            score(made, sample())
    assert "nan" in made.first_error.found


def test_an_error_that_is_not_ours_is_kept_too_where_a_reward_model_is_asked(models, server, monkeypatch):
    made = worker(models, server)
    monkeypatch.setattr(made.input_tokenizer, "decode", lambda *_: [].pop())
    with pytest.raises(IndexError):
        score(made, sample())
    assert isinstance(made.first_error, RewardInputError)
    assert made.first_error.found == "IndexError: pop from empty list"
    made.first_error, made.template = None, None  # a rule, or a function of the user's: how it fails is verl's business
    with pytest.raises((IndexError, AssertionError)):
        score(made, sample())
    assert made.first_error is None


@pytest.mark.parametrize("body", [{}, {"data": []}, {"data": [{"probs": []}]}, {"data": [{"text": "?"}]}, ["?"]])
def test_an_answer_without_a_score_is_an_error(body, models, server):
    server.answers.append((200, body))
    with pytest.raises(RewardServerError, match="classification head"):
        score(worker(models, server), sample())


# Metrics


class Store:
    """TransferQueue's two calls over a dictionary, columns as NonTensorStacks come out of it: lists."""

    def __init__(self, rows):
        self.rows = rows

    def kv_batch_get(self, keys, partition_id, select_fields):
        return {name: [self.rows[key][name] for key in keys] for name in select_fields}

    def kv_batch_put(self, keys, partition_id, fields):
        for index, key in enumerate(keys):
            self.rows[key].update({name: fields.get(name).tolist()[index] for name in fields.keys()})  # noqa: SIM118


class Batch:
    partition_id = "train"

    def __init__(self, keys, padding=()):
        self.keys = [*keys, *padding]
        self.tags = [{} for _ in keys] + [{"is_padding": True} for _ in padding]


class Trainer:
    """The two methods of verl's trainer that are hooked."""

    store: Store

    def _compute_reward_colocate(self, batch, metrics=None):
        for number, key in enumerate(batch.keys):
            self.store.rows[key].update({TRUNCATED: np.int64(number % 2), NUM_TOKENS: np.int64(10 + number)})
        return batch

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["training/global_step"] = global_steps


@pytest.fixture
def trainer(monkeypatch):
    made = Trainer()
    made.store = Store({key: {"extra_fields": {"turns": 1}} for key in "abcd"})
    monkeypatch.setattr(reward_metrics, "transfer_queue", made.store)
    reward_metrics.apply(made)
    return made


def step_metrics(trainer, batch):
    metrics = {}
    trainer._compute_metrics(batch, metrics, {}, global_steps=3, epoch=0)
    return metrics


def test_a_colocated_models_share_is_a_metric_of_the_step(trainer):
    batch = trainer._compute_reward_colocate(Batch("abcd"), metrics={})
    assert step_metrics(trainer, batch) == {
        "training/global_step": 3,
        "reward_input/clip_ratio": 0.5,
        "reward_input/tokens/mean": 11.5,
        "reward_input/tokens/max": 13,
    }


def test_a_colocated_models_values_are_where_verls_validation_reads_them(trainer):
    trainer._compute_reward_colocate(Batch("ab"))
    found = [trainer.store.rows[key]["extra_fields"] for key in "ab"]
    assert found[1] == {"turns": 1, "reward_extra_info": {TRUNCATED: 1, NUM_TOKENS: 11}}


def test_a_model_with_its_own_devices_has_the_same_metric(trainer):
    for number, key in enumerate("abcd"):
        info = {TRUNCATED: int(number == 0), NUM_TOKENS: 5}
        trainer.store.rows[key]["extra_fields"]["reward_extra_info"] = info
    assert step_metrics(trainer, Batch("abcd"))["reward_input/clip_ratio"] == 0.25


def test_padding_does_not_count(trainer):
    trainer._compute_reward_colocate(Batch("abcd"))
    assert step_metrics(trainer, Batch("bd", padding="ac"))["reward_input/clip_ratio"] == 1.0


def test_samples_without_a_reward_model_add_no_metric(trainer):
    assert step_metrics(trainer, Batch("abcd")) == {"training/global_step": 3}


def test_after_removal_the_trainer_is_its_class_again(trainer):
    reward_metrics.apply(trainer)
    reward_metrics.remove(trainer)
    reward_metrics.remove(trainer)
    assert vars(trainer) == {"store": trainer.store}
