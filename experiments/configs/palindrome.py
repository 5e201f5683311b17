"""Palindrome: say a random sequence backwards.

    python -m experiments.main --config=experiments/configs/palindrome.py --workdir=runs/palindrome
    python -m experiments.main --config=experiments/configs/palindrome.py:tiny --workdir=runs/palindrome_tiny

Published scale: needs a GPU; not timed yet. The report has KDA and Gated DeltaNet at 100 % of whole sequences at
length 512, Mamba-2 at 0 (figure 4).
Tiny, two layers: about a minute a mixer on two cores; KDA said 0.97 of the tokens at step 400 of 800.
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(name="palindrome", length=512, rows=64, eval_rows=256, symbols=64)


def tiny() -> ConfigDict:
    config = base.tiny(name="palindrome", length=24, rows=32, eval_rows=256, symbols=16)
    config.model.layers = 2
    return config


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
