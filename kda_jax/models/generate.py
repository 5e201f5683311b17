"""Continue prompts with a hybrid language model.

    python -m kda_jax.models.generate --checkpoint=DIR --prompt="Once upon a time" [--prompt=...] [--max_new_tokens=64]
        [--temperature=0.8] [--top_k=50] [--top_p=0.95] [--min_p=0.05] [--seed=0] [--stop_token=ID ...]

The text of one prompt appears as it is made; several are decoded as one batch and printed at the end, a paragraph each.
The checkpoint's `tokenizer.json` or `tiktoken.model` is used if there is one, bytes otherwise; its end-of-sequence
token ends a text unless `--stop_token` says otherwise.
"""

import argparse
import numbers
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from kda_jax.models import hf
from kda_jax.models.decoding import NOTHING, Decoder, Decoding, Request, begin, pieces
from kda_jax.models.hf_files import read_object
from kda_jax.models.hybrid import HybridLM
from kda_jax.models.sampling import GREEDY, Sampling
from kda_jax.models.tokenizer import TOKENIZERS, ByteTokenizer, decode_stream, load_tokenizer

CHUNK_SIZE = 512  # tokens of a prompt in one call
BURST = 8  # tokens decoded between two looks at them


def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
    chunk_size: int = CHUNK_SIZE,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and including a stop token.

    Prompts are prefilled `chunk_size` tokens at a time and decoded as one batch under one `jit`, the caches in place.
    Prompts of unequal length do not influence each other.

    Args:
      prompts: token ids, at least one each.
      max_new_tokens: the most for every prompt.
      sampling: how tokens are drawn; greedily by default.
      stop_tokens: a row ends after any of these.
      seed: row i draws with the random key `fold_in(key(seed), i)`.
      chunk_size: smaller ones need less memory, as attention layers score a chunk against all of the cache.

    Raises:
      ValueError: for an empty prompt, a token that is none of the model's, or a number out of range.
    """
    requests = [Request(prompt, max_new_tokens, sampling, stop_tokens, seed) for prompt in prompts]
    bursts = list(stream(model, requests, burst=max_new_tokens, chunk_size=chunk_size))
    return [[int(t) for burst in bursts for t in burst[row] if t != NOTHING] for row in range(len(requests))]


def stream(
    model: HybridLM, requests: Sequence[Request], *, burst: int = BURST, chunk_size: int = CHUNK_SIZE
) -> Iterator[Int[np.ndarray, "B burst"]]:
    """The same for requests that may differ, at most `burst` tokens of each at a time, -1 where a row has ended.

    Raises:
      ValueError: at the call, not at the first burst; as `generate`.
    """
    for name, value in {"burst": burst, "chunk_size": chunk_size}.items():
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    decoder = Decoder(model)
    for request in requests:
        decoder.check(request)
    return _bursts(decoder, requests, burst, chunk_size) if requests else iter(())


def _bursts(decoder: Decoder, requests: Sequence[Request], burst: int, chunk_size: int) -> Iterator[np.ndarray]:
    state = _start(decoder, requests, chunk_size)
    while np.any(state.active):
        state, tokens = decoder.decode(state, burst)
        yield np.asarray(tokens)


def _start(decoder: Decoder, requests: Sequence[Request], chunk_size: int) -> Decoding:
    """The prefilled rows."""
    cache = decoder.init_cache(len(requests), max(request.length for request in requests))
    for piece in pieces([request.prompt for request in requests], chunk_size):
        cache = decoder.prefill(cache, piece)
    return begin(requests, cache)


def end_tokens(directory: Path) -> list[int]:
    """The end-of-sequence tokens that a checkpoint's generation_config.json or else config.json names."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_object(path).get("eos_token_id") if path.exists() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command's arguments, with a `Sampling` among them; a wrong one ends the program with a line that says so."""
    parser = argparse.ArgumentParser(
        "kda_jax.models.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", required=True, help="of config.json and safetensors")
    parser.add_argument("--prompt", action="append", metavar="TEXT", required=True, help="give it again for a batch")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="%(default)s by default")
    parser.add_argument("--temperature", type=float, default=GREEDY.temperature, help="0 is greedy, the default")
    parser.add_argument("--top_k", type=int, default=GREEDY.top_k, help="0, the default, keeps all")
    parser.add_argument("--top_p", type=float, default=GREEDY.top_p, help="%(default)s, the default, keeps all")
    parser.add_argument("--min_p", type=float, default=GREEDY.min_p, help="%(default)s, the default, keeps all")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers, %(default)s by default")
    parser.add_argument("--stop_token", type=int, metavar="ID", action="append", help="by default the checkpoint's own")
    arguments = parser.parse_args(argv)
    if not arguments.checkpoint.is_dir():
        parser.error(f"--checkpoint={arguments.checkpoint} is not a directory")
    if arguments.max_new_tokens < 1:
        parser.error(f"--max_new_tokens must be at least 1, got {arguments.max_new_tokens}")
    try:
        arguments.sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str]) -> None:
    """The command."""
    arguments = parse(argv)
    try:
        tokenizer = load_tokenizer(arguments.checkpoint)
        if isinstance(tokenizer, ByteTokenizer):
            print(f"no {' or '.join(TOKENIZERS)} in {arguments.checkpoint}: bytes are the tokens", file=sys.stderr)
        stop = end_tokens(arguments.checkpoint) if arguments.stop_token is None else arguments.stop_token
        requests = [
            Request(tokenizer.encode(text), arguments.max_new_tokens, arguments.sampling, stop, arguments.seed)
            for text in arguments.prompt
        ]
        size = hf.load_config(arguments.checkpoint).vocab_size
        for token in arguments.stop_token or ():
            if not 0 <= token < size:
                raise ValueError(f"--stop_token={token}: the vocabulary has {size} tokens, from 0")
        _, model = hf.load(arguments.checkpoint)
        bursts = stream(model, requests)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    if len(requests) == 1:
        for text in decode_stream(tokenizer, (_tokens(burst[0], stop) for burst in bursts)):
            print(text, end="", flush=True)
        print()
    else:
        for row in np.concatenate(list(bursts), axis=1):
            print(tokenizer.decode(_tokens(row, stop)), end="\n\n")


def _tokens(row: Int[np.ndarray, " n"], stop: Sequence[int]) -> list[int]:
    """Those that are text."""
    return [int(t) for t in row if t != NOTHING and t not in stop]


if __name__ == "__main__":
    main(sys.argv[1:])
