"""On a CUDA device: weights that are updated under CUDA graphs, on other streams and threads, and
what the padding costs in kernels and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext.demo.kernels import count_kernels
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import quantize_fp8_per_token
from compile_ext.ops.block_scaled_mm_spec import block_scaled_mm_ref
from compile_ext.ops.errors import CaptureError

pytestmark = pytest.mark.gpu


class Mlp(nn.Module):
    """The first weight is padded in N (re-homed), the second in K (a copy)."""

    def __init__(self) -> None:
        super().__init__()
        bias = torch.randn(100, device="cuda").bfloat16()
        self.up = ChannelFp8Linear(torch.randn(100, 64, device="cuda"), bias)
        self.down = ChannelFp8Linear(torch.randn(64, 100, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def new_value(p: Tensor) -> Tensor:
    return torch.randn(p.shape, device="cuda").to(p.dtype)


def exact(model: Mlp, x: Tensor) -> Tensor:
    """In float64 from the quantized operands, with the roundings between the layers."""
    for layer in (model.up, model.down):
        a, scale = quantize_fp8_per_token(x)
        weight = layer.weight.double() * layer.weight_scale.double()
        x = (a.double() * scale.double()) @ weight.t()
        x = x if layer.bias is None else x + layer.bias.double()
        x = F.relu(x.bfloat16()) if layer is model.up else x
    return x


def agree(got: Tensor, model: Mlp, x: Tensor) -> None:
    want = exact(model, x)
    # The hidden activation may round to another bfloat16 and then to another e4m3 value (2^-4 of an
    # element): each such step moves the sum of 100 products by at most 2^-4 / 10 of its size. A
    # stale weight is off by more than half of it.
    assert float((got.double() - want).abs().max() / want.abs().max()) < 0.02


UPDATES: dict[str, Callable[[Mlp], Any]] = {
    "copy_": lambda m: [p.copy_(new_value(p)) for p in (m.up.weight, m.down.weight)],
    "load_state_dict": lambda m: m.load_state_dict(Mlp().state_dict()),
    "assign": lambda m: m.load_state_dict(Mlp().state_dict(), assign=True),
    "data =": lambda m: [setattr(x.weight, "data", new_value(x.weight)) for x in (m.up, m.down)],
    "new Parameter": lambda m: [
        setattr(x, "weight", nn.Parameter(new_value(x.weight), requires_grad=False))
        for x in (m.up, m.down)
    ],
    "one layer": lambda m: m.down.weight.copy_(new_value(m.down.weight)),
    "same values": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "inference_mode": lambda m: torch.inference_mode()(
        lambda: m.down.weight.copy_(new_value(m.down.weight))
    )(),
    "data.copy_ and refresh": lambda m: (
        m.down.weight.data.copy_(new_value(m.down.weight)),
        m.up.weight.data.copy_(new_value(m.up.weight)),
        compile_ext.refresh(m),
    ),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["", "CUDA graphs"])
@pytest.mark.parametrize("rehome", [True, False], ids=["", "not re-homed"])
def test_updates(update: Callable[[Mlp], Any], mode: str | None, rehome: bool) -> None:
    model, x = Mlp(), torch.randn(5, 64, device="cuda").bfloat16()
    options: dict[str, Any] = {"compile_ext.rehome": rehome}
    if mode:
        options["compile_ext.mode"] = mode
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        for _ in range(3):  # the third replays
            agree(compiled(x).clone(), model, x)
        before = compiled(x).clone()
        for _ in range(2):
            update(model)
            for _ in range(3):
                agree(compiled(x).clone(), model, x)
        if update is UPDATES["same values"]:
            assert torch.equal(compiled(x), before)
        else:
            assert not torch.equal(compiled(x), before)


def test_a_graph_captured_by_hand() -> None:
    model, x = Mlp(), torch.randn(5, 64, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="compile_ext")
    with torch.no_grad():
        agree(compiled(x), model, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        model.up.weight.data.copy_(new_value(model.up.weight))  # re-homed: the graph reads it
        graph.replay()
        agree(out, model, x)
        model.down.weight.copy_(new_value(model.down.weight))  # a copy: replay does not look
        assert compile_ext.refresh(model) == 4  # both weights, the scale and the bias of `up`
        graph.replay()
        agree(out, model, x)


def test_no_constant_is_computed_inside_a_capture() -> None:
    model, x = Mlp(), torch.randn(5, 64, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="compile_ext")
    with torch.no_grad():
        compiled(x)
        model.down.weight.copy_(model.down.weight.clone())
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match=r"compile_ext.refresh"), torch.cuda.graph(graph):
            compiled(x)
        torch.cuda.synchronize()
        agree(compiled(x), model, x)


def test_refresh_is_complete_for_every_stream_and_thread(in_four_threads: Any) -> None:
    model, x = Mlp(), torch.randn(5, 64, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="compile_ext")
    wrong: list[str] = []
    with torch.no_grad():
        compiled(x)

    def serve() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                try:
                    agree(compiled(x), model, x)
                except Exception as error:
                    wrong.append(repr(error))

    for _ in range(10):
        with torch.no_grad():
            model.down.weight.copy_(new_value(model.down.weight))
        torch.cuda.synchronize()  # the writer's part: the write comes before the calls
        in_four_threads(serve)
    assert wrong == []


def silu_mul(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


def rms_norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()


PRODUCERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "nothing": (lambda x: x, 1),
    "gelu": (F.gelu, 1),
    "silu * mul": (silu_mul, 2),
    "RMSNorm": (rms_norm, 1),
}


class Produced(nn.Module):
    def __init__(self, produce: Callable[[Tensor], Tensor], n: int, k: int) -> None:
        super().__init__()
        self.produce = produce
        self.linear = ChannelFp8Linear(torch.randn(n, k, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.produce(x)))


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("m", [1, 256])
def test_an_odd_k_and_n_cost_no_kernel(name: str, m: int) -> None:
    """Quantization with its producer, the GEMM, the reader: three kernels, as for aligned sizes."""
    produce, factor = PRODUCERS[name]
    counts = []
    for n, k in ((1024, 3424), (1012, 3420)):
        torch._dynamo.reset()
        run = torch.compile(Produced(produce, n, k), backend="compile_ext", dynamic=False)
        x = torch.randn(m, factor * k, device="cuda").bfloat16()
        with torch.no_grad():
            run(x)
            counts.append(count_kernels(lambda run=run, x=x: run(x)))  # type: ignore[misc]
    assert counts == [3, 3]


@pytest.mark.parametrize(("n", "k"), [(192, 576), (576, 192), (130, 1000)])
def test_partial_blocks_run_on_cublaslt(n: int, k: int) -> None:
    layer = BlockFp8Linear(torch.randn(n, k, device="cuda"))
    x = torch.randn(8, k, device="cuda").bfloat16()
    with torch.no_grad():
        want = block_scaled_mm_ref(x, layer.weight, None, layer.weight_scale, None, x.dtype)
        options: Any = {"compile_ext.kernels": {"block_scaled_mm": "aten"}}
        run = torch.compile(layer, backend="compile_ext", options=options)
        got = run(x)
        (row,) = compile_ext.explain(run).rows
    assert row.site is not None
    assert row.site.kernel == "aten"
    # One rounding to bfloat16 each, and the tensor cores accumulation (BFLOAT16 in test_gpu.py).
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-7 * float(want.abs().mean()))


def test_memory_while_folding() -> None:
    layers = nn.ModuleList(
        ChannelFp8Linear(torch.randn(3420, 1280, device="cuda")) for _ in range(4)
    )

    def forward(x: Tensor) -> Tensor:
        return torch.stack([layer(x).amax(-1) for layer in layers])

    run = torch.compile(forward, backend="compile_ext")
    x = torch.randn(1, 1280, device="cuda").bfloat16()
    ChannelFp8Linear(torch.randn(64, 1280, device="cuda"))(x)  # cuBLASLt takes 1 MiB at first use
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        run(x)
    largest = 3420 * 1280
    pads = 4 * 4 * (1280 + 4)  # four rows a layer: e4m3 weights, float32 scales
    blocks = 512 * 8 * 2  # the allocator rounds each tensor up to 512 bytes
    activations = 4 * (1280 + 2 * 3424) * 4  # at most float32, of one token
    assert torch.cuda.max_memory_allocated() - start <= largest + pads + blocks + activations
    assert torch.cuda.memory_allocated() - start <= pads + blocks
