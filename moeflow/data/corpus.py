"""Texts to train on: a file, the manual inside Python, or sentences made here."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeflow.data import counter
from moeflow.data.bundle import Source
from moeflow.data.files import read_regular
from moeflow.errors import ConfigError, DataError
from moeflow.schema.data import TextData


@dataclass(frozen=True)
class Corpus:
    """A text and where it is from; the fields are those of `moeflow.data.bundle.DataBundle`."""

    content: bytes
    source: Source
    name: str
    origin: str
    notice: str | None


def load(cfg: TextData) -> Corpus:
    """Get the text that the configuration names.

    Raises:
        DataError: the file cannot be read, or there is none and the configuration forbids going on without.
        ConfigError: data.root without data.path.
    """
    if cfg.source == "synthetic":
        unread = f"data.path={cfg.path} is not read: " if cfg.path else ""
        return made_up(f"{unread}data.source=synthetic was asked for.")
    if cfg.path is not None:
        return from_file(cfg)
    if cfg.root is not None:
        raise ConfigError(f"data.root={cfg.root} is given without a file in it", "name one: data.path=FILE")
    try:
        return manual()
    except ImportError as error:
        missing = "data.path is null, and this Python comes without pydoc_data"
        if cfg.source == "real" or cfg.on_missing == "error":
            raise DataError(missing, "pass data.path=FILE") from error
        return made_up(f"{missing}.")


def from_file(cfg: TextData) -> Corpus:
    """Read data.path (below data.root where that is given)."""
    assert cfg.path is not None
    path = Path(cfg.path).expanduser()
    if cfg.root is not None:
        root = Path(cfg.root).expanduser()
        if not root.is_dir():
            raise DataError(f"data.root={cfg.root} is not a folder that exists", "correct it, or leave it out")
        path = root / path
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(
            f"data.path={cfg.path} cannot be read ({path}: {error.strerror or error})",
            "pass the path of a text file, or data.path=null for the text of Python's manual",
        ) from error
    return Corpus(content, source="real", name=f"text:{path.name}", origin=str(path.resolve()), notice=None)


def manual() -> Corpus:
    """The long English text inside Python: the topics of `help()`, in alphabetical order.

    It differs a little from one Python version to the next.

    Raises:
        ImportError: this Python was installed without it.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    version = ".".join(platform.python_version_tuple()[:2])
    return Corpus(
        text.encode("utf-8"),
        source="real",
        name=f"text:python-{version}-manual",
        origin=f"pydoc_data.topics of Python {version}",
        notice=f"No data.path was given: the text is Python {version}'s own manual; pass data.path=FILE for yours.",
    )


# Sixteen of each, separated by commas; the first ending is none.
_SUBJECTS = (
    "the old sailor, a young queen, the clever fox, my brother, the baker, a tired soldier, the gray cat, the miller, "
    "every child, the north wind, a small river, the king, her sister, the gardener, a lost traveler, the judge"
)
_VERBS = (
    "finds, follows, remembers, carries, paints, answers, watches, forgets, sells, guards, praises, fears, greets, "
    "hides, mends, chooses"
)
_OBJECTS = (
    "the golden ring, a broken wheel, the empty house, three letters, the mountain path, a silver spoon, "
    "the tall ship, the harvest, an open door, the village bell, a heavy stone, some bread, the morning star, "
    "a song, the bridge, nothing"
)
_ENDINGS = (
    ", at night, in the rain, before winter, without a word, near the sea, after supper, once a year, with great care, "
    "by candlelight, in the end, for a coin, on the hill, too late, again and again, as always"
)
_JOINTS = (". ", ". ", ". ", ".\n", "; then ", ", and ", ", but ", ", while ")


def made_up(why: str, num_sentences: int = 8192) -> Corpus:
    """About 400 kB of simple sentences, the same on every machine.

    Args:
        why: sentence for the notice.
        num_sentences: length of the text.
    """
    dice = [counter.draw(counter.key(0x7E47, column), np.arange(num_sentences)) for column in range(5)]
    # The product of two numbers prefers small ones, as words of a language do.
    picks = [(counter.field(bits, 0, 256) * counter.field(bits, 16, 256)) >> 12 for bits in dice[:4]]
    joints = counter.field(dice[4], 0, len(_JOINTS))
    subjects, verbs, objects, endings = (words.split(", ") for words in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
    pieces, fresh = [], True
    for subject, verb, thing, ending, joint in zip(*(pick.tolist() for pick in picks), joints.tolist(), strict=True):
        words = " ".join(filter(None, (subjects[subject], verbs[verb], objects[thing], endings[ending])))
        pieces.append((words[0].upper() + words[1:] if fresh else words) + _JOINTS[joint])
        fresh = _JOINTS[joint].startswith(".")
    return Corpus(
        "".join(pieces).encode("ascii"),
        source="synthetic",
        name="synthetic-sentences",
        origin=f"{num_sentences} sentences made by moeflow",
        notice=f"SYNTHETIC DATA: {why}\nThe text is sentences made by moeflow; pass data.path=FILE for a real one.",
    )
