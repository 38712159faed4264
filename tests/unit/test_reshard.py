"""Checkpoints of any number of ranks become those of another: on torch's fake process group, one process as each rank."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

from verl_ext_sharding.engines.reshard import (  # noqa: E402
    fit,
    fitted_model,
    fitted_optimizer,
    is_model_cut_alike,
    is_optimizer_cut_alike,
    last_save,
    saved_files,
)
from verl_ext_sharding.errors import ClusterError, ConfigError  # noqa: E402

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
        answers[name, kind] = alike(load(folder, name, kind)[0], WHOLE)
    for name in SAVED:
        answers[name, "whole"] = fitted(folder, name, None)
    for to, (shape, placements) in RESUMED.items():
        for rank, process in everywhere(shape):
            with process as mesh:
                for name in SAVED:
                    answers[name, to, rank] = fitted(folder, name, (mesh, placements))
                for name, kind in itertools.product(SAVED if rank == 0 else (), ("model", "optim")):
                    like = distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)
                    answers[name, kind, to] = alike(load(folder, name, kind)[0], like)
                    answers["whole", kind, to] = alike(trained()[kind == "optim"], like)
                plain = fit([WHOLE], distribute_tensor(WHOLE, mesh, placements, src_data_rank=None), FOLDER)
                answers["plain", to, rank] = plain._local_tensor
    answers["refused"] = refusals()
    if importlib.util.find_spec("verl"):
        answers["manager"] = through_manager(folder)
    torch.save(answers, folder / "answers.pt")


def alike(saved, like):
    """Whether a rank's file is cut as its own tensor is."""
    return is_optimizer_cut_alike(saved, [like]) if "state" in saved else is_model_cut_alike(saved, {"weight": like})


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


def through_manager(folder):
    """What the last rank of replicas reads, where as many ranks without replicas have saved: one size, another cut."""
    from verl_ext_sharding.engines import checkpoints

    checkpoints.fsdp_version = lambda model: 2
    for kind, name in itertools.product(("model", "optim"), ["rows of four, the last without any"]):
        for rank in range(4):
            (folder / f"{name}-{rank}-{kind}.pt").rename(folder / f"{kind}_world_size_4_rank_{rank}.pt")
    shape, placements = RESUMED["replicas"]
    manager = object.__new__(checkpoints.HostCheckpointManager)
    manager.rank, manager.world_size = 3, 4
    with Rank(3, shape) as mesh:
        like = distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)
        manager.model = SimpleNamespace(state_dict=lambda: {"weight": like})
        manager.optimizer = SimpleNamespace(param_groups=[{"params": [like]}])
        model = manager._read(str(folder), "model", [])["weight"]
        moment = manager._read(str(folder), "optim", [])["state"][0]["exp_avg"]
        return [one._local_tensor for one in (model, moment)]


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
@pytest.mark.parametrize("to", RESUMED)
def test_a_file_is_taken_as_it_is_where_mesh_and_dimension_are_those_of_the_run(to, kind, answers):
    for name, cut in SAVED.items():
        assert answers[name, kind, to] == (cut == RESUMED[to]), name
        assert not answers[name, kind]  # by a run that holds whole tensors
    assert not answers["whole", kind, to]


def test_as_many_ranks_with_other_replicas_take_their_own_shares(answers, adam):
    pytest.importorskip("verl")
    for found, whole in zip(answers["manager"], adam[0][:2], strict=True):
        assert torch.equal(found, share(whole, 3, *RESUMED["replicas"]))


def test_whole_tensors_are_alike_and_what_has_another_format_is_not_looked_at():
    model, optimizer = trained()
    assert is_model_cut_alike(model | {"more": WHOLE}, {"weight": WHOLE})
    assert is_optimizer_cut_alike(optimizer, [WHOLE])
    assert not is_optimizer_cut_alike(optimizer, [WHOLE, WHOLE])
    assert is_optimizer_cut_alike({"state": {}, "param_groups": []}, [])
    assert is_optimizer_cut_alike({"exp_avg.weight": WHOLE}, [WHOLE])


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


def note(folder, world_size, version=2):
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world_size}))


def test_of_two_runs_in_one_folder_the_asked_one_is_read(tmp_path):
    for size in (2, 4):
        touch(tmp_path, "model", size, range(size))
    assert len(saved_files(str(tmp_path), "model", 4)) == 4
    assert len(saved_files(str(tmp_path), "model", 2)) == 2


def test_the_last_save_counts_only_if_all_of_it_is_there(tmp_path):
    assert last_save(str(tmp_path), "model") is None
    note(tmp_path, 4, version=1)
    touch(tmp_path, "model", 4, (0, 1))
    assert last_save(str(tmp_path), "model") is None
    touch(tmp_path, "model", 4, range(4))
    last = last_save(str(tmp_path), "model")
    assert (last.fsdp_version, last.world_size) == (1, 4)
    assert last_save(str(tmp_path), "optim") is None
    (tmp_path / "fsdp_config.json").write_text("{")
    assert last_save(str(tmp_path), "model") is None


