"""Tuning of the kernels: one frozen value, and the default for a shape."""

import dataclasses
from typing import Literal

MULTIPROCESSORS = 132  # of an H200 or H100 SXM
VALUES = 64  # values a warpgroup of the scan
STAGES = {64: 3, 128: 3, 192: 2, 256: 1}  # by key channels: what shared memory holds with one warpgroup
SHARED_KEYS = 128  # channels of the largest states that two warpgroups have registers for, and one kernel shared memory
ROUTES = ("apart", "overlapped", "fused")

LEAST_BLOCKS = 80  # on a full chip, for one kernel: its blocks take a chunk 6 us, two kernels at least 0.076
LEAST_PIECES = 8  # a split costs a second scan, with states of K more columns
LEAST_CHUNKS = 32  # of a piece
SCAN_BLOCKS = 64  # at most, of a scan that waits for `prepare` on the same chip
OVERLAPPED_CHUNKS = 8  # at least: fewer leave little to overlap
SHARED_VALUES = 128  # channels of one kernel at most: with more a block of it or of `prepare` fills a multiprocessor


@dataclasses.dataclass(frozen=True)
class Config:
    """warpgroups: of the scan's blocks, each with 64 values. stages: chunks a block of the scan holds in shared
    memory. pieces: of a sequence, scanned side by side.

    route: of rows of the batch; packed rows, pieces and states after chunks always go "apart", by `prepare`, then
    `scan`. "overlapped" is both in one kernel; warpgroups and stages do not matter then, and B HV V / 64 must be at
    most `SCAN_BLOCKS`. "fused" is one kernel of its own, for V <= 128. Both take at most `SHARED_KEYS` key channels.
    """

    warpgroups: int = 1
    stages: int = 3
    pieces: int = 1
    route: Literal["apart", "overlapped", "fused"] = "apart"

    def __post_init__(self) -> None:
        for name in ("warpgroups", "stages", "pieces"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}")
        if self.stages not in (1, 2, 3) or self.warpgroups + self.stages > 4:  # the shared memory of a multiprocessor
            raise ValueError(f"stages must be 1 or 2, or 3 with one warpgroup, got {self.stages}")
        if self.pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {self.pieces}")
        if self.route not in ROUTES:
            raise ValueError(f"route must be one of {ROUTES}, got {self.route!r}")
        if self.route != "apart" and self.pieces > 1:
            raise ValueError(f"pieces must be 1 with route {self.route!r}, got {self.pieces}")

    def check(self, key_channels: int, value_channels: int) -> None:
        """Raises a ValueError where the kernels of these channels cannot be tuned so."""
        narrow = key_channels <= SHARED_KEYS and value_channels <= SHARED_VALUES
        if self.route != "apart" and not narrow:
            raise ValueError(
                f"route {self.route!r} takes at most {SHARED_KEYS} key and {SHARED_VALUES} value channels, got "
                f"{key_channels} and {value_channels}"
            )
        if self.warpgroups > 1 and (key_channels > SHARED_KEYS or value_channels % (2 * VALUES)):
            raise ValueError(
                f"two warpgroups take at most {SHARED_KEYS} key channels and a multiple of {2 * VALUES} value "
                f"channels, got {key_channels} and {value_channels}"
            )
        if self.stages > STAGES[key_channels]:
            raise ValueError(
                f"stages must be at most {STAGES[key_channels]} with {key_channels} key channels, got {self.stages}"
            )


def default_config(sequence_heads: int, key_channels: int, value_channels: int, chunks: int) -> Config:
    """For B x HV sequences of heads: one kernel where they fill the chip; else as many blocks of the scan as fit it at
    once, with `prepare` beside them where they leave half of it idle.
    """
    narrow, stages = key_channels <= SHARED_KEYS, STAGES[key_channels]
    rounds = -(-sequence_heads // MULTIPROCESSORS)
    fused = narrow and value_channels <= SHARED_VALUES and sequence_heads >= LEAST_BLOCKS * rounds
    blocks = sequence_heads * (value_channels // VALUES)
    if narrow and blocks > MULTIPROCESSORS and value_channels % (2 * VALUES) == 0:
        return Config(warpgroups=2, stages=2, route="fused" if fused else "apart")
    if fused:
        return Config(route="fused")
    pieces = min(MULTIPROCESSORS // blocks, chunks // LEAST_CHUNKS)
    if pieces >= LEAST_PIECES:
        return Config(stages=stages, pieces=pieces)
    small = narrow and blocks <= SCAN_BLOCKS and value_channels <= SHARED_VALUES
    overlapped = small and chunks >= OVERLAPPED_CHUNKS
    return Config(stages=stages, route="overlapped" if overlapped else "apart")
