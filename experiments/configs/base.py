"""What the configs share: the published two-layer model, and a small one for a CPU."""

from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from experiments.errors import ConfigError

MIXERS = "kda,gla,gdn,sgla,mamba2,attention"  # gla and sgla: kda and gdn without the delta rule


def published(**task: object) -> ConfigDict:
    """Two layers, two heads of 128, the rates and steps of Kimi Linear's report (arXiv 2510.26692, section 5.1)."""
    model = {"layers": 2, "width": 256, "heads": 2, "head_dim": 128, "chunk_size": 64, "dtype": "bfloat16"}
    train = {"steps": 20_000, "warmup": 200, "log_every": 100, "eval_every": 500, "checkpoint_every": 1000}
    return _config(task, model, train | {"seeds": (0, 1, 2), "learning_rates": (5e-5, 1e-4, 5e-4, 1e-3)})


def tiny(**task: object) -> ConfigDict:
    """One layer, two heads of 16, one seed, one rate: learns on a CPU. Chunks of 8 compile soonest."""
    model = {"layers": 1, "width": 32, "heads": 2, "head_dim": 16, "chunk_size": 8, "dtype": "float32"}
    train = {"steps": 400, "warmup": 50, "log_every": 25, "eval_every": 50, "checkpoint_every": 100}
    return _config(task, model, train | {"seeds": (0,), "learning_rates": (1e-2,)})


def _config(task: Mapping[str, object], model: Mapping[str, object], train: Mapping[str, object]) -> ConfigDict:
    shared = {"mixer": MIXERS, "decay_init": "published", "rope_theta": 10_000.0}
    return ConfigDict({"task": task, "model": {**shared, **model}, "train": train})


def choose(variant: str, variants: Mapping[str, Callable[[], ConfigDict]]) -> ConfigDict:
    """The variant named after the colon of `--config=FILE.py:VARIANT`."""
    if variant not in variants:
        raise ConfigError(f"--config=...:{variant}: give one of {', '.join(variants)}")
    return variants[variant]()
