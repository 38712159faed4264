"""The text that a discriminative reward model is asked to score, cut to what it can take.

The conversation is written in the reward model's own chat template and counted in its own tokens, with the special tokens
that its tokenizer adds: that is what the server will see. What is too long is cut from the front, the prompt first, then the
response, so that the end of the response stays. Only the words of messages are cut, never what the template writes around
them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from verl_ext_sharding.config.reward_limits import MAX_INPUT_TOKENS, MODEL_PATH, POLICY, InputLimit
from verl_ext_sharding.errors import ConfigError, RewardInputError

Messages = Sequence[Mapping[str, Any]]

_TURN = ({"role": "user", "content": "Yes?"}, {"role": "assistant", "content": "Yes."})
"""A conversation that shows which tokens a template writes."""


@dataclass(kw_only=True, frozen=True)
class RewardInput:
    """What is sent for one sample.

    Args:
        text: The templated conversation, without the first token if the server's tokenizer adds it.
        num_tokens: Its length with the tokens that the tokenizer adds.
        full_tokens: The same before the cut.
    """

    text: str
    num_tokens: int
    full_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether something was cut."""
        return self.num_tokens < self.full_tokens


@dataclass(kw_only=True, frozen=True)
class RewardTemplate:
    """A reward model's tokenizer and how long an input may be.

    Args:
        tokenizer: The reward model's Hugging Face tokenizer; a fast one is cut between tokens, a slow one between
            characters.
        limit: From `config.reward_limits.reward_limit`.
        policy: `sharding.guards.reward_length`.
        rows: Rows of the reward model's embedding. None: unknown.
    """

    tokenizer: Any
    limit: InputLimit
    policy: Literal["truncate", "error", "off"] = "truncate"
    rows: int | None = None

    def prepare(self, prompt: Messages, response: str) -> RewardInput:
        """One sample's text.

        Args:
            prompt: The conversation before the response, as messages with `role` and `content`.
            response: The text to be scored.

        Raises:
            RewardInputError: The sample is too long and the policy is `error`, nothing of the response would be left, the
                template refuses the conversation, or a token has no row in the reward model.
        """
        messages = [*prompt, {"role": "assistant", "content": response}]
        text = self._render(messages)
        full = self._count(text)
        limit = self.limit.tokens
        if self.policy == "off" or limit is None or full <= limit:
            return RewardInput(text=text, num_tokens=full, full_tokens=full)
        if self.policy == "error":
            raise self._too_long(full)
        return self._cut(messages, full, limit)

    def _cut(self, messages: Messages, full: int, limit: int) -> RewardInput:
        pieces = [piece for index, message in enumerate(messages) for piece in self._pieces(index, message)]
        response_units = pieces[-1].num_units
        most = sum(piece.num_units for piece in pieces) - min(1, response_units)
        tried: dict[int, RewardInput] = {}

        def fits(num_units: int) -> bool:
            text = self._render(_without(messages, pieces, num_units))
            tried[num_units] = RewardInput(text=text, num_tokens=self._count(text), full_tokens=full)
            return tried[num_units].num_tokens <= limit

        cut = _smallest(most, fits, guess=full - limit)
        if cut is None:
            raise self._no_room(tried[most].num_tokens, full)
        return tried[cut]

    def _pieces(self, index: int, message: Mapping[str, Any]) -> list[_Piece]:
        content = message.get("content")
        if isinstance(content, str):
            return [_Piece(message=index, part=None, text=content, starts=self._starts(content))]
        return [
            _Piece(message=index, part=number, text=part["text"], starts=self._starts(part["text"]))
            for number, part in enumerate(content or ())
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]

    def _starts(self, text: str) -> list[int]:
        """Where each token of a text starts in it; where each character starts if the tokenizer doesn't tell."""
        if not getattr(self.tokenizer, "is_fast", False):
            return list(range(len(text)))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return sorted({start for start, end in encoded["offset_mapping"] if end > start})

    def _render(self, messages: Messages) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=False, tokenize=False)
        except TemplateError as error:  # templates raise it themselves, for a system message or two turns of one role
            raise _refused_by_template(messages, error) from error
        bos = self.tokenizer.bos_token
        if bos is None or not text.startswith(bos):
            return text
        # verl drops the template's first token where the tokenizer has such a token; here only where it is written twice.
        first = self.tokenizer(text, verbose=False)["input_ids"][:2]
        return text[len(bos) :] if list(first) == [self.tokenizer.bos_token_id] * 2 else text

    def _count(self, text: str) -> int:
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if self.rows is not None and max(ids, default=0) >= self.rows:
            raise self._no_row(max(ids))
        return len(ids)

    def _no_row(self, token_id: int) -> RewardInputError:
        return RewardInputError(
            "input of the reward model",
            expected=f"tokens that have rows: the reward model's embedding has {self.rows}",
            found=f"a sample with {self.tokenizer.convert_ids_to_tokens(token_id)!r}, id {token_id}",
            consequence="the run stops, since the reward model can't read it",
            remedy="leave this token out of the data, or resize the reward model's embedding",
        )

    def _too_long(self, full: int) -> RewardInputError:
        return RewardInputError(
            "input of the reward model",
            expected=f"at most {self.limit.tokens} tokens: {self.limit.source}",
            found=f"a sample of {full} tokens in the reward model's template",
            consequence="the run stops, since sharding.guards.reward_length=error",
            remedy=f"{POLICY}=truncate, or a smaller data.max_response_length",
        )

    def _no_room(self, least: int, full: int) -> RewardInputError:
        return RewardInputError(
            "input of the reward model",
            expected=f"at most {self.limit.tokens} tokens ({self.limit.source}), the end of the response among them",
            found=f"{least} tokens with one token of the response left, of {full}: the template takes the others",
            consequence="the run stops, since no response would be scored",
            remedy=f"a larger {MAX_INPUT_TOKENS}, a shorter chat template, or another reward model",
        )


