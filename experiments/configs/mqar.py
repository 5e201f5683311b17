"""Multi-query associative recall: six mixers, three seeds, four learning rates.

    python -m experiments.main --config=experiments/configs/mqar.py --workdir=runs/mqar [--config.model.mixer=gdn]
    python -m experiments.main --config=experiments/configs/mqar.py:tiny --workdir=runs/mqar_tiny

TIME_MQAR
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    """Length 512 and every pair asked once; other lengths T in 256..2048 take task.distinct = (T - 1) // 3."""
    return base.published(
        name="recall", length=512, rows=64, eval_rows=256, distinct=170, writes=1, keys=1024, values=1024
    )


def tiny() -> ConfigDict:
    return base.tiny(name="recall", length=40, rows=32, eval_rows=256, distinct=10, writes=1, keys=16, values=16)


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
