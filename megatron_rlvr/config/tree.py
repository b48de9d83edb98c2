"""The typed tree of one run: every section, field, unit and default. Unknown keys are refused by `load.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rlvr.types import LogprobDistribution

FilePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
HUB = "hub:"  # a problem set by its name on the Hugging Face hub instead of a path
DataPath = Annotated[
    Path, AfterValidator(lambda path: path if str(path).startswith(HUB) else path.expanduser().absolute())
]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class ModelConfig(Section):
    path: FilePath = Field(description="Hugging Face directory: config.json, tokenizer, *.safetensors")
    broadcast_load: bool = Field(
        False, description="one data-parallel replica reads the weights and sends them to the others"
    )


class HeldOutConfig(Section):
    """One named set of held-out problems: docs/evaluation.md."""

    path: DataPath = Field(description="JSONL, JSON or parquet file, folder of these, or hub:<published set>")
    role: Literal["validation", "test"] = Field(
        "validation", description="validation: may decide which model is best; test: is only reported"
    )
    samples: PositiveInt | None = Field(None, description="per problem; default: trainer.eval_samples")
    problems: PositiveInt | None = Field(None, description="first n problems; default: trainer.eval_problems")


class DataConfig(Section):
    """Problems and their prompts: docs/data.md."""

    train: DataPath | None = Field(
        None, description="JSONL, JSON or parquet file, folder of these, or hub:<published set>; only `train` needs it"
    )
    validation: DataPath | None = Field(
        None, description="held-out problems, likewise: a set of role validation, named after the file"
    )
    held_out: dict[str, HeldOutConfig] = Field(default_factory=dict, description="more sets by their names")
    prompt_key: str = "problem"
    answer_key: str = "answer"
    chat_template: bool = Field(
        False, description="wrap each problem as one user message of the tokenizer's chat template"
    )
    suffix: str = Field(
        "",
        description="text put after every problem, for example the boxed-answer instruction; one that asks for a "
        "\\boxed{} is left out where the problem does so itself",
    )
    max_prompt_length: PositiveInt = Field(1024, description="tokens; a longer prompt is refused before the run")
    shuffle: bool = True

    @property
    def prompt_options(self) -> dict[str, Any]:
        """How problems become prompts: the keywords of `data.tokenize_problems`."""
        return {name: getattr(self, name) for name in ("chat_template", "suffix", "max_prompt_length")}


class RolloutConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"
    precision: Literal["float32", "bf16"] = Field(
        "bf16", description="precision of the engine's weights and activations"
    )
    group_size: PositiveInt = Field(8, description="G: responses per prompt")
    max_response_length: PositiveInt = Field(1024, description="tokens")
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, description="-1: no top-k")
    refresh_interval: PositiveInt | None = Field(
        None, description="optimizer updates between weight pushes to the engine; default: trainer.rollout_reuse"
    )
    max_staleness: int | None = Field(
        None, ge=0, description="bound on learner version minus token version; default: what the schedule implies"
    )
    allocation: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="adaptive: mini_batch_size * group_size responses shared out over the prompts by difficulty",
    )
    allocation_range: tuple[PositiveInt, PositiveInt] = Field(
        (4, 32), description="fewest and most responses of a prompt under adaptive allocation"
    )
    max_num_seqs: PositiveInt = Field(256, description="sequences that the engine decodes at once")
    kv_cache_gb: PositiveFloat | None = Field(
        None, description="KV cache per engine in GiB; default: memory_utilization"
    )
    memory_utilization: float = Field(0.45, gt=0, lt=1, description="share of the accelerator that vLLM may take")
    enforce_eager: bool = Field(False, description="no CUDA graphs; always on where there is no CUDA")


class LossConfig(Section):
    """The policy loss; `hyperparameters` are checked against the loss's own dataclass."""

    name: str = "respo"
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    logprob_temperature: PositiveFloat | None = Field(
        None,
        description="score tokens, in engine and learner, under the distribution that sampled them: set it to "
        "rollout.temperature, and rollout.top_p and rollout.top_k count too; default: raw log-probs at temperature 1, "
        "whatever the sampling was",
    )
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="behaviour log-probs: the engine's, or the learner's own at the start of each rollout batch",
    )
    variance_horizons: list[PositiveInt | Literal["full"]] = Field(
        default_factory=list,
        description="horizons H in tokens at which V(H), the spread of the KL correction among a prompt's responses, "
        "is logged; needs a reference policy",
    )


class ReferenceConfig(Section):
    """The proximal reference pi_k: a frozen copy of the learner, kept in host memory."""

    enabled: bool | None = Field(
        None, description="default: where the loss needs it (proximal_kl); true with grpo makes it decoupled GRPO"
    )
    refresh_interval: PositiveInt | None = Field(
        16, description="L: optimizer updates between copies; null: one copy before each rollout batch"
    )


class DynamicSamplingConfig(Section):
    enabled: bool = Field(False, description="drop groups whose verifier scores are all equal and sample replacements")
    max_attempts: PositiveInt = Field(
        8, description="rollout rounds per batch before the run stops with the statistics"
    )


