"""Stack: follow 64 last-in-first-out stacks at once.

    python -m experiments.main --config=experiments/configs/stack.py --workdir=runs/stack
    python -m experiments.main --config=experiments/configs/stack.py:tiny --workdir=runs/stack_tiny

Published scale: needs a GPU; not timed yet. The report has KDA, Gated DeltaNet and Mamba-2 at 100 % at length 512
(figure 4).
Tiny: about half a minute a mixer on two cores; KDA pops 0.97 of the elements after 400 steps.
"""

from ml_collections import ConfigDict

from experiments.configs import base


def published() -> ConfigDict:
    return base.published(name="stack", length=512, rows=64, eval_rows=256, stacks=64, symbols=64)


def tiny() -> ConfigDict:
    return base.tiny(name="stack", length=48, rows=32, eval_rows=256, stacks=4, symbols=16)


def get_config(variant: str = "published") -> ConfigDict:
    return base.choose(variant, {"published": published, "tiny": tiny})
