"""Inputs of a reward model: short ones as they are, long ones cut at the right end."""

import random

import pytest
from reward_tokenizers import MARKS, TEMPLATE, byte_level, slow, words

from verl_ext_sharding.config.reward_limits import InputLimit
from verl_ext_sharding.errors import ConfigError, RewardInputError
from verl_ext_sharding.rollout.reward_inputs import RewardTemplate, check_vocabulary

TOKENIZERS = {"byte level": byte_level(), "words": words(), "slow": slow()}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def template(tokenizer, tokens, policy="truncate"):
    return RewardTemplate(tokenizer=tokenizer, limit=InputLimit(tokens=tokens, source="a test"), policy=policy)


def text(first, count):
    return " ".join(f"w{number}" for number in range(first, first + count))


def chat(count=20, system=5):
    return [{"role": "system", "content": text(0, system)}, {"role": "user", "content": text(100, count)}]


def sent(tokenizer, prepared):
    """Ids as a server makes them."""
    return tokenizer(prepared.text)["input_ids"]


# What fits


@each_tokenizer
def test_a_sample_that_fits_is_sent_as_the_template_writes_it(tokenizer):
    prepared = template(tokenizer, 4096).prepare(chat(), text(200, 10))
    full = tokenizer.apply_chat_template([*chat(), {"role": "assistant", "content": text(200, 10)}], tokenize=False)
    assert prepared.text == full.removeprefix("<s>")
    assert not prepared.truncated


@each_tokenizer
def test_a_sample_of_exactly_the_limit_is_not_cut(tokenizer):
    full = template(tokenizer, 4096).prepare(chat(), text(200, 10))
    assert not template(tokenizer, full.num_tokens).prepare(chat(), text(200, 10)).truncated


@each_tokenizer
def test_one_token_more_than_the_limit_is_cut(tokenizer):
    full = template(tokenizer, 4096).prepare(chat(), text(200, 10))
    prepared = template(tokenizer, full.num_tokens - 1).prepare(chat(), text(200, 10))
    assert prepared.truncated
    assert prepared.full_tokens == full.num_tokens


def test_without_a_limit_nothing_is_cut():
    assert not template(words(), None).prepare(chat(5000), text(200, 10)).truncated


def test_off_counts_and_sends_everything():
    prepared = template(words(), 20, policy="off").prepare(chat(), text(200, 10))
    assert prepared.num_tokens > 20
    assert not prepared.truncated


# What is cut


@each_tokenizer
@pytest.mark.parametrize("limit", [60, 90, 120, 200])
def test_what_the_server_sees_is_within_the_limit_and_close_to_it(tokenizer, limit):
    prepared = template(tokenizer, limit).prepare(chat(200), text(200, 100))
    assert len(sent(tokenizer, prepared)) == prepared.num_tokens
    assert limit - 4 <= prepared.num_tokens <= limit


@pytest.mark.parametrize("limit", [512, 4096])
def test_models_of_512_and_of_4096_positions_get_as_much_as_they_take(limit):
    prepared = template(words(), limit).prepare(chat(400), " ".join(["w7"] * 5000))
    assert prepared.num_tokens == limit


@each_tokenizer
def test_the_prompt_is_cut_first_from_its_beginning(tokenizer):
    full = template(tokenizer, 4096).prepare(chat(), text(200, 10))
    prepared = template(tokenizer, full.num_tokens - 4).prepare(chat(), text(200, 10))
    assert text(200, 10) in prepared.text
    assert text(100, 20) in prepared.text
    assert text(0, 5) not in prepared.text


@each_tokenizer
def test_the_end_of_the_response_is_kept_when_the_prompt_is_not_enough(tokenizer):
    prepared = template(tokenizer, 60).prepare(chat(), text(200, 100))
    assert prepared.text.removesuffix("<|end|>").endswith("w298 w299")
    assert "w100" not in prepared.text
    assert "w200" not in prepared.text


@each_tokenizer
@pytest.mark.parametrize("limit", [40, 60, 120])
def test_every_mark_of_the_template_survives(tokenizer, limit):
    prepared = template(tokenizer, limit).prepare(chat(), text(200, 100))
    for mark in MARKS[:3]:
        assert prepared.text.count(mark) == 1
    assert prepared.text.count("<|end|>") == 3


def test_the_tokens_that_the_tokenizer_adds_survive_and_count():
    ids = sent(words(), template(words(), 30).prepare(chat(), text(200, 100)))
    assert (ids[0], ids[-1], len(ids)) == (0, 2, 30)


def test_the_response_is_cut_between_characters_that_are_whole():
    prepared = template(byte_level(), 40).prepare([{"role": "user", "content": "?"}], "ü€😀" * 40)
    assert "\ufffd" not in prepared.text
    assert set(prepared.text.partition("<|assistant|>")[2].removesuffix("<|end|>")) <= set("ü€😀")


def test_turns_before_the_last_are_cut_first():
    turns = [
        {"role": "user", "content": text(0, 10)},
        {"role": "assistant", "content": text(20, 10)},
        {"role": "user", "content": text(40, 10)},
    ]
    prepared = template(words(), 44 - 15).prepare(turns, text(60, 4))
    assert "w0 " not in prepared.text
    assert text(40, 10) in prepared.text
    assert text(60, 4) in prepared.text


