"""Platforms that verl lacks, registered with its `PlatformRegistry`."""

from __future__ import annotations

CPU = "cpu"
"""Name of the CPU platform, as in `VERL_PLATFORM=cpu`."""


def register() -> None:
    """Registers the `cpu` platform. verl's platform package must be importable; nothing is selected by this."""
    from verl_ext_sharding.platforms import cpu  # noqa: F401
