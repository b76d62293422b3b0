"""Environment and MemoryRecord: machine, software, launch and memory of a run."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import RecordPart, recorded

GPU_NULL = (
    "on CPU; without `nvidia-ml-py`; where the driver refuses; if `failed`; in `probe`, `latency` "
    "and `acceptance`"
)
LOAD_NULL = (
    "if unknown; if it took less than a second; if `failed`; where another program computed, as of "
    "an endpoint"
)


@dataclass(frozen=True, kw_only=True)
class Environment(RecordPart):
    """The machine, the software and the launch, without host names."""

    time_utc: str = recorded("start of the run, ISO 8601, UTC")
    argv: list[str] = recorded("the command line, the program without its folder")
    magicdec: str = recorded(
        "version of this package when it was installed: the newest git tag, and the commits since"
    )
    revision: str | None = recorded(
        "git commit of this package, followed by `-dirty` if files differ from it",
        null="if the package is not a checkout",
    )
    python: str = recorded("version of Python")
    torch: str = recorded("version of PyTorch, with its build")
    system: str = recorded("operating system and processor architecture")
    cpu: str = recorded("model name of the CPU; empty if the system does not say")
    num_cpus: int | None = recorded(
        "logical CPUs of the machine, whether this run may use them or not", null="if unknown"
    )
    host_load: float | None = recorded(
        "load average of the host over the last minute when the record was made: processes that "
        "ran or waited, with those of this run",
        null="if unknown",
    )
    cores_others: float | None = recorded(
        "cores that other programs on the leading rank's host kept at work while it was measured, "
        "in the mean: what all cores that the run may use did, without the run's own processes; "
        "with `--repeats` of the repeat in which `cores_taken` is largest, as the next three",
        "cores",
        null=LOAD_NULL,
    )
    cores_stolen: float | None = recorded(
        "cores that a hypervisor gave to other machines meanwhile (steal)",
        "cores",
        null=LOAD_NULL,
    )
    cores_waited: float | None = recorded(
        "cores that threads of the run were ready for and waited for in the run queue, also for "
        "each other",
        "cores",
        null=f"{LOAD_NULL}; where the kernel does not count it",
    )
    cores_taken: float | None = recorded(
        "share of the run's CPU time that another load took: what others computed while the run "
        "waited, and the run's part of what was stolen; from 0.1 on the command warned",
        "0 to 1",
        null="as `cores_waited`",
    )
    cpu_capability: str = recorded("vector instructions that PyTorch uses, such as `AVX2`")
    compiler: str | None = recorded(
        "version of the compiler of the CPU kernels",
        null="without one; of records before 2026-11-26",
    )
    instructions: list[str] | None = recorded(
        "instructions that the CPU kernels were compiled for (`MAGICDEC_MARCH`, by default those "
        "of this CPU), by the compiler's names",
        null="as `compiler`",
    )
    kernels: dict[str, str] | None = recorded(
        "CPU kernels that the leading rank had loaded, by the name of their source and what they "
        "were compiled for: the first 12 digits of the SHA-256 of their machine code",
        null="of records before 2026-11-28",
    )
    gpu: str | None = recorded("name of the leading rank's GPU", null="on CPU")
    flash_attn: list[str] | None = recorded(
        "installed versions of flash-attn; several can stand side by side", null="on CPU"
    )
    gpu_sm_mhz: list[int] | None = recorded(
        "lowest and highest SM clock of that GPU among the readings after each measured pass",
        "MHz",
        null=GPU_NULL,
    )
    gpu_most_sm_mhz: int | None = recorded(
        "highest clock that the GPU supports", "MHz", null="as `gpu_sm_mhz`"
    )
    gpu_slowed_by: list[str] | None = recorded(
        "reasons, with the names that NVML uses, why the clock was reduced at any of these "
        "readings; empty if there was none",
        null="as `gpu_sm_mhz`",
    )
    world_size: int = recorded("number of ranks that were launched")
    threads: int = recorded("CPU threads of the leading rank, as PyTorch reports them")
    read_bandwidth_bytes_per_s: float | None = recorded(
        "bytes a second that all ranks together read from memory: the best of seven measurements "
        "before the first pass, and in `run` of seven more after the last one",
        "bytes/s",
        null="if `failed`; where no system of the command counts what its steps read",
    )


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(RecordPart):
    """The planned and the measured memory, summed over all ranks."""

    weights_bytes: int = recorded("planned: the target's weights", "bytes")
    kv_bytes: int = recorded("planned: the target's KV cache", "bytes")
    draft_weights_bytes: int = recorded(
        "planned: a standalone draft's weights; 0 if there is none", "bytes"
    )
    draft_kv_bytes: int = recorded(
        "planned: a standalone draft's KV cache, and the draft KV or attention that a KV "
        "policy keeps",
        "bytes",
    )
    working_bytes: int = recorded(
        "planned: the largest amount of temporary memory in addition to these; an estimate", "bytes"
    )
    total_bytes: int = recorded("the sum of the above", "bytes")
    free_bytes: int | None = recorded(
        "free memory when the plan was made: of the leading rank's host, on CUDA of its GPU",
        "bytes",
        null="if unknown",
    )
    process_bytes: int | None = recorded(
        "memory in use before anything was loaded: Python and its libraries; on CUDA allocated "
        "device memory",
        "bytes",
        null="if `mismatch` or `failed`; in a study, where earlier runs have left models in memory",
    )
    peak_bytes: int | None = recorded(
        "largest memory use of each rank from then to the end of the last pass, summed over ranks "
        "and counted like `peak_memory_bytes`",
        "bytes",
        null="if `mismatch` or `failed`",
    )
