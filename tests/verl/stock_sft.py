"""Makes stock verl's SFT run on CPU, as `stock_cpu` does for PPO: registry entries only, no patch, no plugin.

Loaded by verl's own `VERL_USE_EXTERNAL_MODULES`. verl asks torch for the backend `cpu:gloo,cpu:gloo`; torch is made to take it,
so that verl's own functions stay what they are.
"""

from __future__ import annotations

import torch.distributed

from tests.verl import stock_cpu  # noqa: F401  (registers as it is imported)

_init_process_group = torch.distributed.init_process_group


def _take_a_device_named_twice(backend=None, **options):
    return _init_process_group(backend=",".join(dict.fromkeys(backend.split(","))), **options)


torch.distributed.init_process_group = _take_a_device_named_twice
