"""The reward server's model: loaded where it was asked to be, scored in padded batches, parked while its device is lent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.hooks import remove_hook_from_module
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig

from verl_ext_sharding.config.reward import KEY
from verl_ext_sharding.config.reward_checkpoint import beyond_positions, check_reward_model, no_classifier
from verl_ext_sharding.config.reward_limits import model_limit
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.layer_keys import HOST
from verl_ext_sharding.rollout import memory
from verl_ext_sharding.rollout.modeling import local_path
from verl_ext_sharding.rollout.requests import RolloutError
from verl_ext_sharding.rollout.reward_requests import Labels
from verl_ext_sharding.rollout.reward_settings import WHERE, RewardServing
from verl_ext_sharding.rollout.settings import DTYPES
from verl_ext_sharding.training.layer_map import DeviceNeeds, plan_layers

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 256 << 20
_PROBES = (
    "Yes.",
    "The answer is four.",
    "Two and two make four, as everybody knows, and as you can check by counting.",
)
_ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}
"""Share by which scores of weights of a dtype may move when the shape of a batch changes. A wrong position moves them by
about all of their size, an approximation over all columns (Nystroemformer) or a convolution past the end by less."""


class RewardModel:
    """A sequence-classification model and its tokenizer.

    Where the checkpoint's config has a pad token, transformers scores the last token that differs from it, in training
    as here: with `pad_token_id == eos_token_id` that is the token before a final eos. Without a pad token (or with -1,
    which some configs say for none) it scores the last token; batches are then padded with an id that none of their
    sequences ends with, which comes to the same.

    Args:
        model: The model, in eval mode, on its devices.
        tokenizer: Its tokenizer.
        serving: What the server was told.
        device: Where inputs go.
    """

    def __init__(self, model: Any, tokenizer: Any, serving: RewardServing, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._device = device
        self._dtype = getattr(torch, DTYPES[serving.dtype])
        self._path = serving.path
        self._configs: tuple[Any, ...] = (model.config, model.config.get_text_config())
        for config in self._configs:
            config.use_cache = False  # keys and values of a prompt that nothing continues
        self.embedding_rows = int(model.get_input_embeddings().weight.shape[0])
        pad = getattr(self._configs[-1], "pad_token_id", None)
        self._pad_token_id: int | None = pad if pad is not None and 0 <= pad < self.embedding_rows else None
        self.max_model_len = _max_model_len(model, serving)
        self.labels = Labels(names=_label_names(model.config), problem_type=getattr(model.config, "problem_type", None))
        accelerated = [p for p in model.parameters() if p.device.type not in ("cpu", "meta")]
        self._parked = ParkedWeights(accelerated, pin=True)
        self.pads = self._pads_safely()

    @property
    def most_rows(self) -> int:
        """Sequences that can be padded together: without a pad token an id must be left that none of them ends with."""
        return self.embedding_rows - 1 if self._pad_token_id is None else self.embedding_rows

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on devices, or in host memory on a CPU; those that visit layer by layer don't count."""
        return sum(p.nbytes for p in self._model.parameters() if p.device.type != "meta")

    @property
    def described(self) -> str:
        """One line for the log."""
        places = getattr(self._model, "hf_device_map", None) or {"": str(self._device)}
        padding = "padded batches" if self.pads else "batches of equal lengths, since padding changes its scores"
        limit = f"at most {self.max_model_len} tokens" if self.max_model_len else "any length"
        return f"{type(self._model).__name__} on {sorted({str(p) for p in places.values()})}, {limit}, {padding}"

    def tokenized(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: With the chat template applied already.
            add_special_tokens: Whether to add what the tokenizer puts around a text, such as a bos token.
        """
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    @torch.no_grad()
    def score(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logits of each sequence, by one forward pass.

        Args:
            batch: Token ids of each sequence, at least one; ids and lengths are checked by the server.
        """
        return self._logits(batch, max(map(len, batch))).float().cpu().tolist()

    def sleep(self) -> None:
        """Frees the weights' memory on accelerators. Weights that are in host memory stay there."""
        self._parked.park()
        self.give_back()

    def wake_up(self) -> None:
        """The counterpart of `sleep`.

        Raises:
            RolloutError: A device has no room for them; they stay in host memory.
        """
        self._parked.restore()

    def give_back(self) -> None:
        """Returns freed memory to the devices and the system."""
        for device in {self._device, *self._parked.homes}:
            memory.give_back(device)

    def _logits(self, batch: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """Logits (sequences, labels) of sequences that are padded on the right, so that positions need no shift."""
        pad = self._pad_token_id
        if pad is None:
            last = {row[-1] for row in batch}
            pad = next(token for token in reversed(range(self.embedding_rows)) if token not in last)
            for config in self._configs:
                config.pad_token_id = pad
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in batch])
        lengths = torch.tensor([len(row) for row in batch]).unsqueeze(1)
        mask = (torch.arange(width) < lengths).long()
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape != (len(batch), len(self.labels.names)):
            found = "no logits" if logits is None else f"logits of shape {tuple(getattr(logits, 'shape', ()))}"
            raise no_classifier(self._path, f"{type(self._model).__name__} with {found} for {len(batch)} sequences")
        return logits

    @torch.no_grad()
    def _pads_safely(self) -> bool:
        """Whether scores stay the same when a sequence is padded: few models (XLNet) look at the last column, whatever
        it holds, and a model with code of its own may do anything."""
        rows = [row for row in (self.tokenized(text, True) for text in _PROBES) if row]
        highest = max((max(row) for row in rows), default=0)
        if highest >= self.embedding_rows:
            raise _no_row(self._path, highest, self.embedding_rows)
        alone = torch.cat([self._logits([row], len(row)) for row in rows]).float()
        together = self._logits(rows, 2 * max(map(len, rows))).float()
        return bool((alone - together).norm() <= _ROUNDING[self._dtype] * alone.norm())