def test_the_text_parts_of_a_message_are_cut_and_an_image_stays():
    parts = [{"type": "text", "text": text(0, 50)}, {"type": "image"}, {"type": "text", "text": text(60, 5)}]
    prepared = template(words(), 40).prepare([{"role": "user", "content": parts}], text(200, 10))
    assert "<|image|>" in prepared.text
    assert text(60, 5) in prepared.text
    assert prepared.num_tokens == 40


def test_the_conversation_of_the_caller_is_left_as_it_was():
    parts = [{"type": "text", "text": text(0, 50)}]
    prompt = [{"role": "system", "content": text(0, 50)}, {"role": "user", "content": parts}]
    template(words(), 30).prepare(prompt, text(200, 10))
    assert prompt == [{"role": "system", "content": text(0, 50)}, {"role": "user", "content": parts}]
    assert parts == [{"type": "text", "text": text(0, 50)}]


def test_a_message_without_content_is_left_alone():
    prompt = [{"role": "user", "content": text(0, 50)}, {"role": "assistant", "content": None, "tool_calls": []}]
    without = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    assert template(words(without), 30).prepare(prompt, text(200, 10)).num_tokens == 30


@each_tokenizer
def test_any_sample_ends_up_within_the_limit(tokenizer):
    rng = random.Random(0)
    letters = "ab \n€😀w1<|>"
    for _ in range(40):
        prompt = [{"role": "user", "content": "".join(rng.choices(letters, k=rng.randrange(200)))}]
        response = "".join(rng.choices(letters, k=rng.randrange(1, 200)))
        prepared = template(tokenizer, 48).prepare(prompt, response)
        assert len(sent(tokenizer, prepared)) <= 48


def test_few_texts_are_counted_where_the_excess_is_known():
    tokenizer, counted = words(), []
    counting = template(tokenizer, 512)
    object.__setattr__(counting, "_count", lambda text: counted.append(1) or len(tokenizer(text)["input_ids"]))
    counting.prepare(chat(400), " ".join(["w7"] * 5000))
    assert len(counted) <= 4


# The first token


def test_a_first_token_that_the_tokenizer_adds_is_not_sent_twice():
    assert sent(byte_level(), template(byte_level(), 400).prepare(chat(), "w1"))[:2].count(0) == 1


def test_a_first_token_that_only_the_template_writes_is_kept():
    tokenizer = byte_level(adds_bos=False)
    assert sent(tokenizer, template(tokenizer, 400).prepare(chat(), "w1"))[0] == 0


# What is refused


def test_error_names_the_length_and_the_limit():
    with pytest.raises(RewardInputError) as caught:
        template(words(), 30, policy="error").prepare(chat(), text(200, 10))
    assert "43 tokens" in caught.value.found
    assert "at most 30" in caught.value.expected


def test_error_lets_a_sample_pass_that_fits():
    assert template(words(), 43, policy="error").prepare(chat(), text(200, 10)).num_tokens == 43


@pytest.mark.parametrize(("limit", "fits"), [(9, True), (8, False)])
def test_at_least_one_token_of_the_response_is_left(limit, fits):
    if fits:
        assert template(words(), limit).prepare(chat(), text(200, 10)).text.endswith("w209<|end|>")
    else:
        with pytest.raises(RewardInputError, match="one token of the response left"):
            template(words(), limit).prepare(chat(), text(200, 10))


# Vocabulary


def check(tokenizer, rows=None, policy=None):
    check_vocabulary(policy or byte_level(), tokenizer, rows=rows, model="org/reward", policy_model="org/policy")


def test_a_tokenizer_of_the_models_own_is_taken():
    check(words(), rows=len(words()))


@pytest.mark.parametrize("part", ["org/reward", "128 rows|has 128", "up to 508", "org/policy"])
def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(part):
    with pytest.raises(ConfigError, match=part):
        check(words(), rows=128)


def test_the_policys_tokenizer_in_the_reward_models_folder_is_told():
    with pytest.raises(ConfigError, match="It is the policy's tokenizer"):
        check(words(), rows=128, policy=words())


def test_a_tokenizer_without_a_chat_template_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"add chat_template\.jinja to org/reward"):
        check(words(None), rows=1000)


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="a tokenizer in the reward model's folder"):
        check(None)


def with_added(token, *, template=TEMPLATE):
    """The tokenizer of words with one more token, the last id."""
    tokenizer = words(template)
    tokenizer.add_tokens([token])
    return tokenizer


def test_an_added_token_that_no_text_needs_may_have_no_row():
    """As the image token of Gemma 3, whose text models have one row less than their tokenizer has ids."""
    check(with_added("<image>"), rows=len(words()))


def test_an_added_token_that_the_template_writes_needs_a_row():
    tokenizer = with_added("<turn>", template="{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match=f"up to {len(words())}"):
        check(tokenizer, rows=len(words()))


def test_a_sample_that_holds_a_token_without_a_row_is_refused_by_its_name():
    tokenizer = with_added("<image>")
    prepared = RewardTemplate(
        tokenizer=tokenizer, limit=InputLimit(tokens=None, source="a test"), rows=len(tokenizer) - 1
    )
    assert prepared.prepare(chat(), "w1 w2").num_tokens > 2
    with pytest.raises(RewardInputError, match="'<image>'"):
        prepared.prepare(chat(), "w1 <image> w2")


def test_a_conversation_that_the_template_refuses_is_told_with_its_roles():
    strict = "{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' else 'w1' }}"
    with pytest.raises(RewardInputError, match=r"System role not supported \(messages of system, user, assistant\)"):
        template(words(strict), 30).prepare(chat(), "w1")
