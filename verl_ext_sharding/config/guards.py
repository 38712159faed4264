"""What is checked while a job runs, as workers see it in the run's spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # every worker reads this module when verl is imported, and the schema takes longest of all of ours
    from verl_ext_sharding.config.schema import GuardsConfig


@dataclass(kw_only=True, frozen=True)
class Guards:
    """The part of `sharding.guards` that engines act on.

    Args:
        align_inputs: Inputs move to the device of the weights that they meet.
        token_ids: What happens to token ids that no embedding row, or no token, belongs to.
    """

    align_inputs: bool = True
    token_ids: Literal["error", "mask", "off"] = "error"

    @classmethod
    def of(cls, config: GuardsConfig) -> Guards:
        """The engines' part of the user's block."""
        return cls(align_inputs=config.align_inputs, token_ids=config.token_ids)
