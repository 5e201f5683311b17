"""Time a token of decoding at long contexts: a hybrid beside the same model with full attention throughout.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m experiments.decode_bench [--contexts=4096,32768,131072] [--batch=64]
        [--models=hybrid,full,kda] [--size=1.3b|tiny] [--output=FILE.jsonl]

Every model has the same widths; only the token mixers differ: latent attention in all layers (full), three layers of
KDA to one of latent attention (hybrid), KDA alone (kda). The caches are not prefilled but filled with random numbers,
as if `context` tokens had come; then `decode` runs as in serving, greedily. A line of JSON is one measurement and the
first says of what; a table ends the run. What does not fit the memory says so in its line.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from experiments import commands, metrics, tables
from experiments.commands import SIZE, Row, one_line, read_flags, record
from experiments.errors import ConfigError
from kda_jax.layers import AttentionCache, DeltaCache, MLAConfig
from kda_jax.models import HybridConfig, HybridLM
from kda_jax.models.decoding import Decoder, Decoding, Request, begin
from kda_jax.models.hybrid import Cache, LayerCache

flags.adopt_module_key_flags(commands)  # --help explains them too
_MODELS = flags.DEFINE_list("models", ["hybrid", "full", "kda"], "Some of hybrid, full, kda.")
_CONTEXTS = flags.DEFINE_list("contexts", None, "Tokens in the cache; by default 4096,32768,131072, for tiny 64,256.")
_BATCH = flags.DEFINE_integer("batch", None, "Rows; by default 64, for tiny 2.", lower_bound=1)

STEPS = 16  # tokens in a sample
ROUNDS = 5

PATTERNS = {"full": ("mla",), "hybrid": ("kda", "kda", "kda", "mla"), "kda": ("kda",)}

# The latent is half of Kimi Linear's, for half its heads: 576 bytes a token and layer. With 24 layers of attention, 64
# rows of 131,072 tokens take 116 GB; with Kimi Linear's own latent they would take 232 GB and fit no single GPU.
SIZES = {
    "1.3b": HybridConfig(
        vocab_size=32768,
        width=2048,
        num_heads=16,
        head_dim=128,
        pattern=("kda",),
        num_layers=24,
        mlp_width=5632,
        mla=MLAConfig(latent_dim=256, key_dim=128, shared_dim=32, value_dim=128),
        tie_embeddings=True,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    ),
    "tiny": HybridConfig(
        vocab_size=64,
        width=16,
        num_heads=2,
        head_dim=8,
        pattern=("kda",),
        num_layers=4,
        mlp_width=32,
        mla=MLAConfig(latent_dim=8, key_dim=8, shared_dim=4, value_dim=8),
    ),
}
DEFAULTS = {"1.3b": ([4096, 32768, 131072], 64), "tiny": ([64, 256], 2)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, checked."""

    size: str
    models: Sequence[str]
    contexts: Sequence[int]
    batch: int


def parse(size: str | None, models: Sequence[str], contexts: Sequence[str] | None, batch: int | None) -> Settings:
    """The values of the flags, with defaults where they are None.

    Raises:
      ConfigError: names the flag, its value and what is possible.
    """
    size = size or ("1.3b" if jax.default_backend() == "gpu" else "tiny")
    if size not in SIZES:
        raise ConfigError(f"--size={size}: give one of {', '.join(SIZES)}")
    if not models or not set(models) <= set(PATTERNS):
        raise ConfigError(f"--models={','.join(models)}: give some of {', '.join(PATTERNS)}")
    default_contexts, default_batch = DEFAULTS[size]
    for text in contexts or ():
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"--contexts={','.join(contexts or ())}: {text!r} is not a positive number of tokens")
    numbers = [int(text) for text in contexts] if contexts else default_contexts
    return Settings(size, models, sorted(numbers), batch or default_batch)


def header(settings: Settings) -> Row:
    """The first line: on what and with what the others were measured."""
    return {
        "config": dataclasses.asdict(settings) | {"steps": STEPS, "rounds": ROUNDS},
        "model": repr(SIZES[settings.size]),
        "patterns": PATTERNS,
        "device": jax.devices()[0].device_kind,
        **metrics.provenance(("jax", "jaxlib", "flax", "numpy")),
    }


def run(settings: Settings) -> Iterator[Row]:
    """Every measurement, as it is made."""
    for name in settings.models:
        model = random_model(dataclasses.replace(SIZES[settings.size], pattern=PATTERNS[name]))
        for context in settings.contexts:
            yield {"measurement": "decode", "model": name} | measure(model, context, settings.batch)


def abstract_model(config: HybridConfig) -> HybridLM:
    """Shapes instead of weights."""
    return nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))


def random_model(config: HybridConfig) -> HybridLM:
    """A model of small random weights; drawing them by shape compiles less than an initialisation."""
    graphdef, params = nnx.split(abstract_model(config))
    draw = jax.jit(
        lambda key, like: jnp.asarray(0.02 * jax.random.normal(key, like.shape, like.dtype)), static_argnums=1
    )
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    return nnx.merge(graphdef, jax.tree.map(lambda like: draw(next(keys), like), params))


