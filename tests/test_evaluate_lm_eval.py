"""The adapter for lm-evaluation-harness.

The harness brings sixty packages, so the tests make do with a stand-in of the two names that
the adapter takes from it. Where the harness is installed, one test runs it for real.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import types

import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate import Forced, force

INSTALLED = importlib.util.find_spec("lm_eval") is not None


@dataclasses.dataclass
class Request:
    """The harness's `Instance`, as far as a model looks."""

    args: tuple


class Hook:
    """The harness's cache, which remembers what it was told."""

    def __init__(self):
        self.told = []

    def add_partial(self, kind, args, result):
        self.told.append((kind, args, result))


class StandIn:
    def __init__(self):
        self.cache_hook = Hook()


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module, on the harness or on a stand-in of it."""
    name, names = "sparse_loop_jax.evaluate.lm_eval", {}
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED:
            for part in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
                patch.setitem(sys.modules, part, types.ModuleType(part))
            sys.modules["lm_eval.api.model"].LM = StandIn  # pyright: ignore
            sys.modules["lm_eval.api.registry"].register_model = (  # pyright: ignore
                lambda key: lambda cls: names.setdefault(key, cls)
            )
        patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        if not INSTALLED:
            assert names == {"sparse-loop": module.SparseLoopLM}
        yield module


@pytest.fixture
def make(adapter, ascii_checkpoint):
    """A function from model arguments, as text, to the model."""

    def make(**arguments):
        lm = adapter.SparseLoopLM(str(ascii_checkpoint), **arguments)
        lm.cache_hook = Hook()
        return lm

    return make


def _score(model, text, start, first=None):
    """Sum of log p(text[start:]) by `forward`, and whether each token is the likeliest."""
    ids = ([] if first is None else [first]) + [ord(c) for c in text]
    start += first is not None
    # Padded to one shape: what follows a token does not change its logits.
    padded = ids + [0] * (48 - len(ids))
    logits = np.asarray(slj.forward(model, padded).loop_logits()[0], np.float64)
    rows = np.arange(start - 1, len(ids) - 1)
    logp = logits[rows] - np.log(np.exp(logits[rows]).sum(axis=-1, keepdims=True))
    wanted = np.array(ids[start:])
    return logp[np.arange(len(rows)), wanted].sum(), (logp.argmax(axis=-1) == wanted).all()


def test_loglikelihood_is_that_of_forward(make):
    lm = make(batch_size="4")
    greedy = slj.generate(lm.model, ["The cat"], max_new_tokens=2).texts[0]
    requests = [Request(a) for a in (("The cat", " sat"), ("", "word"), ("The cat", greedy))]
    got = lm.loglikelihood(requests, disable_tqdm=True)
    wants = [
        _score(lm.model, "The cat sat", 7),
        _score(lm.model, "word", 0, first=0),  # conditioned on the beginning of a text
        _score(lm.model, "The cat" + greedy, 7),
    ]
    for (logp, best), (want, wanted) in zip(got, wants, strict=True):
        assert logp == pytest.approx(want, abs=1e-4)
        assert best == wanted
    assert [best for _, best in got] == [False, False, True]
    assert lm.cache_hook.told == [
        ("loglikelihood", r.args, g) for r, g in zip(requests, got, strict=True)
    ]


def test_blanks_go_with_the_continuation(make):
    lm = make()
    assert lm._encode_pair("ab  ", "cd") == ([97, 98], [32, 32, 99, 100])
    assert lm._encode_pair("  ", "cd") == ([0], [32, 32, 99, 100])
    assert lm._encode_pair("", "cd") == ([0], [99, 100])


def test_a_long_context_is_cut_on_the_left(make):
    lm = make(max_length="6")
    ((logp, _),) = lm.loglikelihood([Request(("0123456789", "abc"))])
    want, _ = _score(lm.model, "6789abc", 4)
    assert logp == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("continuation", ["", "1234567"])
def test_continuations_that_do_not_fit_are_refused(make, continuation):
    lm = make(max_length=6)
    with pytest.raises(ValueError, match="tokens; it must have 1 to 6"):
        lm.loglikelihood([Request(("ab", continuation))])


def test_every_scored_token_is_of_a_decoded_row(make):
    lm = make(retention="0.1")
    context, continuation = "Many words of context here", " and then some"
    ((logp, _),) = lm.loglikelihood([Request((context, continuation))])
    ids = np.array([ord(c) for c in context + continuation], np.int32)
    forced = Forced(ids, len(context) - 1)
    run = force(lm.model, [forced], sparse=slj.SparseDecodeConfig(key_retention=0.1))
    assert logp == pytest.approx(-run.scores.nll[run.live].sum(), abs=1e-4)
    dense, _ = _score(lm.model, context + continuation, len(context))
    assert abs(logp - dense) > 1e-3


def test_rolling_scores_every_token_once(make):
    lm = make(max_length="8")
    text = "abcdefghijk"
    (total,) = lm.loglikelihood_rolling([Request((text,))])
    first, _ = _score(lm.model, text[:8], 0, first=0)
    # The rest, with all the context that 8 tokens leave room for.
    rest, _ = _score(lm.model, text[2:], 6)
    assert total == pytest.approx(first + rest, abs=1e-4)
    assert lm.cache_hook.told[0][:2] == ("loglikelihood_rolling", (text,))
    assert lm.loglikelihood_rolling([Request(("",))]) == [0.0]


def test_generate_until(make):
    lm = make(speculative_tokens="2", draft_loops="1")
    contexts = ["The cat", "A dog and"]
    texts = slj.generate(lm.model, contexts, max_new_tokens=12).texts
    stop = texts[1][3:5]
    requests = [
        Request((contexts[0], {"until": ["\x7f\x7f"], "max_gen_toks": 12, "do_sample": False})),
        Request((contexts[1], {"until": [stop], "max_gen_toks": 12})),
    ]
    got = lm.generate_until(requests, disable_tqdm=True)
    assert got == [texts[0], texts[1][: texts[1].index(stop)]]
    assert [told[2] for told in lm.cache_hook.told] != []


def test_keywords_of_generation(make):
    lm = make(max_length=16)
    with pytest.raises(ValueError, match=r"does not know the keywords \['num_beams'\]"):
        lm.generate_until([Request(("a", {"num_beams": 2}))])
    with pytest.raises(ValueError, match="16 new tokens leave no room in a context of 16"):
        lm.generate_until([Request(("a", {"max_new_tokens": 16}))])


def test_stop_strings(adapter):
    assert adapter.cut_at("one two three", ["three", "two"]) == "one "
    assert adapter.cut_at("one", ["", "two"]) == "one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retention": "1.5"}, r"key_retention must be a number in \(0, 1\]"),
        ({"batch_size": "auto"}, "batch_size must be an integer >= 1, got 'auto'"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"max_gen_toks": "0"}, "max_gen_toks must be an integer >= 1"),
        ({"speculative_tokens": -1}, "speculative_tokens must be an integer >= 0"),
        ({"speculative_tokens": 1, "draft_loops": "0"}, "draft_loops must be an integer >= 1"),
        ({"max_length": 1}, "max_length must be an integer >= 2"),
        ({"max_length": 513}, "max_length 513 is beyond the model's context of 512"),
        ({"max_batch_size": 8}, "max_batch_size is not an option of this model, got 8"),
    ],
)
def test_bad_arguments(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_model_without_a_tokenizer(adapter, load_gold):
    with pytest.raises(ValueError, match=r"no tokenizer\.json, and the harness has text"):
        adapter.SparseLoopLM(model=load_gold("mha").model())


def test_without_the_harness_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "sparse_loop_jax.evaluate.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[lm-eval\]'"):
        importlib.import_module("sparse_loop_jax.evaluate.lm_eval")


@pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed")
@pytest.mark.filterwarnings("default")  # its dependencies are not ours to keep quiet
def test_the_harness_itself(adapter, ascii_checkpoint, tmp_path):
    import lm_eval  # pyright: ignore
    from lm_eval.tasks import TaskManager  # pyright: ignore

    rows = [{"q": f"Word {i}", "right": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/rows.jsonl}}\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: local_choice\n{data}output_type: multiple_choice\ntest_split: train\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: [' no', ' yes']\ndoc_to_target: right\n"
    )
    (tmp_path / "words.yaml").write_text(
        f"task: local_words\n{data}output_type: loglikelihood_rolling\ntest_split: train\n"
        "doc_to_text: ''\ndoc_to_target: '{{q}}'\nmetric_list: [{metric: word_perplexity}]\n"
    )
    (tmp_path / "free.yaml").write_text(
        f"task: local_free\n{data}output_type: generate_until\ntest_split: train\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: 'x'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 4}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    results = lm_eval.simple_evaluate(
        model="sparse-loop",
        model_args=f"pretrained={ascii_checkpoint},retention=0.5",
        tasks=["local_choice", "local_words", "local_free"],
        batch_size=4,
        device="cuda:0",  # what the harness's command line passes by default
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    lm = adapter.SparseLoopLM(str(ascii_checkpoint), retention=0.5)
    right = 0
    for row in rows:
        pairs = [Request((row["q"], c)) for c in (" no", " yes")]
        scores = [logp for logp, _ in lm.loglikelihood(pairs, disable_tqdm=True)]
        right += int(np.argmax(scores)) == row["right"]
    assert results["results"]["local_choice"]["acc,none"] == right / 4
    total = sum(lm.loglikelihood_rolling([Request((r["q"],)) for r in rows]))
    assert results["results"]["local_words"]["word_perplexity,none"] == pytest.approx(
        np.exp(-total / 8), rel=1e-5
    )
    assert results["results"]["local_free"]["exact_match,none"] == 0