class AdvantageConfig(Section):
    normalization: Literal["grpo", "center"] = "grpo"
    eps: PositiveFloat = 1e-6
    perturb_baseline: bool = False
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()


class RewardConfig(Section):
    """What a response is worth: docs/rewards.md."""

    name: Literal["strict_box", "normalized_box", "math_verify", "custom"] = "strict_box"
    function: str | None = Field(
        None, description='custom: import path "package.module:function" of reward(response, answer)'
    )
    guard: bool = Field(
        False, description="math_verify: reject other units, bases and brackets that it lets pass (docs/rewards.md)"
    )
    overlong_start: PositiveInt | None = Field(
        None, description="tokens from which the overlong penalty grows; the published 30B runs: 4096"
    )
    format_penalty: float = Field(0.0, ge=0, description="taken off a response without a closed box")
    workers: PositiveInt = Field(2, description="verifier processes of each rank (math_verify, custom)")
    timeout: PositiveFloat = Field(30.0, description="seconds for one response, then its verifier is killed")
    memory_gb: PositiveFloat = Field(2.0, description="GiB that a verifier process may take")

    @property
    def verifier_options(self) -> dict[str, Any]:
        """How correctness is judged: the keywords of `rewards.Scorer` without shaping."""
        return {key: getattr(self, key) for key in ("function", "guard", "workers", "timeout", "memory_gb")}

    @property
    def shaping(self) -> dict[str, Any]:
        """The keywords of `rewards.Scorer` for penalties."""
        return {key: getattr(self, key) for key in ("overlong_start", "format_penalty")}


class ActorConfig(Section):
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    virtual_pipeline: PositiveInt = Field(
        1, description="model chunks per pipeline rank (interleaved schedule when > 1)"
    )
    context_parallel: PositiveInt = Field(1, description="ranks over which every sequence is split")
    expert_parallel: PositiveInt = 1
    expert_tensor_parallel: PositiveInt | None = Field(
        None, description="default: tensor_parallel if expert_parallel is 1, else 1"
    )
    data_parallel: PositiveInt = 1
    dtype: Literal["float32", "bf16"] = "bf16"
    batch_layout: Literal["packed", "padded"] = "packed"
    micro_batch_tokens: PositiveInt = Field(16384, description="tokens per micro-batch, padding included")
    recompute: Literal["none", "full"] = "none"
    distributed_optimizer: bool = False
    moe_aux_loss_coeff: float = Field(
        0.0, ge=0, description="load-balancing loss of the experts, per token; the published recipes train without"
    )
    routing_replay: Literal["off"] = "off"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def sequence_multiple(self) -> int:
        """What every sequence's tokens are padded to: context parallelism cuts 2 chunks a rank out of each."""
        return 2 * self.context_parallel if self.context_parallel > 1 else 1

    @property
    def expert_tensor(self) -> int:
        """Expert tensor parallel size with its default resolved."""
        if self.expert_tensor_parallel is not None:
            return self.expert_tensor_parallel
        return self.tensor_parallel if self.expert_parallel == 1 else 1


class ReplayConfig(Section):
    """Starting states from a buffer of prefixes (VSR); with ratio 0 the section has no effect."""

    ratio: float = Field(0.0, ge=0, le=1, description="rho: share of the batch elements that start from a prefix")
    recency_window: PositiveInt | None = Field(
        None, description="rollout batches after which a prefix is dropped; default: never"
    )
    stride: PositiveInt = Field(1, description="tokens between the stored prefixes of a response")
    sampling: Literal["score", "uniform"] = Field(
        "score", description="prefixes drawn in proportion to sigma-hat, or alike"
    )
    static: bool = Field(False, description="keep the prefixes that the buffer starts with: nothing enters or leaves")
    experts: FilePath | None = Field(
        None, description="JSONL of problems and right responses whose prefixes the buffer starts with"
    )
    response_key: str = "response"
    buffer: FilePath | None = Field(None, description="saved buffer (replay.safetensors of a checkpoint) to start with")


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    decoupled_weight_decay: bool = Field(True, description="AdamW when true, Adam with L2 when false")
    clip_grad: float = Field(1.0, ge=0, description="global norm; 0: no clipping")
    warmup_fraction: float = Field(
        0.05, ge=0, lt=1, description="share of the updates with a linearly rising learning rate"
    )
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    min_lr: float = Field(0.0, ge=0)


class TrainerConfig(Section):
    updates: PositiveInt = Field(1024, description="optimizer updates of the run")
    mini_batch_size: PositiveInt = Field(32, description="M: prompts per optimizer update")
    rollout_reuse: PositiveInt = Field(1, description="N: mini-batches taken from one rollout batch")
    eval_interval: PositiveInt | None = Field(
        None, description="updates between held-out evaluations; first and last always"
    )
    eval_samples: PositiveInt = Field(4, description="samples per held-out problem")
    eval_problems: PositiveInt | None = Field(None, description="first n problems of the held-out set; default: all")
    best_by: str | None = Field(
        None, description="validation set whose accuracy decides which model is best; default: the only one"
    )
    save_best: bool = Field(False, description="export the best model so far to run_dir/best")
    save_interval: PositiveInt | None = Field(
        None, description="updates between exported Hugging Face models; the last update is always saved"
    )
    step_zero_tolerance: PositiveFloat | None = Field(
        None,
        description="nats; stop when learner and engine differ by more per token, in the mean, in the first update "
        "after a refresh; default: 1e-4 where both are float32, else the gap is only logged",
    )


