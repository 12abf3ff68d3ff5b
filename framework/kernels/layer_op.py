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
from framework.kernels.library import KernelError, is_unknown, library_on, mode

_OPERATIONS = torch.library.Library("framework", "FRAGMENT")


def is_compiled(function: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether `function` of the compiled library takes tensors like `x`. Mixed dtypes and torch.func's transforms are the reference's
    business, but an error under kernels=compiled."""
    if other := next((other for other in others if other is not None and other.dtype != x.dtype), None):
        if mode() == "compiled":
            raise KernelError(f"kernels=compiled, but {function} takes tensors of one dtype, and got {x.dtype} with {other.dtype}.")
        return False
    if torch_private.in_functorch():
        if mode() == "compiled":
            raise KernelError(f"kernels=compiled, but {function} does not know torch.func's transforms.")
        return False
    return _is_compiled(function, x.device.type, x.dtype)


@torch.compiler.assume_constant_result
def _is_compiled(function: str, device_type: str, dtype: torch.dtype) -> bool:
    unknown = f"x is {dtype}" if is_unknown(dtype) else None
    return library_on(device_type, function, unknown) is not None


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
        function = _autograd_function(name, implementation, setup_context, backward)
    operation = getattr(torch.ops.framework, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch_private.in_dispatch_mode():
            return operation(*args)
        wants_gradient = False
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) not in _PLAIN:
                    return operation(*args)
                wants_gradient = wants_gradient or arg.requires_grad
        return function.apply(*args) if wants_gradient and function is not None and torch.is_grad_enabled() else implementation(*args)

    return call


_PLAIN = (Tensor, torch.nn.Parameter)
"""Not one of torch's stand-ins for tensors while it traces."""


def _autograd_function(name: str, implementation: Callable, setup_context: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """What an eager call goes through. With a forward that takes `ctx` the host needs half as long as with a `setup_context` of its own,
    for which torch looks up the signature at every call."""
    differentiable_once = once_differentiable(backward)

    def forward(ctx: Any, *args: Any) -> Any:
        output = implementation(*args)
        setup_context(ctx, args, output)
        return output

    def gradients(ctx: Any, *grads: Any) -> Any:
        return (differentiable_once if torch.is_grad_enabled() else backward)(ctx, *grads)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(gradients)})
