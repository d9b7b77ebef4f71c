"""`config.json` of a Hugging Face checkpoint to `OuroConfig`, and back.

Every key is used, known to change nothing here, or refused with its name and value: a key
that is passed over in silence is how a model comes to run with the wrong arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparse_loop_jax.checkpoint.strict_json import listed
from sparse_loop_jax.models.config import OuroConfig

# Keys that are fields of `OuroConfig` under the same name. Without the required ones the
# arithmetic would have to be guessed.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "total_ut_steps",
    "tie_word_embeddings",
)
OPTIONAL = ("early_exit_threshold", "bos_token_id", "initializer_range")
FLOATS = ("rms_norm_eps", "rope_theta", "early_exit_threshold", "initializer_range")

# Keys of which only these values are supported. Absent is fine, except for the first two.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("ouro",),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, 0, None),
    # In the published code, but in no published configuration.
    "early_exit_step": (None,),
    "chunk_size": (None,),
}

# Keys that change nothing here, and why.
HARMLESS = {
    "_name_or_path": "where the checkpoint once lay",
    "architectures": "names a class of another library; the tensors' names decide",
    "auto_map": "names code that is never run",
    "dtype": "the tensors' own dtype decides",
    "torch_dtype": "the tensors' own dtype decides",
    "max_window_layers": "says where sliding windows begin, and there are none",
    "pad_token_id": "batches are never padded with tokens",
    "transformers_version": "who wrote the file",
    "use_cache": "generation always uses a cache",
}


def config_from_dict(raw: dict[str, Any], where: str) -> OuroConfig:
    """Reads a `config.json` that was parsed already.

    `eos_token_id` may be an integer, a list or null. `rope_parameters` is accepted as the
    newer spelling of `rope_theta` where it asks for plain rotary embeddings.

    Args:
      raw: the keys and values.
      where: what the errors name, the file for example.

    Raises:
      ValueError: with every unknown key, unsupported value and missing key at once; or the
        first value that `OuroConfig` refuses.
    """
    raw = dict(raw)
    problems: list[str] = []
    values: dict[str, Any] = {}
    _take_rope_parameters(raw, problems)
    for key, value in raw.items():
        if key in FLOATS and type(value) is int:
            if abs(value) < 2**64:
                values[key] = float(value)
            else:
                problems.append(f"{key} has more than 64 bits")
        elif key in REQUIRED or key in OPTIONAL:
            values[key] = value
        elif key in FIXED:
            if not any(type(value) is type(v) and value == v for v in FIXED[key]):
                problems.append(f"{key} = {value!r} is not supported, only {FIXED[key][0]!r}")
        elif key not in HARMLESS and key not in ("eos_token_id", "layer_types"):
            problems.append(f"unknown key {key} = {value!r:.200}")
    missing = [key for key in (*REQUIRED, "model_type", "hidden_act") if key not in raw]
    if missing:
        problems.append(f"missing keys: {', '.join(missing)}")
    _check_layer_types(raw, problems)
    if not isinstance(raw.get("tie_word_embeddings", False), bool):
        problems.append(f"tie_word_embeddings = {raw['tie_word_embeddings']!r} is no boolean")
    try:
        values["eos_token_ids"] = token_ids(raw.get("eos_token_id"))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(f"{where}: not a supported configuration:{listed(problems)}")
    try:
        return OuroConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id`: an integer, a list of integers, or None for none at all.

    Raises:
      ValueError: anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id = {value!r:.200} is no token id and no list of them")
    return tuple(dict.fromkeys(ids))


def _take_rope_parameters(raw: dict[str, Any], problems: list[str]) -> None:
    """Replaces `rope_parameters` by the `rope_theta` it holds."""
    parameters = raw.pop("rope_parameters", None)
    if parameters is None:
        return
    plain = (
        isinstance(parameters, dict)
        and parameters.get("rope_type", "default") == "default"
        and set(parameters) <= {"rope_type", "rope_theta"}
        and raw.get("rope_theta") in (None, parameters.get("rope_theta"))
    )
    if not plain:
        problems.append(
            f"rope_parameters = {parameters!r:.200} is not supported, only rope_type "
            "'default' with the rope_theta of the other keys"
        )
    elif "rope_theta" in parameters:
        raw["rope_theta"] = parameters["rope_theta"]


def _check_layer_types(raw: dict[str, Any], problems: list[str]) -> None:
    types = raw.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or any(t != "full_attention" for t in types):
        problems.append(f"layer_types = {types!r:.200} is not supported, only 'full_attention'")
    elif "num_hidden_layers" in raw and len(types) != raw["num_hidden_layers"]:
        problems.append(
            f"layer_types has {len(types)} entries, num_hidden_layers is "
            f"{raw['num_hidden_layers']!r}"
        )


def config_to_dict(config: OuroConfig, dtype: np.dtype) -> dict[str, Any]:
    """The published keys for `config`; `config_from_dict` gives `config` back.

    Args:
      config: the architecture.
      dtype: of the weights, written as `torch_dtype`.
    """
    eos = config.eos_token_ids
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        **{key: getattr(config, key) for key in (*REQUIRED, *OPTIONAL)},
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "torch_dtype": str(dtype),
    }
