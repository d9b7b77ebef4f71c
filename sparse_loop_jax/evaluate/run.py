"""`evaluate`: what each retention costs, in one call."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from sparse_loop_jax.evaluate import answers, continuations, text as text_tables
from sparse_loop_jax.evaluate.inputs import (
    Question,
    at_retention,
    check_retentions,
    text_prompts,
    text_windows,
)
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.report import Evaluation, Row
from sparse_loop_jax.generation.options import is_int
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig

RETENTIONS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)


def evaluate(
    model: Ouro,
    *,
    retentions: Iterable[float] = RETENTIONS,
    text: str | Sequence[int] | np.ndarray | None = None,
    questions: Sequence[Question] | None = None,
    prompts: int = 0,
    acceptance: bool = False,
    window: int = 512,
    prefix: int = 128,
    windows: int | None = 32,
    inside_windows: int = 8,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    speculative_tokens: int = 3,
    draft_loops: Sequence[int] | None = None,
    sparse: SparseDecodeConfig | None = None,
    batch: int = 32,
    implementation: str | None = None,
    progress: bool | Callable[[str], None] | None = None,
) -> Evaluation:
    """Measures a model at several retentions against its own dense decoding.

    Everything is greedy, or teacher-forced where the inputs have to be the same, and runs
    every loop. What is not given is not measured.

    Tables of the result (nats; loops and layers from 0; retention 1 is dense decoding):

    - "text", of `text`, a row for each retention. `tokens` judged; `keys read`, the share of
      dense attention's; `KV bytes` that a decoded token reads; `perplexity` and `nll` of
      the text when each token is decoded, not prefilled; `nll change` against dense and its
      `standard error` over windows, each by its tokens; mean and 99th percentile of
      `KL`(dense || sparse) of the next token; `agreement` of the likeliest token with
      dense's; the mean `margin` between the two largest logits, and dense's `margin where
      changed`, the mean over tokens where they disagree. Over `inside_windows` of the
      windows: mean and least `mass` of the kept keys in the loop that captured them, their
      `mass in loop` t under that loop's own dense softmax, and `error in loop` t, the norm
      of the attention output's difference from dense attention of the same input, relative
      to the norm of the latter.
    - "attention": those masses and errors by `loop`, `layer` and `head`.
    - "positions": the same by the number of keys that a row saw, `from` .. `to`.
    - "answers", of `questions`: how many are `right`, and how many were `lost` and `won`
      against dense.
    - "divergence", of `prompts` prompts out of `text`, continued by `new_tokens`: how many
      texts are `equal` to dense's, the median and `earliest` `first difference` (counted
      from 0; the number of tokens where there is none), dense's median margin between the
      two likeliest tokens there and its largest, and the `median margin` of all its tokens.
    - "acceptance", of the same prompts if `acceptance`: of `drafted` tokens the `accepted`
      share, in all and for each `token` of a round; `tokens a round` of K drafted
      ones that no limit cut short; and `yield`, the same per bytes of a whole pass over the
      weights, which a round costs 1 + K * draft loops / loops of.

    Args:
      model: any loaded model.
      retentions: in (0, 1], none twice. Dense is measured in any case.
      text: a string, or token ids.
      questions: from `read_questions`; needs a tokenizer.
      prompts: how many to continue.
      window, prefix: tokens of a window of the text, and how many of them are prefilled.
      windows: at most so many, evenly spaced over the text; None: all.
      inside_windows: windows whose attention is looked at, at most a batch; 0: none, which
        leaves out the "attention" table and the columns of mass and error.
      prompt_tokens, new_tokens: of each prompt.
      speculative_tokens: K.
      draft_loops: which to try; None: all.
      sparse: everything of the method but its retention; None: its defaults.
      batch: sequences at once. The logits of a batch of windows are held on the device.
      implementation: of the ops.
      progress: show a progress bar; None: if standard error is a terminal. A function gets a
        line for each part instead.

    Raises:
      ValueError: an argument is out of range or does not fit the model, or there is nothing
        to measure; nothing has run then.
    """
    wanted = check_retentions(retentions)
    _check_counts(
        prompts=(prompts, 0),
        inside_windows=(inside_windows, 0),
        new_tokens=(new_tokens, 2),
        speculative_tokens=(speculative_tokens, 1),
        batch=(batch, 1),
    )
    sparse = SparseDecodeConfig() if sparse is None else sparse
    config = model.config
    if text is None and questions is None:
        raise ValueError("nothing to measure: give a text, questions, or both")
    if (prompts or acceptance) and text is None:
        raise ValueError("prompts are taken from the text: give one")
    if acceptance and not prompts:
        raise ValueError("acceptance is measured on prompts: ask for at least one")
    drafting = range(1, config.total_ut_steps) if draft_loops is None else draft_loops
    for loops in drafting:
        if not is_int(loops) or not 1 <= loops < config.total_ut_steps:
            raise ValueError(
                f"draft_loops must be from 1 to {config.total_ut_steps - 1}, got {loops!r}"
            )
    cuts = [] if text is None else text_windows(
        model, text, window=window, prefix=prefix, most=windows
    )  # fmt: skip
    starts = []
    if prompts and text is not None:
        starts = text_prompts(model, text, count=prompts, tokens=prompt_tokens)
        if prompt_tokens + new_tokens - 1 > config.max_position_embeddings:
            raise ValueError(
                f"prompts of {prompt_tokens} tokens continued by {new_tokens} are more than "
                f"the model's context of {config.max_position_embeddings}"
            )

    asked = None if questions is None else answers.ask(model, questions)
    lengths = [len(w.ids) - 1 for w in cuts] + [len(p) + new_tokens - 1 for p in starts]
    lengths += [len(q.prompt) + q.limit - 1 for q in asked or []]
    longest = min(max(lengths), config.max_position_embeddings)
    for retention in wanted[1:]:
        at_retention(sparse, retention, longest, config).validate_for(config, longest)

    count = len(wanted)
    total = text_tables.parts(len(cuts), count, batch, inside_windows) if cuts else 0
    total += answers.parts(len(asked), count, batch) if asked else 0
    total += count + 1 if starts else 0
    total += count * len(drafting) if acceptance else 0
    tables: dict[str, list[Row]] = {}
    common: dict[str, Any] = {"sparse": sparse, "implementation": implementation}
    with Steps(total, progress) as steps:
        common["steps"] = steps
        if cuts:
            tables |= text_tables.measure_text(
                model, cuts, wanted, batch=batch, inside_windows=min(inside_windows, batch),
                **common,
            )  # fmt: skip
        if asked:
            tables["answers"] = answers.measure_answers(
                model, asked, wanted, batch=batch, **common
            )
        if starts:
            tables["divergence"] = continuations.measure_divergence(
                model, starts, wanted, new_tokens=new_tokens, **common
            )
        if acceptance:
            tables["acceptance"] = continuations.measure_acceptance(
                model, starts, wanted, new_tokens=new_tokens,
                speculative_tokens=speculative_tokens, draft_loops=drafting, **common,
            )  # fmt: skip
    setup = {
        "retentions": wanted,
        "window": window,
        "prefix": prefix,
        "windows": len(cuts),
        "inside windows": min(inside_windows, batch, len(cuts)),
        "questions": len(questions or []),
        "prompts": len(starts),
        "prompt tokens": prompt_tokens,
        "new tokens": new_tokens,
        "speculative tokens": speculative_tokens,
        "dtype": str(model.dtype),
        "device": jax.devices()[0].device_kind,
        "jax": importlib.metadata.version("jax"),
    }
    return Evaluation(tables, setup)


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (value, least) in counts.items():
        if not is_int(value) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
