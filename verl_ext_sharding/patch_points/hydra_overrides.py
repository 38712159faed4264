"""Hydra says that a key does not exist, but not which one was meant; and it checks no type.

The replacement explains a misspelt `trainer.plugin` or `sharding.*` key, and checks the composed block before anything
runs, also for `--cfg job` and `hydra.compose`. Hydra has no hook for either.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def apply_overrides_to_config(overrides: Any, cfg: Any) -> None:
    """As Hydra's, with errors that name the right key."""
    from hydra.errors import ConfigCompositionException

    from verl_ext_sharding.config import override_hints

    try:
        original(SPEC)(overrides, cfg)
    except ConfigCompositionException as error:
        hint = override_hints.explain(error, overrides, cfg)
        if hint is None:
            raise
        raise ConfigCompositionException(str(hint)) from hint
    override_hints.check_types(cfg)


SPEC = PatchSpec(
    id="hydra-override-hints",
    target="hydra._internal.config_loader_impl:ConfigLoaderImpl._apply_overrides_to_config",
    replacement=apply_overrides_to_config,
    distribution="hydra-core",
    range=">=1.3,<1.4",
    signature=("overrides", "cfg"),
    fingerprints={"1.3.8": "db0b75ffe1ca4a69"},
    processes=frozenset({"driver"}),
    needed_by=None,
    upstream_issue="none filed",
    remove_when="Hydra suggests close keys, and verl's config is typed",
)
