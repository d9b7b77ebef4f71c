"""Fixtures shared by all tests. Tests reach everything here through fixtures alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import save_file

from sparse_loop_jax.kernels import Op
from sparse_loop_jax.models import LayerParams, Ouro, OuroConfig, OuroParams

# Silent broadcasting between ranks is the commonest way to get a plausible wrong number.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the suite's time is compilation, and many files compile the same programs. The
# environment variable of JAX, where set, decides.
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    _CACHE = Path(__file__).parent.parent / ".jax_cache" / jax.__version__
    jax.config.update("jax_compilation_cache_dir", str(_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# An example may compile a program: how long it takes says nothing. On a CI machine the
# examples are the same at every run.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")

GOLD = Path(__file__).parent / "gold"


# A program for the CPU holds hundreds of memory mappings, and a process may have 65,530 of them
# (Linux, `vm.max_map_count`). At the limit, LLVM ends the process.
_MOST_MAPPINGS = 30_000
_MAPPINGS = Path("/proc/self/maps")
_programs = 0  # compiled since the mappings were last counted


def _count_programs(event: str, duration_secs: float, **kwargs):
    global _programs
    _programs += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_programs)


def _drop_programs():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file() -> Iterator[None]:
    """Frees what a file compiled."""
    yield
    _drop_programs()


@pytest.fixture(autouse=True)
def _programs_of_a_test() -> Iterator[None]:
    """Frees what was compiled where it is very much, as by the slow tests."""
    global _programs
    yield
    if _programs > 20 and _MAPPINGS.exists():
        _programs = 0
        if _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
            _drop_programs()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA device")


# Golden vectors ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gold:
    """One model of `tests/gold`, read without the library's own loader."""

    name: str  # "mha" or "gqa"

    @property
    def directory(self) -> Path:
        """The checkpoint: config.json and model.safetensors."""
        return GOLD / self.name

    @functools.cached_property
    def config(self) -> OuroConfig:
        raw = json.loads((self.directory / "config.json").read_text())
        fields = {f.name for f in dataclasses.fields(OuroConfig)}
        known = {key: value for key, value in raw.items() if key in fields}
        return OuroConfig(**known, eos_token_ids=(raw["eos_token_id"],))

    @functools.cached_property
    def params(self) -> OuroParams:
        """The weights in float32."""
        with safe_open(self.directory / "model.safetensors", "np") as file:
            tensors = {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118

        def layer(index: int) -> LayerParams:
            def get(*names):
                weights = [tensors[f"model.layers.{index}.{name}.weight"] for name in names]
                return jnp.concatenate(weights)

            return LayerParams(
                input_norm=get("input_layernorm"),
                qkv=get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                out=get("self_attn.o_proj"),
                input_norm_2=get("input_layernorm_2"),
                post_attention_norm=get("post_attention_layernorm"),
                gate_up=get("mlp.gate_proj", "mlp.up_proj"),
                down=get("mlp.down_proj"),
                post_attention_norm_2=get("post_attention_layernorm_2"),
            )

        return OuroParams(
            embed=tensors["model.embed_tokens.weight"],
            layers=tuple(layer(i) for i in range(self.config.num_hidden_layers)),
            norm=tensors["model.norm.weight"],
            exit_gate=tensors["model.early_exit_gate.weight"],
            exit_gate_bias=tensors["model.early_exit_gate.bias"],
            head=tensors["lm_head.weight"],
        )

    def model(self, dtype: str = "float32") -> Ouro:
        """An `Ouro` with these weights, rounded to `dtype`."""
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), self.params)
        return Ouro(self.config, params=params)

    @functools.cached_property
    def dense(self) -> dict[str, np.ndarray]:
        """`<name>_dense.npz`; the names are in `tests/gold/README.md`."""
        return _read_npz(f"{self.name}_dense.npz")

    def sparse(self, retention: float) -> dict[str, np.ndarray]:
        """`<name>_sparse_r<retention>.npz`, for 0.02, 0.1, 0.25, 0.5 and 1."""
        return _read_npz(f"{self.name}_sparse_r{retention:g}.npz")

    @property
    def prompts(self) -> list[list[int]]:
        """Both prompts."""
        return [self.dense[f"{name}_input_ids"].tolist() for name in ("p0", "p1")]

    def tokens(self, retention: float | None = None) -> list[list[int]]:
        """The greedy tokens after both prompts, dense where `retention` is None."""
        found = self.dense if retention is None else self.sparse(retention)
        name = "gen_tokens" if retention is None else "tokens"
        return [found[f"{prompt}_{name}"].tolist() for prompt in ("p0", "p1")]


