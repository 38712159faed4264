"""Flags of offloading and checkpointing in verl's engines other than FSDP, before anything is built. Pure, no torch.

Where flags break the run together, they are refused; where nothing reads one, a note says so. Read in workers/engine of verl
0.9.0 and 0.9.1 (`transformer_impl.py` of veomni, torchtitan, megatron, automodel).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from verl_ext_sharding.config.arguments import as_argument
from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import MODEL_PARALLEL, JobFacts

_ACTIVATIONS, _CHECKPOINTING = "enable_activation_offload", "enable_gradient_checkpointing"

_OWN_ACTIVATIONS = {
    "megatron": (
        "+{block}.override_transformer_config.fine_grained_activation_offloading=True",
        "+{block}.override_transformer_config.offload_modules=[core_attn]",
    ),
    "veomni": ("{block}.enable_async_activation_offload=True",),
}
"""What offloads activations in an engine that does not read `enable_activation_offload`; others have nothing for it."""

_OWN_CHECKPOINTING = {
    "megatron": ("override_transformer_config.recompute_granularity", None),
    "torchtitan": ("activation_checkpoint", "none"),
    "automodel": ("activation_checkpointing", False),
}
"""An engine's own key of checkpointing, where it reads that one alone, and its value for none."""

_CHECKPOINTS = {
    "megatron": tuple(
        f"{{block}}.override_transformer_config.recompute_{name}"
        for name in ("granularity=full", "method=uniform", "num_layers=1")
    ),
    "torchtitan": ("{block}.activation_checkpoint=full",),
    "automodel": ("{block}.activation_checkpointing=True",),
}


def engine_notes(
    values: Mapping[str, Any], facts: JobFacts, placement: Placement, explicit: Collection[str] = ()
) -> list[str]:
    """One sentence for each flag of a trained role that its engine does not read.

    Args:
        values: verl's resolved values by dotted key.
        facts: The job.
        placement: Where its roles run.
        explicit: verl's keys that the user wrote on the command line.

    Raises:
        ConfigError: Flags that break the run together.
    """
    notes: list[str] = []
    for role, engine in facts.engines.items():
        ranks = placement.processes_of(role)
        if engine.strategy not in MODEL_PARALLEL or not ranks:
            continue
        block = f"{ENGINE_BLOCK[role].rpartition('.')[0]}.{engine.strategy}"
        check_flags(engine.strategy, block, values, ranks=ranks, generates=role == "actor", trains=role != "ref")
        if role != "ref":
            notes += unread_flags(engine.strategy, block, MODEL_BLOCK[role], values, explicit)
    return notes


def check_flags(
    strategy: str, block: str, values: Mapping[str, Any], *, ranks: int, generates: bool = False, trains: bool = True
) -> None:
    """Refuses flags of one engine that break the run together.

    Args:
        strategy: verl's name of the engine.
        block: verl's block of the engine.
        values: verl's resolved values by dotted key.
        ranks: Ranks of the role; one alone is not sharded.
        generates: A rollout is given its weights.
        trains: It has an optimizer.

    Raises:
        ConfigError: Names the flags, and those that do the same.
    """
    if strategy == "veomni":
        _check_veomni(block, values, sharded=ranks > 1)
    elif strategy == "torchtitan" and trains:
        _check_torchtitan(block, values, generates=generates)


def _check_veomni(block: str, values: Mapping[str, Any], *, sharded: bool) -> None:
    params, optimizer, policy = (
        f"{block}.{name}" for name in ("param_offload", "optimizer_offload", "enable_fsdp_offload")
    )
    moved = [key for key in (params, optimizer) if values.get(key)]
    if values.get(policy) and moved and sharded:
        beside = "" if params in moved else f" {params}=True"
        raise _moved_under_policy(policy, moved, f"{policy}=False{beside}")
    if moved == [optimizer]:
        raise ConfigError(
            optimizer,
            expected=f"{params}=True beside it: VeOmni's engine takes the gradients along, and verl moves none without "
            "their parameters",
            found=f"True with {params}=False",
            consequence="the run does not start; verl would assert it once the model is built",
            remedy=f"{params}=True, or {optimizer}=False",
        )


def _check_torchtitan(block: str, values: Mapping[str, Any], *, generates: bool) -> None:
    """A model that is not sharded has no policy; one under it is moved for every weight sync, whatever else is set."""
    params, policy = f"{block}.param_offload", f"{block}.offload_policy"
    sizes = [values.get(f"{block}.{name}") or 1 for name in ("data_parallel_shard_size", "context_parallel_size")]
    if not values.get(policy) or sizes == [1, 1]:
        return
    beside = "" if values.get(params) else f" {params}=True"
    if generates:
        raise ConfigError(
            policy,
            expected="False for a role whose weights a rollout is given: verl moves them to the device for that",
            found="True",
            consequence=_BREAKS,
            remedy=f"++{policy}=False{beside}",
        )
    if values.get(params):
        raise _moved_under_policy(policy, [params], f"++{policy}=False")


_BREAKS = (
    "the run does not start; verl would move parameters to the device that FSDP2's CPUOffloadPolicy keeps on the host, and "
    "the next forward pass would fail on it"
)


def _moved_under_policy(policy: str, moved: list[str], without: str) -> ConfigError:
    return ConfigError(
        policy,
        expected=f"either this policy, which keeps all on the host, or verl's own moves ({', '.join(moved)})",
        found="both",
        consequence=_BREAKS,
        remedy=f"{' '.join(f'{key}=False' for key in moved)}, or {without}",
    )


def unread_flags(
    strategy: str, block: str, model: str, values: Mapping[str, Any], explicit: Collection[str] = ()
) -> Iterator[str]:
    """One sentence for each flag of a model that verl's FSDP engine alone reads, with what does the same in this one.

    Args:
        strategy: verl's name of the engine.
        block: verl's block of the engine.
        model: verl's block of the model.
        values: verl's resolved values by dotted key.
        explicit: verl's keys that the user wrote on the command line.
    """
    key = f"{model}.{_ACTIVATIONS}"
    own = [line.format(block=block) for line in _OWN_ACTIVATIONS.get(strategy, ())]
    if values.get(key) and not (own and values.get(own[0].lstrip("+").partition("=")[0])):
        instead = "; in it " + " ".join(map(as_argument, own)) + " does that" if own else ", which has no such thing"
        yield f"{key} has no effect on verl's {strategy} engine{instead}"
    if strategy in _OWN_CHECKPOINTING and (key := f"{model}.{_CHECKPOINTING}") in explicit:
        name, none = _OWN_CHECKPOINTING[strategy]
        asked, done = bool(values.get(key)), values.get(f"{block}.{name}", none) != none
        if asked != done:
            lines = _CHECKPOINTS[strategy] if asked else (f"{{block}}.{name}={_override(none)}",)
            typed = " ".join(line.format(block=block) for line in lines)
            yield f"{key}={asked} has no effect on verl's {strategy} engine; in it {typed} does that"


def _override(value: Any) -> str:
    return "null" if value is None else str(value)
