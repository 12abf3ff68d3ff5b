"""Finds and loads the compiled kernels (`csrc/`), and decides for every call whether they or plain torch do it.

    choose("auto")                                                   the one switch, for the whole process
    if library := library_for("fw_cast", src=src, dst=dst): ...      None: use the reference

- `auto`: the compiled function where there is one for these tensors, else the reference.
- `reference`: always plain torch, to compare with or to rule the kernels out.
- `compiled`: always the compiled function; a `KernelError` says why where that cannot be.

Unusual: a library is an ordinary file loaded with ctypes at the first call that wants it, and a missing one is no error. It is looked for
in $FRAMEWORK_KERNELS_DIR if that is set, else in the installed package (`framework/kernels/lib/`) and, in a checkout, in `build/*/`; the
one built last is taken. Beside a checkout's `csrc/` a library that was built from other sources is `stale`: this is told wherever kernels
are described, and `compiled` refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from framework import torch_private
from framework.kernels.signatures import SIGNATURES, TYPES

ABI_VERSION = 1
"""FW_ABI_VERSION of the header that this Python code was written for."""

Mode = Literal["auto", "reference", "compiled"]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FW_INVALID = 10001
MEANINGS = {
    FW_INVALID: "it refuses these arguments",
    2: "out of device memory",
    35: "the NVIDIA driver is older than the CUDA version that the kernels were built with",
    98: "the kernels were not built for this GPU",
    100: "no GPU was found",
    400: "a stream of another device than the current one",
    209: "the kernels were not built for this GPU",
    700: "an illegal memory access on the GPU, perhaps by an earlier kernel",
    716: "a misaligned address on the GPU, perhaps by an earlier kernel",
}
CHECKOUT = Path(__file__).parents[2]
HOW_TO_BUILD = "Build the kernels with `pip install .` (csrc/README.md), or use kernels=auto."


class KernelError(RuntimeError):
    """A compiled function failed, cannot be used as asked, or was given tensors that it does not take."""


class Library:
    """One loaded library. `name` is the kind of device that it is for: cpu or cuda."""

    def __init__(self, name: str, path: Path) -> None:
        """Raises OSError if the file cannot be loaded, KernelError if its ABI is not the one expected here."""
        self.name, self.path = name, path
        self._handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        self._threads = 0
        self.stale: str | None = None
        """What to do about a library of other sources than those at hand; None: it is of these, or none are at hand (a wheel)."""
        version = self._handle.fw_abi_version() if self.has("fw_abi_version") else None
        if version != ABI_VERSION:
            raise KernelError(f"{path} has ABI version {version}, and this installation needs {ABI_VERSION}. Build it again: pip install .")

    @property
    def description(self) -> str:
        """What was built, on the CPU which instruction set is used, and whether that is old."""
        return self._text("fw_describe") + (f"; STALE, {self.stale}" if self.stale else "")

    @property
    def sources(self) -> str | None:
        """The hash of what it was built from; None for a library from before there was one."""
        return self._text("fw_sources") if self.has("fw_sources") else None

    def _text(self, function: str) -> str:
        found = getattr(self._handle, function)
        found.restype = ctypes.c_char_p
        return found().decode()

    def has(self, function: str) -> bool:
        """Whether the library exports `function`."""
        if function not in self._functions:
            try:
                found = getattr(self._handle, function)
                found.argtypes = [TYPES[letter] for letter in SIGNATURES[function]]
            except AttributeError:
                found = None
            self._functions[function] = found
        return self._functions[function] is not None

    def call(self, function: str, *args: Any) -> None:
        """Call `function`; its last argument, the stream, included. Raises KernelError if it does not return 0."""
        if not self.has(function):
            raise KernelError(f"{function}: {self.path} has no such function.")
        if self.name == "cpu" and self._threads != (threads := torch.get_num_threads()):
            self._handle.fw_set_threads(threads)  # torch may have an OpenMP runtime of its own, so it is not enough that it told that one
            self._threads = threads
        code = self._functions[function](*args)
        if code != 0:
            raise KernelError(f"{function} ({self.name}) returned {code}: {MEANINGS.get(code, 'a CUDA error of this number')}.")


_mode: Mode = "auto"
_loaded: dict[str, Library | str] = {}
"""By name: the library, or why there is none. Empty until something asks."""
_substitutes: dict[str, Library] = {}


def choose(mode: Mode) -> None:
    """Set for the whole process what does the work. Raises KernelError for another word."""
    global _mode
    if mode not in ("auto", "reference", "compiled"):
        raise KernelError(f"kernels: got {mode!r}, expected auto, reference or compiled.")
    _mode = mode


def mode() -> Mode:
    """What `choose` set; auto at first."""
    return _mode


def library_for(function: str, *tensors: Tensor | None, **named: Tensor | None) -> Library | None:
    """The library that has `function` for these tensors, or None for the reference.

    Tensors are checked whatever the mode, so that what works with the references works with the libraries: KernelError if they are on
    different devices or not contiguous. What is given by name is called so in the message. None stands for an argument that was left out.
    """
    if tensors:
        named = {f"tensor {position}": tensor for position, tensor in enumerate(tensors, 1)} | named
    device, known, fake = None, True, False  # one plain loop: every layer comes by here at every call
    for tensor in named.values():
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise KernelError(_devices(function, named))
        if not tensor.is_contiguous():
            raise KernelError(_not_contiguous(function, named))
        known = known and not is_unknown(tensor.dtype)
        fake = fake or torch_private.is_fake(tensor)
    if device is None or fake:
        return None
    unknown = None if known else next(f"{name} is {t.dtype}" for name, t in named.items() if t is not None and is_unknown(t.dtype))
    return library_on(device.type, function, unknown)


def library_on(device_type: str, function: str, unknown: str | None = None) -> Library | None:
    """The library that has `function` for tensors on such a device, or None for the reference. Raises KernelError under kernels=compiled
    where there is none. `unknown`: which tensor is of a dtype that the kernels do not know."""
    if _mode == "reference" or device_type == "meta":
        return None
    library = _substitutes.get(device_type) or _load(device_type)
    if isinstance(library, str):
        why_not = library
    elif not library.has(function):
        why_not = f"{library.path} does not have it"
    elif library.stale and _mode == "compiled":
        why_not = f"{library.path} is {library.stale}"
    elif unknown is not None:
        why_not = f"{unknown}, and the kernels know {', '.join(map(str, DTYPE_CODES))}"
    else:
        return library
    if _mode == "auto":
        return None
    raise KernelError(f"kernels=compiled, but {function} cannot be used: {why_not}. {HOW_TO_BUILD}")


def stream_of(tensor: Tensor) -> int | None:
    """The address of the CUDA stream that torch uses now on the tensor's device; None on the CPU."""
    if tensor.device.type != "cuda":
        return None
    if tensor.device.index != torch.cuda.current_device():  # it would run on the current one, on addresses of another
        current = torch.cuda.current_device()
        raise KernelError(f"got tensors on {tensor.device} while cuda:{current} is the current device. Call torch.cuda.set_device first.")
    return torch_private.raw_stream(tensor.device.index)


