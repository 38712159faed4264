"""Whether verl can cut the batches of an SFT job into micro-batches, checked before any model loads.

Every engine does it in the same place (`prepare_micro_batches`, verl/workers/engine/utils.py), with the samples that the
trainer gives a data-parallel rank (`_build_dataloader`, verl/trainer/sft_trainer.py) and a token budget that grows by the
engine's sequence-parallel size (`sp_size` in verl/workers/engine/*/transformer_impl.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl_ext_sharding.config.run_asserts import check_titan_mesh
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import MODEL_PARALLEL

SAMPLES, TOKENS = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"

_BATCH, _LENGTH = "data.train_batch_size", "data.max_length"

_ULYSSES = ("ulysses_sequence_parallel_size",)

_PARALLEL = {"fsdp": _ULYSSES, "fsdp2": _ULYSSES, "automodel": ("tp_size", "cp_size", "pp_size"), **MODEL_PARALLEL}
"""Keys of an engine whose product is the ranks that one sample takes: `get_data_parallel_size` of each engine.

An engine that is not among them has a mesh of its own package, of which nothing is known here.
"""


def check_batches(engine: str, values: Mapping[str, Any], num_ranks: int, asked_by: Mapping[str, str]) -> None:
    """Refuses batches that verl asserts on once its processes train.

    Args:
        engine: verl's name of the engine.
        values: verl's resolved values by dotted key, the request's changes included.
        num_ranks: Processes of the job.
        asked_by: Keys of verl that the request set -> the user's.

    Raises:
        ConfigError: Names the key, as the user wrote it, and what to write.
    """
    if engine not in _PARALLEL:
        return
    sizes = _sizes(engine, values)
    if num_ranks % math.prod(sizes.values()):
        raise _uneven(engine, sizes, num_ranks)
    parallel = num_ranks // math.prod(sizes.values())
    if engine == "torchtitan":
        check_titan_mesh("engine", values, parallel, whose="the job")
    if _schedules_itself(values):
        return
    batch = whole_number(_BATCH, values.get(_BATCH), instead=256)
    if batch < parallel:
        raise _too_small(batch, parallel)
    if values.get("data.use_dynamic_bsz"):
        tokens = whole_number(TOKENS, values.get(TOKENS), instead=8192)
        _check_max_tokens(asked_by.get(TOKENS, TOKENS), tokens, *_sequence_parallel(engine, sizes), values)
    else:
        samples = whole_number(SAMPLES, values.get(SAMPLES), instead=1)
        _check_micro_batch(asked_by.get(SAMPLES, SAMPLES), samples, batch, parallel)


def batch_notes(engine: str, values: Mapping[str, Any], num_ranks: int) -> list[str]:
    """What a step trains, where it is less than the batch that was asked for.

    Args:
        engine: verl's name of the engine.
        values: verl's resolved values by dotted key, which `check_batches` accepts.
        num_ranks: Processes of the job.
    """
    if engine not in _PARALLEL or _schedules_itself(values):
        return []
    parallel = num_ranks // math.prod(_sizes(engine, values).values())
    batch = values[_BATCH]
    if batch % parallel == 0:
        return []
    trained = batch - batch % parallel
    return [
        f"a step trains {trained} samples, not {_BATCH}={batch}: each of {parallel} ranks takes {trained // parallel}"
    ]


def _sizes(engine: str, values: Mapping[str, Any]) -> dict[str, int]:
    """The engine's parallel sizes by key."""
    keys = [f"engine.{name}" for name in _PARALLEL[engine]]
    if engine == "automodel":
        if values.get("engine.distributed_strategy") == "ddp":  # has no mesh, and reads none of them
            return dict.fromkeys(keys, 1)
        values = {key: values.get(key) or 1 for key in keys}  # `create_device_mesh` takes null and 0 for 1
    return {key: whole_number(key, values.get(key, 1), instead=1) for key in keys}


def _sequence_parallel(engine: str, sizes: Mapping[str, int]) -> tuple[str, int]:
    """The key and the size by which a token budget grows; automodel's does not."""
    key, size = next(iter(sizes.items()))
    return (key, 1) if engine == "automodel" else (key, size)


def _schedules_itself(values: Mapping[str, Any]) -> bool:
    """Megatron's dynamic context parallelism gives every rank the whole batch, and has a budget of its own."""
    return bool(values.get("engine.dynamic_context_parallel"))


def _uneven(engine: str, sizes: Mapping[str, int], num_ranks: int) -> ConfigError:
    left, smaller = num_ranks, []
    for key, size in sizes.items():
        fitting = math.gcd(size, left)
        left //= fitting
        smaller += [f"{key}={fitting}"] if fitting != size else []
    if engine == "torchtitan":  # has the rest of the mesh in keys too
        smaller += [f"engine.data_parallel_shard_size={left}", "engine.data_parallel_replicate_size=1"]
    above_one = [key for key, size in sizes.items() if size > 1]
    return ConfigError(
        " x ".join(above_one),
        expected=f"a divisor of the {num_ranks} processes of the job",
        found=" x ".join(str(sizes[key]) for key in above_one),
        consequence="the run does not start",
        remedy=" ".join(smaller),
    )


def _too_small(batch: int, parallel: int) -> ConfigError:
    return ConfigError(
        _BATCH,
        expected=f"{parallel} or more, a sample for each data-parallel rank",
        found=str(batch),
        consequence="the run does not start",
        remedy=f"{_BATCH}={parallel}",
    )


def _check_micro_batch(key: str, samples: int, batch: int, parallel: int) -> None:
    """verl takes `train_batch_size // data-parallel size` samples per rank, and asserts on the micro-batch in step 1."""
    per_rank = batch // parallel
    if per_rank % samples == 0:
        return
    fitting = max(size for size in range(1, min(samples, per_rank) + 1) if per_rank % size == 0)
    raise ConfigError(
        key,
        expected=f"a divisor of {per_rank}: {_BATCH}={batch} over {parallel} data-parallel ranks",
        found=str(samples),
        consequence="the run does not start",
        remedy=f"{key}={fitting}",
    )


def _check_max_tokens(key: str, tokens: int, size_key: str, size: int, values: Mapping[str, Any]) -> None:
    """With token budgets verl asserts in the first step that draws a sequence above tokens x sequence-parallel size."""
    longest = whole_number(_LENGTH, values.get(_LENGTH), instead=1024)
    if tokens * size >= longest:
        return
    enough = -(-longest // size)
    raise ConfigError(
        key,
        expected=f"at least {enough}, so that a micro-batch holds the longest sequence ({_LENGTH}={longest})",
        found=str(tokens) + (f" x {size_key}={size}" if size > 1 else ""),
        consequence="the run does not start",
        remedy=f"{key}={enough}, or {_LENGTH}={tokens * size}",
    )
