"""FIFOs and devices in place of a model's files are refused: reading them may not end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import NoFileError, read_text
from trimaran.server.loading.reader import ModelReader
from trimaran.server.models.factory import read_labels
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.protocol.load_request import OverrideFolders
from trimaran.server.repository.model_repository import ModelRepository
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.lora.formats import AdapterFormatError
from trimaran.worker.lora.peft import PeftAdapter
from trimaran.worker.models.weights.checkpoint import file_entries

pytestmark = pytest.mark.timeout(20)

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}  # fmt: skip
DEMO = Path(__file__).parents[4] / "examples" / "demo_models" / "base"


def fifo(path: Path) -> Path:
    """A FIFO there, in place of what may be there."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_refusals_name_fifos_sockets_and_devices_by_kind(tmp_path):
    with pytest.raises(NoFileError) as caught:
        read_text(fifo(tmp_path / "fifo"))
    assert str(caught.value) == "it is a FIFO, not a file"
    assert caught.value.filename == str(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(NoFileError, match="it is a socket, not a file"):
            read_text(tmp_path / "socket")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(NoFileError, match="it is a device, not a file"):
        read_text(tmp_path / "link")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_a_fifo_for_a_configuration_is_refused_at_the_start_and_seen_by_a_poll(
    write_repository, tmp_path_factory
):
    root = write_repository()
    path = fifo(root / "postprocessing" / "config.pbtxt")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: it is a FIFO, not a file"):
        ModelRepository.load(root)
    overrides = OverrideFolders(str(tmp_path_factory.mktemp("overrides")))
    assert "postprocessing" in ModelReader(root, overrides).fingerprints()


def test_a_fifo_for_labels_is_refused(write_repository, edit):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(path, 'name: "OUTPUT"', 'name: "OUTPUT" label_filename: "labels.txt"')
    model = ModelRepository.load(root).models["postprocessing"]
    fifo(root / "postprocessing" / "labels.txt")
    with pytest.raises(ConfigError, match=r"labels\.txt cannot be read: it is a FIFO"):
        read_labels(model)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_fifo_in_a_tokenizers_folder_is_refused(tmp_path, name):
    for path in DEMO.glob("*token*.json"):
        (tmp_path / path.name).symlink_to(path)
    fifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}:? cannot be read: it is a FIFO"):
        Tokenizer(str(tmp_path))


def test_a_fifo_in_the_folder_of_a_slow_tokenizer_is_refused(tmp_path):
    path = fifo(tmp_path / "vocab.json")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: it is a FIFO"):
        Tokenizer(str(tmp_path))


def test_a_fifo_for_a_models_config_is_refused(tmp_path):
    path = fifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: it is a FIFO"):
        EngineFolder.load(tmp_path)


def test_a_fifo_for_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = fifo(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read .it is a FIFO"):
        EngineFolder.load(tmp_path)
    path = fifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read as torch.* it is a FIFO"):
        file_entries(path)


def test_a_fifo_for_an_adapters_config_is_refused(tmp_path):
    fifo(tmp_path / "adapter_config.json")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(AdapterFormatError, match="it is a FIFO"):
        PeftAdapter(tmp_path)
