"""Tuning of the kernels: one frozen value, and the default for a shape."""

import dataclasses

MULTIPROCESSORS = 132  # of an H200 or H100 SXM
VALUES = 64  # values a warpgroup of the scan
STAGES = {64: 3, 128: 3, 192: 2, 256: 1}  # by key channels: what shared memory holds with one warpgroup
SHARED_KEYS = 128  # channels of the largest states that two warpgroups have registers for

LEAST_PIECES = 8  # a split costs a second scan, with states of K more columns
LEAST_CHUNKS = 32  # of a piece


@dataclasses.dataclass(frozen=True)
class Config:
    """warpgroups: of the scan's blocks, each with 64 values. stages: chunks a block of the scan holds in shared
    memory. pieces: of a sequence, scanned side by side.
    """

    warpgroups: int = 1
    stages: int = 3
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}")
        if self.stages not in (1, 2, 3) or self.warpgroups + self.stages > 4:  # the shared memory of a multiprocessor
            raise ValueError(f"stages must be 1 or 2, or 3 with one warpgroup, got {self.stages}")
        if self.pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {self.pieces}")


def default_config(sequence_heads: int, key_channels: int, value_channels: int, chunks: int) -> Config:
    """For B x HV sequences of heads: as many blocks as fit the chip at once, and no more."""
    blocks, stages = sequence_heads * (value_channels // VALUES), STAGES[key_channels]
    if blocks > MULTIPROCESSORS and value_channels % (2 * VALUES) == 0 and key_channels <= SHARED_KEYS:
        return Config(warpgroups=2, stages=2)
    pieces = min(MULTIPROCESSORS // blocks, chunks // LEAST_CHUNKS)
    return Config(stages=stages, pieces=pieces if pieces >= LEAST_PIECES else 1)
