"""verl's GRPO with a reward model of ours: on a device of its own, and in the processes' devices of the actor."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.verl import harness
from tests.verl.conftest import REWARD_POSITIONS, STEPS, grpo_overrides, placed
from verl_ext_sharding.monitor import events

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def killed(reward_model, tmp_path_factory):
    """The reward server, on a device of its own, is killed once the first step is done; the trainer is another of verl's."""
    folder = tmp_path_factory.mktemp("killed")
    output = folder / "live.log"
    killer = threading.Thread(target=_kill_servers, args=(output, folder / "metrics.jsonl"), daemon=True)
    killer.start()
    lines = [
        *grpo_overrides(reward_model, 20),
        *placed(actor=[0, 1], reward=[2], ref=[3]),
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.v1.trainer_mode=colocate_async",
    ]
    started = time.monotonic()
    job = harness.run_trainer(folder, lines, live=output)
    return job, time.monotonic() - started


def _kill_servers(output, metrics):
    deadline = time.monotonic() + harness.TIMEOUT_S
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().strip()):
        time.sleep(0.2)
    found = [event for line in output.read_text(errors="replace").splitlines() if (event := events.parse(line))]
    rows = [row for event in found if event["event"] == "placement" for row in event["rows"]]
    for pid in {row["pid"] for row in rows if row["role"] == "reward"}:
        os.kill(pid, signal.SIGKILL)


def test_a_reward_model_scores_on_its_own_device(grpo):
    harness.assert_trained(grpo, STEPS)
    assert grpo.placement["reward"] == [2]
    assert not {row["accelerator"] for row in grpo.rows if row["role"] != "reward"} & {"2"}


def test_scores_are_finite_and_differ(grpo):
    for step in range(1, STEPS + 1):
        metrics = grpo.metrics[step]
        assert all(math.isfinite(metrics[f"critic/score/{name}"]) for name in ("mean", "max", "min"))
        assert metrics["critic/score/max"] > metrics["critic/score/min"]


def test_over_long_samples_are_cut_and_counted(grpo):
    for step in range(1, STEPS + 1):
        assert 0 < grpo.metrics[step]["reward_input/clip_ratio"] <= 1
        assert grpo.metrics[step]["reward_input/tokens/max"] <= REWARD_POSITIONS
    assert "can exceed the reward model's 48" in grpo.output


def test_scores_are_those_of_transformers_itself(grpo, reward_model):
    texts = [line.partition("scored ")[2] for line in grpo.output.splitlines() if 'scored {"text"' in line]
    samples = [json.loads(text) for text in texts]
    assert len(samples) > 20
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    for sample in samples:
        inputs = tokenizer(sample["text"], return_tensors="pt")
        with torch.no_grad():
            expected = float(model(**inputs).logits[0, -1])
        assert sample["score"] == pytest.approx(expected, abs=1e-5)


def test_the_colocated_async_trainer_places_its_roles_too(killed):
    job, _ = killed
    assert job.placement == {"actor": [0, 1], "rollout": [0, 1], "reward": [2], "ref": [3]}


def test_a_killed_reward_server_ends_the_run_with_what_is_missing(killed):
    job, _ = killed
    assert 1 <= len(job.metrics) < 20
    assert job.code != 0
    assert "server of the reward model" in job.output
    assert "reward server in the run's output" in job.output


def test_a_killed_reward_server_hangs_no_run(killed):
    assert killed[1] < harness.TIMEOUT_S / 2
