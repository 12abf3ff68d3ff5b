"""Which layers of a model have an adapter and which are quantised, and what a pattern means: names and shapes alone. No torch."""

from __future__ import annotations

from framework.config.errors import Problem, UserError
from framework.config.names import name_is_meant
from framework.config.schema import LlamaConfig, PeftConfig
from framework.config.suggest import closest
from framework.models.architecture import parameter_shapes

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
"""Has no adapter: the loss reads its weight without calling it."""


def linear_layers(architecture: LlamaConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every layer that may have an adapter, in module order."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(architecture).items()
        if name.startswith("model.layers.") and name.endswith("_proj.weight")
    }


def target_names(architecture: LlamaConfig, config: PeftConfig) -> list[str]:
    """Full names of the layers that `config.targets` means, in module order. Raises UserError for all targets that mean none."""
    names = list(linear_layers(architecture))
    found = [names if target == ALL_LINEAR else [name for name in names if name_is_meant(target, name)] for target in config.targets]
    if not all(found):
        raise UserError(*_no_targets(config.targets, found, names))
    chosen = {name for meant in found for name in meant}
    return [name for name in names if name in chosen]


def _no_targets(targets: list[str], found: list[list[str]], names: list[str]) -> list[Problem]:
    """One problem for each of `targets` with nothing in `found`, and one way to mend all of them."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    expected = f"{ALL_LINEAR}, a regular expression for whole names like {names[0]}, or one of {', '.join(leaves)}"
    mended = dict.fromkeys(
        target if meant else next(iter(closest(target.rpartition(".")[2], leaves)), ALL_LINEAR)
        for target, meant in zip(targets, found, strict=True)
    )
    fix = f"peft.targets=[{ALL_LINEAR if ALL_LINEAR in mended else ','.join(mended)}]"
    return [
        Problem(
            path=f"peft.targets[{index}]",
            got=f"{target}, which is {'the head' if target == HEAD else 'no linear layer of this model'}",
            expected=expected,
            fix=fix,
        )
        for index, target in enumerate(targets)
        if not found[index]
    ]


def quantized_names(architecture: LlamaConfig, config: PeftConfig) -> list[str]:
    """Full names of the layers whose weight is quantised, in module order."""
    if config.method == "none" or config.base == "float":
        return []
    return target_names(architecture, config) if config.quantized_layers == "adapted" else list(linear_layers(architecture))


def adapter_shapes(architecture: LlamaConfig, config: PeftConfig) -> dict[str, tuple[int, ...]]:
    """Every trained parameter, in module order."""
    layers = linear_layers(architecture)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in target_names(architecture, config):
        outputs, inputs = layers[name]
        shapes |= {f"{name}.lora_A": (config.rank, inputs), f"{name}.lora_B": (outputs, config.rank)}
        if config.dora:
            shapes[f"{name}.lora_magnitude"] = (outputs,)
    return shapes
