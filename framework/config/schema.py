"""What a recipe may say: one frozen, keyword-only dataclass per configuration group, described once.

The docstring under each field is the reference: meaning, unit, what None stands for. `--help` and the documentation are made
from it. Each room of the framework takes its own dataclass (`ZeroEngine(model, ZeroConfig(stage=3), ...)`), so the same words
serve recipes and plain scripts. Nothing here imports torch or Hydra.

The groups that the engine takes, `zero`, `offload` and `precision`, are in `schema_engine.py`.

Unusual: the dataclasses are frozen and use `Literal`, which OmegaConf cannot type; Hydra composes plain values and `typed.py` turns the
result into these, with all problems at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from framework.config.schema_engine import MasterWeights as MasterWeights
from framework.config.schema_engine import OffloadConfig, PrecisionConfig, ZeroConfig
from framework.config.schema_engine import ZeroModuleConfig as ZeroModuleConfig


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length that the weights were trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"] = "linear"
    factor: float = 1.0
    """New length / trained length."""
    original_max_position_embeddings: int | None = None
    """Trained length in tokens; None: `max_position_embeddings`."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than trained length / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than trained length / this are kept."""
    beta_fast: float = 32.0
    """yarn: rotations within the trained length above which a dimension is kept."""
    beta_slow: float = 1.0
    """yarn: rotations within the trained length below which a dimension is fully interpolated."""
    attention_factor: float | None = None
    """yarn: factor on cos and sin; None: 0.1 ln(factor) + 1."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Architecture of one decoder of the Llama family. Names are those of a Hugging Face `config.json`."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """Heads of keys and values (grouped-query attention); None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 4096
    """Longest sequence in tokens."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """Bias on the attention output projection (Llama with `attention_bias: true`; Qwen2 has none)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head of queries and keys (Qwen3)."""
    sliding_window: int | None = None
    """Attention looks back at most this many tokens (Mistral v0.1); None: all of them."""
    initializer_range: float = 0.02
    """Standard deviation of random initial weights."""
    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """Which Hugging Face architecture an exported `config.json` names."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Group `model`: what is trained and where its weights come from."""

    path: str | None = None
    """Weights to start from: a Hugging Face folder, a `.gguf` file, `pkg://PACKAGE/FILE` (a file inside an installed Python package), a hub
    name (`org/name`), a run or a checkpoint of it, or a checkpoint folder of DeepSpeed (ZeRO 1 to 3) or torch.distributed.checkpoint.
    None: random weights of `arch`."""
    arch: LlamaConfig | None = None
    """Architecture of random weights, and of a DeepSpeed or torch checkpoint that has no config.json; None where `path` brings its own."""
    tokenizer: str | None = None
    """Tokenizer, in the same notations as `path`; None: the one beside the weights."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template; None: the tokenizer's own."""
    freeze: list[str] = field(default_factory=list)
    """What is not trained: last words of names of modules or parameters (`embed_tokens`, `layers.0`, `self_attn`), or regular expressions
    for whole names (`model\\.layers\\.[0-3]`). A tied head is the embedding under a second name, and either freezes both."""
    train_last_n_blocks: int | None = None
    """Train only so many of the last blocks, the final norm and the head (a tied head: the embedding with it, unless `freeze` names it);
    0: norm and head alone. None: all blocks."""
    activation_checkpointing: bool | int = False
    """Recompute blocks in backward instead of storing their activations: true each block, a number n the first and every n-th after it."""
    activation_budget_bytes: int | None = None
    """In place of it: recompute as few blocks as keep all their activations within so many bytes per rank, for a micro-batch of the longest
    samples. The plan says how many that is. None: no budget."""
    activation_offload: bool = False
    """Keep what a recomputed block starts from, its input, in host memory until backward."""
    compile: bool = False
    """Compile each block's forward with `torch.compile`."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Group `peft`: training a few added parameters in place of the model's own."""

    method: Literal["none", "lora"] = "none"
    """none: all parameters of the model are trained; lora: low-rank adapters are, and the model stays as it is."""
    rank: int = 16
    """Rank of an adapter: it has rank x (inputs + outputs) parameters."""
    alpha: float = 32.0
    """The adapter's product is multiplied with alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is zeroed in training."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers with an adapter: last words of names (`q_proj`), regular expressions for whole names, or `all-linear` (all but the head)."""
    rslora: bool = False
    """Multiply with alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    dora: bool = False
    """Train the length of each row of the sum, too (arXiv:2402.09353)."""
    base: Literal["float", "nf4", "int8"] = "float"
    """How the frozen weights below the adapters are held: in the compute dtype, or (QLoRA, arXiv:2305.14314) in 4 or 8 bits with a scale
    for each block. They are quantised while the model is read. The adapter is trained on top of the quantised weights and exported for
    the original ones, which `generate` and `export --merge` use."""
    base_block: Literal[32, 64, 128, 256] = 64
    """nf4, int8: weights that share an fp32 scale; 64 make 4.5 or 8.5 bits a weight."""
    quantized_layers: Literal["adapted", "all-linear"] = "adapted"
    """nf4, int8: which linear layers are held so, those with an adapter or all in the blocks. Embeddings, norms and the head never are."""
    path: str | None = None
    """Go on training the adapter in this folder; rank, alpha, targets, rslora and dora must be its own. None: a new one."""


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Which column of a data file holds what; None keeps the usual names of the format."""

    messages: str | None = None
    """messages/sharegpt: the list of turns (usual: `messages`, `conversations`)."""
    role: str | None = None
    """Key of a turn's speaker (usual: `role`, `from`)."""
    content: str | None = None
    """Key of a turn's text (usual: `content`, `value`)."""
    system: str | None = None
    """A column with the system prompt (usual: `system`)."""
    tools: str | None = None
    """A column with definitions of tools, a list or its JSON text (usual: `tools`)."""
    prompt: str | None = None
    """completion: what comes before, text or a list of turns (usual: `prompt`)."""
    completion: str | None = None
    """completion: what is trained, text or a list of turns (usual: `completion`)."""
    instruction: str | None = None
    """alpaca: the instruction (usual: `instruction`)."""
    input: str | None = None
    """alpaca: what the instruction works on, may be empty (usual: `input`)."""
    output: str | None = None
    """alpaca: the answer (usual: `output`)."""
    history: str | None = None
    """alpaca: earlier [question, answer] pairs (usual: `history`)."""
    text: str | None = None
    """text: the document (usual: `text`)."""
    input_ids: str | None = None
    """ids: the tokens of a sample (usual: `input_ids`)."""
    labels: str | None = None
    """ids: the same, or -100 where a token is not trained (usual: `labels`)."""
    loss_mask: str | None = None
    """ids: in place of labels, 1 for each token that is trained, else 0 (usual: `loss_mask`, `trained`)."""


