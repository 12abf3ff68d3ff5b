"""Which parameters are trained, and with which learning rate and weight decay: patterns over names, told apart from the architecture alone.

    choose_trained(model, ModelConfig(train_last_n_blocks=2), PeftConfig())    the other parameters need no gradient
    torch.optim.AdamW(parameter_groups(model, OptimizerConfig(...)), lr=lr)    each group with its `lr_factor`, for whoever sets `lr`

A pattern means a module or parameter: the last words of its name (`q_proj`, `layers.0`, `embed_tokens`) or a regular expression for the
whole of it; a module stands for all parameters in it.

Unusual: a tied head is one matrix with two names. It is frozen, trained or grouped by either; for the decay over blocks it is the
embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from framework.config.errors import Problem, UserError
from framework.config.names import is_meant, modules_and_name, name_is_meant
from framework.config.schema import LlamaConfig, ModelConfig, OptimizerConfig, ParameterGroupConfig, PeftConfig, RecipeConfig, ZeroConfig
from framework.config.suggest import closest
from framework.models.architecture import parameter_shapes
from framework.models.targets import ALL_LINEAR, adapter_shapes, linear_layers

if TYPE_CHECKING:  # what patterns mean is known without torch
    from torch import nn

    from framework.models.llama import Llama

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Settings:
    """What the optimizer does differently for a parameter."""

    lr_factor: float
    weight_decay: float
    orthogonal: bool = False
    """Whether Muon makes its steps orthogonal."""


def trained_shapes(architecture: LlamaConfig, model: ModelConfig, peft: PeftConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that a recipe trains, in module order. Raises UserError for patterns that mean none, or where none is left."""
    if peft.method != "none":
        return adapter_shapes(architecture, peft)
    shapes = parameter_shapes(architecture)
    frozen, problems = set(), []
    try:
        frozen |= _not_in_last_blocks(architecture, model.train_last_n_blocks, shapes)
    except UserError as error:
        problems += error.problems
    for index, pattern in enumerate(model.freeze):
        frozen |= (found := _meant(pattern, shapes, architecture))
        if not found:
            got, (expected, near) = f"{pattern}, which is no parameter of this model", _names(pattern, shapes, architecture)
            fix = f"model.freeze=[{','.join([*model.freeze[:index], near, *model.freeze[index + 1 :]])}]" if near else ""
            problems.append(Problem(path=f"model.freeze[{index}]", got=got, expected=expected, fix=fix))
    if problems:
        raise UserError(*problems)
    if len(frozen) == len(shapes):
        setting = "model.freeze" if model.freeze else "model.train_last_n_blocks"
        raise UserError(Problem(path=setting, got="every parameter of the model", expected="at least one that is trained"))
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def _not_in_last_blocks(architecture: LlamaConfig, blocks: int | None, shapes: Shapes) -> set[str]:
    if blocks is None:
        return set()
    total = architecture.num_hidden_layers
    if blocks > total:
        expected = f"at most {total}, as many as the model has"
        raise UserError(
            Problem(path="model.train_last_n_blocks", got=str(blocks), expected=expected, fix=f"model.train_last_n_blocks={total}")
        )
    trained = {FINAL_NORM, HEAD} | ({EMBEDDING} if architecture.tie_word_embeddings else set())
    return {name for name in shapes if name not in trained and ((block := block_of(name)) is None or block < total - blocks)}


def choose_trained(model: Llama, config: ModelConfig, peft: PeftConfig) -> None:
    """Freeze what is not trained, and give `model` its adapters. Raises UserError as `trained_shapes` does."""
    from framework.models.lora import add_adapter

    trained = trained_shapes(model.config, config, peft)
    add_adapter(model, peft)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def settings_of(shapes: Shapes, architecture: LlamaConfig, optimizer: OptimizerConfig) -> dict[str, Settings]:
    """Of every trained parameter (`shapes`), in module order. Raises UserError for groups that no parameter would be in.

    The first of `optimizer.groups` that means a parameter holds, its factor on top of the decay over blocks; else matrices decay, and
    norms and biases do not.
    """
    meant: dict[str, ParameterGroupConfig] = {}
    problems = []
    for index, group in enumerate(optimizer.groups):
        where, found = f"optimizer.groups[{index}].pattern", _meant(group.pattern, shapes, architecture)
        if not found:
            got, (expected, near) = f"{group.pattern}, which is no trained parameter", _names(group.pattern, shapes, architecture)
            problems.append(Problem(path=where, got=got, expected=expected, fix=near and f"optimizer.groups=[{{pattern: {near}}}]"))
        elif found <= meant.keys():
            got = f"{group.pattern}, all of which is in the groups before it"
            problems.append(Problem(path=where, got=got, expected="the narrower pattern first, since the first one holds"))
        meant |= dict.fromkeys(found - meant.keys(), group)
    if problems:
        raise UserError(*problems)
    settings = {}
    for name, shape in shapes.items():
        factor, decay = _of_block(name, architecture, optimizer.layer_lr_decay), optimizer.weight_decay if len(shape) >= 2 else 0.0
        if (group := meant.get(name)) is not None:
            factor *= group.lr_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        orthogonal = optimizer.name == "muon" and len(shape) == 2 and block_of(name) is not None
        if optimizer.adamw_lr is not None and not orthogonal:
            factor *= optimizer.adamw_lr / optimizer.lr
        settings[name] = Settings(factor, decay, orthogonal)
    return settings


