"""Tasks by the name a config gives them."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.errors import ConfigError
from experiments.tasks import Task
from experiments.tasks.mqar import Recall
from experiments.tasks.palindrome import Palindrome
from experiments.tasks.stack import Stack
from experiments.tasks.text import Text

TASKS: dict[str, Callable[..., Task]] = {
    "recall": Recall,
    "palindrome": Palindrome,
    "stack": Stack,
    "text": Text.load,
}


def make(config: Mapping[str, Any]) -> Task:
    """The task `config["name"]` with the other entries as its fields."""
    fields = dict(config)
    name = fields.pop("name")
    if name not in TASKS:
        raise ConfigError(f"task.name is {name!r}: give one of {', '.join(TASKS)}")
    try:
        return TASKS[name](**fields)
    except ValueError as error:
        raise ConfigError(str(error)) from error
