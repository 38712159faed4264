"""The server's copy of the policy: built without its weights or read from a checkpoint, put to sleep and woken."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from verl_ext_sharding.rollout.requests import RolloutError
from verl_ext_sharding.rollout.settings import DTYPES, ModelSpec

WeightState = Literal["discarded", "on_host", "incomplete", "ready"]

_AUTO_CLASS_OF_ARCHITECTURE = {
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForCausalLM": "AutoModelForCausalLM",
}


class HostedModel:
    """A model whose weights come and go while the module itself, with its buffers, stays.

    Parameters keep their identity, and tied ones stay tied: only their storage is taken away and given back.

    Args:
        model: The module. Its parameters are either all real or all empty (see `skeleton`).
        shapes: Shape of each parameter, by the name that `named_parameters` gives it.
        device: Where it computes.
        weights: State of the weights at the start.
    """

    def __init__(
        self, model: nn.Module, *, shapes: dict[str, torch.Size], device: torch.device, weights: WeightState
    ) -> None:
        self.model = model
        self.device = device
        self.weights: WeightState = weights
        self._shapes = shapes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on the device that computes; 0 while they are discarded or on the host."""
        here = (parameter for parameter in self.model.parameters() if parameter.device.type == self.device.type)
        return sum(parameter.nbytes for parameter in here)

    def discard(self) -> None:
        """Frees the weights; `allocate` and a complete update bring them back."""
        self._move(lambda parameter, _: parameter.data.new_empty(0, device=self.device))
        self.weights = "discarded"

    def to_host(self) -> None:
        """Moves the weights to host memory. On the CPU they are there already, and stay."""
        if self.device.type != "cpu" and self.weights == "ready":
            self._move(lambda parameter, _: parameter.data.to("cpu"))
            self.weights = "on_host"

    def allocate(self) -> None:
        """Brings the weights' memory back: their values from the host, or none yet after `discard`."""
        if self.weights == "on_host":
            self._move(lambda parameter, _: parameter.data.to(self.device))
            self.weights = "ready"
        elif self.weights == "discarded":
            self._move(lambda parameter, shape: parameter.data.new_empty(shape, device=self.device))
            self.weights = "incomplete"

    def require_weights(self) -> None:
        """Raises unless the weights are there and complete.

        Raises:
            RolloutError: Says what is missing.
        """
        if self.weights == "ready":
            return
        states = {
            "discarded": "weights that were freed by sleep, or never sent",
            "on_host": "weights that sleep moved to host memory",
            "incomplete": "memory for the weights, and no complete update since",
        }
        raise RolloutError(
            "rollout server",
            expected="a woken server with a complete set of weights",
            found=states[self.weights],
            consequence="the request fails",
            remedy="wake_up, then update_weights, before generate (verl's trainers do: is a request sent out of turn?)",
        )

    def _move(self, storage: Any) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = storage(parameter, self._shapes[name])


def build(spec: ModelSpec, device: torch.device) -> tuple[HostedModel, frozenset[int], Any]:
    """Builds the model, and reads what ends a response.

    Args:
        spec: Which model.
        device: Where it computes.

    Returns:
        The model, the ids that end a response, and the tokenizer.
    """
    for name in spec.external_lib:
        importlib.import_module(name)
    tokenizer = AutoTokenizer.from_pretrained(
        local_path(spec.tokenizer_path or spec.path, spec.use_shm), trust_remote_code=spec.trust_remote_code
    )
    config = load_config(spec, tokenizer)
    eos = _ids(getattr(config, "eos_token_id", None)) | _ids(tokenizer.eos_token_id) | _declared_eos(spec)
    hosted = loaded(spec, config, device) if spec.load_weights else skeleton(spec, config, device)
    return hosted, eos, tokenizer


