"""What Hydra is taught here: flat recipes as the group `recipe`, `zero=3` without quotes, and what the command line says comes last.

`register()` does it, once per process, before anything is composed:
- `RecipeSource` serves FOLDER/NAME.yaml as `recipe/NAME` and `+recipe=./mine.yaml` as that file; `RecipeSearchPath` names the folders
  (`$FRAMEWORK_RECIPES`, `--config-dir`, the shipped ones). `GroupSource` serves the options of groups in `--config-dir`.
- Two small patches of Hydra's internals, which public hooks do not reach: [Note: patches].

[Note: patches] Hydra refuses a whole number as a group's option (`zero=3`: "must be a string or a list"), a group chosen without `+` that
is not in the defaults list (`recipe=NAME`), and a key that the composed config does not hold (`model.arch.rope_theta=1e5`, where only
the schema knows it). The first patch reads these as what they mean. And Hydra merges a recipe after every group, so that what a recipe
sets would beat an option chosen on the command line: the second patch moves the chosen options to the end of the defaults list. Both are
tied to Hydra 1.3 and tested through its public interface.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import hydra
import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from framework.config.errors import Problem, UserError
from framework.config.paths import asset_dir

GROUP = "recipe"
RECIPES_VARIABLE = "FRAMEWORK_RECIPES"
"""Folders with recipes of the user's, separated like PATH."""


class RecipeSource(ConfigSource):
    """`recipe://FOLDER`: the recipes of a folder, and recipe files given by path, as configs of the group `recipe`."""

    loaded: list[Path] = []
    """Recipe files of the latest composition, a recipe before those that it builds on: for messages that name file and line."""

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        self.loaded.append(file)
        text = file.read_text(encoding="utf-8")
        header = self._get_header_dict(text)
        header["package"] = header.get("package") or "_global_"  # a recipe needs no header line
        config = OmegaConf.load(file)
        if not isinstance(config, DictConfig) or isinstance(yaml.safe_load(text), str):  # OmegaConf makes {words: None} of words
            raise UserError(Problem(path=str(file), got="a file without keys", expected="a recipe: `key: value` lines"))
        if "defaults" in config:
            if not isinstance(config.defaults, ListConfig):
                got, fix = str(config.defaults), '- override /zero: "2"'
                raise UserError(Problem(path=f"{file} (defaults)", got=got, expected="a list", fix=fix))
            config.defaults = [_default_item(item, file.parent) for item in config.defaults]
        return ConfigResult(config=config, path=f"recipe://{file}", provider=self.provider, header=header)

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        where = config_path.strip("/")
        if where == "" and results_filter in (None, ObjectType.GROUP):
            return [GROUP]
        if where == GROUP and results_filter in (None, ObjectType.CONFIG):
            return recipe_names([Path(self.path)])
        return []

    def _file(self, config_path: str) -> Path | None:
        group, _, name = config_path.partition("/")
        return find_recipe(unquote(name), [Path(self.path)]) if group == GROUP and name else None


class GroupSource(FileConfigSource):
    """`groups://FOLDER`: the options in the group folders of a user's, which come before shipped ones of the same name.

    Files beside them are recipes, and none of them the shipped `config.yaml`.
    """

    @staticmethod
    def scheme() -> str:
        return "groups"

    def is_config(self, config_path: str) -> bool:
        return "/" in config_path.strip("/") and super().is_config(config_path)


def find_recipe(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of recipe `name`: a path (with `/` or `~`, or ending in .yaml) or the name of a file in `folders`."""
    file = Path(name).expanduser()
    if is_path(name) and file.is_file():
        return file.absolute()
    if os.sep in name:
        with_suffix = file.with_name(file.name + ".yaml")
        return with_suffix.absolute() if with_suffix.is_file() else None
    candidates = (folder / (name if name.endswith(".yaml") else f"{name}.yaml") for folder in folders)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def is_path(name: str) -> bool:
    """Whether a recipe is given by path and not by name."""
    return os.sep in name or name.startswith("~") or name.endswith(".yaml")


def recipe_names(folders: Iterable[Path]) -> list[str]:
    """Names of the recipes in `folders`."""
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def recipe_folders(config_dir: str | None) -> list[Path]:
    """Where recipes are looked up by name, first match first."""
    own = [folder for folder in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if folder]
    return [*(Path(folder).expanduser().absolute() for folder in (*own, *([config_dir] if config_dir else []))), asset_dir("recipes")]


class RecipeSearchPath(SearchPathPlugin):
    """Adds the folders of recipes, and the user's folder of groups, to Hydra's search path."""

    config_dir: str | None = None
    """`--config-dir` of the command line that is being composed; Hydra instantiates this class itself, without arguments."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in recipe_folders(self.config_dir):
            search_path.append("framework", f"recipe://{folder}")
        if self.config_dir:
            search_path.prepend("framework", f"groups://{Path(self.config_dir).absolute()}", anchor="main")


def register(defaults: dict[str, Any], config_dir: str | None) -> None:
    """Teach Hydra all of the above. `defaults`: every setting with its default value, on which the groups are laid."""
    if not hydra.__version__.startswith("1.3."):
        raise ImportError(f"hydra-core {hydra.__version__} is installed; this framework needs >=1.3.2,<1.4")
    RecipeSearchPath.config_dir = config_dir
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(GroupSource)
    Plugins.instance().register(RecipeSearchPath)
    ConfigStore.instance().store(name="schema_defaults", node=defaults, provider="framework")
    _read_overrides_as_meant()
    _put_chosen_options_last()


def _default_item(item: Any, folder: Path) -> Any:
    """An item of a recipe's defaults list: options as text (`override /zero: 2`), recipe files relative to that recipe."""
    if isinstance(item, DictConfig):
        return {key: str(value) if type(value) is int else value for key, value in item.items_ex(resolve=False)}
    if isinstance(item, str) and is_path(item):
        parent = Path(item).expanduser()
        return quote(str(parent if parent.is_absolute() else folder / parent), safe="")  # a slash would change Hydra's idea of the group
    return item


def _read_overrides_as_meant() -> None:
    """First patch of [Note: patches]."""
    original = defaults_list.Overrides.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, repo: Any, overrides_list: list[Override]) -> None:
        for override in overrides_list:
            if override.is_sweep_override() or override.is_hydra_override():
                continue
            if not repo.group_exists(override.key_or_group):
                if override.type == OverrideType.CHANGE:
                    override.type = OverrideType.FORCE_ADD
                continue
            if type(override._value) is int:
                override._value = str(override._value)
            if override.key_or_group == GROUP and override.type == OverrideType.CHANGE:
                override.type = OverrideType.ADD
        original(self, repo, overrides_list)

    defaults_list.Overrides.__init__ = init


def _put_chosen_options_last() -> None:
    """Second patch of [Note: patches]."""
    original = config_loader_impl.create_defaults_list
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        RecipeSource.loaded.clear()
        result = original(*args, **kwargs)
        chosen = tuple(
            f"{key.partition('@')[0]}/"
            for key, metadata in result.overrides.override_metadata.items()
            if metadata.external_override and not key.startswith("hydra/")
        )
        result.defaults.sort(key=lambda default: bool(default.config_path) and default.config_path.startswith(chosen))  # stable
        return result

    config_loader_impl.create_defaults_list = create
