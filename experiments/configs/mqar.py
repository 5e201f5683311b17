"""Multi-query associative recall: six mixers, three seeds, four learning rates.

    python -m experiments.main --config=experiments/configs/mqar.py --workdir=runs/mqar [--config.model.mixer=gdn]
    python -m experiments.main --config=experiments/configs/mqar.py:tiny --workdir=runs/mqar_tiny

Published scale: needs a GPU; not timed yet. The report has KDA and Gated DeltaNet at 100 % of whole sequences at
length 512 and Mamba-2 at 0 (figure 4); its vocabulary and batch are not published, these are ours.
Tiny: about half a minute a mixer on two cores; KDA answers 0.98 of the tokens after 500 steps. One layer of full
attention cannot: it has no convolution that ties a value to its key.
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    """Length 512 and every pair asked once; other lengths T in 256..2048 take task.distinct = (T - 1) // 3."""
    return base.published(
        name="recall", length=512, rows=64, eval_rows=256, distinct=170, writes=1, num_keys=1024, num_values=1024
    )


def tiny() -> ConfigDict:
    config = base.tiny(
        name="recall", length=32, rows=32, eval_rows=256, distinct=8, writes=1, num_keys=16, num_values=16
    )
    config.train.steps = 500
    return config


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
