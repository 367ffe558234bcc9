"""Repositories of the demo model with all of its text models."""

from __future__ import annotations

from pathlib import Path

from served import DEMO_MODEL, init_repo, run_trimaran


def build_engine(folder: Path) -> Path:
    """The demo model's engine for one rank."""
    output = folder / "engine"
    done = run_trimaran(
        "build", "--checkpoint", str(DEMO_MODEL), "--output", str(output),
        "--max-batch-size", "64", "--max-num-tokens", "1024", "--max-input-len", "896",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def make_repository(
    folder: Path, engine: Path, tokenizer: Path = DEMO_MODEL, **values: str
) -> Path:
    """A filled model repository for an engine, in ``folder``."""
    fill = {"tokenizer_dir": str(tokenizer), "engine_dir": str(engine), **values}
    text = ",".join(f"{key}:{value}" for key, value in fill.items())
    init_repo(str(folder / "models"), "--defaults", "--fill", text)
    return folder / "models"
