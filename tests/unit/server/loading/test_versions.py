"""Several versions of a Python model, as its version policy chooses them."""

from pathlib import Path

import pytest
from controlled_frontend import with_nothing_loaded

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT64 dims: 1 }
output { name: "OUT" data_type: TYPE_INT64 dims: 1 }
"""
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.factor = int(args["model_version"])

    def execute(self, requests):
        found = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            out = pb_utils.Tensor("OUT", values * self.factor)
            found.append(pb_utils.InferenceResponse([out]))
        return found
"""
CHAIN = """
platform: "ensemble"
input { name: "X" data_type: TYPE_INT64 dims: 1 }
output { name: "Y" data_type: TYPE_INT64 dims: 1 }
ensemble_scheduling { step {
  model_name: "times" model_version: %d
  input_map { key: "IN" value: "X" } output_map { key: "OUT" value: "Y" }
} }
"""
TIMES = "/v2/models/times"


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    with with_nothing_loaded(tmp_path_factory.mktemp("versions")) as frontend:
        for version in (2, 3, 10):
            folder = frontend.repository / "times" / str(version)
            folder.mkdir(parents=True)
            (folder / "model.py").write_text(CODE)
        yield frontend


def write(frontend, policy):
    (frontend.repository / "times" / "config.pbtxt").write_text(CONFIG + policy)


def product(frontend, path=TIMES, names=("IN", "OUT")):
    """7 times the version that a path runs."""
    status, body = frontend.call("POST", path + "/generate", {names[0]: 7})
    return body[names[1]] if status == 200 else (status, body["error"])


@pytest.mark.parametrize(
    ("policy", "served"),
    [("", ["10"]), ("version_policy { all { } }", ["2", "3", "10"]),
     ("version_policy { latest { num_versions: 2 } }", ["3", "10"]),
     ("version_policy { specific { versions: [ 3, 2 ] } }", ["2", "3"])],
    ids=["default", "all", "latest", "specific"],
)  # fmt: skip
def test_the_versions_that_the_policy_names_are_served_each_under_its_number(
    frontend, policy, served
):
    write(frontend, policy)
    assert frontend.load("times") == (200, None)
    assert frontend.call("GET", TIMES)[1]["versions"] == served
    assert product(frontend) == 7 * int(served[-1])
    index = frontend.call("POST", "/v2/repository/index", {})[1]
    known = {each.get("version") for each in index}
    for version in ("2", "3", "10"):
        path = f"{TIMES}/versions/{version}"
        if version in served:
            assert product(frontend, path) == 7 * int(version)
            assert frontend.call("GET", path)[1]["versions"] == [version]
            assert frontend.call("GET", path + "/ready")[0] == 200
        else:
            # The index lists a version that was loaded under another policy.
            text = f"Request for unknown model: 'times' version {version} is not "
            was_served = version in known
            expected = (503, "at ready state") if was_served else (404, "found")
            assert product(frontend, path) == (expected[0], text + expected[1])
    counts = {e["version"]: e["inference_count"] for e in statistics(frontend)}
    assert counts == {version: 1 + (version == served[-1]) for version in served}
    assert frontend.is_ready()


def statistics(frontend):
    return frontend.call("GET", TIMES + "/stats")[1]["model_stats"]


def test_all_versions_are_loaded_and_unloaded_together(frontend):
    write(frontend, "version_policy { all { } } # together")
    assert frontend.load("times")[0] == 200
    assert states(frontend) == {"2": "READY", "3": "READY", "10": "READY"}
    assert frontend.unload("times")[0] == 200
    frontend.wait_until(lambda: "UNLOADING" not in states(frontend).values())
    assert set(states(frontend).values()) == {"UNAVAILABLE"}
    assert product(frontend)[0] == 404
    assert frontend.is_ready()


def states(frontend):
    _, entries = frontend.call("POST", "/v2/repository/index")
    return {e["version"]: e["state"] for e in entries if e["name"] == "times"}


def test_a_version_that_fails_keeps_all_versions_as_they_were(frontend):
    write(frontend, "version_policy { all { } } # before")
    assert frontend.load("times")[0] == 200
    broken = frontend.repository / "times" / "2" / "model.py"
    broken.write_text(CODE + "raise RuntimeError('broken')\n")
    try:
        status, body = frontend.load("times")
        assert status == 500
        assert "broken" in body["error"]
        assert product(frontend, TIMES + "/versions/2") == 14
        assert product(frontend) == 70
    finally:
        broken.write_text(CODE)


def test_a_step_of_an_ensemble_runs_the_version_that_it_names(frontend):
    write(frontend, "version_policy { all { } } # steps")
    assert frontend.load("times")[0] == 200
    folder = frontend.repository / "chain"
    (folder / "1").mkdir(parents=True)
    for version, factor in ((3, 3), (-1, 10)):
        (folder / "config.pbtxt").write_text(CHAIN % version)
        assert frontend.load("chain") == (200, None)
        assert product(frontend, "/v2/models/chain", ("X", "Y")) == 7 * factor
    (folder / "config.pbtxt").write_text(CHAIN % 4)
    status, body = frontend.load("chain")
    assert status == 500
    assert "a step runs version 4 of 'times', which serves 2, 3, 10" in body["error"]


SLOW = """
import os, time

class TritonPythonModel:
    def initialize(self, args):
        file = os.path.join(args["model_repository"], "pid")
        if args["model_version"] == "1":
            while not os.path.exists(file):
                time.sleep(0.01)
            raise RuntimeError("broken")
        with open(file + ".new", "w") as new:
            new.write(str(os.getpid()))
        os.rename(file + ".new", file)
        time.sleep(60)

    def execute(self, requests):
        return []
"""


def test_a_version_that_fails_ends_the_processes_of_versions_that_still_start(frontend):
    folder = frontend.repository / "slow"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        (folder / version / "model.py").write_text(SLOW)
    (folder / "config.pbtxt").write_text(CONFIG + "version_policy { all { } }")
    status, body = frontend.load("slow")
    assert status == 500
    assert "broken" in body["error"]
    assert not Path("/proc", (folder / "pid").read_text()).exists()
    frontend.unload("slow")
