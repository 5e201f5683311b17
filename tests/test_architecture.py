"""Who may import whom, and how long a file may be.

types <- gates, scan, chunk, ... <- pallas_kernels <- (lazily) ops.api <- layers <- models <- experiments <- notebooks
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("kda_jax", "pallas_kernels", "experiments", "notebooks")

# The longest prefix wins; a module may import its own rank and lower ones. The package kda_jax.ops stands for its api.
RANKS = {
    "kda_jax.ops.types": 0,
    "kda_jax.ops.": 1,
    "pallas_kernels": 2,
    "kda_jax.ops": 3,
    "kda_jax.ops.api": 3,
    "kda_jax.ops.decode": 3,
    "kda_jax.ops.grouped_product": 3,
    "kda_jax.ops.latent_attention": 3,
    "kda_jax.ops.states": 3,
    "kda_jax.layers": 4,
    "kda_jax.models": 5,
    "kda_jax": 6,
    "experiments": 7,
    "notebooks": 8,
}
OPS = {"jax", "jaxtyping", "numpy"}
# Third-party packages by rank; experiments and notebooks choose freely.
LIBRARIES = {
    0: OPS,
    1: OPS,
    2: OPS | {"jax_triton", "jaxlib", "triton"},
    3: OPS,
    4: OPS | {"flax"},
    5: OPS | {"flax", "ml_dtypes", "orbax", "safetensors", "tokenizers", "tqdm"},
    6: OPS | {"flax"},
}
BUDGETS = {
    "kda_jax/ops": 200,
    "pallas_kernels": 400,
    "kda_jax/layers": 300,
    "kda_jax/models": 300,
    "tests": 300,
    "experiments/configs": 80,
    "": 300,
}

FILES = [path for package in (*PACKAGES, "tests") for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tests"]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_prefix(table, name):
    return table[max((prefix for prefix in table if name.startswith(prefix)), key=len)]


def imports(tree):
    """(module, imported at module level) of every import statement; `from package import module` names the module."""
    top_level = {
        node
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the layer"
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield (f"{node.module}.{alias.name}" if is_module else node.module), node in top_level


def violations(name, source):
    """What `source`, as module `name`, must not import."""
    rank = longest_prefix(RANKS, name)
    for imported, top_level in imports(ast.parse(source)):
        root = imported.split(".")[0]
        if root in PACKAGES:
            if longest_prefix(RANKS, imported) > rank:
                yield f"{name} imports {imported}, which is above it"
            if root == "pallas_kernels" and rank not in (2, 7, 8) and (rank != 3 or top_level):
                yield f"{name} imports {imported}: only ops.api or ops.decode may, and only inside a function"
        elif root not in sys.stdlib_module_names and root not in LIBRARIES.get(rank, {root}):
            yield f"{name} imports {root}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports(path):
    assert not list(violations(module_name(path), path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_length(path):
    budget = longest_prefix(BUDGETS, path.relative_to(ROOT).as_posix())
    length = len(path.read_text().splitlines())
    assert length <= budget, f"{path.name} has {length} lines of {budget}: split it by meaning"


@pytest.mark.parametrize("package", PACKAGES[:3])
def test_every_directory_of_modules_is_a_package(package):
    """Otherwise an installed copy would lack it."""
    missing = {p.parent for p in (ROOT / package).rglob("*.py") if not (p.parent / "__init__.py").exists()}
    assert not missing


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kda_jax.ops.types", "from kda_jax.ops.gates import Decay"),
        ("kda_jax.ops.chunk", "from kda_jax.ops import api"),
        ("kda_jax.ops.chunk", "import kda_jax"),
        ("kda_jax.ops.chunk", "import flax"),
        ("kda_jax.ops.chunk", "def f():\n    import pallas_kernels.vjp"),
        ("kda_jax.ops.api", "import pallas_kernels.vjp"),
        ("kda_jax.ops.api", "try:\n    from pallas_kernels import vjp\nexcept ImportError:\n    pass"),
        ("kda_jax.layers.kda", "from kda_jax.models import hybrid"),
        ("kda_jax.layers.kda", "def f():\n    import pallas_kernels"),
        ("kda_jax.models.hybrid", "import optax"),
        ("kda_jax.models.hybrid", "from experiments import train"),
        ("pallas_kernels.vjp", "from kda_jax.ops.api import kda"),
        ("pallas_kernels.vjp", "import ml_collections"),
    ],
)
def test_a_forbidden_import_is_found(name, source):
    assert list(violations(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kda_jax.ops.chunk", "import jax.numpy as jnp\nfrom kda_jax.ops.types import State"),
        ("kda_jax.ops.api", "def f():\n    import pallas_kernels.vjp"),
        ("kda_jax.layers.kda", "from flax import nnx\nfrom kda_jax.ops import api"),
        ("pallas_kernels.vjp", "from kda_jax.ops.chunk import kda_chunk"),
        ("experiments.train", "import optax, kda_jax, pallas_kernels"),
    ],
)
def test_an_allowed_import_is_not(name, source):
    assert not list(violations(name, source))
