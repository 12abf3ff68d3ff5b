"""Makes a function on tensors an operation of torch's: with autograd, without a graph break, and fast when called eagerly.

Registered with `torch.library.Library` (`define`, `impl`), for which a call costs 4 microseconds and not the 20 of `custom_op`. An eager
call does not even take that way: it goes through an `autograd.Function` made of the same pieces, or straight to the implementation where no
gradient is wanted.

Unusual: each layer decides twice. Its face asks `is_compiled` and takes the plain-torch reference, with torch's own autograd, where there
is no compiled function; the operation itself also works without one, because a graph that was traced on one machine may run on another.
A compiled graph keeps the choice between operation and reference that was made when it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework import torch_private
from framework.kernels.library import KernelError, library_for, mode

_OPERATIONS = torch.library.Library("framework", "FRAGMENT")


def is_compiled(function: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether `function` of the compiled library takes tensors like `x`. Mixed dtypes are the reference's business, but an error under
    kernels=compiled."""
    if other := next((other for other in others if other is not None and other.dtype != x.dtype), None):
        if mode() == "compiled":
            raise KernelError(f"kernels=compiled, but {function} takes tensors of one dtype, and got {x.dtype} with {other.dtype}.")
        return False
    return _is_compiled(function, x.device.type, x.dtype)


@torch.compiler.assume_constant_result
def _is_compiled(function: str, device_type: str, dtype: torch.dtype) -> bool:
    key = function, device_type, dtype
    like = _EXAMPLES.get(key)
    if like is None:
        with torch_private.outside_of_modes():  # it is kept: a real one
            like = _EXAMPLES[key] = torch.empty(0, dtype=dtype, device=device_type)
    return library_for(function, x=like) is not None


_EXAMPLES: dict[tuple[str, str, torch.dtype], Tensor] = {}


def layer_op(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[[Any, tuple, Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `framework::<schema>` and return the function to call it with, arguments by position.

    `implementation` must not return one of its arguments; `fake` gives empty outputs of the right shapes; `setup_context(ctx, inputs,
    output)` and `backward(ctx, *grads)` are those of `torch.library.register_autograd`, and call other operations made here.
    """
    name = schema.split("(", 1)[0]
    _OPERATIONS.define(schema)
    for key in ("CPU", "CUDA"):
        _OPERATIONS.impl(name, implementation, key)
    torch.library.register_fake(f"framework::{name}", fake, lib=_OPERATIONS)
    if backward is None:
        function = None
    else:
        torch.library.register_autograd(f"framework::{name}", backward, setup_context=setup_context, lib=_OPERATIONS)
        members = {"forward": implementation, "setup_context": setup_context, "backward": once_differentiable(backward)}
        function = type(name, (torch.autograd.Function,), {key: staticmethod(member) for key, member in members.items()})
    operation = getattr(torch.ops.framework, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch_private.in_dispatch_mode() or not all(_is_plain(arg) for arg in args):
            return operation(*args)
        if function is None or not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return implementation(*args)
        return function.apply(*args)

    return call


def _is_plain(arg: Any) -> bool:
    """Not one of torch's stand-ins for tensors while it traces."""
    return not isinstance(arg, Tensor) or type(arg) in (Tensor, torch.nn.Parameter)
