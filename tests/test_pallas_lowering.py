"""Every Pallas kernel lowers for a CUDA device, which need not be there."""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.kv_write.pallas import write_kv_pallas
from sparse_loop_jax.kernels.matvec.pallas import (
    gated_linear_pallas,
    linear_add_norm_pallas,
    linear_pallas,
)
from sparse_loop_jax.kernels.paged_attention.pallas import paged_attention_pallas
from sparse_loop_jax.kernels.project_qkv.pallas import project_qkv_pallas
from sparse_loop_jax.kernels.rotate_write.pallas import rotate_write_pallas

pytestmark = pytest.mark.filterwarnings(
    f"ignore:{pallas_triton.DEPRECATION}:DeprecationWarning"
)


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def launches(function, *args) -> int:
    """Kernels in the program that `function` lowers to."""
    text = pallas_triton.lower_for_cuda(function, *args).as_text()
    return len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text))


def attention(batch, rows, heads, kv_heads, dim, *, max_pages, pages=4096, dtype="bfloat16"):
    return (
        array(batch, rows, heads, dim, dtype=dtype),
        array(pages, kv_heads, 16, dim, dtype=dtype),
        array(pages, kv_heads, 16, dim, dtype=dtype),
        array(batch, max_pages, dtype="int32"),
        array(batch, rows, dtype="int32"),
    )


ATTENTION = {
    "decode in pieces": (attention(1, 1, 16, 16, 128, max_pages=512), 2),
    "decode in one piece": (attention(64, 1, 16, 16, 64, max_pages=64), 1),
    "past 2^31 elements": (attention(4, 1, 16, 16, 128, max_pages=512, pages=262_144), 2),
    "verification": (attention(2, 4, 16, 4, 128, max_pages=512), 2),
    "prefill": (attention(1, 512, 16, 16, 128, max_pages=64), 1),
    "float32": (attention(2, 3, 8, 8, 32, max_pages=512, dtype="float32"), 2),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_lowers(lowered, takes_64_bits, name):
    args, count = ATTENTION[name]
    texts = lowered(paged_attention_pallas, *args)
    assert len(texts) == count
    # Offsets into a pool take 64 bits where 32 are too few.
    assert takes_64_bits(texts[0]) is (name == "past 2^31 elements")


@pytest.mark.parametrize("rows", [1, 32])
def test_products_lower(rows):
    hidden, inner, vector = 256, 640, array(256)
    x, wide = array(rows, 1, hidden), array(rows, 1, inner)
    assert launches(lambda *a: linear_pallas(*a), x, array(512, hidden)) == 1
    assert launches(lambda *a: gated_linear_pallas(*a), x, array(2 * inner, hidden)) == 1
    ending = functools.partial(linear_add_norm_pallas, eps=1e-6)
    args = (wide, array(hidden, inner), x, vector, vector)
    assert launches(lambda *a: ending(*a), *args) == 2


def projection(pages):
    pool, turn, place = array(pages, 4, 16, 64), array(2, 1, 64), array(2, 1, dtype="int32")
    return (
        array(2, 1, 256),
        array(12 * 64, 256),
        turn,
        turn,
        pool,
        pool,
        array(2, 8, dtype="int32"),
        place,
        array(2, 1, dtype="bool"),
    )


@pytest.mark.parametrize(("pages", "wide"), [(64, False), (1 << 20, True)])
def test_projection_stores_into_pools_past_2_to_31_elements(
    lowered, takes_64_bits, pages, wide
):
    (text,) = lowered(project_qkv_pallas, *projection(pages))
    assert takes_64_bits(text) is wide


def test_projection_lowers_in_place():
    args = projection(64)
    text = pallas_triton.lower_for_cuda(lambda *a: project_qkv_pallas(*a), *args).as_text()
    call = next(line for line in text.splitlines() if "xla.gpu.triton" in line)
    assert call.count("output_operand_alias<") == 2


def write(pages):
    pool, rows, place = array(pages, 4, 16, 64), array(2, 24, 4, 64), (2, 24)
    table = array(2, 8, dtype="int32")
    return (
        *(pool, pool, rows, rows, table),
        array(*place, dtype="int32"),
        array(*place, dtype="bool"),
    )


def rotation(pages):
    pool, _, rows, _, *place = write(pages)
    turn = array(*rows.shape[:2], 64)
    return (array(*rows.shape[:2], 12 * 64), turn, turn, pool, pool, *place)


@pytest.mark.parametrize(("pages", "wide"), [(64, False), (1 << 20, True)])
def test_rows_are_stored_into_pools_past_2_to_31_elements(lowered, takes_64_bits, pages, wide):
    (text,) = lowered(write_kv_pallas, *write(pages))
    assert takes_64_bits(text) is wide
    (text,) = lowered(rotate_write_pallas, *rotation(pages))
    assert takes_64_bits(text) is wide


@pytest.mark.parametrize("function", [write_kv_pallas, rotate_write_pallas])
def test_the_write_lowers_in_place(function):
    args = write(64) if function is write_kv_pallas else rotation(64)
    text = pallas_triton.lower_for_cuda(lambda *a: function(*a), *args).as_text()
    call = next(line for line in text.splitlines() if "xla.gpu.triton" in line)
    assert call.count("output_operand_alias<") == 2


def test_a_kernel_is_interpreted_only_where_there_is_no_gpu():
    on_gpu = jax.default_backend() == "gpu"
    assert pallas_triton.interpreting() is not on_gpu
    with pallas_triton.interpret(False):
        assert not pallas_triton.interpreting()
        with pallas_triton.interpret(True):
            assert pallas_triton.interpreting()
    assert pallas_triton.interpreting() is not on_gpu


def test_short_kernels_release_their_successors(lowered):
    x, vector = array(1, 1, 64), array(64)
    args = (x, array(64, 64), x, vector, vector)
    texts = lowered(functools.partial(linear_add_norm_pallas, eps=1e-6), *args)
    pieces, merge = lowered(paged_attention_pallas, *ATTENTION["decode in pieces"][0])
    (projected,) = lowered(project_qkv_pallas, *projection(64))
    word = "griddepcontrol.launch_dependents"
    assert [word in text for text in (*texts, merge)] == [True] * 3
    assert [word in text for text in (pieces, projected)] == [False] * 2


def test_a_device_that_is_not_there_releases_as_a_hopper(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert pallas_triton._programmatic_launches.__wrapped__()
    for capability, expected in (("8.0", False), ("9.0", True)):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert pallas_triton._programmatic_launches.__wrapped__() is expected