def _of_block(name: str, architecture: LlamaConfig, decay: float | None) -> float:
    """As in ELECTRA (arXiv:2003.10555): the head learns at the full rate, each block further from it `decay` times slower."""
    block, blocks = block_of(name), architecture.num_hidden_layers
    if decay is None or (block is None and name != EMBEDDING):
        return 1.0
    return decay ** (blocks + 1 if block is None else blocks - block)


def parameter_groups(model: nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer over what `model` trains, one for each different setting; `lr_factor` is for whoever sets `lr`."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    groups: dict[Settings, list[nn.Parameter]] = {}
    for name, settings in settings_of(shapes, model.config, optimizer).items():
        groups.setdefault(settings, []).append(trained[name])
    return [
        {"params": chosen, "lr_factor": s.lr_factor, "weight_decay": s.weight_decay}
        | ({"orthogonal": s.orthogonal} if optimizer.name == "muon" else {})
        for s, chosen in groups.items()
    ]


def check_selection(recipe: RecipeConfig, architecture: LlamaConfig) -> None:
    """Raises UserError, with all problems, where the recipe's patterns do not mean anything in this architecture."""
    problems = []
    try:
        shapes = trained_shapes(architecture, recipe.model, recipe.peft)
    except UserError as error:
        problems += error.problems
        shapes = trained_shapes(architecture, ModelConfig(), replace(recipe.peft, targets=[ALL_LINEAR]))  # for the groups' patterns
    try:
        settings_of(shapes, architecture, recipe.optimizer)
    except UserError as error:
        problems += error.problems
    problems += no_modules("precision.fp32_modules", recipe.precision.fp32_modules, architecture)
    problems += _of_modules(recipe.zero, _with_frozen(shapes, architecture, recipe.peft), architecture)
    if problems:
        raise UserError(*problems)


def no_modules(setting: str, patterns: Sequence[str], architecture: LlamaConfig) -> Iterator[Problem]:
    """A problem for every one of `patterns` that means no module."""
    shapes = parameter_shapes(architecture)
    named = (inside for name in shapes for one in _both_names(name, architecture) for inside in modules_and_name(one))
    modules = dict.fromkeys(inside for inside in named if inside not in shapes and inside != HEAD)
    for index, pattern in enumerate(patterns):
        if not any(name_is_meant(pattern, module) for module in modules):
            expected, near = _names(pattern, modules, architecture)
            fix = f"{setting}=[{','.join([*patterns[:index], near, *patterns[index + 1 :]])}]" if near else ""
            yield Problem(path=f"{setting}[{index}]", got=f"{pattern}, which is no module of this model", expected=expected, fix=fix)


def _with_frozen(trained: Shapes, architecture: LlamaConfig, peft: PeftConfig) -> Shapes:
    """Every parameter that the model has, quantised ones under their names."""
    shapes = dict(parameter_shapes(architecture)) | dict(trained)
    for layer in linear_layers(architecture) if peft.method != "none" and peft.base != "float" else ():
        if peft.quantized_layers == "all-linear" or f"{layer}.lora_A" in trained:
            shape = shapes.pop(f"{layer}.weight")
            shapes |= {f"{layer}.weight_codes": shape, f"{layer}.weight_scales": shape}
    return shapes


def _of_modules(zero: ZeroConfig, shapes: Shapes, architecture: LlamaConfig) -> Iterator[Problem]:
    """Patterns of `zero.modules` that no parameter follows."""
    meant: set[str] = set()
    for index, rule in enumerate(zero.modules):
        where, found = f"zero.modules[{index}].pattern", _meant(rule.pattern, shapes, architecture)
        if not found:
            got, (expected, near) = f"{rule.pattern}, which is no parameter of this model", _names(rule.pattern, shapes, architecture)
            setting = f"stage: {zero.stage if rule.stage is None else rule.stage}"
            yield Problem(path=where, got=got, expected=expected, fix=near and f"zero.modules=[{{pattern: {near}, {setting}}}]")
        elif found <= meant:
            got = f"{rule.pattern}, all of which is in the patterns before it"
            yield Problem(path=where, got=got, expected="the narrower pattern first, since the first one holds")
        meant |= found


def block_of(name: str) -> int | None:
    """The number of the block that a parameter is in."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _meant(pattern: str, names: Iterable[str], architecture: LlamaConfig) -> set[str]:
    """Parameters that `pattern` means, by their own name or that of a module that they are in."""
    return {name for name in names if any(is_meant(pattern, one) for one in _both_names(name, architecture))}


def _both_names(name: str, architecture: LlamaConfig) -> list[str]:
    """`name`, and a tied matrix' second one."""
    return [name, HEAD] if name == EMBEDDING and architecture.tie_word_embeddings else [name]


def _names(pattern: str, names: Iterable[str], architecture: LlamaConfig) -> tuple[str, str]:
    """What patterns there could be, in words, and the one that `pattern` may have meant."""
    whole = [one for name in names for one in _both_names(name, architecture)]
    parts = [inside.rpartition(".")[2] for one in whole for inside in modules_and_name(one)]
    words = [word for word in dict.fromkeys(parts) if not word.isdigit()]
    expected = f"last words of names ({', '.join(words)}) or a regular expression for whole ones like {next(iter(names))}"
    return expected, next(iter(closest(pattern.rpartition(".")[2], words)), "")
