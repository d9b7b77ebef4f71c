"""Sparse self-speculation of unequal requests: each gets what it would get alone."""

from __future__ import annotations

import dataclasses

import pytest

import sparse_loop_jax as slj

LENGTHS, LIMITS = (1, 12, 37), (7, 1, 20)
OPTIONS = {"eos_token_id": [], "sparse": slj.SparseDecodeConfig(key_retention=0.1)}


@pytest.fixture(scope="module")
def model(load_gold):
    """The first layer of "mha": half of the program to compile."""
    gold = load_gold("mha")
    params = dataclasses.replace(gold.params, layers=gold.params.layers[:1])
    config = dataclasses.replace(gold.config, num_hidden_layers=1)
    return slj.Ouro(config, params=params)


@pytest.fixture(scope="module")
def prompts(load_gold):
    ids = load_gold("mha").dense["p1_input_ids"].tolist()
    return [ids[-n:] for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Tokens of each request by itself, without speculation."""
    return [
        slj.generate(model, [prompt], max_new_tokens=limit, **OPTIONS).token_ids[0]
        for prompt, limit in zip(prompts, LIMITS, strict=True)
    ]


@pytest.mark.parametrize(
    "speculative",
    [
        slj.SpeculativeConfig(3, 2),
        slj.SpeculativeConfig(4, 1),
        slj.SpeculativeConfig(4, 2, adaptive=True),
    ],
    ids=["3 of 2 loops", "4 of 1 loop", "up to 4 of 2 loops"],
)
def test_unequal_requests_get_what_they_would_get_alone(model, prompts, alone, speculative):
    options = {"max_new_tokens": LIMITS, "speculative": speculative, **OPTIONS}
    out = slj.generate(model, prompts, **options)
    assert out.token_ids == alone
    assert 0 < out.stats.accepted < out.stats.drafted
    if speculative.adaptive or speculative.draft_loops == 1:
        return  # one way is enough for the stream, which compiles a program of its own
    streamed = [[], [], []]
    for chunk in slj.stream(model, prompts, **options):
        streamed[chunk.index] += chunk.token_ids
    assert streamed == alone
