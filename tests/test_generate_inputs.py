"""Bad input to `generate` and `stream`: one clear error, before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import sparse_loop_jax as slj


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("mha").model()


BAD = [
    ([], {}, "prompts is empty"),
    ([[]], {}, "prompt 0 is empty"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[1, 128]], {}, "token id 128, outside the vocabulary of 128"),
    ([[-1]], {}, "token id -1"),
    ([[1.5]], {}, "integer token ids"),
    ([[[1, 2]]], {}, "flat list"),
    ([[1], [[1, 2], [3]]], {}, "prompt 1 has lists of different lengths inside"),
    ([[2**32 + 5]], {}, f"prompt 0 has token id {2**32 + 5}, outside"),
    (None, {}, "prompts must be a string or a list of prompts, got None"),
    (5, {}, "prompts must be a string or a list of prompts, got 5"),
    (np.asarray(5), {}, r"a list of prompts, got array\(5\)"),
    ([1, 2, 3], {}, "wrap one list of ids in a list"),
    (["text"], {}, "no tokenizer"),
    ([[1] * 513], {}, "513 tokens, more than the context of 512"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
    ([[1]], {"max_new_tokens": True}, "max_new_tokens .* got True"),
    ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens .* got 2.0"),
    ([[1], [2]], {"max_new_tokens": [3]}, "1 values for 2 prompts"),
    ([[1]], {"temperature": -0.1}, "temperature .* got -0.1"),
    ([[1]], {"temperature": float("nan")}, "temperature .* got nan"),
    ([[1]], {"temperature": float("inf")}, "temperature .* got inf"),
    ([[1]], {"top_k": 0}, "top_k .* got 0"),
    ([[1]], {"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ([[1]], {"top_p": 1.5}, "top_p .* got 1.5"),
    ([[1]], {"seed": -1}, "seed .* got -1"),
    ([[1]], {"seed": 2**63}, "seed"),
    ([[1]], {"eos_token_id": 128}, "eos_token_id has 128"),
    ([[1]], {"eos_token_id": "x"}, "eos_token_id must be"),
    ([[1]], {"exit_threshold": 1.5}, "exit_threshold .* got 1.5"),
    ([[1]], {"page_size": 12}, "page_size must be a power of two, got 12"),
    ([[1]], {"page_size": 0}, "page_size"),
    ([[1]], {"implementation": "cuda"}, "one of paged_attention's, .*xla: got 'cuda'"),
    ([[1]], {"implementation": ["xla"]}, r"must be a name or None, got \['xla'\]"),
    ([[1]], {"page_size": 1024}, "page_size 1024 is more than the model's context of 512"),
    ([[1]], {"page_size": 2**40}, "page_size 1099511627776 is more than"),
    (
        [[1]],
        {"sparse": slj.SparseDecodeConfig(implementation="cuda")},
        "one of capture_attention's, .*: got 'cuda'",
    ),
    (
        [[1]],
        {"sparse": slj.SparseDecodeConfig(capacity=10**13)},
        "capacity 10000000000000 is more keys than the model's 512 positions",
    ),
    (
        [[1]],
        {"speculative": slj.SpeculativeConfig(512)},
        "num_speculative_tokens must be below the model's context of 512 tokens, got 512",
    ),
    ([[1]], {"sparse": 0.1}, "sparse must be a SparseDecodeConfig, got 0.1"),
    ([[1]], {"speculative": 3}, "speculative must be a SpeculativeConfig, got 3"),
    (
        [[1]],
        {"speculative": slj.SpeculativeConfig(3, draft_loops=4)},
        "draft_loops must be below the model's 4 loops, got 4",
    ),
    (
        [[1]],
        {"speculative": slj.SpeculativeConfig(3), "exit_threshold": 0.5},
        "exit_threshold 0.5 leaves early",
    ),
    (
        [[1]],
        {"sparse": slj.SparseDecodeConfig(key_retention=0.1), "exit_threshold": 0.5},
        "exit_threshold 0.5 leaves early",
    ),
]


@pytest.mark.parametrize(("prompts", "options", "message"), BAD)
@pytest.mark.parametrize("function", [slj.generate, slj.stream])
def test_bad_input_is_refused_at_once(
    model, compile_counter, function, prompts, options, message
):
    with compile_counter() as compiled, pytest.raises(ValueError, match=message):
        function(model, prompts, **options)
    assert compiled.count == 0, compiled


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
@pytest.mark.parametrize(
    "name", ["num_speculative_tokens", "draft_loops", "max_outstanding_rounds"]
)
def test_speculative_config_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {value!r}"):
        slj.SpeculativeConfig(**{"num_speculative_tokens": 3, name: value})


def test_speculative_config_refuses_an_adaptive_that_is_no_bool():
    with pytest.raises(ValueError, match="adaptive must be True or False, got 1"):
        slj.SpeculativeConfig(3, adaptive=1)  # type: ignore[arg-type]


def test_speculative_config_takes_numpy_integers():
    given: Any = np.int64(3)
    config = slj.SpeculativeConfig(given, draft_loops=given, max_outstanding_rounds=given)
    assert config == slj.SpeculativeConfig(3, 3, 3)
    assert {type(v) for v in dataclasses.astuple(config)} == {int, bool}


@pytest.mark.parametrize("value", [0, True, 1.5, None])
@pytest.mark.parametrize("sparse", [None, slj.SparseDecodeConfig()])
def test_start_refuses_outstanding_rounds(model, compile_counter, sparse, value):
    message = f"outstanding_rounds must be an integer >= 1, got {value!r}"
    with compile_counter() as compiled, pytest.raises(ValueError, match=message):
        slj.start(model, [[1]], sparse=sparse, outstanding_rounds=value)
    assert compiled.count == 0, compiled


def test_an_unknown_option_is_an_error(model):
    with pytest.raises(TypeError, match="max_tokens"):
        slj.generate(model, [[1]], max_tokens=3)  # type: ignore[call-arg]


def test_numpy_prompts_and_numbers_are_welcome(model):
    prompts: list = [np.asarray([1, 2]), [np.int64(1), np.int64(2)]]
    limit: Any = np.int64(2)
    out = slj.generate(model, prompts, max_new_tokens=limit)
    assert out.token_ids[0] == out.token_ids[1]


def test_an_empty_list_of_stop_tokens_never_stops(model):
    config = dataclasses.replace(model.config, eos_token_ids=tuple(range(128)))
    stops = slj.Ouro(config, params=model.params)
    assert slj.generate(stops, [[1]], max_new_tokens=4).finish_reasons == ["stop"]
    out = slj.generate(stops, [[1]], max_new_tokens=4, eos_token_id=[])
    assert (len(out.token_ids[0]), out.finish_reasons) == (4, ["length"])


def test_a_text_that_is_no_unicode():
    model = slj.load()
    message = r"prompt 0 is no Unicode text: .*surrogates"
    with pytest.raises(ValueError, match=message):
        slj.generate(model, "\ud800")
    with pytest.raises(ValueError, match=message):
        next(iter(slj.stream(model, "\ud800")))
    with slj.Engine(model, cache=slj.CacheConfig(num_pages=8)) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request("a", "\ud800")
        assert not engine.has_unfinished
