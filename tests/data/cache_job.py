"""A process of its own that wants an entry of the cache: for tests of several at once, of being killed and of full disks."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from framework.config.errors import UserError
from framework.data.cache import EntryWriter, obtain

TOKENS_PER_ROW = 3000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("key")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--pause-at", type=int, default=-1, help="say so at this row, and wait for the file --go-on")
    parser.add_argument("--go-on")
    parser.add_argument("--most-file-bytes", type=int, help="a larger file is refused by the system")
    arguments = parser.parse_args()
    if arguments.most_file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.most_file_bytes,) * 2)

    def make(writer: EntryWriter) -> dict:
        ids = writer.array("ids", np.int32)
        for row in range(arguments.rows):
            if row == arguments.pause_at:
                print("paused", flush=True)
                while not os.path.exists(arguments.go_on):
                    time.sleep(0.01)
            ids.append(np.full(TOKENS_PER_ROW, row, np.int32))
        return {"rows": arguments.rows}

    try:
        entry, was_there = obtain(arguments.cache, arguments.key, make, say=lambda line: print(line, flush=True))
    except UserError as error:
        print(error)
        return 2
    assert np.array_equal(entry.array("ids"), np.repeat(np.arange(arguments.rows), TOKENS_PER_ROW))
    print(f"{'found' if was_there else 'made'} {entry.facts['rows']} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
