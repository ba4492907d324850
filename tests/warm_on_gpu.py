"""Warm up the demo decoder on a GPU, and call it under the seal. Run by ``test_gpu_warmup.py``, a
process for each step. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compile_ext
from compile_ext.demo.decoder import Config, Decoder

MAX_TOKENS = 96
# Of the logits' deviation. Inductor keeps float32 where eager rounds to bfloat16, and a byte of FP8
# more or less is 6 %: 0.28 was the most in 120 steps of such decoders.
TOLERANCE = 0.4
CHECKED = (1, 2, 7, 16, 33, 96)


def inputs(m: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(m, device="cuda") * 7 % 500
    return ids, torch.arange(m, device="cuda")


def step(
    folder: Path, sizes: tuple[int, ...], in_folder: bool = True, **how: Any
) -> dict[str, Any]:
    model = Decoder(Config(vocab=512)).cuda().eval()
    compiled = torch.compile(model, backend="compile_ext", dynamic=True, **how)
    with torch.no_grad():
        report = compile_ext.warmup(
            compiled,
            max_tokens=MAX_TOKENS,
            batch_sizes=sizes,
            inputs=inputs,
            cache_dir=folder if in_folder else None,
            progress=False,
        )
        certificate = folder.parent / "certificate.json"
        report.certificate().save(certificate)
        called = [m for m in range(1, MAX_TOKENS + 1) if not how or m in sizes]
        kept = {}
        with compile_ext.seal("error"):
            for m in called:
                kept[m] = compiled(*inputs(m)).clone()
        wanted = {m: model(*inputs(m)) for m in CHECKED if m in kept}
    scale = float(wanted[max(wanted)].std())
    off = torch.cat([(kept[m] - want).abs().amax(1) / scale for m, want in wanted.items()])
    return {
        "counts": Counter(x.status for x in report.results),
        "compilers": sorted({x.unit.compiler.name for x in report.results}),
        "reasons": sorted({x.reason for x in report.results if x.reason}),
        "graphs": [[x.batch_size, x.graphs, x.reason] for x in report.graphs],
        "calls": len(called),
        # Of the tokens, those whose logits are off; a router that chooses another expert is one.
        "off": float((off > TOLERANCE).float().mean()),
        "middle": float(off.median()),
    }


STEPS: dict[str, Any] = {
    "plain": {"sizes": (1, 16)},
    "default folders": {"sizes": (1, 16), "in_folder": False},
    "cuda graphs": {"sizes": (1, 2, 16), "mode": "reduce-overhead"},
}

if __name__ == "__main__":
    print(json.dumps(step(Path(sys.argv[2]), **STEPS[sys.argv[1]])))
