"""MXFP4: blocks of 32 four-bit floats and one power of two (OCP Microscaling Formats 1.0), packed as in checkpoints."""

import jax.numpy as jnp
import numpy as np

BLOCK = 32
LEVELS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # E2M1; bit 3 of a code is the sign
CODES = np.concatenate([LEVELS, -LEVELS])
BIAS = 127  # of the scale's exponent
LARGEST_SCALE = 252  # the last with which 4 and 6 are finite in float32 and bfloat16
NOT_A_NUMBER = 255  # the scale of a block of NaN

# Tables, since a large model has 10^12 of these: the two float32 of a byte in one word, the factor of a scale, and the
# code of a number of halves.
PAIRS = CODES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)].view(np.uint64)[:, 0]
SCALES = np.append(np.ldexp(np.float32(1), np.arange(NOT_A_NUMBER) - BIAS), np.float32(np.nan))
HALVES = np.zeros(16, np.uint8)
HALVES[(2 * LEVELS).astype(int)] = np.arange(len(LEVELS))


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The weights [..., columns] as bfloat16, which holds each of them exactly: code * 2^(scale - 127), NaN for 255.

    Args:
      packed: [..., columns / 2] uint8; the low four bits are the even column.
      scale: [..., columns / 32] uint8.

    Raises:
      ValueError: for shapes that do not belong together, or a scale of 253 or 254, which no finite weights need.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(f"packed {packed.shape} needs one scale for 16 bytes, got {scale.shape}")
    if (beyond := scale[(scale > LARGEST_SCALE) & (scale != NOT_A_NUMBER)]).size:
        raise ValueError(f"scale must be at most {LARGEST_SCALE}, or {NOT_A_NUMBER} for NaN, got {beyond[0]}")
    values = np.take(PAIRS, packed).view(np.float32).reshape(*scale.shape, BLOCK)
    weights = values * SCALES[scale][..., None]  # exact: two bits times a power of two
    return weights.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(jnp.bfloat16)


def pack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(packed, scale) whose `unpack` is exactly `weights`, signs of zeros included.

    A block of NaN gets the scale 255 and codes of 0: those that it was unpacked from are lost.

    Args:
      weights: [..., columns], columns a multiple of 32.

    Raises:
      ValueError: if some block has no such representation, or the columns are no multiple of 32.
    """
    if weights.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a multiple of {BLOCK} columns, got {weights.shape}")
    blocks = weights.astype(np.float32).reshape(*weights.shape[:-1], weights.shape[-1] // BLOCK, BLOCK)
    nothing = np.isnan(blocks).all(axis=-1)
    blocks = np.where(nothing[..., None], np.float32(0), blocks)
    largest = np.max(np.abs(blocks), axis=-1)
    # 4 <= largest / 2^exponent < 8: if any scale represents the block, this one does.
    exponent = np.maximum(np.frexp(largest)[1] - 3, -BIAS)
    size = np.abs(blocks) * np.ldexp(np.float32(1), -exponent)[..., None]
    code = HALVES[np.where(size < 8, 2 * size, 0).astype(np.uint8)]
    if not np.array_equal(LEVELS[code], size):
        raise ValueError("these weights are no MXFP4 numbers")
    code = np.where(np.signbit(blocks), code + np.uint8(8), code).reshape(weights.shape)
    scale = np.where(nothing, NOT_A_NUMBER, exponent + BIAS).astype(np.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, scale
