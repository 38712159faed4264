"""Stop strings end a response wherever they fall between its tokens."""

import asyncio

import pytest
from reward_tokenizers import byte_level, words
from tiny_models import prompt, qwen2, save, sliding

from verl_ext_sharding.rollout.server import HFServer
from verl_ext_sharding.rollout.settings import ModelSpec, ServerSettings
from verl_ext_sharding.rollout.stop_strings import StopStrings


def length_at_stop(tokenizer, text, *stop):
    """Tokens of a text up to the one that completes a stop string, or None."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = StopStrings(stop, lambda part: tokenizer.decode(part, skip_special_tokens=True))
    return next((end for end in range(1, len(ids) + 1) if found.end(ids[:end])), None)


@pytest.mark.parametrize("before", ["", "x" * 100, "€😀 " * 30], ids=["first", "far", "wide"])
@pytest.mark.parametrize("stop", ["</search>", "\nEND", "😀!"])
def test_a_string_over_several_tokens_ends_at_its_last(before, stop):
    tokenizer = byte_level()
    head = f"{before}{stop}"
    num_tokens = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    assert length_at_stop(tokenizer, f"{head} and more", stop) == num_tokens


def test_the_first_of_several_ends_it_and_one_that_is_not_there_does_not():
    assert length_at_stop(words(), "w1 w2 w3 w4", "w4", "w2 w3") == 3
    assert length_at_stop(words(), "w1 w2 w3 w4", "w2 w4") is None


@pytest.mark.parametrize("window", [4, None], ids=["static_batches", "merging_batches"])
def test_a_server_ends_a_response_at_a_stop_string_and_keeps_its_tokens(window, tmp_path):
    """A short window makes batches static."""
    model = qwen2(seed=1) if window is None else sliding(window=window, seed=1)
    path = save(model, tmp_path, eos=0)
    sampled = {"seed": 3, "logprobs": True, "ignore_eos": True, "max_tokens": 12}

    async def run():
        spec = ModelSpec(path=path, dtype="float32", load_weights=True)
        server = HFServer(ServerSettings(model=spec, mode="standalone", prompt_length=32, response_length=16))
        await server.start()
        free = (await server.generate(prompt(5), sampled, "free")).token_ids
        stop = server._tokenizer.decode(free[4:6])
        return free, await server.generate(prompt(5), {**sampled, "stop": [stop]}, "stopped")

    free, stopped = asyncio.run(asyncio.wait_for(run(), 60))
    assert stopped.token_ids == free[:6]
    assert (stopped.stop_reason, len(stopped.log_probs)) == ("completed", 6)
