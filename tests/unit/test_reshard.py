"""Checkpoints of any number of ranks become those of another: on torch's fake process group, one process as each rank."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

from verl_ext_sharding.engines.reshard import fit, fitted_model, fitted_optimizer, is_sharded, saved_files  # noqa: E402
from verl_ext_sharding.errors import ConfigError  # noqa: E402

WHOLE = torch.arange(15.0).reshape(5, 3)
FOLDER = "/runs/global_step_4/actor"

SAVED = {
    "one rank": ((1,), [Shard(0)]),
    "uneven rows of two": ((2,), [Shard(0)]),
    "rows of four, the last without any": ((4,), [Shard(0)]),
    "columns of two": ((2,), [Shard(1)]),
    "columns of four, the last without any": ((4,), [Shard(1)]),
    "two replicas": ((2,), [Replicate()]),
    "two replicas of two parts": ((2, 2), [Replicate(), Shard(0)]),
    "three replicas of two parts": ((3, 2), [Replicate(), Shard(1)]),
    "two parts of two replicas each": ((2, 2), [Shard(0), Replicate()]),
}
RESUMED = {
    "two": ((2,), [Shard(0)]),
    "three": ((3,), [Shard(0)]),
    "four": ((4,), [Shard(1)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
}


class Rank:
    """This process as one rank of a job, with a mesh of all ranks."""

    def __init__(self, rank, shape):
        self.rank, self.shape = rank, shape

    def __enter__(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = torch.tensor(self.shape).prod().item()
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=size)
        return init_device_mesh("cpu", self.shape)

    def __exit__(self, *_):
        dist.destroy_process_group()


def everywhere(shape):
    """Each rank of a job in turn."""
    size = torch.tensor(shape).prod().item()
    for rank in range(size):
        yield rank, Rank(rank, shape)


def share(whole, rank, shape, placements):
    """What a rank must hold, by arithmetic alone."""
    position = torch.arange(torch.tensor(shape).prod()).reshape(shape).eq(rank).nonzero()[0].tolist()
    for place, axis_size, index in zip(placements, shape, position, strict=True):
        if isinstance(place, Shard):
            parts = whole.chunk(axis_size, dim=place.dim)
            empty = whole.narrow(place.dim, 0, 0)
            whole = parts[index] if index < len(parts) else empty
    return whole


def save(folder):
    """The files of each job of SAVED: a weight, an optimizer with its states after a step."""
    for name, (shape, placements) in SAVED.items():
        for rank, process in everywhere(shape):
            with process as mesh:
                model, optimizer = trained()
                for state in optimizer["state"].values():
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = distribute_tensor(state[key], mesh, placements, src_data_rank=None)
                model = {"weight": distribute_tensor(model["weight"], mesh, placements, src_data_rank=None), "n": 7}
                torch.save(model, folder / f"{name}-{rank}-model.pt")
                torch.save(optimizer, folder / f"{name}-{rank}-optim.pt")


def trained():
    parameter = torch.nn.Parameter(WHOLE.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = WHOLE + 1
    optimizer.step()
    return {"weight": WHOLE}, optimizer.state_dict()


def load(folder, name, kind):
    size = torch.tensor(SAVED[name][0]).prod().item()
    files = [folder / f"{name}-{rank}-{kind}.pt" for rank in range(size)]
    return [torch.load(file, map_location="cpu", mmap=True, weights_only=False) for file in files]


def run(_index, folder):
    """Everything that needs a process group; answers go to a file."""
    torch.set_num_threads(1)
    folder = Path(folder)
    save(folder)
    answers = {}
    for name, kind in itertools.product(SAVED, ("model", "optim")):
        answers[name, kind] = is_sharded(load(folder, name, kind)[0])
    for name in SAVED:
        answers[name, "whole"] = fitted(folder, name, None)
    for to, (shape, placements) in RESUMED.items():
        for rank, process in everywhere(shape):
            with process as mesh:
                for name in SAVED:
                    answers[name, to, rank] = fitted(folder, name, (mesh, placements))
                plain = fit([WHOLE], distribute_tensor(WHOLE, mesh, placements, src_data_rank=None), FOLDER)
                answers["plain", to, rank] = plain._local_tensor
    answers["refused"] = refusals()
    torch.save(answers, folder / "answers.pt")


def fitted(folder, name, target):
    """What a rank gets of a model and of an optimizer; `target` is its mesh and placements, None: the whole."""
    like = WHOLE if target is None else distribute_tensor(WHOLE, target[0], target[1], src_data_rank=None)
    model = fitted_model(load(folder, name, "model"), {"weight": like}, FOLDER)
    states = fitted_optimizer(load(folder, name, "optim"), [like], FOLDER)
    found = [model["weight"], *(states["state"][0][key] for key in ("exp_avg", "exp_avg_sq"))]
    if target is not None:
        assert all(one.placements == tuple(target[1]) and one.shape == WHOLE.shape for one in found)
    local = [one._local_tensor if isinstance(one, DTensor) else one for one in found]
    return {"tensors": local, "n": model["n"], "step": states["state"][0]["step"], "groups": states["param_groups"]}


def refusals():
    """Errors of parts that do not say how they make a whole: FSDP1's, and tensors that are cut two ways."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    found = {}
    with Rank(0, (1,)):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        found["fsdp1"] = _refusal([sharded_tensor.ones(spec, 5, 3)])
    with Rank(0, (2, 2)) as mesh:
        found["crossed"] = _refusal([distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)], src_data_rank=None)] * 4)
    return found


