"""An adapter for EleutherAI's lm-evaluation-harness (extra "lm-eval").

    python -m sparse_loop_jax.evaluate.lm_eval run --model sparse-loop \
        --model_args pretrained=path/to/checkpoint,retention=0.1 --tasks arc_challenge

The harness's own command line, with the model "sparse-loop" known to it.

What is scored is decoding: a context is prefilled, which is dense at every retention, but
for its last token; that one and the continuation are fed one by one, so that every scored
token is predicted by a decoded row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparse_loop_jax.evaluate.forcing import Forced, force
from sparse_loop_jax.evaluate.inputs import rolling_windows
from sparse_loop_jax.evaluate.progress import Steps

try:
    from lm_eval.api.model import LM  # pyright: ignore
    from lm_eval.api.registry import register_model  # pyright: ignore
except ImportError as error:
    raise ImportError(
        "the adapter needs lm-evaluation-harness: pip install -e '.[lm-eval]'"
    ) from error

import sparse_loop_jax as slj

_GENERATION_KEYS = {
    "until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample", "temperature",
    "top_k", "top_p",
}  # fmt: skip


@register_model("sparse-loop")
class SparseLoopLM(LM):
    """A looped model under dense, sparse or speculative decoding.

    Args (as text or numbers: a command line gives text):
      pretrained: what `sparse_loop_jax.load` takes; None: the bundled model.
      revision, dtype: as for `load`.
      retention: share of keys that the consuming loops read; 1 is dense.
      speculative_tokens, draft_loops: self-speculation in `generate_until`, for speed; with
        0 tokens, none.
      batch_size: sequences at once.
      max_length: longest context; None: the model's.
      max_gen_toks: for tasks that do not say.
      implementation: of the ops.
      model: a loaded model, in place of `pretrained`.
      device: passed by the harness, "cuda:0" where nothing was said, and ignored: it is JAX
        that chooses the device.
      max_batch_size: passed by the harness; there is no automatic batch size, so only None.

    Raises:
      ValueError: a value is out of range, or the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        revision: str | None = None,
        dtype: str | None = None,
        retention: float | str = 1.0,
        speculative_tokens: int | str = 0,
        draft_loops: int | str = 2,
        batch_size: int | str = 16,
        max_length: int | str | None = None,
        max_gen_toks: int | str = 256,
        implementation: str | None = None,
        model: slj.Ouro | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        del device
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size is not an option of this model, got {max_batch_size!r}: give "
                "a batch_size"
            )
        self.batch_size = _integer("batch_size", batch_size, 1)
        self.max_gen_toks = _integer("max_gen_toks", max_gen_toks, 1)
        self.sparse = slj.SparseDecodeConfig(key_retention=float(retention))
        drafted = _integer("speculative_tokens", speculative_tokens, 0)
        self.speculative = None
        if drafted:
            self.speculative = slj.SpeculativeConfig(
                drafted, draft_loops=_integer("draft_loops", draft_loops, 1)
            )
        if model is None:
            model = slj.load(pretrained, dtype=dtype, revision=revision)
        if model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json, and the harness has text")
        context = model.config.max_position_embeddings
        self.max_length = context
        if max_length is not None:
            self.max_length = _integer("max_length", max_length, 2)
        if self.max_length > context:
            raise ValueError(
                f"max_length {self.max_length} is beyond the model's context of {context}"
            )
        self.model = model
        self.implementation = implementation
        self._name = pretrained or "bundled"

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return self._name.replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        config = self.model.config
        return config.eos_token_ids[0] if config.bos_token_id is None else config.bos_token_id

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens=False).ids

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether greedy decoding gives it) of each request.

        A context that does not fit is cut on the left.

        Raises:
          ValueError: a continuation is empty or longer than the context.
        """
        sequences = []
        for request in requests:
            context, continuation = request.args
            before, after = self._encode_pair(context, continuation)
            if not 0 < len(after) <= self.max_length:
                raise ValueError(
                    f"a continuation has {len(after)} tokens; it must have 1 to "
                    f"{self.max_length}: {continuation[:40]!r}"
                )
            ids = (before + after)[-(self.max_length + 1) :]
            sequences.append(Forced(np.asarray(ids, np.int32), len(ids) - len(after) - 1))
        results = self._score(sequences, disable_tqdm)
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text; every token is scored once, with all the context there is.

        All of a text is decoded, nothing prefilled: as severe a test of sparse decoding as
        there is, and a slow one.
        """
        sequences, owners = [], []
        for index, request in enumerate(requests):
            windows = rolling_windows(
                self.encode(request.args[0]), self.prefix_token_id, self.max_length
            )
            sequences += windows
            owners += [index] * len(windows)
        totals = [0.0] * len(requests)
        for owner, (logp, _) in zip(owners, self._score(sequences, disable_tqdm), strict=True):
            totals[owner] += logp
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Continues each context until one of its stop strings, which is left out.

        Raises:
          ValueError: an unknown keyword of generation, or no room for a context.
        """
        order = sorted(
            range(len(requests)),
            key=lambda i: (str(requests[i].args[1]), len(requests[i].args[0])),
        )
        texts = [""] * len(requests)
        with Steps(len(requests), None if not disable_tqdm else False) as steps:
            steps.begin("generate_until")
            for group in _groups(order, self.batch_size, lambda i: str(requests[i].args[1])):
                keywords = requests[group[0]].args[1]
                out = self._generate([requests[i].args[0] for i in group], keywords)
                for i, text in zip(group, out, strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    steps.done()
        return texts

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of what follows it, split where the whole text splits."""
        if not context:
            return [self.prefix_token_id], self.encode(continuation)
        # A blank belongs to the word after it.
        words = context.rstrip()
        continuation = context[len(words) :] + continuation
        whole, before = self.encode(words + continuation), self.encode(words)
        if not before:
            return [self.prefix_token_id], whole
        return whole[: len(before)], whole[len(before) :]

    def _score(self, sequences: Sequence[Forced], quiet: bool) -> list[tuple[float, bool]]:
        """Sum of log p over the rows of each sequence, and whether all are greedy."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(sequences)
        order = sorted(
            range(len(sequences)), key=lambda i: (sequences[i].rows, len(sequences[i].ids))
        )
        with Steps(len(sequences), None if not quiet else False) as steps:
            steps.begin("loglikelihood")
            for group in _groups(order, self.batch_size):
                mine = [sequences[i] for i in group]
                run = force(
                    self.model, mine, sparse=self.sparse, implementation=self.implementation
                )
                for column, (i, sequence) in enumerate(zip(group, mine, strict=True)):
                    rows = slice(0, sequence.rows)
                    wanted = sequence.ids[sequence.prefix + 1 :]
                    logp = -float(run.scores.nll[rows, column].sum(dtype=np.float64))
                    greedy = bool((run.scores.predicted[rows, column] == wanted).all())
                    results[i] = (logp, greedy)
                    steps.done()
        return results

    def _generate(self, contexts: list[str], keywords: dict[str, Any]) -> list[str]:
        unknown = sorted(set(keywords) - _GENERATION_KEYS)
        if unknown:
            raise ValueError(f"generate_until does not know the keywords {unknown}")
        until = keywords.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        limit = next(
            (
                int(keywords[k])
                for k in ("max_gen_toks", "max_new_tokens", "max_tokens")
                if keywords.get(k) is not None
            ),
            self.max_gen_toks,
        )
        if limit >= self.max_length:
            raise ValueError(
                f"{limit} new tokens leave no room in a context of {self.max_length}"
            )
        temperature = float(keywords.get("temperature") or 0.0)
        if keywords.get("do_sample") is False:
            temperature = 0.0
        prompts = [
            (self.encode(c) or [self.prefix_token_id])[limit - self.max_length :]
            for c in contexts
        ]
        texts = [""] * len(prompts)
        running = set(range(len(prompts)))
        chunks = slj.stream(
            self.model, prompts, max_new_tokens=limit, sparse=self.sparse,
            speculative=self.speculative, temperature=temperature,
            top_k=keywords.get("top_k"), top_p=keywords.get("top_p") or 1.0,
            exit_threshold=1.0, implementation=self.implementation,
        )  # fmt: skip
        for chunk in chunks:
            texts[chunk.index] += chunk.text or ""
            if chunk.finished or any(stop in texts[chunk.index] for stop in until):
                running.discard(chunk.index)
            if not running:
                break
        return [cut_at(text, until) for text in texts]


def cut_at(text: str, until: Sequence[str]) -> str:
    """The text before the first of the stop strings.

    >>> cut_at("4.\\n\\nQ: 5", ["Q:", "\\n\\n"])
    '4.'
    """
    places = [text.find(stop) for stop in until if stop and stop in text]
    return text[: min(places)] if places else text


def _groups(order: list[int], size: int, key: Callable[[int], Any] = lambda i: None):
    """Runs of at most `size` indices of equal key, in order."""
    group: list[int] = []
    for index in order:
        if group and (len(group) == size or key(index) != key(group[0])):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _integer(name: str, value: int | str, least: int) -> int:
    """A number that may have come as text.

    Raises:
      ValueError: it is no integer, or below `least`.
    """
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return number


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore

    cli_evaluate()
