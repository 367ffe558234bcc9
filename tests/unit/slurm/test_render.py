"""Flags and files become batch scripts that a shell can read, or are refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli.main import main
from trimaran.launcher.flags.parser import FlagParser
from trimaran.slurm.commands import add_arguments, render, run
from trimaran.slurm.job_spec import TEMPLATES, JobSpec


def script_of(*flags: str) -> str:
    parser = FlagParser(prog="trimaran slurm")
    add_arguments(parser)
    return render(JobSpec.from_args(parser.parse(["render", "--model-repo", "/repo", *flags])))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("container", [(), ("--container-image", "nvcr#trimaran:1")])
def test_every_script_is_read_by_bash(template: str, container: tuple[str, ...]):
    nodes = ("--nodes", "2") if template == "leader-multinode" else ()
    script = script_of("--template", template, "--world-size", "4", *nodes, *container)
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "{{" not in script and "{%" not in script


@pytest.fixture
def run_job(tmp_path: Path):
    """Run a batch script whose ``trimaran`` is this shell text; returns its exit code and
    output."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def program(name: str, text: str) -> None:
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def start(trimaran: str, num_restarts: int = 0, *flags: str) -> tuple[int, str]:
        program("scontrol", 'echo "scontrol $*"')
        if trimaran:
            program("trimaran", trimaran)
        script = script_of("--world-size", "2", "--log-dir", str(tmp_path / "logs"), *flags)
        done = subprocess.run(
            ["bash"], input=script, text=True, capture_output=True, timeout=60,
            env={"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7",
                 "SLURM_RESTART_COUNT": str(num_restarts)},
        )  # fmt: skip
        return done.returncode, done.stdout

    return start


def test_a_job_without_the_program_fails_and_is_not_requeued(run_job):
    # Repeated: the step ends before or after the script's query.
    assert {run_job("") for _ in range(10)} == {(127, "")}


@pytest.mark.parametrize(
    ("code", "num_restarts", "is_queued"),
    [(0, 0, False), (2, 0, False), (1, 0, True), (1, 3, False)],
)
def test_a_job_is_requeued_when_another_start_can_help(run_job, code, num_restarts, is_queued):
    found, said = run_job(f"exit {code}", num_restarts)
    assert (found, "scontrol requeue 7" in said) == (code, is_queued)


@pytest.mark.parametrize("pause", ["", "sleep 0.2;"])
def test_the_job_exits_with_the_code_of_the_drain(run_job, pause):
    drain = f"trap '{pause} exit 5' TERM; kill -TERM $PPID; while :; do sleep 0.01; done"
    assert {run_job(drain)[0] for _ in range(5)} == {5}


@pytest.mark.parametrize("container", [(), ("--container-image", "x")])
def test_a_drain_signal_before_the_server_has_started_reaches_the_server(
    run_job, tmp_path, container
):
    # Bash runs this in front of every command.
    early = (
        """trap '[ "$BASH_COMMAND" != "server=\\$!" ] || """
        f"""{{ until [ -e {tmp_path}/started ]; do sleep 0.01; done; kill -TERM $$; }}' DEBUG"""
    )
    drain = (
        f"trap 'heard=1; echo . >> {tmp_path}/signals' TERM; touch {tmp_path}/started; "
        'for _ in {1..1000}; do [ -n "$heard" ] && break; sleep 0.01; done; sleep 0.5; exit 5'
    )
    # In this test the container's step is the server itself.
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\n{drain}\n")
    (tmp_path / "bin" / "srun").chmod(0o755)

    assert run_job(drain, 0, "--setup", early, *container)[0] == 5
    assert (tmp_path / "signals").read_text() == ".\n"


def test_a_server_that_was_killed_leaves_no_addresses_behind(run_job, tmp_path):
    killed = 'while [ "$1" != --ready-file ]; do shift; done; echo {} > "$2"; kill -9 $$'
    assert run_job(killed)[0] == 137
    assert (tmp_path / "logs" / "trimaran-7").is_dir()
    assert not list((tmp_path / "logs").rglob("ready.json"))


