"""What is installed, and how: the wheel is complete and works away from the checkout, dependencies are declared, setup errors are readable.

The wheel is installed into a bare virtual environment that sees this one's packages but not its editable install of the checkout.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import framework

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


CAN_COMPILE = shutil.which("cmake") and any(shutil.which(name) for name in ("c++", "g++", "clang++"))
CPU_LIBRARY = "framework/kernels/lib/libframework_cpu." + ("dylib" if sys.platform == "darwin" else "so")
pytestmark = pytest.mark.timeout(900)  # the first test of a fresh checkout compiles the kernels


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    # The CUDA kernels have tests of their own and take minutes to compile.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CMAKE_ARGS": "-DFRAMEWORK_CUDA=OFF"} | environment
    return subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def build(kind: str, source: Path, folder: Path, **environment: str) -> Path:
    """Call the build backend as pip does, in `source`."""
    code = f"import scikit_build_core.build as backend; print(backend.build_{kind}({str(folder)!r}))"
    done = run(sys.executable, "-c", code, cwd=source, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The `bin` folder of an environment in which the wheel is installed."""
    return install(wheel, tmp_path_factory.mktemp("installed"))


def install(what: str | Path, folder: Path, *options: str, **environment: str) -> Path:
    """The `bin` folder of a new environment in `folder` in which pip has installed `what`, without the network."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # packages only: .pth files in there are not read
    pip = (folder / "bin/python", "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall")
    done = run(*pip, *options, what, cwd=folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def kernels_in(folder: Path, cwd: Path, **environment: str) -> dict[str, str]:
    """What kernels there are in the environment of that `bin` folder."""
    code = "import json; from framework.kernels.library import status; print(json.dumps(status()))"
    done = run(folder / "python", "-c", code, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# ---- wheel and sdist
def test_the_wheel_holds_the_package_with_conf_and_recipes_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in (("framework", "framework"), ("conf", "framework/conf"), ("recipes", "framework/recipes")):
        files = [
            path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        assert files and {f"{place}/{path}" for path in files} <= names


def test_one_wheel_serves_every_python(wheel):
    assert "-py3-none-" in wheel.name


def test_the_wheel_carries_the_license_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "csrc", "scripts"))]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path, CMAKE_ARGS="-DFRAMEWORK_CUDA=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O0")  # sooner compiled
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("command", ["train.py", "framework-train"])
def test_an_installed_train_finds_recipes_and_groups_from_another_directory(installed, tmp_path, command):
    done = run(installed / command, "+recipe=llama_sft", "zero=3", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "name: llama_sft" in done.stdout and "stage: 3" in done.stdout


def test_the_installed_package_is_the_one_from_the_wheel(installed, tmp_path):
    done = run(installed / "python", "-c", "import framework; print(framework.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)


def test_an_installed_framework_command_answers(installed, tmp_path):
    done = run(installed / "framework", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "train" in done.stdout and "check" in done.stdout, done.stdout + done.stderr


# ---- compiled kernels
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="no CMake or no C++ compiler")


@needs_compiler
def test_the_wheel_holds_the_compiled_kernels_and_a_bare_environment_uses_them(wheel, installed, tmp_path):
    assert CPU_LIBRARY in zipfile.ZipFile(wheel).namelist()
    assert "any" not in wheel.name.split("-")[-1]
    rows = kernels_in(installed, tmp_path)
    assert rows["kernels_cpu"].startswith("cpu: ") and str(installed.parent) in rows["kernels_cpu"]
    shown = run(installed / "framework", "env", cwd=tmp_path).stdout
    assert rows["kernels_cpu"] in shown and "kernels_cuda" in shown


@needs_compiler
def test_installing_the_checkout_builds_the_kernels(tmp_path):
    (tmp_path / "installed").mkdir()
    rows = kernels_in(install(ROOT, tmp_path / "installed"), tmp_path)
    assert rows["kernels_cpu"].startswith("cpu: ") and "site-packages" in rows["kernels_cpu"]


@needs_compiler
def test_an_editable_install_has_the_kernels_beside_the_checkouts_modules(tmp_path):
    (tmp_path / "installed").mkdir()
    bin_folder = install(ROOT, tmp_path / "installed", "-e")
    done = run(bin_folder / "python", "-c", "import framework.kernels; print(framework.kernels.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()) == ROOT / "framework/kernels/__init__.py"
    rows = kernels_in(bin_folder, tmp_path)
    assert rows["kernels_cpu"].startswith("cpu: ")


def source_copy(folder: Path) -> Path:
    """What a build needs, without what others have built."""
    for name in ("csrc", "framework", "conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_without_a_compiler_the_build_says_so_and_goes_through(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("cmake", "ninja", "make", "uname", "sh"):
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    source = source_copy(tmp_path / "source")
    code = f"import scikit_build_core.build as backend; print(backend.build_wheel({str(tmp_path)!r}))"
    done = run(sys.executable, "-c", code, cwd=source, PATH=str(tmp_path / "bin"), CXX="", CC="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No C++ compiler was found" in " ".join(done.stderr.split()) or "kernels were not built" in done.stdout + done.stderr
    names = zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist()
    assert "framework/kernels/library.py" in names and not [name for name in names if name.startswith("framework/kernels/lib/")]


@needs_compiler
def test_sources_that_do_not_compile_do_not_stop_an_installation(tmp_path):
    source = source_copy(tmp_path / "source")
    for path in (source / "csrc/cpu").glob("*.cpp"):
        path.write_text("#error this compiler cannot do it\n")
    wheel = build("wheel", source, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    (tmp_path / "installed").mkdir()
    rows = kernels_in(install(wheel, tmp_path / "installed"), tmp_path)
    assert rows["kernels_cpu"] == "no libframework_cpu was found (it was not built)"


@needs_compiler
def test_a_library_that_does_not_load_does_not_stop_the_package(installed, tmp_path):
    (tmp_path / Path(CPU_LIBRARY).name).write_text("truncated")
    rows = kernels_in(installed, tmp_path, FRAMEWORK_KERNELS_DIR=str(tmp_path))
    assert "cannot be used" in rows["kernels_cpu"]


# ---- version and dependencies
def test_the_version_is_the_same_everywhere():
    assert PROJECT["version"] == framework.__version__


OPTIONAL = {"lm_eval"}
"""What is imported only where somebody has installed it to use it."""


def test_every_import_of_the_package_is_declared_and_every_declared_dependency_is_used():
    providers = importlib.metadata.packages_distributions()
    modules = set()
    for path in (ROOT / "framework").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.split(".")[0])
    third_party = modules - set(sys.stdlib_module_names) - {"framework"} - OPTIONAL
    used = {_canonical(providers[module][0]) for module in third_party}
    declared = {_canonical(re.match(r"[\w.-]+", dependency)[0]) for dependency in PROJECT["dependencies"]}
    assert used - declared == set(), "imported but not declared in pyproject.toml"
    assert declared - used == {"tensorboard"}, "declared but not imported (tensorboard is used by Lightning's logger)"


def test_the_constraints_lie_within_the_declared_ranges_and_cover_them():
    requirements = pytest.importorskip("packaging.requirements")
    pinned = dict(line.split("==") for line in (ROOT / "scripts/constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {_canonical(name): version for name, version in pinned.items()}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]:
        requirement = requirements.Requirement(text)
        assert requirement.specifier.contains(pinned[_canonical(requirement.name)]), text


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- scripts/setup_env, with stand-ins for what it calls
@pytest.fixture
def checkout(tmp_path) -> Path:
    """A small checkout with the real scripts, and an empty folder `bin` for the commands that a test lets it find."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("bench", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "bin").mkdir()
    for tool in ("bash", "dirname", "cat", "cksum", "uname", "grep", "tail", "rm", "mkdir", "sleep", "awk", "tr", "cut"):
        (root / "bin" / tool).symlink_to(shutil.which(tool))
    command(root, "df", "echo header; echo disk 0 0 99999999 0 /")
    return root


