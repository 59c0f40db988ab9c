"""Language modeling: windows of a text and the same windows one token later.

Legend: B windows of a batch, S tokens of a window.
"""

from __future__ import annotations

import codecs
import hashlib

import numpy as np
import torch
from torch import Tensor

from moeflow.data import corpus, counter
from moeflow.data.bundle import DataBundle
from moeflow.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from moeflow.errors import DataError
from moeflow.schema.data import TextData

_STREAM = 0x7E87


class TextDataset:
    """Windows of a text, at random places (training) or one after another (evaluation)."""

    def __init__(self, tokens: Tensor, seq_len: int, *, seed: int | None):
        """Wrap a text.

        Args:
            tokens: 1-D, any integer dtype, more than `seq_len` of them.
            seq_len: S, tokens of a window.
            seed: of the random places; None lays the windows one after another.
        """
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed

    def __len__(self) -> int:
        """Windows that fit beside each other: an epoch reads about as many tokens as the text has."""
        return (len(self.tokens) - 1) // self.seq_len

    def starts(self, indices: Tensor, epoch: int) -> Tensor:
        """Return where the windows begin, int64 [B]: for training a pure function of (seed, epoch, index)."""
        if self.seed is None:
            return indices * self.seq_len
        bits = counter.draw(counter.key(self.seed, _STREAM, epoch), indices.numpy())
        return torch.from_numpy(counter.below(bits, len(self.tokens) - self.seq_len))

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """Return {"inputs": int64 [B, S], "targets": int64 [B, S]}; see `moeflow.data.bundle.Dataset`."""
        places = self.starts(indices, epoch)[:, None] + torch.arange(self.seq_len + 1)
        window = self.tokens[places].to(torch.int64)
        return {"inputs": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


def build(cfg: TextData, seed: int) -> DataBundle:
    """Build the data of the `text` option.

    Args:
        cfg: the `data` section.
        seed: of the run: places of the training windows.

    Raises:
        DataError: the file cannot be read, is not text, or is too short for the windows.
        ConfigError: data.root without data.path.
    """
    text = corpus.load(cfg)
    tokenizer, tokens = _tokenize(text, cfg.level)
    num_train = int(len(tokens) * (1.0 - cfg.val_fraction))
    shortest = min(num_train, len(tokens) - num_train)
    if shortest <= cfg.seq_len:
        raise DataError(
            f"{text.origin} is too short: of its {len(tokens):,} tokens {num_train:,} are for training and "
            f"{len(tokens) - num_train:,} held out, and a window takes {cfg.seq_len + 1:,} (data.seq_len + 1)",
            "pass a longer text (data.path), a smaller data.seq_len, or another data.val_fraction",
        )
    return DataBundle(
        TextDataset(tokens[:num_train], cfg.seq_len, seed=seed),
        TextDataset(tokens[num_train:], cfg.seq_len, seed=None),
        source=text.source,
        name=text.name,
        origin=text.origin,
        notice=text.notice,
        fingerprint=f"text:{cfg.level}:{len(tokens)}:{hashlib.sha256(text.content).hexdigest()[:16]}",
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
    )


def _tokenize(text: corpus.Corpus, level: str) -> tuple[Tokenizer, Tensor]:
    """Return the tokenizer of a text, and the text as tokens in the smallest dtype that holds them."""
    if not text.content.removeprefix(codecs.BOM_UTF8):
        raise DataError(f"{text.origin} is empty", "pass another data.path")
    if level == "byte":
        return ByteTokenizer(), torch.frombuffer(bytearray(text.content), dtype=torch.uint8)
    try:
        characters = text.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{text.origin} is not UTF-8 text: byte {error.start:,} is {text.content[error.start]:#04x}",
            "convert it to UTF-8, or train on its bytes: data.level=byte",
        ) from error
    tokenizer = CharTokenizer.of_text(characters)
    tokens = tokenizer.encode(characters)
    return tokenizer, torch.from_numpy(tokens.astype(np.uint8 if tokenizer.vocab_size <= 256 else np.int32))
