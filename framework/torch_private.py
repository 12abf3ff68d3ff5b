"""Every private or renamed torch API that is leant on here, with a self-test that fails loudly when torch changes one.

The autograd ones are what torch's own `register_multi_grad_hook` and `fully_shard` are built from. The collectives
`all_gather_single` and `reduce_scatter_single` carry these names since torch 2.13; before, they were
`all_gather_into_tensor` and `reduce_scatter_tensor`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """After which a collective of `group` gives up, for a group beside it; None: the default."""
    of = torch.device("cuda" if device.type == "cuda" else "cpu")  # a meta device has none
    return getattr(group._get_backend(of).options, "_timeout", None)


backward_id: Callable[[], int] = torch._C._current_graph_task_id  # itself: it is called for every parameter
"""Number of the backward pass that the calling thread is in, -1 outside (also -1 during an ordinary forward)."""


def accumulate_node(parameter: torch.Tensor) -> Node:
    """The graph node that adds into `parameter.grad`. Keep it: the node lives only as long as something refers to it."""
    with torch.enable_grad():
        return torch.autograd.graph._get_grad_fn_or_grad_acc(parameter)


def will_execute(node: Node) -> bool:
    """Whether the backward pass that is running now will execute `node`. Call inside a backward hook only."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad(...)`: leaves are captured and nothing is accumulated
        return False


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats `tensor` as a view of another one."""
    return tensor._is_view()


def version(tensor: torch.Tensor) -> int:
    """How often `tensor`, or what it is a view of, was changed in place, as autograd counts."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, also where there is none (yet): released, on the meta device, fake."""
    return tensor.untyped_storage()._cdata


def fake_tensors() -> AbstractContextManager:
    """Inside, new tensors have shapes, data types and a device, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass that is running now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists, dicts and registered classes, and what `tree_unflatten` needs to put them together again."""
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made inside `fake_tensors` (or while torch traces) and has no memory, whatever its device says."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "fake_mode")


def outside_of_modes() -> AbstractContextManager:
    """Inside, new tensors are real ones, also where somebody watches every operation."""
    return _disable_current_modes()


def in_dispatch_mode() -> bool:
    """Whether something watches every operation (fake tensors, tracing, counting FLOPs), and must see ours as one."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_functorch() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work, whose tensors have no memory of their own."""
    return torch._C._are_functorch_transforms_active()


def add_to_each(tensors: list[torch.Tensor], number: float) -> None:
    """Add `number` to many small tensors, in place, in one call."""
    if tensors:
        torch._foreach_add_(tensors, number)


def raw_stream(device_index: int) -> int:
    """The address of the current CUDA stream, without the object that `torch.cuda.current_stream()` makes."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` divides gradients by `optimizer.grad_scale` and does nothing where `optimizer.found_inf` is 1
    (the fused torch optimizers; the protocol of `torch.amp.GradScaler`)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int, window: int | None
) -> torch.Tensor:
    """Causal FlashAttention within sequences that lie one after the other: like `q` [tokens, query heads, head_dim]; half precision, CUDA.

    `offsets` int32 [sequences + 1]: where each starts, and the end; a token sees itself and the `window` - 1 before it. `k` and `v` may
    have fewer heads, which torch 2.12 and later wants to be told.
    """
    from torch.nn.attention import varlen

    options = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
    left = -1 if window is None else window - 1
    return varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(left, 0), **options)


@cache
def self_test() -> None:
    """Raise RuntimeError naming what behaves differently in this torch. Runs once per process, in about a millisecond."""
    events: list[object] = []
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    nodes = [accumulate_node(used), accumulate_node(unused)]

    def in_backward(grad: torch.Tensor) -> None:
        events.append((backward_id() >= 0, [will_execute(node) for node in nodes]))
        on_backward_end(lambda: events.append("end"))

    used.register_post_accumulate_grad_hook(lambda p: events.append("accumulated"))
    with torch.enable_grad():
        out = used * 2
    out.register_hook(in_backward)
    outside = backward_id()
    out.sum().backward()
    expected = [(True, [True, False]), "accumulated", "end"]
    if outside != -1 or events != expected:
        raise RuntimeError(
            f"torch {torch.__version__} orders backward hooks differently: got {events} (outside: {outside}), "
            f"expected {expected} (outside: -1)"
        )

    one, other = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    if storage_id(one) != storage_id(one[1:]) or storage_id(one) == storage_id(other):
        raise RuntimeError(f"torch {torch.__version__}: storages are not told apart by _cdata")

    if is_view(torch.ones(2)) or not is_view(torch.ones(2).view(1, 2)):
        raise RuntimeError(f"torch {torch.__version__}: Tensor._is_view answers differently")

    changed = torch.ones(2)
    if (version(changed), version(changed.add_(1))) != (0, 1):
        raise RuntimeError(f"torch {torch.__version__}: Tensor._version counts differently")
    if storage_id(changed) != storage_id(changed[1:]) or storage_id(changed) == storage_id(changed.clone()):
        raise RuntimeError(f"torch {torch.__version__}: storages no longer tell which tensors share memory")

    tree = {"a": [torch.ones(1), (2, None)], "b": "c"}
    leaves, spec = tree_flatten(tree)
    if len(leaves) != 4 or tree_unflatten(leaves, spec) != tree:
        raise RuntimeError(f"torch {torch.__version__}: pytrees are taken apart differently: got {leaves} of {tree}")

    with TorchDispatchMode():
        watched = in_dispatch_mode()
        with outside_of_modes():
            watched_inside = in_dispatch_mode()
    if in_dispatch_mode() or not watched or watched_inside:
        raise RuntimeError(f"torch {torch.__version__} keeps its dispatch modes elsewhere")

    if torch.cuda.is_initialized() and raw_stream(torch.cuda.current_device()) != torch.cuda.current_stream().cuda_stream:
        raise RuntimeError(f"torch {torch.__version__}: raw_stream is not the current stream")

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    if not takes_grad_scale(optimizer):
        raise RuntimeError(f"torch {torch.__version__}: fused optimizers no longer take grad_scale and found_inf")
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    weight.grad = torch.tensor([8.0])
    optimizer.step()
    if weight.item() != -2.0:
        raise RuntimeError(f"torch {torch.__version__}: a fused step with grad_scale 4 moved a weight by {weight.item()}, expected -2")