def command(root: Path, name: str, body: str) -> None:
    (root / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
    (root / "bin" / name).chmod(0o755)


def set_up(root: Path) -> subprocess.CompletedProcess:
    return run("bash", "-c", "source scripts/setup_env && setup_env && echo READY", cwd=root, PATH=str(root / "bin"))


def python_that(root: Path, pip: str, name: str = "python3.11") -> None:
    """A stand-in for Python whose `-m venv` makes a folder with itself in it and whose `-m pip install` does what `pip` says."""
    me = root / "bin" / name
    body = f"""
    case "$*" in
    *sys.executable*) echo {me} ;;
    *platform*) echo 3.11.9 ;;
    *"-m venv"*) mkdir -p "$3/bin" && printf '#!/bin/bash\\nexec {me} "$@"\\n' >"$3/bin/python" && chmod +x "$3/bin/python" ;;
    *urlopen*) exit 1 ;;
    *"pip install"*) echo "$*" >>{root}/pip.txt; {pip} ;;
    esac
    """
    command(root, name, body)
    (root / "bin/chmod").unlink(missing_ok=True)
    (root / "bin/chmod").symlink_to(shutil.which("chmod"))


def test_without_a_suitable_python_it_says_which_ones_would_do(checkout):
    command(checkout, "python3", "exit 1")  # too old: the version check fails
    done = set_up(checkout)
    assert done.returncode == 1
    assert "Python 3.11 or 3.12 is needed" in done.stderr and "sudo apt install" in done.stderr


def test_a_python_without_venv_is_named_with_the_package_to_install(checkout):
    command(checkout, "python3.11", f'case "$*" in *ensurepip*) exit 1 ;; *) echo {checkout}/bin/python3.11 ;; esac')
    done = set_up(checkout)
    assert done.returncode == 1 and "has no venv module" in done.stderr and "python3-venv" in done.stderr


def test_a_full_disk_is_told_before_anything_is_downloaded(checkout):
    python_that(checkout, pip="true")
    command(checkout, "df", "echo header; echo disk 0 0 1048576 0 /")
    done = set_up(checkout)
    assert done.returncode == 1 and "has 1 GB free" in done.stderr
    assert not (checkout / "pip.txt").exists()


def test_no_network_is_told_in_words_and_the_next_try_goes_on(checkout):
    python_that(checkout, pip="echo 'Temporary failure in name resolution'; exit 1")
    done = set_up(checkout)
    assert done.returncode == 1 and "The package index cannot be reached" in done.stderr
    python_that(checkout, pip="true")
    assert "READY" in set_up(checkout).stdout


def test_ctrl_c_ends_the_installation_and_says_how_to_go_on(checkout):
    python_that(checkout, pip="exec sleep 60")
    setting_up = ["bash", "-c", "source scripts/setup_env && setup_env"]
    env = os.environ | {"PATH": str(checkout / "bin")}
    process = subprocess.Popen(setting_up, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (checkout / "pip.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Run the same command again" in errors


def test_it_installs_the_tested_versions_once_and_is_then_silent(checkout):
    python_that(checkout, pip="true")
    first = set_up(checkout)
    assert first.returncode == 0, first.stderr
    calls = (checkout / "pip.txt").read_text()
    assert "torch==" in calls and "constraints.txt -e" in calls and "--no-deps" in calls
    assert set_up(checkout).stdout == "READY\n"
    assert (checkout / "pip.txt").read_text() == calls


def test_a_changed_dependency_is_installed_into_the_same_environment(checkout):
    python_that(checkout, pip="true")
    set_up(checkout)
    (checkout / ".venv/kept").touch()
    with (checkout / "scripts/constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    calls = (checkout / "pip.txt").read_text()
    assert "READY" in set_up(checkout).stdout
    assert (checkout / ".venv/kept").exists() and (checkout / "pip.txt").read_text() != calls


def test_an_environment_of_the_users_own_is_not_touched(checkout):
    python_that(checkout, pip="true")
    (checkout / ".venv").mkdir()
    (checkout / ".venv/mine").touch()
    done = set_up(checkout)
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert (checkout / ".venv/mine").exists()
