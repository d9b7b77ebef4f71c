"""`sparse-loop evaluate` from end to end, and the tables against plain arithmetic."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.cli import main
from sparse_loop_jax.cli.evaluate import parse_retentions
from sparse_loop_jax.evaluate import evaluate, read_json, text_windows
from sparse_loop_jax.evaluate.answers import is_right
from sparse_loop_jax.evaluate.plots import plot_positions
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.text import kv_bytes, standard_error

TEXT = "It is a truth universally acknowledged, that a single "
PROMPTS = ("What is the first letter? ", "And what the second?")
OPTIONS = ("--retentions=0.3", "--windows=3", "--window=24", "--prefix=8", "--prompts=0")


@pytest.fixture(scope="module")
def model(ascii_checkpoint):
    return slj.load(ascii_checkpoint)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """A text; two questions, of which dense decoding answers the first."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text(TEXT)
    texts = slj.generate(model, list(PROMPTS), max_new_tokens=[5, 5]).texts
    # Three tokens of the answer, so that five are decoded, and no letter after them.
    answers = [texts[0][:5], "q" if texts[1].strip()[:1] != "q" else "z"]
    with (folder / "tasks.jsonl").open("w") as file:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    return folder


@pytest.fixture(scope="module")
def result(ascii_checkpoint, files):
    """What the command wrote, and its picture."""
    command = ["evaluate", "--model", str(ascii_checkpoint), *OPTIONS]
    command += ["--text", str(files / "text.txt"), "--tasks", str(files / "tasks.jsonl")]
    command += ["--json", str(files / "out.json"), "--plot", str(files / "out.png")]
    assert main(command) == 0
    assert (files / "out.png").read_bytes().startswith(b"\x89PNG")
    return read_json(files / "out.json")


