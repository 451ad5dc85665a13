"""What surrounded the originals' programs: launchers and tools, for docs/migration.md alone."""

_IPU = "accepted; there is no IPU to reserve"
_MPI = "mpirun is your own; `falconet` takes rank and size from its variables"

# Program -> option -> (what it becomes, effect). `poprun` itself is read by launchers.py.
OUTSIDE: dict[str, dict[str, tuple[str, str]]] = {
    "launcher:poprun": {
        "--num-instances": ("poprun --num-instances", "must divide the replicas"),
        "--num-replicas": ("poprun --num-replicas", "copies of the model in all; counts more than --replicas"),
        "--ipus-per-replica": ("poprun --ipus-per-replica", "processes of one replica: the stages of its pipeline"),
        "--numa-aware": ("poprun --numa-aware", "binds each process to a NUMA node"),
        "-v / -vv": ("poprun -v", "prints the command lines"),
        "--host": ("poprun --host", "hosts, over ssh"),
        "--mpi-global-args": ("poprun --mpi-global-args", "--tag-output, -x, -H and networks; the rest is named"),
        "--mpi-local-args": ("poprun --mpi-local-args", "the same"),
        "--only-output-from-instance": ("poprun --only-output-from-instance", "the same"),
        "--executable-cache-path": ("TRITON_CACHE_DIR", "where compiled kernels are kept, in every process"),
        "--offline-mode": ("none", "accepted; what is here is used"),
        **dict.fromkeys(
            (
                *("--vipu-server-host", "--vipu-server-timeout", "--vipu-partition", "--vipu-cluster"),
                *("--reset-partition", "--update-partition", "--num-ilds", "--remove-partition", "--vipu-server-port"),
                *("--vipu-allocation", "--sync-type"),
            ),
            ("none", _IPU),
        ),
    },
    "launcher:mpirun": dict.fromkeys(
        ("--allow-run-as-root", "--mca", "--tag-output", "-H", "-bind-to none", "-map-by slot", "-x"),
        ("mpirun", _MPI),
    ),
    "tool:gc-profile/gc-info": {
        "gc-profile -d": (
            "FALCONET_RUNS",
            "runs a program whose run folder goes there; its --gc-profile traces updates",
        ),
        "gc-info -l": ("falconet doctor", "lists what this machine has"),
    },
}
