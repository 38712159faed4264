"""What goes into and comes out of `/classify`, in vLLM's shape. Standard library only."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KNOWN = ("model", "input", "use_activation", "add_special_tokens", "user", "request_id")


class RewardRequestError(Exception):
    """A request that is answered with an HTTP error.

    Args:
        message: What is wrong, for the caller.
        status: HTTP status. verl repeats what fails with 5xx and gives up at 4xx.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(kw_only=True, frozen=True)
class ClassifyRequest:
    """One checked request.

    Args:
        inputs: Texts, or token ids; at least one.
        use_activation: Probabilities instead of the model's own logits.
        add_special_tokens: Whether the tokenizer adds the model's special tokens to texts.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    use_activation: bool = True
    add_special_tokens: bool = True


@dataclass(kw_only=True, frozen=True)
class Labels:
    """What the model's outputs stand for.

    Args:
        names: One for each output.
        problem_type: transformers' `problem_type`, or None.
    """

    names: tuple[str, ...]
    problem_type: str | None = None


def parse_request(body: Any, served: str) -> ClassifyRequest:
    """Checks the body of a request.

    Args:
        body: Decoded JSON.
        served: Name of the model that this server has.

    Raises:
        RewardRequestError: 400 for what is malformed, 404 for another model.
    """
    if not isinstance(body, Mapping):
        raise RewardRequestError(f"the body must be a JSON object, not {type(body).__name__}")
    unknown = sorted(name for name, value in body.items() if name not in _KNOWN and value is not None)
    if unknown:
        raise RewardRequestError(f"unknown field {unknown[0]!r}; known are {', '.join(_KNOWN)}")
    if body.get("model") not in (None, served):
        raise RewardRequestError(f"the model {body['model']!r} is not served here, but {served!r}", status=404)
    flags = {name: body[name] for name in ("use_activation", "add_special_tokens") if body.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RewardRequestError(f"{name} must be true or false, not {value!r}")
    return ClassifyRequest(inputs=_inputs(body.get("input")), **flags)


def _inputs(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if all(isinstance(item, str) for item in given):
            return tuple(given)
        if _is_ids(given):
            return (tuple(given),)
        if all(isinstance(item, list) and _is_ids(item) for item in given):
            return tuple(tuple(item) for item in given)
    raise RewardRequestError("input must be a text, a list of texts, a list of token ids, or a list of such lists")


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def check_ids(ids: Sequence[int], *, max_model_len: int | None, embedding_rows: int) -> None:
    """Refuses what the model can't take, before it reaches a device.

    Args:
        ids: Token ids of one sequence.
        max_model_len: Most tokens, or None for no limit.
        embedding_rows: Ids lie in [0, embedding_rows).

    Raises:
        RewardRequestError: 400; names limit and length, or the id and the rows.
    """
    if not ids:
        raise RewardRequestError("the input has no tokens; a score needs at least one")
    if max_model_len is not None and len(ids) > max_model_len:
        raise RewardRequestError(
            f"the input has {len(ids)} tokens and the reward model takes at most {max_model_len}; shorten the prompt or "
            "the response (data.max_prompt_length, data.max_response_length)"
        )
    outside = next((index for index, token in enumerate(ids) if not 0 <= token < embedding_rows), None)
    if outside is not None:
        raise RewardRequestError(
            f"token id {ids[outside]} at position {outside} is outside of the reward model's embedding, which has "
            f"{embedding_rows} rows; are these ids of another model's tokenizer?"
        )


def activated(logits: Sequence[float], problem_type: str | None) -> list[float]:
    """Probabilities, as vLLM gives them: sigmoid of one class or of several labels, else softmax; scores of a regression
    stay as they are.

    Args:
        logits: One for each class.
        problem_type: transformers' `problem_type`, or None.
    """
    if problem_type == "regression":
        return list(logits)
    if len(logits) == 1 or problem_type == "multi_label_classification":
        return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]
    highest = max(logits)
    weights = [math.exp(x - highest) for x in logits]
    return [weight / sum(weights) for weight in weights]


def response(
    request: ClassifyRequest, scores: Sequence[Sequence[float]], *, num_tokens: int, model: str, labels: Labels
) -> dict[str, Any]:
    """The answer to a request.

    Args:
        request: The request.
        scores: Logits of each input, in their order.
        num_tokens: Tokens of all inputs.
        model: Name of the model.
        labels: What its outputs stand for.

    Raises:
        RewardRequestError: 500 when a score is not a number, which JSON can't carry and no trainer could use.
    """
    data = []
    for index, logits in enumerate(scores):
        if not all(map(math.isfinite, logits)):
            raise RewardRequestError(
                f"the reward model's output for input {index} is not finite: {list(logits)}; with float16 weights try "
                "reward.reward_model.rollout.dtype=bfloat16",
                status=500,
            )
        probs = activated(logits, labels.problem_type) if request.use_activation else list(logits)
        label = labels.names[max(range(len(logits)), key=logits.__getitem__)]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(logits)})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage,
    }


def error_body(message: str, status: int) -> dict[str, Any]:
    """The JSON of an error, in the shape of vLLM's and OpenAI's."""
    kind = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    return {
        "error": {"message": message, "type": kind.get(status, "InternalServerError"), "param": None, "code": status}
    }
