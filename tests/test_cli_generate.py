"""`sparse-loop generate`: text, statistics, streams, and complaints."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.cli import main, naming, notes

PROMPT = "Once upon a time"
BOTH = ["--retention", "0.25", "--speculative-tokens", "2", "--draft-loops", "1"]


@pytest.fixture
def generate(ascii_checkpoint, capsys):
    """A function from arguments to what the command prints: output, errors."""

    def run(*arguments: str) -> tuple[str, str]:
        command = ["generate", "--model", str(ascii_checkpoint), "--max-new-tokens", "9"]
        assert main([*command, "--no-eos", *arguments]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def expected(ascii_checkpoint):
    """The nine characters that greedy decoding adds, for each retention."""
    model = slj.load(ascii_checkpoint)

    def text(retention):
        sparse = slj.SparseDecodeConfig(key_retention=retention)
        out = slj.generate(model, PROMPT, max_new_tokens=9, eos_token_id=[], sparse=sparse)
        assert out.texts is not None
        return out.texts[0]

    return {retention: text(retention) for retention in (1.0, 0.25)}


def test_text_and_a_summary(generate, expected):
    out, err = generate(PROMPT)
    assert out == f"{PROMPT}{expected[1.0]}\n\n"
    assert err.startswith("[9 tokens; ")
    assert err.count("\n") == 1
    assert "drafts" not in err
    assert "keys" not in err


def test_several_prompts_are_a_batch(generate, expected):
    out, err = generate(PROMPT, "An", PROMPT)
    parts = out.split("\n\n")
    assert parts[0] == parts[2] == PROMPT + expected[1.0]
    assert parts[1].startswith("An")
    assert err.startswith("[27 tokens; ")


def test_sparse_and_speculative_with_statistics(generate, expected):
    out, err = generate(PROMPT, *BOTH, "--stats")
    text, stats = out.split("\n\n", maxsplit=1)
    assert text == PROMPT + expected[0.25]
    stats = json.loads(stats)
    assert stats["generated_tokens"] == 9
    assert stats["drafted"] > 0
    assert len(stats["acceptance_by_position"]) == 2
    assert stats["captured_rows"] > 0
    assert stats["consumed_rows"] == 2 * stats["captured_rows"]
    assert 0 < stats["keys_read"] < stats["keys_dense"]
    assert 0 < stats["retained_mass_min"][0] < stats["retained_mass_mean"][0] < 1
    read = stats["keys_read"] / stats["keys_dense"]
    assert f"{stats['accepted']} of {stats['drafted']} drafts accepted" in err
    mean, least = min(stats["retained_mass_mean"]), min(stats["retained_mass_min"])
    assert f"read {read:.0%} of the keys, with {mean:.2f} of the attention mass" in err
    assert f"on average, {least:.2f} at least" in err


def test_options_reach_generate(ascii_checkpoint, monkeypatch):
    seen = {}

    def fake(model, prompts, **options):
        seen.update(options, dtype=model.dtype.name, prompts=prompts)
        raise ValueError("enough")

    monkeypatch.setattr("sparse_loop_jax.generate", fake)
    flags = ["--dtype", "bfloat16", "--adaptive", "--speculative-tokens", "5", "--no-eos"]
    flags += ["--exit-threshold", "1", "--implementation", "xla", "--seed", "3"]
    flags += ["--min-loops", "2", "--max-loops", "3"]
    assert main(["generate", "a", "b", "--model", str(ascii_checkpoint), *flags]) == 2
    assert seen["prompts"] == ["a", "b"]
    assert seen["dtype"] == "bfloat16"
    assert seen["speculative"] == slj.SpeculativeConfig(5, draft_loops=2, adaptive=True)
    assert seen["sparse"] is None
    assert (seen["eos_token_id"], seen["max_new_tokens"]) == ([], 64)
    assert (seen["exit_threshold"], seen["min_loops"], seen["max_loops"]) == (1.0, 2, 3)
    assert (seen["implementation"], seen["seed"]) == ("xla", 3)


@pytest.mark.parametrize("flags", [[], BOTH])
def test_a_stream_prints_the_same_text(generate, expected, flags):
    out, err = generate(PROMPT, "--stream", *flags)
    assert out == f"{PROMPT}{expected[0.25 if flags else 1.0]}\n"
    assert re.fullmatch(r"\[\d+ tokens; .*\]\n", err)
    assert ("drafts accepted" in err) == bool(flags)


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_text_that_the_context_ends_is_told(ascii_checkpoint, generate, flags):
    context = slj.load(ascii_checkpoint).config.max_position_embeddings
    room = context - len(PROMPT) + 1  # one character is one token; the last needs no K/V
    _, err = generate(PROMPT, "--max-new-tokens", str(room), *flags)
    assert "note" not in err
    _, err = generate(PROMPT, "--max-new-tokens", str(room + 1), *flags)
    assert (
        f"note: 1 of 1 texts ended at the model's context of {context} tokens, after {room} "
        f"of {room + 1} new ones\n"
    ) in err


@pytest.mark.parametrize(
    ("stored", "asked", "version", "told"),
    [
        ("bfloat16", None, (0, 10, 2), True),
        ("bfloat16", "bfloat16", (0, 10, 2), False),
        ("float32", None, (0, 10, 2), False),
        ("bfloat16", None, (0, 11, 0), False),
    ],
)
def test_a_slow_dtype_is_told(monkeypatch, capsys, stored, asked, version, told):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    notes.note_slow_dtype(SimpleNamespace(dtype=jax.numpy.dtype(stored)), asked)
    assert ("add --dtype float32" in capsys.readouterr().err) == told


def test_samples_follow_the_seed(generate):
    options = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed"]
    first, again, other = (generate(PROMPT, *options, seed)[0] for seed in "778")
    assert first == again
    assert first != other


def test_text_without_a_tokenizer_is_refused(load_gold, capsys, monkeypatch):
    model = load_gold("mha").model()
    monkeypatch.setattr("sparse_loop_jax.load", lambda *_, **__: model)
    assert main(["generate", "text"]) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_new_tokens must be 1 or more", "--max-new-tokens must be 1 or more"),
        ("top_k must be above 0: got -1", "--top-k must be above 0: got -1"),
        ("seed must be small", "--seed must be small"),
        ("the seed must be small", "the seed must be small"),
        ("lower key_retention or num_pages", "lower --retention or num_pages"),
        ("pass max_loops=None", "pass no --max-loops"),
        ("/a/top_k.json: no such file", "/a/top_k.json: no such file"),
        ("model.layers.0.top_k is missing", "model.layers.0.top_k is missing"),
    ],
)
def test_errors_name_the_options_of_the_command(message, shown):
    names = ("max_new_tokens", "top_k", "seed", "retention", "max_loops", "model")
    args = argparse.Namespace(**dict.fromkeys(names))
    assert naming.with_options(message, args) == shown


def test_help_has_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--max-new-tokens N default: 64",
        "0 is greedy; default: 0.0",
        "--top-k TOP_K -",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROMPT, "--draft-loops", "2"], "need --speculative-tokens"),
        ([PROMPT, "--adaptive"], "need --speculative-tokens"),
        ([PROMPT, "And", "--stream"], "--stream prints one text at a time, got 2 prompts"),
        ([PROMPT, "--retention", "0"], "--retention must be a number in (0, 1], got 0.0"),
        (
            [PROMPT, "--speculative-tokens", "1000000000"],
            "--speculative-tokens must be below the model's context of 512 tokens",
        ),
        ([PROMPT, "--speculative-tokens", "0"], "--speculative-tokens must be an integer"),
        (
            [PROMPT, "--speculative-tokens", "2", "--draft-loops", "4"],
            "--draft-loops must be below the model's 4 loops, got 4",
        ),
        ([PROMPT, "--max-new-tokens", "0"], "--max-new-tokens must be an integer >= 1, got 0"),
        ([PROMPT, "--temperature", "-1"], "--temperature must be a finite number >= 0"),
        ([PROMPT, "--top-p", "0"], "--top-p must be in (0, 1]"),
        ([PROMPT, "--exit-threshold", "2"], "--exit-threshold must be in [0, 1]"),
        (
            [PROMPT, "--exit-threshold", "0.5", "--retention", "0.5"],
            "--exit-threshold 0.5 leaves early, but --retention takes every loop: pass "
            "--exit-threshold=1.0, or leave --retention out",
        ),
        ([PROMPT, "--implementation", "cuda"], "cuda"),
        ([""], "prompt 0 is empty"),
        (["a" * 513], "prompt 0 has 513 tokens, more than the context of 512"),
        ([PROMPT, "--revision", "main"], "revision is for Hub ids"),
    ],
)
def test_complaints_are_one_line_and_status_2(ascii_checkpoint, arguments, message, capsys):
    assert main(["generate", "--model", str(ascii_checkpoint), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparse-loop: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [[], BOTH])
def test_a_device_without_memory_is_one_line(ascii_checkpoint, capsys, monkeypatch, flags):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 5 bytes.\nMore")

    module = importlib.import_module("sparse_loop_jax.generation.generate")
    monkeypatch.setattr(module, "run_prompts", exhausted)
    command = ["generate", PROMPT, "--model", str(ascii_checkpoint), "--max-new-tokens", "9"]
    assert main([*command, *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sparse-loop: error: out of memory: Out of memory: 5 bytes.; planned")
    assert err.count("\n") == 1
    # What the same call allocates where there is memory.
    monkeypatch.undo()
    assert main([*command, *flags, "--stats"]) == 0
    stats = json.loads(capsys.readouterr().out.split("\n\n", maxsplit=1)[1])
    assert f"{stats['kv_cache_bytes']:,} bytes of K/V" in err
    assert f"and {stats['reference_store_bytes']:,} of sparse references" in err
    assert ("lower num_speculative_tokens" in err) is bool(flags)


def test_other_errors_of_the_device_keep_their_traceback(monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr("sparse_loop_jax.load", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        main(["generate", PROMPT])


def test_a_host_without_memory_is_one_line(monkeypatch, capsys):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr("sparse_loop_jax.load", exhausted)
    assert main(["generate", PROMPT]) == 2
    assert capsys.readouterr().err == (
        "sparse-loop: error: out of memory: the host has no more\n"
    )


def test_a_missing_checkpoint(tmp_path, capsys):
    assert main(["generate", "a", "--model", str(tmp_path / "missing")]) == 2
    assert "missing: no such directory" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparse_loop_jax.cli.generate.run", interrupted)
    assert main(["generate", "a"]) == 130
    assert capsys.readouterr().err == ""


def test_output_that_nobody_reads_any_more_ends_quietly():
    # More lines than a pipe holds, to a reader that takes one.
    program = (
        "import sys, sparse_loop_jax.cli.inspect as inspect, sparse_loop_jax.cli as cli;"
        "inspect.run = lambda args: [print('line') for _ in range(100_000)] and 0;"
        "sys.exit(cli.main(['inspect']))"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
