"""Runs of stock modules with Megatron's own overlap, and the Megatron flags that each run covers.

``FLAGS`` lists the overlap flags of Megatron's parser, and ``REASONS`` the flags for which a run keeps stock modules.
Each flag has the row that sets it, or the reason why no row can. ``tests/unit/training/plan/test_own_overlap``
compares both with the parser and the program's table.
"""

from dataclasses import dataclass

OWN = "--overlap-moe-expert-parallel-comm"
EP2 = "--expert-model-parallel-size 2"
LOCAL = "--transformer-impl local --no-persist-layer-norm"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
INTERLEAVED = f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
REDUCTIONS = "--overlap-grad-reduce --ddp-bucket-size 20000"
SHARDED = f"{REDUCTIONS} --use-distributed-optimizer --overlap-param-gather"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 32"
TP2 = f"--tensor-model-parallel-size 2 --sequence-parallel {EP2} --expert-tensor-parallel-size 1 --tp-comm-overlap"
BULK = "--no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-split-ag --no-tp-comm-split-rs"
PIECES = "--no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad"
HOOKS = "--save-activations-interval 5 --save-dgrads-interval 5 --save-tokens-per-expert-interval 5"
FSDP = "--use-megatron-fsdp --megatron-fsdp-enable-fine-grained-param-gather"
FOLDER = "FOLDER"
"""Placeholder for a folder of the test in a row's flags."""
BINS = "--lancet-pack-documents --calculate-per-token-loss"


@dataclass(frozen=True)
class Row:
    """A run of two steps that must equal a reference bitwise.

    Attributes:
        flags: flags in addition to the common flags of all rows; without ``--lancet-plan``.
        num_ranks: 2 or 4.
        is_off: whether ``--lancet-plan off`` selects stock modules; otherwise the flags do, and the plan is ``auto``.
        without: the reference is this run without these flags. None: the reference is Megatron's own script.
        only_warms_up: the run ends before it uses the GPU that one of its flags needs.
    """

    flags: str
    num_ranks: int = 2
    is_off: bool = True
    without: str | None = None
    only_warms_up: bool = False

    @property
    def num_schedules(self) -> int:
        """Schedules per rank: one per micro-batch, step and virtual stage. 0 without Megatron's own pairing."""
        stages = 2 if "--num-virtual-stages-per-pipeline-rank" in self.flags else 1
        return 2 * 4 * stages if OWN in self.flags else 0


@dataclass(frozen=True)
class Refused:
    """A run that ends with a one-line error before it builds a model."""

    flags: str
    message: str
    is_off: bool = True
    num_ranks: int = 2


@dataclass(frozen=True)
class NoRow:
    """The reason why no run sets a flag."""

    why: str


