"""The `cpu` platform: verl's trainer on machines without an accelerator, on logical devices that Ray counts.

Registered with verl's `PlatformRegistry`; chosen by `VERL_PLATFORM=cpu`, which the driver sets for every Ray process of
a run with `trainer.device=cpu`. Never auto-detected: a head node without GPUs must stay what it is in stock verl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_ext_sharding.platforms import CPU


class _CpuModule(ModuleType):
    """`torch.cpu` with the parts of `torch.cuda` that verl calls on any device module.

    Memory counters are 0, as nothing is resident on an accelerator; host memory is verl's own `perf/cpu_memory_used_gb`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None:
        """Nothing to select."""

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def empty_cache(self) -> None:
        """There is no caching allocator to empty."""

    def ipc_collect(self) -> None:
        """There is no device IPC."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is counted."""

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """There is no device memory to bound."""

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


_MODULE = _CpuModule("torch.cpu")


@PlatformRegistry.register(platform=CPU)
class PlatformCPU(PlatformBase):
    """verl's platform interface on a CPU; Ray's logical `GPU` resources stand for the devices."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == CPU

    def current_device(self) -> Any:
        # verl passes this to Tensor.to(), where an index would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no caching allocator to set."""

    def empty_cache(self) -> None:
        """There is no caching allocator to empty."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
