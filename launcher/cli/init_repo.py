"""`trimaran init-repo`: writes the five models of a repository, filled or as templates."""

from __future__ import annotations

import argparse
import logging
from importlib import resources
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.output_files import replace_text
from trimaran.launcher.cli.fill_template import fill, parse_substitutions
from trimaran.server.repository.config_pbtxt import open_placeholders, placeholder_names

logger = logging.getLogger(__name__)

MODELS = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")

# The values of `--defaults`: batches, streams, and one instance of each pipeline step.
DEFAULTS = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": "64",
    "decoupled_mode": "True",
    "batching_strategy": "inflight_fused_batching",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
}
# The scripts of Triton's TensorRT-LLM backend, by their documented paths, and the command that
# replaces each.
SCRIPTS = {
    "scripts/launch_triton_server.py": ("serve",),
    "bin/tritonserver": ("serve",),
    "tools/fill_template.py": ("fill-template",),
    "inflight_batcher_llm/client/inflight_batcher_llm_client.py": ("client", "token"),
    "inflight_batcher_llm/client/end_to_end_grpc_client.py": ("client", "text"),
    "tools/inflight_batcher_llm/benchmark_core_model.py": ("bench",),
    "tools/inflight_batcher_llm/end_to_end_test.py": ("client", "pipeline"),
    "tools/inflight_batcher_llm/speculative_decoding_test.py": ("client", "speculative"),
    "inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py": (
        "client",
        "speculative",
    ),
    "tensorrt_llm/examples/gpt/hf_gpt_convert.py": ("convert",),
    "tensorrt_llm/examples/gpt/convert_checkpoint.py": ("convert",),
    "tensorrt_llm/examples/llama/convert_checkpoint.py": ("convert",),
    "tensorrt_llm/examples/hf_lora_convert.py": ("convert-lora",),
    "tensorrt_llm/examples/gpt/build.py": ("build",),
    "tensorrt_llm/examples/llama/build.py": ("build",),
    "bin/trtllm-build": ("build",),
}
# Documents end the server by `pkill tritonserver`.
_NAMING = (
    "\nfrom trimaran.launcher.starters.process_tree import name_process",
    'name_process("tritonserver")\n',
)
_SCRIPT = '''#!/usr/bin/env python3
"""Runs `trimaran {command}` with this script's arguments."""

import sys

from trimaran.launcher.cli.main import main{import_line}

{naming}sys.exit(main([{words}, *sys.argv[1:]]))
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``trimaran init-repo``."""
    parser.add_argument("directory", help="folder of the repository; made if missing")
    parser.add_argument(
        "--fill",
        default="",
        metavar="KEY:VALUE,...",
        help="fill these placeholders in every model that has them",
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="give what every repository must say, and --fill does not, its usual value",
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        metavar="NAME,...",
        help="write these models alone",
    )
    parser.add_argument(
        "--scripts",
        metavar="DIR",
        help="also write launch, fill and client scripts under their documented paths",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing models")


def run(args: argparse.Namespace) -> int:
    """Write the repository, and the scripts if asked."""
    for flag, folder in (("directory", args.directory), ("--scripts", args.scripts)):
        # An unset shell variable gives an empty path, which would mean the current folder.
        if folder == "":
            raise ConfigError(f"the {flag} is empty. Name a folder; the current one is '.'.")
    root = Path(args.directory)
    names = [name.strip() for name in args.models.split(",")]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ConfigError(f"model {unknown[0]!r} is not one of {', '.join(MODELS)}")
    values = parse_substitutions(args.fill) if args.fill else {}
    texts = {name: template(name) for name in names}
    for key in values:
        if not any(f"${{{key}}}" in text for text in texts.values()):
            raise ConfigError(f"no template has the placeholder ${{{key}}}")
    if args.defaults:
        values = {**DEFAULTS, **values}
    try:
        for name, text in texts.items():
            _write_model(root / name, fill(text, values) if values else text, args.force)
        print(f"wrote {', '.join(names)} to {root}")
        _print_what_is_left(root, names)
        if args.scripts:
            _write_scripts(Path(args.scripts))
    except OSError as error:
        raise ConfigError(
            f"{error.filename or root}: {error.strerror}. Name a folder that can be written."
        ) from error
    return 0


def _print_what_is_left(root: Path, names: list[str]) -> None:
    """List the placeholders to fill before the repository can be served."""
    for name in names:
        path = root / name / "config.pbtxt"
        left = placeholder_names(open_placeholders(path.read_text(encoding="utf-8")))
        if left:
            print(f"to fill in {path}: {', '.join(left)}")


def template(model: str) -> str:
    """The template of one model's config.pbtxt."""
    folder = resources.files("trimaran.server.repository") / "templates" / model
    return (folder / "config.pbtxt").read_text(encoding="utf-8")


def _write_model(folder: Path, text: str, is_forced: bool) -> None:
    path = folder / "config.pbtxt"
    if path.exists() and not is_forced:
        raise ConfigError(f"{path} exists. Remove it, or overwrite it with --force.")
    (folder / "1").mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def _write_scripts(folder: Path) -> None:
    for name, words in SCRIPTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        quoted = ", ".join(f'"{word}"' for word in words)
        import_line, naming = _NAMING if words == ("serve",) else ("", "")
        path.write_text(
            _SCRIPT.format(
                command=" ".join(words), words=quoted, import_line=import_line, naming=naming
            )
        )
        path.chmod(0o755)
    print(f"wrote {', '.join(SCRIPTS)} to {folder}")
