"""Claims about the code base itself: sizes, layers, docstrings and what ships."""

from __future__ import annotations

import ast
import collections
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("rules", Path(__file__).with_name("rules.py"))
assert _SPEC is not None and _SPEC.loader is not None
rules = importlib.util.module_from_spec(_SPEC)
sys.modules["rules"] = rules
_SPEC.loader.exec_module(rules)

TORCH_FREE = (
    "trimaran.comm.messages.messages", "trimaran.comm.mpi",
    "trimaran.comm.transport.shm_ring", "trimaran.comm.transport.sockets",
    "trimaran.worker.config.engine_config", "trimaran.worker.config.engine_folder",
    "trimaran.worker.rank", "trimaran.server.main", "trimaran.server.frontend",
    "trimaran.launcher.cli.main", "trimaran.launcher.supervisor.supervisor",
)  # fmt: skip


def test_no_file_is_over_the_line_limit():
    long = [
        f"{s.path.relative_to(rules.ROOT)}: {s.num_lines}"
        for s in rules.sources(*rules.PACKAGES, "tests", "benchmarks", "examples")
        if s.num_lines > rules.MAX_FILE_LINES
    ]
    assert long == []


def test_no_function_is_over_the_line_limit():
    long = [
        f"{rules.where(s, f)} {f.name}: {f.end_lineno - f.lineno + 1}"
        for s in rules.sources(*rules.PACKAGES)
        for f in rules.functions(s)
        if f.end_lineno - f.lineno + 1 > rules.MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_function_takes_too_many_arguments():
    wide = [
        f"{rules.where(s, f)} {f.name}"
        for s in rules.sources(*rules.PACKAGES)
        for f in rules.functions(s)
        if not rules.is_device_code(f)
        and len([a for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
                if a.arg not in ("self", "cls")]) > rules.MAX_ARGUMENTS
    ]  # fmt: skip
    assert wide == []


def test_no_function_nests_too_deep():
    deep = [
        f"{rules.where(s, f)} {f.name}"
        for s in rules.sources(*rules.PACKAGES)
        for f in rules.functions(s)
        if rules.nesting(f) > rules.MAX_NESTING
    ]
    assert deep == []


def test_every_module_says_in_a_docstring_what_it_owns():
    silent = [
        str(s.path.relative_to(rules.ROOT))
        for s in rules.sources(*rules.PACKAGES)
        if not ast.get_docstring(s.tree)
    ]
    assert silent == []


def test_every_import_keeps_the_contracts_of_setup_cfg():
    lint = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"],
        cwd=rules.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_folder_is_over_the_module_limit():
    folders = collections.Counter(
        path.parent for path in rules.package_files() if path.name != "__init__.py"
    )
    crowded = [folder for folder, count in folders.items() if count > rules.MAX_MODULES]
    assert crowded == []


def test_every_sub_package_documents_its_scope_inputs_and_outputs():
    terse = [
        str(s.path.relative_to(rules.ROOT))
        for s in rules.sources(*rules.PACKAGES)
        if s.path.name == "__init__.py"
        and len((ast.get_docstring(s.tree) or "").splitlines()) < rules.MIN_ROOM_LINES
    ]
    assert terse == []


def test_every_package_has_a_link_for_tools_in_a_bare_checkout():
    links = {
        path.name: path.resolve().relative_to(rules.ROOT)
        for path in (rules.ROOT / "trimaran").iterdir()
    }
    assert links == {name: Path(name) for name in rules.PACKAGES}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_torch_free_module_stays_free_of_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    # Open MPI alone leaves 16 MiB in /dev/shm, even after an ordinary end.
    env = {**os.environ, "MPI4PY_RC_INITIALIZE": "0"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout: a build folder left there would bring back deleted files."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    for path in rules.tracked_files():
        copy = tree / path.relative_to(rules.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return tree


def test_the_source_archive_holds_every_tracked_file_and_nothing_else(tmp_path, tree):
    # Files that test runs leave beside the sources do not count.
    leftover = tree / "tests" / "__pycache__" / "driver.cpython-311.pyc"
    leftover.parent.mkdir()
    leftover.write_bytes(b"")
    program = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        cwd=tree, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = [member.name.partition("/")[2] for member in members if member.isfile()]
    made = {name for name in names if name == "PKG-INFO" or ".egg-info/" in name}
    tracked = {str(path.relative_to(rules.ROOT)) for path in rules.tracked_files()}
    assert set(names) - made == tracked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, tree):
    """The wheel of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(folder), str(tree)],
        check=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = tuple(f"{package}/*" for package in rules.PACKAGES)
    tracked = {f"trimaran/{p.relative_to(rules.ROOT)}" for p in rules.tracked_files(*folders)}
    assert shipped == tracked


def test_users_of_the_wheel_are_checked_against_its_types(tmp_path, wheel):
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    user = tmp_path / "user.py"
    user.write_text(
        "from trimaran.comm.files.flag_values import port\n"
        "from trimaran.worker.kv_cache.host_memory import HostMemory\n"
        "reveal_type(port('1'))\n"
        "HostMemory('none', 4096)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mypy", "--strict", "--ignore-missing-imports",
         "--python-executable", tmp_path / "venv" / "bin" / "python", user.name],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    revealed, refused, end = done.stdout.splitlines()
    assert 'Revealed type is "int"' in revealed
    assert 'to "HostMemory" has incompatible type "str"' in refused
    assert end.startswith("Found 1 error")
