"""Tokenizer folders are read once, kept by their contents, and refused by their causes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers import convert
from trimaran.comm.tokenizers.prepare import prepare

DEMO = Path(__file__).parents[4] / "examples" / "demo_models" / "base"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of tokenizers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trimaran" / "tokenizers"


def copy_of_demo(target):
    target.mkdir()
    for path in DEMO.glob("*.json"):
        shutil.copy(path, target)
    return target


@pytest.fixture
def folder(tmp_path):
    return copy_of_demo(tmp_path / "tokenizer")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache that holds the demo model's tokenizer, and that tokenizer."""
    base = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        return base / "cache", prepare(copy_of_demo(base / "tokenizer"))


@pytest.fixture
def filled_cache(kept, cache, tmp_path):
    """A cache that holds the tokenizer of ``folder``."""
    shutil.copytree(kept[0], tmp_path / "cache")
    return cache


def _without_child(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")


def test_a_folder_is_converted_once_for_its_contents(cache, folder, tmp_path, monkeypatch):
    first = prepare(folder)
    _without_child(monkeypatch)
    assert prepare(folder) == first
    assert prepare(shutil.copytree(folder, tmp_path / "copy")) == first
    assert len(list(cache.iterdir())) == 1

    (folder / "model.safetensors").write_bytes(b"weights are not a tokenizer's")
    assert prepare(folder) == first
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(ConfigError, match="the process ended with 1"):
        prepare(folder)


def test_a_changed_file_gives_another_tokenizer(filled_cache, folder):
    assert prepare(folder).facts.end_id == 1
    # transformers prefers this file where both name a token.
    (folder / "special_tokens_map.json").unlink()
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "eos_token": "<pad>"}))
    assert prepare(folder).facts.end_id == 2


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("name", ["tokenizer.json", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_entry_is_made_again(kept, filled_cache, folder, name, damage, monkeypatch):
    (entry,) = filled_cache.iterdir()
    path = entry / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    assert prepare(folder) == kept[1]
    # From now on the entry is read again.
    _without_child(monkeypatch)
    assert prepare(folder) == kept[1]


def test_a_folder_that_changes_during_its_conversion_is_not_kept(cache, folder):
    def change():
        while not list(cache.glob("new-*")):
            time.sleep(0.002)
        (folder / "added_tokens.json").write_text("{}")

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    prepare(folder)
    thread.join()
    assert list(cache.iterdir()) == []


def test_the_folder_of_a_killed_conversion_is_deleted(cache, folder):
    killed, running = cache / "new-killed", cache / "new-running"
    for path in (killed, running):
        path.mkdir(parents=True)
    os.utime(killed, (0, 0))
    prepare(folder)
    assert running.exists()
    assert not killed.exists()


def test_a_class_that_runs_in_python_alone_is_refused_by_name(cache, tmp_path):
    folder = tmp_path / "byt5"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="its class ByT5Tokenizer runs in Python and has no"):
        prepare(folder)
    assert not list(cache.iterdir())


def test_code_of_a_folder_is_not_run(cache, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ConfigError, match="AutoTokenizer cannot read it"):
        prepare(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("name", ["AutoConfig", "pipeline", "CLIPProcessor"])
def test_a_folder_names_no_class_but_tokenizers(cache, tmp_path, name):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    text = f"tokenizer_config.json names {name} as its tokenizer_class, which is no tokenizer"
    with pytest.raises(ConfigError, match=text):
        prepare(folder)


@pytest.mark.parametrize(
    ("content", "package"), [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\n", "tiktoken")]
)
def test_the_package_that_reads_a_vocabulary_is_named_if_it_is_missing(
    tmp_path, monkeypatch, content, package
):
    (tmp_path / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=rf"package {package}, which is not installed\. Inst"):
        convert._check_packages(tmp_path)


def test_preparing_imports_neither_torch_nor_transformers(folder):
    program = (
        "import sys; from trimaran.comm.tokenizers import prepare as made;"
        "made.prepare(sys.argv[1]);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
