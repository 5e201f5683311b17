"""Tuning of the kernels: one frozen value, and the default for a shape."""

import dataclasses

MULTIPROCESSORS = 132  # of an H200 or H100 SXM
VALUES = 64  # values a warpgroup of the scan


LEAST_BLOCKS = 80  # on a full chip, for one kernel: its blocks take a chunk 6 us, two kernels at least 0.076
LEAST_PIECES = 8  # a split costs a second scan, with states of K more columns
LEAST_CHUNKS = 32  # of a piece


@dataclasses.dataclass(frozen=True)
class Config:
    """warpgroups: of the scan's blocks, each with 64 values. stages: chunks a block of the scan holds in shared
    memory. pieces: of a sequence, scanned side by side. fused: rows of the batch in one kernel (V <= 128).
    """

    warpgroups: int = 1
    stages: int = 3
    pieces: int = 1
    fused: bool = False

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}")
        if self.stages not in (2, 3) or self.warpgroups + self.stages > 4:  # the shared memory of a multiprocessor
            raise ValueError(f"stages must be 2, or 3 with one warpgroup, got {self.stages}")
        if self.pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {self.pieces}")


def default_config(sequence_heads: int, value_channels: int, chunks: int) -> Config:
    """For B x HV sequences of heads: one kernel where they fill the chip; two with as many blocks as fit it at once."""
    rounds = -(-sequence_heads // MULTIPROCESSORS)
    fused = value_channels <= 2 * VALUES and sequence_heads >= LEAST_BLOCKS * rounds
    blocks = sequence_heads * (value_channels // VALUES)
    if blocks > MULTIPROCESSORS and value_channels % (2 * VALUES) == 0:
        return Config(warpgroups=2, stages=2, fused=fused)
    if fused:
        return Config(fused=True)
    pieces = min(MULTIPROCESSORS // blocks, chunks // LEAST_CHUNKS)
    return Config(pieces=pieces if pieces >= LEAST_PIECES else 1)
