"""Plan the demo decoder for an H200, on tensors without data. Run by ``test_planning.py`` in a
process of its own, without Triton's interpreter. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from call_sites import H200

from compile_ext.demo.decoder import Config, Decoder
from compile_ext.manifest import Manifest, collect
from compile_ext.manifest.file import from_text, to_text
from compile_ext.ops.device import as_if_on
from compile_ext.planning import plan


def collected() -> Manifest:
    model = Decoder(Config()).eval().to("meta")
    found = Manifest()
    with torch.no_grad(), as_if_on(H200):
        for m in (1, 17):
            ids = torch.zeros(m, dtype=torch.long, device="meta")
            if m > 1:
                torch._dynamo.mark_dynamic(ids, 0)
            found = collect(model, ids, ids)
    return found


if __name__ == "__main__":
    first = collected()
    found = plan(first, H200, 8192)
    again = plan(from_text(to_text(first), "-"), H200, 8192)  # as an image build plans it
    planned = {x.site.call.op[len("compile_ext::") : -len(".default")]: x for x in found.sites}
    print(
        json.dumps(
            {
                "ops": sorted(planned),
                "not_covered": [x.reason for x in found.not_covered],
                "hot_first": [x.calls[0].m for x in found.units],
                "kernels": Counter(x.kernel for x in found.units),
                "names": {name: x.kernels for name, x in planned.items()},
                "same": [x.key for x in again.units] == [x.key for x in found.units],
            }
        )
    )
