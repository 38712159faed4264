"""Stop strings of a request, found in what it has generated however the text falls into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BYTES_PER_CHARACTER = 4
"""Most bytes of a character in UTF-8, and so most tokens: each holds a byte at least."""

_CONTEXT_TOKENS = 8
"""Tokens before those: what is decoded from the middle may lose its first space or begin with half a character."""


class StopStrings:
    """Says after each token whether the text now holds a stop string, as vLLM does while it decodes.

    Args:
        strings: At least one, none empty.
        decode: Text of token ids.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._window = _BYTES_PER_CHARACTER * max(map(len, strings)) + _CONTEXT_TOKENS

    def end(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token completes a stop string.

        Args:
            token_ids: The response so far; asked at each token, so that an earlier one has ended it already.
        """
        text = self._decode(token_ids[-self._window :])
        return any(string in text for string in self._strings)
