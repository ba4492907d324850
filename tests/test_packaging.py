"""Guards for what a broken package would not show by itself: see the comment at each test."""

import os
import shutil
import statistics
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = ("transformers", "gguf", "safetensors", "deep_gemm", "cutlass", "triton")


def setuptools_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def modules_on_disk() -> dict[str, Path]:
    """Dotted name -> file, for every Python file below the folders of package-dir."""
    modules = {}
    for package, folder in setuptools_table()["package-dir"].items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((package, *parts))] = file
    return modules


def run_python(code: str, cwd: Path) -> str:
    """Run code in a fresh interpreter whose sys.path[0] is cwd, as under `python -m pytest`."""
    # Byte code may be written: without it, the import test would time Python's parser.
    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_folder_with_code_is_a_listed_package():
    # setuptools leaves out a folder that is not in `packages` without a word.
    folders = {file.parent for file in modules_on_disk().values()}
    without_init = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert without_init == []
    found = {
        name.removesuffix(".__init__") for name in modules_on_disk() if name.endswith(".__init__")
    }
    assert found == set(setuptools_table()["packages"])


def test_import_at_the_checkout_root_finds_the_top_level_folders():
    # At the root, the folder compile_ext/ is itself importable and has no ops/ inside; and a
    # plain `import ops` anywhere in the package would load every op a second time.
    code = """
import sys
import compile_ext, compile_ext.ops, compile_ext.passes
print(sorted({"ops", "passes"} & set(sys.modules)))
print(compile_ext.__file__, compile_ext.ops.__file__, compile_ext.passes.__file__)
"""
    second_copies, files = run_python(code, ROOT).splitlines()
    assert second_copies == "[]"
    want = [ROOT / folder / "__init__.py" for folder in ("compile_ext", "ops", "passes")]
    assert files.split() == [str(file) for file in want]


def test_torch_finds_the_backend_from_any_folder(tmp_path):
    code = """
import torch
print("compile_ext" in torch.compiler.list_backends())
from torch._dynamo.backends.registry import lookup_backend
print(callable(lookup_backend("compile_ext")))
"""
    assert run_python(code, tmp_path).split() == ["True", "True"]


def test_console_script_is_declared():
    (script,) = entry_points(group="console_scripts", name="compile-ext")
    assert callable(script.load())


def test_a_missing_extra_is_not_an_import_error(tmp_path):
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
import compile_ext, compile_ext.ops, compile_ext.passes, compile_ext.backend, compile_ext.cli
"""
    run_python(code, tmp_path)


@pytest.mark.slow
def test_wheel_holds_every_module_the_kernel_tables_the_script_and_the_typing_marker(tmp_path):
    # Built from a copy: an old build/ folder in the checkout would end up in the wheel.
    source = tmp_path / "source"
    sources = [file.relative_to(ROOT) for file in modules_on_disk().values()]
    marker = Path("compile_ext", "py.typed")
    tables = [file.relative_to(ROOT) for file in (ROOT / "ops" / "kernel_tables").iterdir()]
    script = Path("ops", "deep_gemm_nvcc.sh")
    for file in [
        *sources,
        *tables,
        marker,
        script,
        Path("pyproject.toml"),
        Path("README.md"),
        Path("LICENSE"),
    ]:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)  # with its mode
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    infos = {x.filename: x for x in zipfile.ZipFile(wheel).infolist()}
    shipped = {name for name in infos if ".dist-info/" not in name}
    modules = {name.replace(".", "/") + ".py" for name in modules_on_disk()}
    data = {f"compile_ext/{file.as_posix()}" for file in [*tables, script]}
    assert shipped == modules | data | {marker.as_posix()}
    # DeepGEMM starts it: the low bits of the mode are those of its owner, group and others.
    assert infos[f"compile_ext/{script.as_posix()}"].external_attr >> 16 & 0o111 == 0o111


@pytest.mark.slow
def test_import_costs_little_more_than_torch(tmp_path):
    # Limit 0.3 s. Timed after `import torch`, whose own time varies by more than that.
    code = """
import time, torch
start = time.perf_counter()
import compile_ext
print(time.perf_counter() - start)
"""
    seconds = [float(run_python(code, tmp_path)) for _ in range(5)]
    assert statistics.median(seconds) < 0.3, seconds
