"""Every setting: its name, its default, its limits and what it does."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from foretrain.config.kinds import (
    LARGEST,
    MOST,
    Amount,
    Count,
    CountOrZero,
    Finite,
    Fraction,
    Inside,
    Layers,
    NonNegative,
    Positive,
    Rows,
    Seconds,
    Share,
    Size,
    Switch,
)
from foretrain.errors import ConfigError

Level = Literal["quiet", "normal", "verbose"]
FIRST_RATE = 1e-3
"""Adapters begin with it where `optimizer.learning_rate = "auto"`; the rates of other runs are multiples of it."""
UNKNOWN_BETA2 = 0.95
"""What `optimizer.beta2 = "auto"` is where the tokens of a step are not known."""


class Section(BaseModel):
    """One section of the configuration file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            from foretrain.config.explain import in_python

            raise ConfigError(in_python(error, type(self))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # only what Python code writes comes this way


class ModelConfig(Section):
    """What `foretrain train` trains: a GPT-2 of a named size; single numbers can be changed. `HybridTrainer` trains the
    model that it is handed."""

    type: Literal["gpt2-tiny", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2-tiny"
    """Size: tiny 0.8M, small 124M, medium 355M, large 774M, xl 1558M parameters."""
    layers: Layers | None = None
    """Number of transformer blocks. Unset: as in `type`."""
    heads: Size | None = None
    """Attention heads per block; must divide `width`. Unset: as in `type`, or width / 64 for another width."""
    width: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Size of the residual stream. Unset: as in `type`."""
    context: Rows | None = None
    """Tokens per sequence. Unset: as in `type`."""
    vocab_size: Rows | None = None
    """Number of different tokens. Unset: as many as the tokenizer knows."""
    dropout: Fraction = 0.0
    """Share of activations dropped while training. Helps against overfitting on small data."""
    bias: bool = True
    """Bias terms in linear layers and norms, as GPT-2 has them."""
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Norm before each attention and feed-forward part. Only `layernorm` can be exported as GPT-2."""
    initialization: Literal["gpt2", "xavier_uniform"] = "gpt2"
    """First weights: normal with std 0.02 and scaled residual projections, or Xavier uniform."""
    weights: str = ""
    """Folder with a GPT-2 in Hugging Face's format (`model.safetensors`) to start from; `foretrain finetune` takes any
    causal language model. Empty: fresh weights."""
    residual: Literal[True] = True
    """Residual connections. GPT-2 always has them; `false` is refused."""


class DataConfig(Section):
    """What `foretrain train` and `finetune` train on, and what is held out. In Python you hand in batches."""

    path: str | list[str] = ""
    """File, folder or glob, or a list of them: text, .jsonl, .parquet, .bin/.npy tokens (also .gz/.xz for text and
    JSONL), or `hf:NAME[:SPLIT]` for a Hugging Face dataset. Empty: the Python standard library's source files."""
    tokenizer: str = "byte"
    """`byte`, `char`, `gpt2` (needs `vocabulary`), `bpe` (trained on the data), or the path of a tokenizer.json."""
    vocabulary: str = ""
    """Folder that holds GPT-2's `encoder.json` and `vocab.bpe` (or `vocab.json` and `merges.txt`)."""
    bpe_size: Annotated[int, Field(ge=257, le=1_000_000)] = 4096
    """Vocabulary size when `tokenizer = "bpe"`."""
    text_field: str = "text"
    """Name of the text field in JSONL, Parquet and Hugging Face records."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share that is never trained on: whole documents where there are at least 100, else the end of the text."""
    validation_path: str | list[str] = ""
    """Separate held-out data; then all of `path` is trained on."""
    max_documents: Count | None = None
    """Read only this many documents, or examples."""
    prompt: str | list[str] = ""
    """`foretrain finetune`: what the model is given, with {field} for fields of the record. Of several, the first whose
    fields are all filled. Empty: by the names of well-known fields (prompt, instruction, question, text, messages)."""
    answer: str = ""
    """`foretrain finetune`: what it is to say, in the same way. Empty: completion, output, answer or label."""
    max_length: Count | None = None
    """`foretrain finetune`: tokens per example; longer prompts lose their front. Unset: as many as the longest example
    needs, `model.context` at the most."""
    cache: str = ""
    """Folder for token files. Empty: the user's cache folder."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 4
    """Batches prepared ahead by a background thread. 0: none, prepared when needed."""


class LoraConfig(Section):
    """`foretrain finetune`: the adapter, a low-rank update beside frozen linear layers."""

    rank: Size = 8
    """Size of the inner dimension: more can learn more, and costs more."""
    alpha: Positive = 16.0
    """The update is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Share of the adapter's inputs dropped while training."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead, for large ranks."""
    targets: list[str] = ["*"]
    """Patterns for names of layers, or their last parts: `*.attention.qkv`. `*`: every linear layer but the head."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained too: none, all, or those of adapted layers."""


class OptimizerConfig(Section):
    """How the weights are updated."""

    type: Literal["adamw", "adam", "sgd", "muon"] = "muon"
    """`muon` orthogonalises the updates of hidden matrices and uses AdamW for everything else."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. Unset: 6e-3 for `muon`, 2e-3 for the others. `auto`: several rates run the first steps, and
    the run goes on with what follows from their held-out losses, for at most 15 % more steps in runs of 1,000 and
    more. Not for an optimizer of your own, nor with `max_time`."""
    weight_decay: NonNegative | None = None
    """Pull towards zero, on matrices only. Unset: 0.1 for `adamw` and `muon`, where it is decoupled from the gradient;
    0 for `adam` and `sgd`, where it is not."""
    beta1: Fraction = 0.9
    """Averaging of the gradient in Adam and AdamW."""
    beta2: Fraction | Literal["auto"] = "auto"
    """Averaging of the squared gradient in Adam and AdamW. `auto` (`foretrain train`, `finetune` and `compare`): a
    squared gradient counts half after 2 million tokens, 0.5 ** (tokens per step / 2e6), from 0.9 to 0.999; the run
    writes the number down. For a model of your own `auto` is 0.95."""
    epsilon: Positive = 1e-8
    """Added to the denominator in Adam and AdamW."""
    momentum: Fraction | None = None
    """Momentum of `sgd` and `muon`. Unset: 0.9."""
    nesterov: bool = True
    """Nesterov momentum in `sgd` and `muon`."""
    rest_learning_rate: Positive | None = None
    """Peak learning rate of the AdamW part of `muon`. Unset: `rest_rate_factor` times `learning_rate`."""
    rest_rate_factor: Positive = 1.0
    """Peak rate of the AdamW part of `muon` as a multiple of `learning_rate`, where `rest_learning_rate` is unset."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How `muon` scales its step by matrix shape: 0.2 sqrt(max(rows, columns)), which makes AdamW's learning rates fit,
    or sqrt(max(1, rows/columns)), which wants about ten times higher ones."""
    split_fused: bool = True
    """Orthogonalise the parts of a fused matrix, such as queries, keys and values, each by itself, in `muon`."""
    row_beta2: Fraction = 0.95
    """Averaging of the mean square of each row of an orthogonalised update, by whose root it is divided, in `muon`
    (NorMuon). 0: rows are left as they are."""
    gradient_clip_norm: NonNegative = 1.0
    """Largest allowed global gradient norm. 0: no clipping."""
    state_type: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How `adamw` and `muon` store their moments; the arithmetic stays fp32. Per weight that AdamW updates: 8, 4 or 2
    bytes, per weight that Muon updates half of that. Tensors below 4096 numbers stay fp32."""

    @model_validator(mode="after")
    def _moments_can_be_narrow(self) -> OptimizerConfig:
        if self.state_type != "fp32" and self.type not in ("adamw", "muon"):
            raise ValueError(
                f"state_type = {self.state_type!r} is there for 'adamw' and 'muon', not for {self.type!r}; "
                "use one of these, or state_type = 'fp32'"
            )
        return self

    @property
    def peak_rate(self) -> float:
        """Return the learning rate, also where none is set."""
        if self.learning_rate == "auto":
            return FIRST_RATE
        return self.learning_rate or (6e-3 if self.type == "muon" else 2e-3)

    @property
    def rest_rate(self) -> float:
        """Return the learning rate of the AdamW part of `muon`, also where none is set."""
        return self.rest_learning_rate or self.peak_rate * self.rest_rate_factor

    @property
    def second_beta(self) -> float:
        """Return `beta2`, also where it is `auto` and nobody knows how many tokens a step has."""
        return UNKNOWN_BETA2 if self.beta2 == "auto" else self.beta2

    @property
    def decay(self) -> float:
        """Return the weight decay, also where none is set."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.1 if self.type in ("adamw", "muon") else 0.0


class ScheduleConfig(Section):
    """The learning rate over the run. Steps left unset follow from `max_steps`."""

    type: Literal["wsd", "cosine", "constant", "warmup", "cyclic"] = "wsd"
    """`wsd`: warm-up, stable, decay. `warmup`: warm-up, then constant. `cyclic` disturbs prediction."""
    warmup_steps: CountOrZero | None = None
    """Steps of linear warm-up. Unset: as `warmup_share` says (none for `constant` and `cyclic`)."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    """Share of `max_steps` that the warm-up takes where `warmup_steps` is unset, 1000 steps at most. `auto`: 10 % for
    AdamW and Adam where `train` begins with random weights, else 5 %."""
    warmup_rate: NonNegative = 0.0
    """Learning rate the warm-up starts from. 0: from its first step above 0, so that no update is wasted."""
    stable_steps: CountOrZero | None = None
    """Steps at the peak in `wsd`. Unset: what warm-up and decay leave."""
    decay_steps: Count | None = None
    """Steps of decay in `wsd` (unset: 30 % of `max_steps`, or what is left after `stable_steps`), and in `cosine`
    (unset: all after the warm-up)."""
    decay: Literal["cosine", "linear"] = "linear"
    """Shape of the decay in `wsd`."""
    final_rate: NonNegative = 0.0
    """Learning rate at the end of the decay, and ever after."""
    base_rate: Positive = 1e-5
    """Lowest rate of `cyclic`; the highest is `optimizer.learning_rate`."""
    cycle_length: Annotated[int, Field(ge=2, le=MOST)] = 1000
    """Steps per cycle in `cyclic`."""
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    """`cyclic`: constant height, half the height after each cycle, or height shrinking by `gamma` each step."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.9999
    """Shrinking per step in `exp_range`."""


class PrecisionConfig(Section):
    """Number formats."""

    type: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of the forward and backward pass; weights stay fp32. `auto`: bf16 on a GPU that has it, else fp32; fp32
    also where the loss is made of `residuals=`, which are small differences of large numbers."""
    predict: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format of the forward passes that probe a move. `same`: that of training. Another one shifts their losses a
    little against those of training, and quasi-Newton leaps, which want the same loss to five digits, may not begin."""
    narrow_residual: bool = True
    """Language models, with bf16 or fp16: keep the sum that runs through the blocks in that format too. Less memory,
    faster. A base of another family is held in bf16 or fp16 where its files are, or, with `false`, in fp32."""
    tf32: Switch = "auto"
    """Let fp32 matrix products on the GPU use TF32. `auto`: unless the loss is made of `residuals=`."""
    loss_scale: Positive = 65536.0
    """First loss scale with fp16; it then adapts: halved on overflow, doubled after `growth_interval` good steps."""
    growth_interval: Count = 2000
    """Good steps before the fp16 loss scale doubles."""


class EngineConfig(Section):
    """How a step is executed: how fast and in how much memory. What is computed stays the same, rounding aside."""

    compile: Switch = "auto"
    """`torch.compile`. `auto`: on a CUDA GPU, if the run is long enough to save more seconds than compiling takes, as
    reckoned from the model's size, the tokens of a step and `max_steps`; `foretrain train` and `finetune` write `true`
    or `false` into the run's config.toml. On a CUDA GPU always, where these are not known: in modules of your own, and
    in Python without `max_steps` or `batch_size`. A loss that takes derivatives itself is run as it is. Compiled code
    is kept in `~/.cache/foretrain/compiled` (under `XDG_CACHE_HOME` if that is set) for the next run of the same model;
    the environment variable `TORCHINDUCTOR_CACHE_DIR` names another folder."""
    cuda_graph: Switch = "auto"
    """Record the whole step as one CUDA graph. `auto`: where launching kernels takes longer than running them."""
    fused_loss: Switch = "auto"
    """Language models: output layer and cross-entropy in slices, so that all logits never exist at once. `auto`:
    when they would take more than 256 MB on a CUDA GPU (where it is also faster) or 1 GB elsewhere."""
    loss_rows: Count | Literal["auto"] = "auto"
    """Language models: tokens per slice of the fused loss: fewer take less memory, and a little longer. `auto`:
    16384 on a CUDA GPU (4096 without gradients), 1024 elsewhere."""
    activation_checkpointing: Share = False
    """Recompute blocks in the backward pass instead of keeping their activations: all (`true`), none, or a share, such
    as 0.5, at least one block, evenly spread. Same bits, dropout included. Of a module of your own: the blocks of the
    `nn.ModuleList` that `growth.blocks` names, or of the only one it has; they must be called as modules, `block(x)`,
    and change nothing but their buffers. A module without such a list is refused."""
    update_in_backward: bool = False
    """Update parameters soon after their gradients are complete, some at a time, and free the gradients: they never all
    exist at once. Same bits, except for the rounding of `muon` and of compiled models. Needs
    `optimizer.gradient_clip_norm = 0` and `accumulation_steps = 1`, not fp16; there are no quasi-Newton leaps. A
    gradient that is not finite spares its own parameter and those updated with it, not the whole step. `torch.compile`
    then takes one block at a time, from the largest `nn.ModuleList` of the model; a model without one is compiled as a
    whole, which brings all gradients at once."""
    deterministic: bool = False
    """Refuse operations whose result can differ between two runs (slower on a GPU)."""


class MemoryConfig(Section):
    """How much memory a run may take, what lives in host memory, and what happens when memory runs out. Only `budget`
    can change what is computed: it may choose rounded moments and unclipped gradients, and says so. (With
    `basis = "pinned"` a large model's forecasts may differ in the last digits, as dot products are added up in parts.)
    """

    budget: Amount = ""
    """`foretrain train` and `finetune`: device memory that the run may take: `14GB`, `6GiB`, `800MB`. Settings that are
    left unset are chosen so that it suffices, as `foretrain plan` shows them, and the allocator gets no more. With
    `foretrain train`, prediction is the first to go where memory is short, unless `hybrid.mode` is set. Empty: no
    limit."""
    snapshots: Literal["device", "pinned"] = "device"
    """Where the snapshots are that undo a move: `pinned` host memory, filled beside the probes, costs a
    copy per move and saves a second set of weights and optimizer state on the device."""
    basis: Literal["device", "pinned"] = "device"
    """Where the stored directions are that moves are made of. `pinned`: in host memory; they pass through a small
    buffer at the end of each window of full steps, and for each move."""
    offload: bool = False
    """The optimizer's state leaves the device for pinned host memory while steps are predicted, and the gradients are
    dropped. Switches `engine.cuda_graph = "auto"` off, because a recorded step needs them where they were."""
    return_ahead: CountOrZero = 5
    """With `offload`: so many predicted steps before the end of PREDICT the state begins to return, a part beside each
    probe. No more of it leaves than can leave and return without making a step wait. A leap is one step. 0: all of it
    leaves at once and returns after the last predicted step, which is slower but lowers the peak of PREDICT by the
    whole state."""
    on_out_of_memory: Literal["stop", "retry"] = "stop"
    """`stop`: the run ends with exit code 3, says what to change, and can be resumed. `retry`: the same batch is done
    again in smaller parts (twice the `accumulation_steps`, then `engine.activation_checkpointing`), and a move that
    does not fit is undone."""
    timeline: bool = True
    """Memory of every phase in `metrics.jsonl` and in the summary. On a GPU this resets torch's peak counters."""


class EvaluationConfig(Section):
    """How the held-out loss is measured."""

    interval: CountOrZero | None = None
    """Steps between evaluations. Unset: ten per run. 0: only at the end."""
    batches: Count = 40
    """`foretrain train` and `finetune`: held-out batches per evaluation, always the same ones; all of them if there are
    fewer. `HybridTrainer.fit` evaluates all that it is given."""
    ema_decay: Fraction = 0.0
    """Evaluate (and export) an exponential moving average of the weights with this decay. 0: the weights themselves."""
    early_stopping_patience: CountOrZero = 0
    """Stop after this many evaluations in a row without a new best held-out loss. 0: never."""
    answers: CountOrZero = 200
    """`foretrain finetune`: held-out examples that are answered at the end, for accuracy (where there are classes) or
    exact match. 0: none."""
    final_answer: str = ""
    """`foretrain finetune`: compare only what follows this mark, such as `####`. Empty: the whole answer."""


class CheckpointConfig(Section):
    """When the whole state is saved, and how much is kept."""

    interval: CountOrZero | None = None
    """Steps between checkpoints. Unset: five per run. 0: only at the end and on Ctrl-C or SIGTERM."""
    keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """Newest checkpoints that stay on disk; at least 2, so that a damaged one can be replaced by the one before."""
    keep_best: bool = True
    """Keep the weights of the lowest held-out loss too, as `best-step-...`: without the state of the optimizer, and
    only where there is held-out data."""
    directions: bool = True
    """Save the directions that moves are made of: up to 22 bytes per trained weight for large models, 40 for small
    ones. `false`: checkpoints are smaller and quicker by that, but a resumed run first has to watch some windows anew,
    and so is not the same bit for bit. In the middle of a move they are saved in any case. Where nothing will be tried
    there are none, and the resumed run is exact."""


class HybridConfig(Section):
    """The four phases: WARMUP, FULL, PREDICT, CORRECT."""

    mode: Literal["leap", "rollout", "off"] = "leap"
    """`leap` moves a whole horizon at once and probes it; `rollout` moves one predicted step at a time; `off` is the
    plain loop."""
    warmup_steps: Count = 100
    """Full steps before anything is predicted; up to three times as many while the loss has not settled. Fewer where
    nothing will be tried, because batches differ and no audit can be afforded: 3 windows or a tenth of the run,
    whichever is longer. None for quasi-Newton leaps, where the loss is exact."""
    full_steps: Count = 20
    """Full steps between two predicted phases, at the least."""
    max_predict_steps: Count = 60
    """Longest predicted phase, in steps; ten times as many for quasi-Newton leaps, which take a gradient each."""
    correct_steps: Annotated[int, Field(ge=1, le=100)] = 5
    """Full steps that validate a move before it is kept."""
    confidence_threshold: Fraction = 0.5
    """Predict only when a move is more likely than this to be kept."""
    divergence_threshold: Positive = 3.0
    """A loss this many standard deviations above its average is a warning."""
    correction_interval: CountOrZero = 0
    """Predicted steps between corrections inside a long rollout. 0: only at its end."""
    monitor_interval: Count = 1
    """Predicted steps between forward passes that watch a rollout."""
    window_steps: Annotated[int, Field(ge=2, le=MOST)] = 10
    """Full steps whose total displacement is one observation."""
    basis_type: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the stored directions. `auto`: fp32 up to 32M trained parameters, bf16 above."""
    search: Switch = "auto"
    """Choose the length and direction of a leap by probing several. `auto`: where batches hardly differ, because
    elsewhere the loss right after a move misleads."""
    space: Literal["adapter", "product"] = "adapter"
    """What a leap moves when adapters are trained: their two factors, or their product, which both factors make
    together. No effect on full weights."""
    probe_examples: CountOrZero = 16
    """`foretrain finetune`: examples that are not trained on but judge the leaps of adapters. 0: none; leaps are then
    judged as those of full weights."""
    secant_pairs: CountOrZero = 100
    """Where the loss is exact (full batch, `optimizer.weight_decay = 0`): pairs of weight and gradient changes kept for
    quasi-Newton leaps, one gradient each. 0: none, leaps are then searched along the forecast only."""
    secant_memory_mb: NonNegative = 256.0
    """Memory for these pairs; large models keep fewer of them, or none."""
    linear_rows: CountOrZero = 160
    """Where the form of the loss is known (`residuals=`, mean squares, logistic loss, cross-entropy) and batches hardly
    differ: rows of the Jacobian that a leap of the linearised run takes at first; it takes more where they do not say
    enough. 0: no such leaps."""
    linear_memory_mb: NonNegative = 512.0
    """Memory for these rows; large models take fewer of them. Where there is room for fewer than 160, and for fewer
    than the batch has, no such leaps are made."""


class PredictorConfig(Section):
    """What forecasts the motion of the weights."""

    type: Literal["momentum", "linear", "mlp", "rssm"] = "linear"
    """`momentum`: geometric continuation; `linear`: ridge regression; `mlp`: small network; `rssm`: recurrent
    state-space model."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Look-ahead: every `stride` full steps the weights go ahead by this share of their average motion, and gradients
    are taken there; from the end of `hybrid.warmup_steps` to two thirds of the run. 0: off."""
    stride: Count = 10
    """Full steps between two moves of the look-ahead."""
    gamma: Fraction = 0.99
    """Averaging of the motion per step, for the look-ahead."""
    l2: NonNegative = 1.0
    """Pull of `linear` towards its prior, in windows' worth of evidence."""
    forgetting: Annotated[float, Field(gt=0, le=1)] = 0.97
    """How much of the past `linear` keeps per window."""
    hidden_dims: Annotated[list[Size], Field(max_length=64)] = [64, 64]
    """Layers of `mlp`."""
    deterministic_dim: Size = 256
    """Size of the recurrent state of `rssm`."""
    stochastic_dim: Size = 32
    """Number of categorical variables of `rssm`."""
    num_categoricals: Annotated[int, Field(ge=2, le=2**16)] = 32
    """Classes of each of them."""
    ensemble_size: Annotated[int, Field(ge=1, le=1000)] = 3
    """Members of `mlp` and `rssm`; they differ in first weights and in the data they see."""
    bptt_steps: Size = 4
    """Windows that `rssm` is trained through."""
    learning_rate: Positive = 1e-3
    """Learning rate of `mlp` and `rssm` themselves."""


class CorrectionConfig(Section):
    """How errors of past forecasts correct a move."""

    residuals: Annotated[int, Field(ge=1, le=2**20)] = 1000
    """Residuals that are remembered."""
    similarity: Annotated[float, Field(ge=-1, lt=1)] = 0.7
    """Cosine of two training states above which a residual of one counts for the other."""
    neighbors: Count = 5
    """Most similar residuals that are used."""
    limit: NonNegative = 0.2
    """Largest correction, as a share of the move, per group of weights."""


class AuditConfig(Section):
    """Trying a move against not making it, from one snapshot."""

    time_budget: Annotated[float, Field(ge=0, le=1)] = 0.005
    """Share of the run that audits and unproven moves may cost. 0: nothing is tried where noise is high. Where it is
    too little for one audit, directions are kept for the first tenth of the run only, and by models above 32M trained
    parameters not at all."""
    steps: Annotated[int, Field(ge=2, le=MOST)] = 20
    """Full steps after which the two forks of an audit are compared."""


class GuardConfig(Section):
    """What counts as going wrong, and how much of it is borne."""

    nan_check: bool = True
    """Skip the update of a step whose loss or gradient is NaN or infinite. The check costs no host synchronisation."""
    max_skipped_steps: Count = 25
    """Give up, with a saved checkpoint, after this many skipped steps in a row."""
    explosion_factor: Annotated[float, Field(gt=1, le=LARGEST, allow_inf_nan=False)] = 10.0
    """A gradient norm this many times the usual one is a warning."""
    vanishing_factor: Fraction = 0.01
    """A gradient norm below this share of the usual one is a warning."""
    prediction_error: Positive = 0.2
    """A loss this share above the predicted one ends a predicted phase; half of it is a caution."""
    oscillation_changes: Annotated[float, Field(gt=0, lt=5)] = 3.0
    """Changes of sign of the loss around its trend, in 10 steps, above the 5 that independent noise would give, from
    which on it oscillates."""
    patience: Count = 3
    """Warnings in a row that make a critical state, and skipped steps in a row after which the run is rolled back."""
    max_rollbacks: CountOrZero = 5
    """Give up, with a saved checkpoint, when a run goes wrong again after this many rollbacks."""
    auto_tune: bool = False
    """Make the safe changes that findings of `health` advise while the run goes on: clipping, a lower learning rate
    (on a plateau a higher one), more `hybrid.full_steps`; and keep the lower rate of a rollback. Each is said. Off:
    they are advice. Needs `health.interval` above 0."""


class HealthConfig(Section):
    """Every layer, and the losses since the last time, are measured; what ails the run is said, with what to set."""

    interval: CountOrZero = 100
    """Steps between measurements, the first one before the first step. 0: none."""


class LogConfig(Section):
    """What is written while the run goes on."""

    interval: Count = 10
    """Steps between entries in `metrics.jsonl` and updates of the progress line."""
    console: Level = "normal"
    """How much of the run is shown: `quiet` what needs attention, and the result; `normal` also progress and the first
    moves; `verbose` everything: each phase, move, checkpoint, memory peak and look at the layers. `--quiet` and
    `--verbose` go before it."""
    report: bool = True
    """Write `report.html`, the run as one page, into the run folder when the run ends."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Write for these too, each into a folder of its name in the run folder; a package that is missing is named.
    Nothing goes to the network unless the tracker's own environment variables say so."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _names_with_commas(cls, value: Any) -> Any:
        """`--set log.trackers=tensorboard,mlflow` needs no brackets."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class GrowthConfig(Section):
    """A run that begins with fewer blocks of its model, and goes on with all of them: the deep model's first weights
    are predicted from the shallow one's."""

    layers: CountOrZero | tuple[Layers, ...] | Literal["auto"] = 0
    """Blocks that the run begins with, such as 6 of 12; or those of several stages, such as [3, 6]. 0: all, from the
    first step on. "auto": decided by what was measured, `at` with it, and written down by the run as numbers."""
    at: Inside | tuple[Inside, ...] = 0.5
    """Share of the run at which it goes on with all blocks; or the end of each stage, such as [0.25, 0.5]. New blocks
    learn best before the learning rate decays."""
    blocks: str = "blocks"
    """Name of the `nn.ModuleList` of blocks in a module of your own, such as "transformer.h"; also of those that
    `engine.activation_checkpointing` recomputes."""

    @property
    def stages(self) -> list[tuple[int, float]]:
        """Return the blocks of each stage, and the share of the run at which it ends."""
        layers, ends = self._given
        return list(zip(layers, ends, strict=True)) if any(layers) else []

    @property
    def _given(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the stages as they were given. "auto" counts as none until it is decided."""
        one = 0 if self.layers == "auto" else self.layers
        layers = one if isinstance(one, tuple) else (one,)
        return layers, self.at if isinstance(self.at, tuple) else (self.at,)

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> GrowthConfig:
        layers, ends = self._given
        if len(layers) != len(ends):
            raise ValueError(f"layers names {len(layers)} stages, and at the end of {len(ends)}; give one end for each")
        for one, what in ((layers, "layers"), (ends, "at")):
            if any(later <= earlier for earlier, later in pairwise(one)):
                raise ValueError(f"{what} = {list(one)} must rise from stage to stage")
        return self


class DistributedConfig(Section):
    """How several processes, started by torchrun, share a run. One process alone has no use for it."""

    type: Literal["auto", "off", "ddp", "fsdp2"] = "auto"
    """`foretrain train` and `finetune`; in Python you wrap the model yourself. `ddp`: each process holds the whole
    model and computes its rows of a batch; `fsdp2`: each holds a shard of every weight as well, and of the optimizer's
    state. `auto`: `ddp` where a process has the memory for it, else `fsdp2`; it is said which. `off`: several processes
    are refused."""
    shard: CountOrZero = 0
    """`foretrain train` and `finetune`: processes that share one copy of the weights under `fsdp2`. 0: all, or what
    `replicate` leaves."""
    replicate: CountOrZero = 0
    """`foretrain train` and `finetune`: copies of the weights under `fsdp2`, one per machine for example: shards are
    sent within a copy only. 0: one, or what `shard` leaves."""
    basis: Literal["auto", "sharded", "replicated"] = "auto"
    """Where the directions of replicated weights (`ddp`) are that moves are made of. `replicated`: each process has all
    of them; `sharded`: each has its part, and a move gathers 4 bytes per weight; `auto`: `sharded` from 32 million
    trained parameters on. Shards (`fsdp2`) have the directions of what they hold."""
    timeout_seconds: Annotated[float, Field(ge=1, le=86400)] = 600.0
    """`foretrain train` and `finetune`: seconds that a process waits for the others in the middle of a step; then the
    one that hangs is named, and the launcher may start all of them again."""


class ForecastConfig(Section):
    """What a run does to tell where it will end."""

    enabled: bool = True
    """Forecast the held-out loss at the end of the run, with an interval, after evaluations from a tenth of the run on.
    Needs held-out data; costs some milliseconds of the host each time."""
    level: Inside = 0.8
    """Probability with which the end should lie in the interval."""
    copies: tuple[Inside, ...] = ()
    """Shares of the run, such as [0.25], at which a copy of it is trained for `copy_steps` while its rate falls to 0:
    its held-out loss tells what the decay of the rate is worth. The run goes on as if the copy had not been."""
    copy_steps: Inside = 0.015
    """Length of each copy as a share of the run. A copy costs as many steps."""

    @model_validator(mode="after")
    def _copies_end_in_the_run(self) -> ForecastConfig:
        late = [share for share in self.copies if share + self.copy_steps >= 1]
        if late:
            raise ValueError(
                f"forecast.copies = {late}: such a copy needs forecast.copy_steps = {self.copy_steps:g} of the run, "
                f"and less is left; begin before {1 - self.copy_steps:g}, or make copies shorter"
            )
        return self


class Config(Section):
    """The whole configuration of a run."""

    preset: Literal[
        "measured",
        "small",
        "medium",
        "large",
        "specialist",
        "generalist",
        "conservative",
        "balanced",
        "aggressive",
        "finetune",
    ] = "measured"
    """A set of values to start from; everything else in the file overrides it. `small`, `medium`, `large`, `specialist`
    and `generalist` set phases and rates, no model size: that is `model.type`."""
    max_steps: Count = 800
    """Length of the run in optimizer steps."""
    epochs: Positive | None = None
    """Length of the run in passes over the training data, instead of `max_steps`."""
    max_time: Seconds | None = None
    """Length of the run in time, such as "2h", "1h30m" or a number of seconds: the schedule follows the clock, and the
    run ends then with its learning rate decayed. Start-up, evaluation, saving and earlier parts of the run count.
    `max_steps` or `epochs` beside it: whichever comes first; without them steps are not limited."""
    until_loss: Finite | None = None
    """Held-out loss at which the run ends. The decay of `wsd` is begun when the forecast says that it will end there;
    `max_steps`, `epochs` or `max_time` end the run all the same."""
    batch_size: Rows = 16
    """Sequences per optimizer step."""
    accumulation_steps: Rows = 1
    """Split each batch into this many parts and add up their gradients: same result, less memory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Decides first weights, data order and dropout."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, `mps`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    engine: EngineConfig = EngineConfig()
    memory: MemoryConfig = MemoryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    growth: GrowthConfig = GrowthConfig()
    forecast: ForecastConfig = ForecastConfig()
    distributed: DistributedConfig = DistributedConfig()
    hybrid: HybridConfig = HybridConfig()
    predictor: PredictorConfig = PredictorConfig()
    correction: CorrectionConfig = CorrectionConfig()
    audit: AuditConfig = AuditConfig()
    guard: GuardConfig = GuardConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Config:
        if self.epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError(
                f"epochs = {self.epochs:g} and max_steps = {self.max_steps} both say how long the run is; keep one"
            )
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"accumulation_steps = {self.accumulation_steps} does not divide batch_size = {self.batch_size}"
            )
        if self.engine.update_in_backward:
            self._check_update_in_backward()
        if self.engine.cuda_graph is True and self.memory.offload:
            raise ValueError(
                "engine.cuda_graph = true and memory.offload = true exclude each other: a recorded step needs the "
                "optimizer's state where it was. Set engine.cuda_graph = 'auto', or memory.offload = false"
            )
        if self.growth.stages and self.model.weights:
            raise ValueError(
                "growth.layers begins with a part of the blocks, and would throw away what the others of model.weights "
                "have learned; set growth.layers = 0"
            )
        if self.growth.stages and not self.steps_are_limited and self.epochs is None:
            raise ValueError(
                "growth.at is a share of the steps, and max_time does not say how many there will be: set max_steps "
                "beside it, as many as there could be, or growth.layers = 0"
            )
        if self.guard.auto_tune and not self.health.interval:
            raise ValueError(
                "guard.auto_tune = true does what looks advise, and health.interval = 0 means none: set "
                "health.interval = 100, or guard.auto_tune = false"
            )
        warmup = self.schedule.warmup_steps or 0
        if self.schedule.type in ("wsd", "cosine") and warmup >= self.max_steps > 1 and self.steps_are_limited:
            raise ValueError(f"schedule.warmup_steps = {warmup} leaves nothing of max_steps = {self.max_steps}")
        if self.schedule.type == "cyclic" and self.schedule.base_rate > self.optimizer.peak_rate:
            raise ValueError(
                f"schedule.base_rate = {self.schedule.base_rate} is above "
                f"optimizer.learning_rate = {self.optimizer.peak_rate}"
            )
        return self

    @property
    def steps_are_limited(self) -> bool:
        """Return whether `max_steps` counts: beside `max_time` only where it was given."""
        return self.max_time is None or "max_steps" in self.model_fields_set

    def _check_update_in_backward(self) -> None:
        on = "engine.update_in_backward = true"
        if self.optimizer.gradient_clip_norm > 0:
            raise ValueError(
                f"{on} updates before the norm of all gradients is known, which clipping needs; "
                "set optimizer.gradient_clip_norm = 0"
            )
        if self.accumulation_steps > 1:
            raise ValueError(
                f"{on} keeps no gradients that parts of a batch could add up to; set accumulation_steps = 1, "
                "with a smaller batch_size or engine.activation_checkpointing = true if memory is short"
            )
        if self.precision.type == "fp16":
            raise ValueError(
                f"{on} cannot undo a step that overflowed, as fp16's loss scale needs; "
                "set precision.type = 'bf16' or 'fp32'"
            )
