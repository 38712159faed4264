"""Attention and log-probs of each role, checked before anything loads: against its model in the driver, then against the nodes.

What runs is decided in the worker, which has the card (`engines.measured`); here is refused what is known to fail there.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.dtypes import Capability, compute_dtype
from verl_ext_sharding.config.facts import FSDP
from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK, ULYSSES_KEY, RoleMeasures
from verl_ext_sharding.errors import ConfigError, ShardingError, first_line
from verl_ext_sharding.model_configs import hf_config_of, meta_model_of
from verl_ext_sharding.patch_points.critic_attention import STOCK_ATTENTION
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import JobFacts

if TYPE_CHECKING:
    from verl_ext_sharding.workers.probe import Packages

logger = logging.getLogger(__name__)

_NEWEST: Capability = (99, 0)
"""A card that no attention is too new for."""


@dataclass(kw_only=True, frozen=True)
class AttentionUse:
    """The attention that a role's model is going to be built with.

    Args:
        role: "actor", "ref" or "critic".
        requested: As written, or verl's own choice.
        measured: It is `sharding.roles.<role>.attn_implementation`; else verl's own key, or its default.
        packed: `use_remove_padding`.
        dtype: What the role computes in, such as "bfloat16".
        ulysses_size: Ulysses sequence parallel size.
        hf_config: The model's transformers config, or None where it was not needed or can't be read.
        trusts_code: verl's `trust_remote_code`.
    """

    role: str
    requested: str
    measured: bool
    packed: bool
    dtype: str
    ulysses_size: int = 1
    hf_config: Any = None
    trusts_code: bool = False


def check_models(config: DictConfig, facts: JobFacts, measures: Mapping[str, RoleMeasures]) -> list[AttentionUse]:
    """Checks what was asked by name of each role's model, whatever its card.

    Args:
        config: verl's composed config, with the keys that the request sets.
        facts: The job.
        measures: Memory measures of each role that has any.

    Returns:
        The attention of each role that an FSDP engine of a GPU runs, for `check_nodes`.

    Raises:
        ConfigError: A model can't do what is asked.
    """
    on_cpu = cpu.is_cpu(config)
    uses = []
    for role, engine in facts.engines.items():
        if engine.strategy not in FSDP or (role == "ref" and facts.ref_in_actor):
            continue
        asked = measures.get(role, RoleMeasures())
        use = _use(config, role, asked, engine.sequence_parallel_size)
        if use.measured and use.requested != "auto":  # of a model that can't be read, all but the model is checked
            has_flash_attn = importlib.util.find_spec("flash_attn") is not None or use.requested == STOCK_ATTENTION
            _resolve(use, None if on_cpu else _NEWEST, has_flash_attn)
        _check_slices(config, use)
        if asked.logits == "fused":
            _check_fused(config, role)
        if not on_cpu:
            uses.append(use)
    return uses


def _use(config: DictConfig, role: str, asked: RoleMeasures, ulysses_size: int) -> AttentionUse:
    block = MODEL_BLOCK[role]
    own = OmegaConf.select(config, f"{block}.override_config.attn_implementation", default=None)
    return AttentionUse(
        role=role,
        requested=asked.attention or str(own or STOCK_ATTENTION),
        measured=asked.attention is not None,
        packed=bool(OmegaConf.select(config, f"{block}.use_remove_padding", default=True)),
        dtype=compute_dtype(OmegaConf.select(config, f"{ENGINE_BLOCK[role]}.mixed_precision", default=None)),
        ulysses_size=ulysses_size,
        hf_config=hf_config_of(config, role) if asked.attention not in (None, "auto") else None,
        trusts_code=bool(OmegaConf.select(config, f"{block}.trust_remote_code", default=False)),
    )


def _resolve(
    use: AttentionUse, capability: Capability | None, has_flash_attn: bool, torch_version: str | None = None
) -> None:
    import torch

    from verl_ext_sharding.training.attention import ModelSupport, model_support, resolve_attention

    resolve_attention(
        use.requested,
        use_remove_padding=use.packed,
        device_capability=capability,
        flash_attn_importable=has_flash_attn,
        torch_version=torch_version or torch.__version__,
        model_supports=ModelSupport()
        if use.hf_config is None
        else model_support(use.hf_config, trust_remote_code=use.trusts_code),
        dtype=getattr(torch, use.dtype),
        ulysses_size=use.ulysses_size,
        role=use.role,
        ulysses_key=ULYSSES_KEY[use.role],
        padding_key=f"{MODEL_BLOCK[use.role]}.use_remove_padding",
    )


def _check_slices(config: DictConfig, use: AttentionUse) -> None:
    """Refuses verl's own key for an attention that would see one rank's slice of a row; the model is read only then."""
    if use.measured or use.ulysses_size == 1:
        return
    from verl_ext_sharding.training.attention import check_whole_rows, is_transformers_flash

    if is_transformers_flash(use.requested):
        return
    hf_config = hf_config_of(config, use.role)
    if hf_config is not None:
        key = ULYSSES_KEY[use.role]
        check_whole_rows(use.requested, hf_config, ulysses_size=use.ulysses_size, role=use.role, ulysses_key=key)


def _check_fused(config: DictConfig, role: str) -> None:
    from verl_ext_sharding.training.lm_head import fused_obstacle, resolve_logits

    try:
        model = meta_model_of(config, role, valued=False)
    except ShardingError:
        raise
    except Exception as error:  # code of a checkpoint may not build without memory; the worker looks again
        logger.info("log-probs of %s: its model can't be built on meta: %s", role, first_line(error))
        return
    if model is not None:
        resolve_logits("fused", obstacle=fused_obstacle(model), needs_logits=None, role=role)


def check_nodes(
    uses: Sequence[AttentionUse],
    placement: Placement,
    capabilities: Mapping[int, Capability | None],
    nodes: Mapping[str, Packages],
) -> None:
    """Checks the attention of each role against the cards and packages of the nodes it runs on.

    Args:
        uses: From `check_models`.
        placement: Where the roles run.
        capabilities: Compute capability by device number; None or missing is unknown.
        nodes: Packages of each node with devices for the job, by name, in verl's order.

    Raises:
        ConfigError: An attention can't run there.
    """
    lacking = []
    for use in uses:
        for device in placement.devices_of(use.role):
            capability = capabilities.get(device)
            here = _packages_of(device, placement, nodes)
            if capability is None or here is None or here.torch is None:
                continue  # no CUDA, or it is not known which node Ray takes
            if use.measured:
                _resolve(use, capability, here.flash_attn, here.torch)
            elif use.requested == STOCK_ATTENTION and not (here.flash_attn or here.kernels):
                lacking.append(use.role)
                break
    if lacking:
        raise _no_flash_attn(lacking)


def _packages_of(device: int, placement: Placement, nodes: Mapping[str, Packages]) -> Packages | None:
    """Packages where a device is, or None where that can't be said before Ray reserves devices."""
    found = list(nodes.values())
    if len(set(found)) == 1:
        return found[0]
    topology = placement.topology
    return found[topology.node_of(device)] if len(found) == topology.num_nodes else None


def _no_flash_attn(roles: Sequence[str]) -> ConfigError:
    keys = " ".join(f"sharding.roles.{role}.attn_implementation=auto" for role in roles)
    return ConfigError(
        f"attention of {', '.join(roles)}",
        expected="flash-attn on their nodes, since verl builds models with flash_attention_2 unless told otherwise",
        found="neither flash-attn nor Hugging Face's kernels is installed there",
        consequence="the run stops before any model loads, since none could be built",
        remedy=f"{keys}, or pip install flash-attn",
    )