def dtype_code(dtype: torch.dtype) -> int:
    """`enum fw_dtype`. Raises KernelError for dtypes that the kernels do not know."""
    if dtype not in DTYPE_CODES:
        raise KernelError(f"got {dtype}, expected one of {', '.join(map(str, DTYPE_CODES))}.")
    return DTYPE_CODES[dtype]


def status() -> dict[str, str]:
    """For `framework env`: of each library what it is and where, or why there is none, and the mode."""
    rows: dict[str, str] = {"kernels": _mode}
    for name in ("cpu", "cuda"):
        library = _load(name)
        rows[f"kernels_{name}"] = library if isinstance(library, str) else f"{library.description} ({library.path})"
    return rows


def missing(device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why there are no kernels for tensors of `dtype` on `cpu` or `cuda`, which under `compiled` stale ones are not; None if there are."""
    if dtype not in DTYPE_CODES:
        return f"the compiled kernels do not compute in {str(dtype).removeprefix('torch.')}"
    library = _load(device_type)
    if isinstance(library, str):
        return library
    return f"{library.path} is {library.stale}" if library.stale and _mode == "compiled" else None


def used_on(device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """For people, before a run: what computes on `cpu` or `cuda`, and why it is not the kernels."""
    if _mode == "reference":
        return "plain torch (kernels=reference)"
    if why_not := missing(device_type, dtype):
        return f"plain torch, because {why_not}"
    return f"compiled, {_load(device_type).description}"


@contextlib.contextmanager
def substitute(device_type: str, library: Library) -> Iterator[None]:
    """For tests: use `library` for tensors on `device_type`."""
    before = _substitutes.get(device_type)
    _substitutes[device_type] = library
    try:
        yield
    finally:
        if before is None:
            del _substitutes[device_type]
        else:
            _substitutes[device_type] = before


def candidates(name: str) -> list[Path]:
    """Every file that could be the library, the one to take first."""
    file_name = f"libframework_{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"
    if chosen := os.environ.get("FRAMEWORK_KERNELS_DIR"):
        return [path for path in [Path(chosen) / file_name] if path.is_file()]
    import framework.kernels

    # In an editable install the package has two folders: the checkout, and the one among the installed packages where the libraries are.
    folders = [Path(folder) / "lib" for folder in framework.kernels.__path__]
    if (CHECKOUT / "csrc" / "CMakeLists.txt").is_file():
        folders += sorted((CHECKOUT / "build").glob("*"))
    found = {(folder / file_name).resolve() for folder in folders if (folder / file_name).is_file()}
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _load(name: str) -> Library | str:
    if name not in _loaded:
        _loaded[name] = _try_to_load(name)
    return _loaded[name]


def _try_to_load(name: str) -> Library | str:
    if name not in ("cpu", "cuda"):
        return f"there are kernels for cpu and cuda only, not for {name}"
    paths = candidates(name)
    if not paths:
        where = os.environ.get("FRAMEWORK_KERNELS_DIR")
        return f"no libframework_{name} was found" + (f" in FRAMEWORK_KERNELS_DIR={where}" if where else " (it was not built)")
    try:
        library = Library(name, paths[0])
        library.stale = _why_stale(library)
        if name == "cuda" and torch.cuda.is_available():
            _try_to_launch(library)
        return library
    except (OSError, KernelError) as error:
        return f"{paths[0]} cannot be used: {error}"


def sources_at_hand(name: str) -> str | None:
    """What `Library.sources` of a fresh build would be; None where the kernels' sources are not beside the package."""
    csrc = CHECKOUT / "csrc"
    if not (csrc / "CMakeLists.txt").is_file():
        return None
    patterns = ("include/*.h", f"{name}/*.h", f"{name}/*.cpp", f"{name}/*.cu", "CMakeLists.txt")
    files = sorted(path.relative_to(csrc).as_posix() for pattern in patterns for path in csrc.glob(pattern))
    listing = "".join(f"{hashlib.sha256((csrc / file).read_bytes()).hexdigest()}  {file}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _why_stale(library: Library) -> str | None:
    if sources_at_hand(library.name) in (None, library.sources):
        return None
    folder = library.path.parent
    command = f"cmake --build {folder}" if (folder / "CMakeCache.txt").is_file() else f"pip install -e {CHECKOUT}"
    return f"not built from the sources in {CHECKOUT / 'csrc'}. Build it again: {command}"


def _try_to_launch(library: Library) -> None:
    """Raises KernelError where the driver is too old for the library, or the GPU not one that it was built for."""
    x = torch.zeros(2, device="cuda")
    library.call("fw_cast", x.data_ptr(), 0, x.data_ptr() + 4, 0, 1, stream_of(x))


def is_unknown(dtype: torch.dtype) -> bool:
    """Integers are bytes to the kernels, and known."""
    return dtype not in DTYPE_CODES and dtype.is_floating_point


def _not_contiguous(function: str, named: dict[str, Tensor | None]) -> str:
    name, tensor = next((name, tensor) for name, tensor in named.items() if tensor is not None and not tensor.is_contiguous())
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"{function}: {name} is not contiguous (shape {shape}, strides {strides}). Pass {name}.contiguous()."


def _devices(function: str, named: dict[str, Tensor | None]) -> str:
    places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items() if tensor is not None)
    return f"{function}: got {places}, expected one device."