ROWS = {
    "pairs": Row(f"{EP2} {OWN} --eval-iters 1 --eval-interval 1 --split 8,2,0"),
    "pairs, late dW, sharded": Row(f"{EP2} {OWN} --delay-wgrad-compute {SHARDED}"),
    "pairs, early release": Row(
        f"{EP2} {OWN} --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream {SHARED_EXPERT}"
    ),
    "pairs of documents": Row(f"{EP2} {OWN} --dataloader-inter-document-masking", without=OWN),
    "pairs of bins": Row(f"{EP2} {OWN} {BINS}", without=OWN),
    "pairs on virtual stages": Row(f"{EP2} {INTERLEAVED} --global-batch-size 16 {OWN}", num_ranks=4),
    "experts' dW": Row(f"{EP2} --overlap-dispatch-backward-with-experts-wgrad"),
    "shared expert": Row(f"{EP2} {SHARED_EXPERT} --moe-shared-expert-overlap"),
    "reductions": Row(f"{EP2} {REDUCTIONS}"),
    "gathers": Row(f"{EP2} {SHARDED} --create-all-gather-group"),
    "gathers next to the optimizer": Row(
        f"{INTERLEAVED} {SHARDED} --overlap-param-gather-with-optimizer-step --ckpt-format torch"
    ),
    "pipeline": Row(f"{INTERLEAVED} --overlap-p2p-communication-warmup-flush"),
    "pipeline without": Row(
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 "
        "--global-batch-size 8 --no-overlap-p2p-communication",
        num_ranks=4,
    ),
    "embedding's dW": Row(f"{PP2} --defer-embedding-wgrad-compute --wgrad-deferral-limit 2"),
    "userbuffers": Row(f"{TP2} {BULK} {PIECES}"),
    # Runs of --lancet-plan auto that keep stock modules for a reason, with Megatron's own pairing.
    "reason: layers": Row(
        f"{EP2} {OWN} --spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec",
        is_off=False,
    ),
    "reason: experts": Row(
        f"{EP2} {OWN} --moe-latent-size 32 --moe-enable-routing-replay --moe-routing-trace-path {FOLDER} "
        "--mlp-chunks-for-training 2 --symmetric-ar-type two_shot --use-kitchen-attention",
        is_off=False,
    ),
    "reason: shared expert": Row(
        f"{EP2} {OWN} {SHARED_EXPERT} --moe-shared-expert-glu-interleave-size 8", is_off=False
    ),
    "reason: hooks": Row(f"{EP2} {OWN} {HOOKS}", is_off=False),
    "reason: local layers": Row(
        f"{EP2} {OWN} {LOCAL} --moe-mlp-glu-interleave-size 8 --recompute-granularity selective "
        "--recompute-modules layernorm",
        is_off=False,
    ),
    "reason: CUDA graphs": Row(
        f"{EP2} {OWN} --delay-wgrad-compute --cuda-graph-impl transformer_engine "
        "--cuda-graph-modules moe_router moe_preprocess",
        is_off=False,
        only_warms_up=True,
    ),
    "reason: no expert parallelism": Row(SHARDED, is_off=False),
}

