"""A key-value cache of slots: rows join and leave a running batch without moving the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

HEADROOM_TOKENS = (64, 512)
"""Least and most free columns that a new buffer has; in between, a quarter of its width."""

_ROW_STEP = 8
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class SlotLayer(DynamicLayer):
    """Keys and values of one layer. Rows are slots, and every row ends at the same column.

    The live part is `[:rows, :, start:end]`; a row shorter than it is padded on the left. Buffers are zeroed when
    made, so that a padded column is always finite: its attention weight is 0, and 0 times NaN is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.start = 0
        self.end = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes empty buffers with the heads, head sizes, dtype and device of the given states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new columns in place and returns views of the live part."""
        end = self.end + key_states.shape[2]
        self.keys[: self.rows, :, self.end : end] = key_states
        self.values[: self.rows, :, self.end : end] = value_states
        self.end = end
        return self.keys[: self.rows, :, self.start : end], self.values[: self.rows, :, self.start : end]

    def get_seq_length(self) -> int:
        """Columns of the live part, padding included."""
        return self.end - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the next query sees, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def place(self, rows: int, columns: int, end: int) -> None:
        """Moves the live part into buffers of `rows` slots and `columns` columns so that it ends at `end`."""
        width = self.end - self.start
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            new[: self.rows, :, end - width : end] = old[: self.rows, :, self.start : self.end]
            setattr(self, name, new)
        self.start, self.end = end - width, end

    def write(self, keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor) -> None:
        """Appends rows: those of `keys` and `values` that `source` names, aligned to the common end."""
        first, columns = self.rows, slice(self.end - keys.shape[2], self.end)
        self.rows += source.numel()
        self.keys[first : self.rows, :, columns] = keys[source]
        self.values[first : self.rows, :, columns] = values[source]

    def keep(self, num_rows: int, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Drops the rows in `holes` by moving the last ones, `movers`, into their slots."""
        if holes.numel():
            self.keys[holes] = self.keys[movers]
            self.values[holes] = self.values[movers]
        self.rows = num_rows


class SlotCache(Cache):
    """One `SlotLayer` a layer, and the operations of a running batch.

    Args:
        num_layers: Layers of the model that keep keys and values.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.layers[0].rows

    @property
    def width(self) -> int:
        """Columns of the live part."""
        return self.layers[0].get_seq_length()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free columns included."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row over all layers, once rows were appended."""
        buffers = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def append(self, prefilled: Cache, source: Sequence[int], width: int) -> None:
        """Adds rows from a prefilled batch that is padded on the left.

        Args:
            prefilled: Cache of the prefill, each layer of shape (batch, heads, width, head_dim).
            source: For each new row, its row in `prefilled`; one may be named several times.
            width: Columns of `prefilled`.
        """
        self.reserve(self.num_rows + len(source), max(width, self.width), like=prefilled)
        for layer, filled in zip(self.layers, prefilled.layers, strict=True):
            index = torch.tensor(source, dtype=torch.long, device=filled.keys.device)
            layer.write(filled.keys, filled.values, index)
            layer.start = min(layer.start, layer.end - width)

    def reserve(self, num_rows: int, width: int, like: Cache | None = None) -> None:
        """Makes room for `num_rows` rows, a live part of `width` columns and one more column after it.

        Args:
            num_rows: Slots needed.
            width: Columns needed before the end.
            like: A cache of the same model, for shape and dtype at the first call.
        """
        for index, layer in enumerate(self.layers):
            if not layer.is_initialized:
                assert like is not None, "the first rows of a batch come from a prefill"
                layer.lazy_initialization(like.layers[index].keys, like.layers[index].values)
            slots, _, columns, _ = layer.keys.shape
            if num_rows <= slots and width <= layer.end < columns:
                continue
            least, most = HEADROOM_TOKENS
            headroom = min(max(width // 4, least), most)
            wanted = num_rows if num_rows < _ROW_STEP else -(-num_rows // _ROW_STEP) * _ROW_STEP
            layer.place(max(slots, wanted), width + headroom, width)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drops every row but those named.

        Args:
            rows: Rows to keep, ascending.

        Returns:
            For each slot that is left, the row that it held before: the last rows fill the holes.
        """
        kept, count = set(rows), len(rows)
        order = list(range(count))
        holes = [slot for slot in range(count) if slot not in kept]
        movers = [row for row in rows if row >= count]
        for slot, row in zip(holes, movers, strict=True):
            order[slot] = row
        for layer in self.layers:
            device = layer.keys.device
            layer.keep(count, torch.tensor(holes, device=device).long(), torch.tensor(movers, device=device).long())
        return order

    def trim(self, width: int) -> None:
        """Narrows the live part to the longest row that is left."""
        for layer in self.layers:
            layer.start = layer.end - width


def can_merge(config: Any, max_model_len: int) -> bool:
    """Whether every layer keeps plain keys and values, so that rows may join a running batch.

    A sliding window counts as plain when no sequence is longer than it. Hybrid, state-space and other caches don't.
    Neither do rotary frequencies that follow the longest row of a batch: there, neighbours would change a row.

    Args:
        config: The model's transformers config.
        max_model_len: The longest sequence, in tokens.
    """
    try:
        layers = DynamicCache(config=config).layers
        rope_types = _rope_types(config.get_text_config(decoder=True))
    except (AttributeError, ValueError):  # a config without decoder layers that transformers can read
        return False
    if not layers or rope_types & _LENGTH_DEPENDENT_ROPE:
        return False
    return all(
        type(layer) is DynamicLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= max_model_len)
        for layer in layers
    )


def _rope_types(text: Any) -> set[str]:
    """Kinds of rotary scaling in a config: one for the model, or one a layer type."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nodes = (found, *(value for value in found.values() if isinstance(value, dict)))
    return {kind for node in nodes if (kind := node.get("rope_type", node.get("type"))) is not None}


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token over all layers, counting every layer as plain full attention.

    Args:
        config: The model's transformers config; one without attention heads keeps nothing that grows with the tokens.
        dtype: Dtype of the cache.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(text.num_hidden_layers * 2 * kv_heads * head_dim * dtype.itemsize)
