"""Which GPUs of a node reach each other's memory directly (peer to peer), as NVML or `nvidia-smi` says.

NCCL itself falls back pair by pair where peer access is missing; what matters here is a node where no pair has it, as
with most consumer cards. Whatever could not be read is unknown, never "no".
"""

from __future__ import annotations

import logging
import re
import subprocess
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

NVIDIA_SMI = ("nvidia-smi", "topo", "-p2p", "r")
"""Prints the matrix of peer reads."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")

SELF, OK, UNKNOWN = "X", "OK", "U"
REASONS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a driver setting",
}
"""Codes of the legend of `nvidia-smi topo -p2p` that mean no."""

_NVML_STATUS = (OK, "CNS", "GNS", "TNS", "DR", "NS", UNKNOWN)
"""Codes by the value of `nvmlGpuP2PStatus_t`."""


@dataclass(kw_only=True, frozen=True)
class P2PMatrix:
    """Peer access between the GPUs of one node.

    Args:
        codes: One row a GPU: `OK`, a key of `REASONS`, `U` (unknown), and `X` on the diagonal.
    """

    codes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.codes) for row in self.codes), "the matrix is not square"

    @property
    def num_gpus(self) -> int:
        """GPUs of the node."""
        return len(self.codes)

    @property
    def pair_codes(self) -> tuple[str, ...]:
        """The code of every ordered pair of two GPUs."""
        return tuple(code for i, row in enumerate(self.codes) for j, code in enumerate(row) if i != j)

    @property
    def possible(self) -> bool | None:
        """Whether some pair has peer access. None: there is no pair, or too little is known to say no."""
        if OK in self.pair_codes:
            return True
        if not self.pair_codes or not all(code in REASONS for code in self.pair_codes):
            return None
        return False

    @property
    def obstacles(self) -> str:
        """Why pairs lack peer access, in words."""
        return ", ".join(sorted({REASONS[code] for code in self.pair_codes if code in REASONS}))


def from_nvidia_smi(text: str) -> P2PMatrix | None:
    """Reads what `nvidia-smi topo -p2p r` prints; None if it holds no whole matrix.

    Args:
        text: Standard output, with or without the escape codes of a terminal.
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and all(_GPU.fullmatch(word) for word in line)), None)
    if header is None:
        return None
    rows = {
        line[0]: tuple(line[1 : len(header) + 1]) for line in lines if len(line) > len(header) and line[0] in header
    }
    codes = tuple(rows.get(gpu, ()) for gpu in header)
    if any(len(row) != len(header) for row in codes):
        return None
    return P2PMatrix(codes=codes)


def from_nvml(nvml: Any) -> P2PMatrix:
    """Asks NVML for each pair of GPUs.

    Args:
        nvml: The module `pynvml` of nvidia-ml-py.

    Raises:
        nvml.NVMLError: No driver, or it does not answer.
    """
    nvml.nvmlInit()
    try:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return P2PMatrix(
            codes=tuple(
                tuple(SELF if i == j else _nvml_code(nvml, a, b) for j, b in enumerate(gpus))
                for i, a in enumerate(gpus)
            )
        )
    finally:
        nvml.nvmlShutdown()


def _nvml_code(nvml: Any, first: Any, second: Any) -> str:
    try:
        status = int(nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_READ))
    except nvml.NVMLError as error:
        logger.debug("NVML has no P2P status of a pair: %s", error)
        return UNKNOWN
    return _NVML_STATUS[status] if 0 <= status < len(_NVML_STATUS) else UNKNOWN


def detect(timeout_s: float = 20.0) -> P2PMatrix | None:
    """Peer access between the GPUs of this node, from NVML or else `nvidia-smi`; None: neither answers.

    Args:
        timeout_s: How long `nvidia-smi` may take, in seconds.
    """
    try:
        import pynvml

        return from_nvml(pynvml)
    except Exception as error:  # pynvml is optional, and its error class is known only once it is imported
        logger.debug("NVML does not answer: %s", error)
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("nvidia-smi does not answer: %s", error)
        return None
    return from_nvidia_smi(done.stdout)
