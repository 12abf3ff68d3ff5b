"""A rank without torch for the supervisor's tests: `python tiny_rank.py '{"1": "raise"}' CONFIG RUN_DIR`.

All ranks go through 20 ms steps in lockstep over a socket on MASTER_PORT, as ranks of a real run do in their all-reduce: they agree on
the step at which a requested stop happens, and a rank notices at once when another one is gone. At step 5 a rank does what its entry
says. With `{"by seed": {"0": {...}, "1": {...}}}` the recipe's seed chooses, so that the jobs of a sweep differ.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.train.run_dir import Finishing, read_config, saving, write_finishing
from framework.worker import working

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
stop_requested = False


def main() -> None:
    behaviour, run_dir = json.loads(sys.argv[1]), Path(sys.argv[3])
    if "by seed" in behaviour:
        behaviour = behaviour["by seed"][str(read_config(Path(sys.argv[2])).seed)]
    (run_dir / f"pid_{RANK}").write_text(str(os.getpid()))
    mine = behaviour.get(str(RANK), behaviour.get("all", ""))
    if mine == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif mine != "abrupt":
        signal.signal(signal.SIGTERM, _on_stop)
    if mine == "children":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    peers = _connect()
    print(f"rank {RANK} of {RANKS} runs with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    for step in range(int(behaviour.get("steps", 100_000))):
        if step == 5:
            _misbehave(mine)
            (run_dir / f"running_{RANK}").touch()
            if mine == "save":
                with saving(run_dir if RANK == 0 else None):
                    time.sleep(1.5)
        if _agree(peers, stop_requested, float(behaviour.get("timeout", 0)) or None):
            if RANK == 0:
                write_finishing(run_dir, Finishing(step=step, stopped=True))
            if mine == "slow save":
                time.sleep(1.5)
            if mine == "bad save":
                raise OSError(28, "No space left on device")
            (run_dir / f"saved_{RANK}").write_text(str(step))
            return
        time.sleep(0.02)
    if RANK == 0:
        write_finishing(run_dir, Finishing(step=step + 1, stopped=False))
    if mine == "slow save":
        time.sleep(1.5)


def _on_stop(*_) -> None:
    global stop_requested
    stop_requested = True


def _misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("boom in step 5")
    if what == "mistake":
        raise UserError(Problem(path="data.train", got="nothing.jsonl", expected="a file that exists", fix="data.train=FILE"))
    if what == "exit 7":
        print("last words of this rank", flush=True)
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    if what in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, what))


def _connect() -> list[socket.socket]:
    if RANK == 0:
        with socket.create_server(ADDRESS) as server:
            return [server.accept()[0] for _ in range(RANKS - 1)]
    for _ in range(500):
        try:
            return [socket.create_connection(ADDRESS)]
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise RuntimeError("rank 0 does not listen")


def _agree(peers: list[socket.socket], flag: bool, timeout: float | None) -> bool:
    """Logical or of `flag` over all ranks."""
    try:
        for peer in peers:
            peer.settimeout(timeout)
        if RANK == 0:
            flag = any([flag] + [_receive(peer) for peer in peers])
        for peer in peers:
            peer.sendall(bytes([flag]))
        return flag if RANK == 0 else _receive(peers[0])
    except TimeoutError:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete") from None
    except OSError:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:8245") from None


def _receive(peer: socket.socket) -> bool:
    data = peer.recv(1)
    if not data:
        raise ConnectionResetError
    return bool(data[0])


if __name__ == "__main__":
    with working(Path(sys.argv[3])):
        main()
