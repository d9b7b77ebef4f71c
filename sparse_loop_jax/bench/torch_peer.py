"""The peer of decode steps and of attention: what one gets from plain PyTorch.

A step has fused projections, scaled-dot-product attention over a contiguous cache,
`torch.compile` of the layer, and is one CUDA graph as a whole. Attention alone is a graph of
calls one after the other, over several caches. Random weights. Run as a program, because the
two frameworks should not share a device at the same time:

    python -m sparse_loop_jax.bench.torch_peer '{"batch": 8, "context": 1024, ...}'
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from typing import Any

from sparse_loop_jax.bench import chain
from sparse_loop_jax.kernels.workloads import AttentionWorkload


def peer_seconds(
    config, cases: list[tuple[int, int]], timeout: float = 300
) -> dict[tuple[int, int], float] | None:
    """Seconds of one decode step at each (batch, context), bfloat16, in another process.

    None where torch or a CUDA device is missing. A case that fails is left out.
    """
    request = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "dim": config.head_dim,
        "inter": config.intermediate_size,
        "vocab": config.vocab_size,
        "loops": config.total_ut_steps,
    }
    return _ask(request, cases, timeout)


def attention_seconds(
    workload: AttentionWorkload, cases: list[tuple[int, int]], timeout: float = 120
) -> dict[tuple[int, int], float] | None:
    """Seconds of scaled-dot-product attention of one row at each (batch, context).

    Heads and dtype are those of `workload`; the cache is contiguous. Otherwise as
    `peer_seconds`.
    """
    request = {
        "attention": True,
        "heads": workload.heads,
        "kv_heads": workload.kv_heads,
        "dim": workload.head_dim,
        "dtype": workload.dtype,
        "cold_bytes": chain.COLD_BYTES,
        "max_sets": chain.MAX_SETS,
        "min_calls": chain.MIN_CALLS,
    }
    return _ask(request, cases, timeout)


def prefill_seconds(
    workload: AttentionWorkload, cases: list[tuple[int, int]], timeout: float = 120
) -> dict[tuple[int, int], float] | None:
    """Seconds of causal scaled-dot-product attention of whole prompts, (batch, tokens).

    Heads and dtype are those of `workload`. Otherwise as `peer_seconds`.
    """
    request = {
        "prefill": True,
        "heads": workload.heads,
        "kv_heads": workload.kv_heads,
        "dim": workload.head_dim,
        "dtype": workload.dtype,
    }
    return _ask(request, cases, timeout)


def _ask(
    request: dict[str, Any], cases: list[tuple[int, int]], timeout: float
) -> dict[tuple[int, int], float] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(request | {"cases": cases})],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"(no peer: {(done.stderr or done.stdout).strip().splitlines()[-1:]})")
        return None
    results = json.loads(lines[-1])
    return {
        case: results[f"{case[0]}x{case[1]}"]
        for case in cases
        if f"{case[0]}x{case[1]}" in results
    }


def _main(request: dict[str, Any]) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        raise SystemExit("torch has no CUDA device")
    torch.manual_seed(0)
    kinds = {"attention": _Attention, "prefill": _Prefill}
    made = next((kind for name, kind in kinds.items() if request.get(name)), _Model)
    model = made(torch, request)
    results = {}
    for batch, context in request["cases"]:
        try:
            results[f"{batch}x{context}"] = model.seconds(batch, context)
        except torch.OutOfMemoryError:
            continue
        torch.cuda.empty_cache()
    print(json.dumps(results))


class _Attention:
    def __init__(self, torch, r: dict[str, Any]):
        self.torch, self.r = torch, r

    def seconds(self, batch: int, context: int, repeats: int = 5) -> float:
        """Median seconds of a call, of graphs that take about 30 ms together."""
        torch, r = self.torch, self.r
        options = {"device": "cuda", "dtype": getattr(torch, r["dtype"])}
        shape = (batch, r["kv_heads"], context, r["dim"])
        q = torch.randn((batch, r["heads"], 1, r["dim"]), **options)
        nbytes = 2 * math.prod(shape) * q.element_size()
        sets = min(max(-(-r["cold_bytes"] // nbytes), 1), r["max_sets"])
        caches = [[torch.randn(shape, **options) for _ in range(2)] for _ in range(sets)]
        turns = -(-r["min_calls"] // sets)
        gqa = {"enable_gqa": True} if r["kv_heads"] != r["heads"] else {}

        def calls():
            out = q
            for k, v in caches * turns:
                out = torch.nn.functional.scaled_dot_product_attention(out, k, v, **gqa)

        with torch.inference_mode():
            replay = _graph(torch, calls)
            guess = sets * turns * (nbytes / 3e12 + 10e-6)
            return _median(torch, replay, max(int(0.03 / guess), 1), repeats) / (sets * turns)


class _Prefill:
    def __init__(self, torch, r: dict[str, Any]):
        self.torch, self.r = torch, r

    def seconds(self, batch: int, tokens: int, repeats: int = 5, calls: int = 32) -> float:
        """Median seconds of a call, of graphs of `calls` calls."""
        torch, r = self.torch, self.r
        options = {"device": "cuda", "dtype": getattr(torch, r["dtype"])}
        q = torch.randn((batch, r["heads"], tokens, r["dim"]), **options)
        k, v = (
            torch.randn((batch, r["kv_heads"], tokens, r["dim"]), **options) for _ in range(2)
        )
        gqa = {"enable_gqa": True} if r["kv_heads"] != r["heads"] else {}

        def step():
            out = q
            for _ in range(calls):
                out = torch.nn.functional.scaled_dot_product_attention(
                    out, k, v, is_causal=True, **gqa
                )

        with torch.inference_mode():
            return _median(torch, _graph(torch, step), 1, repeats) / calls


def _graph(torch, step):
    """A function that replays `step` as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _median(torch, replay, count: int, repeats: int) -> float:
    """Median seconds of one of `count` replays; the first repeat is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count)
    return sorted(times[1:])[repeats // 2]


class _Model:
    def __init__(self, torch, r: dict[str, Any]):
        self.torch, self.r = torch, r
        hidden, inter = r["hidden"], r["inter"]
        self.layers = [
            {
                "qkv": self._weight(3 * hidden, hidden),
                "out": self._weight(hidden, hidden),
                "gate_up": self._weight(2 * inter, hidden),
                "down": self._weight(hidden, inter),
                "norms": [self._ones(hidden) for _ in range(4)],
            }
            for _ in range(r["layers"])
        ]
        self.embed, self.head = (
            self._weight(r["vocab"], hidden),
            self._weight(r["vocab"], hidden),
        )
        self.norm = self._ones(hidden)
        self.layer = torch.compile(self._layer, fullgraph=True, dynamic=False)

    def _weight(self, *shape):
        options = {"device": "cuda", "dtype": self.torch.bfloat16}
        return self.torch.randn(*shape, **options) * 0.02

    def _ones(self, size):
        return self.torch.ones(size, device="cuda", dtype=self.torch.bfloat16)

    def _norm(self, x, gain):
        y = x.float()
        scale = self.torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * scale).to(x.dtype) * gain

    def _rope(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + self.torch.cat((-second, first), -1) * sin

    def _layer(self, p, x, k, v, position, cos, sin):
        functional = self.torch.nn.functional
        batch, heads, dim = x.shape[0], self.r["heads"], self.r["dim"]
        qkv = functional.linear(self._norm(x, p["norms"][0]), p["qkv"])
        q, new_k, new_v = qkv.view(batch, 3, heads, dim).unbind(1)
        q, new_k = self._rope(q, cos, sin), self._rope(new_k, cos, sin)
        k.index_copy_(2, position, new_k[:, :, None])
        v.index_copy_(2, position, new_v[:, :, None])
        out = functional.scaled_dot_product_attention(q[:, :, None], k, v)
        out = functional.linear(out[:, :, 0].reshape(batch, -1), p["out"])
        x = x + self._norm(out, p["norms"][1])
        gate, up = functional.linear(self._norm(x, p["norms"][2]), p["gate_up"]).chunk(2, -1)
        out = functional.linear(functional.silu(gate) * up, p["down"])
        return x + self._norm(out, p["norms"][3])

    def seconds(self, batch: int, context: int, steps: int = 10, repeats: int = 5) -> float:
        """Median seconds of one graph replay, each of one decode step."""
        torch, r = self.torch, self.r
        shape = (batch, r["heads"], context, r["dim"])
        planes = r["loops"] * r["layers"]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        keys = [torch.randn(shape, **options) for _ in range(planes)]
        values = [torch.randn(shape, **options) for _ in range(planes)]
        token = torch.ones(batch, dtype=torch.long, device="cuda")
        position = torch.tensor([context - 1], device="cuda")
        powers = torch.arange(0, r["dim"], 2, device="cuda").float() / r["dim"]
        angles = position.float()[:, None] * (1e6**-powers)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

        def step():
            x = self.embed[token]
            for plane in range(planes):
                p = self.layers[plane % r["layers"]]
                x = self.layer(p, x, keys[plane], values[plane], position, cos, sin)
                if (plane + 1) % r["layers"] == 0:
                    x = self._norm(x, self.norm)
            token.copy_(torch.nn.functional.linear(x, self.head).argmax(-1))

        with torch.inference_mode():
            return _median(torch, _graph(torch, step), steps, repeats)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
