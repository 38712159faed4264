"""The config value of gradient checkpointing becomes the policy it names, or an error that says what to write."""

from __future__ import annotations

import pytest

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.checkpointing import Auto, Budget, EveryN, Full, Off, Selective
from verl_ext_sharding.training.policy_config import parse_policy


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (None, None),
        (True, Auto()),
        (False, Off()),
        ("full", Full()),
        ({"policy": "auto"}, Auto()),
        ({"policy": "full", "use_reentrant": False, "every": None}, Full()),
        ({"policy": "every_n", "every": 4}, EveryN(4)),
        ({"every": 3}, EveryN(3)),
        ({"policy": "selective"}, Selective(("attention", "matmul"))),
        ({"policy": "selective", "keep": ["attention", "narrow_matmul"]}, Selective(("attention", "narrow_matmul"))),
        ({"policy": "selective", "keep": "attention"}, Selective(("attention",))),
        ({"policy": "budget", "budget": 0.2}, Budget(share=0.2)),
        ({"policy": "budget", "budget": "0.2"}, Budget(share=0.2)),
        ({"budget": 1}, Budget(share=1.0)),
        ({"policy": "budget", "budget": "4GiB"}, Budget(kept_bytes=4 * 2**30)),
        ({"policy": "budget", "budget": "1.5 GB", "compile": False}, Budget(kept_bytes=1_500_000_000, compile=False)),
        ({"policy": "budget", "budget": "4096B"}, Budget(kept_bytes=4096)),
        ({"use_reentrant": False}, Auto()),
    ],
)
def test_a_value_becomes_the_policy_it_names(value, policy):
    assert parse_policy(value) == policy


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"policy": "full", "use_reentrant": True}, "use_reentrant=false"),
        ({"policy": "ful"}, "policy: full"),
        ({"policy": "full", "every": 2}, "keys of policy full"),
        ({"policy": "every_n", "evry": 2}, "every: 2"),
        ({"policy": "every_n", "every": 0}, "an integer from 1"),
        ({"policy": "every_n", "every": True}, "an integer from 1"),
        ({"policy": "selective", "keep": ["attn"]}, "attention, matmul, narrow_matmul"),
        ({"policy": "selective", "keep": []}, "attention, matmul, narrow_matmul"),
        ({"policy": "budget"}, "budget: 0.2"),
        ({"policy": "budget", "budget": 20}, "budget: 0.2"),
        ({"policy": "budget", "budget": -0.1}, "a share from 0 to 1"),
        ({"policy": "budget", "budget": "lots"}, "a share from 0 to 1"),
        ({"policy": "budget", "budget": True}, "a share from 0 to 1"),
        ({"policy": "budget", "budget": "0B"}, "a positive number of bytes"),
        (2, "a policy's name"),
    ],
)
def test_a_value_that_means_nothing_is_an_error_that_says_what_to_write(value, said):
    with pytest.raises(ConfigError) as error:
        parse_policy(value)
    assert said in str(error.value)
    assert "sharding.roles.<role>.gradient_checkpointing" in str(error.value)
