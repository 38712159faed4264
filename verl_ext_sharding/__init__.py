"""verl-ext-sharding: each model of a verl job on its own devices. See README.md."""

from verl_ext_sharding.versions import __version__

__all__ = ["__version__"]
