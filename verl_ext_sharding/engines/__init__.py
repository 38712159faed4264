"""Training engines that verl lacks, registered with its `EngineRegistry`."""

from __future__ import annotations


def register() -> None:
    """Registers our engines for the platform; imports verl's FSDP engine, so call it only where engines are built."""
    from verl.plugin.platform import get_platform

    if get_platform().device_name == "cpu":
        from verl_ext_sharding.engines import cpu  # noqa: F401
    else:
        from verl_ext_sharding.engines import accelerator  # noqa: F401
