"""Two processes, one cache folder, other weights: the second hits the caches and is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# Prints cache counters and the largest difference from eager, for a model made from a seed.
PROGRAM = """
import json, sys
import torch
from torch import nn
import torch.nn.functional as F
import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import block_scaled_mm
from torch._dynamo.utils import counters

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = BlockFp8Linear(torch.randn(256, 128) / 11)
        self.down = ChannelFp8Linear(torch.randn(50, 256) / 16, torch.randn(50))
        self.gate = nn.Linear(128, 8, bias=False).bfloat16()

    def forward(self, x):
        y = block_scaled_mm(x, self.up.weight, x.new_ones(1), self.up.weight_scale)
        return self.down(y), self.gate(x).float().softmax(-1)

torch.manual_seed(int(sys.argv[1]))
blocks = [Block() for _ in range(1 if sys.argv[2] == "whole" else 3)]
model = nn.Sequential(*blocks)
options = {"emulate_precision_casts": True, "compile_ext.disable": ["lower_router_linear"]}
if sys.argv[2] == "whole":
    calls = [torch.compile(model, backend="compile_ext", options=options)]
else:
    for block in blocks:
        block.compile(backend="compile_ext", options=options)
    calls = blocks
worst = 0.0
with torch.no_grad():
    for m in (5, 1):
        x = torch.randn(m, 128).bfloat16()
        for block, call in zip(blocks, calls):
            for got, want in zip(call(x), Block.forward(block, x)):
                worst = max(worst, float((got.double() - want.double()).abs().max()))
    blocks[-1].down.weight_scale.mul_(2)  # the constant of a cached graph follows its parameter
    got, want = calls[-1](x)[0], Block.forward(blocks[-1], x)[0]
    worst = max(worst, float((got.double() - want.double()).abs().max()))
report = compile_ext.explain(model)
fired = sorted({d.pass_name for row in report.rows for d in row.decisions if d.fired})
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
    "worst": worst, "fired": fired, "manifest": repr(compile_ext.sites(model)),
}))
"""


def run(folder: Path, seed: int, how: str, hash_seed: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONHASHSEED": str(hash_seed),  # an order taken from a set would miss the cache
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed), how],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("how", ["whole", "layers"])
def test_second_process_hits_the_caches_and_is_right(tmp_path: Path, how: str) -> None:
    cold = run(tmp_path, seed=1, how=how, hash_seed=1)
    warm = run(tmp_path, seed=2, how=how, hash_seed=2)  # other weights
    assert (cold["hits"], cold["misses"], cold["bypasses"]) == (0, 2, 0)  # M = 5 and M = 1
    assert (warm["hits"], warm["misses"], warm["bypasses"]) == (2, 0, 0)
    # emulate_precision_casts rounds where eager does and the router keeps its linear: what is left
    # is one unit in the last place of a float32 softmax.
    assert max(cold["worst"], warm["worst"]) <= 2.0**-23
    fired = ["fold_weight_padding", "specialize_m1", "strip_placeholder_fills"]
    assert cold["fired"] == warm["fired"] == fired
    assert cold["manifest"] == warm["manifest"]
    modules = {"whole": ["0"], "layers": ["0", "1", "2"]}[how]
    for module in modules:
        assert f"'{module}.up'" in warm["manifest"]