@functools.cache
def _read_npz(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLD / name) as file:
        return dict(file)


@functools.cache
def _gold(name: str) -> Gold:
    return Gold(name)


@pytest.fixture(params=["mha", "gqa"])
def gold(request) -> Gold:
    """Each golden model in turn.

    By test, since pytest would run the tests of all files by model with a wider scope.
    """
    return _gold(request.param)


@pytest.fixture(scope="session")
def load_gold():
    """A function from "mha" or "gqa" to that golden model."""
    return _gold


@pytest.fixture(scope="session")
def gold_ops() -> dict[str, np.ndarray]:
    """`ops.npz`: inputs and outputs of single functions, `<op>/<case>/<array>`."""
    return _read_npz("ops.npz")


@pytest.fixture(scope="session")
def gold_manifest() -> dict:
    """`manifest.json`: the cases of `ops.npz` and statistics of each run."""
    return json.loads((GOLD / "manifest.json").read_text())


@pytest.fixture(scope="session")
def ascii_checkpoint(tmp_path_factory) -> Path:
    """The golden model "mha" with its first layer alone, which compiles in half the time.

    Its tokenizer has the ASCII characters for its 128 tokens.
    """
    path = tmp_path_factory.mktemp("ascii") / "checkpoint"
    path.mkdir()
    source = _gold("mha").directory
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_window_layers": 1}
    config["layer_types"] = config["layer_types"][:1]
    (path / "config.json").write_text(json.dumps(config))
    with safe_open(source / "model.safetensors", "np") as file:
        names = [n for n in file.keys() if not n.startswith("model.layers.1.")]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in names}, path / "model.safetensors")
    vocabulary = {chr(i): i for i in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# Compilations --------------------------------------------------------------------------


class Compilations:
    """What XLA was asked to compile while a `compile_counter()` block was open."""

    def __init__(self):
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Compilations({self.names})"


@pytest.fixture
def compile_counter():
    """A context manager that counts JAX's own backend-compile events.

    The event also fires where an executable comes out of the persistent cache, so a count
    of zero means that no new program was asked for.

        with compile_counter() as compiled:
            step(...)
        assert compiled.count == 0, compiled
    """

    @contextlib.contextmanager
    def counter() -> Iterator[Compilations]:
        compiled = Compilations()

        def listen(event: str, duration_secs: float, **kwargs):
            if event == "/jax/core/compile/backend_compile_duration":
                compiled.names.append(str(kwargs.get("fun_name", "?")))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield compiled
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counter


# Ops -----------------------------------------------------------------------------------


class Bound:
    """An op with one of its implementations, jitted."""

    def __init__(self, op: Op, name: str, **jit_options):
        function = op.get(name)
        options = {}
        if "interpret" in inspect.signature(function).parameters:
            options["interpret"] = jax.default_backend() != "gpu"
        self.label = f"{op.name}, {name}"
        self.is_reference = name == "xla"
        call = functools.partial(op, implementation=name, **options)
        self.jitted = jax.jit(call, **jit_options)

    def __call__(self, *args, **kwargs):
        try:
            return self.jitted(*args, **kwargs)
        except NotImplementedError as error:
            if self.is_reference:
                raise
            pytest.skip(f"{self.label}: {error}")


@pytest.fixture(scope="session")
def bind():
    """A function from an op, a name and options of `jax.jit` to a `Bound`.

    An implementation with an `interpret` parameter is interpreted where there is no GPU,
    so that the very same assertions run everywhere. Arguments that it does not serve
    (`NotImplementedError`) skip the test; the reference has to serve everything.
    """
    return functools.cache(Bound)


# Kernels lowered for a GPU --------------------------------------------------------------


@pytest.fixture
def lowered(monkeypatch):
    """A function from a function and its arguments to the verified modules of its kernels.

    Lowering does not verify them, and a module that is not valid fails on a device only.
    """
    # Here, so that a JAX without these parts fails the tests of lowering alone.
    from jax._src.pallas.triton import lowering

    from sparse_loop_jax.kernels import pallas_triton

    texts = []
    original = lowering.lower_jaxpr_to_triton_module

    def verified(*args, **kwargs):
        result = original(*args, **kwargs)
        assert result.module.operation.verify()
        texts.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", verified)

    def lower(function, *args) -> list[str]:
        texts.clear()
        pallas_triton.lower_for_cuda(lambda *a: function(*a), *args)
        return list(texts)

    return lower


@pytest.fixture(scope="session")
def takes_64_bits():
    """A function from a module to whether an offset into an array of bfloat16 does."""
    wide = re.compile(r"tensor<[0-9x]+x!tt.ptr<bf16>>, tensor<[0-9x]+xi64>")
    return lambda module: bool(wide.search(module))


# Paged inputs --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Random inputs of an op over paged K/V, each value of order 1.

    The pools hold NaN wherever no request has a token. `k` and `v` hold the same numbers
    as the pools, by request and position, so that an oracle needs no page table.
    """

    q: jax.Array  # [B, n, heads, head_dim]
    k_pool: jax.Array  # [pages, kv_heads, page_size, head_dim]
    v_pool: jax.Array  # as k_pool
    page_table: jax.Array  # int32 [B, max_pages], permuted
    lengths: jax.Array  # int32 [B, n], keys visible to each row
    k: np.ndarray  # float64 [B, max(lengths), kv_heads, head_dim]; NaN beyond a request
    v: np.ndarray  # as k

    @property
    def args(self) -> tuple[jax.Array, ...]:
        """In the order of `paged_attention`."""
        return self.q, self.k_pool, self.v_pool, self.page_table, self.lengths

    def replace(self, **changes) -> PagedCase:
        return dataclasses.replace(self, **changes)

    def attention(self) -> np.ndarray:
        """softmax(q k / sqrt(d)) v of each row over its own keys, [B, n, heads, d] float64."""
        q, lengths = np.asarray(self.q, np.float64), np.asarray(self.lengths)
        group = q.shape[2] // self.k.shape[2]
        seen = np.arange(self.k.shape[1]) < lengths[..., None]  # [B, n, S]
        k, v = (np.nan_to_num(x).repeat(group, axis=2) for x in (self.k, self.v))
        scores = np.einsum("bnhd,bshd->bnhs", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(seen[:, :, None], scores, -np.inf)
        dead = ~seen.any(axis=-1)[..., None, None]
        weights = np.exp(scores - np.where(dead, 0, scores.max(axis=-1, keepdims=True)))
        total = np.where(dead, 1, weights.sum(axis=-1, keepdims=True))
        return np.einsum("bnhs,bshd->bnhd", weights / total, v)


@pytest.fixture(scope="session")
def paged_case():
    """A function that makes a `PagedCase`.

    Args of the function:
      lengths: `[B][n]` or `[B]` (then n = 1): keys visible to each row.
      heads, kv_heads, head_dim, page_size, dtype, seed: as named.
      max_pages: width of the page table; by default one more than is needed.
      spare_pages: pages that belong to nobody, filled with NaN.
      unallocated: what unused entries of the table hold: "past_end" (number of pages) or
        "poison" (a page of NaN that belongs to nobody).
    """
    return _paged_case


def _paged_case(
    lengths,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype="float32",
    seed: int = 0,
    max_pages: int | None = None,
    spare_pages: int = 2,
    unallocated: str = "past_end",
) -> PagedCase:
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    lengths = lengths[:, None] if lengths.ndim == 1 else lengths
    batch, rows = lengths.shape
    tokens = lengths.max(axis=1)  # by request
    used = -(-tokens // page_size)
    max_pages = int(used.max()) + 1 if max_pages is None else max_pages
    pages = int(used.sum()) + spare_pages

    def normal(*shape):
        # Rounded first, so that the oracle sees exactly what the op sees.
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype))

    k = normal(batch, int(tokens.max()), kv_heads, head_dim)
    v = normal(batch, int(tokens.max()), kv_heads, head_dim)
    for request, count in enumerate(tokens):
        k[request, count:] = np.nan
        v[request, count:] = np.nan

    order = rng.permutation(pages)
    nobody = pages if unallocated == "past_end" else order[-1]
    if unallocated not in ("past_end", "poison"):
        raise ValueError(f"unallocated must be past_end or poison, got {unallocated!r}")
    page_table = np.full((batch, max_pages), nobody, np.int32)
    k_pool = np.full((pages, kv_heads, page_size, head_dim), np.nan, k.dtype)
    v_pool = k_pool.copy()
    next_page = iter(order)
    for request, count in enumerate(tokens):
        for index in range(used[request]):
            page = page_table[request, index] = next(next_page)
            for offset in range(min(page_size, count - index * page_size)):
                k_pool[page, :, offset] = k[request, index * page_size + offset]
                v_pool[page, :, offset] = v[request, index * page_size + offset]
    return PagedCase(
        q=jnp.asarray(normal(batch, rows, heads, head_dim)),
        k_pool=jnp.asarray(k_pool),
        v_pool=jnp.asarray(v_pool),
        page_table=jnp.asarray(page_table),
        lengths=jnp.asarray(lengths),
        k=k.astype(np.float64),
        v=v.astype(np.float64),
    )
