"""verl's FSDP engines on accelerators with our measures, registered for this platform's vendor.

`EngineRegistry` looks a vendor's entry up before the device's, so verl's own entries stay as they are.
"""

from __future__ import annotations

from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_ext_sharding.engines.device_map import DeviceMapEngineMixin
from verl_ext_sharding.engines.guarded import GuardedEngineMixin
from verl_ext_sharding.engines.measured import MeasuredEngineMixin

_PLACE = {"device": get_platform().device_name, "vendor": get_platform().vendor_name}


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], **_PLACE)
class MeasuredEngineWithLMHead(GuardedEngineMixin, MeasuredEngineMixin, FSDPEngineWithLMHead):
    """Actor and reference."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], **_PLACE)
class MeasuredEngineWithValueHead(GuardedEngineMixin, MeasuredEngineMixin, FSDPEngineWithValueHead):
    """Critic."""


@EngineRegistry.register(model_type="language_model", backend="device_map", **_PLACE)
class DeviceMapEngineWithLMHead(DeviceMapEngineMixin, MeasuredEngineWithLMHead):
    """Actor and reference, layers spread over the devices of one process."""


@EngineRegistry.register(model_type="value_model", backend="device_map", **_PLACE)
class DeviceMapEngineWithValueHead(DeviceMapEngineMixin, MeasuredEngineWithValueHead):
    """Critic, layers spread over the devices of one process."""


MeasuredEngineWithLMHead.spread_class = DeviceMapEngineWithLMHead
MeasuredEngineWithValueHead.spread_class = DeviceMapEngineWithValueHead