def _refusal(parts):
    try:
        return type(fit(parts, WHOLE, FOLDER)).__name__
    except ConfigError as error:
        return {"subject": error.subject, "found": error.found, "remedy": error.remedy}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    mp.spawn(run, args=(str(folder),), nprocs=1)
    return torch.load(folder / "answers.pt", weights_only=False)


@pytest.fixture(scope="module")
def adam():
    """Model and optimizer as they were before they were cut."""
    model, optimizer = trained()
    state = optimizer["state"][0]
    return [model["weight"], state["exp_avg"], state["exp_avg_sq"]], state["step"], optimizer["param_groups"]


def equal(found, expected):
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# From any number of ranks


@pytest.mark.parametrize("name", SAVED)
def test_the_parts_of_all_ranks_make_the_whole(name, answers, adam):
    assert equal(answers[name, "whole"]["tensors"], adam[0])


@pytest.mark.parametrize(("name", "to"), itertools.product(SAVED, RESUMED))
def test_each_rank_takes_its_own_share_whatever_wrote_the_files(name, to, answers, adam):
    shape, placements = RESUMED[to]
    for rank, _ in everywhere(shape):
        expected = [share(whole, rank, shape, placements) for whole in adam[0]]
        assert equal(answers[name, to, rank]["tensors"], expected), rank


@pytest.mark.parametrize("to", RESUMED)
def test_a_whole_tensor_is_cut_for_each_rank(to, answers):
    shape, placements = RESUMED[to]
    for rank, _ in everywhere(shape):
        assert equal([answers["plain", to, rank]], [share(WHOLE, rank, shape, placements)])


@pytest.mark.parametrize("name", SAVED)
def test_what_is_no_shard_stays_as_the_first_rank_saved_it(name, answers, adam):
    _, step, groups = adam
    assert answers[name, "whole"]["n"] == 7
    assert answers[name, "whole"]["step"] == step
    assert answers[name, "whole"]["groups"] == groups


@pytest.mark.parametrize("kind", ["fsdp1", "crossed"])
def test_shards_that_do_not_say_how_they_make_a_whole_are_refused_with_what_merges_them(kind, answers):
    refusal = answers["refused"][kind]
    assert refusal["subject"] == f"checkpoint {FOLDER}"
    assert f"verl.model_merger merge --backend fsdp --local_dir {FOLDER}" in refusal["remedy"]


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_files_of_shards_are_told_from_those_of_whole_tensors(kind, answers):
    assert all(answers[name, kind] for name in SAVED)
    assert not is_sharded(trained()[kind == "optim"])
    assert not is_sharded({"state": {}, "param_groups": []})


def test_whole_tensors_stay_the_same_objects():
    assert fit([WHOLE], torch.zeros(5, 3), FOLDER) is WHOLE
    assert fit([7, 8], WHOLE, FOLDER) == 7


def test_names_that_the_model_has_not_are_left_for_loading_to_refuse():
    found = fitted_model([{"a": WHOLE, "b": WHOLE + 1}], {"a": torch.zeros(5, 3)}, FOLDER)
    assert list(found) == ["a", "b"]


# Optimizers


def test_an_optimizer_goes_on_as_if_it_had_never_stopped():
    model = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
    other = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
    optimizers = []
    for parameters in (model, other):
        optimizers.append(torch.optim.AdamW([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]))
    step(optimizers[0], model)
    states = fitted_optimizer([copy.deepcopy(optimizers[0].state_dict())], other, FOLDER)
    optimizers[1].load_state_dict(states)
    for one, two in zip(model, other, strict=True):
        two.data.copy_(one.data)
    for optimizer, parameters in zip(optimizers, (model, other), strict=True):
        step(optimizer, parameters)
    assert equal(other, model)


def step(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()


def test_a_parameter_without_states_stays_without():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters)
    step(optimizer, parameters[1:])
    found = fitted_optimizer([optimizer.state_dict()] * 2, parameters, FOLDER)["state"]
    assert found[0] == {}
    assert set(found[1]) == {"step", "exp_avg", "exp_avg_sq"}


