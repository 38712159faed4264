"""verl's FSDP engines with guards: token ids are checked before a kernel reads them, inputs meet their weights."""

from __future__ import annotations

import logging
from typing import Any

import torch
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id
from verl.utils.metric import Metric

from verl_ext_sharding.config import spec
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.measures import MODEL_BLOCK
from verl_ext_sharding.errors import ShardingError, TokenIdError
from verl_ext_sharding.training import alignment
from verl_ext_sharding.training.device_asserts import chain, explain_device_assert
from verl_ext_sharding.training.guards import KINDS, Checked, TokenGuard, num_ids
from verl_ext_sharding.training.layers import input_embedding

logger = logging.getLogger(__name__)

MASKS = ("loss_mask", "response_mask")
"""Fields of a batch that say which tokens count in a loss."""


class GuardedEngineMixin:
    """Added in front of one of verl's FSDP engines, after its role is known."""

    role: str
    model_config: Any
    engine_config: Any
    module: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = spec.current()
        self.guards = run.guards if run is not None else Guards(align_inputs=False, token_ids="off")
        self.token_guard: TokenGuard | None = None
        self._counts = dict.fromkeys(KINDS, 0)
        self._warned_of_ids = False

    def _build_module(self) -> torch.nn.Module:
        try:
            module: Any = super()._build_module()  # type: ignore[misc]
        except Exception as error:
            # torch asserts that an embedding has this row; verl hides that for a critic
            if not any("padding_idx" in str(link).lower() for link in chain(error)):
                raise
            raise self._pad_without_row() from error
        embedding: Any = input_embedding(module)
        if self.guards.token_ids != "off" and isinstance(getattr(embedding, "weight", None), torch.Tensor):
            tokenizer = getattr(self.model_config, "tokenizer", None)
            rows = embedding.weight.shape[0]
            pad = getattr(tokenizer, "pad_token_id", None)
            self.token_guard = TokenGuard(
                role=self.role,
                policy=self.guards.token_ids,
                rows=rows,
                tokenizer_size=num_ids(tokenizer) if tokenizer is not None else None,
                # packed sequences have no padding, so that a pad token without a row does no harm
                pad_token_id=0 if self.model_config.use_remove_padding and pad is not None and pad >= rows else pad,
            )
        return module

    def _pad_without_row(self) -> TokenIdError:
        config = self.model_config.hf_config
        block = MODEL_BLOCK[self.role]
        return TokenIdError(
            f"pad token of the {self.role}",
            expected=f"an id from 0 to {config.get_text_config().vocab_size - 1}, which has a row in the model's embedding",
            found=f"pad_token_id {config.pad_token_id}, as its tokenizer has it",
            consequence="the run stops, since the model can't be built",
            remedy=f"take the tokenizer that belongs to the model, or +{block}.override_config.pad_token_id=0",
        )

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_fsdp_module(module)  # type: ignore[misc]
        if self.guards.align_inputs and get_platform().device_name != "cpu":
            alignment.apply(module, input_device=f"{get_platform().device_name}:{get_device_id()}")
        return module

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """As verl's, with token ids checked before."""
        checked = self._check(data)
        try:
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]
        except ShardingError as error:
            error.name_role(self.role)
            raise
        except Exception as error:
            run = spec.current()
            text = explain_device_assert(
                error,
                role=self.role,
                seed=run.seed if run is not None else None,
                batch=checked.describe() if checked is not None else None,
            )
            if text is None:
                raise
            raise RuntimeError(text) from error

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """As verl's; counts the ids that belong to no token."""
        self._counts = dict.fromkeys(KINDS, 0)
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        run = spec.current()
        aggregated = run is not None and run.on_ray
        if self.token_guard is not None and aggregated and self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            for kind, count in self._counts.items():
                outputs["metrics"][f"guards/{kind}_ids"] = Metric("sum", count)
        return outputs

    def _check(self, data: Any) -> Checked | None:
        ids = data.get("input_ids", None) if self.token_guard is not None else None
        if ids is None:
            return None
        assert self.token_guard is not None
        checked = self.token_guard.check(ids)
        for kind, count in checked.counts.items():
            self._counts[kind] += count
        if any(checked.counts.values()) and not self._warned_of_ids:
            logger.warning("token ids of %s: %s in one batch", self.role, checked.counts)
            self._warned_of_ids = True
        if checked.replaced is not None:
            data["input_ids"] = checked.input_ids
            for name in MASKS:
                if name in data.keys():  # noqa: SIM118  (a TensorDict takes no `in`)
                    data[name] = without(data[name], checked.replaced)
        return checked


def without(mask: torch.Tensor, replaced: torch.Tensor) -> torch.Tensor:
    """A loss mask with replaced tokens left out.

    Args:
        mask: Nested (jagged), one row for each sequence: of the whole sequence, or of the response at its end.
        replaced: Nested boolean, of whole sequences.

    Returns:
        A mask of the same layout and dtype.

    Raises:
        TokenIdError: The mask is not nested.
    """
    if not mask.is_nested:
        raise TokenIdError(
            "sharding.guards.token_ids=mask",
            expected="loss masks of sequences without padding, as verl's trainer sends them",
            found=f"a mask of shape {list(mask.shape)}, in which replaced tokens can't be left out",
            consequence="the run stops",
            remedy="sharding.guards.token_ids=error",
        )
    rows = [
        part * ~whole[len(whole) - len(part) :].to(part.device)
        for part, whole in zip(mask.unbind(), replaced.unbind(), strict=True)
    ]
    values = torch.cat(rows).to(mask.dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets=mask.offsets())
