"""The compiler's report on every kernel for an H200, where its wheels and the tool that asks for it are installed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOOL = TESTS.parent.parent / "shared" / "tools" / "aot_h200.py"
SPILLED = {"grouped": 800}  # bytes at most: JAX's grouped product keeps the sizes of all groups
# Kernels whose products are wgmma's.
TENSOR_CORES = ("prepare", "scan", "overlapped", "fused", "backward", "latents", "grouped")


@pytest.mark.skipif(
    not TOOL.exists() or importlib.util.find_spec("jax_cuda13_plugin") is None or shutil.which("ptxas") is None,
    reason="needs the ahead-of-time tool, jax-cuda13-plugin and ptxas",
)
def test_registers_and_instructions():
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, str(TOOL), "aot_cases:cases"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    reports = re.split(r"^(?=\S.*: compiled in )", run.stdout, flags=re.MULTILINE)[1:]
    assert len(reports) > 30
    for report in reports:
        name = report.split(": compiled")[0]
        allowed = max([bytes for start, bytes in SPILLED.items() if name.startswith(start)], default=0)
        spilled = [int(x) for x in re.findall(r"\d+", re.search(r"spill bytes \[(.*?)\]", report)[1])]
        assert max(spilled) <= allowed, report
        assert "wgmma" in report or not name.startswith(TENSOR_CORES), report