def test_perplexity_is_that_of_forward(model, result):
    windows = text_windows(model, TEXT, window=24, prefix=8, most=3)
    assert [len(w.ids) for w in windows] == [25, 25, 22]
    nll = []
    for w in windows:
        logits = np.asarray(slj.forward(model, w.ids[:-1]).loop_logits()[0], np.float64)
        logits = logits[w.prefix :]
        norm = np.log(np.exp(logits).sum(axis=-1))
        nll += (norm - logits[np.arange(w.rows), w.ids[w.prefix + 1 :]]).tolist()
    dense, sparse = result["text"]
    assert dense["retention"] == 1.0
    assert dense["tokens"] == sparse["tokens"] == len(nll) == 45
    assert dense["nll"] == pytest.approx(np.mean(nll), abs=1e-5)
    assert dense["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
    assert (dense["nll change"], dense["KL"], dense["agreement"]) == (0.0, 0.0, 1.0)


def test_parts_are_told_as_lines():
    lines = []
    with Steps(3, lines.append) as steps:
        for part in ("text, dense", "answers"):
            steps.begin(part)
            steps.done()
    assert lines == ["1/3 text, dense", "2/3 answers"]


def test_the_standard_error_counts_windows_by_their_tokens():
    values, groups = np.array([1.0, 2.0, 5.0, 8.0]), np.array([0, 0, 1, 1])
    # Equal groups: means 1.5 and 6.5, a deviation of 5 / sqrt(2), over sqrt(2).
    assert standard_error(values, groups) == pytest.approx(2.5)
    # By hand, mean 4: deviations summed by group -5 and 5, then -5, 1 and 4.
    assert standard_error(values, np.array([0, 0, 1, 2])) == pytest.approx(
        np.sqrt(3 / 2 * (25 + 1 + 16)) / 4
    )
    assert standard_error(values, np.zeros(4)) is None


def test_the_sparse_row_is_of_sparse_decoding(result):
    dense, sparse = result["text"]
    assert sparse["retention"] == 0.3
    assert sparse["nll change"] == pytest.approx(sparse["nll"] - dense["nll"], abs=1e-6)
    assert sparse["nll change"] != 0
    assert 0 < sparse["standard error"] < 1
    assert 0 < sparse["KL"] < sparse["KL p99"]
    assert 0 < sparse["mass min"] < sparse["mass"] < 1
    assert sparse["error in loop 2"] > 0
    assert sparse["mass in loop 3"] != sparse["mass"]


def test_keys_and_bytes(model, result):
    lengths = [n for w in (16, 16, 13) for n in range(9, 9 + w)]
    kept = [int(np.ceil(n * 0.3)) for n in lengths]
    dense, sparse = result["text"]
    keys = 2 * sum(lengths) + 2 * sum(kept)
    assert dense["keys read"] == 1.0
    assert sparse["keys read"] == pytest.approx(keys / (4 * sum(lengths)))
    # 1 layer, 4 heads, K and V of 16 float32 each.
    assert dense["KV bytes"] == pytest.approx(4 * sum(lengths) * 4 * 2 * 16 * 4 / 45)
    assert sparse["KV bytes"] == pytest.approx(keys * 4 * 2 * 16 * 4 / 45)


def test_heads_that_share_keys_never_read_more_than_all(load_gold):
    config = load_gold("gqa").config  # 8 query heads, 2 of keys and values
    per_key = 2 * 2 * config.head_dim * 4  # two layers, K and V, of 4 bytes

    def keys(retention):
        sparse = slj.SparseDecodeConfig(key_retention=retention)
        return kv_bytes(sparse, np.array([20]), config, 4) / per_key

    assert keys(0.1) == 2 * 20 * 2 + 2 * 2 * 8
    assert keys(0.5) == 4 * 20 * 2  # 10 for each of 8 heads are no more than all


def test_the_attention_table_averages_to_the_text_row(result):
    rows = result["attention"]
    assert len(rows) == 1 * 3 * 1 * 4  # retentions, loops, layers, heads
    assert {r["loop"] for r in rows} == {1, 2, 3}
    sparse = result["text"][1]
    for loop, name in ((1, "mass"), (2, "mass in loop 2"), (3, "mass in loop 3")):
        mine = [r["mass"] for r in rows if r["loop"] == loop]
        assert np.mean(mine) == pytest.approx(sparse[name])
    assert min(r["mass min"] for r in rows if r["loop"] == 1) == sparse["mass min"]
    assert all(r["error"] < 1e-5 for r in rows if r["loop"] == 1)


def test_text_alone_without_a_look_inside(model, result):
    alone = evaluate(
        model, retentions=[0.3], text=TEXT, windows=3, window=24, prefix=8, inside_windows=0,
        progress=True,
    )  # fmt: skip
    assert set(alone.tables) == {"text", "positions"}
    for mine, whole in zip(alone["text"], result["text"], strict=True):
        inside = {k for k in whole if k.startswith(("mass", "error"))}
        assert mine == {k: v for k, v in whole.items() if k not in inside}
    assert all(r["mass"] is None for r in alone["positions"])
    assert len(plot_positions(alone).axes) == 1


def test_positions_add_up_to_the_whole(result):
    for whole in result["text"]:
        rows = [r for r in result["positions"] if r["retention"] == whole["retention"]]
        assert (rows[0]["from"], rows[-1]["to"]) == (9, 24)
        assert all(a["to"] + 1 == b["from"] for a, b in itertools.pairwise(rows))
        tokens = np.array([r["tokens"] for r in rows])
        assert tokens.sum() == 45
        for name in ("nll", "KL", "nll change"):
            mean = np.array([r[name] for r in rows]) @ tokens / 45
            assert mean == pytest.approx(whole[name], abs=1e-6)


def test_answers(result):
    dense, sparse = result["answers"]
    assert (dense["questions"], dense["right"], dense["accuracy"]) == (2, 1, 0.5)
    assert (dense["lost"], dense["won"]) == (0, 0)
    assert sparse["right"] == 1 - sparse["lost"] + sparse["won"]


def test_what_counts_as_an_answer():
    assert is_right(" 337.\nThe", " 337")
    assert is_right("337", " 337 ")
    assert not is_right(" 3370", " 337")
    assert not is_right(" 33", " 337")
    assert not is_right("It is 337", " 337")


def test_the_setup_and_the_table_on_the_terminal(ascii_checkpoint, files, result, capsys):
    assert result.setup["windows"] == 3
    assert (result.setup["text"], result.setup["tasks"]) == ("text.txt", "tasks.jsonl")
    # The text alone, and no programs that have not been compiled.
    command = ["evaluate", "--model", str(ascii_checkpoint), *OPTIONS]
    assert main([*command, "--text", str(files / "text.txt")]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert f"{result['text'][0]['perplexity']:.0f}"[:2] in out
    assert "answers" not in out


def test_the_bundled_files_are_the_default(monkeypatch, capsys):
    seen = {}

    def fake(model, **options):
        seen.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("sparse_loop_jax.evaluate.evaluate", fake)
    assert main(["evaluate", "--questions", "5", "--acceptance"]) == 2
    assert "enough" in capsys.readouterr().err
    assert len(seen["questions"]) == 5
    assert all(q.prompt.startswith("Pointers:") for q in seen["questions"])
    encode = slj.load().tokenizer.encode
    assert 512 < max(len(encode(q.prompt).ids) for q in seen["questions"]) <= 1024
    assert seen["text"].startswith("es, would not justify")
    assert seen["retentions"] == [1.0, 0.5, 0.25, 0.1, 0.05, 0.02]
    assert (seen["acceptance"], seen["prompts"]) == (True, 8)


@pytest.mark.parametrize(("options", "kept"), [([], 2), (["--question-tokens", "4"], 1)])
def test_long_questions_can_be_left_out(ascii_checkpoint, tmp_path, monkeypatch, options, kept):
    """None is by default where the tasks are the user's own."""
    seen = {}

    def fake(model, **options):
        seen.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("sparse_loop_jax.evaluate.evaluate", fake)
    prompts = ["1234", "5" * 2000]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": p, "answer": "x"}) + "\n" for p in prompts))
    command = ["evaluate", "--model", str(ascii_checkpoint), "--tasks", str(tasks)]
    assert main([*command, *options]) == 2
    assert [q.prompt for q in seen["questions"]] == prompts[:kept]


def test_retentions_of_a_command_line():
    assert parse_retentions("1,0.5, .25,1e-2") == [1.0, 0.5, 0.25, 0.01]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retentions", "1,x"], "retentions are numbers like 1,0.5,0.1, got 'x'"),
        (["--retentions", ""], "retentions are numbers like 1,0.5,0.1, got ''"),
        (["--retentions", "1,nan"], "retentions are numbers like 1,0.5,0.1, got 'nan'"),
        (["--retentions", "0.5,0.5"], "retention 0.5 is given twice"),
        (["--retentions", "2"], "retentions must be numbers in (0, 1], got 2.0"),
        (["--questions", "0"], "--questions must be at least 1, got 0"),
        (["--question-tokens", "0"], "--question-tokens must be at least 1, got 0"),
        (["--json", "no/such/file.json"], "--json no/such/file.json: no such directory"),
        (["--plot", "no/such/file.png"], "--plot no/such/file.png: no such directory"),
        (["--plot", "a.picture"], "a.picture: a picture's name must end with one of ["),
        (["--text", "missing.txt"], "missing.txt"),
        (["--text", "EMPTY"], "the text is empty"),
        (["--text", "LATIN"], "is no UTF-8 text"),
        (["--tasks", "BROKEN"], "broken.jsonl, line 2: is no JSON"),
        (["--window", "600"], "window 600 is more than the model's context of 512"),
    ],
)
def test_complaints_are_one_line_and_status_2(
    ascii_checkpoint, files, tmp_path, arguments, message, capsys
):
    made = {"EMPTY": b"", "LATIN": b"caf\xe9", "BROKEN": None}
    arguments = list(arguments)
    for name, content in made.items():
        if name in arguments:
            path = tmp_path / f"{name.lower()}.jsonl"
            line = b'{"prompt": "a", "answer": "b"}\n{"prompt"'
            path.write_bytes(line if content is None else content)
            arguments[arguments.index(name)] = str(path)
    if "--text" not in arguments and "--tasks" not in arguments:
        arguments += ["--text", str(files / "text.txt")]
    assert main(["evaluate", "--model", str(ascii_checkpoint), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparse-loop: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    ascii_checkpoint, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = ["evaluate", "--model", str(ascii_checkpoint), "--plot", str(tmp_path / "a.png")]
    assert main([*command, "--text", str(files / "text.txt")]) == 2
    assert "plots need matplotlib: pip install -e '.[plots]'" in (capsys.readouterr().err)
