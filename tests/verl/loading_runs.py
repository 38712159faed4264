"""How verl's engines come to their weights: built from a folder, and resumed from a checkpoint. Stock and with ours.

Run as `python -m tests.verl.loading_runs <folder>`, one process for each of two ranks; `results()` does that once.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import ranks
from tests.verl import engine_runs
from tests.verl.engine_cases import LORA, PADDED, SMALL, Case
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.demo import assets

TIED = assets.TinyModel(tied=True)
LARGE = assets.TinyModel(tied=True, hidden_size=256, intermediate_size=1024, num_layers=4)
"""17 MB in fp32. Its file is bf16, as most are, so that each value that is read takes memory."""

BUILT = [
    Case(name="tied", model=PADDED, model_name="tied", size=SMALL),
    Case(name="lora", model=PADDED | LORA, model_name="tied", size=SMALL),
    Case(name="critic", role="critic", model=PADDED, model_name="tied", size=SMALL),
    Case(name="ref", role="ref", model=PADDED, engine={"forward_only": True}, model_name="tied", size=SMALL),
    Case(name="both_equal", model=PADDED, model_name="both_equal", size=SMALL),
    Case(name="both_different", model=PADDED, model_name="both_different", size=SMALL),
    Case(name="untied", model=PADDED, model_name="untied", size=SMALL),
]
"""Each is built by verl's engine and by ours."""

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
RESUMED = [
    Case(name="plain", model=PADDED, model_name="tied", size=SMALL),
    Case(name="offload", model=PADDED, engine=OFFLOAD, model_name="tied", size=SMALL),
    Case(
        name="per_step",
        measures=RoleMeasures(optimizer_per_step=True),
        model=PADDED,
        engine={"param_offload": True},
        model_name="tied",
        size=SMALL,
    ),
    Case(name="lora", model=PADDED | LORA, engine=OFFLOAD, model_name="untied", size=SMALL),
    Case(name="critic", role="critic", model=PADDED, engine=OFFLOAD, model_name="untied", size=SMALL),
]
"""Each saves after a step; the run goes on, and is resumed by verl's engine and by ours."""

CONTENTS = [["model"], ["model", "optimizer"], ["model", "extra"], ["optimizer", "extra"]]


NUM_RANKS = 2


@functools.cache
def results() -> list[dict[str, Any]]:
    """What each rank saw, by rank."""
    with tempfile.TemporaryDirectory(prefix="loading-runs-") as made:
        folder = Path(made)
        _write_models(folder)
        ranks.run_program("tests.verl.loading_runs", NUM_RANKS, folder, engine_runs.spec_of(BUILT[0]).to_json())
        return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def _write_models(folder: Path) -> None:
    """The tied model as transformers saves it, and with both names in the file: equal, and with a head of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    models = {"tied": assets.build(TIED), "untied": assets.build(), "large": assets.build(LARGE, folder / "large")}
    models["large_untied"] = assets.build(dataclasses.replace(LARGE, tied=False), folder / "large")
    for large in (models[name].model / "model.safetensors" for name in ("large", "large_untied")):
        values = {name: value.bfloat16() for name, value in load_file(large).items()}
        save_file(values, large, metadata={"format": "pt"})
    for name, factor in (("both_equal", 1.0), ("both_different", 2.0)):
        target = folder / name
        target.mkdir()
        for file in models["tied"].model.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        weights = load_file(target / "model.safetensors")
        assert "lm_head.weight" not in weights
        weights["lm_head.weight"] = factor * weights["model.embed_tokens.weight"].clone()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        models[name] = dataclasses.replace(models["tied"], model=target)
    torch.save(models, folder / "models.pt")


# In the ranks


@contextmanager
def verls_engine(stock: bool) -> Iterator[None]:
    """Engines that are made inside are verl's own, or ours."""
    if stock:
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    try:
        yield
    finally:
        os.environ.pop("VERL_ENGINE_DEVICE", None)


class Watch:
    """Counts what a rank has in memory when FSDP2 shards, the most while a model is read, and moves to the device."""

    def __init__(self) -> None:
        from verl.workers.engine.fsdp import transformer_impl as engine

        self.module, self.apply_fsdp2, self.to_device = engine, engine.apply_fsdp2, engine.load_fsdp_model_to_gpu
        self.whole_bytes = self.moves = 0

    def __enter__(self) -> Watch:
        self.module.apply_fsdp2, self.module.load_fsdp_model_to_gpu = self._shard, self._move
        return self

    def __exit__(self, *_: object) -> None:
        self.module.apply_fsdp2, self.module.load_fsdp_model_to_gpu = self.apply_fsdp2, self.to_device

    def _shard(self, module: Any, *args: Any) -> None:
        real = {id(p): p.numel() * p.element_size() for p in module.parameters() if not p.is_meta}
        self.whole_bytes = sum(real.values())
        self.apply_fsdp2(module, *args)

    def _move(self, module: Any) -> None:
        self.moves += 1
        self.to_device(module)


