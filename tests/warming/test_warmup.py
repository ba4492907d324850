"""``compile_ext.warmup``, its report and its certificate, with an op of another package."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_jit
import fake_jit_op
import pytest
import torch
from expecttest import assert_expected_inline
from forks import Fork
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import compile_ext
from compile_ext.cli import app
from compile_ext.manifest import NotCovered
from compile_ext.ops import triton_support
from compile_ext.ops.device import Target
from compile_ext.ops.errors import (
    ArgumentError,
    CacheFolderError,
    CertificateError,
    WarmupError,
)
from compile_ext.warming import Certificate, WarmupReport, certificate, target_named
from compile_ext.warming.capacity import capacity, free_host_bytes, usable_cores

TARGET = Target((9, 0), "NVIDIA H200")


@pytest.fixture(autouse=True)
def _known(folder: Path, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "_COMPILERS", {"fake": fake_jit.FAKE})


def warmup(*ns: int, **options: Any) -> WarmupReport:
    options = {"target": TARGET, "progress": False, "jobs": 1, **options}
    return compile_ext.warmup(fake_jit_op.manifest(*ns), **options)


def test_a_manifest_is_warmed(folder: Path):
    report = warmup(32, 64, max_tokens=2)
    assert report.counts == {"compiled": 4, "cached": 0, "failed": 0, "skipped": 0}
    # Few tokens first: they are the hot ones.
    assert fake_jit.compiled() == ["n32-m1", "n64-m1", "n32-m2", "n64-m2"]
    assert report.modules["n64-m2"] == ("layers.64.proj",)
    assert (report.jobs, report.bound_by) == (1, "jobs=1")
    assert report.folders == {"fake": folder / "cache"}
    assert report.loaded_on is None  # no GPU here
    again = warmup(32, 64)
    assert again.counts == {"compiled": 2, "cached": 4, "failed": 0, "skipped": 0}
    units = again.to_dict()["units"]
    assert json.loads(json.dumps(units)) == units
    assert units[0] == {
        "compiler": "fake",
        "kernel": "plain",
        "key": "n32-m1",
        "status": "cached",
        "seconds": 0.0,
        "reason": "",
        "modules": ["layers.32.proj"],
    }


def test_a_failure_is_told_and_fatal_if_strict():
    report = warmup(666, 32, max_tokens=1)
    assert report.counts == {"compiled": 1, "cached": 0, "failed": 1, "skipped": 0}
    with pytest.raises(WarmupError, match=r"1 of 2 kernels and graphs not compiled .* refuses"):
        warmup(666, 32, max_tokens=1, strict=True)


def test_the_report_is_a_table():
    report = warmup(666, 32, max_tokens=1)
    for result in report.results:
        object.__setattr__(result, "seconds", 1.5)
    object.__setattr__(report, "seconds", 2.0)
    lines = "\n".join(line.rstrip() for line in str(report).splitlines())
    assert_expected_inline(
        lines,
        """\
