"""Fixtures for every test: ranks in worker processes, one thread per process, and no network.

The suite never reaches for a model hub: what it needs beyond the repository comes from installed packages.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile

# Before anything imports torch. Many processes share few cores here: two threads each would make all of them several times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_PROC_BIND"] = "false"  # ranks of several tests at once would be kept to the same cores (framework/cores.py)
os.environ.update(
    {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="framework-cache-")  # tokenised data of all tests, and of what they start
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would otherwise look up the machine's name, which need not resolve

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background (`scripts/test &`): tests press Ctrl-C in what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

from tests.pool import Pool

settings.register_profile("suite", deadline=None, max_examples=50)  # a busy machine may take seconds for an example
settings.load_profile("suite")


LONG_FILES = "test_command test_bench test_nvcc test_packaging test_launch test_strategy_readme test_fit".split()
"""Few tests, each a minute: begun last, as xdist would, they would run alone at the end beside an idle worker."""


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist's own order: files with many tests first


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def _cache():
    yield
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def ranks():
    """`results = ranks(4, function, *args, timeout=60)`: run a module-level function on 4 ranks of a real process group (gloo)."""
    pool = Pool()
    yield pool.run
    pool.close()
