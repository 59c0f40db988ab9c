"""Text: tokens and back, windows, the split, and texts that cannot be used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moeflow.data import build, corpus, tokenizer
from moeflow.data.text import TextDataset
from moeflow.errors import ConfigError, DataError
from moeflow.schema import TextData

SAMPLE = "To be, or not to be: that is the question.\nWhether 'tis nobler \u2014 \u00e9t\u00e9 \U0001f600!\n" * 40


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.txt"
    path.write_bytes(SAMPLE.encode())
    return path


@pytest.mark.parametrize("level", ["char", "byte"])
def test_tokens_are_the_text_and_split_at_the_end(sample: Path, level: str):
    bundle = build(TextData(path=str(sample), level=level, seq_len=16, val_fraction=0.25), seed=0)
    content = SAMPLE if level == "char" else SAMPLE.encode()
    alphabet = sorted(set(SAMPLE)) if level == "char" else list(range(256))
    split = int(len(content) * 0.75)
    for dataset, part in ((bundle.train, content[:split]), (bundle.eval, content[split:])):
        assert dataset.tokens.tolist() == [alphabet.index(symbol) for symbol in part]
    assert bundle.vocab_size == len(alphabet) == bundle.tokenizer.vocab_size
    assert (bundle.source, bundle.notice, bundle.num_classes) == ("real", None, None)
    assert bundle.origin == str(sample)
    assert bundle.tokenizer.decode(bundle.train.tokens) == (
        SAMPLE[:split] if level == "char" else SAMPLE.encode()[:split].decode(errors="replace")
    )


@pytest.mark.parametrize("level", ["char", "byte"])
def test_encode_and_decode_are_inverse_also_after_saving(sample: Path, level: str):
    bundle = build(TextData(path=str(sample), level=level), seed=0)
    for made in (bundle.tokenizer, tokenizer.from_state(json.loads(json.dumps(bundle.tokenizer.state())))):
        tokens = made.encode("be not \u00e9t\u00e9 \U0001f600")
        assert tokens.dtype == np.int64
        assert made.decode(tokens) == made.decode(tokens.tolist()) == "be not \u00e9t\u00e9 \U0001f600"
        assert tokens.tolist() == bundle.tokenizer.encode("be not \u00e9t\u00e9 \U0001f600").tolist()
        assert made.encode("").tolist() == []


def test_an_unknown_character_is_named(sample: Path):
    bundle = build(TextData(path=str(sample)), seed=0)
    with pytest.raises(DataError, match=r"the character 'Z' does not occur") as caught:
        bundle.tokenizer.encode("to be Z or x")
    assert "data.level=byte" in str(caught.value)
    assert build(TextData(path=str(sample), level="byte"), 0).tokenizer.encode("Z").tolist() == [90]


def test_alphabets_that_are_none():
    for alphabet in ("", "ba", "aa"):
        with pytest.raises(ConfigError, match="sorted and free of repeats"):
            tokenizer.CharTokenizer(alphabet)


def test_a_large_alphabet_keeps_its_numbers(tmp_path: Path):
    """More than 256 characters no longer fit a byte."""
    content = "".join(chr(0x4E00 + (i * 11) % 700) for i in range(4000))
    path = tmp_path / "large.txt"
    path.write_text(content, encoding="utf-8")
    bundle = build(TextData(path=str(path), seq_len=10), seed=0)
    assert bundle.vocab_size == 700
    assert bundle.tokenizer.decode(bundle.train.tokens) + bundle.tokenizer.decode(bundle.eval.tokens) == content


def test_training_windows():
    """Each is a stretch of the text with its targets one token on, at a place of its own for each epoch and seed."""
    tokens = torch.arange(1000, dtype=torch.int32)
    dataset = TextDataset(tokens, 16, seed=3)
    assert len(dataset) == 62
    batch = dataset.fetch(torch.arange(62), epoch=0)
    assert {(value.dtype, tuple(value.shape)) for value in batch.values()} == {(torch.int64, (62, 16))}
    assert torch.equal(batch["targets"], batch["inputs"] + 1)
    assert torch.equal(batch["inputs"], batch["inputs"][:, :1] + torch.arange(16))
    order = torch.randperm(62, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dataset.fetch(order, 0)["inputs"], batch["inputs"][order])
    for seed, epoch in ((3, 1), (4, 0)):
        other = TextDataset(tokens, 16, seed=seed).fetch(torch.arange(62), epoch)
        assert (other["inputs"][:, 0] == batch["inputs"][:, 0]).float().mean() < 0.1


def test_training_windows_reach_every_place():
    dataset = TextDataset(torch.arange(12), 8, seed=0)
    starts = torch.cat([dataset.fetch(torch.arange(1), epoch)["inputs"][:, 0] for epoch in range(400)])
    assert torch.bincount(starts, minlength=4).min() > 60  # 0 to 3: the last target is the last token
    assert int(starts.max()) == 3


def test_evaluation_windows_lie_one_after_another():
    tokens = torch.arange(50, 150)
    dataset = TextDataset(tokens, 9, seed=None)
    assert len(dataset) == 11
    batch = dataset.fetch(torch.arange(11), epoch=5)
    assert batch["inputs"].flatten().tolist() == list(range(50, 149))
    assert batch["targets"].flatten().tolist() == list(range(51, 150))
    # a text of exactly one window and one target more
    assert len(TextDataset(torch.arange(10), 9, seed=None)) == 1


def test_the_manual_of_python_is_the_default():
    bundle = build(TextData(), seed=0)
    assert (bundle.source, bundle.name.startswith("text:python-3.")) == ("real", True)
    assert len(bundle.train.tokens) + len(bundle.eval.tokens) > 400_000
    assert 90 < bundle.vocab_size < 130
    assert "data.path=FILE" in bundle.notice
    assert "compound statement" in bundle.tokenizer.decode(bundle.train.tokens)


def test_a_python_without_its_manual(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    bundle = build(TextData(), seed=0)
    assert bundle.source == "synthetic"
    assert "without pydoc_data" in bundle.notice
    for cfg in (TextData(on_missing="error"), TextData(source="real")):
        with pytest.raises(DataError, match="without pydoc_data"):
            build(cfg, seed=0)


def test_made_up_sentences(tmp_path: Path):
    bundle = build(TextData(source="synthetic", path=str(tmp_path / "not there")), seed=0)
    assert (bundle.source, bundle.name) == ("synthetic", "synthetic-sentences")
    assert "SYNTHETIC DATA" in bundle.notice
    assert "is not read" in bundle.notice
    assert (
        bundle.fingerprint == "text:char:400709:9c4eb19b63ebf957" == build(TextData(source="synthetic"), 7).fingerprint
    )
    for words in (corpus._SUBJECTS, corpus._VERBS, corpus._OBJECTS, corpus._ENDINGS):
        assert len(set(words.split(", "))) == 16
    # not a few sentences over and over
    lines = bundle.tokenizer.decode(bundle.train.tokens).split(". ")
    assert len(set(lines)) > 0.8 * len(lines)


def test_files_that_cannot_be_read(tmp_path: Path):
    for name, reason in (("missing.txt", "No such file"), (".", "Is a directory")):
        with pytest.raises(DataError, match=f"data.path={tmp_path / name} cannot be read .*{reason}"):
            build(TextData(path=str(tmp_path / name)), seed=0)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match=f"data.path={path} cannot be read .*not a file"):
            build(TextData(path=str(path)), seed=0)


def test_a_path_below_a_root(sample: Path, tmp_path: Path):
    assert build(TextData(root=str(tmp_path), path="sample.txt"), 0).origin == str(sample)
    with pytest.raises(DataError, match=r"data\.root=.*/nowhere is not a folder"):
        build(TextData(root=str(tmp_path / "nowhere"), path="sample.txt"), 0)
    with pytest.raises(ConfigError, match=r"data\.root=.* without a file"):
        build(TextData(root=str(tmp_path)), 0)


def test_what_is_no_utf8(tmp_path: Path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"abc" * 100 + b"\xe9" + b"abc" * 100)
    with pytest.raises(DataError, match="is not UTF-8 text: byte 300 is 0xe9") as caught:
        build(TextData(path=str(path)), seed=0)
    assert "data.level=byte" in str(caught.value)
    assert build(TextData(path=str(path), level="byte", seq_len=8), seed=0).vocab_size == 256


def test_a_byte_order_mark_is_no_character(tmp_path: Path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"ab" * 200)
    assert build(TextData(path=str(path), seq_len=8), seed=0).vocab_size == 2


@pytest.mark.parametrize(
    ("content", "fields", "reason"),
    [
        (b"", {}, "is empty"),
        (b"\xef\xbb\xbf", {}, "is empty"),
        (b"x" * 500, {}, "is too short: of its 500 tokens 450 are for training and 50 held out"),
        (b"x" * 1000, {"seq_len": 100}, "a window takes 101"),
    ],
)
@pytest.mark.parametrize("level", ["char", "byte"])
def test_a_text_too_short(tmp_path: Path, content: bytes, fields: dict, reason: str, level: str):
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        build(TextData(path=str(path), level=level, **fields), seed=0)
    assert str(path) in str(caught.value)


def test_fingerprints_tell_texts_apart(sample: Path):
    prints = {build(TextData(path=str(sample), level=level), 0).fingerprint for level in ("char", "byte")}
    sample.write_bytes(SAMPLE.replace("question", "Question", 1).encode())
    prints.add(build(TextData(path=str(sample)), 0).fingerprint)
    assert len(prints) == 3


def test_tiny_shakespeare(shared_data: Path):
    path = shared_data / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {shared_data}")
    bundle = build(TextData(path=str(path)), seed=0)
    # As the well-known small character model has it.
    assert bundle.vocab_size == 65
    assert len(bundle.train.tokens) == 1_003_854
    assert len(bundle.eval.tokens) == 111_540
    assert bundle.tokenizer.decode(bundle.train.tokens[:14]) == "First Citizen:"
