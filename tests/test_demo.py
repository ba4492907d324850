"""``compile-ext demo`` as a user runs it: its passes fire, and every way agrees with eager."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_ext.demo.compare import Comparison
from compile_ext.demo.decoder import Config, Decoder
from compile_ext.demo.kernels import count_kernels
from compile_ext.passes import PASS_NAMES

# The first wants an option, the others a GPU.
NOT_IN_THE_DEMO = ["pin_kernels"]
if not torch.cuda.is_available():
    NOT_IN_THE_DEMO += ["quantize_activations", "fuse_norm_quantize", "prefetch_weights"]
    NOT_IN_THE_DEMO += ["lower_router_norm", "lower_router_topk", "fuse_router"]


@pytest.mark.slow
def test_demo_agrees_with_eager_and_its_passes_fire(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("compile-ext")
    cold = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [program, "demo"], cwd=tmp_path, env=cold, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "compile_ext agrees with eager" in done.stdout
    assert "torch.compile agrees with eager" in done.stdout
    for name in PASS_NAMES:
        fired = re.search(rf"{name} +│ +(\d+)", done.stdout)
        assert fired is not None
        assert (int(fired[1]) > 0) is (name not in NOT_IN_THE_DEMO), name
    share = re.search(r"of compilation, ([\d.]+)%", done.stdout)
    assert share is not None
    assert float(share[1]) < 5  # with cold caches; warm ones leave little but Dynamo: 6 %


def test_decoder_gives_each_token_its_own_logits_whatever_the_step() -> None:
    config = Config(vocab=101, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64, max_tokens=16)
    model, tokens = Decoder(config), torch.randint(0, 101, (6,))
    with torch.no_grad():
        whole = model(tokens, torch.arange(6))
        for cache in model.caches():
            cache.zero_()
        steps = [model(tokens[i : i + 1], torch.arange(i, i + 1))[0] for i in range(6)]
    # The same sums, of 64 terms and over 16 cached positions, in another order: bfloat16 values
    # that round the other way, then FP8 steps behind them.
    torch.testing.assert_close(torch.stack(steps), whole, rtol=0, atol=0.1 * float(whole.std()))


@pytest.mark.parametrize(
    ("steps", "compared", "error", "equal", "decided", "ok"),
    [
        (24, 24, 0.1, 5, 5, True),
        (24, 12, 0.1, 5, 5, True),
        (24, 11, 0.1, 5, 5, False),  # most steps left out
        (24, 24, 0.1, 0, 0, False),  # no token to compare
        (24, 24, 0.1, 4, 5, False),
        (24, 24, 0.3, 5, 5, False),
    ],
)
def test_verdict(
    steps: int, compared: int, error: float, equal: int, decided: int, ok: bool
) -> None:
    comparison = Comparison(steps, compared, error, 0.2, equal, decided, logits=[])
    assert comparison.ok is ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted where a GPU is")
def test_kernels_of_eager_on_a_cpu_are_its_computations() -> None:
    x = torch.randn(4, 4)
    assert count_kernels(lambda: (x @ x.t()).view(-1)[:3] + 1) == 2
