"""Palindrome: say a random sequence backwards.

    python -m experiments.main --config=experiments/configs/palindrome.py --workdir=runs/palindrome
    python -m experiments.main --config=experiments/configs/palindrome.py:tiny --workdir=runs/palindrome_tiny

TIME_PALINDROME
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(name="palindrome", length=512, rows=64, eval_rows=256, symbols=64)


def tiny() -> ConfigDict:
    return base.tiny(name="palindrome", length=32, rows=32, eval_rows=256, symbols=24)


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
