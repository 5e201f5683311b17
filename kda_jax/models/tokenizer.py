"""Text to token ids and back: the checkpoint's own tokenizer, or bytes."""

import base64
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from kda_jax.models.hf_files import MALFORMED, read_object

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character (yet)

# How the published models cut a text before byte pairs are merged: Chinese, words (a mark before them, an uppercase
# part and a lowercase one, a contraction), up to three digits, marks, line ends, spaces but for the last, spaces.
_MARK, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_WORDS = (rf"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTION}", rf"{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTION}")
_OTHERS = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
PIECES = "|".join((r"[\p{Han}]+", *_WORDS, *_OTHERS))
SPECIAL_TOKENS = 256  # of the published models, after those of the file


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Token i is byte i of UTF-8; ids from 256 on are no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else REPLACEMENT.encode() for i in ids).decode(errors="replace")


class FileTokenizer:
    """The tokenizer that a `tokenizer.json` describes, by the package `tokenizers`."""

    def __init__(self, path: Path):
        tokenizers = _package("tokenizers", path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises no other kind
            raise ValueError(f"{path} describes no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


class TiktokenTokenizer:
    """The byte pairs of a `tiktoken.model`, as Kimi Linear and Kimi K3 are published, by the package `tiktoken`.

    Each line is a token in base64 and its id. The special tokens follow, by the names that `tokenizer_config.json` has
    for them; where the text has such a name, it is that token.
    """

    def __init__(self, path: Path):
        tiktoken = _package("tiktoken", path)
        try:  # not by tiktoken's own reader, which keeps copies of files by their path
            ranks = {
                base64.b64decode(token): int(rank)
                for token, rank in (line.split() for line in path.read_bytes().splitlines() if line)
            }
        except ValueError as error:
            raise ValueError(f"{path} holds no ranks: {error}") from error
        special = _special_tokens(path.with_name("tokenizer_config.json"), len(ranks))
        self._encoding = tiktoken.Encoding(path.name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids])


def _special_tokens(path: Path, first: int) -> dict[str, int]:
    """Of all ids that follow the file's own."""
    added = read_object(path).get("added_tokens_decoder", {}) if path.exists() else {}
    try:
        named = {int(token): entry["content"] for token, entry in added.items()}
    except MALFORMED as error:
        raise ValueError(f"{path} names no tokens: {error!r}") from error
    return {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, first + SPECIAL_TOKENS)}


def _package(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs the package {name}: pip install {name}") from error


TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": FileTokenizer,
    "tiktoken.model": TiktokenTokenizer,
}


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's directory, bytes if it has none of `TOKENIZERS`' files.

    Raises:
      ModuleNotFoundError: if it has one and the package that reads it is not installed.
      ValueError: if the file is broken.
    """
    for name, kind in TOKENIZERS.items():
        if (directory / name).exists():
            return kind(directory / name)
    return ByteTokenizer()


def decode_stream(tokenizer: Tokenizer, bursts: Iterable[Sequence[int]]) -> Iterator[str]:
    """The text that each burst of tokens adds, held back where it ends within a character."""
    ids: list[int] = []
    shown = ""
    for burst in bursts:
        ids.extend(burst)
        text = tokenizer.decode(ids)
        if not text.endswith(REPLACEMENT):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]
