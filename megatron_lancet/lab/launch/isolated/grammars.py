"""Options of launchers and containers that take no value, or two."""

from megatron_lancet.lab.launch.isolated.options import Grammar


def _flags(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


SLURM = Grammar(
    _flags(
        "label unbuffered overlap exact overcommit preserve-env pty quiet verbose no-kill exclusive kill-on-bad-exit",
        "contiguous disable-status hold immediate multi-prog reboot share requeue no-requeue oversubscribe spread-job",
        "use-min-nodes parsable propagate container-mount-home no-container-mount-home container-writable test-only",
        "container-readonly container-remap-root no-container-remap-root container-entrypoint no-container-entrypoint",
    ),
    "EHIKOQVXZklsuv",
)
"""Of srun, sbatch, salloc."""
TORCHRUN = Grammar(
    _flags(
        "standalone no-python no_python module run-path run_path virtual-local-rank virtual_local_rank use-env use_env",
        "ignore-missing-fault-tol-cfg ignore-missing-cfg",
    ),
    "m",
)
DEEPSPEED = Grammar(
    _flags("no_python module no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log"), "m"
)
ACCELERATE = Grammar(
    _flags(
        "cpu multi_gpu tpu ipex use_xpu use_mps_device use_deepspeed use_fsdp use_megatron_lm use_parallelism_config",
        "same_network tpu_use_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 debug quiet module no_python",
        "dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation enable_cpu_affinity",
        "multi-gpu use-deepspeed use-fsdp use-megatron-lm same-network no-python enable-cpu-affinity",
    ),
    "mq",
)
SSH = Grammar(short_flags="46AaCfGgKkMNnqsTtVvXxYy")
PDSH = Grammar(_flags("help version"), "hsqbdLSVk")
QSUB = Grammar(short_flags="VIzhXfx")
PBSDSH = Grammar(short_flags="osuv")
DOCKER = Grammar(
    _flags("rm init privileged read-only interactive tty detach no-healthcheck publish-all oom-kill-disable quiet"),
    "itdPq",
)
SINGULARITY = Grammar(
    _flags(
        "nv rocm nvccli cleanenv contain containall writable writable-tmpfs userns fakeroot no-home ipc pid net",
        "no-privs keep-privs allow-setuid no-rocm no-nv compat debug quiet silent verbose no-eval no-umask no-init",
    ),
    "ecCufipnwhqsvd",
)
ENROOT = Grammar(_flags("root rw"), "rw")
MPI = Grammar(
    _flags(
        "allow-run-as-root bind-to-core bycore bynode byslot report-bindings tag-output display-map oversubscribe",
        "nooversubscribe timestamp-output v verbose l prepend-rank merge-stderr-to-stdout q quiet",
    ),
    pairs=_flags("mca gmca omca prtemca pmixmca genv env"),
    valued=_flags("bootstrap bootstrap-exec launcher launcher-exec rmk map-by rank-by bind-to x"),
    is_known=False,
    has_long_words=True,
)
GUESSED = Grammar(is_known=False)
