"""Micro-batches and token budgets of one role, and what verl's own checks then say of the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cases():
    """`[(job and what the user wrote, outcome of one request)]`, from a process that imports verl."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.verl.micro_batch_cases"]
    done = subprocess.run(command, env=os.environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.rpartition("answers")[2])
    return [(job, outcome) for job, outcomes in answers.items() for outcome in outcomes]


def test_what_we_let_through_verl_takes_and_what_verl_takes_we_let_through(cases):
    different = [(job, outcome) for job, outcome in cases if bool(outcome["ours"]) != bool(outcome["verl"])]
    assert different == []
    assert {bool(outcome["ours"]) for _, outcome in cases} == {True, False}


def test_a_job_that_says_enough_for_every_role_is_refused_no_request(cases):
    enough = ("sizes of all", "token budgets", "deprecated sizes under token budgets")
    refused = [(job, outcome) for job, outcome in cases if job.partition(": ")[2] in enough and outcome["ours"]]
    assert refused == []


def test_a_refusal_names_a_key_of_verl_and_one_of_ours(cases):
    refusals = {outcome["ours"] for job, outcome in cases if outcome["ours"] and "lora" not in job}
    for text in refusals:
        assert "_per_gpu=" in text.rpartition("fix:")[2]
        assert "sharding.roles." in text or "=null" in text
