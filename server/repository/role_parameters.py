"""The parameters of the text-level models' config.pbtxt, and what becomes of each."""

from __future__ import annotations

from trimaran.server.repository.parameter_table import (
    Known,
    accepted,
    refused,
    required,
    served,
)

_NO_IMAGES = "multimodal models are not served by this version"

PREPROCESSING_PARAMETERS: dict[str, Known] = {
    "tokenizer_dir": required("tokenizer_dir"),
    "tokenizer_type": accepted("str", "the tokenizer folder says what it is"),
    "add_special_tokens": served("loose_bool"),
    "multimodal_model_path": refused("str", _NO_IMAGES),
    "gpt_model_path": accepted("str", "only multimodal models need it"),
    "max_num_images": accepted("str", "only multimodal models need it"),
}

POSTPROCESSING_PARAMETERS: dict[str, Known] = {
    "tokenizer_dir": required("tokenizer_dir"),
    "tokenizer_type": accepted("str", "the tokenizer folder says what it is"),
    "skip_special_tokens": served("loose_bool"),
}

BLS_PARAMETERS: dict[str, Known] = {
    "accumulate_tokens": served("loose_bool"),
    "tensorrt_llm_model_name": served("str"),
    "tensorrt_llm_draft_model_name": refused(
        "str", "speculative decoding is not served by this version"
    ),
    "multimodal_encoders_name": refused("str", _NO_IMAGES),
}