TrainOn = Literal["assistant", "last", "all"]
RowFormat = Literal["auto", "messages", "sharegpt", "completion", "alpaca", "text", "ids"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several sources of training or validation data."""

    path: str = ""
    """As `data.train` with a single source."""
    format: RowFormat | None = None
    """None: `data.format`."""
    columns: ColumnsConfig | None = None
    """None: `data.columns`."""
    max_rows: int | None = None
    """None: `data.max_rows`."""
    weight: float | None = None
    """This source's part of all tokens of training, in proportion to the weights of the others. Where an epoch needs only some of its rows,
    later ones go on with the rest. None, for all sources: every row once an epoch."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Group `data`: which files are trained on and how rows become samples."""

    train: str | list[str | SourceConfig] | None = None
    """File, folder or glob: `.jsonl .json .csv .txt`, these also with `.gz .bz2 .xz .zst`, and `.parquet .arrow .feather`. A relative
    path is looked up in the working directory, then beside the shipped recipes. `hub://org/name[:split]` is a data set of the Hugging Face
    hub (`hub://NAME[:[CONFIG/]SPLIT][@REVISION]`), downloaded once. Several sources: a list of these, or of {path, format,
    columns, max_rows, weight}. With weights, an epoch has about as many tokens as all sources together, in these proportions at any time;
    the ledger says how often it passes over each source."""
    validation: str | list[str | SourceConfig] | None = None
    """The same for validation, without weights; None: `validation_fraction` of `train`."""
    validation_fraction: float = 0.0
    """Share of `train` rows held out for validation when `validation` is None, 0 to below 1."""
    format: RowFormat = "auto"
    """How a row is read; auto: by the columns found. completion: `prompt` with `completion`, text (no chat template) or turns. ids: tokens
    already, with `labels` (-100 for what is not trained) or a `loss_mask`, or all trained."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    train_on: TrainOn = "assistant"
    """Whose tokens of a conversation are targets of the loss: the assistant's answers, only its last one, or all. An answer of weight 0
    never is. Documents are trained whole, and of `completion` rows the completion is."""
    max_tokens: int = 1024
    """Longest sample in tokens; for `text` the length of a chunk."""
    packing: bool = False
    """Put samples side by side in packs of at most `max_tokens`, with hardly any padding. They stay apart in attention, positions and
    loss. Batch sizes then count packs. `text`: each document is cut into chunks by itself, so that none sees another."""
    on_too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to a longer conversation. Dropped rows and cut tokens are counted in the ledger."""
    max_rows: int | None = None
    """Read only the first rows of `train` (of each source); None: all."""
    shuffle: bool = True
    """New order every epoch, a pure function of (seed, epoch)."""
    num_workers: int = 1
    """Processes that tokenise."""
    cache_dir: str | None = None
    """Tokenised data are kept here, 5 bytes per token, and used again by every run with the same files, tokenizer and template; may be
    deleted at any time. None: `$XDG_CACHE_HOME/framework`, which is `~/.cache/framework` where that is not set."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroupConfig:
    """One of `optimizer.groups`."""

    pattern: str = ""
    """Last words of names of modules or parameters (`embed_tokens`, `layers.0`, `norm`), or a regular expression for whole names."""
    lr_factor: float = 1.0
    """Learning rate in terms of that of the schedule, on top of `layer_lr_decay`."""
    weight_decay: float | None = None
    """None: that of `optimizer.weight_decay` for matrices and embeddings, and 0 for norms and biases."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Group `optimizer`: how gradients become new parameters."""

    name: Literal[
        "adamw", "lion", "sgd", "muon", "adafactor", "adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"
    ] = "adamw"
    """adamw, lion and sgd are updated by our kernels. muon makes the steps of matrices in blocks orthogonal, adapters' among them; all else
    it leaves to AdamW. muon and adafactor look at whole matrices, across ranks; the others are torch's, element by element."""
    lr: float = 2e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw, lion, adam, adamax, nadam, radam; muon, for what it leaves to AdamW."""
    eps: float = 1e-8
    """All but lion, sgd, adafactor, asgd and rprop; muon, for what it leaves to AdamW."""
    momentum: float = 0.0
    """sgd, rmsprop; muon, of matrices."""
    nesterov: bool = False
    """sgd with momentum, muon."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """adamw, lion. 8bit: matrices of 4,096 elements and more keep each moment in a byte, with a scale for 256 of them; others in fp32."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """muon: learning rate of a matrix. match_rms_adamw: `lr` x 0.2 sqrt(the longer side), with which an `lr` for adamw is right. original:
    `lr` x sqrt(rows / columns), at least `lr`; about 0.02 is usual."""
    adamw_lr: float | None = None
    """muon: learning rate of what it leaves to AdamW; None: `lr`."""
    weight_decay: float = 0.0
    """Applied to matrices and embeddings, not to norms and biases. Decoupled in adamw, lion, muon and adafactor, in the others a part of
    the gradient; rprop has none."""
    groups: list[ParameterGroupConfig] = field(default_factory=list)
    """Parameters with settings of their own: {pattern, lr_factor, weight_decay}. The first pattern that means a parameter holds."""
    layer_lr_decay: float | None = None
    """Learning rate of each block as a share of the one above it (0.9, say): block i of n gets `lr` x this ** (n - i), i from 0, the
    embedding, also a tied one, this ** (n + 1), final norm and head `lr` itself. None: the same for all."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Group `schedule`: learning rate over optimizer steps, as a factor on `optimizer.lr`."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int | None = None
    """Linear warm-up; set this or `warmup_ratio`."""
    warmup_ratio: float | None = None
    """Warm-up as a share of all steps."""
    min_lr_ratio: float = 0.0
    """Floor as a share of the peak; reached exactly at the last step (constant ignores it by refusing it)."""
    decay_ratio: float = 0.1
    """wsd: share of all steps spent in the final linear decay."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Group `trainer`: steps, batches and ranks."""

    max_steps: int | None = None
    """Optimizer steps; with `epochs` set, too, the run ends with what comes first."""
    epochs: float | None = None
    """Passes over the training data; may be a fraction."""
    micro_batch_size: int | None = None
    """Samples per rank in one forward. Of micro, accumulate and global, the missing one is computed."""
    accumulate: int | None = None
    """Micro-batches per rank and optimizer step."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""
    devices: int | Literal["auto"] = "auto"
    """Ranks on this machine; auto: one per GPU, or one on CPU. Under torchrun, Slurm or MPI the launcher's count holds."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    log_every_n_steps: int = 1
    """Cadence of the progress line, metrics.csv and trackers, in optimizer steps."""
    collective_timeout_seconds: int = 1800
    """A rank that waits longer for the others ends the run."""
    stop_grace_seconds: float = 25.0
    """After Ctrl-C or SIGTERM the ranks finish their step and save; those that are still in a step after this time are killed."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Group `eval`: what is looked at during training (validation loss, answers of the model), and when a run that learns no more ends."""

    every_n_steps: int | None = None
    """Cadence of validations in optimizer steps; None: at the end of the run only (when there are validation data)."""
    max_batches: int | None = None
    """At most this many micro-batches of each source, over all ranks together; None: all."""
    patience: int | None = None
    """End the run after so many validations in a row without a better loss than the best one before; None: never."""
    min_delta: float = 0.0
    """With `patience`: how far a loss must be below the best one to be better."""
    prompts: str | list[str] | None = None
    """What the model is asked on the way: a list of texts, or a file, `.txt` with one in each line or data like `data.train`, of which the
    last answers are asked for. A text is a user's turn where the training data are conversations, else the beginning of a text. Answers go
    to the console, RUN/answers.jsonl and the dashboard."""
    generate_every_n_steps: int | None = None
    """Cadence of answers in optimizer steps; None: with each validation. After the last step in any case."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    temperature: float = 0.0
    """Of answers; 0: always the likeliest token. Above, the same numbers are drawn each time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Group `checkpoint`: what is saved on the way, to go on from, and what is written at the end."""

    every_n_steps: int | None = 500
    """Save all that is needed to go on (RUN/checkpoints) each time so many optimizer steps are done; None: not on the way."""
    asynchronous: bool = True
    """Training waits only until the state has been copied in host memory, not until it is on the disk. The copy takes 12 bytes per trained
    parameter, divided by the ranks (the plan says how much, and what does not fit is refused). False: no copy, and training waits."""
    keep: int = 2
    """Newest checkpoints that stay."""
    keep_every_n_steps: int | None = None
    """Checkpoints at multiples of so many steps stay, too; None: there are none of these."""
    keep_best: int = 0
    """So many with the least validation loss stay, too, and RUN/checkpoints/best names the first. A validation that gives one of them is
    then followed by a save, whatever the cadence."""
    on_stop: bool = True
    """Save one, too, when the run is stopped by a signal."""
    at_end: bool = False
    """Save one, too, after the last step."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a failed save (a full disk) does to the run; earlier checkpoints stay in either case."""
    export: bool = True
    """Write a Hugging Face folder to RUN/export when training ends (also when it is stopped by a signal)."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of a whole model; an adapter is small and always written in fp32, as it was trained."""
    max_shard_bytes: int = 5_000_000_000
    """Largest safetensors file of an export, in bytes."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Group `logger`: the experiment dashboard. metrics.csv is always written."""

    name: Literal["none", "tensorboard", "wandb"] = "none"
    project: str = "framework"
    """wandb: project."""
    entity: str | None = None
    """wandb: team or user."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """wandb; auto: online with an API key and a reachable server, else offline (said at the start)."""
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Group `kernels`: what computes norms, rotations, SwiGLU, losses and optimizer steps."""

    mode: Literal["auto", "reference", "compiled"] = "auto"
    """auto: our compiled kernels where they were built and take the data type, else plain torch; reference: plain torch; compiled:
    an error where that would be plain torch."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The whole of a recipe."""

    name: str = "run"
    """Folder below `runs_dir` and name in the dashboard."""
    seed: int = 0
    """Initial weights and sample order."""
    runs_dir: str = "runs"
    """Run directories are made here: RUNS_DIR/NAME/TIME."""
    resume: str = "none"
    """Go on from a checkpoint: `auto` (of the newest run in RUNS_DIR/NAME; a new start where that is done or none has one), a run directory
    or a checkpoint folder; `none`: a new start. The resumed run has a directory of its own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
