"""Hydra says that a key does not exist, but not which one was meant; and it checks no type, and no name that was added.

One replacement explains a misspelt `trainer.plugin` or `sharding.*` key, and checks the composed config before anything
runs, also for `--cfg job` and `hydra.compose`. The other explains `sharding=null` and its like, for which Hydra raises a
bare ValueError. Hydra has no hook for any of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def apply_overrides_to_config(overrides: Any, cfg: Any) -> None:
    """As Hydra's, with errors that name the right key."""
    from hydra.errors import ConfigCompositionException

    from verl_ext_sharding import launchers
    from verl_ext_sharding.config import override_hints

    with _as_hydras():
        try:
            original(OVERRIDES)(overrides, cfg)
        except ConfigCompositionException as error:
            hint = override_hints.explain(error, overrides, cfg)
            if hint is None:
                raise
            raise hint from error
        if override_hints.check(cfg):
            launchers.refuse_unreached()


def sort_overrides(self: Any, repo: Any, overrides_list: Any) -> None:
    """As Hydra's, with an error that says what may be chosen of our group."""
    from verl_ext_sharding.config import override_hints

    with _as_hydras():
        override_hints.check_choice(repo, overrides_list)
    original(CHOICES)(self, repo, overrides_list)


@contextmanager
def _as_hydras() -> Iterator[None]:
    """Our errors as the one that Hydra itself answers an override with, and prints without a traceback."""
    from hydra.errors import ConfigCompositionException

    from verl_ext_sharding.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise ConfigCompositionException(str(error)) from error


OVERRIDES = PatchSpec(
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

CHOICES = PatchSpec(
    id="hydra-group-choice",
    target="hydra._internal.defaults_list:Overrides.__init__",
    replacement=sort_overrides,
    distribution="hydra-core",
    range=">=1.3,<1.4",
    signature=("self", "repo", "overrides_list"),
    fingerprints={"1.3.8": "2cb94372a937307c"},
    processes=frozenset({"driver"}),
    needed_by=None,
    upstream_issue="none filed",
    remove_when="Hydra names the group whose choice is no name, and what may be chosen",
)

SPECS = (OVERRIDES, CHOICES)