class ParkedWeights:
    """Weights that leave their devices and come back with the same values.

    They never change, so the host copy is made once and kept: parking is then free, and only coming back copies. The
    copy is one stream of bytes in chunks, because pinned memory of other sizes is rounded up to the next power of two.

    Args:
        parameters: What to park; tied parameters once.
        pin: Whether the host copy is page-locked, for fast copies to an accelerator.
        chunk_bytes: Size of a chunk of the host copy, a power of two.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, pin: bool, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._parameters = list(parameters)
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._devices = [parameter.device for parameter in self._parameters]
        self._pin = pin
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def homes(self) -> frozenset[torch.device]:
        """Devices that the weights live on."""
        return frozenset(self._devices)

    def park(self) -> None:
        """Frees the weights' memory on their devices. Idempotent."""
        if not self._chunks:
            num_bytes = sum(parameter.nbytes for parameter in self._parameters)
            for start in range(0, num_bytes, self._chunk_bytes):
                size = min(self._chunk_bytes, num_bytes - start)
                self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))
            self._copy([parameter.data for parameter in self._parameters], to_host=True)
        for parameter, device in zip(self._parameters, self._devices, strict=True):
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)

    def restore(self) -> None:
        """Brings the weights back to their devices. Idempotent.

        Raises:
            RolloutError: A device has no room for them; they stay parked.
        """
        if not self._chunks or all(p.shape == shape for p, shape in zip(self._parameters, self._shapes, strict=True)):
            return
        try:
            data = [
                torch.empty(shape, dtype=parameter.dtype, device=device)
                for parameter, shape, device in zip(self._parameters, self._shapes, self._devices, strict=True)
            ]
        except torch.OutOfMemoryError as error:
            raise _no_room(sum(map(len, self._chunks)), str(error)) from None
        self._copy(data, to_host=False)
        for parameter, tensor in zip(self._parameters, data, strict=True):
            parameter.data = tensor

    def _copy(self, tensors: Sequence[torch.Tensor], *, to_host: bool) -> None:
        """Copies between the tensors, one after the other, and the chunks."""
        position = 0
        for tensor in tensors:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            start = 0
            while start < len(flat):
                chunk, offset = divmod(position, self._chunk_bytes)
                count = min(len(flat) - start, self._chunk_bytes - offset)
                host, device = self._chunks[chunk][offset : offset + count], flat[start : start + count]
                if to_host:
                    host.copy_(device)
                else:
                    device.copy_(host, non_blocking=self._pin)
                start, position = start + count, position + count
        for device in self.homes:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)


