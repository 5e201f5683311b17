"""Overwrite recall: every key is written twice, the answer is the last value written; what the delta rule is for.

    python -m experiments.main --config=experiments/configs/overwrite.py --workdir=runs/overwrite
    python -m experiments.main --config=experiments/configs/overwrite.py:tiny --workdir=runs/overwrite_tiny

Published scale: needs a GPU; not timed yet.
Tiny: about half a minute a mixer on two cores; after 400 steps KDA and Gated DeltaNet answer 1.00 of the tokens, KDA
without the delta rule 0.88.
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(
        name="recall", length=512, rows=64, eval_rows=256, distinct=102, writes=2, num_keys=1024, num_values=1024
    )


def tiny() -> ConfigDict:
    return base.tiny(name="recall", length=41, rows=32, eval_rows=256, distinct=8, writes=2, num_keys=16, num_values=16)


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
