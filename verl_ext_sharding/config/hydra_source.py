"""Makes `trainer.plugin` and the `sharding` group part of verl's own config tree, without `+`.

A Hydra `SearchPathPlugin` puts a `ConfigSource` of our own in front of verl's folder of configs. It answers for verl's
primary configs only: it reads verl's yaml through the source it wraps and returns it with our group in `defaults`. Only
public Hydra API is used. The module is imported when Hydra loads its plugins, never in a Ray worker.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, open_dict

PRIMARY_CONFIGS = ("ppo_trainer", "sft_trainer_engine")
"""verl's primary configs that own a `trainer` block; `ppo_megatron_trainer` and recipes include one of them."""

GROUP = "sharding"
DEFAULT_CHOICE = "base"
_VERL_CONFIGS = "pkg://verl.trainer.config"
_SCHEME = "verl-sharding"


class ShardingConfigSource(ConfigSource):
    """Wraps another source and adds our group to the primary configs found there.

    Args:
        provider: Name shown by `--info searchpath`.
        path: `verl-sharding://<path of the wrapped source>`.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        from hydra._internal.sources_registry import SourcesRegistry

        scheme = self.path.partition("://")[0] if "://" in self.path else "file"
        self._wrapped: ConfigSource = SourcesRegistry.instance().resolve(scheme)(provider, self.path)

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        result = self._wrapped.load_config(config_path)
        if isinstance(result.config, DictConfig):
            _add_group(result.config)
        return result

    def is_config(self, config_path: str) -> bool:
        name = config_path.removesuffix(".yaml")
        return name in PRIMARY_CONFIGS and self._wrapped.available() and self._wrapped.is_config(config_path)

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True  # a wrapped folder that is missing is Hydra's to report, under its own name

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _add_group(config: DictConfig) -> None:
    """Adds `trainer.plugin` and our group, unless the config has them already."""
    with open_dict(config):
        defaults = config.setdefault("defaults", [])
        assert isinstance(defaults, ListConfig)
        names = [next(iter(item)) if isinstance(item, DictConfig) else item for item in defaults]
        if GROUP not in names:
            position = names.index("_self_") if "_self_" in names else len(names)
            defaults.insert(position, {GROUP: DEFAULT_CHOICE})
        trainer = config.setdefault("trainer", {})
        if "plugin" not in trainer:
            trainer["plugin"] = None


class ShardingSearchPath(SearchPathPlugin):
    """Puts our sources where Hydra looks first, and our group files where it looks last."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        main = next((entry for entry in search_path.get_path() if entry.provider == "main"), None)
        if main is not None and main.path:
            search_path.prepend(provider=_SCHEME, path=f"{_SCHEME}://{main.path}", anchor="main")
        # A recipe reaches verl's folder through hydra.searchpath, which Hydra appends after this.
        search_path.append(provider=_SCHEME, path=f"{_SCHEME}://{_VERL_CONFIGS}")
        search_path.append(provider=_SCHEME, path=f"file://{Path(__file__).parent / 'group'}")


def register() -> None:
    """Registers both classes with Hydra, once per process."""
    Plugins.instance().register(ShardingConfigSource)
    Plugins.instance().register(ShardingSearchPath)