_GPU = "needs a GPU, and this machine has none"
REFUSED = {
    "no expert parallelism": Refused(OWN, "is only supported with expert model parallelism", is_off=False),
    "dW without pairs": Refused(f"{EP2} --delay-wgrad-compute", "must be enabled when enabling delay_wgrad_compute"),
    "shared expert": Refused(f"{EP2} {OWN} {SHARED_EXPERT} --moe-shared-expert-overlap", "moe_shared_expert_overlap"),
    "hybrid": Refused(f"{EP2} {OWN} --hybrid-layer-pattern *E*E --num-layers 4", "hybrid model has no such schedule"),
    "other layers": Refused(
        f"{EP2} {OWN} --hybrid-layer-pattern *EME --num-layers 4", "hybrid model has no such schedule", is_off=False
    ),
    "bins on virtual stages": Refused(
        f"{EP2} {INTERLEAVED} {OWN} {BINS}", "does not work with virtual pipeline stages", num_ranks=4
    ),
    "bins and graphs": Refused(f"{EP2} {OWN} {BINS} --cuda-graph-impl local", "CUDA graphs need a GPU"),
    "graphs": Refused(f"{EP2} {OWN} --cuda-graph-impl local", "CUDA graphs need a GPU", is_off=False),
    "old name of graphs": Refused(f"{EP2} {OWN} --enable-cuda-graph", "CUDA graphs need a GPU", is_off=False),
    "oldest name of graphs": Refused(f"{EP2} {OWN} --external-cuda-graph", "CUDA graphs need a GPU", is_off=False),
    "FSDP": Refused(f"{EP2} {OWN} {FSDP}", f"--use-megatron-fsdp {_GPU}", is_off=False),
    "torch's FSDP": Refused("--use-torch-fsdp2", f"--use-torch-fsdp2 {_GPU}", is_off=False),
    "optimizer": Refused(
        f"{EP2} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", f"--optimizer-cpu-offload {_GPU}"
    ),
    "NCCL's userbuffers": Refused(f"{EP2} --use-nccl-ub", f"--use-nccl-ub {_GPU}"),
    "offloading": Refused(f"{EP2} {OWN} --cpu-offloading-num-layers 1", _GPU, is_off=False),
    "empty weights": Refused(f"{EP2} {OWN} --init-model-with-meta-device", _GPU, is_off=False),
    "fp8": Refused(f"{EP2} {OWN} {LOCAL} --fp8-format hybrid --fp8-output-proj", f"--fp8-format {_GPU}", is_off=False),
    "fp4": Refused(f"{EP2} {OWN} {LOCAL} --fp4-format e2m1", f"--fp4-format {_GPU}", is_off=False),
    "logits": Refused(f"{EP2} {OWN} {LOCAL} --qk-clip", "--qk-clip reads the largest logits", is_off=False),
    "logged logits": Refused(
        f"{EP2} {OWN} {LOCAL} --log-max-attention-logit", "--log-max-attention-logit reads", is_off=False
    ),
    "shared activations": Refused(
        f"{EP2} {OWN} --distribute-saved-activations --recompute-granularity full --recompute-method uniform",
        "can distribute recomputed activations only across tensor model parallel groups",
        is_off=False,
    ),
    "rank capacity": Refused(
        f"{EP2} {OWN} --moe-expert-rank-capacity-factor 2", "to be 'hybridep' or 'ncclep'", is_off=False
    ),
    "stash": Refused(f"{EP2} {OWN} --moe-paged-stash", "requires moe_expert_rank_capacity_factor", is_off=False),
    "one weight": Refused(
        f"{EP2} {OWN} --moe-single-grouped-weight", "requires use_transformer_engine_op_fuser", is_off=False
    ),
    "one bias": Refused(f"{EP2} {OWN} --moe-single-grouped-bias", "requires add_bias_linear", is_off=False),
    "batch invariance": Refused(f"{EP2} {OWN} --batch-invariant-mode", "only supports FlashAttention", is_off=False),
    "upcycling": Refused(f"{EP2} {OWN} --moe-use-upcycling", "--save option must be specified", is_off=False),
}

_NCCL_EP = NoRow("its dispatcher needs NCCL's package for expert parallelism, and GPUs")
FLAGS: dict[str, str | NoRow] = {
    OWN: "pairs",
    "--delay-wgrad-compute": "pairs, late dW, sharded",
    "--ep-overlap-early-attn-memory-release": "pairs, early release",
    "--high-priority-a2a-comm-stream": "pairs, early release",
    "--overlap-dispatch-backward-with-experts-wgrad": "experts' dW",
    "--moe-shared-expert-overlap": "shared expert",
    "--moe-shared-expert-intermediate-size": "shared expert",
    "--overlap-grad-reduce": "reductions",
    "--overlap-param-gather": "gathers",
    "--create-all-gather-group": "gathers",
    "--overlap-param-gather-with-optimizer-step": "gathers next to the optimizer",
    "--overlap-p2p-communication-warmup-flush": "pipeline",
    "--no-overlap-p2p-communication": "pipeline without",
    "--defer-embedding-wgrad-compute": "embedding's dW",
    "--wgrad-deferral-limit": "embedding's dW",
    # A CPU run disables userbuffers; this row tests that.
    **dict.fromkeys(("--tp-comm-overlap", *BULK.split(), *PIECES.split()), "userbuffers"),
    "--tp-comm-overlap-cfg": NoRow("sizes of userbuffers, which need CUDA"),
    "--cuda-graph-modules": "reason: CUDA graphs",
    "--overlap-cpu-optimizer-d2h-h2d": "optimizer",
    "--use-nccl-ub": "NCCL's userbuffers",
    "--megatron-fsdp-enable-fine-grained-param-gather": "FSDP",
    "--moe-ncclep-static-shape": _NCCL_EP,
    "--high-priority-stream-groups": NoRow("priorities of NCCL's streams"),
    "--inference-dynamic-batching-async-sched-mode": NoRow("inference"),
}
"""The row of ``ROWS``, or else of ``REFUSED``, that sets the flag."""