def test_states_of_another_number_of_parameters_are_refused_with_a_way_out():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError) as caught:
        fitted_optimizer([optimizer.state_dict()], [torch.ones(2)] * 3, FOLDER)
    assert caught.value.subject == f"optimizer states of {FOLDER}"
    assert caught.value.expected == "states of 3 parameters"
    assert caught.value.found.startswith("1: FSDP1's flat parameters")
    assert "load_contents=[model,extra]" in caught.value.remedy


# Files


def touch(folder, kind, size, ranks):
    for rank in ranks:
        (folder / f"{kind}_world_size_{size}_rank_{rank}.pt").touch()


def test_files_come_by_rank_and_not_by_name(tmp_path):
    touch(tmp_path, "model", 11, range(11))
    assert [path.name for path in saved_files(str(tmp_path), "model")] == [
        f"model_world_size_11_rank_{rank}.pt" for rank in range(11)
    ]


def test_other_kinds_and_other_files_do_not_count(tmp_path):
    touch(tmp_path, "optim", 4, range(4))
    touch(tmp_path, "model", 2, range(2))
    (tmp_path / "model_world_size_2_rank_0.pt.tmp").touch()
    (tmp_path / "fsdp_config.json").touch()
    assert len(saved_files(str(tmp_path), "model")) == 2


def test_an_incomplete_set_of_another_size_is_passed_over(tmp_path):
    touch(tmp_path, "model", 4, (0, 3))
    touch(tmp_path, "model", 2, range(2))
    assert [path.name[:18] for path in saved_files(str(tmp_path), "model")] == ["model_world_size_2"] * 2


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "none"),
        ({4: (0, 1, 3)}, "3 of 4 ranks"),
        ({2: (1, 2)}, "2 of 2 ranks"),
        ({2: (0, 1), 4: (0, 1, 2, 3)}, "2 of 2 ranks, 4 of 4 ranks"),
        ({4: (0,), 8: (1, 2)}, "1 of 4 ranks, 2 of 8 ranks"),
    ],
    ids=str,
)
def test_files_that_make_no_checkpoint_are_refused_with_what_is_there(files, found, tmp_path):
    for size, ranks in files.items():
        touch(tmp_path, "model", size, ranks)
    with pytest.raises(ConfigError) as caught:
        saved_files(str(tmp_path), "model")
    assert caught.value.subject == f"checkpoint {tmp_path}"
    assert "one model file for each rank" in caught.value.expected
    assert caught.value.found == found
    assert "trainer.resume_from_path=" in caught.value.remedy


def test_a_folder_that_is_not_there_has_no_files(tmp_path):
    with pytest.raises(ConfigError) as caught:
        saved_files(str(tmp_path / "nowhere"), "optim")
    assert caught.value.found == "none"


# Folders that are remote


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_remote_checkpoint_of_another_number_of_ranks_is_refused_before_anything_is_copied(kind, monkeypatch):
    pytest.importorskip("verl")
    from verl_ext_sharding.engines import checkpoints

    folder = "hdfs://runs/global_step_4/actor"
    there = {f"{folder}/{kind}_world_size_8_rank_{rank}.pt" for rank in range(8)}
    monkeypatch.setattr(checkpoints, "exists", there.__contains__)
    monkeypatch.setattr(checkpoints, "copy_to_local", lambda path: pytest.fail(f"{path} was copied"))
    manager = object.__new__(checkpoints.HostCheckpointManager)
    manager.rank, manager.world_size = 0, 4
    with pytest.raises(ConfigError) as caught:
        manager._read(folder, kind, [])
    assert f"{kind}_world_size_4_rank_0.pt" in caught.value.expected
    assert "trainer.resume_from_path" in caught.value.remedy


def test_a_remote_file_of_the_same_number_of_ranks_is_copied_and_read(tmp_path, monkeypatch):
    pytest.importorskip("verl")
    from verl_ext_sharding.engines import checkpoints

    torch.save({"rng": 1}, tmp_path / "here.pt")
    monkeypatch.setattr(checkpoints, "exists", lambda path: True)
    monkeypatch.setattr(checkpoints, "copy_to_local", lambda path: str(tmp_path / "here.pt"))
    monkeypatch.setattr(checkpoints, "fsdp_version", lambda model: 2)
    manager, files = object.__new__(checkpoints.HostCheckpointManager), []
    manager.rank, manager.world_size, manager.model = 0, 4, None
    assert manager._read("hdfs://runs/actor", "extra_state", files) == {"rng": 1}
    assert files == [str(tmp_path / "here.pt")]
