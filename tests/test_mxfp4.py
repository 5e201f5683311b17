"""MXFP4 against the definition, code by code; packing gives back what it was given or refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.models import mxfp4
from kda_jax.models.hf_tensors import Entry

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def naive(packed, scale):
    """One column at a time: sign, two bits of exponent, one of mantissa, times the block's power of two."""
    weights = np.zeros((len(packed), packed.shape[1] * 2))
    for row in range(len(weights)):
        for column in range(weights.shape[1]):
            code = (int(packed[row, column // 2]) >> (4 * (column % 2))) & 15
            exponent, mantissa = (code >> 1) & 3, code & 1
            size = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
            weights[row, column] = (-1) ** (code >> 3) * size * 2.0 ** (int(scale[row, column // 32]) - 127)
    return weights


def test_unpack(rng):
    packed = rng.integers(256, size=(127, 32), dtype=np.uint8)
    scale = np.minimum(np.arange(254, dtype=np.uint8), 252).reshape(127, 2)
    weights = mxfp4.unpack(packed, scale)
    assert weights.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weights.astype(np.float64), naive(packed, scale))


def test_pack_is_exact(rng):
    """Every code, zeros of both signs, blocks of zeros, blocks of few small levels, the smallest scales."""
    packed = rng.integers(256, size=(40, 16), dtype=np.uint8)
    packed[:16] = np.arange(16, dtype=np.uint8)[:, None] * 17
    packed[16] = 0x80
    packed[17:24] &= 0x33
    scale = rng.integers(253, size=(40, 1), dtype=np.uint8)
    scale[:6, 0] = (0, 1, 2, 3, 4, 252)
    weights = mxfp4.unpack(packed, scale)
    again = mxfp4.unpack(*mxfp4.pack(weights))
    np.testing.assert_array_equal(weights.view(np.uint16), again.view(np.uint16))


def test_pack_refuses_what_it_cannot_hold(rng):
    weights = mxfp4.unpack(rng.integers(256, size=(2, 16), dtype=np.uint8), np.full((2, 1), 127, np.uint8))
    weights[1, 5] = 1.25
    with pytest.raises(ValueError, match="no MXFP4 numbers"):
        mxfp4.pack(weights)
    weights[1, 5] = 64.0  # beside 6.0 and 0.5, no scale fits
    with pytest.raises(ValueError, match="no MXFP4 numbers"):
        mxfp4.pack(weights)
    with pytest.raises(ValueError, match=r"multiple of 32 columns, got \(2, 24\)"):
        mxfp4.pack(weights[:, :24])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"packed \(2, 16\) needs one scale for 16 bytes, got \(2, 2\)"):
        mxfp4.unpack(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8))


def test_levels():
    """All sixteen, by hand."""
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], np.uint8)
    got = mxfp4.unpack(packed, np.array([[128]], np.uint8)).astype(float)
    np.testing.assert_array_equal(got[0, :16], 2 * np.array([*LEVELS, *(-x for x in LEVELS)]))


def test_a_scale_of_255_is_nan():
    """In its own block alone; packed again it is one, though its codes are lost. NaN beside numbers is refused."""
    weights = mxfp4.unpack(np.full((1, 48), 0x21, np.uint8), np.array([[127, 255, 126]], np.uint8))
    np.testing.assert_array_equal(np.isnan(weights.astype(float)).reshape(3, 32).all(1), [False, True, False])
    assert np.isnan(weights.astype(float)).sum() == 32
    packed, scale = mxfp4.pack(weights)
    assert scale[0, 1] == 255
    assert not packed[0, 16:32].any()
    np.testing.assert_array_equal(mxfp4.unpack(packed, scale).astype(float), weights.astype(float))
    weights[0, 0] = np.nan
    with pytest.raises(ValueError, match="no MXFP4 numbers"):
        mxfp4.pack(weights)


@pytest.mark.parametrize("scale", [253, 254])
def test_a_scale_beyond_bfloat16_is_refused(scale):
    with pytest.raises(ValueError, match=f"scale must be at most 252, or 255 for NaN, got {scale}"):
        mxfp4.unpack(np.full((1, 16), 0x77, np.uint8), np.array([[scale]], np.uint8))


def test_a_broken_tensor_of_a_checkpoint_is_named():
    dtype, name = np.dtype(jnp.bfloat16), "experts.{expert}.w1"
    entry = Entry(("w1",), (1, 32, 1), dtype, name, ((1, 32),), transposed=True, packed=True)
    tensors = {"experts.0.w1_packed": np.zeros((1, 16), np.uint8), "experts.0.w1_scale": np.full((1, 1), 254, np.uint8)}
    with pytest.raises(ValueError, match=r"^experts\.0\.w1_scale: scale must be at most 252"):
        entry.decode(tensors.__getitem__, (slice(None),) * 3)


def test_no_rows():
    packed, scale = mxfp4.pack(np.zeros((2, 0, 64), jnp.bfloat16))
    assert (packed.shape, scale.shape) == ((2, 0, 32), (2, 0, 2))
    assert mxfp4.unpack(packed, scale).shape == (2, 0, 64)
