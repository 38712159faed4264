"""`RunSpec`: what the driver decided, as every Ray process of the run sees it (environment variable, JSON)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from verl_ext_sharding import envs
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.versions import __version__


@dataclass(kw_only=True, frozen=True)
class RunSpec:
    """One run's decisions.

    Args:
        placement: Which role runs where.
        hybrid_rollout: The actor's workers also hold the rollout adapter.
        bundle_cpus: CPUs reserved with each device.
        timeout_s: How long Ray may take to reserve the devices.
        reward_workers: Workers of which each starts as many processes that score and hold a CPU.
        backends: Backend of each group of inference servers, by verl's key that names it.
        measures: Memory measures of each role that asks for any.
        guards: What is checked while the job runs.
        reward: How reward servers of `rollout.name=hf` run, None without such servers.
        seed: `data.seed`, for reports of a failing batch.
        needed: Keys of the user's config that this run needs a patch for, see `PatchSpec.needed_by`.
        version: Version of this package in the driver.
    """

    placement: Placement
    hybrid_rollout: bool = True
    bundle_cpus: int
    timeout_s: float = 120.0
    reward_workers: int = 0
    backends: Mapping[str, str] = field(default_factory=dict)
    measures: Mapping[str, RoleMeasures] = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards)
    reward: RewardServerSettings | None = None
    seed: int | None = None
    needed: tuple[str, ...] = ()
    version: str = __version__

    def to_json(self) -> str:
        """JSON for the environment."""
        return json.dumps(
            {
                "placement": json.loads(self.placement.to_json()),
                "hybrid_rollout": self.hybrid_rollout,
                "bundle_cpus": self.bundle_cpus,
                "timeout_s": self.timeout_s,
                "reward_workers": self.reward_workers,
                "backends": dict(self.backends),
                "measures": {role: measures.to_dict() for role, measures in self.measures.items()},
                "guards": asdict(self.guards),
                "reward": self.reward.to_dict() if self.reward is not None else None,
                "seed": self.seed,
                "needed": list(self.needed),
                "version": self.version,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        placement = Placement.from_json(json.dumps(fields.pop("placement")))
        measures = {role: RoleMeasures.from_dict(values) for role, values in fields.pop("measures").items()}
        guards = Guards(**fields.pop("guards"))
        fields["needed"] = tuple(fields["needed"])
        if fields["reward"] is not None:
            fields["reward"] = RewardServerSettings.from_dict(fields["reward"])
        return cls(placement=placement, measures=measures, guards=guards, **fields)

    @property
    def on_ray(self) -> bool:
        """Whether roles run in Ray's workers, whose metrics verl's trainer aggregates; SFT logs them as they come."""
        return self.bundle_cpus > 0

    def digest(self) -> str:
        """A short hash by which nodes compare what they were given."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]


def current() -> RunSpec | None:
    """The spec of the run that this Ray process belongs to, or None outside a run that asked for the plugin."""
    text = os.environ.get(envs.SPEC)
    return _parse(text) if text else None


def is_sft() -> bool:
    """Whether this process belongs to a run of SFT, whose config has one model, and other blocks than PPO's."""
    run = current()
    return run is not None and not run.on_ray


@functools.lru_cache(maxsize=1)
def _parse(text: str) -> RunSpec:
    return RunSpec.from_json(text)
