"""`verl.trainer.sft_trainer` with the plugin on: what each of its processes does between the config and the trainer.

There is no driver and no Ray: torchrun or accelerate starts one process per device, and each decides the same.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding import driver, envs, launchers, loading
from verl_ext_sharding.cli import render
from verl_ext_sharding.communication import hygiene
from verl_ext_sharding.config import cpu, measures, old_keys, sft
from verl_ext_sharding.config.changes import KeyChange, added_keys, apply_changes, explicit_keys
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.override_hints import known_keys
from verl_ext_sharding.config.recipe_keys import check_spelling, check_words
from verl_ext_sharding.config.saved_contents import SFT_CHECKPOINT_BLOCK, check_hf_model, check_lora_only
from verl_ext_sharding.config.schema import CommunicationConfig, ShardingConfig
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.config.translate import request_of, values_of
from verl_ext_sharding.config.values import resolving
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.launchers import Program, Ranks
from verl_ext_sharding.patch_points import logprobs
from verl_ext_sharding.patching import original
from verl_ext_sharding.placement.bundles import Placement, Pool
from verl_ext_sharding.placement.devices import Topology

logger = logging.getLogger(__name__)

RAY_TRAINER = "verl.trainer.sft_trainer_ray"
TRAINER = "verl.trainer.sft_trainer"

_ENGINE_MODULE = "verl.workers.engine.fsdp.transformer_impl"


@dataclass(kw_only=True, frozen=True)
class SftPlan:
    """What one process of SFT decided.

    Args:
        request: The user's typed request.
        ranks: The process's place among the others.
        changes: verl's keys that were set.
        spec: The run's spec, as a Ray worker would be given it.
        notes: What verl does otherwise than its keys say.
    """

    request: ShardingConfig
    ranks: Ranks
    changes: tuple[KeyChange, ...]
    spec: RunSpec
    notes: tuple[str, ...] = ()


def prepare(
    config: DictConfig,
    explicit: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    program: Program | None = None,
    added: Collection[str] | None = None,
) -> SftPlan:
    """Checks a request and sets verl's own keys for it, in place. Starts nothing.

    Args:
        config: verl's composed SFT config with `trainer.plugin=sharding`.
        explicit: `{key: value}` that the user wrote; None: read from Hydra.
        environ: Environment of the process; None: this one's.
        program: What runs; None: this process's.
        added: Those of `explicit` that a `+` added; None: read from Hydra.

    Raises:
        ConfigError: Something can't be met as asked.
    """
    environ = os.environ if environ is None else environ
    explicit = explicit_keys() if explicit is None else explicit
    added = added_keys() if added is None else added
    ranks = launchers.ranks_of(environ, program or Program.current())
    with resolving(config):
        _check_added(config, explicit, added)
        request, applied = _apply_request(config, explicit, environ, ranks)
        notes = sft.notes(request, values_of(config), ranks.world_size, explicit)
        spec = _spec(request, ranks, OmegaConf.select(config, "trainer.seed", default=None))
    return SftPlan(request=request, ranks=ranks, changes=tuple(applied), spec=spec, notes=tuple(notes))


def _apply_request(
    config: DictConfig, explicit: Mapping[str, str], environ: Mapping[str, str], ranks: Ranks
) -> tuple[ShardingConfig, list[KeyChange]]:
    cpu.check_device(config)
    check_words(config)
    request = request_of(config)
    applied: list[KeyChange] = []
    if environ.get(envs.VERL_PLATFORM, "").strip().lower() == "cpu":
        change = KeyChange(key="trainer.device", new="cpu", why=f"{envs.VERL_PLATFORM}=cpu")
        applied += apply_changes(config, [change], explicit)
    if cpu.is_cpu(config):
        applied += apply_changes(config, sft.cpu_changes(config, explicit), explicit)
    applied += apply_changes(config, sft.translate(request, values_of(config), ranks.world_size), explicit)
    for check in (check_hf_model, check_lora_only):
        check(config, sft.engine_name(config), checkpoint=SFT_CHECKPOINT_BLOCK, model="model")
    return request, applied


def _check_added(config: DictConfig, explicit: Mapping[str, str], added: Collection[str]) -> None:
    """Answers keys of an older verl, and misspelt ones, that a `+` added; without one, Hydra refused them."""
    known = known_keys(config)
    found = [old_keys.answer(key, value, known - {key}) for key, value in explicit.items()]
    answers = [answer for answer in found if answer is not None]
    if answers:
        raise old_keys.refusal(answers)
    check_spelling(config, added, _without(known, added))


def _without(known: Collection[str], added: Collection[str]) -> set[str]:
    """Keys that a config has but for those added, and for the blocks that stand around these alone."""
    kept = {key for key in known if not any(key == name or key.startswith(f"{name}.") for name in added)}
    around = {key for key in kept if any(name.startswith(f"{key}.") for name in added)}
    return {key for key in kept if key not in around or any(other.startswith(f"{key}.") for other in kept - around)}


def _spec(request: ShardingConfig, ranks: Ranks, seed: int | None) -> RunSpec:
    """The spec that engines and patches read; its one role is on every device of the job."""
    roles = measures.measures_of(request)
    chunks = any(role.logits is not None for role in roles.values())
    topology = Topology(
        num_nodes=-(-ranks.world_size // ranks.local_world_size), devices_per_node=ranks.local_world_size
    )
    pool = Pool(name=f"{sft.ROLE}_pool", roles=(sft.ROLE,), devices=tuple(range(ranks.world_size)))
    return RunSpec(
        placement=Placement(topology=topology, pools=(pool,), managed=False, reserved={}),
        hybrid_rollout=False,
        bundle_cpus=0,
        measures=roles,
        guards=Guards.of(request.guards),
        seed=seed,
        needed=("trainer.plugin", *([driver.LOGITS] if chunks else [])),
    )


def launch(stock: Callable[..., Any], config: DictConfig) -> Any:
    """verl's `run_sft` for a run that asked for the plugin.

    Args:
        stock: verl's own `run_sft`.
        config: The composed config.
    """
    plan = prepare(config)
    if plan.ranks.alone:
        _warn_of_one_process()
        os.environ.update(plan.ranks.as_env())
    if plan.ranks.rank == 0:
        render.show_changes(plan.changes)
        render.show_notes(plan.notes)
    else:
        logging.getLogger("verl_ext_sharding").setLevel(logging.WARNING)  # once is enough, rank 0 says the same
    _select_device(config, plan.ranks)
    os.environ[envs.SPEC] = plan.spec.to_json()
    loading.install_for_roles(plan.spec)
    if driver.LOGITS in plan.spec.needed:
        _reach_engine()
    global _communication
    _communication = plan.request.communication
    return stock(config)


_communication: CommunicationConfig | None = None
"""The block of the run in this process, for `join_process_group`, which verl calls without a config."""


def _warn_of_one_process() -> None:
    launcher = launchers.find_launch(os.environ)
    if launcher is not None:
        logger.warning("%s started one process, which trains alone: use --multi_gpu, or torchrun", launcher)


def _select_device(config: DictConfig, ranks: Ranks) -> None:
    """Makes the device of the local rank this process's own.

    Raises:
        ConfigError: The machine has fewer devices than processes.
    """
    from verl.plugin.platform import get_platform

    if cpu.is_cpu(config):
        driver.select_cpu()
        engine = sys.modules.get(_ENGINE_MODULE)
        if engine is not None:
            engine.device_name = "cpu"  # type: ignore[attr-defined]  # read from the platform when it was imported
        return
    count = get_platform().device_count()
    if ranks.local_rank >= count:
        raise _no_device(ranks, count, config.trainer.device)
    get_platform().set_device(ranks.local_rank)


def _reach_engine() -> None:
    """Puts the patched log-probs where verl's engine took them by name, which it did before the patches came."""
    engine = sys.modules.get(_ENGINE_MODULE)
    for patch in logprobs.SPECS if engine else ():
        if vars(engine).get(patch.qualname) is original(patch):
            setattr(engine, patch.qualname, patch.replacement)