def _refused_by_template(messages: Messages, error: TemplateError) -> RewardInputError:
    roles = ", ".join(str(message.get("role")) for message in messages)
    return RewardInputError(
        "chat template of the reward model",
        expected="a template that takes the conversations of the data set",
        found=f"{error} (messages of {roles})",
        consequence="the run stops, since the sample can't be shown to the reward model",
        remedy=f"a chat_template.jinja in {MODEL_PATH} that takes them, prompts without such messages, or a function of your "
        "own: reward.custom_reward_function.path",
    )


@dataclass(kw_only=True, frozen=True)
class _Piece:
    """A text in the conversation that can be cut: a message's content, or one text part of it."""

    message: int
    part: int | None
    text: str
    starts: Sequence[int]

    @property
    def num_units(self) -> int:
        return len(self.starts)

    def without(self, num_units: int) -> str:
        """The text after its first units."""
        return self.text[self.starts[num_units] :] if num_units < len(self.starts) else ""


def _without(messages: Messages, pieces: Sequence[_Piece], num_units: int) -> list[dict[str, Any]]:
    """The conversation without the first units of its text. Each message stays, an empty one too."""
    cut = [dict(message) for message in messages]
    for piece in pieces:
        if num_units <= 0:
            break
        rest = piece.without(num_units)
        num_units -= piece.num_units
        if piece.part is None:
            cut[piece.message]["content"] = rest
        else:
            if cut[piece.message]["content"] is messages[piece.message]["content"]:
                cut[piece.message]["content"] = copy.deepcopy(list(messages[piece.message]["content"]))
            cut[piece.message]["content"][piece.part]["text"] = rest
    return cut


def _smallest(most: int, fits: Callable[[int], bool], *, guess: int) -> int | None:
    """The smallest number from 1 to `most` that fits, or None; every number that is returned was tried.

    What fits, fits with more cut too, but for a token where two words meet. So this looks around a good guess, in steps
    that double, and halves the rest.
    """
    low, high, step = 0, min(max(guess, 1), most), 1  # low does not fit
    if most < 1:
        fits(most)
        return None
    while not fits(high):
        if high == most:
            return None
        low, high, step = high, min(high + step, most), 2 * step
    step = 1
    while high - low > 1:
        middle = max(high - step, (low + high) // 2)
        step *= 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def check_vocabulary(
    input_tokenizer: Any, reward_tokenizer: Any, *, rows: int | None, model: str, policy_model: str
) -> None:
    """Refuses a reward tokenizer that doesn't belong to the reward model, before a sample is scored.

    The policy's ids never reach the reward model: text does, and its own tokenizer makes new ids of it. Those must have rows.
    Added tokens may lie beyond them where no text needs them (Gemma 3's image token in its text models, a padding token):
    each sample is looked at again.

    Args:
        input_tokenizer: The policy's tokenizer.
        reward_tokenizer: The one found with the reward model; None: none was found.
        rows: Rows of the reward model's embedding. None: unknown.
        model: `reward.reward_model.model_path`.
        policy_model: Where the policy's tokenizer comes from.

    Raises:
        ConfigError: There is no tokenizer, it makes ids without a row, or it has no chat template.
    """
    if reward_tokenizer is None:
        raise _unfit(
            model, "a tokenizer in the reward model's folder", "none", "add the files that it was trained with"
        )
    highest = max(_needed_ids(reward_tokenizer), default=-1)
    if rows is not None and highest >= rows:
        same = " It is the policy's tokenizer." if _same(input_tokenizer, reward_tokenizer) else ""
        raise _unfit(
            model,
            f"a tokenizer whose ids have rows: the reward model's embedding has {rows}",
            f"a tokenizer of {len(reward_tokenizer)} tokens with ids up to {highest}.{same}",
            f"put the reward model's own tokenizer into {model} (policy: {policy_model}), or resize its embedding",
        )
    if not reward_tokenizer.chat_template:
        raise _unfit(
            model,
            "a tokenizer with a chat template, in which prompt and response are shown to the reward model",
            "a tokenizer without one",
            f"add chat_template.jinja to {model}, written as the reward model was trained; or score in a function of "
            "your own, reward.custom_reward_function.path",
        )


def _needed_ids(tokenizer: Any) -> set[int]:
    """Ids of the vocabulary that a tokenizer was trained with, and of the added tokens that it or its template writes."""
    added = set(tokenizer.get_added_vocab())
    needed = {token_id for token, token_id in tokenizer.get_vocab().items() if token not in added}
    needed.update(tokenizer(_TURN[0]["content"])["input_ids"])
    if tokenizer.chat_template:
        with contextlib.suppress(TemplateError):  # a template that takes no such turn is told with the first sample
            text = tokenizer.apply_chat_template(list(_TURN), tokenize=False)
            needed.update(tokenizer(text)["input_ids"])
    return needed


def _same(left: Any, right: Any) -> bool:
    return left is not None and left.get_vocab() == right.get_vocab()


def _unfit(model: str, expected: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{MODEL_PATH}={model}",
        expected=expected,
        found=found,
        consequence="the run stops before a sample is scored",
        remedy=remedy,
    )
