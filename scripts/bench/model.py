"""Our kernels inside a model, against plain torch: time of forward and backward, of each layer, and memory of the loss. CPU, one process.

    python scripts/bench/model.py            SmolLM2's shapes with 6 blocks, and a vocabulary of 128256 for the loss: two minutes
    python scripts/bench/model.py --quick    whether it works, in seconds

Both take turns on the same tensors; a ratio is the median of the ratios within rounds. Memory is what the C library has in use above the
inputs, the most that was seen before or after an operator of torch's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from measure import Census, machine, memory_can_be_counted  # noqa: E402

from framework.config.schema import LlamaConfig  # noqa: E402
from framework.kernels.library import choose, used_on  # noqa: E402
from framework.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference  # noqa: E402
from framework.kernels.rms_norm import add_rms_norm  # noqa: E402
from framework.kernels.rope import rope  # noqa: E402
from framework.kernels.swiglu import swiglu  # noqa: E402
from framework.models.llama import Llama  # noqa: E402
from framework.progress import progress  # noqa: E402

SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
MODES = ("auto", "reference")
MIB = 2**20


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    choose("auto")
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, load before the start {here['load']:.1f}, torch {here['torch']}, {args.threads} threads")
    print(f"kernels: {used_on('cpu')}\n")
    print("| forward and backward | kernels ms | torch ms | torch / kernels |\n| --- | ---: | ---: | ---: |")
    for name, step in contests(args).items():
        times = in_turns(step, args.rounds, name)
        ratio = statistics.median(other / mine for mine, other in zip(*times.values(), strict=True))
        ms = [1e3 * statistics.median(times[mode]) for mode in MODES]
        print(f"| {name} | {ms[0]:.2f} | {ms[1]:.2f} | {ratio:.2f} |", flush=True)
    if memory_can_be_counted():
        ours, torchs = loss_memory(args)
        print(f"\nloss of {args.loss_tokens} tokens, width 512, vocabulary {args.vocabulary}, most memory above its inputs:")
        print(f"{ours / MIB:.0f} MiB, in plain torch {torchs / MIB:.0f} MiB: {ours / torchs:.3f} of it")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each (default 11)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of each of 4 rows (default 64)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--loss-tokens", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="small and short: the numbers mean nothing")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.blocks, args.vocabulary, args.loss_tokens = 2, 8, 2, 2000, 64
    return args


def contests(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What is timed, by name. All make gradients of all their inputs."""
    torch.manual_seed(0)
    rows, tokens, width, inner = 4, args.tokens, SMOLLM2["hidden_size"], SMOLLM2["intermediate_size"]
    model = Llama(LlamaConfig(**SMOLLM2, num_hidden_layers=args.blocks, tie_word_embeddings=True))
    ids = torch.randint(0, SMOLLM2["vocab_size"], (rows, tokens))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(rows, tokens) < 2 / 3, -100)  # a third is trained on, as in conversations

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x, residual, weight = leaf(rows, tokens, width), leaf(rows, tokens, width), leaf(width)
    heads, angles = leaf(rows, tokens, 9, 64), torch.rand(tokens, 32)
    gate, up = leaf(rows, tokens, inner), leaf(rows, tokens, inner)

    def train(*outputs: torch.Tensor) -> None:
        torch.autograd.backward(outputs, [output.detach() for output in outputs])
        for tensor in (x, residual, weight, heads, gate, up, *model.parameters()):
            tensor.grad = None

    return {
        "model": lambda: train(model(ids, labels)),
        "residual + RMSNorm": lambda: train(*add_rms_norm(x, residual, weight, 1e-5)),
        "RoPE of queries": lambda: train(rope(heads, angles.cos(), angles.sin())),
        "SwiGLU": lambda: train(swiglu(gate, up)),
    }


def in_turns(step: Callable[[], None], rounds: int, name: str) -> dict[str, list[float]]:
    """Seconds of each round by mode, after one round to warm up."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in progress(range(rounds + 1), name, unit="rounds"):
        for mode in MODES if number % 2 else MODES[::-1]:
            choose(mode)
            began = time.perf_counter()
            step()
            if number:
                times[mode].append(time.perf_counter() - began)
    choose("auto")
    return times


def loss_memory(args: argparse.Namespace) -> tuple[int, int]:
    """Most bytes in use above the inputs, in forward and backward: ours, and all logits at once in torch."""
    hidden = torch.randn(args.loss_tokens, 512, requires_grad=True)
    weight = torch.randn(args.vocabulary, 512, requires_grad=True)
    labels = torch.randint(0, args.vocabulary, (args.loss_tokens,))
    found = []
    for loss in (linear_cross_entropy, linear_cross_entropy_reference):
        with Census() as census:
            loss(hidden, weight, labels).backward()
        found.append(census.peak_bytes)
        hidden.grad = weight.grad = None
    return found[0], found[1]


if __name__ == "__main__":
    main()
