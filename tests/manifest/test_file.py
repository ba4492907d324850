"""The file format: readable, equal after a round trip, and what is no manifest is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import compile_ext
from compile_ext.manifest import Manifest, ManifestSite, NotCovered
from compile_ext.manifest.file import from_text, to_text
from compile_ext.ops.call_site import CallSite, SizeValue, TensorForm
from compile_ext.ops.errors import ManifestError

GEMM = CallSite(
    "compile_ext::block_scaled_mm.default",
    (2, None),
    (
        ("a", TensorForm("float8_e4m3fn", ("M", 7168), (7168, 1))),
        ("b", TensorForm("float8_e4m3fn", (576, 7168), (7168, 1))),
        ("scale_a", TensorForm("float32", ("M", 56), (1, "4*((M + 3)//4)"))),
        ("scale_b", TensorForm("float32", (5, 56), (56, 1))),
        ("bias", None),
        ("out_dtype", torch.bfloat16),
        ("prefetch", False),
        ("pinned", None),
    ),
    n=576,
    k=7168,
)
FOREIGN = CallSite(
    "not_here::gemm.out",
    (1, 1),
    (
        ("x", TensorForm("bfloat16", (1, 64), (64, 1), 3)),
        ("sizes", (SizeValue("M"), 3, (True, "text"))),
        ("eps", 1e-6),
    ),
)
MANIFEST = Manifest(
    (
        ManifestSite(GEMM, ("layers.0.kv_a_proj", "layers.1.kv_a_proj")),
        ManifestSite(FOREIGN, ("head",)),
    ),
    (NotCovered("vllm::gemm", ("layers.0.mlp",), "it has no contract"),),
)
TEXT = to_text(MANIFEST)


def test_text() -> None:
    assert_expected_inline(
        TEXT,
        """\
{
 "format": "compile_ext manifest",
 "version": 1,
 "package": "0.1.0",
 "sites": [
  {
   "op": "compile_ext::block_scaled_mm.default",
   "n": 576,
   "k": 7168,
   "m": [2, null],
   "modules": ["layers.0.kv_a_proj", "layers.1.kv_a_proj"],
   "arguments": {
    "a": {"dtype": "float8_e4m3fn", "shape": ["M", 7168], "strides": [7168, 1]},
    "b": {"dtype": "float8_e4m3fn", "shape": [576, 7168], "strides": [7168, 1]},
    "scale_a": {"dtype": "float32", "shape": ["M", 56], "strides": [1, "4*((M + 3)//4)"]},
    "scale_b": {"dtype": "float32", "shape": [5, 56], "strides": [56, 1]},
    "bias": null,
    "out_dtype": {"torch": "bfloat16"},
    "prefetch": false,
    "pinned": null
   }
  },
  {
   "op": "not_here::gemm.out",
   "n": null,
   "k": null,
   "m": [1, 1],
   "modules": ["head"],
   "arguments": {
    "x": {"dtype": "bfloat16", "shape": [1, 64], "strides": [64, 1], "offset": 3},
    "sizes": [{"size": "M"}, 3, [true, "text"]],
    "eps": 1e-06
   }
  }
 ],
 "not_covered": [{"op": "vllm::gemm", "modules": ["layers.0.mlp"], "reason": "it has no contract"}]
}
""",
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "manifest.json"
    MANIFEST.save(path)
    assert Manifest.load(str(path)) == MANIFEST
    MANIFEST.save(path)  # in the place of the first
    assert path.read_text() == TEXT
    assert os.listdir(path.parent) == ["manifest.json"]
    assert from_text(to_text(Manifest()), "-") == Manifest()


def test_equal_contents_give_equal_bytes() -> None:
    (first, second), (missing,) = MANIFEST.sites, MANIFEST.not_covered
    parts = [ManifestSite(GEMM, (m,)) for m in reversed(first.modules)] + [second, first]
    assert {first.call, second.call} == {GEMM, FOREIGN}
    assert to_text(Manifest((*parts, ManifestSite(FOREIGN, ("head",))), (missing,) * 2)) == TEXT


def test_merge_and_order() -> None:
    sites = [Manifest((site,)) for site in MANIFEST.sites]
    missing = Manifest((), MANIFEST.not_covered)
    assert sites[1].merge(missing, sites[0], sites[1]) == MANIFEST
    assert Manifest().merge() == Manifest()
    many = [f"layers.{i}.o_proj" for i in (10, 9, 100, 2)]
    (site,) = Manifest(tuple(ManifestSite(GEMM, (m,)) for m in many)).sites
    assert site.modules == tuple(f"layers.{i}.o_proj" for i in (2, 9, 10, 100))


def changed(*path: Any, value: Any) -> str:
    """The text, with another value (or none: ``...``) at a path."""
    content = json.loads(TEXT)
    at = content
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(content)


def with_argument(name: str, value: Any) -> str:
    return changed("sites", 0, "arguments", name, value=value)


A = {"dtype": "float8_e4m3fn", "shape": ["M", 7168], "strides": [7168, 1]}
FAULTS = {
    "empty": ("", "Expecting value"),
    "no JSON": (TEXT[:-20], r"Expecting|Unterminated"),
    "no object": ("[]", r"the file = \[\]; wanted a JSON object"),
    "nested": ("[" * 100_000, "recursion|nested|Expecting"),
    "another format": (changed("format", value="x"), "another kind of JSON file"),
    "a table": ('{"rows": []}', "the file without a field 'format'"),
    "a later version": (changed("version", value=2), "version 2; wanted version 1; fix: use the"),
    "a version that is True": (changed("version", value=True), "version True"),
    "no sites": (changed("sites", value=...), "the file without a field 'sites'"),
    "sites in an object": (changed("sites", value={}), r"sites = \{\}; wanted a JSON list"),
    "another field": (changed("site", value=[]), "a field 'site' in the file"),
    "twice one field": (TEXT.replace('"package"', '"version": 1, "package"'), "two fields 'ver"),
    "twice one argument": (TEXT.replace('"bias"', '"b"'), "two fields 'b' in one object"),
    "a negative M": (changed("sites", 0, "m", value=[-1, 5]), r"sites\[0\].m = -1"),
    "a huge M": (changed("sites", 0, "m", value=[2, 2**40]), "wanted a whole number from 0 to"),
    "M as a text": (changed("sites", 0, "m", value=["2", 5]), r"sites\[0\].m = '2'"),
    "M the wrong way": (changed("sites", 0, "m", value=[5, 2]), "the first number of tokens bef"),
    "half an M": (changed("sites", 0, "m", value=[5]), "the first and the last number of tok"),
    "N as a float": (changed("sites", 0, "n", value=5.0), r"sites\[0\].n = 5.0"),
    "no op": (changed("sites", 0, "op", value="rm -rf"), "namespace::name.overload"),
    "a module as a number": (changed("sites", 0, "modules", value=[5]), "wanted a text"),
    "an unknown dtype": (with_argument("a", {**A, "dtype": "float7"}), "a.dtype = 'float7'"),
    "a function for a dtype": (with_argument("a", {**A, "dtype": "save"}), "a.dtype = 'save'"),
    "a negative size": (with_argument("a", {**A, "shape": [-1, 5]}), r"a.shape\[0\] = -1"),
    "a negative stride": (with_argument("a", {**A, "strides": [-5, 1]}), r"a.strides\[0\] = -5"),
    "a size that is True": (with_argument("a", {**A, "shape": [True, 5]}), r"a.shape\[0\] = True"),
    "a huge size": (with_argument("a", {**A, "shape": ["M", 2**50]}), r"a.shape\[1\] = 11258"),
    "a huge tensor": (with_argument("b", {**A, "shape": [2**30, 2**30]}), "elements at the few"),
    "too few strides": (with_argument("a", {**A, "strides": [1]}), "2 sizes and 1 strides"),
    "code": (with_argument("a", {**A, "shape": ["__import__('os')", 5]}), "an expression in M"),
    "a power": (with_argument("a", {**A, "shape": ["9**9**9", 5]}), "an expression in M"),
    "a long sum": (with_argument("a", {**A, "shape": ["M" + "+M" * 9999, 5]}), "an expression in"),
    "many brackets": (with_argument("a", {**A, "shape": ["(" * 250 + "M", 5]}), "an expression"),
    "another field of a tensor": (with_argument("a", {**A, "device": "cpu"}), "a field 'device'"),
    "half a tensor": (with_argument("a", {"dtype": "int8"}), "a without a field 'shape'"),
    "a number for a tensor": (with_argument("a", 5), "a = 5; wanted a Tensor, as compile_ext"),
    "a tensor for a number": (with_argument("prefetch", A), "wanted a bool, as compile_ext"),
    "an argument less": (changed("sites", 0, "arguments", "a", value=...), "those of compile_ext"),
    "an argument more": (with_argument("c", None), "with the arguments a, b, scale_a, scale_b"),
    "not a number": (with_argument("pinned", float("nan")), "NaN; wanted a finite number"),
    "an infinite number": (with_argument("pinned", float("inf")), "Infinity; wanted a finite"),
    "a number too large": (TEXT.replace("1e-06", "1e999"), "eps = inf; wanted a finite number"),
    "a number of 5000 digits": (TEXT.replace("576", "5" * 5000), "5555|digits"),
    "a reason less": (changed("not_covered", 0, "reason", value=...), "without a field 'reason'"),
}


@pytest.mark.parametrize(("content", "said"), FAULTS.values(), ids=FAULTS)
def test_faults(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(ManifestError, match=said) as error:
        Manifest.load(path)
    assert error.value.where == str(path)
    assert len(str(error.value)) < 1000


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        Manifest.load(tmp_path / "absent.json")
    with pytest.raises(ManifestError, match="found a folder or a device"):
        Manifest.load(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # to read it would wait for a writer
    with pytest.raises(ManifestError, match="found a folder or a device"):
        Manifest.load(pipe)
    path = tmp_path / "latin.json"
    path.write_bytes(TEXT.replace("head", "é").encode("latin-1"))
    with pytest.raises(ManifestError, match="'utf-8' codec can't decode"):
        Manifest.load(path)


def test_a_place_that_takes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, file / "manifest.json"):
        with pytest.raises(ManifestError, match="wanted a file that can be written"):
            MANIFEST.save(path)
    assert os.listdir(tmp_path) == ["file"]


def test_what_was_there_stays_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    MANIFEST.save(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ManifestError, match="No space left on device"):
        Manifest().save(path)
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert Manifest.load(path) == MANIFEST


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["M", "M//0", "M - 9", "-M", "int8", "float32", "aten::add.Tensor", 2**63]),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.sampled_from(["dtype", "size", "torch", "x"]), st.integers(), max_size=2),
)


def paths(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in it."""
    keys = content if isinstance(content, dict) else range(len(content))
    found = [(*at, key) for key in keys]
    inner = [(k, content[k]) for k in keys if isinstance(content[k], (dict, list))]
    return found + [p for k, x in inner for p in paths(x, (*at, k))]


CHANGES = st.tuples(st.sampled_from(paths(json.loads(TEXT))), JUNK | st.just(...))


def loads_or_refuses(content: str) -> None:
    try:
        loaded = from_text(content, "-")
    except ManifestError:
        return
    assert from_text(to_text(loaded), "-") == loaded
    for site in loaded.sites:
        hash(site)


@settings(max_examples=200, deadline=None)
@given(st.lists(CHANGES, max_size=3))
def test_any_value_anywhere(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    content = json.loads(TEXT)
    for path, value in changes:
        at = content
        try:
            for key in path[:-1]:
                at = at[key]
            if value is ...:
                del at[path[-1]]
            else:
                at[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    loads_or_refuses(json.dumps(content))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 20), st.text(max_size=10))
def test_any_text_anywhere(start: int, length: int, new: str) -> None:
    loads_or_refuses(TEXT[:start] + new + TEXT[start + length :])


def test_a_manifest_says_the_release_that_wrote_it() -> None:
    assert json.loads(TEXT)["package"] == compile_ext.__version__
