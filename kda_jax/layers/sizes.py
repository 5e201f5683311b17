"""The check that every config makes of its sizes."""

import numbers
from collections.abc import Collection, Mapping


def check_sizes(config: object, least: Mapping[str, int], optional: Collection[str] = ()) -> None:
    """Raises ValueError unless each field of `least` is an integer of at least so much; the optional ones may be None.

    A bool is no integer here: it would count as 0 or 1. NumPy's integers become Python's, which JSON can hold.
    """
    for name, smallest in least.items():
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < smallest:
            field = f"{type(config).__name__}.{name}"
            raise ValueError(f"{field} must be an integer of at least {smallest}, got {value!r}")
        object.__setattr__(config, name, int(value))
