"""A byte-level language model on the State of the Union, bits a byte on held-out documents.

    python -m experiments.main --config=experiments/configs/text.py --workdir=runs/text
    python -m experiments.main --config=experiments/configs/text.py:tiny --workdir=runs/text_tiny

Published scale: needs a GPU; not timed yet. A model has to beat about 1.5 bits a byte, a smoothed 5-gram's.
Tiny: about half a minute a mixer on two cores; KDA needs 2.4 bits a byte after 300 steps.
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(name="text", length=2048, rows=16, eval_length=8192)


def tiny() -> ConfigDict:
    config = base.tiny(name="text", length=128, rows=8, eval_length=512)
    config.model.width = 64
    config.model.head_dim = 32
    config.train.steps = 300
    config.train.learning_rates = (6e-3,)
    return config


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