def measure(model: HybridLM, context: int, batch: int) -> Row:
    """Milliseconds a token for all rows together: median and minimum of `ROUNDS` samples of `STEPS` tokens."""
    limit = STEPS * (ROUNDS + 1)
    decoder = Decoder(model)
    shapes = jax.eval_shape(lambda: decoder.init_cache(batch, context + limit))
    attention = [layer for layer in shapes if isinstance(layer, AttentionCache)]
    row = {
        "batch": batch,
        "context": context,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model))),
        "cache_bytes": size_in_bytes(shapes),
        "attention_bytes_a_token": sum(size_in_bytes(x.entries) // (batch * x.capacity) for x in attention),
    }
    memory = jax.devices()[0].memory_stats() or {}
    if row["cache_bytes"] + memory.get("bytes_in_use", 0) > memory.get("bytes_limit", float("inf")):
        return row | {"error": f"the cache does not fit the {memory['bytes_limit'] / 2**30:.0f} GiB that JAX may use"}
    try:
        state = begin([Request([1], limit)] * batch, filled_cache(shapes, context))
        first, state = _seconds(decoder, state)
        samples = []
        for _ in range(ROUNDS):
            seconds, state = _seconds(decoder, state)
            samples.append(1e3 * seconds / STEPS)
    except Exception as error:  # out of memory: a line says so, and the rest goes on
        return row | {"error": one_line(error)}
    times = {"ms_a_token": statistics.median(samples), "min_ms_a_token": min(samples)}
    return row | times | {"tokens_a_second": 1e3 * batch / times["ms_a_token"], "first_sample_s": first}


def size_in_bytes(tree: Cache | tuple) -> int:
    """Of the arrays, or of what would be arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _seconds(decoder: Decoder, state: Decoding) -> tuple[float, Decoding]:
    start = time.perf_counter()
    state, tokens = decoder.decode(state, STEPS)
    jax.block_until_ready(tokens)
    return time.perf_counter() - start, state


def filled_cache(shapes: Cache, length: int) -> Cache:
    """A cache of the given shapes as if every row held one sequence of `length` tokens, with random contents."""

    def normal(key, like, shape):
        return jax.random.normal(key, shape, like.dtype)

    def fill(key: jax.Array, layer: LayerCache) -> LayerCache:
        if isinstance(layer, DeltaCache):
            return jax.tree.map(lambda like: normal(key, like, like.shape), layer)
        place = jnp.arange(layer.capacity)
        entries = []
        for like in layer.entries:  # a block of random entries again and again, the same for all rows
            block = normal(key, like, (min(layer.capacity, 1024), *like.shape[2:]))
            entries.append(jnp.broadcast_to(block[place % block.shape[0]][None], like.shape))
        sequence = jnp.broadcast_to((place < length).astype(jnp.int32)[None], layer.sequence.shape)
        return AttentionCache(tuple(entries), sequence, jnp.full_like(layer.length, length))

    keys = jax.random.split(jax.random.key(0), len(shapes))
    return jax.jit(lambda keys: tuple(fill(keys[i], layer) for i, layer in enumerate(shapes)))(keys)


def table(rows: Sequence[Row]) -> str:
    """A row a context and model; how much longer than at the shortest context, and full attention's time over its."""
    head = [
        "context",
        "model",
        "parameters, 1e9",
        "cache, GB",
        "ms a token",
        "over shortest",
        "tokens a second",
        "full / it",
    ]
    times = {(row["model"], row["context"]): row["ms_a_token"] for row in rows if "error" not in row}
    body = [_cells(row, times) for row in sorted(rows, key=lambda row: row["context"])]
    return tables.align([head, *body])


def _cells(row: Row, times: Mapping[tuple[str, int], float]) -> list[str]:
    model, context = row["model"], row["context"]
    cells = [str(context), model, f"{row['parameters'] / 1e9:.2f}", f"{row['cache_bytes'] / 1e9:.1f}"]
    if "error" in row:
        return [*cells, "failed", "", "", ""]
    ms = row["ms_a_token"]
    shortest = times[min(key for key in times if key[0] == model)]
    full = times.get(("full", context))
    speed = f"{row['tokens_a_second']:,.0f}"
    return [*cells, f"{ms:.2f}", f"{ms / shortest:.2f}", speed, f"{full / ms:.2f}" if full else ""]


def main(argv: list[str]) -> None:
    def plan() -> tuple[Row, Iterator[Row]]:
        settings = parse(SIZE.value, _MODELS.value, _CONTEXTS.value, _BATCH.value)
        return header(settings), run(settings)

    print(table(record(argv, plan)))


if __name__ == "__main__":
    app.run(main, flags_parser=read_flags)
