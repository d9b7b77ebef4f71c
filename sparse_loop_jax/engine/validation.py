"""From what a caller asked to a `Request`, or one clear error."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.engine.config import SamplingParams
from sparse_loop_jax.engine.request import Request
from sparse_loop_jax.engine.sizing import Sizing
from sparse_loop_jax.generation.inputs import make_requests
from sparse_loop_jax.generation.options import ExitRule, is_int
from sparse_loop_jax.models.ouro import Ouro


def make_request(
    model: Ouro,
    sizing: Sizing,
    spec: DecodeSpec,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    priority: int,
    arrival: int,
) -> Request:
    """Checks a request against the model and an engine's sizes.

    Raises:
      ValueError: as documented at `Engine.add_request`.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {params!r}")
    if not is_int(priority):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    for token in params.stop_token_ids:
        if token >= model.config.vocab_size:
            raise ValueError(
                f"stop_token_ids has {token}, which is not a token id below "
                f"{model.config.vocab_size}"
            )
    if params.stop and model.tokenizer is None:
        raise ValueError(
            f"stop {params.stop!r} needs texts and the model has no tokenizer: use "
            "stop_token_ids"
        )
    ids = make_requests(model, [prompt], 1, [])[0].prompt
    needed = len(ids) + params.max_tokens - 1
    numbers = f"{len(ids)} prompt tokens and max_tokens {params.max_tokens}"
    if needed > sizing.max_context:
        raise ValueError(
            f"{numbers} need a context of {needed} tokens and this engine serves "
            f"{sizing.max_context}: lower max_tokens, or raise max_context or num_pages"
        )
    blocks = sizing.blocks_for(needed)
    if blocks > sizing.num_blocks:
        raise ValueError(
            f"{numbers} need {blocks * sizing.loops} pages and the pool has "
            f"{sizing.num_blocks * sizing.loops}: lower max_tokens, or raise num_pages"
        )
    eos = () if params.ignore_eos else model.config.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stop_ids) > sizing.max_stop_ids:
        raise ValueError(
            f"stop_token_ids: the request has {len(stop_ids)} stop tokens and the engine takes "
            f"{sizing.max_stop_ids}: leave some out, or raise max_stop_ids of SchedulerConfig"
        )
    exit_rule = ExitRule.resolve(
        model.config, params.exit_threshold, params.min_loops, params.max_loops
    )
    exit_rule.check_depth(sparse=spec.sparse, speculative=spec.speculative)
    return Request(
        request_id,
        ids,
        params,
        stop_ids=stop_ids,
        exit_rule=exit_rule,
        priority=int(priority),
        arrival=arrival,
        tokenizer=model.tokenizer,
    )