_OTHER_LAYERS = NoRow("its kernels need a GPU")
_FUSED = NoRow("Megatron runs it only in MXFP8 and NVFP4, with the op fuser's kernels")
REASONS: dict[str, str | NoRow] = {
    "--spec": "reason: layers",
    **dict.fromkeys(
        (
            *("--moe-latent-size", "--moe-enable-routing-replay", "--moe-routing-trace-path"),
            *("--mlp-chunks-for-training", "--symmetric-ar-type", "--use-kitchen-attention"),
        ),
        "reason: experts",
    ),
    "--moe-shared-expert-glu-interleave-size": "reason: shared expert",
    "--use-grouped-gemm-for-shared-expert": _FUSED,
    "--use-grouped-gemm-for-dense-mlp": _FUSED,
    **dict.fromkeys(
        ("--save-activations-interval", "--save-dgrads-interval", "--save-tokens-per-expert-interval"),
        "reason: hooks",
    ),
    "--moe-mlp-glu-interleave-size": "reason: local layers",
    "--recompute-modules": "reason: local layers",
    "--cuda-graph-impl": "reason: CUDA graphs",
    "--enable-cuda-graph": "old name of graphs",
    "--external-cuda-graph": "oldest name of graphs",
    "--use-megatron-fsdp": "FSDP",
    "--use-torch-fsdp2": "torch's FSDP",
    "--tp-comm-overlap": NoRow("a CPU run disables it and then has a plan"),
    "--use-te-activation-func": NoRow("a CPU run disables it and then has a plan"),
    "--transformer-impl": NoRow("a CPU run uses local layers instead of inference_optimized and then has a plan"),
    "--cpu-offloading-num-layers": "offloading",
    "--fine-grained-activation-offloading": NoRow("it sets the affinity of a GPU's host threads"),
    "--init-model-with-meta-device": "empty weights",
    "--fp8-format": "fp8",
    "--fp8-output-proj": "fp8",
    "--fp4-format": "fp4",
    "--qk-clip": "logits",
    "--log-max-attention-logit": "logged logits",
    "--mla-down-proj-fusion": NoRow("stock's local core attention has no separate head sizes"),
    "--distribute-saved-activations": "shared activations",
    "--moe-expert-rank-capacity-factor": "rank capacity",
    "--moe-paged-stash": "stash",
    "--moe-single-grouped-weight": "one weight",
    "--moe-single-grouped-bias": "one bias",
    "--batch-invariant-mode": "batch invariance",
    "--moe-use-upcycling": "upcycling",
    "--hybrid-layer-pattern": "other layers",
    "--use-transformer-engine-op-fuser": NoRow("Megatron requires its kernels: GPUs of capability 10"),
    "--fused-residual-rmsnorm": NoRow("its kernel has no stand-in on a CPU"),
    "--tensor-parallel-num-weight-shards": NoRow("its gathers are NCCL's"),
    "--expert-tensor-parallel-num-weight-shards": NoRow("its gathers are NCCL's"),
    "--te-precision-config-file": NoRow("it needs the package pyyaml"),
    "--fake-process-group": NoRow("no rank would receive another rank's rows"),
    "--lazy-mpu-init": NoRow("leaves Megatron without process groups"),
    "--dataloader-inter-document-masking": NoRow("with context parallelism, stock modules are also refused"),
    "--heterogeneous-layers-config-path": _OTHER_LAYERS,
    "--heterogeneous-layers-config-encoded-json": _OTHER_LAYERS,
    "--experimental-attention-variant": _OTHER_LAYERS,
}
"""Same as ``FLAGS``, for the flags in the program's table of settings that the overlapping block does not support."""
