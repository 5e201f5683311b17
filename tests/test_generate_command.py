"""The command that continues prompts."""

import dataclasses
import json

import pytest
from generation_cases import CONFIG, build

from kda_jax.models import generate, hf
from kda_jax.models.tokenizer import ByteTokenizer

BYTES = dataclasses.replace(CONFIG, vocab_size=256, pattern=("kda",), rope_theta=None)


@pytest.fixture
def checkpoint(tmp_path):
    """The directory of `build(BYTES)`."""
    hf.save(tmp_path, BYTES, build(BYTES))
    return tmp_path


def continued(prompts, **options):
    tokens = generate.generate(build(BYTES), [list(p.encode()) for p in prompts], **options)
    return [ByteTokenizer().decode(row) for row in tokens]


def test_one_prompt(checkpoint, capsys):
    generate.main([f"--checkpoint={checkpoint}", "--prompt=né", "--max_new_tokens=11"])
    captured = capsys.readouterr()
    assert captured.out == continued(["né"], max_new_tokens=11)[0] + "\n"
    assert captured.err == f"no tokenizer.json or tiktoken.model in {checkpoint}: bytes are the tokens\n"


def test_a_batch_of_prompts(checkpoint, capsys):
    flags = ["--temperature=0.9", "--top_k=40", "--top_p=0.9", "--min_p=0.01", "--seed=3", "--max_new_tokens=9"]
    generate.main([f"--checkpoint={checkpoint}", "--prompt=one", "--prompt=another", *flags])
    sampling = generate.Sampling(0.9, 40, 0.9, 0.01)
    want = continued(["one", "another"], max_new_tokens=9, sampling=sampling, seed=3)
    assert capsys.readouterr().out == "".join(f"{text}\n\n" for text in want)


def test_the_text_ends_before_the_stop_token(checkpoint, capsys):
    """The checkpoint's own, unless the command says another."""
    (tokens,) = generate.generate(build(BYTES), [list(b"abc")], max_new_tokens=8)
    eos, other = tokens[5], tokens[3]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [999, eos]}))
    assert generate.end_tokens(checkpoint) == [999, eos]
    command = [f"--checkpoint={checkpoint}", "--prompt=abc", "--max_new_tokens=8"]
    for stop, flags in {eos: [], other: [f"--stop_token={other}"]}.items():
        generate.main([*command, *flags])
        assert capsys.readouterr().out == ByteTokenizer().decode(tokens[: tokens.index(stop)]) + "\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top_p=0"], "Sampling.top_p must be in (0, 1], got 0.0"),
        (["--temperature=warm"], "--temperature: invalid float value: 'warm'"),
        (["--checkpoint=/no/such"], "--checkpoint=/no/such is not a directory"),
        (["--max_new_tokens=0"], "--max_new_tokens must be at least 1, got 0"),
        (["--top-q=1"], "unrecognized arguments: --top-q=1"),
    ],
    ids=str,
)
def test_wrong_flags(checkpoint, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main([f"--checkpoint={checkpoint}", "--prompt=a", *flags])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt="], "error: a prompt must have at least one token"),
        (["--stop_token=256"], "error: --stop_token=256: the vocabulary has 256 tokens"),
        (["--stop_token=1", "--stop_token=-1"], "error: --stop_token=-1: the vocabulary has 256 tokens"),
    ],
)
def test_wrong_requests(checkpoint, flags, message, monkeypatch):
    monkeypatch.delattr("kda_jax.models.hf.load")  # weights of many GB come last
    with pytest.raises(SystemExit, match=message):
        generate.main([f"--checkpoint={checkpoint}", "--prompt=a", *flags])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "flaw"), [('{\n"a', "is no JSON: .* line 2"), ("[]", r"must hold an object, got \[\]")]
)
def test_a_broken_file_is_named(checkpoint, name, text, flaw):
    (checkpoint / name).write_text(text)
    with pytest.raises(SystemExit, match=f"error: .*/{name} {flaw}"):
        generate.main([f"--checkpoint={checkpoint}", "--prompt=a"])


def test_help_says_the_defaults(capsys):
    with pytest.raises(SystemExit):
        generate.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "--max_new_tokens MAX_NEW_TOKENS 64 by default",
        "--temperature TEMPERATURE 0 is greedy, the default",
        "--top_k TOP_K 0, the default, keeps all",
        "--top_p TOP_P 1.0, the default, keeps all",
        "--min_p MIN_P 0.0, the default, keeps all",
        "--seed SEED of the random numbers, 0 by default",
    ):
        assert said in text


def test_a_directory_without_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*config.json"):
        generate.main([f"--checkpoint={tmp_path}", "--prompt=a"])
