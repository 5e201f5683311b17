"""Overwrite recall: every key is written twice, the answer is the last value written; what the delta rule is for.

    python -m experiments.main --config=experiments/configs/overwrite.py --workdir=runs/overwrite
    python -m experiments.main --config=experiments/configs/overwrite.py:tiny --workdir=runs/overwrite_tiny

TIME_OVERWRITE
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(
        name="recall", length=512, rows=64, eval_rows=256, distinct=102, writes=2, keys=1024, values=1024
    )


def tiny() -> ConfigDict:
    return base.tiny(name="recall", length=41, rows=32, eval_rows=256, distinct=8, writes=2, keys=16, values=16)


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
