"""Log-probs over the vocabulary in chunks: without flash-attn, verl walks packed logits row by row in Python.

Replaced where verl's engines take the functions from. Roles share a process and these functions with it, so each engine
says for its own forward pass which way they go (`logits_path`); outside of it they are verl's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


@dataclass(kw_only=True, frozen=True)
class LogitsPath:
    """How log-probs and entropy come out of logits.

    Args:
        name: "chunked": tile by tile. "full": the plain formula over all logits at once.
        compiled: Whether tiles are compiled; None: where the platform compiles them.
        distilled: Whether the loss has a term of the same logits beside the log-probs (top-k distillation).
    """

    name: Literal["chunked", "full"]
    compiled: bool | None = None
    distilled: bool = False


_path: ContextVar[LogitsPath | None] = ContextVar("logits_path", default=None)


@contextmanager
def logits_path(path: LogitsPath | None) -> Iterator[None]:
    """Says which way log-probs and entropy go inside the block.

    Args:
        path: The way; None: as verl does.
    """
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
    """As verl's, never row by row when a role has said how; the same values."""
    path = _path.get()
    if path is None:
        return original(LOGPROBS)(logits, labels, inplace_backward)
    from verl_ext_sharding.training import logprobs

    if path.name == "full":
        return logprobs.plain_logprobs(logits, labels)
    # verl's chunked top-k saves float32 logits as they are, and others as a copy
    inplace = inplace_backward and not (path.distilled and str(logits.dtype) == "torch.float32")
    return logprobs.logprobs_from_logits(logits, labels, inplace, compiled=path.compiled)


def entropy_from_logits(logits: Any) -> Any:
    """As verl's, which is the plain formula; in chunks when a role has said so."""
    path = _path.get()
    if path is None or path.name == "full":
        return original(ENTROPY)(logits)
    from verl_ext_sharding.training import logprobs

    return logprobs.entropy_from_logits(logits, compiled=path.compiled)


LOGPROBS = PatchSpec(
    id="logprobs-chunked",
    target="verl.utils.torch_functional:logprobs_from_logits",
    replacement=logprobs_from_logits,
    signature=("logits", "labels", "inplace_backward"),
    fingerprints={"0.9.0": "d23f368ea16ab644", "0.9.1": "d23f368ea16ab644"},
    processes=frozenset({"worker"}),
    needed_by="sharding.roles.*.logits",
    upstream_issue="none filed",
    remove_when="verl computes log-probs without flash-attn in chunks (logprobs_from_logits_v2 loops over rows)",
)

ENTROPY = PatchSpec(
    id="entropy-chunked",
    target="verl.utils.torch_functional:entropy_from_logits",
    replacement=entropy_from_logits,
    signature=("logits",),
    fingerprints={"0.9.0": "30604c876e991c2c", "0.9.1": "30604c876e991c2c"},
    processes=frozenset({"worker"}),
    needed_by="sharding.roles.*.logits",
    upstream_issue="none filed",
    remove_when="verl computes entropy in chunks with a gradient by default",
)

SPECS = (LOGPROBS, ENTROPY)
