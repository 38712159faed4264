"""Fixtures that several folders share. Nothing here imports torch, ray or verl."""

import functools
import os
import pickle

import pytest
from filelock import FileLock

from verl_ext_sharding.placement.job import EngineFacts, JobFacts, ServerFacts


def _job(roles=("actor", "ref", "critic"), *, nodes=1, devices=4, engines=None, **fields):
    defaults = {role: EngineFacts(strategy="fsdp2", mini_batch_size=None if role == "ref" else 24) for role in roles}
    return JobFacts(
        num_nodes=nodes,
        devices_per_node=devices,
        engines={**defaults, **(engines or {})},
        rollout=fields.pop("rollout", ServerFacts(name="vllm")),
        train_batch_size=fields.pop("train_batch_size", 24),
        transfer_queue_units=fields.pop("transfer_queue_units", 9),
        **fields,
    )


def pytest_collection_modifyitems(items):
    """Runs of verl come first: of several test processes, none is then left alone with the longest.

    Of these, tests/cases comes last, which waits for what others make (`engines`).
    """
    items.sort(key=lambda item: (item.get_closest_marker("verl") is None, item.path.parent.name == "cases"))


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: what `make(folder)` returned to the first that asked, whichever test process that was."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made(name, make):
        file = root / f"{name}.pickle"
        with FileLock(root / f"{name}.lock"):
            if not file.exists():
                folder = root / name
                folder.mkdir(exist_ok=True)
                file.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(file.read_bytes())

    return made


@pytest.fixture(scope="session")
def engines(once):
    """`engines(num_ranks)`: what verl's engines did in every case of `verl.engine_cases`, as rank 0 saw it."""

    @functools.cache
    def of(num_ranks):
        from tests.verl import engine_runs

        return once(f"engines-{num_ranks}", functools.partial(engine_runs.results, num_ranks))

    return of


@pytest.fixture(scope="session")
def job():
    """Builds the facts of a PPO job: `job(("actor", "critic"), nodes=2, devices=4, rollout_n=5)`."""
    return _job


@pytest.fixture(scope="session")
def compose():
    """Composes a config of verl as `verl-sharding plan` does: `compose("trainer.nnodes=2", config_name="ppo_trainer")`.

    The plugin is switched on unless an override says otherwise.
    """
    from verl_ext_sharding.cli.plan import compose as compose_config

    def composed(*overrides, config_name="ppo_trainer", config_path=None):
        return compose_config(list(overrides), config_name, config_path)

    return composed