class Card:
    """Stands for the card that a checkpoint was saved from: storages saved inside say so, and are counted at revival."""

    def __init__(self) -> None:
        import torch

        self.saving = False
        self.revived_bytes = 0
        torch.serialization.register_package(0, self._tag, self._revive)

    def _tag(self, storage: Any) -> str | None:
        return "card:0" if self.saving else None

    def _revive(self, storage: Any, location: str) -> Any:
        if not location.startswith("card"):
            return None
        self.revived_bytes += storage.nbytes()
        return storage

    @contextmanager
    def save(self) -> Iterator[None]:
        self.saving = True
        try:
            yield
        finally:
            self.saving = False


def _pairs(module: Any) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def build(case: Case, rank: int, stock: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Builds a model, asks it, trains a step: what JSON can hold, and tensors."""
    with verls_engine(stock), Watch() as watch:
        run = engine_runs.Run(case, rank)
    found: dict[str, Any] = {"whole_bytes": watch.whole_bytes, "shared": _pairs(run.engine.module)}
    tensors = {"weights": run.weights(), "inferred": run.infer()}
    if case.role != "ref":
        found["step"] = run.train(0)
        found["num_states"] = sum(len(group["params"]) for group in run.engine.optimizer.param_groups)
        found["shared afterwards"] = _pairs(run.engine.module)
        tensors |= {"trained": run.weights(), "inferred afterwards": run.infer()}
    return found, tensors


def tensor_bytes() -> int:
    """Bytes behind all tensors of this process, those that threads have made included."""
    import torch

    storages = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def peak_of_reading(rank: int, model_name: str) -> dict[str, int]:
    """The most that tensors take while our engine reads a model, looked at every 20 parameters."""
    import torch

    from verl_ext_sharding.engines import meta_init

    case = Case(name=model_name, model=PADDED, model_name=model_name, size=SMALL)
    stock, reading = torch.nn.Module.__setattr__, meta_init.MetaInitMixin._build_module
    seen: list[int] = []
    count = itertools.count()

    def watched(module: Any, name: str, value: Any) -> None:
        stock(module, name, value)
        if isinstance(value, torch.nn.Parameter) and next(count) % 20 == 0:
            seen.append(tensor_bytes())

    def build_module(self: Any) -> Any:
        gc.collect()
        seen.append(tensor_bytes())
        torch.nn.Module.__setattr__ = watched
        try:
            return reading(self)
        finally:
            torch.nn.Module.__setattr__ = stock
            seen.append(tensor_bytes())

    meta_init.MetaInitMixin._build_module = build_module
    try:
        run = engine_runs.Run(case, rank)
    finally:
        meta_init.MetaInitMixin._build_module = reading
    whole = sum(parameter.numel() * 4 for parameter in run.engine.module.parameters())
    return {"peak": max(seen) - seen[0], "model": whole}


def resume(case: Case, rank: int, card: Card, folder: Path) -> dict[str, Any]:
    """Saves after a step, and makes the next step from memory, by verl's way to load, and by ours."""
    import torch

    run = engine_runs.Run(case, rank)
    run.train(0)
    run.engine.lr_scheduler_step()
    torch.rand(rank + 3)  # so that a new run's random state is another
    with card.save():
        run.worker.save_checkpoint(str(folder), global_step=1)
    saved = run.weights()
    drawn = float(torch.rand(()))
    schedule = run.engine.lr_scheduler.state_dict()["last_epoch"]
    reference = run.train(1) | {"weights": run.weights()}
    found: dict[str, Any] = {"schedule": schedule}
    for name, stock in (("stock", True), ("ours", False)):
        if stock and case.measures != RoleMeasures():
            continue
        with verls_engine(stock), Watch() as watch:
            again = engine_runs.Run(case, rank)
            watch.moves = card.revived_bytes = 0
            again.worker.load_checkpoint(str(folder))
        if not stock:
            torch.distributed.barrier()
            for file in folder.glob(f"*_rank_{rank}.pt"):
                os.truncate(file, 0)  # whoever still has it mapped dies at the next touch
        found[name] = {"revived_bytes": card.revived_bytes, "moves": watch.moves}
        found[name]["random"] = float(torch.rand(())) == drawn
        found[name]["loaded"] = engine_runs._largest(again.weights(), saved)
        found[name]["steps"] = sorted({float(s["step"]) for s in again.engine.optimizer.state.values() if s})
        found[name]["schedule"] = again.engine.lr_scheduler.state_dict()["last_epoch"]
        step = again.train(1)
        found[name]["loss"] = abs(step["loss"] - reference["loss"])
        found[name]["weights"] = engine_runs._largest(again.weights(), reference["weights"])
        found[name]["optimizer_bytes"] = again.optimizer_bytes()
    return found


def resume_parts(rank: int, folder: Path) -> dict[str, Any]:
    """What each choice of `load_contents` brings, and the error of a checkpoint whose other files are missing."""
    import torch

    case = RESUMED[0]
    run = engine_runs.Run(case, rank)
    run.train(0)
    torch.rand(rank + 3)
    run.worker.save_checkpoint(str(folder), global_step=1)
    trained, drawn = run.weights(), float(torch.rand(()))
    found = {}
    for contents in CONTENTS:
        again = engine_runs.Run(case, rank)
        again.engine.checkpoint_manager.checkpoint_load_contents = contents
        again.worker.load_checkpoint(str(folder))
        found["+".join(contents)] = {
            "model": engine_runs._largest(again.weights(), trained) == 0.0,
            "optimizer": bool(again.engine.optimizer.state),
            "extra": float(torch.rand(())) == drawn,
        }
    for file in folder.glob("*_world_size_*"):
        if file.name.endswith(f"rank_{rank}.pt"):
            file.rename(file.with_name(file.name.replace(f"world_size_{NUM_RANKS}", "world_size_16")))
    torch.distributed.barrier()
    try:
        again.worker.load_checkpoint(str(folder))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def fsdp1(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """Builds a tied model with FSDP1, by verl's engine and ours, and resumes it with ours.

    Everything of it runs on a CPU but the check that what is broadcast is on an accelerator, which is left out here.
    """
    import torch
    import torch.distributed.fsdp._init_utils as init_utils
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_ext_sharding.engines.measured import MeasuredEngineMixin

    class Ours(MeasuredEngineMixin, FSDPEngineWithLMHead):
        """As on an accelerator."""

    def build(engine_class: Any) -> Any:
        config = engine_runs._config(dataclasses.replace(case, engine={"strategy": "fsdp"}))
        config.model_config.model_type = config.model_type
        torch.manual_seed(0)
        engine = engine_class(
            config.model_config, config.engine_config, config.optimizer_config, config.checkpoint_config
        )
        engine.initialize()
        return engine

    check = init_utils._check_module_states_for_sync_module_states
    init_utils._check_module_states_for_sync_module_states = lambda states: None
    try:
        stock, ours, again = build(FSDPEngineWithLMHead), build(Ours), build(Ours)
    finally:
        init_utils._check_module_states_for_sync_module_states = check
    reference, tied = _whole(stock.module)
    found = {"stock is tied": tied, "built": engine_runs._largest(_whole(ours.module)[0], reference)}
    found["tied"] = _whole(ours.module)[1]
    for parameter in ours.module.parameters():
        parameter.data.add_(1.0)
    ours.checkpoint_manager.save_checkpoint(str(folder), global_step=1)
    again.checkpoint_manager.load_checkpoint(str(folder))
    found["loaded"] = engine_runs._largest(_whole(again.module)[0], _whole(ours.module)[0])
    found["changed"] = engine_runs._largest(_whole(ours.module)[0], reference)
    return found


def _whole(module: Any) -> tuple[dict[str, Any], bool]:
    """Whole parameters of an FSDP1 module, and whether head and embedding are one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        named = dict(module.named_parameters(remove_duplicate=False))
        (head,) = [value for name, value in named.items() if name.endswith("lm_head.weight")]
        (embedding,) = [value for name, value in named.items() if name.endswith("embed_tokens.weight")]
        return {name: value.clone() for name, value in named.items()}, head.data_ptr() == embedding.data_ptr()


def main(folder: Path) -> None:
    """Runs everything in this rank."""
    import torch
    import verl  # noqa: F401  (loads the plugin)

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    models = torch.load(folder / "models.pt", weights_only=False)
    engine_runs.folder_of = models.__getitem__
    found: dict[str, Any] = {"built": {}, "resumed": {}}
    card = Card()
    for case in BUILT:
        stock, reference = build(case, rank, True) if case.role != "ref" else ({}, {})
        ours, tensors = build(case, rank, False)
        difference = {kind: engine_runs._largest(tensors[kind], values) for kind, values in reference.items()}
        found["built"][case.name] = {"stock": stock, "ours": ours, "difference": difference}
    found["peak"] = {name: peak_of_reading(rank, name) for name in ("large", "large_untied")}
    for case in RESUMED:
        found["resumed"][case.name] = resume(case, rank, card, folder / f"saved_{case.name}")
    found["parts"] = resume_parts(rank, folder / "parts")
    found["fsdp1"] = {case.name: fsdp1(case, rank, folder / f"fsdp1_{case.name}") for case in BUILT[:2]}
    (folder / f"results{rank}.json").write_text(json.dumps(found, indent=1))
    ranks.leave()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]))
