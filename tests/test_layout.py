"""The tree keeps its shape: which files there are, which room may import which, and a README that says what is so.

The rules are those of framework/README.md. A failure here names the file and the rule; nothing needs to run for it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TOP_LEVEL = {"framework", "conf", "recipes", "csrc", "scripts", "tests", ".ci", ".gitignore", "LICENSE", "README.md", "pyproject.toml"}

# What each room may import, ground floor first. `disk`, `progress`, `torch_private`, `worker` and the package itself are no rooms.
MAY_IMPORT = {
    "config": set(),
    "kernels": {"config"},
    "zero": {"config", "kernels"},
    "parallel": {"config", "kernels", "zero"},
    "models": {"config", "kernels"},
    "data": {"config"},
    "checkpoint": {"config", "zero", "models"},
    "train": {"config", "kernels", "zero", "parallel", "models", "data", "checkpoint"},
    "plan": {"config", "kernels", "zero", "models"},
    "compat": {"config", "zero", "checkpoint"},
    "cli": {"config", "kernels", "zero", "parallel", "models", "data", "checkpoint", "train", "plan", "compat"},
}
MOST_LINES = 500
MOST_README_LINES = 150
MOST_RECIPE_LINES = 30

# Nothing of one machine and nothing unfinished. The words are taken apart so that this file does not find itself.
UNWANTED = {
    "a path of one machine": re.compile(r"(?<![\w.~/-])/(?:root|work|home/\w+|Users/\w+)/"),
    "an unfinished place": re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b"),
}


def tree() -> list[Path]:
    """Every file that belongs to the repository, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the files of the repository cannot be told from others")
    return [path for line in listed.stdout.splitlines() if (ROOT / (path := Path(line))).is_file()]


def python_files(folder: str) -> list[Path]:
    return [path for path in tree() if path.suffix == ".py" and path.parts[0] == folder]


def readme() -> str:
    return (ROOT / "README.md").read_text()


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, also inside functions."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute, so that the room they reach into is in sight"
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
    return found


# ---- files
def test_the_top_level_holds_the_fixed_entries_only():
    assert {path.parts[0] for path in tree()} <= TOP_LEVEL


def test_every_folder_of_the_package_is_a_room():
    folders = {path.parts[1] for path in python_files("framework") if len(path.parts) > 2}
    assert folders <= set(MAY_IMPORT)


def test_no_file_is_too_long_to_hold_one_idea():
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in tree() if path.suffix in {".py", ".cpp", ".cu", ".h"}}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_a_helper_lives_where_it_is_used():
    assert [str(path) for path in tree() if path.stem in {"util", "utils", "helpers", "misc", "common"}] == []


def test_every_module_says_what_it_is_for():
    silent = [
        str(path)
        for path in python_files("framework") + python_files("tests")
        if not ast.get_docstring(ast.parse((ROOT / path).read_text()))
    ]
    assert [path for path in silent if not (path.startswith("tests/") and path.endswith("__init__.py"))] == []


def test_nothing_of_one_machine_and_nothing_unfinished_is_in_the_tree():
    found = []
    for path in tree():
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1):
            found += [f"{path}:{number}: {what}: {line.strip()}" for what, pattern in UNWANTED.items() if pattern.search(line)]
    assert found == []


def test_recipes_fit_on_a_screen():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "recipes").glob("*.yaml")}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MOST_RECIPE_LINES} == {}


def test_the_linter_has_nothing_to_say():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- who imports whom
@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_rooms_that_it_may(room):
    wrong = []
    for path in python_files("framework"):
        if len(path.parts) > 2 and path.parts[1] == room:
            for line, module in imported_modules(path):
                parts = module.split(".")
                if parts[0] == "framework" and len(parts) > 1 and parts[1] in MAY_IMPORT and parts[1] not in MAY_IMPORT[room] | {room}:
                    wrong.append(f"{path}:{line} imports {module}")
    assert wrong == []


def test_tests_are_not_imported_by_the_package():
    assert [
        (path, module) for path in python_files("framework") for _, module in imported_modules(path) if module.split(".")[0] == "tests"
    ] == []


def test_p42_composing_and_supervising_import_no_torch():
    modules = [
        ".".join(path.with_suffix("").parts) for path in python_files("framework") if path.parts[1] == "config" and path.stem != "__init__"
    ]
    modules += ["framework", "framework.progress", "framework.cli.launch"]
    heavy = "torch", "lightning", "transformers", "datasets", "wandb"
    code = f"import sys, {', '.join(modules)}; print([module for module in {heavy} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# ---- what the README says
def test_the_readme_can_be_read_in_one_sitting():
    assert len(readme().splitlines()) <= MOST_README_LINES


def test_the_readme_shows_the_recipe_as_it_is():
    assert f"```yaml\n{(ROOT / 'recipes' / 'llama_sft.yaml').read_text()}```" in readme()


def test_the_readme_lists_every_group_with_its_options():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", readme(), flags=re.MULTILINE)
    shown = {group: set(re.findall(r"`([^`]+)`", options)) for group, options in rows}
    there = {folder.name: {file.stem for file in folder.glob("*.yaml")} for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    assert shown == there


def test_the_readme_shows_a_mistake_as_it_is_reported():
    command, report = re.search(r"^```\n\$ python ([^\n]*)\n(.*?)```$", readme(), flags=re.MULTILINE | re.DOTALL).groups()
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, report.strip())


def test_the_quickstart_asks_what_its_data_answer():
    questions = re.search(r"^QUESTIONS=\((.*)\)$", (ROOT / "scripts" / "quickstart").read_text(), flags=re.MULTILINE)[1]
    data = (ROOT / "recipes" / "data" / "framework_qa.jsonl").read_text()
    assert [question for question in re.findall(r'"([^"]+)"', questions) if question not in data] == []


def test_the_package_readme_lists_every_room_from_the_ground_floor_up():
    listed = re.findall(r"^\| \[`(\w+)/`\]", (ROOT / "framework" / "README.md").read_text(), flags=re.MULTILINE)
    there = {path.parts[1] for path in python_files("framework") if len(path.parts) > 2}
    assert listed == [room for room in MAY_IMPORT if room in there]


@pytest.mark.parametrize("path", [str(path) for path in ROOT.glob("**/README.md") if ".venv" not in path.parts])
def test_links_in_readmes_lead_somewhere(path):
    folder = Path(path).parent
    targets = re.findall(r"\]\(([^)#]+)\)", Path(path).read_text())
    assert [target for target in targets if "://" not in target and not (folder / target).exists()] == []


def test_the_commands_that_the_readme_names_are_there_and_can_be_run():
    commands = set(re.findall(r"^(?:\./)?(scripts/\w+)(?:\s|$)", readme(), flags=re.MULTILINE))
    assert {"scripts/quickstart", "scripts/test"} <= commands
    assert [command for command in commands if not (ROOT / command).stat().st_mode & 0o100] == []