def load(serving: RewardServing) -> RewardModel:
    """Reads a reward model and puts it where it was asked to be.

    Args:
        serving: What the server was told.

    Raises:
        ConfigError: The checkpoint is no classifier, a device does not exist, or the map does not fit the model.
    """
    path, trust = local_path(serving.path, serving.use_shm), serving.trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    for error in check_reward_model(config.to_dict(), serving.path, max_model_len=serving.max_model_len):
        raise error
    device = _execution_device(serving)
    dtype = getattr(torch, DTYPES[serving.dtype])
    options: dict[str, Any] = {"trust_remote_code": trust, "dtype": dtype}
    if serving.attn_implementation is not None:
        options["attn_implementation"] = serving.attn_implementation
    placed = _placement(serving, config, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    model, found = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, output_loading_info=True, **options, **placed
    )
    if found["missing_keys"]:
        raise no_classifier(serving.path, f"no weights for {', '.join(sorted(found['missing_keys'])[:3])}")
    heads = {name for name, _ in model.named_children()} - {model.base_model_prefix}
    dropped = sorted(name for name in found["unexpected_keys"] if name.partition(".")[0] in heads)
    if dropped:
        raise no_classifier(
            serving.path, f"{type(model).__name__} has no place for {', '.join(dropped[:3])} of its head"
        )
    if serving.asked.offload_params:
        _offload(model, device)
    return RewardModel(model, tokenizer, serving, device)


def _offload(model: nn.Module, device: torch.device) -> None:
    """Leaves the weights in host memory, each for its own module's forward pass on the device."""
    cpu_offload(model, execution_device=device)
    for name, module in model.named_modules():
        if name.endswith("rel_embeddings"):  # DeBERTa's encoder reads this small table itself, past its forward
            remove_hook_from_module(module)
            module.to(device)


def _execution_device(serving: RewardServing) -> torch.device:
    """The device that inputs go to."""
    own = [f"{serving.device}:{number}" for number in range(serving.num_devices)] if serving.device != "cpu" else []
    asked = serving.asked.execution_device
    if asked is None:
        return torch.device(own[0] if own else "cpu")
    if asked in (*own, "cpu"):
        return torch.device(asked)
    raise ConfigError(
        f"{KEY}.execution_device",
        expected=f"a device of the reward server's own process: {', '.join([*own, 'cpu'])}",
        found=asked,
        consequence="the reward server does not start",
        remedy=f"{KEY}.execution_device={own[0] if own else 'cpu'}",
    )


def _placement(
    serving: RewardServing, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where the weights go; a map is checked before they are read."""
    asked = serving.asked
    on_host = serving.device == "cpu"  # devices are logical then, and host memory is all that there is
    if asked.device_map is None:
        return {} if asked.offload_params or device.type == "cpu" else {"device_map": {"": device}}
    with init_empty_weights():
        skeleton = AutoModelForSequenceClassification.from_config(config, trust_remote_code=serving.trust_remote_code)
    devices = [torch.device(serving.device, number) for number in range(serving.num_devices)]
    needs = DeviceNeeds(memory_bytes=None if on_host else tuple(_room_bytes(serving, place) for place in devices))
    layers = plan_layers(
        skeleton, asked.device_map, role="reward", num_devices=serving.num_devices, dtype=dtype, needs=needs
    )
    if on_host:
        return {}
    return {"device_map": {name: p if p == HOST else str(devices[p]) for name, p in layers.modules.items()}}


def _room_bytes(serving: RewardServing, device: torch.device) -> int:
    """What weights may fill of a device: their share of it, and no more than what is free."""
    share = serving.gpu_memory_utilization * memory.total_bytes(device)
    return int(min(share, memory.available_bytes(device)))


def _no_row(path: str, token_id: int, rows: int) -> ConfigError:
    return ConfigError(
        f"{WHERE}.model_path={path}",
        expected=f"a tokenizer whose ids have rows: the reward model's embedding has {rows}",
        found=f"id {token_id} for a word or a special token",
        consequence="the reward server does not start",
        remedy=f"put the reward model's own tokenizer into {path}, or resize its embedding",
    )


def _max_model_len(model: Any, serving: RewardServing) -> int | None:
    """Longest sequence in tokens: `max_model_len`, or what the model was made for."""
    known = model_limit(model.config.to_dict())
    longest, source = known.tokens, known.source
    for name, module in model.named_modules():
        # A table that counts from behind its padding row, whatever the model's type: beyond it is a device assert.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            longest, source = module.num_embeddings - module.padding_idx - 1, f"the rows of {name}"
    limit = serving.max_model_len or longest
    if limit is not None and longest is not None and limit > longest:
        raise beyond_positions(limit, longest, source)
    return limit


def _label_names(config: Any) -> tuple[str, ...]:
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(config.num_labels))


def _no_room(num_bytes: int, found: str) -> RolloutError:
    return RolloutError(
        "waking the reward model",
        expected=f"room for its weights, {num_bytes / 2**30:.1f} GiB",
        found=found,
        consequence="it stays in host memory, and nothing is scored",
        remedy=f"{KEY}.devices on devices of its own, or {KEY}.offload.params=true to stream its layers from the host",
    )
