"""Compiles each decoder layer so that the compiler itself chooses what to keep for the backward pass.

`torch._functorch.config.activation_memory_budget` tells the partitioner of a compiled graph which share of the
activations it may keep: 1.0 keeps what is fastest, 0.0 the inputs only. The setting is global and read when a graph is
compiled, so it is set around each compilation by the backend of that application, never left behind: two roles of one
process each keep their own.

One graph serves all layers of a model (they differ in their parameters only), and each application has a code object of
its own, so that roles of one process share neither cache entries nor the compiler's limit of recompilations.
Lengths are marked dynamic on the inputs instead of `dynamic=True`, which also makes every float of the model symbolic
and compiles each graph twice.

Order of wrapping: compile inside the layer's forward, then `fully_shard` or FSDP1 around the layer. The hooks that
gather and free parameters then stay outside of the graph, which takes the gathered parameters as inputs.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl_ext_sharding.training import attention_flops
from verl_ext_sharding.training.layers import Forward, hidden_states, inner_fsdp_units
from verl_ext_sharding.training.recompute import Checkpointed, Recompute, Variant, kept_bytes
from verl_ext_sharding.training.saved_bytes import is_plain
from verl_ext_sharding.versions import in_range

logger = logging.getLogger(__name__)

MIN_TORCH = "2.6"
MIN_CUDA_CAPABILITY = (7, 0)

_numbers = itertools.count()


@cache
def compile_obstacle(device_type: str) -> str | None:
    """Why layers can't be compiled for a device type here, or None when nothing speaks against it.

    Looks at versions and tools only; a model that the compiler can't take shows at its first call.

    Args:
        device_type: `"cuda"` or `"cpu"`.
    """
    if not in_range(torch.__version__, f">={MIN_TORCH}"):
        return f"torch {torch.__version__} is older than {MIN_TORCH}"
    from torch import _dynamo

    if _dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE)"
    if not _dynamo.is_dynamo_supported():
        return "torch.compile does not support this Python or platform"
    if not hasattr(_functorch_config(), "activation_memory_budget"):
        return f"torch {torch.__version__} has no activation_memory_budget"
    if device_type == "cuda":
        return _cuda_obstacle()
    if device_type == "cpu":
        names = (os.environ.get("CXX") or "g++", "g++", "clang++")
        return None if any(shutil.which(name) for name in names) else "no C++ compiler (g++ or clang++) is installed"
    return f"layers on {device_type} devices are not compiled"


def _cuda_obstacle() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton does not import"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CUDA_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is older than compute capability 7.0"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "no C compiler (gcc or clang) is installed, which triton needs"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the Python headers (python3-dev) are not installed, which triton needs"
    return None


def liger_obstacle(layers: Sequence[nn.Module]) -> str | None:
    """Why layers that Liger has patched are not compiled, or None for layers that it has not.

    Its kernels break the trace, and every piece keeps its inputs: on one H200 a share of 0.1 then keeps 7.1 GiB where
    4.4 were asked for, in more time than Liger's layers with `full` (1.5B, 8 x 2048 tokens).
    """
    for layer in layers:
        for module in layer.modules():
            if getattr(module.forward, "__module__", "").startswith("liger_kernel"):
                return "Liger's kernels break the compiler's trace"
    return None


def _functorch_config() -> Any:
    import torch._functorch.config as config

    return config


class BudgetBackend:
    """A `torch.compile` backend: inductor under one activation budget. Counts what it compiles.

    Args:
        share: Share (0..1) of the activations that a graph may keep.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._compiled: set[tuple[int, int]] = set()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        from torch._guards import CompileContext
        from torch._inductor.compile_fx import compile_fx

        compile_id = CompileContext.current_compile_id()
        if compile_id is not None:
            self._compiled.add((compile_id.frame_id, compile_id.frame_compile_id))
        settings: dict[str, Any] = {"activation_memory_budget": self.share}
        if hasattr(_functorch_config(), "is_non_builtin_to_include"):
            settings["is_non_builtin_to_include"] = True  # else operators of other libraries are always recomputed
        with _functorch_config().patch(settings), attention_flops.counted():
            return compile_fx(graph, inputs, **options)

    @property
    def graphs(self) -> int:
        """Number of graphs compiled: at least one with and one without gradients, more where the trace breaks."""
        return len(self._compiled)

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled because no earlier one of the same code fitted the inputs."""
        return sum(1 for _, attempt in self._compiled if attempt > 0)

    @property
    def pieces(self) -> int:
        """Number of pieces that the compiler cut a layer into; 1 where it could trace the whole."""
        return len({frame for frame, _ in self._compiled})

    @property
    def at_limit(self) -> bool:
        """Whether the compiler would run the next unknown input uncompiled, keeping all activations."""
        from torch import _dynamo

        return max((attempt for _, attempt in self._compiled), default=0) + 1 >= _dynamo.config.recompile_limit


def _call_layer(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _own_code(name: str) -> Forward:
    """`_call_layer` with a code object of its own: the compiler keeps its cache and its limits per code object."""
    code = _call_layer.__code__.replace(co_name=name)
    return types.FunctionType(code, _call_layer.__globals__, name)


def mark_lengths_dynamic(name: str, value: Any) -> None:
    """Marks the batch and sequence dimensions of a layer's input dynamic: all of a mask or of ids, else all but the last.

    Weak marks: a size that the layer fixes (a batch of one) stays fixed without an error.

    Args:
        name: Name of the argument, empty for positional ones.
        value: The argument: tensor, tuple or dict of tensors, or anything else, which is left alone.
    """
    if isinstance(value, (tuple, list)):
        for item in value:
            mark_lengths_dynamic(name, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            mark_lengths_dynamic(str(key), item)
    elif is_plain(value):
        fixed = 0 if "mask" in name or not value.is_floating_point() else 1
        for dim in range(value.dim() - fixed):
            torch._dynamo.maybe_mark_dynamic(value, dim)


class CompiledVariant(Variant):
    """Runs a layer compiled under one activation budget.

    Layers on several devices are compiled for each of them apart: all graphs of one code count against one limit, which
    the devices of a device map alone would reach.

    Args:
        share: Share (0..1) of the activations that may be kept.
    """

    compiled = True

    def __init__(self, share: float) -> None:
        self.backend = BudgetBackend(share)
        self._calls: dict[torch.device | None, Forward] = {}

    def _call_on(self, device: torch.device | None) -> Forward:
        if device not in self._calls:
            code = _own_code(f"layer_{next(_numbers)}_share_{self.backend.share:g}")
            self._calls[device] = torch.compile(code, backend=self.backend)
        return self._calls[device]

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call_on(next((v.device for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None))
        for value in args:
            mark_lengths_dynamic("", value)
        for name, value in kwargs.items():
            mark_lengths_dynamic(name, value)
        if self.backend.at_limit:
            # beyond its limit the compiler silently runs the layer as it is, and the memory bound is gone: raise instead
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                return call(forward, *args, **kwargs)
        return call(forward, *args, **kwargs)


class CompiledRecompute(Recompute):
    """Runs layers through compiled variants, and through an eager plan where the compiler can't.

    Args:
        plan: Chooses the compiled variant of each call with gradients.
        variants: The compiled variants that `plan` chooses from; the first also runs the calls without gradients, so
            that log-probs with and without gradients come from the same kernels.
        eager: Takes over for good if a compilation fails, and for single calls past the recompilation limit.
    """

    def __init__(self, plan: Recompute, variants: Sequence[CompiledVariant], eager: Recompute) -> None:
        super().__init__(plan.layers, plan.variants)
        self.plan = plan
        self.compiled = list(variants)
        self.eager = eager
        self.failure: str | None = None
        self._looked_at_shards = False
        self._looked_at_pieces = False
        self._warned_limit = False
        self._error: Exception | None = None
        self._hidden: list[nn.Module] = []

    @property
    def graphs(self) -> int:
        """Number of graphs compiled so far."""
        return sum(variant.backend.graphs for variant in self.compiled)

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled so far because no earlier one fitted the inputs."""
        return sum(variant.backend.recompiles for variant in self.compiled)

    def look_at_shards(self) -> None:
        """Gives the eager plan all layers where FSDP1 has wrapped parts of them, as verl does with adapters.

        The compiler breaks its trace at each part and keeps what passes between them: a share of 0.1 then keeps all. With
        `use_orig_params=False` it fails.
        """
        if self.failure is None and any("_fsdp_wrapped_module" in unit._modules for unit in self._inner_units()):
            self.failure = (
                "FSDP1 gathers parts of the layers (adapters) by themselves, which breaks the compiler's trace"
            )
            logger.warning("layers run eagerly, within the same memory bound: %s", self.failure)

    def _inner_units(self) -> Iterator[nn.Module]:
        return (unit for layer in self.layers for unit in inner_fsdp_units(layer))

    def run_with_grad(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.failure is None:
            done, output = self._attempt(index, partial(self.plan.run_with_grad, index, forward, args, kwargs))
            if done:
                if not self._looked_at_pieces:
                    self._looked_at_pieces = True
                    self._look_at_pieces(forward, args, kwargs)
                return output
        output = self.eager.run_with_grad(index, forward, args, kwargs)
        self._settle()
        return output

    def run_without_grad(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.failure is None:
            done, output = self._attempt(index, partial(self.compiled[0], forward, args, kwargs))
            if done:
                return output
        output = self.eager.run_without_grad(index, forward, args, kwargs)
        self._settle()
        return output

    def close(self) -> None:
        for module in self._hidden:
            module._is_fsdp_managed_module = True
        self._hidden.clear()

    def _attempt(self, index: int, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Runs a compiled call: (True, output), or (False, None) where the compiler and not the model failed."""
        from torch._dynamo.exc import FailOnRecompileLimitHit

        if not self._looked_at_shards:
            self._looked_at_shards = True
            self.look_at_shards()
            if self.failure is not None:
                return False, None
        self._hide_flat_parameters(index)
        try:
            output = call()
        except torch.OutOfMemoryError:
            raise
        except FailOnRecompileLimitHit:
            self._warn_limit()
            return False, None
        except Exception as error:
            # Not every failure of the tools has a type of its own (a C compiler that fails is a CalledProcessError), so
            # any counts; if it is the model's own, the eager run raises it again and the compiler is not blamed.
            self._error = error
            return False, None
        return True, output

    def _settle(self) -> None:
        """After an eager run in the place of a failed compiled one: the compiler was at fault, so it is left alone."""
        if self._error is None:
            return
        cause = getattr(self._error, "inner_exception", self._error)
        first_line = (str(cause).strip() or "no message").splitlines()[0]
        self.failure = f"compilation failed: {type(cause).__name__}: {first_line}"
        self._error = None
        logger.warning("layers run eagerly from here on, within the same memory bound: %s", self.failure)

    def _hide_flat_parameters(self, index: int) -> None:
        """Takes FSDP1's mark off a layer while it is compiled, where `use_orig_params=False`.

        The compiler refuses marked modules whose parameters are views of a flat one, and breaks the trace at each. Our
        graph lies inside of FSDP1's hooks, where such a layer is a module with plain tensors, which it takes as inputs.
        """
        layer = self.layers[index]
        if not getattr(layer, "_is_fsdp_managed_module", False) or getattr(layer, "_fsdp_use_orig_params", True):
            return
        for module in layer.modules():
            if getattr(module, "_is_fsdp_managed_module", False):
                module._is_fsdp_managed_module = False
                self._hidden.append(module)

    def _look_at_pieces(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives the eager plan all layers where the compiler cuts them, and what passes between the pieces is too much.

        A byte budget needs no look: it measures what its variants keep.
        """
        pieces = max(variant.backend.pieces for variant in self.compiled)
        if pieces <= 1 or len(self.compiled) > 1 or hidden_states(args, kwargs) is None:
            return
        everything, inputs = (kept_bytes(variant, forward, args, kwargs) for variant in (Variant(), Checkpointed()))
        kept = kept_bytes(self.compiled[0], forward, args, kwargs)
        share = self.compiled[0].backend.share
        cut = f"the compiler cuts a layer into {pieces} pieces, which keep {kept / everything:.0%} of its activations"
        if kept <= share * everything + inputs:
            logger.info("%s, what passes between them included", cut)
            return
        self.failure = f"{cut}, not {share:.0%}"
        logger.warning("layers run eagerly from here on, within the same memory bound: %s", self.failure)

    def _warn_limit(self) -> None:
        if not self._warned_limit:
            self._warned_limit = True
            logger.warning(
                "the compiler's recompilation limit is reached: inputs unlike all earlier ones run eagerly, within the"
                " same memory bound"
            )
