"""What to say of a device-side assert: CUDA reports it late, names nothing, and the process can ask its GPU no more."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ASSERTED = re.compile(r"device-side assert|cudaErrorAssert|hipErrorAssert")

COMMAND = "python -m verl.trainer.main_ppo <the same overrides>"
"""The run to repeat, where the process can't know how it was started."""

_IN_CLUSTER = "+ray_kwargs.ray_init.runtime_env.env_vars.CUDA_LAUNCH_BLOCKING=\"'1'\""
"""verl's own key that sets the variable in the processes of a Ray cluster that runs already."""


def explain_device_assert(
    error: BaseException,
    *,
    role: str,
    step: int | None = None,
    seed: int | None = None,
    batch: str | None = None,
    command: str = COMMAND,
) -> str | None:
    """The batch that was being computed, and the line that finds the failing kernel.

    Args:
        error: What a computation raised; its causes are searched too.
        role: The model that computed.
        step: Training step, from 1.
        seed: `data.seed` of the run.
        batch: The batch in words, from `guards.Checked.describe`.
        command: How the run was started.

    Returns:
        The text, or None where no device-side assert is behind the error.
    """
    if not any(_ASSERTED.search(str(link)) for link in chain(error)):
        return None
    when = "" if step is None else f" at step {step}"
    lines = [
        f"{role}: a kernel's assert stopped the GPU{when}",
        f"  batch:    {batch or 'not recorded: sharding.guards.token_ids=error checks and records each batch'}",
        "  cause:    mostly an index past the end of a table: a token id at or above the embedding's rows, a position at",
        "            or above max_position_embeddings, a label outside the vocabulary. The traceback shows a later call",
        "  now:      this process can't use its GPU any more; the run ends",
        f"  fix:      CUDA_LAUNCH_BLOCKING=1 {command}{'' if seed is None else f' data.seed={seed}'}",
        f"            (in a Ray cluster that runs already, add {_IN_CLUSTER}); its traceback ends at the failing call",
    ]
    return "\n".join(lines)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and everything that it was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
