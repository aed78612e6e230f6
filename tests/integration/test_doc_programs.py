"""The programs in the documentation train, each in one process with real TensorFlow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.tensorflow


def write_program(page: str, folder: Path) -> Path:
    """Write the one program of a page to a file."""
    text = (ROOT / page).read_text("utf-8")
    ((name, program),) = re.findall(
        r"^```python program=\S*?([^/\s]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    path = folder / name
    path.write_text(program, "utf-8")
    return path


def run_local(program: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tfps_runtime", "run", str(program), "--local", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout[done.stdout.index("{\n") :])


def test_readmes_program_finds_the_line(tmp_path):
    """The smallest program, run as the README says, finds y = 2x + 10."""
    result = run_local(write_program("README.md", tmp_path), "--steps", "300", "--seed", "1")
    assert result["global_step"] == 300
    assert abs(result["metrics"]["weight"] - 2) < 0.1
    assert abs(result["metrics"]["bias"] - 10) < 0.2


def test_jobs_pages_program_reads_digits(tmp_path):
    """The program of the page about jobs learns real digits that it has not seen."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    for name, rows in {"train": order[:1437], "eval": order[1437:]}.items():
        np.savez(tmp_path / f"{name}.npz", x=images[rows] / 16, y=digits[rows])
    program = write_program("docs/jobs.md", tmp_path)
    arguments = ["--steps", "200", "--hparam", "learning_rate=0.5", "--input", f"train={tmp_path}"]
    result = run_local(program, *arguments, "--seed", "1")
    assert result["global_step"] == 200
    assert result["metrics"]["accuracy"] > 0.85
