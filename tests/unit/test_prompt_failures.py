"""A sample without a score and a dead server end the run, with verl's own replay buffers of both kinds."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.trainer.ppo.v1 import replay_buffer as buffers

from verl_ext_sharding.errors import ClusterError, RewardServerError
from verl_ext_sharding.workers import prompt_failures

ERROR = RewardServerError("server", expected="a score", found="none", consequence="the run stops", remedy="look there")
REFILLS = 3
"""Prompts that are sent in place of failed ones before a test calls it endless."""


class Endless(Exception):
    pass


class Actor:
    """An actor's handle; what it answers is there at once, or never."""

    def __init__(self, *, first_error=None, dies=False, busy=False, unreachable=False, engine=None):
        self.first_error, self.dies, self.busy, self.unreachable = first_error, dies, busy, unreachable
        self.engine = engine
        self.__ray_call__ = SimpleNamespace(remote=lambda question: (self, question))


def wait(questions, num_returns, timeout):
    answered = [question for question in questions if not question[0].busy]
    return answered[:num_returns], [question for question in questions if question[0].busy]


def get(asked):
    actor, question = asked
    if actor.dies:
        raise ActorDiedError()
    if actor.unreachable:
        raise ActorUnavailableError("the network is slow", None)
    return question(actor)


@pytest.fixture
def trainer_of(monkeypatch):
    """A trainer with a replay buffer of verl's whose prompts, of status `statuses`, come anew however often they fail."""

    def made(mode, statuses, *, workers=(), rollout=(), reward=()):
        refilled = []

        def refill(count):
            refilled.append(count)
            if len(refilled) > REFILLS:
                raise Endless

        prompts = {
            str(index): {"is_prompt": True, "global_steps": 1, "status": status}
            for index, status in enumerate(statuses)
        }
        rows = {f"{uid}_0": {"global_steps": 1} for uid, tag in prompts.items() if tag["status"] == "finished"}
        queue = SimpleNamespace(kv_list=lambda: {"train": prompts | rows}, kv_clear=lambda **_: None)
        monkeypatch.setattr(buffers, "tq", queue)
        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "get", get)
        settings = {"trainer_mode": mode, "trainer_config": {}, "max_off_policy_threshold": None}
        cls = buffers.ReplayBuffer if mode == "sync" else buffers.ReplayBufferAsync
        sync = {"train_batch_size": 2} if mode == "sync" else {}
        buffer = cls(
            **settings, max_off_policy_strategy="drop", sampler_kwargs={}, refill_fn=refill, poll_interval=0.0, **sync
        )
        replicas = [
            SimpleNamespace(replica_rank=3, servers=[one], config=SimpleNamespace(name="vllm")) for one in rollout
        ]
        manager = (
            SimpleNamespace(rollout_replicas=[SimpleNamespace(servers=[one]) for one in reward]) if reward else None
        )
        return SimpleNamespace(
            replay_buffer=buffer,
            reward_loop_manager=SimpleNamespace(reward_loop_workers=workers, reward_model_manager=manager),
            llm_server_manager=SimpleNamespace(get_replicas=lambda: replicas),
            config=OmegaConf.create(
                {"reward": {"reward_model": {"model_path": "org/reward", "rollout": {"name": "hf"}}}}
            ),
        )

    return made


def sample(trainer):
    return trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("statuses", [("failure", "failure"), ("finished", "failure")])
def test_the_first_error_of_a_worker_that_scores_ends_the_run(mode, statuses, trainer_of):
    trainer = trainer_of(mode, statuses, workers=[Actor(), Actor(first_error=ERROR)], rollout=[Actor(dies=True)])
    prompt_failures.apply(trainer)
    with pytest.raises(RewardServerError) as caught:
        sample(trainer)
    assert caught.value is ERROR


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize(
    ("servers", "cls", "subject"),
    [
        ({"rollout": [Actor(), Actor(dies=True)]}, ClusterError, "rollout server 3"),
        (
            {"rollout": [Actor()], "reward": [Actor(dies=True)]},
            RewardServerError,
            "server of the reward model org/reward",
        ),
    ],
)
def test_a_dead_server_ends_the_run_and_is_named(mode, servers, cls, subject, trainer_of):
    trainer = trainer_of(mode, ("finished", "failure"), **servers)
    prompt_failures.apply(trainer)
    with pytest.raises(cls) as caught:
        sample(trainer)
    assert caught.value.subject == subject
    assert "session_latest/logs" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ActorDiedError)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_server_that_lives_without_its_engine_ends_the_run(mode, trainer_of):
    vllm = SimpleNamespace(errored=True, dead_error=RuntimeError("EngineCore encountered an issue"))
    rollout = [Actor(engine=SimpleNamespace(errored=False)), Actor(engine=vllm)]
    trainer = trainer_of(mode, ("finished", "failure"), rollout=rollout)
    prompt_failures.apply(trainer)
    with pytest.raises(ClusterError, match=r"its engine, with .*EngineCore encountered an issue"):
        sample(trainer)


def test_without_the_hook_an_asynchronous_trainer_sends_prompts_for_ever(trainer_of):
    trainer = trainer_of("colocate_async", ("failure", "failure"), workers=[Actor(first_error=ERROR)])
    prompt_failures.apply(trainer)
    prompt_failures.remove(trainer)
    with pytest.raises(Endless):
        sample(trainer)


def test_what_failed_for_another_reason_stays_verls_business(trainer_of):
    asked = [Actor(), Actor(busy=True), Actor(busy=True, dies=True), Actor(unreachable=True)]
    trainer = trainer_of("colocate_async", ("failure", "failure"), workers=asked, rollout=asked)
    prompt_failures.apply(trainer)
    with pytest.raises(Endless):
        sample(trainer)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_nobody_is_asked_while_no_prompt_has_failed(mode, trainer_of):
    trainer = trainer_of(mode, ("finished", "finished"), workers=[Actor(first_error=ERROR)], rollout=[Actor(dies=True)])
    prompt_failures.apply(trainer)
    batch, _ = sample(trainer)
    assert len(batch.keys) == 2


def test_a_sampler_of_the_users_that_is_none_of_verls_is_left_alone():
    trainer = SimpleNamespace(replay_buffer=SimpleNamespace())
    prompt_failures.apply(trainer)
    assert vars(trainer.replay_buffer) == {}


def test_after_removal_the_buffer_is_its_class_again(trainer_of):
    trainer = trainer_of("sync", ())
    before = dict(vars(trainer.replay_buffer))
    for change in (prompt_failures.apply, prompt_failures.apply, prompt_failures.remove, prompt_failures.remove):
        change(trainer)
    assert vars(trainer.replay_buffer) == before
