"""Log-probs over the vocabulary in chunks: without flash-attn, verl walks packed logits row by row in Python.

Replaced where verl's engines take the functions from, for every role of the process: the values are the same, and roles
that share a process share the import.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching.spec import PatchSpec


def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
    """As verl's, in chunks over tokens, with the gradient written in the type of the logits."""
    from verl_ext_sharding.training import logprobs

    return logprobs.logprobs_from_logits(logits, labels, inplace_backward)


def entropy_from_logits(logits: Any) -> Any:
    """As verl's, in chunks over tokens."""
    from verl_ext_sharding.training import logprobs

    return logprobs.entropy_from_logits(logits)


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
