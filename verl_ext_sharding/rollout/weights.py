"""Fills the server's model from the actor's named tensors: every name is accounted for, or it is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_ext_sharding.errors import ShardingError

_WRAPPERS = re.compile(r"\b(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module|base_model\.model)\.")
_ADAPTERS = re.compile(r"\b(lora_\w+|modules_to_save|original_module|token_adapter|base_layer)\b")
"""Names of PEFT's; here only after they should have been merged, since adapters by themselves are refused before."""

_ONE_MODEL = "give actor and rollout one model: actor_rollout_ref.model.path"
_MERGED_BEFORE = (
    "actor_rollout_ref.model.path=<a checkpoint that the adapters are merged into> without lora_adapter_path, or "
    "adapters of linear layers alone"
)
_SHOWN = 5


class WeightSyncError(ShardingError, RuntimeError):
    """The tensors that the trainer sent don't fit the rollout's model."""


@dataclass(kw_only=True, frozen=True)
class Piece:
    """A run of elements of one tensor, and where they lie in a bucket.

    Args:
        name: The tensor's name, as the trainer has it.
        shape: Shape of the whole tensor.
        dtype: Its dtype, without "torch.".
        start: First element of the run, in the flattened tensor.
        count: Number of elements.
        offset_bytes: Where they start in the bucket; a multiple of the element size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    count: int
    offset_bytes: int


class WeightLoader:
    """One update of a model's weights, fed piece by piece in any order.

    Args:
        model: The model, with memory for all of its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, torch.Tensor] = {}
        self._ways: list[list[frozenset[str]]] = []
        self._left: dict[str, int] = {}
        self._unexpected: list[str] = []
        self._tied: dict[str, int] = {}
        self._first: dict[int, str] = {}
        self._apart: tuple[str, str] | None = None
        parameters = {id(parameter) for parameter in model.parameters()}
        names_of: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names_of.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, names in names_of.items():
            if len(names) > 1:
                self._tied |= dict.fromkeys(names, key)
            ways = [way for name in names for way in _spellings(name, tensors[key].data, model)]
            for way in ways:
                self._targets.update(way)
            if key in parameters:  # a buffer keeps its own value when none is sent
                self._ways.append([frozenset(way) for way in ways])
        self._left = {name: target.numel() for name, target in self._targets.items()}

    def load(self, pieces: Iterable[Piece], bucket: torch.Tensor) -> None:
        """Copies pieces out of a bucket, converting their dtype.

        Args:
            pieces: What the bucket holds.
            bucket: One-dimensional uint8, on any device.

        Raises:
            WeightSyncError: When a shape differs from the model's.
        """
        with torch.no_grad():
            for piece in pieces:
                self._load_piece(piece, bucket)

    def finish(self) -> None:
        """Checks that the update was complete.

        Raises:
            WeightSyncError: Naming tensors that never came, tensors that the model does not have, and tied ones that differ.
        """
        complete = {name for name, left in self._left.items() if left <= 0}
        missing = [min(ways[0]) for ways in self._ways if not any(way <= complete for way in ways)]
        if not missing and not self._unexpected:
            if self._apart is not None:
                raise _not_tied(*self._apart)
            return
        found = [f"missing {_listed(missing)}"] if missing else []
        found += [f"not in the model {_listed(self._unexpected)}"] if self._unexpected else []
        raise WeightSyncError(
            "weight update of the rollout",
            expected=f"the {len(self._ways)} parameters of the rollout's model, each once",
            found="; ".join(found),
            consequence="the server keeps no usable weights and refuses requests until a complete update",
            remedy=_MERGED_BEFORE if any(map(_ADAPTERS.search, self._unexpected)) else _ONE_MODEL,
        )

    def _load_piece(self, piece: Piece, bucket: torch.Tensor) -> None:
        name = piece.name if piece.name in self._targets else _WRAPPERS.sub("", piece.name)
        target = self._targets.get(name)
        if target is None:
            if name not in self._unexpected:
                self._unexpected.append(name)
            return
        if tuple(target.shape) != piece.shape:
            raise WeightSyncError(
                f"weight {name!r}",
                expected=f"shape {tuple(target.shape)}, the rollout's",
                found=f"shape {piece.shape}, the trainer's",
                consequence="the weight update fails",
                remedy="give actor and rollout one model and config: actor_rollout_ref.model.path, .override_config",
            )
        dtype = getattr(torch, piece.dtype)
        nbytes = piece.count * dtype.itemsize
        source = bucket[piece.offset_bytes : piece.offset_bytes + nbytes].view(dtype)
        part = target.view(-1)[piece.start : piece.start + piece.count]
        first = self._first.setdefault(self._tied[name], name) if name in self._tied else name
        if first == name or self._left[first] > 0:
            part.copy_(source)
        elif self._apart is None and not _is_same(part, source.to(part)):
            self._apart = first, name
        self._left[name] -= piece.count


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _not_tied(first: str, name: str) -> WeightSyncError:
    return WeightSyncError(
        f"weights {first!r} and {name!r}",
        expected="the same values under both names, which are one parameter in the rollout's model (tie_word_embeddings)",
        found="different ones: the checkpoint of the actor holds both, and transformers keeps them apart there",
        consequence="the server refuses requests until another update, since it would compute with one of the two",
        remedy="+actor_rollout_ref.model.override_config.tie_word_embeddings=False, or a checkpoint without the second",
    )


def _spellings(name: str, tensor: torch.Tensor, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The ways in which verl may send one of the model's tensors, each as names and the part that they fill.

    Its own name; the checkpoint's name for it (verl's `convert_weight_keys`); and, for fused experts, one tensor an
    expert (verl's `unfuse_moe_params`).
    """
    for spelling in dict.fromkeys((name, _checkpoint_name(name, _key_mapping(model)))):
        yield {spelling: tensor}
        fused = spelling.rpartition(".mlp.experts.")[2]
        if tensor.dim() != 3 or fused not in ("gate_up_proj", "down_proj"):
            continue
        base = spelling.removesuffix(f".{fused}")
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        size = tensor.shape[1] // len(parts)
        yield {
            f"{base}.{expert}.{part}.weight": tensor[expert, index * size : (index + 1) * size]
            for expert in range(tensor.shape[0])
            for index, part in enumerate(parts)
        }


def _checkpoint_name(name: str, mapping: Mapping[str, str]) -> str:
    """The name under which the checkpoint has a parameter; `mapping` is transformers' pattern -> name in the model."""
    for pattern, own in mapping.items():
        theirs = re.sub(r"\(.*\)", "", pattern.lstrip("^"))
        name, count = re.subn(own, theirs, name)
        if count:
            break
    return name


def _key_mapping(model: nn.Module) -> dict[str, str]:
    mapping: Any = getattr(model, "_checkpoint_conversion_mapping", None)
    return mapping if isinstance(mapping, dict) else {}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