def test_a_kind_that_the_run_never_saved_is_left_out_by_the_remedy(tmp_path):
    touch(tmp_path, "model", 2, range(2))
    touch(tmp_path, "extra_state", 2, range(2))
    with pytest.raises(ConfigError) as caught:
        saved_files(str(tmp_path), "optim")
    assert caught.value.remedy.startswith("<role>.checkpoint.load_contents=[model,extra]")


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


# Through the manager


@pytest.fixture
def manager(monkeypatch):
    pytest.importorskip("verl")
    from verl_ext_sharding.engines import checkpoints

    def made(*, rank=0, ranks=1, version=0):
        monkeypatch.setattr(checkpoints, "fsdp_version", lambda model: version)
        one = object.__new__(checkpoints.HostCheckpointManager)
        one.rank, one.world_size, one.model = rank, ranks, torch.nn.Linear(2, 1, bias=False)
        one.optimizer = torch.optim.AdamW(one.model.parameters())
        one.checkpoint_load_contents = one.checkpoint_save_contents = ["model", "optimizer", "extra"]
        one.checkpoint_config = None
        return one

    return made


def write(folder, kind, size, value):
    for rank in range(size):
        torch.save(value, folder / f"{kind}_world_size_{size}_rank_{rank}.pt")


def test_files_of_our_own_number_are_not_read_when_another_run_saved_after_them(manager, tmp_path):
    write(tmp_path, "model", 1, {"weight": torch.zeros(1, 2)})
    write(tmp_path, "model", 2, {"weight": torch.ones(1, 2)})
    note(tmp_path, 2)
    assert torch.equal(manager()._read(str(tmp_path), "model", [])["weight"], torch.ones(1, 2))
    note(tmp_path, 1)
    assert torch.equal(manager()._read(str(tmp_path), "model", [])["weight"], torch.zeros(1, 2))
    note(tmp_path, 2, version=1)
    with pytest.raises(ConfigError) as caught:
        manager(version=1)._read(str(tmp_path), "model", [])
    assert "files of 2 ranks" in caught.value.found


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "remedy"),
    [
        (2, 1, "optim", "strategy=fsdp for this role; or without the optimizer"),
        (0, 1, "optim", "strategy=fsdp for this role; or without the optimizer"),
        (1, 2, "optim", "strategy=fsdp2 for this role; or without the optimizer"),
        (1, 0, "optim", "strategy=fsdp2 for this role"),
        (1, 0, "model", "strategy=fsdp2 for this role"),
        (0, 1, "model", None),
        (2, 0, "optim", None),
        (0, 2, "optim", None),
        (1, 1, "optim", None),
    ],
)
def test_what_fsdp1_and_others_cannot_read_of_each_other_is_said(ours, theirs, kind, remedy, manager, tmp_path):
    ranks = 1 if 0 in (ours, theirs) else 2
    resumed = manager(ranks=ranks, version=ours)
    saved = resumed.model.state_dict() if kind == "model" else resumed.optimizer.state_dict()
    write(tmp_path, kind, ranks, saved)
    note(tmp_path, ranks, version=theirs)
    if remedy is None:
        assert resumed._read(str(tmp_path), kind, []).keys() == saved.keys()
        return
    with pytest.raises(ConfigError) as caught:
        resumed._read(str(tmp_path), kind, [])
    assert caught.value.subject == f"checkpoint {tmp_path}"
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named_with_an_earlier_checkpoint_as_the_way_out(left, manager, tmp_path):
    write(tmp_path, "model", 1, {"weight": torch.zeros(100, 20)})
    (file,) = tmp_path.glob("model*")
    os.truncate(file, int(left * file.stat().st_size))
    with pytest.raises(ConfigError) as caught:
        manager()._read(str(tmp_path), "model", [])
    assert caught.value.subject == f"checkpoint file {file}"
    assert caught.value.found.startswith(f"{file.stat().st_size} bytes")
    assert "earlier checkpoint" in caught.value.remedy


def test_a_resume_from_what_verl_does_not_load_is_an_error_and_no_fresh_start(manager):
    resumed = manager()
    resumed.checkpoint_load_contents = ["hf_model"]
    with pytest.raises(ConfigError) as caught:
        resumed.load_checkpoint("/runs/global_step_8/actor")
    assert "/runs/global_step_8/actor/huggingface" in caught.value.remedy


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (PermissionError(13, "Permission denied"), True),
        (OSError(28, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file"), True),
        (RuntimeError("NCCL timed out"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_checkpoint_that_cannot_be_written_says_where_and_what_stays(error, ours, manager, tmp_path, monkeypatch):
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(FSDPCheckpointManager, "save_checkpoint", fail)
    folder = tmp_path / "global_step_8" / "actor"
    with pytest.raises(ClusterError if ours else RuntimeError) as caught:
        manager().save_checkpoint(str(folder), global_step=8)
    if not ours:
        assert caught.value is error
        return
    assert caught.value.subject == f"checkpoint {folder}"
    assert str(tmp_path) in caught.value.found
    assert "trainer.default_local_dir" in caught.value.remedy
