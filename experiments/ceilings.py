"""What a GPU can do, beside which the benchmark's times are read: copying, matrix products, causal attention."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from experiments import clock, versions
from experiments.commands import Row, one_line
from experiments.versions import Shape, Version

ELEMENTS, SIDE = 2**28, 8192  # of the array copied, and of the matrices
COPY, PRODUCT = "copy, TB/s", "bfloat16 matrix product, TFLOP/s"


def _operands() -> dict[str, Sequence[Array]]:
    matrices = jax.random.normal(jax.random.key(0), (2, SIDE, SIDE), jnp.bfloat16)
    return {COPY: [jnp.arange(ELEMENTS, dtype=jnp.int32)], PRODUCT: list(matrices)}


def builds() -> dict[str, clock.Build]:
    """How to make the programs of an elementwise copy and of a matrix product, by their names."""
    shapes = jax.eval_shape(_operands)
    functions: dict[str, Callable[..., Array]] = {COPY: lambda x: x + 1, PRODUCT: jnp.matmul}
    return {name: functools.partial(clock.build, function, *shapes[name]) for name, function in functions.items()}


def measure(programs: Mapping[str, clock.Program | Exception]) -> Iterator[Row]:
    """Bytes read and written a second by the copy, and operations a second of the product."""
    amounts = {COPY: 2 * 4 * ELEMENTS, PRODUCT: 2 * SIDE**3}
    samples = {name: clock.warm_up(programs[name], *operands) for name, operands in _operands().items()}
    for name, times in clock.interleave(samples).items():
        yield {"measurement": "ceiling", "version": name, **times, "rate": amounts[name] / times["median_ms"] / 1e9}


def _attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return o, jnp.zeros(())  # for the state


ATTENTION = Version("cuDNN attention", _attend, ("q", "k", "v"), peer=True)


def attention(
    programs: Mapping[tuple[Version, Shape, str], clock.Program | Exception],
    shape: Shape,
    passes: Sequence[str],
    dtype: str,
) -> Iterator[Row]:
    """Causal softmax attention of the same heads by cuDNN: where KDA overtakes it."""
    inputs = versions.arguments(ATTENTION, versions.draw(shape, "slow", dtype))
    for name in passes:
        row = {
            "measurement": "attention",
            **versions.sizes(shape),
            "pass": name,
            "version": ATTENTION.name,
            "peer": True,
        }
        try:
            yield row | clock.interleave({name: clock.warm_up(programs[ATTENTION, shape, name], *inputs)})[name]
        except Exception as error:
            yield row | {"error": one_line(error)}