def test_the_shape_of_the_job_comes_from_the_flags():
    script = script_of(
        "--template", "leader-multinode", "--nodes", "2", "--world-size", "8",
        "--gpus-per-node", "4", "--time", "1-00:00", "--partition", "long",
        "--sbatch=--exclusive", "--drain-seconds", "100",
    )  # fmt: skip
    for line in (
        "--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4", "--time=1-00:00",
        "--partition=long", "--exclusive", "--requeue", "--signal=B:TERM@100",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "trimaran serve --world-size 8 --worker-launch srun" in script
    assert "--exit-timeout 80 " in script


def test_arguments_with_spaces_stay_single_arguments():
    script = script_of(
        "--model-repo", "/my models", "--log-dir", "/my logs",
        "--serve-flags", "--load-model 'a b' --dtype float32",
    )  # fmt: skip
    assert "--model-repo '/my models'" in script
    assert "'a b'" in script
    assert '#SBATCH --output="/my logs/%x-%j.log"\n' in script


def test_paths_keep_their_bytes_in_the_script(tmp_path: Path):
    path = tmp_path / "job.sbatch"
    assert main(["slurm", "render", "--model-repo", "/\udcff", "--output", str(path)]) == 0
    assert b"--model-repo '/\xff'" in path.read_bytes()


def test_a_flag_to_pass_on_may_be_a_single_word():
    script = script_of("--sbatch", "--exclusive", "--serve-flags", "--deterministic")
    assert "\n#SBATCH --exclusive\n" in script
    assert " --deterministic &\n" in script.replace("\\\n ", "")


def test_a_job_is_read_from_a_yaml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.yaml"
    path.write_text(
        "template: replicas\nmodel_repo: /repo\nreplicas: 3\nserve_flags: --dtype float32\n"
        "setup: [module load cuda, source env]\n"
    )
    assert main(["slurm", "render", "--config", str(path)]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2\n" in script
    assert "\nmodule load cuda\nsource env\n" in script
    assert "--dtype \\\n  float32" in script


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "2"], "--nodes is 2 but template leader runs on one node"),
        (["--template", "leader-multinode", "--nodes", "2", "--world-size", "3"],
         "3 ranks do not spread evenly over 2 nodes"),
        (["--replicas", "2"], "--replicas 2 goes with --template replicas"),
        (["--world-size", "4098"], "--world-size is 4098, but at most 4096 ranks"),
        (["--world-size", "4", "--gpus-per-node", "2"], "less than the 4 ranks of a node"),
        (["--template", "orchestrator", "--nodes", "2", "--container-image", "x"],
         "inside a container groups of workers start on their own node only"),
        (["--job-name", "a b"], "--job-name 'a b'"),
        (["--job-name", "team/a"], "--job-name 'team/a': logs have it in their names"),
        (["--job-name", "a#b"], "--job-name 'a#b': spaces, quotes and #, which ends a line"),
        (["--drain-seconds", "65536"], "Slurm signals 65535 s before the end at most"),
        (["--template", "replicas", "--replicas", "200", "--http-port", "64000"],
         "--http-port is 64000 and the last of 200 replicas would get 65990"),
        (["--template", "replicas", "--replicas", "2", "--grpc-port", "8010"],
         "--http-port 8000 and --grpc-port 8010: replicas on a node are 10 ports apart"),
        (["--http-port", "8001"], "--http-port and --grpc-port are both 8001"),
        (["--container-mounts", "/a:/a"], "has no effect without --container-image"),
        (["--mpi", "pmi2"], "--mpi pmi2 is for --template leader-multinode with"),
        (["--mpi", "pmi2", "--container-image", "x"], "elsewhere the plug-in is chosen by"),
        (["--log-dir", "/logs/%j"], "--log-dir"),
        (["--log-dir", "/logs #1"], "a # behind a space ends a line"),
        (["--partition", "a b"], "--partition 'a b'"),
        (["--partition", "main#2"], "--partition 'main#2': spaces, quotes and #"),
        (["--sbatch", "--exclusive\n--nice=1"], "reads none behind another line"),
        (["--sbatch", "exclusive"], "a line of options that begins with -"),
        (["--serve-flags", "--id 'a"], "--serve-flags \"--id 'a\": No closing quotation"),
    ],
)  # fmt: skip
def test_contradictory_options_are_refused(flags: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        script_of(*flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ("--http-port", "65536"),
        ("--grpc-port", "0"),
        ("--template", "replicas", "--replicas", "0"),
        ("--wait", "nan"),
    ],
)
def test_impossible_numbers_are_refused(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "render", "--model-repo", "/repo", *flags])
    assert ended.value.code == 2
    assert f"{flags[-2]}: '{flags[-1]}' is not a" in capsys.readouterr().err


