"""Two processes, one cache folder: the second takes its code from the caches, and is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch
from torch.library import Library, register_fake
import compile_ext
from torch._dynamo.utils import counters

library = Library("cached", "DEF")

def define(schema, run, fake, **contract):
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    register_fake("cached::" + name, fake, lib=library)
    if contract:
        op = getattr(torch.ops.cached, name).default
        compile_ext.register_contract(op, compile_ext.OpContract(**contract))

def copy(x, out):
    out.copy_(x)

like = lambda x, s: torch.empty_like(x)
seen = []
def ignores(x, s):
    seen.append(s)
    return x + 1

define("ignores(Tensor x, Tensor s) -> Tensor", ignores, like, unread={"s": lambda **_: True})
define("reads(Tensor x, Tensor s) -> Tensor", lambda x, s: x * s, like)
define("copy(Tensor x, Tensor! out) -> ()", copy, lambda x, out: None, overwritten=("out",))
ops = torch.ops.cached

def model(x):
    out = torch.zeros_like(x)
    ops.copy(x, out)
    y = ops.reads(out, torch.full((1,), 3.0)) @ torch.full((8, 8), 0.5)
    return ops.ignores(ops.ignores(y, x.new_ones(1)), torch.zeros_like(x))

options = {"compile_ext.poison": sys.argv[1] == "poison", "compile_ext.memory_budget": 4096}
compiled = torch.compile(model, backend="compile_ext", options=options)
equal = []
with torch.no_grad():
    for m in (5, 7, 5):
        x = torch.arange(8.0 * m).view(m, 8)  # small integers: their sums are exact
        equal.append(torch.equal(compiled(x), model(x)))
given = seen[0]
print(json.dumps({
    "equal": equal, "poison": bool(given.isnan().all()),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
}))
"""


def run(folder: Path, how: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_second_process_hits_the_caches_and_is_right(tmp_path: Path) -> None:
    found = {how: [run(tmp_path, how) for _ in range(2)] for how in ("plain", "poison")}
    for how, (cold, warm) in found.items():
        assert cold["equal"] == warm["equal"] == [True] * 3
        assert warm["misses"] == 0
        assert warm["hits"] == 2  # M = 5, and any M
        assert cold["poison"] == warm["poison"] == (how == "poison")
