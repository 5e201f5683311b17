"""Text to token ids and back: the checkpoint's own tokenizer, or bytes."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character (yet)


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
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{path} needs the package tokenizers: pip install tokenizers") from error
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's directory, bytes if it has no `tokenizer.json`.

    Raises:
      ModuleNotFoundError: if it has one and the package `tokenizers` is not installed.
    """
    path = directory / "tokenizer.json"
    return FileTokenizer(path) if path.exists() else ByteTokenizer()


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