2 kernels of 2 sites for NVIDIA H200: 1 compiled, 0 cached, 1 failed, 0 skipped; 2.0 s
1 worker (jobs=1)
slowest first
+----------+----------+--------+-------------------------------+-----+----------------+--------+
| status   | compiler | kernel | first call                    |   s | modules        | reason |
+----------+----------+--------+-------------------------------+-----+----------------+--------+
| compiled | fake     | plain  | fake_jit::gemm 32 x 16, M = 1 | 1.5 | layers.32.proj |        |
+----------+----------+--------+-------------------------------+-----+----------------+--------+
not compiled
+--------+----------+--------+--------------------------------+-----+-----------------+-----------------------------------------+
| status | compiler | kernel | first call                     |   s | modules         | reason                                  |
+--------+----------+--------+--------------------------------+-----+-----------------+-----------------------------------------+
| failed | fake     | fail   | fake_jit::gemm 666 x 16, M = 1 | 1.5 | layers.666.proj | RuntimeError: the fake compiler refuses |
+--------+----------+--------+--------------------------------+-----+-----------------+-----------------------------------------+""",  # noqa: E501
    )


def test_without_a_gpu_and_a_target_nothing_is_compiled():
    with pytest.warns(UserWarning, match="there is no GPU here, and no target was named"):
        report = warmup(32, target=None)
    assert report.results == ()
    with pytest.raises(CertificateError, match="a warmup without a target"):
        report.certificate()


def test_sites_without_a_kernel_are_a_warning():
    with pytest.warns(UserWarning, match="none of the 1 sites needs a kernel that is compiled"):
        report = warmup(fake_jit_op.COMPILES_NOTHING)
    assert report.results == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"max_tokens": 2**21},  # a plan that takes hours
        {"jobs": 0},
        {"jobs": 1.5},
        {"budget_seconds": float("nan")},
        {"budget_seconds": "5"},
        {"target": "H200"},
        {"cache_dir": 5},
        {"batch_sizes": 5},
        {"batch_sizes": "12"},
        {"batch_sizes": (0,)},
        {"inputs": torch.zeros(1)},
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        warmup(32, **wrong)


@pytest.mark.parametrize("wrong", [None, "m.json", Path("m.json")])
def test_a_path_is_no_manifest(wrong: Any):
    with pytest.raises(ArgumentError, match="wanted a compiled model or a Manifest"):
        compile_ext.warmup(wrong)


@pytest.mark.parametrize("name", ["file", "link", "a\0b", "x" * 300, "\udcff"])
def test_a_cache_folder_that_cannot_be_is_refused(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = dict(os.environ)
    with pytest.raises(CacheFolderError, match="a folder that is there or can be made"):
        warmup(32, cache_dir=tmp_path / name)
    assert dict(os.environ) == before


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a cache folder sets is as before after the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("variables")
def test_a_cache_folder_holds_all(tmp_path: Path):
    os.environ["COMPILE_EXT_CACHE_DIR"] = str(tmp_path / "user")
    table = tmp_path / "user" / "kernel_tables" / "sm_90.json"
    table.parent.mkdir(parents=True)
    table.write_text("measured")
    warmup(32, cache_dir=tmp_path / "all")
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/all/triton"
    assert os.environ["DG_JIT_CACHE_DIR"] == f"{tmp_path}/all/deep_gemm"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/all/inductor"
    copied = tmp_path / "all" / "compile_ext" / "kernel_tables" / "sm_90.json"
    assert copied.read_text() == "measured"


@pytest.mark.usefixtures("variables")
def test_a_cache_folder_that_comes_too_late_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "deep_gemm", torch)
    with pytest.raises(CacheFolderError, match="start the process with DG_JIT_CACHE_DIR="):
        warmup(32, cache_dir=tmp_path)
    assert os.environ.get("TRITON_CACHE_DIR") != f"{tmp_path}/triton"  # nothing has changed
    os.environ["DG_JIT_CACHE_DIR"] = f"{tmp_path}/deep_gemm"
    assert warmup(32, cache_dir=tmp_path).counts["failed"] == 0


@pytest.mark.usefixtures("variables")
def test_a_thread_waits_for_the_cache_folder_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def folder(self: Any) -> Path:
        return Path(os.environ["TRITON_CACHE_DIR"])

    monkeypatch.setattr(fake_jit.FakeJit, "folder", folder)
    # Long enough that both would have named their folder by then.
    monkeypatch.setattr(triton_support, "keep_cache_folder", lambda: time.sleep(0.3))
    with ThreadPoolExecutor(2) as threads:
        reports = threads.map(lambda n: warmup(n, cache_dir=tmp_path / str(n)), (32, 64))
        folders = [report.folders["fake"] for report in reports]
    assert folders == [tmp_path / "32" / "triton", tmp_path / "64" / "triton"]


@pytest.mark.usefixtures("variables")
def test_a_budget_is_spent_while_another_thread_warms_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    begun, release = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        release.wait(20)

    monkeypatch.setattr(triton_support, "keep_cache_folder", hold)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(warmup, 32, cache_dir=tmp_path)
        assert begun.wait(20)
        monkeypatch.setattr(triton_support, "keep_cache_folder", lambda: None)
        assert warmup(128).counts["compiled"] == 3  # names no folder: does not wait
        threading.Timer(0.3, release.set).start()
        second = warmup(64, budget_seconds=0.1, progress=True, cache_dir=tmp_path)
    assert first.result().counts["compiled"] == 3
    assert second.counts["skipped"] == 3
    assert "waiting for the warmup of another thread" in capfd.readouterr().err


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not_got(folder: Path):
    lock = sys.modules["compile_ext.warming.warmup"].__dict__["_FOLDER"]
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    child = Fork(lambda: warmup(32, cache_dir=folder).counts, folder / "result.json")
    assert child.result()["compiled"] == 3
    release.set()
    thread.join()


def test_a_certificate_holds_until_something_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    warmup(32, 666).certificate().save(tmp_path / "c.json")
    certified = Certificate.load(tmp_path / "c.json")
    assert [x.keys for x in certified.sites] == [
        ("n32-m1", "n32-m2", "n32-m3"),
        ("n666-m1", "n666-m2", "n666-m3"),
    ]
    assert [x.split(")")[0] for x in certified.problems()] == [
        f"fake fail (n666-m{m}" for m in (1, 2, 3)
    ]
    warmup(32).certificate().save(tmp_path / "c.json")
    certified = Certificate.load(tmp_path / "c.json")
    assert list(certified.problems()) == []
    kernels = folder / "cache"
    (kernels / "kernel.n32-m1" / "kernel.bin").write_bytes(b"short")
    certificate.Store(fake_jit.FAKE, kernels)._path("n32-m2").unlink()
    monkeypatch.setattr(certificate, "versions", lambda: {**certified.versions, "torch": "9.9"})
    monkeypatch.setattr(certificate, "target_here", lambda: Target((9, 0), "NVIDIA H20", 78))
    assert list(certified.problems()) == [
        "GPU: NVIDIA H20 with 78 multiprocessors, certified for NVIDIA H200 with 132",
        f"torch: 9.9 here, certified with {torch.__version__}",
        f"fake plain (n32-m1): damaged in {kernels}:"
        " kernel.n32-m1/kernel.bin is not what was compiled",
        f"fake plain (n32-m2): missing in {kernels}",
    ]


@pytest.fixture(scope="module")
def certificate_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("certificate") / "c.json"
    plain = certificate.CertifiedUnit("fake", "plain", "n32-m1", "0" * 64, "")
    site = certificate.CertifiedSite("op", 32, 16, (1, None), ("layers.32",), ("n32-m1",))
    left = NotCovered("other", ("layers.33",), "no contract")
    given = {"torch": "2"}, {"fake": "/x"}
    Certificate("sm_90", "", 132, *given, (plain,), (site,), (left,)).save(path)
    return path.read_text()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_certificate_is_refused_or_says_the_same(
    data: st.DataObject, certificate_text: str, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(certificate_text)
    original = Certificate.load(path)
    start = data.draw(st.integers(0, len(certificate_text)))
    end = data.draw(st.integers(start, min(len(certificate_text), start + 20)))
    inserted = data.draw(st.binary(max_size=8))
    content = certificate_text.encode()
    path.write_bytes(content[:start] + inserted + content[end:])
    try:
        loaded = Certificate.load(path)
    except CertificateError:
        return
    assert loaded == original


@pytest.mark.usefixtures("variables")
def test_the_command_warms_and_verifies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_jit_op.manifest(32).save(tmp_path / "m.json")
    saved, cache = str(tmp_path / "c.json"), ["--cache-dir", str(tmp_path / "cache")]

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, " ".join(done.output.split())

    options = ["--target", "H200", "--import", "fake_jit_op", *cache]
    code, said = run("warmup", str(tmp_path / "m.json"), *options, "--certificate", saved)
    assert code == 0
    assert "3 kernels of 1 site for NVIDIA H200: 3 compiled" in said
    assert run("verify", saved, *cache) == (0, "3 kernels are as certified")
    (folder / "cache" / "kernel.n32-m1" / "kernel.bin").write_bytes(b"short")
    code, said = run("verify", saved, *cache)
    assert code == 1
    assert "fake plain (n32-m1): damaged in" in said
    assert run("verify", saved, "--cache-dir", str(tmp_path / "none"))[0] == 1
    assert not (tmp_path / "none").exists()  # it only looks
    (tmp_path / "raises.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="no GPU here"):
        assert run("warmup", str(tmp_path / "m.json"))[0] == 1
    for arguments in (
        ["warmup", saved, "--target", "sm_90"],
        ["warmup", str(tmp_path / "m.json"), "--target", "GTX"],
        ["warmup", str(tmp_path / "m.json"), "--target", "sm_90", "--import", "no.such_module"],
        ["warmup", str(tmp_path / "m.json"), "--target", "sm_90", "--import", "raises"],
        ["warmup", str(tmp_path / "m.json"), "--target", "sm_90", "--import", ""],
        ["warmup", str(tmp_path / "m.json"), "--target", "sm_90", "--max-tokens", "0"],
        ["verify", str(tmp_path / "m.json")],
    ):
        code, said = run(*arguments)
        assert code == 1
        assert "; wanted " in said
        assert "; fix: " in said


def test_targets_have_names():
    assert target_named("sm_90") == Target((9, 0))
    assert target_named("sm_120") == Target((12, 0))
    assert target_named("h200") == TARGET
    for slip in ("sm_10", "sm_61", "sm_9", "", "GPU"):
        with pytest.raises(ArgumentError, match="wanted an architecture from sm_70, such as sm_90"):
            target_named(slip)


def test_what_bounds_the_number_of_workers(monkeypatch: pytest.MonkeyPatch):
    units = [fake_jit.unit(key) for key in "abcdef"]
    here = "compile_ext.warming.capacity"
    monkeypatch.setattr(f"{here}.usable_cores", lambda: 4)
    monkeypatch.setattr(f"{here}.free_host_bytes", lambda: 64e9)
    assert (capacity(units, None).jobs, capacity(units, None).bound_by) == (4, "4 cores")
    assert (capacity(units[:2], None).jobs, capacity(units[:2], None).bound_by) == (2, "2 units")
    assert (capacity(units, 3).jobs, capacity(units, 3).bound_by) == (3, "jobs=3")
    monkeypatch.setattr(f"{here}.free_host_bytes", lambda: 3.2e9)
    bound = capacity(units, None)
    assert (bound.jobs, bound.bound_by) == (2, "3.2 GB of free host memory")
    monkeypatch.setattr(f"{here}.free_host_bytes", lambda: 0.0)
    assert capacity(units, None).jobs == 1


def test_a_container_has_what_its_cgroup_allows(monkeypatch: pytest.MonkeyPatch):
    files = {
        "cpu.max": "150000 100000",
        "memory.max": "3000000000",
        "memory.current": "2500000000",
        "memory.stat": "anon 1000000000\ninactive_file 1500000000",
    }
    monkeypatch.setattr("compile_ext.warming.capacity._read", lambda name: files.get(name, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert usable_cores() == 2  # 1.5, rounded up
    assert free_host_bytes() == 2e9
