"""verl's FSDP engines with the memory measures of the run's spec: attention, log-probs, checkpointing, offload.

Registered beside verl's own for the same device with a vendor, which `EngineRegistry` looks up first; verl's entries stay
as they are. A role without measures runs verl's engine, method for method, but for how it loads, resumes, sends merged
adapters and gives them to a critic, and with one more exception: where verl's own `enable_activation_offload` is on, ours
runs in its place (see `_offloads_activations`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import verl.utils.torch_functional as verl_F  # noqa: N812
from verl.plugin.platform import get_platform
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType

from verl_ext_sharding.config import spec
from verl_ext_sharding.config.measures import MODEL_BLOCK, ULYSSES_KEY, RoleMeasures
from verl_ext_sharding.engines.checkpoints import HostCheckpointMixin
from verl_ext_sharding.engines.merged_weights import MergedExportMixin
from verl_ext_sharding.engines.meta_init import MetaInitMixin
from verl_ext_sharding.engines.value_adapters import ValueAdaptersMixin
from verl_ext_sharding.errors import ConfigError, ShardingError
from verl_ext_sharding.patch_points.critic_attention import STOCK_ATTENTION
from verl_ext_sharding.patch_points.logprobs import ENTROPY, LogitsPath, logits_path
from verl_ext_sharding.patching import original
from verl_ext_sharding.training import attention, checkpointing, lm_head, logprobs, sequence_parallel
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.optimizer_offload import OptimizerStateOffload
from verl_ext_sharding.training.policy_config import parse_policy

logger = logging.getLogger(__name__)


class MeasuredEngineMixin(HostCheckpointMixin, MetaInitMixin, MergedExportMixin, ValueAdaptersMixin):
    """Added in front of one of verl's FSDP engines.

    The order is the one that `training.checkpointing` asks for: attention before the model is built, log-probs before
    LoRA, checkpointing and activation offload after LoRA and before FSDP, optimizer states once there is an optimizer.
    """

    model_config: Any
    engine_config: Any
    module: torch.nn.Module
    rank: int
    use_ulysses_sp: bool
    ulysses_parallel_group: Any
    compute_entropy_from_logits: Callable[..., torch.Tensor]

    spread_class: ClassVar[type | None] = None
    """The engine of roles whose layers are spread over the devices of one process."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """verl picks an engine by strategy, and knows no strategy for a role with `layout: device_map`."""
        spread = cls.spread_class
        if spread is None or cls is spread or _measures(*_configs(*args, **kwargs)).layers is None:
            return super().__new__(cls)
        return super().__new__(spread)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.role = _role(self.model_config, self.engine_config)
        self.measures = _measures(self.model_config, self.engine_config)
        self.applied: dict[str, str] = {}
        """What was done for the role, in words, by measure."""
        self._exchanges_heads = False
        self._fused = False
        self._warned = False
        self._choose_entropy()
        if self.measures == RoleMeasures() and not self.model_config.enable_activation_offload:
            return
        # The rollout adapter holds the same object, and other roles may: what is set from here on is this role's alone.
        self.model_config = copy.copy(self.model_config)
        object.__setattr__(self.model_config, "hf_config", copy.deepcopy(self.model_config.hf_config))

    # Building

    def _build_module(self) -> torch.nn.Module:
        if (choice := self._attention()) is not None:
            attention.set_attention(self.model_config.hf_config, choice)
            self._exchanges_heads = self.use_ulysses_sp and choice.name in attention.EXCHANGING
            self.applied["attention"] = f"{choice.name} ({choice.reason})"
        attention.check_whole_rows(
            str(self.model_config.hf_config._attn_implementation),
            self.model_config.hf_config,
            ulysses_size=int(self.engine_config.ulysses_sequence_parallel_size),
            role=self.role,
            ulysses_key=self._attention_keys()["ulysses_key"],
        )
        if self.measures.logits is not None:
            self._set_fused(False)  # verl's own patch of the model looks at it while the model is built
        module: torch.nn.Module = super()._build_module()
        if self.measures.logits is not None:
            self._apply_logits(module, self.measures.logits)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._apply_measures(module)
        wrapped: torch.nn.Module = super()._build_fsdp_module(module)
        self._note_checkpointing(wrapped)  # FSDP may have cut the layers so that they can't be compiled
        return wrapped

    def _apply_measures(self, module: torch.nn.Module) -> None:
        """Checkpointing and activation offload, of a model that is not sharded yet."""
        policy = parse_policy(self.measures.checkpointing, role=self.role)
        if policy is not None:
            policy.apply(module, device_type=self._layers_device_type(), obstacle=self._compile_obstacle())
        if self._offloads_activations():
            ActivationOffload().apply(module, device_type=get_platform().device_name)
        self._note_checkpointing(module)

    def _note_checkpointing(self, module: torch.nn.Module) -> None:
        recompute = checkpointing.applied(module)
        if recompute is not None:
            because = f" ({recompute.reason})" if recompute.reason else ""
            self.applied["gradient checkpointing"] = f"{recompute.policy.name}, {recompute.effect}{because}"

    def _layers_device_type(self) -> str:
        """What layers run on, by which policies decide whether to compile them."""
        return get_platform().device_name

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super()._build_optimizer(module)  # type: ignore[misc]
        # With FSDP2's CPUOffloadPolicy the states are born on the host and the optimizer steps there.
        if self.measures.optimizer_per_step and not self._uses_fsdp2_cpu_offload_policy:
            OptimizerStateOffload().apply(optimizer)
            self.applied["optimizer states"] = "on the host but for the step"
        return optimizer

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """As verl's; optimizer states that come to the device for the step alone are not moved between phases."""
        optimizer = optimizer and not self.measures.optimizer_per_step
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)  # type: ignore[misc]

    def initialize(self) -> None:
        """As verl's; says what was done for the role."""
        try:
            super().initialize()
        except ShardingError as error:
            error.name_role(self.role)
            raise
        if self.applied and self.rank == 0:
            words = "; ".join(f"{name}: {how}" for name, how in self.applied.items())
            logger.info("memory of %s: %s", self.role, words)

    # Attention

    def _attention(self) -> attention.AttentionChoice | None:
        """What was asked for; for layers that may be compiled, verl's flash-attn in a form that can be; else None."""
        requested = self.measures.attention
        if requested is None and (self.measures.checkpointing is None or not self._runs_stock_flash()):
            return None
        try:
            choice = attention.resolve_attention(
                requested or STOCK_ATTENTION,
                use_remove_padding=bool(self.model_config.use_remove_padding),
                device_capability=_capability(),
                flash_attn_importable=attention.flash_attn_importable(),
                torch_version=torch.__version__,
                model_supports=attention.model_support(
                    self.model_config.hf_config, trust_remote_code=bool(self.model_config.trust_remote_code)
                ),
                dtype=self._compute_dtype(),
                ulysses_size=int(self.engine_config.ulysses_sequence_parallel_size),
                role=self.role,
                because="as asked for" if requested is not None else "verl's own choice",
                **self._attention_keys(),
            )
        except ConfigError:
            if requested is not None:
                raise
            return None  # nobody asked: verl runs what it runs
        return choice if requested is not None or choice.name != STOCK_ATTENTION else None

    def _attention_keys(self) -> dict[str, str]:
        """verl's keys that decide what attention can run, for what to type: of a PPO role, or of SFT."""
        is_sft = spec.is_sft()
        model = "model" if is_sft else MODEL_BLOCK[self.role]
        ulysses = "engine.ulysses_sequence_parallel_size" if is_sft else ULYSSES_KEY[self.role]
        return {"ulysses_key": ulysses, "padding_key": f"{model}.use_remove_padding"}

    def _runs_stock_flash(self) -> bool:
        """Whether verl's own choice stands and is what it says: transformers takes one from the hub without flash-attn."""
        name = self.model_config.hf_config._attn_implementation
        return name == STOCK_ATTENTION and _capability() is not None and attention.flash_attn_importable()

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As verl's; with Ulysses, says where the sequences of the row start of which this rank gets a slice."""
        inputs, more = super().prepare_model_inputs(micro_batch=micro_batch)  # type: ignore[misc]
        if self._exchanges_heads:
            sequence_parallel.announce(
                sequence_parallel.Row.gather(inputs["position_ids"], self.ulysses_parallel_group)
            )
        return inputs, more

    def _compile_obstacle(self) -> str | None:
        """What keeps the layers of this role from being compiled whole."""
        flash = attention.is_transformers_flash(str(self.model_config.hf_config._attn_implementation))
        return "transformers' flash attention breaks the compiler's trace in each layer" if flash else None

    def _compute_dtype(self) -> torch.dtype:
        precision = self.engine_config.mixed_precision or {}
        dtype: torch.dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        return dtype

    # Log-probs

    def _choose_entropy(self) -> None:
        """verl's engine has compiled what it found in the module: for some roles of the process that is not theirs."""
        if self.measures.logits not in (None, "full"):
            self.compute_entropy_from_logits = partial(logprobs.entropy_from_logits, compiled=self._compiles_logits())
            # Ours keeps no more than the logits, as does a checkpoint around it, which would recompute verl's: the backward
            # pass is outside of `logits_path`.
            object.__setattr__(self.engine_config, "entropy_checkpointing", False)
        elif (
            verl_F.entropy_from_logits is ENTROPY.replacement
            and not self.engine_config.entropy_from_logits_with_chunking
        ):
            stock = original(ENTROPY)  # asking a context variable breaks the compiler's trace
            compiled = self.engine_config.use_torch_compile
            self.compute_entropy_from_logits = torch.compile(stock, dynamic=True) if compiled else stock

    def _apply_logits(self, module: Any, requested: str) -> None:
        choice = lm_head.resolve_logits(
            requested, obstacle=lm_head.fused_obstacle(module), needs_logits=None, role=self.role
        )
        if choice.name == "fused":
            lm_head.apply(module, compiled=self._compiles_logits())
            self._set_fused(True)
        else:
            lm_head.keep_forward(module)
        self.applied["log-probs"] = f"{choice.name} ({choice.reason})"

    def _compiles_logits(self) -> bool | None:
        """verl's switch turns compilation off; what it leaves on is for the platform to say."""
        return None if self.engine_config.use_torch_compile else False

    def _set_fused(self, value: bool) -> None:
        self._fused = value
        for config in (self.model_config, self.engine_config):
            object.__setattr__(config, "use_fused_kernels", value)  # verl's configs are frozen

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
        """As verl's, with log-probs and entropy computed the way that the role asks for."""
        with logits_path(self._logits_path(micro_batch)), sequence_parallel.forward_pass():
            return super().forward_step(  # type: ignore[misc]
                micro_batch, loss_function=loss_function, forward_only=forward_only
            )

    def _logits_path(self, micro_batch: Any) -> LogitsPath | None:
        requested = self.measures.logits
        if requested is None:
            return None
        if requested == "full":
            return LogitsPath(name="full")
        reader = _reads_logits(micro_batch) if self._fused else None
        if reader is not None:
            choice = lm_head.resolve_logits(requested, obstacle=None, needs_logits=reader, role=self.role)
            tu.assign_non_tensor(micro_batch, use_fused_kernels=False)
            if not self._warned:
                logger.warning("log-probs of %s: %s for such batches (%s)", self.role, choice.name, choice.reason)
                self._warned = True
        distilled = bool(tu.get_non_tensor_data(data=micro_batch, key="distillation_use_topk", default=False))
        return LogitsPath(name="chunked", compiled=self._compiles_logits(), distilled=distilled)

    # Activations

    def _offloads_activations(self) -> bool:
        """Whether ours runs, for our key or for verl's `enable_activation_offload`, which is switched off here.

        verl's makes checkpointing reentrant, so that it moves nothing (verl#3629), and stops at a layer that saves a
        tuple (verl#7472).
        """
        verls = bool(self.model_config.enable_activation_offload)
        if verls:
            object.__setattr__(self.model_config, "enable_activation_offload", False)
        if self.engine_config.forward_only or not (verls or self.measures.offload_activations):
            return False
        of_verl = " in place of verl's, which forces reentrant checkpointing" if verls else ""
        self.applied["activations"] = f"on the host between forward and backward{of_verl}"
        return True

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """As verl's; counts how often layers were compiled anew, which steps should not add to."""
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        run = spec.current()
        aggregated = run is not None and run.on_ray
        if self.measures.checkpointing is not None and aggregated and self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            outputs["metrics"]["layer_recompiles"] = [checkpointing.recompiles(self.module)]
        return outputs


def _configs(model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return model_config, engine_config


def _measures(model_config: Any, engine_config: Any) -> RoleMeasures:
    run = spec.current()
    role = _role(model_config, engine_config)
    return run.measures.get(role, RoleMeasures()) if run is not None else RoleMeasures()


def _role(model_config: Any, engine_config: Any) -> str:
    if model_config.model_type == "value_model":
        return "critic"
    return "ref" if engine_config.forward_only else "actor"


def _capability() -> tuple[int, int] | None:
    major, minor = get_platform().get_device_capability()
    return None if major is None or minor is None else (major, minor)


def _reads_logits(micro_batch: Any) -> str | None:
    """What in a micro-batch needs the logits themselves, or None."""
    for name in ("calculate_sum_pi_squared", "distillation_use_topk"):
        if tu.get_non_tensor_data(data=micro_batch, key=name, default=False):
            return name
    return "a temperature for each sample" if isinstance(micro_batch["temperature"], torch.Tensor) else None
