"""The ways from text to tokens and back: bytes, and the two kinds of files that checkpoints come with."""

import base64
import json
import sys

import numpy as np
import pytest

from kda_jax.models.tokenizer import ByteTokenizer, decode_stream, load_tokenizer

MERGED = ["he", "ll", "llo", "hello", "12", "123", "1234", "he'", "a\xe4"]  # of a tiny tiktoken.model, after the bytes


def test_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("né ∑")) == "né ∑"
    assert tokenizer.decode([104, 195, 300, 105]) == "h��i"


def test_streamed_text_holds_back_half_a_character():
    tokens = list("a∑é".encode())
    texts = list(decode_stream(ByteTokenizer(), ([t] for t in tokens)))
    assert "".join(texts) == "a∑é"
    assert [text for text in texts if text] == ["a", "∑", "é"]
    assert list(decode_stream(ByteTokenizer(), [[97], [226]])) == ["a", "�"]


@pytest.fixture
def ranks(tmp_path):
    """A directory with a tiktoken.model, and a name for the second token after its own."""
    tokens = [bytes([i]) for i in range(256)] + [token.encode("latin-1") for token in MERGED]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("".join([*lines, "\n"]))
    named = {str(len(tokens) + 1): {"content": "[EOS]", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", [256 + 3]),
        ("hell", [256, 257]),
        ("1234", [256 + 5, ord("4")]),
        ("he's", [256 + 7, ord("s")]),
        ("a中", [ord("a"), *"中".encode()]),
        ("[EOS]he", [265 + 1, 256]),
        ("<|reserved_token_265|>", [265]),
    ],
)
def test_tiktoken(ranks, text, tokens):
    """Digits in threes, a contraction in one piece, Chinese apart from Latin letters; special tokens by their names."""
    pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    tokenizer = load_tokenizer(ranks)
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(np.array(tokens)) == text


def test_half_a_character_of_tiktoken(ranks):
    pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    tokenizer = load_tokenizer(ranks)
    assert list(decode_stream(tokenizer, ([t] for t in "é".encode()))) == ["é", ""]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tiktoken.model", "aGU= x", r"tiktoken.model holds no ranks: "),
        ("tiktoken.model", "version https://git-lfs.github.com/spec/v1", "tiktoken.model holds no ranks: "),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"265": "x"}}', "tokenizer_config.json names no tokens: "),
    ],
)
def test_broken_files_of_tiktoken_are_named(ranks, file, text, message):
    pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    (ranks / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(ranks)


@pytest.mark.parametrize(("file", "package"), [("tokenizer.json", "tokenizers"), ("tiktoken.model", "tiktoken")])
def test_a_tokenizer_is_never_passed_over(tmp_path, file, package, monkeypatch):
    """Without its package the text would be bytes, which to the model are other tokens."""
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    (tmp_path / file).write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"{file} needs the package {package}: pip install"):
        load_tokenizer(tmp_path)


def test_tokenizers_package(tmp_path):
    """A real file of it."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("b a c") == [1, 0, 2]
    assert tokenizer.decode(np.array([1, 0])) == "b a"
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer.json describes no tokenizer: "):
        load_tokenizer(tmp_path)
