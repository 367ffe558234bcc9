"""Files of API keys: their lines, what a header shows, and files that change."""

from __future__ import annotations

import base64
import hashlib

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.server.access.api_keys import KeyFile, read_keys

KEY, OTHER = "k" * 16, "o" * 32


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_keys_have_names_and_categories(tmp_path):
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path = write(
        tmp_path / "keys", "# who may do what", "", f"user inference,metadata {KEY}",
        f"operator all sha256:{digest}",
    )  # fmt: skip
    found = read_keys(path)
    user, operator = found.find(f"Bearer {KEY}"), found.find(f"bearer {OTHER}")
    assert (user.name, user.categories) == ("user", {"inference", "metadata"})
    assert operator.name == "operator"
    assert "logging" in operator.categories
    assert found.open == {"health"}
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    "shown",
    ["", "Bearer", "Bearer ", f"Bearer {KEY}x", KEY, f"Digest {KEY}", "Basic !", "Basic aaaa",
     "Bearer \udcff", "Bearer " + "x" * 100_000],
)  # fmt: skip
def test_headers_without_a_key_are_recognised(tmp_path, shown):
    assert read_keys(write(tmp_path / "keys", f"user all {KEY}")).find(shown) is None


def test_a_key_may_be_sent_as_a_basic_auth_password(tmp_path):
    found = read_keys(write(tmp_path / "keys", f"user all {KEY}"))
    basic = base64.b64encode(f"user:{KEY}".encode()).decode()
    assert found.find(f"Basic {basic}").name == "user"
    other = base64.b64encode(f"root:{KEY}".encode()).decode()
    assert found.find(f"Basic {other}") is None


@pytest.mark.parametrize(("word", "opened"), [("none", set()), ("health,metadata", None)])
def test_the_anonymous_line_lists_categories_without_a_key(tmp_path, word, opened):
    path = write(tmp_path / "keys", f"user all {KEY}", f"anonymous {word}")
    assert read_keys(path).open == (set(word.split(",")) if opened is None else opened)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("user all", "line 1: 2 words, but a line is"),
        (f"user {KEY} all more", "line 1: 4 words, but a line is"),
        (f"user everything {KEY}", "line 1: unknown category 'everything'"),
        ("user all short", "a key of 5 characters can be guessed; 16 is the least"),
        ("user all sha256:zz", "sha256: needs 64 hexadecimal digits"),
        (f"user all {KEY}\nuser all {OTHER}", "line 2: the name 'user' or its key is"),
        (f"user all {KEY}\nother all {KEY}", "line 2: the name 'other' or its key is"),
        ("# nothing", "the file has no key"),
    ],
)
def test_an_invalid_line_is_refused_without_printing_keys(tmp_path, line, said):
    with pytest.raises(ConfigError) as caught:
        read_keys(write(tmp_path / "keys", line))
    assert said in str(caught.value)
    assert KEY not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_changed_key_file_takes_effect_and_a_broken_file_keeps_the_last_keys(
    tmp_path, caplog
):
    path = write(tmp_path / "keys", f"user all {KEY}")
    keys = KeyFile(path)
    write(tmp_path / "keys", f"user all {OTHER}")
    keys.reload()
    assert keys.current.find(f"Bearer {KEY}") is None
    write(tmp_path / "keys", "nonsense")
    keys.reload()
    assert keys.current.find(f"Bearer {OTHER}") is not None
    assert "The former 1 keys stay" in caplog.text


def test_a_world_readable_key_file_is_noted(tmp_path, caplog):
    path = tmp_path / "keys"
    write(path, f"user all {KEY}")
    path.chmod(0o644)
    KeyFile(str(path))
    assert "may be read by every user" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    KeyFile(str(path))
    assert caplog.text == ""
