"""Text to token numbers and back: one token a character, or one a byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """A reversible map between text and numbers in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        ...

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text, int64 [length]."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens (numbers, an array, or a 1-D tensor)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that `from_state` needs, fit for JSON."""
        ...


class ByteTokenizer:
    """Tokens are the bytes of UTF-8: any text, 256 tokens."""

    vocab_size = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Bytes that are not UTF-8 (a character cut in two) come out as the replacement character."""
        return bytes(_numbers(tokens)).decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """Return what `from_state` needs."""
        return {"level": "byte"}


class CharTokenizer:
    """Tokens are characters, numbered by their place in a sorted alphabet."""

    def __init__(self, alphabet: str):
        """Make the tokenizer of an alphabet.

        Args:
            alphabet: distinct characters in the order of their code points.
        """
        self.alphabet = alphabet
        self._codes = _codes(alphabet)
        if not len(alphabet) or (np.diff(self._codes.astype(np.int64)) <= 0).any():
            raise ConfigError(f"the alphabet of a tokenizer must be sorted and free of repeats, got {alphabet[:40]!r}")

    @classmethod
    def of_text(cls, text: str) -> CharTokenizer:
        """Make the tokenizer of all characters that occur in a text."""
        return cls("".join(map(chr, np.unique(_codes(text)))))

    @property
    def vocab_size(self) -> int:
        """How many characters the alphabet has."""
        return len(self.alphabet)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text.

        Raises:
            DataError: a character is not in the alphabet.
        """
        codes = _codes(text)
        tokens = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        unknown = self._codes[tokens] != codes
        if unknown.any():
            raise DataError(
                f"the character {text[int(unknown.argmax())]!r} does not occur in the text that was trained on, "
                f"which has these: {self.alphabet[:200]!r}",
                "leave it out, or train with data.level=byte, which knows every character",
            )
        return tokens.astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens."""
        return "".join(self.alphabet[token] for token in _numbers(tokens))

    def state(self) -> dict[str, Any]:
        """Return what `from_state` needs."""
        return {"level": "char", "alphabet": self.alphabet}


def from_state(state: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer again from what `state` returned."""
    return ByteTokenizer() if state["level"] == "byte" else CharTokenizer(state["alphabet"])


def _numbers(tokens: Iterable[int]) -> list[int]:
    """Plain numbers of a list, or of an array or tensor (whose elements would be slow to take one by one)."""
    numbers: list[int] = tokens.tolist() if hasattr(tokens, "tolist") else [int(token) for token in tokens]
    return numbers


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
