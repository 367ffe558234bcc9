"""The files that a load reads, with concurrent writers."""

from __future__ import annotations

import os

from trimaran.server.loading import reader as model_reader
from trimaran.server.loading.reader import ModelReader
from trimaran.server.protocol.load_request import LoadRequest, OverrideFolders


def test_a_change_during_the_read_of_a_model_is_noticed_at_the_next_check(
    write_repository, edit, tmp_path_factory, monkeypatch
):
    root = write_repository()
    reader = ModelReader(root, OverrideFolders(tmp_path_factory.mktemp("overrides")))
    config, load_model = root / "ensemble" / "config.pbtxt", model_reader.load_model

    def loaded_amid_a_change(*arguments):
        model = load_model(*arguments)
        edit(config, "max_batch_size: 8", "max_batch_size: 16")
        return model

    monkeypatch.setattr(model_reader, "load_model", loaded_amid_a_change)

    read = reader.read([LoadRequest("ensemble")], lambda name: True)["ensemble"]

    assert read.source.config.max_batch_size == 8
    assert read.fingerprint != reader.fingerprints()["ensemble"]


def test_an_unchanged_model_keeps_its_fingerprint(write_repository, tmp_path_factory):
    root = write_repository()
    reader = ModelReader(root, OverrideFolders(tmp_path_factory.mktemp("overrides")))

    read = reader.read([LoadRequest(name) for name in reader.names()], lambda name: False)

    assert {name: each.fingerprint for name, each in read.items()} == reader.fingerprints()


def test_a_file_name_that_is_not_utf8_is_accepted(write_repository, tmp_path_factory):
    root = write_repository()
    reader = ModelReader(root, OverrideFolders(tmp_path_factory.mktemp("overrides")))
    before = reader.fingerprints()["ensemble"]
    named = os.path.join(os.fsencode(root), b"ensemble", b"caf\xe9.txt")
    with open(named, "w", encoding="utf-8") as file:
        file.write("read me")

    read = reader.read([LoadRequest("ensemble")], lambda name: True)["ensemble"]

    assert read.fingerprint == reader.fingerprints()["ensemble"] != before
