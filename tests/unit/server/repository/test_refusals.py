"""Faults of a repository are reported by file, line or key, value and remedy."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_repository import ModelRepository, model_folders


def refusal(root) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelRepository.load(root)
    return str(caught.value)


def test_an_unfilled_number_names_file_line_field_and_command(write_repository):
    root = write_repository(triton_max_batch_size="${triton_max_batch_size}")
    path = root / "ensemble" / "config.pbtxt"
    line = next(
        number
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if text.startswith("max_batch_size")
    )

    assert refusal(root) == (
        f"{path}:{line}: the placeholder ${{triton_max_batch_size}} of field 'max_batch_size' "
        f"is not filled. Fill: trimaran fill-template -i {path} triton_max_batch_size:VALUE"
    )


def test_every_unfilled_placeholder_is_named_at_once(write_repository):
    root = write_repository(
        logits_datatype="${logits_datatype}", decoupled_mode="${decoupled_mode}"
    )
    (root / "ensemble" / "config.pbtxt").unlink()

    message = refusal(root)

    assert "${decoupled_mode} of field 'decoupled' is not filled" in message
    assert "(nor are logits_datatype)" in message
    assert message.endswith("decoupled_mode:VALUE,logits_datatype:VALUE")


def test_placeholders_in_comments_and_strings_are_legal(write_repository, edit):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(path, "dynamic_batching", "# fill ${this}\n# it's $that\ndynamic_batching")

    assert "postprocessing" in ModelRepository.load(root).models


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("dynamic_batching { }", "dynamic_batchin { }", 'no field named "dynamic_batchin"'),
        ("dynamic_batching { }", "dynamic_batching {", 'no field named "input"'),
        ("max_batch_size: 8", "max_batch_size: eight", "eight"),
        ("TYPE_INT32", "TYPE_INT33", "TYPE_INT33"),
    ],
)
def test_an_invalid_configuration_is_refused_with_its_line(
    write_repository, edit, old, new, complaint
):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(path, old, new)

    message = refusal(root)

    assert re.match(rf"{re.escape(str(path))}:\d+: not a valid model configuration: ", message)
    assert complaint in message


@pytest.mark.parametrize(
    "text",
    [
        'name: "postprocessing", backend: "python"; max_batch_size: 8',
        'name: "postprocessing" # comment\nbackend: "python" max_batch_size: 8',
    ],
)
def test_fields_may_be_separated_by_commas_semicolons_and_comments(
    write_repository, edit, text
):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(path, 'name: "postprocessing"\nbackend: "python"\nmax_batch_size: 8', text)

    assert ModelRepository.load(root).models["postprocessing"].config.backend == "python"


def test_a_byte_order_mark_before_a_configuration_is_ignored(write_repository):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    path.write_text(path.read_text(), encoding="utf-8-sig")

    assert ModelRepository.load(root).models["postprocessing"].config.backend == "python"


@pytest.mark.parametrize("spelling", ["true", "True", "t", "1"])
def test_booleans_have_the_spellings_of_text_format(write_repository, spelling):
    models = ModelRepository.load(write_repository(decoupled_mode=spelling)).models

    assert models["tensorrt_llm"].config.model_transaction_policy.decoupled


def test_parameters_may_be_a_list_of_messages_with_colons(write_repository, edit):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(
        path,
        'parameters {\n  key: "skip_special_tokens"\n'
        '  value { string_value: "${skip_special_tokens}" }\n}',
        'parameters: [ { key: "skip_special_tokens", value: { string_value: "no" } } ]',
    )

    parameters = ModelRepository.load(root).models["postprocessing"].parameters
    assert parameters.get_loose_bool("skip_special_tokens") is False


def test_a_tag_that_is_no_label_name_is_refused(write_repository):
    root = write_repository()
    path = root / "ensemble" / "config.pbtxt"
    with path.open("a") as file:
        file.write('metric_tags { key: "my-team" value: "7" }')
    with pytest.raises(ConfigError, match="metric_tags names 'my-team', which cannot name"):
        ModelRepository.load(root)


@pytest.mark.parametrize("bounds", ["500, 100", "1, 1", "nan", "inf", "1, inf"])
def test_invalid_histogram_buckets_are_refused(write_repository, bounds):
    root = write_repository()
    with (root / "ensemble" / "config.pbtxt").open("a") as file:
        file.write(
            "model_metrics { metric_control { metric_identifier { family: "
            '"nv_inference_first_response_histogram_ms" } '
            f"histogram_options {{ buckets: [{bounds}] }} }} }}"
        )

    assert f"in model_metrics are {bounds} but must be numbers that rise" in refusal(root)


@pytest.mark.parametrize("model", ["ensemble", "postprocessing", "tensorrt_llm"])
def test_a_batch_size_below_zero_is_refused(write_repository, edit, model):
    root = write_repository()
    edit(root / model / "config.pbtxt", "max_batch_size: 8", "max_batch_size: -1")

    assert "max_batch_size is -1 but must be 0 (no batches) or more" in refusal(root)


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm"])
def test_a_count_of_instances_below_zero_is_refused(write_repository, model):
    root = write_repository()
    with (root / model / "config.pbtxt").open("a") as file:
        file.write("instance_group { count: -1 kind: KIND_CPU }")

    assert "instance_group has the count -1 but must have 1 or more" in refusal(root)


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ("data_type: TYPE_FP32 dims: 1", "'' has no name"),
        ('name: "Z" dims: 1', "'Z' has no data_type"),
        ('name: "Z" data_type: TYPE_FP32 dims: -2', "'Z' has dims [-2] but each must be 1"),
        ('name: "Z" data_type: TYPE_FP32 dims: [ 4, 0 ]', "'Z' has dims [4, 0] but each must"),
        (
            'name: "Z" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, -3 ] }',
            "'Z' has reshape [2, -3] but each must be 1 or more",
        ),
        (
            'name: "Z" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 3 ] }',
            "'Z' has dims [4] but reshape [2, 3], which is of another size",
        ),
        (
            'name: "Z" data_type: TYPE_FP32 dims: -1 reshape { shape: [ ] }',
            "'Z' has dims [-1] but reshape [], which is of another size",
        ),
    ],
)
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_tensor_with_an_impossible_shape_is_refused(
    write_repository, side, declaration, said
):
    root = write_repository()
    with (root / "ensemble" / "config.pbtxt").open("a") as file:
        file.write(f"{side} {{ {declaration} }}")

    assert f"the {side} {said}" in refusal(root)


def test_an_input_declared_twice_is_refused(write_repository):
    root = write_repository()
    with (root / "postprocessing" / "config.pbtxt").open("a") as file:
        file.write('input { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [ -1, -1 ] }')

    assert "the input 'TOKENS_BATCH' is declared twice" in refusal(root)


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ("priority_levels: 2", "default_priority_level of dynamic_batching names level 0"),
        ("default_priority_level: 1", "level 1 but priority_levels is 0"),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 }",
            "priority_queue_policy of dynamic_batching names level 3 but priority_levels is 2",
        ),
    ],
)
def test_an_undeclared_priority_level_is_refused(write_repository, edit, queue, said):
    root = write_repository()
    path = root / "tensorrt_llm" / "config.pbtxt"
    edit(path, "dynamic_batching {", "dynamic_batching { " + queue)

    assert f"{path}: " in refusal(root)
    assert said in refusal(root)


def test_a_model_name_different_from_its_folder_is_refused(write_repository, edit):
    root = write_repository()
    path = root / "tensorrt_llm" / "config.pbtxt"
    edit(path, 'name: "tensorrt_llm"', 'name: "tensorrt_llm_2"')

    assert refusal(root) == (
        f"{path}: name is 'tensorrt_llm_2' but the folder is 'tensorrt_llm'. Make them equal "
        "or remove the name."
    )


def test_a_model_needs_a_numbered_version_folder(write_repository, caplog):
    root = write_repository()
    (root / "tensorrt_llm" / "backup").mkdir()
    (root / "tensorrt_llm" / "²").mkdir()
    (root / "tensorrt_llm" / "3").mkdir()
    with caplog.at_level(logging.WARNING):
        assert ModelRepository.load(root).models["tensorrt_llm"].versions == (3,)
    assert "'backup' is not a version number and is ignored" in caplog.text

    (root / "ensemble" / "1").rmdir()
    assert refusal(root) == (
        f"{root}/ensemble: holds no version folder. Make one: mkdir {root}/ensemble/1"
    )


@pytest.mark.parametrize("name", ["02", "²", "٢", "+2"])
def test_a_version_folder_must_have_a_plain_number(write_repository, caplog, name):
    root = write_repository()
    (root / "postprocessing" / name).mkdir()
    with caplog.at_level("WARNING"):
        assert ModelRepository.load(root).models["postprocessing"].versions == (1,)
    assert f"'{name}' is not a version number and is ignored" in caplog.text


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", (10,)), ("version_policy { latest { num_versions: 2 } }", (3, 10)),
        ("version_policy { all { } }", (1, 3, 10)),
        ("version_policy { specific { versions: [ 3, 1, 3 ] } }", (1, 3)),
    ],
)  # fmt: skip
def test_the_version_policy_chooses_versions(write_repository, policy, versions):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    path.write_text(path.read_text() + policy)
    for version in ("3", "10"):
        (root / "postprocessing" / version).mkdir()

    assert ModelRepository.load(root).models["postprocessing"].versions == versions


@pytest.mark.parametrize("version", ["1", "0"])
def test_a_step_may_name_the_served_version(write_repository, edit, version):
    root = write_repository()
    edit(root / "ensemble" / "config.pbtxt", "model_version: -1", f"model_version: {version}")

    assert "ensemble" in ModelRepository.load(root).models


def test_a_step_with_an_unserved_version_is_refused(write_repository, edit):
    root = write_repository()
    edit(root / "ensemble" / "config.pbtxt", "model_version: -1", "model_version: 5")

    assert "runs version 5 of 'preprocessing', which serves 1" in refusal(root)


def test_versions_of_the_version_policy_must_exist(write_repository):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    path.write_text(path.read_text() + "version_policy { specific { versions: [ 4 ] } }")

    assert refusal(root) == f"{path}: version_policy names version 4, but the folder holds 1"


@pytest.mark.parametrize(
    ("model", "tensor", "role"),
    [
        ("tensorrt_llm", "input_lengths", "token model"),
        ("preprocessing", "QUERY", "preprocessing"),
        ("postprocessing", "TOKENS_BATCH", "postprocessing"),
        ("tensorrt_llm_bls", "max_tokens", "bls"),
    ],
)
def test_a_model_of_a_known_name_without_a_tensor_of_its_role_is_refused(
    write_repository, edit, model, tensor, role
):
    root = write_repository()
    path = root / model / "config.pbtxt"
    edit(path, f'name: "{tensor}"', 'name: "renamed"')

    assert refusal(root) == (
        f"{path}: a {role} has the input '{tensor}', which is not declared. A complete one: "
        f"trimaran init-repo FOLDER --models {model}"
    )


def test_an_output_declared_twice_is_accepted(write_repository, edit):
    root = write_repository()
    path = root / "ensemble" / "config.pbtxt"
    twice = 'output [ { name: "batch_index" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    path.write_text(path.read_text() + twice)

    assert "ensemble" in ModelRepository.load(root).models


def test_an_empty_or_missing_repository_says_how_to_write_one(tmp_path):
    assert refusal(tmp_path / "nowhere").endswith(
        f"is not a folder. Write one: trimaran init-repo {tmp_path}/nowhere"
    )
    assert f"trimaran init-repo {tmp_path}" in refusal(tmp_path)


def test_an_unreadable_repository_is_refused_with_the_reason(tmp_path, monkeypatch):
    def stale(_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("pathlib.Path.iterdir", stale)
    assert refusal(tmp_path) == (
        f"model repository {tmp_path} cannot be read: [Errno 116] Stale file handle. Look "
        "after the disk or network share that it lies on."
    )


@pytest.fixture
def lock(monkeypatch):
    """Make a folder unreadable for this user, even for root."""

    def lock(folder):
        real = Path.stat

        def stat(path, **options):
            if folder in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, **options)

        monkeypatch.setattr(Path, "stat", stat)

    return lock


def test_a_lost_and_found_folder_is_no_model(write_repository, lock):
    root = write_repository()
    (root / "lost+found").mkdir()
    lock(root / "lost+found")
    assert len(ModelRepository.load(root).models) == 5


def test_an_unreadable_model_is_refused_and_no_other_model(write_repository, lock):
    root = write_repository()
    lock(root / "postprocessing" / "1")
    path = root / "postprocessing" / "1" / "model.py"
    assert refusal(root) == (
        f"{path}: cannot be read: [Errno 13] Permission denied: '{path}'. Let the user "
        f"{os.geteuid()} read it, and enter every folder above it."
    )
    lock(root / "postprocessing")
    assert "postprocessing" in model_folders(root)
    assert refusal(root).startswith(f"{root / 'postprocessing'}: cannot be read: [Errno 13]")
    assert ModelRepository.load(root, ["preprocessing"]).models.keys() == {"preprocessing"}


def test_a_tensor_of_another_type_is_refused(write_repository, edit):
    root = write_repository()
    path = root / "postprocessing" / "config.pbtxt"
    edit(path, "TYPE_INT32", "TYPE_INT64")

    assert refusal(root) == (
        f"{path}: the input 'TOKENS_BATCH' has data_type TYPE_INT64 but must have TYPE_INT32"
    )


def test_logits_may_be_single_or_half_precision_only(write_repository):
    root = write_repository(logits_datatype="TYPE_FP64")

    assert "'context_logits' has data_type TYPE_FP64 but must have TYPE_FP32 or TYPE_FP16" in (
        refusal(root)
    )


class TestEnsembleGraph:
    """Steps exist and tensors connect."""

    def test_a_step_without_its_model_is_refused(self, write_repository, edit):
        root = write_repository()
        edit(root / "ensemble" / "config.pbtxt", '"postprocessing"', '"postprocess"')

        assert "step model 'postprocess' is not in the repository, which holds ensemble" in (
            refusal(root)
        )

    def test_a_step_input_without_a_source_is_refused(self, write_repository, edit):
        root = write_repository()
        path = root / "ensemble" / "config.pbtxt"
        edit(path, 'key: "TOKENS_BATCH"\n        value: "_TOKENS_BATCH"',
             'key: "TOKENS_BATCH"\n        value: "_NOBODYS"')  # fmt: skip

        assert refusal(root) == (
            f"{path}: '_NOBODYS', read as input 'TOKENS_BATCH' of step 'postprocessing', is "
            "neither an input of the ensemble nor written by a step"
        )

    def test_a_mapped_tensor_that_the_model_does_not_declare_is_refused(
        self, write_repository, edit
    ):
        root = write_repository()
        edit(root / "ensemble" / "config.pbtxt", 'key: "len_penalty"', 'key: "length_penalty"')

        assert "step 'tensorrt_llm' maps the input 'length_penalty', which that model's" in (
            refusal(root)
        )

    def test_an_unmapped_required_input_is_refused(self, write_repository, edit):
        root = write_repository()
        edit(root / "ensemble" / "config.pbtxt",
             'input_map {\n        key: "SEQUENCE_LENGTH"\n        value: "_SEQUENCE_LENGTH"\n'
             "      }", "")  # fmt: skip

        assert "step 'postprocessing' lacks the required input 'SEQUENCE_LENGTH'" in refusal(
            root
        )

    def test_mapped_tensors_with_different_types_are_refused(self, write_repository, edit):
        root = write_repository()
        path = root / "tensorrt_llm" / "config.pbtxt"
        dims = "\n    dims: [ -1, -1, -1 ]"
        edit(path, f"TYPE_FP32{dims}", f"TYPE_FP16{dims}")

        assert "'generation_logits' is TYPE_FP16 as output 'generation_logits' of step" in (
            refusal(root)
        )

    def test_a_step_with_a_smaller_batch_size_is_refused(self, write_repository, edit):
        root = write_repository()
        edit(root / "postprocessing" / "config.pbtxt", "max_batch_size: 8", "max_batch_size: 4")

        assert "max_batch_size is 8 but step 'postprocessing' takes at most 4" in refusal(root)

    def test_a_tensor_with_two_source_steps_is_refused(self, write_repository, edit):
        root = write_repository()
        edit(root / "ensemble" / "config.pbtxt", 'value: "text_output"', 'value: "batch_index"')

        assert "'batch_index' is written twice" in refusal(root)
