"""The run's spec: what the driver decided, unchanged in every process of the run."""

import dataclasses
import json

import pytest

from verl_ext_sharding import envs
from verl_ext_sharding.config import spec
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.versions import __version__


@pytest.fixture
def make(job):
    def made(**fields):
        placement = place({"actor": [0, 1], "critic": [1, 3]}, job())
        return RunSpec(placement=placement, bundle_cpus=3, **fields)

    return made


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hybrid_rollout": False, "timeout_s": 7.5},
        {"needed": ("trainer.plugin", "sharding.roles.*.devices")},
        {"version": "9.9"},
        {"measures": {"critic": RoleMeasures(attention="sdpa", checkpointing={"policy": "every_n", "every": 2})}},
    ],
    ids=str,
)
def test_a_spec_survives_the_way_through_the_environment(fields, make):
    run = make(**fields)
    assert RunSpec.from_json(run.to_json()) == run
    assert RunSpec.from_json(run.to_json()).digest() == run.digest()


def test_every_field_is_in_the_json(make):
    assert set(json.loads(make().to_json())) == {f.name for f in dataclasses.fields(RunSpec)}


def test_a_spec_carries_the_drivers_version(make):
    assert make().version == __version__


@pytest.mark.parametrize(
    "fields",
    [
        {"hybrid_rollout": False},
        {"timeout_s": 1.0},
        {"needed": ("a",)},
        {"version": "0"},
        {"bundle_cpus": 2},
        {"measures": {"actor": RoleMeasures(logits="fused")}},
    ],
    ids=str,
)
def test_any_difference_shows_in_the_digest(fields, make):
    assert dataclasses.replace(make(), **fields).digest() != make().digest()


def test_another_placement_shows_in_the_digest(make, job):
    other = dataclasses.replace(make(), placement=place({"actor": [0, 1], "critic": [2, 3]}, job()))
    assert other.digest() != make().digest()


def test_a_process_reads_its_own_environment(make, monkeypatch):
    run = make()
    monkeypatch.setenv(envs.SPEC, run.to_json())
    assert spec.current() == run
    other = make(timeout_s=1.0)
    monkeypatch.setenv(envs.SPEC, other.to_json())
    assert spec.current() == other


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_spec_a_process_belongs_to_no_run(value, monkeypatch):
    monkeypatch.delenv(envs.SPEC, raising=False)
    if value is not None:
        monkeypatch.setenv(envs.SPEC, value)
    assert spec.current() is None
