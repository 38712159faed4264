"""How much memory a process holds and how much is left, and giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident set size of this process, from /proc; 0 where that does not exist."""
    return _proc_kib("/proc/self/status", "VmRSS") * 1024


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on a device: host memory for the CPU, with the container's limit.

    Args:
        device: Any torch device; an accelerator counts what its caching allocator holds unused as available.
    """
    if device.type == "cpu":
        return _available_host_bytes()
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """Size of the device's memory; for the CPU what is available now, since others share it."""
    if device.type == "cpu":
        return _available_host_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def give_back(device: torch.device) -> None:
    """Returns freed memory to the system: garbage, the allocator's caches, and glibc's free lists."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc: freed blocks stay with the process
        return


def _available_host_bytes() -> int:
    available = _proc_kib("/proc/meminfo", "MemAvailable") * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text()) - _file_cache_bytes()
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def _file_cache_bytes() -> int:
    """File pages that count as used and that the kernel takes back first: a checkpoint that was read leaves its size in them."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _proc_kib(path: str, key: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), 0)
