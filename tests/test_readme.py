"""The README's examples run as they stand."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README.read_text(), re.DOTALL))


@pytest.mark.parametrize("name", ["nnx", "linen", "operator", "models"])
def test_example_runs(name):
    scope: dict = {}
    exec(compile(EXAMPLES[name], f"README.md ({name})", "exec"), scope)
    for result in ("y", "y1", "logits", "o", "o1", "state"):
        assert result not in scope or bool(jnp.isfinite(scope[result]).all()), result
    for tokens in scope.get("tokens", ()):
        assert len(tokens) == 4
        assert all(0 <= token < 256 for token in tokens)
