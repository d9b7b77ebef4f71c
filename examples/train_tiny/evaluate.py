"""Measures a checkpoint loop by loop: held-out text, agreement, recall, several hops.

    python -m examples.train_tiny.evaluate out/tiny-ouro --json out/new.json
    python -m examples.train_tiny.evaluate bundled --json out/old.json

Any Ouro checkpoint with a tokenizer can be measured; questions that do not fit its context are
left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import sparse_loop_jax as slj
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.generation.buckets import power_of_two
from sparse_loop_jax.models import Ouro

from . import corpus as corpora
from .corpus import Corpus
from .network import default_attention
from .objective import Objective
from .questions import Asked, draw_hops, draw_recall
from .scoring import answered, rounded_list, score, score_padded
from .tables import comparison

TOKENS_AT_A_TIME = 32_768
SEED = 2**31 + 1  # of questions; training uses small seeds


def objective_for(model: Ouro) -> Objective:
    """Arithmetic in the model's own dtype."""
    dtype = str(model.dtype)
    return Objective(dtype=dtype, attention=default_attention(dtype), remat=False)


def measure_text(model: Ouro, text: str, *, window: int) -> dict:
    """Cross-entropy of each loop and agreement with the last, over windows of a text.

    Returns:
      `cross_entropy [D]` in nats per token, `nats_per_byte [D]`, which compares tokenizers,
      `agreement [D - 1]` of the likeliest tokens with the last loop's, `tokens`, `bytes`.

    Raises:
      ValueError: the text is shorter than a window.
    """
    ids = model.tokenizer.encode(text).ids
    count = len(ids) // window
    if count == 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a window of {window}")
    windows = np.asarray(ids[: count * window], np.int32).reshape(count, window)
    losses, equal = [], []
    rows = min(count, max(1, TOKENS_AT_A_TIME // window))
    for start in range(0, count, rows):  # fewer rows in the last group
        loss, token = score(
            model.params, model.config, objective_for(model), windows[start : start + rows]
        )
        losses.append(np.asarray(loss))
        equal.append(np.asarray(token[:-1] == token[-1:])[:, :, :-1])
    loss, agree = np.concatenate(losses, axis=1), np.concatenate(equal, axis=1)
    scored = windows[:, 1:]
    size = sum(len(model.tokenizer.decode(row.tolist()).encode()) for row in scored)
    return {
        "tokens": int(scored.size),
        "bytes": size,
        "cross_entropy": rounded_list(loss.mean(axis=(1, 2)), 4),
        "nats_per_byte": rounded_list(loss.sum(axis=(1, 2)) / size, 4),
        "agreement": rounded_list(agree.mean(axis=(1, 2)), 4),
    }


def measure_own_text(model: Ouro, text: str, *, prompts: int, tokens: int) -> list[float]:
    """Agreement `[D - 1]` of each loop with the last on greedy continuations of its own."""
    ids = model.tokenizer.encode(text).ids
    begin = min(64, len(ids) // 2)
    starts = np.linspace(0, len(ids) - begin, prompts).astype(int)
    heads = [ids[start : start + begin] for start in starts]
    out = slj.generate(model, heads, max_new_tokens=tokens, eos_token_id=[], progress=False)
    whole = [head + new for head, new in zip(heads, out.token_ids, strict=True)]
    length = power_of_two(begin + tokens)
    predicted = score_padded(
        model.params, model.config, objective_for(model), whole, length=length, rows=prompts
    )
    own = np.concatenate([p[:, begin - 1 : -1] for p in predicted], axis=1)
    return rounded_list((own[:-1] == own[-1:]).mean(axis=1), 4)


def measure_questions(model: Ouro, questions: Sequence[Asked]) -> list[np.ndarray | None]:
    """Whether each loop answers, bool `[D]`; None where the context is too short.

    An answer is right if all of its tokens are the likeliest ones, blanks apart.
    """
    results: list[np.ndarray | None] = [None] * len(questions)
    groups: dict[int, list[tuple[int, list[int], list[int]]]] = defaultdict(list)
    for index, question in enumerate(questions):
        head = model.tokenizer.encode(question.prompt).ids
        ids = model.tokenizer.encode(question.prompt + question.answer).ids
        marks = [
            i for i in range(len(head), len(ids)) if model.tokenizer.decode([ids[i]]).strip()
        ]
        length = power_of_two(len(ids))
        if length <= power_of_two(model.config.max_position_embeddings):
            groups[length].append((index, ids, marks))
    for length, group in sorted(groups.items()):
        tokens = score_padded(
            model.params,
            model.config,
            objective_for(model),
            [ids for _, ids, _ in group],
            length=length,
            rows=max(1, min(len(group), TOKENS_AT_A_TIME // length)),
        )
        for (index, ids, marks), predicted in zip(group, tokens, strict=True):
            results[index] = answered(predicted, ids, marks)
    return results


def by(results: Sequence[np.ndarray | None], keys: Sequence[int]) -> dict[str, list[float]]:
    """Accuracy of each loop by a key of the questions; those that were not asked left out."""
    groups: dict[int, list[np.ndarray]] = defaultdict(list)
    for result, key in zip(results, keys, strict=True):
        if result is not None:
            groups[key].append(result)
    return {str(key): rounded_list(np.mean(groups[key], axis=0), 4) for key in sorted(groups)}


def measure(
    model: Ouro, corpus: Corpus, text: str, *, lengths: Sequence[int], count: int, window: int
) -> dict:
    """All tables of a model; `count` questions of each kind, length and number of steps."""
    recalled = [(n, q) for n in lengths for q in draw_recall(corpus, n, count, seed=SEED)]
    hopped = [(n, q) for n in lengths for q in draw_hops(corpus, n, count, seed=SEED)]
    results = measure_questions(model, [q for _, q in recalled + hopped])
    recall, hops = results[: len(recalled)], results[len(recalled) :]
    return {
        "parameters": model.config.num_parameters,
        "context": model.config.max_position_embeddings,
        "dtype": str(model.dtype),
        "questions": count,
        "text": measure_text(model, text, window=window),
        "own_text": measure_own_text(model, text, prompts=16, tokens=min(128, window)),
        "recall_by_length": by(recall, [n for n, _ in recalled]),
        "hops_by_steps": by(hops, [q.hops for _, q in hopped]),
        "hops_by_length": by(hops, [n for n, _ in hopped]),
    }


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(prog="evaluate", description="Measures a checkpoint")
    parser.add_argument("checkpoint", help="a directory, or 'bundled'")
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    parser.add_argument("--text", type=Path, help="held-out text; default: the bundled one")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    model = slj.load(None if args.checkpoint == "bundled" else args.checkpoint)
    if args.text:
        text = args.text.read_text("utf-8")
    else:
        text = (tiny_ouro() / "heldout.txt").read_text("utf-8")
    found = measure(
        model,
        corpora.read(args.corpus),
        text,
        lengths=[int(n) for n in args.lengths.split(",")],
        count=args.count,
        window=args.window,
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(comparison({args.checkpoint: found}))
    return found


if __name__ == "__main__":
    main()
