"""Training engines that verl lacks, registered with its `EngineRegistry`."""

from __future__ import annotations


def register() -> None:
    """Registers the CPU engines; imports verl's FSDP engine, so call it only where engines are built."""
    from verl_ext_sharding.engines import cpu  # noqa: F401
