"""Limits of rollout and communication settings, seen in the processes of a real run."""

from __future__ import annotations

import pytest

from tests.verl import harness
from tests.verl.conftest import EXPORTED, STEPS

pytestmark = pytest.mark.verl


def _processes(job: harness.Job) -> dict[str, dict[str, str | None]]:
    return {
        name: variables
        for event in job.events
        if event["event"] == "communication"
        for name, variables in event["processes"].items()
    }


def test_no_server_ever_runs_more_requests_than_the_batch_size(grpo):
    peaks = [event["peak_running"] for event in grpo.events if event["event"] == "rollout"]
    assert len(peaks) >= 2 * STEPS
    assert max(peaks) == 4  # eight samples for each of two servers: the limit is what holds them back


def test_communication_variables_reach_the_driver_the_task_runner_every_worker_and_server(grpo):
    processes = _processes(grpo)
    expected = {"driver", "task runner", "actor 0", "actor 1", "ref 0", "rollout server 0.0", "rollout server 1.0"}
    assert set(processes) == expected
    assert {v["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for v in processes.values()} == {"1"}


def test_what_the_user_exported_is_unchanged_in_every_process(grpo):
    assert {v["NCCL_IB_DISABLE"] for v in _processes(grpo).values()} == {EXPORTED["NCCL_IB_DISABLE"]}


def test_the_table_says_what_was_set_and_by_whom(grpo):
    table = grpo.output[grpo.output.index("Communication") :][:1500]
    assert "NCCL_IB_DISABLE" in table
    assert "user" in table
