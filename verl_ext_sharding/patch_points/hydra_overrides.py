"""Hydra says that a key does not exist, but not which one was meant; and it checks no type, and no name that was added.

One replacement explains a misspelt `trainer.plugin` or `sharding.*` key, and checks the composed config before anything
runs, also for `--cfg job` and `hydra.compose`. Another explains `sharding=null` and its like, for which Hydra raises a
bare ValueError. The third explains `devices=2,3` and `devices=[2,`, which Hydra takes for a sweep or can't read before
either of the others is called. Hydra has no hook for any of it.
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
        if override_hints.check(cfg, overrides):
            launchers.refuse_unreached()


def sort_overrides(self: Any, repo: Any, overrides_list: Any) -> None:
    """As Hydra's, with an error that says what may be chosen of our group."""
    from verl_ext_sharding.config import override_hints

    with _as_hydras():
        override_hints.check_choice(repo, overrides_list)
    original(CHOICES)(self, repo, overrides_list)


def load_configuration(
    self: Any,
    config_name: Any,
    overrides: Any,
    run_mode: Any,
    from_shell: bool = True,
    validate_sweep_overrides: bool = True,
) -> Any:
    """As Hydra's, with errors that say how a list, or what a shell has taken apart, is typed."""
    from hydra.errors import ConfigCompositionException, OverrideParseException
    from hydra.types import RunMode

    from verl_ext_sharding.config import override_syntax

    with _as_hydras():
        try:
            return original(SYNTAX)(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        except (ConfigCompositionException, OverrideParseException) as error:
            sweeps = validate_sweep_overrides and run_mode == RunMode.RUN
            hint = override_syntax.explain(overrides, sweeps=sweeps)
            if hint is None:
                raise
            raise hint from error


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

SYNTAX = PatchSpec(
    id="hydra-override-syntax",
    target="hydra._internal.config_loader_impl:ConfigLoaderImpl.load_configuration",
    replacement=load_configuration,
    distribution="hydra-core",
    range=">=1.3,<1.4",
    signature=("self", "config_name", "overrides", "run_mode", "from_shell", "validate_sweep_overrides"),
    fingerprints={"1.3.8": "a0c8f3d332d4583a"},
    processes=frozenset({"driver"}),
    needed_by=None,
    upstream_issue="none filed",
    remove_when="Hydra says with the override's own key and values how a list is typed, and that a shell takes [2, 3] apart",
)

SPECS = (OVERRIDES, CHOICES, SYNTAX)