class CheckpointConfig(Section):
    """Training checkpoints in run_dir/checkpoints/step_<update>, taken between two rollout batches."""

    interval: PositiveInt | None = Field(None, description="updates between checkpoints; default: only when asked to")
    keep: PositiveInt = Field(2, description="newest checkpoints that stay")
    at_end: bool = Field(False, description="one more after the last update, so that the run can be extended")
    asynchronous: bool = Field(False, description="write the tensors in the background while training goes on")
    resume: Literal["auto", "never"] | FilePath = Field(
        "never",
        union_mode="left_to_right",
        description="auto: go on from run_dir's newest valid checkpoint, if there is one; or the path of a checkpoint",
    )


class LoggingConfig(Section):
    wandb: bool = Field(False, description="offline when there is no API key in the environment")
    project: str = "megatron_rlvr"
    rollouts: bool = Field(True, description="write every rollout batch to rollouts/*.jsonl")
    progress: bool = True


class SftConfig(Section):
    """Supervised warm-up on demonstrations: `python -m megatron_rlvr sft RUN.yaml`."""

    demonstrations: FilePath | None = Field(None, description="JSONL with problem and response")
    response_key: str = "response"
    updates: PositiveInt = 200
    batch_size: PositiveInt = Field(128, description="demonstrations per update")
    lr: PositiveFloat = 3e-3
    output: FilePath | None = Field(None, description="Hugging Face directory that the trained model is written to")


class LaunchConfig(Section):
    threads: PositiveInt = Field(1, description="OpenMP threads of each rank on a CPU")


class ProfileConfig(Section):
    """Where time and memory go in some updates of some ranks: docs/profiling.md."""

    tool: Literal["none", "nsys", "torch"] = Field(
        "none", description="nsys: Nsight Systems around the chosen ranks; torch: chrome traces, on a CPU too"
    )
    steps: tuple[PositiveInt, PositiveInt] = Field(
        (3, 5), description="first and last update that is recorded, with the rollout batch before the first"
    )
    ranks: list[NonNegativeInt] = Field(default=[0], min_length=1, description="ranks that are recorded")
    memory: bool = Field(
        False, description="record allocations on the chosen ranks' GPUs; a snapshot after the last step and on OOM"
    )


class RunConfig(Section):
    """One run, from one YAML file and dotted overrides."""

    name: str = "run"
    seed: int = Field(0, ge=0, lt=2**31)
    run_dir: FilePath
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    rewards: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    actor: ActorConfig = ActorConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    sft: SftConfig = SftConfig()
    launch: LaunchConfig = LaunchConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def logprob_distribution(self) -> LogprobDistribution:
        """What engine and learner score tokens under: the raw softmax, or the sampling where the loss asks for it."""
        if self.loss.logprob_temperature is None:
            return LogprobDistribution()
        return LogprobDistribution(self.loss.logprob_temperature, self.rollout.top_p, self.rollout.top_k)

    @property
    def held_out_sets(self) -> dict[str, HeldOutConfig]:
        """All held-out sets by name, data.validation first, with their defaults filled in."""
        data, trainer = self.data, self.trainer
        sets = dict(data.held_out)
        if data.validation is not None:
            name = data.validation.stem.removeprefix(HUB)
            sets = {name: HeldOutConfig(path=data.validation), **sets}
        defaults = {"samples": trainer.eval_samples, "problems": trainer.eval_problems}
        return {
            name: held_out.model_copy(update={k: v for k, v in defaults.items() if getattr(held_out, k) is None})
            for name, held_out in sets.items()
        }

    @property
    def best_by(self) -> str | None:
        """The set that decides which model is best; None where there is no validation set, or several and no choice."""
        if self.trainer.best_by is not None:
            return self.trainer.best_by
        validation = [name for name, held_out in self.held_out_sets.items() if held_out.role == "validation"]
        return validation[0] if len(validation) == 1 else None

    @property
    def refresh_interval(self) -> int:
        """Optimizer updates between weight pushes."""
        return self.rollout.refresh_interval or self.trainer.rollout_reuse

    @property
    def step_zero_tolerance(self) -> float | None:
        """Largest mean log-prob gap (nats) right after a refresh that the run survives; None: not enforced."""
        if self.trainer.step_zero_tolerance is not None:
            return self.trainer.step_zero_tolerance
        return 1e-4 if self.actor.dtype == self.rollout.precision == "float32" else None

    @property
    def max_staleness(self) -> int:
        """Bound on learner version minus token version, checked at admission and when trained on."""
        implied = self.refresh_interval - 1
        return implied if self.rollout.max_staleness is None else self.rollout.max_staleness
