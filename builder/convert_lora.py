"""``trimaran convert-lora``: converts a PEFT adapter to the two files that requests carry."""

from __future__ import annotations

import argparse
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink
from trimaran.comm.errors import ConfigError

_TYPES = ("float16", "float32")


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran convert-lora``."""
    parser.add_argument("-i", "--in-file", "--input", type=Path, required=True, metavar="DIR",
                        help="a PEFT folder: adapter_config.json and its weights")  # fmt: skip
    parser.add_argument("-o", "--out-dir", "--output", type=Path, required=True, metavar="DIR",
                        help="where the two .npy files go")  # fmt: skip
    parser.add_argument("--storage-type", choices=_TYPES, default="float16",
                        help="of the weights (float16)")  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="list every module")


def run(args: argparse.Namespace) -> int:
    """Convert one adapter. Returns the exit code."""
    import torch

    from trimaran.worker.lora.formats import to_tensors, write_arrays
    from trimaran.worker.lora.layout import MODULE_NAMES, AdapterFormatError, check_values
    from trimaran.worker.lora.peft import PeftAdapter

    try:
        matrices = list(PeftAdapter(args.in_file).matrices())
        tensors = to_tensors(matrices)
    except AdapterFormatError as error:
        raise ConfigError(str(error)) from None
    try:
        check_values(matrices, torch.float32)
    except AdapterFormatError as error:
        raise ConfigError(f"{args.in_file}: {error}") from None
    write_arrays(tensors, args.out_dir, args.storage_type)
    for one in matrices if args.verbose else ():
        rank, inputs = one.a.shape
        name = MODULE_NAMES[one.module]
        print(f"layer {one.layer} {name}: size {rank}, {inputs} inputs, {len(one.b)} outputs")
    sizes = sorted({rank for _, _, rank in tensors.ranks})
    print(
        f"trimaran convert-lora: {len(matrices)} modules of size "
        f"{', '.join(map(str, sizes))} written to {args.out_dir}"
    )
    return 0
