"""LoRA of a critic: adapters in its layers, and a value head that is trained whole.

verl makes every model with adapters one that generates (`TaskType.CAUSAL_LM`), which a critic's is not: PEFT stops at it. And
it would leave the head, which no checkpoint of a policy holds, as it was made up, or give it adapters of its own.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, TaskType
from torch import nn
from verl.utils.fs import copy_to_local
from verl.utils.py_functional import convert_to_regular_types

from verl_ext_sharding.errors import ConfigError

HEADS = ("score", "classifier")
"""What transformers calls the head of its models for token classification."""

ADAPTERS_ALONE = TaskType.FEATURE_EXTRACTION
"""What checkpoints note, so that adapters are loaded into any model: of a classifier's, PEFT wants the head in their own file."""


class ValueAdaptersMixin:
    """Added in front of one of verl's FSDP engines, after its role is known."""

    role: str
    model_config: Any

    def _build_lora_module(self, module: Any) -> Any:
        """As verl's for a policy; of a critic, the head is trained beside the adapters and saved under its own name."""
        if self.role != "critic":
            return super()._build_lora_module(module)  # type: ignore[misc]
        name = next((name for name in HEADS if isinstance(getattr(module, name, None), nn.Module)), None)
        if name is None:
            raise _without_head(module)
        module.enable_input_require_grads()
        adapted = self._loaded(module) if self.model_config.lora_adapter_path is not None else self._made(module)
        head = getattr(adapted.get_base_model(), name)
        if not any(parameter.requires_grad for parameter in head.parameters()):  # an adapter may have one of its own
            head.requires_grad_(True)
        dtype = next(parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad)
        for parameter in filter(lambda one: one.requires_grad, adapted.parameters()):
            parameter.data = parameter.data.to(dtype)  # as verl's: FSDP1 has one for all of a unit
        return adapted

    def _made(self, module: Any) -> Any:
        model = self.model_config
        config = LoraConfig(
            task_type=TaskType.SEQ_CLS,  # by which PEFT leaves the head out of `all-linear`
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=convert_to_regular_types(model.target_modules),
            target_parameters=convert_to_regular_types(model.target_parameters),
            exclude_modules=convert_to_regular_types(model.exclude_modules),
            bias="none",
        )
        adapted = PeftModel(module, config)
        config.task_type = ADAPTERS_ALONE
        return adapted

    def _loaded(self, module: Any) -> Any:
        folder = copy_to_local(self.model_config.lora_adapter_path, use_shm=self.model_config.use_shm)
        config = PeftConfig.from_pretrained(folder)
        if config.task_type == TaskType.CAUSAL_LM:
            config.task_type = ADAPTERS_ALONE  # a policy's, of which PEFT would ask how to generate
        return PeftModel.from_pretrained(module, folder, is_trainable=True, config=config)


def _without_head(module: nn.Module) -> ConfigError:
    return ConfigError(
        "critic.model.lora_rank",
        expected=f"a model with a value head that is called {' or '.join(HEADS)}, to train beside the adapters",
        found=type(module).__name__,
        consequence="the run stops before training",
        remedy="critic.model.lora_rank=0",
    )