def skeleton(spec: ModelSpec, config: PreTrainedConfig, device: torch.device) -> HostedModel:
    """Builds the model with real buffers (rotary frequencies) and no weights: no allocation, no random init."""
    from accelerate import init_empty_weights

    dtype = getattr(torch, DTYPES[spec.dtype])
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(config, dtype=dtype, **_options(spec))
    model.tie_weights()  # the context above gave each owner of a tied weight its own meta parameter
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                storage = torch.empty(0, dtype=parameter.dtype, device=device)
                real = empty.setdefault(id(parameter), nn.Parameter(storage, requires_grad=False))
                module._parameters[name] = real
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(device) if buffer is not None else None
    return HostedModel(_prepared(model), shapes=shapes, device=device, weights="discarded")


def loaded(spec: ModelSpec, config: PreTrainedConfig, device: torch.device) -> HostedModel:
    """Reads the model from its checkpoint."""
    model = auto_class(config).from_pretrained(
        local_path(spec.path, spec.use_shm),
        config=config,
        dtype=getattr(torch, DTYPES[spec.dtype]),
        **_options(spec),
    )
    return host(model.to(device), device)


def host(model: nn.Module, device: torch.device) -> HostedModel:
    """Wraps a model that has its weights."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return HostedModel(_prepared(model), shapes=shapes, device=device, weights="ready")


def load_config(spec: ModelSpec, tokenizer: Any | None) -> PreTrainedConfig:
    """Reads the config and changes it as verl changes the actor's (`HFModelConfig.__post_init__`)."""
    config = AutoConfig.from_pretrained(
        local_path(spec.config_path or spec.path, spec.use_shm), trust_remote_code=spec.trust_remote_code
    )
    override = dict(spec.override_config.get("model_config", spec.override_config))
    override.pop("attn_implementation", None)
    if tokenizer is not None:
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        override = {**special, **override}
    _apply(config, override)
    return config


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that verl loads the actor with, so that both have the same parameter names."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    for name, target in (getattr(config, "auto_map", None) or {}).items():
        if architecture and architecture in target:
            return getattr(transformers, name, transformers.AutoModelForCausalLM)
    if type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    for ending, name in _AUTO_CLASS_OF_ARCHITECTURE.items():
        if ending in architecture:
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence that the model was made for, or None where its config has none."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None)


def vocab_size(model: nn.Module) -> int:
    """Rows of the output embedding."""
    head = model.get_output_embeddings()
    return int(head.out_features if isinstance(head, nn.Linear) else model.config.get_text_config().vocab_size)


def local_path(path: str, use_shm: bool = False) -> str:
    """Where a checkpoint lies on this node; verl copies hdfs paths and, if asked, fills /dev/shm."""
    if not use_shm and not path.startswith("hdfs://"):
        return path
    from verl.utils.fs import copy_to_local

    return str(copy_to_local(path, use_shm=use_shm))


def placeholder_ids(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for an image or a video: a policy that samples one names an input that isn't there."""
    ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in ids if isinstance(token, int)]


def _declared_eos(spec: ModelSpec) -> frozenset[int]:
    """What the checkpoint says of generation, or else its config before it is changed as the actor's, as vLLM reads them."""
    path = local_path(spec.config_path or spec.path)
    try:
        return _ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        config = AutoConfig.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
        return _ids(getattr(config.get_text_config(decoder=True), "eos_token_id", None))


def _options(spec: ModelSpec) -> dict[str, Any]:
    """Arguments that a model is built and read with alike."""
    asked = {} if spec.attn_implementation is None else {"attn_implementation": spec.attn_implementation}
    return {"trust_remote_code": spec.trust_remote_code, **asked}


def _prepared(model: nn.Module) -> nn.Module:
    model.generation_config = GenerationConfig()  # requests say how to sample; a checkpoint's defaults must not
    return model.eval().requires_grad_(False)


def _apply(config: Any, override: dict[str, Any]) -> None:
    for key, value in override.items():
        if isinstance(value, dict) and isinstance(getattr(config, key, None), PreTrainedConfig):
            _apply(getattr(config, key), value)
        else:
            setattr(config, key, value)


def _ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
