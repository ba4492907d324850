"""The examples run, and the README shows what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def output_of(program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program)],
        cwd=folder,  # not the checkout: users are elsewhere
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    lines = output_of("quickstart.py", tmp_path).stdout.splitlines()
    shown = "\n".join(line.rstrip() for line in lines)
    readme = (ROOT / "README.md").read_text()
    assert f"```\n{shown}\n```" in readme
    code = (ROOT / "examples" / "quickstart.py").read_text().split('"""\n', 1)[1].strip()
    assert f"```python\n{code}\n```" in readme


@pytest.mark.slow
def test_own_op_and_the_log(tmp_path: Path) -> None:
    # TORCH_LOGS is read while torch is imported, before anything of ours is.
    done = output_of("own_op.py", tmp_path, TORCH_LOGS="+compile_ext", TORCH_TRACE=str(tmp_path))
    assert "* fold_weight_padding: N 30 -> 32: w padded" in done.stdout
    assert "* strip_placeholder_fills: scale is not read: None" in done.stdout
    logged = [line for line in done.stderr.splitlines() if "mylib::gemm(" in line]
    assert ".new_ones" in done.stderr
    assert "None, False)" in logged[-1]
    trace = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert '"name": "compile_ext_after_strip_placeholder_fills"' in trace
