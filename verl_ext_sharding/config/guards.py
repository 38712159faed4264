"""What is checked while a job runs, as workers see it in the run's spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class Guards:
    """The part of `sharding.guards` that engines act on.

    Args:
        align_inputs: Inputs move to the device of the weights that they meet.
        token_ids: What happens to token ids that no embedding row, or no token, belongs to.
    """

    align_inputs: bool = True
    token_ids: Literal["error", "mask", "off"] = "error"
