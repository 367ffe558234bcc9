"""Many models, many groups: the groups of `--multi-model`, their placement, and refusals."""

from __future__ import annotations

import pytest
from launcher_repository import (
    parse,
    resolve,
    resolver,
    write_checkpoint,
    write_engine,
    write_model,
)

from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli import main as cli
from trimaran.launcher.placement import hosts
from trimaran.launcher.placement.job import Job
from trimaran.launcher.resolution import settings
from trimaran.launcher.resolution.resolver import PlacementConflict, group_name
from trimaran.server.repository.model_repository import ModelRepository


@pytest.fixture
def make_model(tmp_path):
    """Adds a model of ``tp_size`` ranks to the repository of this test."""

    def make(name, tp_size=1, instances=0, **parameters):
        engine = tmp_path / f"engine-{tp_size}"
        if not engine.exists():
            write_engine(engine, tp_size=tp_size)
        folder = write_model(tmp_path / "repo" / name, gpt_model_path=str(engine), **parameters)
        if instances:
            with (folder / "config.pbtxt").open("a") as file:
                file.write(f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n")
        return tmp_path / "repo"

    return make


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine that shows four GPUs."""
    monkeypatch.setattr(hosts, "num_visible_gpus", lambda: 4)
    return "--device=cuda"


def refusal(repository, *flags, job=None):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, "--multi-model", *flags, job=job)
    return str(caught.value)


def gpu_ids(config):
    return {group.name: group.engine.gpu_device_ids for group in config.groups}


def test_groups_are_named_by_model_instance_and_generation():
    assert [group_name("m", *place) for place in ((0, 1), (1, 1), (0, 2), (1, 2))] == [
        "m", "m#1", "m@2", "m#1@2",
    ]  # fmt: skip


def test_every_token_model_gets_a_group_of_its_own_size(make_model):
    make_model("one")
    config = resolve(make_model("two", tp_size=2), "--multi-model", "--num-threads", "1")
    assert [(g.name, g.model, g.world_size) for g in config.groups] == [
        ("one", "one", 1), ("two", "two", 2),
    ]  # fmt: skip
    assert config.frontend.groups == {"one": ("one",), "two": ("two",)}


def test_a_checkpoint_folder_runs_on_one_rank_for_each_named_gpu(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf")
    folder = tmp_path / "repo" / "m"
    write_model(folder, gpt_model_path=str(checkpoint), gpu_device_ids="0,1")
    (group,) = resolve(tmp_path / "repo", "--multi-model").groups
    assert group.engine.parallel.tp_size == 2


def test_instances_are_replicas_with_devices_of_their_own(make_model, four_gpus):
    repository = make_model("m", tp_size=2, instances=2, gpu_device_ids="0,1;3,2")
    config = resolve(repository, "--multi-model", four_gpus)
    assert gpu_ids(config) == {"m": (0, 1), "m#1": (3, 2)}
    assert config.frontend.groups == {"m": ("m", "m#1")}
    assert "GPU 2    m#1 rank 1" in config.picture


def test_instances_on_the_cpu_need_no_devices(make_model):
    config = resolve(make_model("m", instances=3), "--multi-model", "--device", "cpu")
    assert [group.name for group in config.groups] == ["m", "m#1", "m#2"]


def test_prefix_routing_is_refused_for_engines_without_block_reuse(make_model):
    repository = make_model("m", instances=2, enable_kv_cache_reuse="False")
    on_cpu = ("--device", "cpu")
    assert "enable_kv_cache_reuse is false" in refusal(
        repository, *on_cpu, "--routing", "prefix_aware"
    )
    assert resolve(repository, "--multi-model", *on_cpu).frontend.routing == "auto"


def test_unnamed_gpus_are_chosen_among_gpus_that_no_instance_names(make_model, four_gpus):
    make_model("first", tp_size=2)
    config = resolve(
        make_model("second", tp_size=2, gpu_device_ids="1,0"), "--multi-model", four_gpus
    )
    assert gpu_ids(config) == {"first": (2, 3), "second": (1, 0)}


def test_a_rank_with_a_mig_slice_sees_this_slice_alone(make_model, four_gpus):
    make_model("a", gpu_device_ids="MIG-11")
    config = resolve(make_model("b", gpu_device_ids="MIG-22"), "--multi-model", four_gpus)
    assert [g.env for g in config.groups] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-11"}, {"CUDA_VISIBLE_DEVICES": "MIG-22"},
    ]  # fmt: skip
    make_model("c", tp_size=2, gpu_device_ids="MIG-33,MIG-44")
    text = refusal(make_model("d"), four_gpus)
    assert "MIG slices cannot talk to each other (MIG-33,MIG-44)" in text


def test_cpu_cores_are_divided_between_the_ranks_of_all_groups(make_model, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12))
    make_model("one")
    config = resolve(make_model("two", tp_size=2), "--multi-model", "--device", "cpu")
    assert {group.engine.num_threads for group in config.groups} == {4}


def test_overlapping_gpus_are_refused_with_a_placement_map(make_model):
    make_model("a", tp_size=2, gpu_device_ids="0,1")
    text = refusal(make_model("b", gpu_device_ids="1"))
    assert "group 'b' asks for GPU 1, which group 'a' has" in text
    assert "GPU 1    a rank 1" in text


def test_too_few_gpus_are_refused_with_a_placement_map(make_model, four_gpus):
    make_model("a", tp_size=4)
    text = refusal(make_model("b", tp_size=2), four_gpus)
    assert "group 'b' needs 2 GPU(s) on one host but at most 0 are free" in text
    assert "not placed: b (2 rank(s))" in text


@pytest.mark.parametrize(
    ("instances", "parameters", "complaint"),
    [
        (1025, {}, "asks for 1025 instances, each a worker group, but at most 1024"),
        (2147483647, {}, "asks for 2147483647 instances"),
        (2, {}, "gpu_device_ids parameter required when instance count > 1"),
        (2, {"gpu_device_ids": "0"}, "gpu_device_ids mismatch: instance 1 >= 1 entries"),
        (1, {"gpu_device_ids": "0;1"}, "Set the count of instance_group to 2"),
        (1, {"gpu_device_ids": "0,1"}, "2 GPUs for a world size of 1"),
        (1, {"gpu_device_ids": "0,x"}, "holds 'x' but must be GPU numbers"),
        (1, {"participant_ids": "1,²"}, "holds '²' but must be world ranks of 1 or more"),
        (1, {"gpu_device_ids": "²"}, "holds '²' but must be GPU numbers"),
        (1, {"gpu_device_ids": "9" * 5000}, "9' but must be GPU numbers"),
        (1, {"participant_ids": "9" * 5000}, "9' but must be world ranks of 1 or more"),
        (1, {"participant_ids": "4097"}, "must be world ranks of 1 or more, up to 4096"),
        (1, {"participant_ids": "0,1"}, "holds '0' but must be world ranks of 1 or more"),
        (1, {"num_nodes": "2"}, "1 ranks, which num_nodes 2 does not divide"),
        (1, {"num_nodes": "0"}, "must be at least 1"),
    ],
)
def test_participants_that_do_not_match_the_world_size_of_the_model_are_refused(
    make_model, four_gpus, instances, parameters, complaint
):
    assert complaint in refusal(make_model("m", instances=instances, **parameters), four_gpus)


def test_the_gpus_of_an_instance_group_are_one_instance_each(make_model, four_gpus):
    repository = make_model("m")
    with (repository / "m" / "config.pbtxt").open("a") as file:
        file.write("instance_group [ { count: 1 kind: KIND_GPU gpus: [ 2, 0 ] } ]\n")
    assert gpu_ids(resolve(repository, "--multi-model", four_gpus)) == {"m": (2,), "m#1": (0,)}


# ---- one job for all groups ---------------------------------------------------------------


@pytest.mark.feature("parameter:participant_ids")
def test_participants_share_the_ranks_of_one_job(make_model):
    make_model("a", tp_size=2, participant_ids="1,2")
    repository = make_model("b", instances=2, participant_ids="3;4")
    config = resolve(repository, "--multi-model", "--disable-spawn-processes")
    assert {g.name: g.participants for g in config.groups} == {
        "a": (1, 2), "b": (3,), "b#1": (4,),
    }  # fmt: skip
    assert {group.launch for group in config.groups} == {"prestarted"}
    assert config.world_size == 5
    assert "rank 0   the orchestrator's place, no engine" in config.picture
    assert "rank 4   b#1 rank 0" in config.picture


def test_participants_on_one_host_get_gpus(make_model, four_gpus):
    make_model("a", tp_size=2, participant_ids="2,1")
    config = resolve(
        make_model("b", participant_ids="3", gpu_device_ids="0"),
        "--multi-model", "--disable-spawn-processes", four_gpus,
    )  # fmt: skip
    assert gpu_ids(config) == {"a": (1, 2), "b": (0,)}


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ("", "1", "Spawning of processes was disabled in orchestrator mode, but participant"),
        ("1,2", "2", "'a' and 'b' both name rank 2"),
        ("1", "2", "1 ranks for a world size of 2"),
        ("1,1", "2", "names a rank twice"),
        ("1,2", "4", "the job has ranks 1 to 3 beside the orchestrator's"),
    ],
)
def test_participants_that_do_not_fit_the_job_are_refused(make_model, first, second, complaint):
    make_model("a", tp_size=2, participant_ids=first)
    repository = make_model("b", participant_ids=second)
    text = refusal(repository, "--disable-spawn-processes", "--world-size", "4")
    assert complaint in text


def test_an_existing_mpi_job_gives_the_number_of_ranks(make_model):
    repository = make_model("a", participant_ids="1")
    flags = ("--multi-model", "--disable-spawn-processes")
    config = resolve(repository, *flags, job=Job(0, 3, True))
    assert (config.world_size, config.mpi.kind) == (3, "job")
    assert "rank 2   idle" in config.picture
    assert "World size must be 1" in refusal(repository, job=Job(0, 3, True))


def test_a_mig_slice_cannot_be_given_to_a_rank_of_a_shared_job(make_model, four_gpus):
    repository = make_model("m", participant_ids="1", gpu_device_ids="MIG-1")
    text = refusal(repository, "--disable-spawn-processes", four_gpus)
    assert "Leave out --disable-spawn-processes" in text


def test_instances_cannot_share_the_ranks_of_a_job(make_model):
    with pytest.raises(ConfigError, match=r"2 groups \(m, m#1\) cannot share the ranks"):
        resolve(make_model("m", instances=2), "--device", "cpu", job=Job(0, 1, True))


# ---- several hosts ------------------------------------------------------------------------


def test_each_group_is_placed_on_one_of_the_named_hosts(make_model, tmp_path):
    make_model("a", tp_size=2)
    repository = make_model("b", tp_size=2)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two machines\nnode1 slots=2\nnode2:2\n")
    for flags in (("--hosts", "node1:2,node2,node2"), ("--hostfile", str(hostfile))):
        config = resolve(repository, "--multi-model", *flags, "--advertise-address", "me")
        assert [
            [(entry.host, entry.num_ranks) for entry in group.hosts] for group in config.groups
        ] == [[("node1", 2)], [("node2", 2)]]
        assert {group.launch for group in config.groups} == {"mpirun"}


@pytest.mark.feature("parameter:num_nodes")
def test_a_model_may_span_hosts(make_model):
    repository = make_model("a", tp_size=4, num_nodes="2")
    (group,) = resolve(repository, "--multi-model", "--hosts", "n1:2,n2:2").groups
    assert [(entry.host, entry.num_ranks) for entry in group.hosts] == [("n1", 2), ("n2", 2)]
    (group,) = resolve(make_model("a2", tp_size=3), "--tensorrt-llm-model-name", "a2",
                       "--hosts", "n1:2,n2:2").groups  # fmt: skip
    assert [(entry.host, entry.num_ranks) for entry in group.hosts] == [("n1", 2), ("n2", 1)]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--hosts", "n1:x"), "'n1:x' is not a host"),
        (("--hosts", "n1", "--hostfile", "f"), "leave out one"),
        (("--hostfile", "/none"), "cannot be read"),
        (("--hosts", "n1:1"), "needs 2 slot(s) on one host but at most 1 are free"),
        (("--hosts", "n1:2", "--worker-launch", "spawn"), "onto other hosts (n1)"),
        (("--hosts", "n1:2", "--no-mpi"), "--hosts cannot take effect: --no-mpi"),
        (("--rsh-agent", "/bin/sh"), "reaches other hosts, but none are named"),
        (("--rsh-agent", "/none/rsh", "--hosts", "n1:2"), "/none/rsh: no such program"),
        (("--rsh-agent", " ", "--hosts", "n1:2"), "--rsh-agent  : no such program"),
    ],
)
def test_hosts_that_cannot_work_are_refused(make_model, flags, complaint):
    assert complaint in refusal(make_model("a", tp_size=2), *flags)


# ---- the way of launching -----------------------------------------------------------------


def test_a_way_of_launching_that_cannot_work_is_refused(make_model, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    repository = make_model("m")
    assert "this is no Slurm job" in refusal(repository, "--worker-launch", "srun")
    assert "cannot take effect" in refusal(repository, "--no-mpi", "--worker-launch", "spawn")
    with pytest.raises(ConfigError, match="has no orchestrator"):
        resolve(repository, "--worker-launch", "spawn")


def test_leader_mode_uses_mpirun_and_orchestrator_mode_logs_its_choice_of_starter(make_model):
    repository = make_model("m")
    assert resolve(repository).groups[0].launch == "mpirun"
    config = resolve(repository, "--multi-model", "--worker-launch", "mpirun")
    assert config.notes == ("groups are started by mpirun: --worker-launch asks for it",)
    config = resolve(repository, "--multi-model", "--no-mpi")
    assert (config.groups[0].launch, config.mpi.kind) == ("none", "none")


def test_keys_without_effect_are_noted(make_model):
    repository = make_model("m", participant_ids="1", gpu_device_ids="0", num_nodes="1")
    notes = "\n".join(resolve(repository, "--device", "cpu").notes)
    for key in ("participant_ids", "gpu_device_ids", "num_nodes"):
        assert f"m/config.pbtxt: {key} has no effect" in notes


# ---- models that come later ---------------------------------------------------------------


def loaded(repository, name):
    return ModelRepository.load(repository).models[name]


def test_a_model_loaded_later_gets_free_gpus_beside_the_running_ones(make_model, four_gpus):
    make_model("a", tp_size=2)
    repository = make_model("b", tp_size=2)
    start = resolver(
        repository, "--multi-model", four_gpus, "--model-control-mode", "explicit",
        "--load-model", "a",
    )  # fmt: skip
    running = start.initial().groups
    assert [group.name for group in running] == ["a"]
    (group,) = start.groups_of(loaded(repository, "b"), 1, running)
    assert (group.name, group.engine.gpu_device_ids) == ("b", (2, 3))


def test_a_new_generation_without_devices_names_the_running_generation(make_model, four_gpus):
    make_model("other")
    repository = make_model("m", tp_size=2, gpu_device_ids="0,1")
    start = resolver(repository, "--multi-model", four_gpus)
    with pytest.raises(PlacementConflict) as caught:
        start.groups_of(loaded(repository, "m"), 2, start.initial().groups)
    assert caught.value.groups == ("m",)
    assert "group 'm@2' asks for GPU 0, which group 'm' has" in str(caught.value)


def test_a_new_generation_gets_the_cores_of_the_old_generation(make_model, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12))
    repository = make_model("m", tp_size=2)
    start = resolver(repository, "--multi-model", "--device", "cpu")
    running = start.initial().groups
    (group,) = start.groups_of(loaded(repository, "m"), 2, running)
    assert (group.engine.num_threads, running[0].engine.num_threads) == (6, 6)


def test_a_model_without_free_devices_names_the_models_that_hold_them(make_model, four_gpus):
    repository = make_model("a", tp_size=4)
    start = resolver(repository, "--multi-model", four_gpus)
    running = start.initial().groups
    make_model("b", tp_size=2)
    with pytest.raises(PlacementConflict) as caught:
        start.groups_of(loaded(repository, "b"), 1, running)
    assert caught.value.groups == ("a",)


def test_a_model_that_can_never_fit_is_refused_outright(make_model, four_gpus, tmp_path):
    repository = make_model("a")
    start = resolver(repository, "--multi-model", four_gpus)
    write_model(repository / "b", gpt_model_path=str(write_checkpoint(tmp_path / "hf")),
                gpu_device_ids="8")  # fmt: skip
    with pytest.raises(ConfigError, match="names GPU 8 but 4 are visible") as caught:
        start.groups_of(loaded(repository, "b"), 1, start.initial().groups)
    assert not isinstance(caught.value, PlacementConflict)


def test_leader_mode_takes_one_token_model(make_model):
    repository = make_model("a")
    start = resolver(repository)
    running = start.initial().groups
    make_model("b")
    with pytest.raises(ConfigError, match="Start it with --multi-model"):
        start.groups_of(loaded(repository, "b"), 1, running)
    assert start.groups_of(loaded(repository, "a"), 2, running)[0].name == "a@2"


def test_leader_mode_inside_several_slurm_nodes_leaves_the_hosts_to_mpirun(
    make_model, four_gpus, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    (group,) = resolve(make_model("m", tp_size=8), four_gpus).groups
    assert (group.hosts, group.engine.gpu_device_ids) == ((), ())


EXPLICIT = ("--multi-model", "--model-control-mode", "explicit")


def test_explicit_mode_starts_only_named_models(make_model):
    make_model("a")
    repository = make_model("b")
    assert resolve(repository, *EXPLICIT).groups == ()
    assert resolve(repository, *EXPLICIT, "--load-model", "b").frontend.groups == {"b": ("b",)}
    assert len(resolve(repository, *EXPLICIT, "--load-model", "*").groups) == 2
    text = refusal(repository, *EXPLICIT, "--load-model", "c")
    assert "--load-model c: no model of that name. The repository holds a, b." in text


def test_explicit_mode_does_not_read_models_without_a_load(make_model):
    make_model("good")
    repository = make_model("bad", num_nodes="x")
    assert len(resolve(repository, *EXPLICIT, "--load-model", "good").groups) == 1
    assert "num_nodes" in refusal(repository, *EXPLICIT, "--load-model", "bad")


ENSEMBLE_OF_TOKENS = """
platform: "ensemble"
max_batch_size: 8
input { name: "input_ids" data_type: TYPE_INT32 dims: -1 }
input { name: "input_lengths" data_type: TYPE_INT32 dims: 1 }
input { name: "request_output_len" data_type: TYPE_INT32 dims: 1 }
output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
ensemble_scheduling { step {
  model_name: "other" model_version: -1
  input_map { key: "input_ids" value: "input_ids" }
  input_map { key: "input_lengths" value: "input_lengths" }
  input_map { key: "request_output_len" value: "request_output_len" }
  output_map { key: "output_ids" value: "output_ids" }
} }
"""


def test_loading_a_text_model_starts_the_groups_of_its_steps(make_model, tmp_path):
    repository = make_model("other")
    fill = (
        f"engine_dir:{write_checkpoint(tmp_path / 'hf')},tokenizer_dir:/tokenizer,"
        "triton_max_batch_size:8,decoupled_mode:True,triton_backend:tensorrtllm,"
        "logits_datatype:TYPE_FP32,encoder_input_features_data_type:TYPE_FP16,"
        "preprocessing_instance_count:1,postprocessing_instance_count:1,bls_instance_count:1"
    )
    assert cli.main(["init-repo", str(repository), "--fill", fill]) == 0
    for text in ("ensemble", "tensorrt_llm_bls"):
        config = resolve(repository, *EXPLICIT, "--load-model", text)
        assert config.frontend.groups == {"tensorrt_llm": ("tensorrt_llm",)}
        assert config.ensemble == text
    (repository / "another" / "1").mkdir(parents=True)
    (repository / "another" / "config.pbtxt").write_text(ENSEMBLE_OF_TOKENS)
    assert resolve(repository, *EXPLICIT, "--load-model", "another").ensemble == ""
    assert resolve(repository, *EXPLICIT, "--load-model", "*").ensemble == "ensemble"


def test_model_control_flags_reach_the_front_end(make_model):
    make_model("a")
    repository = make_model("b")
    flags = (*EXPLICIT, "--load-model=a", "--load_model", "b", "--routing", "least_loaded")
    frontend = resolve(repository, *flags).frontend
    assert (frontend.model_control_mode, frontend.load_models) == ("explicit", ("a", "b"))
    assert frontend.routing == "least_loaded"
    frontend = resolve(
        repository, "--multi-model", "--model-control-mode=poll", "--repository-poll-secs=3"
    ).frontend
    assert (frontend.model_control_mode, frontend.repository_poll_s) == ("poll", 3.0)
    assert set(frontend.groups) == {"a", "b"}


def test_python_models_are_listed_to_the_front_end(make_model):
    repository = make_model("a")
    assert resolve(repository).frontend.python_models == "native"
    assert resolve(repository, "--python-models=execute").frontend.python_models == "execute"
    text = refusal(repository, "--python-models", "a,preprocesing")
    assert "--python-models preprocesing: no model of that name. The repository holds a" in text


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--load-model", "a"), "Use of '--load-model' requires setting"),
        ((*EXPLICIT[1:], "--load-model=*", "--load-model=a"), "goes together with no other"),
        (
            ("--disable-spawn-processes", "--model-control-mode", "poll"),
            "models cannot get others later",
        ),
        (("--disable-spawn-processes", "--no-mpi"), "needs an MPI job: leave out --no-mpi"),
    ],
)
def test_model_control_flags_that_cannot_take_effect_are_refused(make_model, flags, complaint):
    assert complaint in refusal(make_model("a"), *flags)


@pytest.mark.feature(
    "variable:TRTLLM_ORCHESTRATOR",
    "variable:TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES",
    "variable:FORCE_DETERMINISTIC",
    "variable:TLLM_LOG_LEVEL",
    of="request",
)
def test_environment_variables_of_tritons_tensorrt_llm_backend_replace_flags():
    args = parse()
    settings.apply_environment(
        args, {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"}
    )
    assert args.multi_model and args.disable_spawn_processes
    args = parse()
    settings.apply_environment(args, {"TRTLLM_ORCHESTRATOR": "0", "TLLM_LOG_LEVEL": "INFO"})
    assert not (args.multi_model or args.deterministic or args.log_verbose)
    settings.apply_environment(args, {"FORCE_DETERMINISTIC": "1", "TLLM_LOG_LEVEL": "DEBUG"})
    assert args.deterministic and args.log_verbose