def join_process_group(stock: Callable[..., Any], timeout_s: int) -> Any:
    """verl's `initialize_global_process_group` in a process of SFT, and an agreement on how nodes communicate.

    NCCL reads its variables when the first communicator is made, which is later; gloo, which agrees, reads none of them.

    Args:
        stock: verl's own function.
        timeout_s: As verl's.
    """
    from verl.plugin.platform import get_platform

    assert _communication is not None
    ours = hygiene.decide_here(_communication)
    os.environ.update(hygiene.as_env(ours))
    place = _join_on_cpu(timeout_s) if get_platform().device_name == "cpu" else stock(timeout_s)
    _agree(ours)
    return place


def _join_on_cpu(timeout_s: int) -> tuple[int, int, int]:
    """As verl's, which asks for `cpu:gloo,<device>:<backend>`: that names the CPU twice, and torch refuses it."""
    from datetime import timedelta

    import torch.distributed

    torch.distributed.init_process_group(
        backend="cpu:gloo",
        timeout=timedelta(seconds=timeout_s),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
    return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _agree(ours: list[hygiene.Setting]) -> None:
    """Sets what all nodes can live with, and shows it once.

    Raises:
        ConfigError: Nodes export different values of one variable.
    """
    import torch.distributed

    group = torch.distributed.new_group(backend="gloo")  # the default group of verl 0.9.0 is NCCL alone
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (socket.gethostname(), ours), group=group)
    torch.distributed.destroy_process_group(group)
    settings = hygiene.merge(dict(gathered))
    os.environ.update(hygiene.as_env(settings))
    if torch.distributed.get_rank() == 0:
        render.show_settings(settings)


def refuse_ray_trainer() -> None:
    """Refuses verl's SFT on Ray, where nothing of `sharding` would act.

    Raises:
        ConfigError: It is the script that runs in this process.
    """
    program = Program.current()
    if program.module != RAY_TRAINER:
        return
    raise ConfigError(
        f"trainer.plugin with {RAY_TRAINER}",
        expected=f"{TRAINER}, started by torchrun or accelerate launch",
        found=RAY_TRAINER,
        consequence="the run does not start, since nothing of `sharding` would act",
        remedy=Program(target=("-m", TRAINER), arguments=program.arguments).torchrun(),
    )


def _no_device(ranks: Ranks, count: int, device: str) -> ConfigError:
    return ConfigError(
        f"device of local rank {ranks.local_rank}",
        expected=f"a device for each of {ranks.local_world_size} processes on this machine",
        found=f"{count} visible {device} devices",
        consequence="the run does not start",
        remedy=f"torchrun --nproc_per_node={count}" if count else "trainer.device=cpu, where there is no accelerator",
    )
