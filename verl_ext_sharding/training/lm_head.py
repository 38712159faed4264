"""Log-probs straight out of a causal language model: the output head returns them, and full logits never exist.

verl's FSDP engine has a path for that (`use_fused_kernels`): it hands the model `temperature` and `shift_labels` and expects
`log_probs` and `entropy` back. Its own forward for that path reads `lm_head.weight` from outside the head, which FSDP2 has sharded:
verl 0.9.1 wraps an untied `lm_head` by itself, so the weight is whole only while the head itself runs. Here the model runs its own
forward, and the head that it calls returns log-probs in place of logits, from its own weight inside that call: whatever gathers,
casts or moves the weight (FSDP1, FSDP2, a device map) does it as for any forward, tied embeddings included. A head that an adapter
has wrapped makes logits, and chunks take over.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl_ext_sharding.errors import ConfigError, unknown_choice
from verl_ext_sharding.training.logprobs import linear_logprobs, logprobs_and_entropy_from_logits

logger = logging.getLogger(__name__)

REQUESTS = ("auto", "fused", "chunked", "full")
"""What a user may write as `sharding.roles.<role>.logits`."""

_FUSED = "_sharding_logprobs"
_COMPILED = "_sharding_logprobs_compiled"
_FORWARD = "_sharding_forward_of_class"


@dataclass(kw_only=True, frozen=True)
class _Request:
    """What the head of a running model is asked for in place of logits."""

    labels: torch.Tensor
    temperature: float


_request: ContextVar[_Request | None] = ContextVar("logprobs_request", default=None)


@dataclass(kw_only=True, frozen=True)
class LogitsChoice:
    """How a role gets its log-probs.

    Args:
        name: "fused" (`apply` on the model, and verl's `use_fused_kernels`), "chunked" or "full" (verl's logits path with
            `logprobs.logprobs_from_logits` or `logprobs.plain_logprobs` in place of verl's function).
        reason: Why, in one line for the log.
    """

    name: str
    reason: str


@dataclass
class CausalLMOutputWithLogProbs(CausalLMOutputWithPast):
    """Output of a causal language model whose head returned log-probs.

    Args:
        log_probs: `(batch, tokens)`, float32.
        entropy: `(batch, tokens)`, float32.
    """

    log_probs: torch.FloatTensor | None = None
    entropy: torch.FloatTensor | None = None


def resolve_logits(requested: str, *, obstacle: str | None, needs_logits: str | None, role: str) -> LogitsChoice:
    """Decides how a role gets its log-probs, from facts alone.

    Args:
        requested: One of `REQUESTS`.
        obstacle: Why the model's head can't return log-probs, see `fused_obstacle`, or None.
        needs_logits: The user's setting that reads the logits themselves (`calculate_sum_pi_squared`, top-k distillation,
            a temperature for each sample), or None.
        role: Role in messages.

    Raises:
        ConfigError: The name is unknown, or "fused" can't be done.
    """
    key = f"sharding.roles.{role}.logits"
    if requested not in REQUESTS:
        raise unknown_choice(key, requested, REQUESTS)
    against = obstacle or (f"{needs_logits} reads the logits" if needs_logits else None)
    if requested == "auto":
        name = "chunked" if against else "fused"
        return LogitsChoice(
            name=name, reason=f"not fused: {against}" if against else "the head can return log-probs itself"
        )
    if requested == "fused" and against:
        raise ConfigError(
            f"{key}={requested}",
            expected="a model whose output head alone makes the logits, and nothing else that reads them",
            found=against,
            consequence="the run stops before the models load",
            remedy=f"{key}=chunked, or {key}=auto",
        )
    return LogitsChoice(name=requested, reason="as asked for")


def fused_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model's head can't return log-probs in place of logits, or None when it can.

    Args:
        model: A causal language model before it is sharded or gets adapters.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"the output head of {name} is not a plain linear layer"
    if "forward" in model.__dict__ or "forward" in head.__dict__:
        return f"the forward of {name} or of its output head was replaced by something else"
    head_name = next(path for path, module in model.named_modules() if module is head)
    if not _logits_come_from(inspect.unwrap(type(model).forward), head_name):
        return f"{name} does more to its logits than its output head"
    return None


@functools.lru_cache(maxsize=32)
def _logits_come_from(forward: Callable[..., Any], head_name: str) -> bool:
    """Whether the source of a model's forward sets `logits` once, as its head applied to (a slice of) its hidden states.

    Caps, scales and shards of logits show up as a second assignment or as arithmetic around the head, and what looks into them
    as an attribute or an index; a loss, which is only computed of labels, may.
    """
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):
        return False
    nodes = list(ast.walk(ast.parse(source)))
    values = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "logits"
    ]
    if len(values) != 1 or _looks_into_logits(nodes):
        return False
    call = values[0]
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != f"self.{head_name}" or len(call.args) != 1:
        return False
    argument = call.args[0].value if isinstance(call.args[0], ast.Subscript) else call.args[0]
    return isinstance(argument, ast.Name)


def _looks_into_logits(nodes: list[ast.AST]) -> bool:
    """Whether a forward without labels does more with `logits` than to pass them on by keyword, or in a tuple."""
    passed_on: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "logits":
            passed_on.append(node.value)
        elif isinstance(node, ast.Tuple):
            passed_on += node.elts
        elif isinstance(node, ast.If) and "labels" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}:
            passed_on += (inner for statement in node.body for inner in ast.walk(statement))
    reads = [
        node for node in nodes if isinstance(node, ast.Name) and node.id == "logits" and isinstance(node.ctx, ast.Load)
    ]
    allowed = {id(node) for node in passed_on}
    return any(id(node) not in allowed for node in reads)


def apply(model: PreTrainedModel, *, compiled: bool | None = None) -> None:
    """Lets a model return log-probs when its caller passes `temperature`; any other call behaves as before. Idempotent.

    Args:
        model: A causal language model before it is sharded or gets adapters.
        compiled: Whether to compile the arithmetic of log-probs (verl's `use_torch_compile`); None decides by platform.

    Raises:
        ConfigError: The model's head can't, see `fused_obstacle`.
    """
    head = model.get_output_embeddings()
    if getattr(head, _FUSED, False):
        return
    if why := fused_obstacle(model):
        raise ConfigError(
            "sharding.roles.<role>.logits=fused",
            expected="a model whose output head alone makes the logits",
            found=why,
            consequence="the run stops",
            remedy="sharding.roles.<role>.logits=chunked, or sharding.roles.<role>.logits=auto",
        )
    setattr(head, _FUSED, True)
    setattr(head, _COMPILED, compiled)
    head.forward = MethodType(head_forward, head)
    setattr(model, _FORWARD, type(model).forward)  # kept, as `keep_forward` says
    model.forward = MethodType(logprobs_forward, model)
    logger.info("log-probs of %s: fused into its output head", type(model).__name__)


def remove(model: PreTrainedModel) -> None:
    """Undoes `apply`. Idempotent.

    Args:
        model: The model that `apply` got.
    """
    head = model.get_output_embeddings()
    if not getattr(head, _FUSED, False):
        return
    for module, forward in ((model, logprobs_forward), (head, head_forward)):
        if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
            del module.forward
    delattr(head, _FUSED)
    delattr(head, _COMPILED)
    delattr(model, _FORWARD)


def keep_forward(model: PreTrainedModel) -> None:
    """Makes the forward that the model's class has now the model's own.

    verl's fused kernels of another role in the process replace it in the class, and that one returns no logits.

    Args:
        model: The model.
    """
    if "forward" not in model.__dict__:
        model.forward = MethodType(type(model).forward, model)


@contextmanager
def _asking(request: _Request | None) -> Iterator[None]:
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def head_forward(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
    """Forward of an output head: logits as ever, or log-probs and entropy in a model that was asked for them.

    Args:
        self: The head.
        hidden: `(..., width)`.
    """
    request = _request.get()
    if request is None:
        return nn.Linear.forward(self, hidden)
    labels = request.labels.to(hidden.device)
    compiled = getattr(self, _COMPILED, None)
    # The temperature is a number, not a tensor: FSDP2 would round it to its compute dtype.
    log_probs, entropy = linear_logprobs(
        hidden, self.weight, labels, request.temperature, bias=self.bias, compiled=compiled
    )
    # Views of flat results: FSDP2 warns of every module that returns views, since its hooks hang on what is returned.
    return log_probs.clone(), None if entropy is None else entropy.clone()


def logprobs_forward(
    self: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    temperature: float | None = None,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Forward of a causal language model: its own, or log-probs when the caller passes `temperature`.

    Args:
        self: The model.
        input_ids: `(batch, tokens)`; also the labels, shifted by one, when no others are given.
        attention_mask: As the model takes it.
        position_ids: As the model takes it.
        past_key_values: As the model takes it.
        inputs_embeds: As the model takes it.
        labels: `(batch, tokens)`, not shifted, or None.
        use_cache: As the model takes it.
        logits_to_keep: As the model takes it, for its own forward only.
        temperature: Divides the logits, above 0, or None for the model's own forward.
        shift_labels: `(batch, tokens)`, shifted already (verl passes them for packed rows), or None.
        **kwargs: Passed on.

    Returns:
        `CausalLMOutputWithLogProbs`, or what the model's own forward returns.
    """
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
        **kwargs,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    forward = self.__dict__[_FORWARD]
    if temperature is None:
        if labels is not None:
            inputs["labels"] = labels
        if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep != 0:
            inputs["logits_to_keep"] = logits_to_keep
        return forward(self, **inputs)
    targets = (
        shift_labels if shift_labels is not None else torch.roll(_unshifted(labels, input_ids), shifts=-1, dims=-1)
    )
    fused = getattr(self.get_output_embeddings(), _FUSED, False)  # an adapter around the head needs its logits
    with _asking(_Request(labels=targets, temperature=temperature) if fused else None):
        outputs = forward(self, **inputs)
    if fused:
        log_probs, entropy = outputs.logits
    else:
        log_probs, entropy = logprobs_and_entropy_from_logits(
            outputs.logits, targets, temperature=temperature, inplace_backward=True
        )
    return CausalLMOutputWithLogProbs(
        log_probs=log_probs,
        entropy=entropy,
        past_key_values=outputs.get("past_key_values"),
        hidden_states=outputs.get("hidden_states"),
        attentions=outputs.get("attentions"),
    )


def _unshifted(labels: torch.Tensor | None, input_ids: torch.Tensor | None) -> torch.Tensor:
    targets = input_ids if labels is None else labels
    assert targets is not None, "log-probs need shift_labels, labels or input_ids"
    return targets
