"""Fixtures that modules of this folder share."""

import pytest

from verl_ext_sharding.errors import ConfigError


@pytest.fixture
def refused(planned):
    """The error that the module's own `planned` ends in: `refused(*overrides)`."""

    def error(*overrides, **how):
        with pytest.raises(ConfigError) as caught:
            planned(*overrides, **how)
        return caught.value

    return error
