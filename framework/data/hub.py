"""Data sets of the Hugging Face hub as local files: `hub://NAME[:[CONFIG/]SPLIT][@REVISION]`.

    hub://org/name                       the split `train` (for data.validation the split `validation`)
    hub://org/name:test                  another split
    hub://org/name:small/train@v1.2      of the configuration `small`, at a tag, branch or commit
    hub://./folder:test                  a local folder that is laid out like a data set of the hub

Which files a split consists of is asked of `datasets`, which knows the conventions of names and of cards. They are downloaded once into
the hub's own cache and then read like any other files, so that rows, messages and the cache of tokens are the same. When all of them are
there, `CACHE/hub/` says which they were: with HF_HUB_OFFLINE=1 they are used again, and the hub is not asked.

Unusual: `data.train=org/name` is a path, never a data set of the hub: a mistyped path must not start a download.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.data.files import readable
from framework.disk import write_whole
from framework.progress import busy

SCHEME = "hub://"
NOTATION = "hub://NAME[:[CONFIG/]SPLIT][@REVISION], as in hub://org/name:train"
PATTERN = re.compile(r"hub://(?P<name>[^:@]+)(:((?P<config>[^/:@]+)/)?(?P<split>[^/:@]+))?(@(?P<revision>[^@\s]+))?")
REMOTE_FILE = re.compile(r"hf://datasets/(?P<repo_id>[^@]+)@(?P<revision>[^/]+)/(?P<filename>.+)")
TIMEOUT_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class HubName:
    """What `hub://...` says."""

    name: str
    config: str | None
    split: str
    revision: str | None

    @property
    def is_local(self) -> bool:
        return Path(self.name).expanduser().is_dir()


def hub_name(path: str, setting: str) -> HubName:
    """Raises UserError where `path` is not written as NOTATION has it."""
    match = PATTERN.fullmatch(path)
    if match is None:
        raise UserError(Problem(path=setting, got=path, expected=NOTATION))
    parts = match.groupdict()
    parts["split"] = parts["split"] or ("validation" if setting.startswith("data.validation") else "train")
    return HubName(**parts)


def hub_files(path: str, setting: str, cache: Path) -> list[Path]:
    """The files of the split that `path` names, downloaded where they are not here yet. `cache`: our own. Raises UserError."""
    from huggingface_hub import constants

    from framework.data.cache import readable_errors  # numpy, which a first look does not need

    wanted = hub_name(path, setting)
    note = cache / "hub" / f"{hashlib.sha256(repr((constants.ENDPOINT, wanted)).encode()).hexdigest()[:32]}.json"
    if constants.HF_HUB_OFFLINE and not wanted.is_local and note.is_file():
        return [readable(_downloaded(file, path, setting), setting) for file in json.loads(note.read_text())]
    with busy(f"looking for {path}"):
        files = _files_of(wanted, path, setting)
    found = [readable(_downloaded(file, path, setting), setting) for file in files]
    if not wanted.is_local:
        with readable_errors(cache):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, json.dumps(files))
    return found


def _files_of(wanted: HubName, path: str, setting: str) -> list[str]:
    import datasets

    name, revision = wanted.name, wanted.revision
    try:
        if wanted.is_local:
            name = str(Path(name).expanduser().absolute())
        else:
            revision = _commit(wanted)
        splits = datasets.load_dataset_builder(name, wanted.config, revision=revision).config.data_files or {}
    except Exception as error:  # `datasets` and `huggingface_hub` raise their own errors, and those of three libraries below them
        raise _failed(path, setting, error) from error
    if wanted.split not in splits:
        found = ", ".join(map(str, splits)) or "none"
        first = next(iter(splits), "train")
        prefix = f"{wanted.config}/" if wanted.config else ""
        got = f"{path}, which has no split {wanted.split!r}"
        fix = f"{setting}=hub://{wanted.name}:{prefix}{first}"
        raise UserError(Problem(path=setting, got=got, expected=f"one of its splits: {found}", fix=fix))
    return [str(file) for file in splits[wanted.split]]


def _commit(wanted: HubName) -> str:
    """Of the wanted revision, now: all files are to be of one state. Without a network it fails at once; `datasets` tries for a minute."""
    import huggingface_hub

    return huggingface_hub.HfApi().dataset_info(wanted.name, revision=wanted.revision, timeout=TIMEOUT_SECONDS).sha


def _downloaded(file: str, path: str, setting: str) -> Path:
    remote = REMOTE_FILE.fullmatch(file)
    if remote is None:
        return Path(file)
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo_type="dataset", **remote.groupdict()))
    except Exception as error:  # as above
        raise _failed(path, setting, error) from error


def _failed(path: str, setting: str, error: Exception) -> UserError:
    from huggingface_hub import errors

    reason = " ".join(str(error).split()) or "no reason given"
    got = f"{path}, which could not be had: {type(error).__name__}: {reason[:300]}"
    expected = "a data set that this machine can reach, or a local copy"
    fix = f"{setting}=/path/to/a/copy   (hf download ORG/NAME --repo-type dataset --local-dir /path/to/a/copy)"
    if isinstance(error, errors.GatedRepoError):
        got, expected = f"{path}, which the hub gives to those who were given access", "access, asked for on its page, and a login"
        fix = "hf auth login   (or HF_TOKEN=... in the environment)"
    elif isinstance(error, errors.RepositoryNotFoundError):
        got, expected = f"{path}, which the hub does not have, or not for you", "the name of a data set, and a login if it is a private one"
        fix = f"{setting}=hub://ORG/NAME   (hf auth login)"
    elif isinstance(error, errors.RevisionNotFoundError):
        got, expected = f"{path}, which has no such revision", "a branch, a tag or a commit of the data set"
        fix = f"{setting}={path.rpartition('@')[0]}"
    return UserError(Problem(path=setting, got=got, expected=expected, fix=fix))