def test_a_disabled_endpoint_reserves_no_port(capsys: pytest.CaptureFixture[str]):
    flags = ("--http-port", "8001", "--serve-flags", "--allow-grpc false")
    assert main(["slurm", "render", "--model-repo", "/repo", *flags]) == 0
    assert "http_port=8001 grpc_port=8001" in capsys.readouterr().out

    other = ("--http-port", "8001", "--serve-flags", "--allow-metrics false")
    assert main(["slurm", "render", "--model-repo", "/repo", *other]) == 2
    assert "--http-port and --grpc-port are both 8001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--lgo-format json", "unrecognized arguments: --lgo-format json"),
        ("--http-port 70000", "--http-port: '70000' is not a port"),
    ],
)
def test_a_flag_that_the_server_does_not_know_is_refused_before_the_job(
    capsys: pytest.CaptureFixture[str], flags: str, complaint: str
):
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "render", "--model-repo", "/repo", "--serve-flags", flags])
    assert ended.value.code == 2
    assert "trimaran serve: error: " in (said := capsys.readouterr().err)
    assert complaint in said


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--http-port 8000", "Name it with trimaran slurm --http-port"),
        ("--model-repository /other", "Name it with trimaran slurm --model-repo"),
        ("--world_size=4", "Name it with trimaran slurm --world-size"),
        ("--ready-file /tmp/ready", "It is ready.json in the folder of the job's logs"),
    ],
)
def test_flags_that_the_script_sets_are_refused_as_server_flags(
    capsys: pytest.CaptureFixture[str], flag: str, remedy: str
):
    assert main(["slurm", "render", "--model-repo", "/repo", "--serve-flags", flag]) == 2
    assert f"would overrule the script's value. {remedy}." in capsys.readouterr().err


def test_without_spawning_the_number_of_tasks_follows_from_the_server_flags(
    capsys: pytest.CaptureFixture[str],
):
    flags = ("--template", "orchestrator", "--world-size", "4")
    own = "--disable-spawn-processes --world-size 4"
    command = ("slurm", "render", "--model-repo", "/repo", *flags, "--serve-flags", own)
    assert main(command) == 0
    assert "--disable-spawn-processes" in capsys.readouterr().out


def test_the_run_file_need_not_exist_on_the_submitting_machine(
    capsys: pytest.CaptureFixture[str],
):
    words = "--config /on-the-nodes.yaml --log_format json"
    assert main(["slurm", "render", "--model-repo", "/repo", "--serve-flags", words]) == 0
    assert "/on-the-nodes.yaml" in capsys.readouterr().out


def test_a_missing_model_repository_is_refused():
    parser = FlagParser(prog="trimaran slurm")
    add_arguments(parser)
    with pytest.raises(ConfigError, match="--model-repo DIR is missing"):
        run(parser.parse(["render"]))


def test_a_machine_without_slurm_gets_a_clear_error(tmp_path: Path):
    code = "import sys; from trimaran.launcher.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "slurm", "stop", "7"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "scancel is not on PATH: this command needs Slurm's client programs" in done.stderr


@pytest.mark.parametrize("name", ["file", "file/logs"])
def test_an_impossible_log_folder_is_refused(tmp_path: Path, name: str, capsys):
    (tmp_path / "file").touch()
    log_dir = str(tmp_path / name)

    code = main(["slurm", "submit", "--model-repo", "/repo", "--log-dir", log_dir])

    assert code == 2
    assert f"--log-dir {log_dir}: " in capsys.readouterr().err
