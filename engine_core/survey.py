"""What this machine has to offer the kernels, looked at without building or loading any. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels.cpu_build import find_library
from kernels.cpu_compiler import BuildError, Host, find_compiler
from kernels.cpu_threads import ThreadLimits, read_thread_limits

# As /proc/cpuinfo spells them: what the kernels' instruction sets are made of.
_FLAGS_THAT_MATTER = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True)
class MachineSurvey:
    """What was found.

    Attributes:
        threads: What bounds them.
        system: Such as ``Linux on x86_64``.
        is_supported: The C++ kernels are written for it.
        cpu_flags: Those of the CPU's that matter to them.
        compiler: The C++ compiler's name and version, or empty.
        compiler_problem: Why there is none, as the end of a sentence.
        library: The kernels that are ready to load, or None.
        library_problem: Why there are none, as the end of a sentence.
    """

    threads: ThreadLimits
    system: str
    is_supported: bool
    cpu_flags: tuple[str, ...]
    compiler: str
    compiler_problem: str
    library: Path | None
    library_problem: str


def survey_machine(cache_dir: Path | None = None, host: Host | None = None) -> MachineSurvey:
    """Look at this machine.

    Args:
        cache_dir: Where kernels are built; None = the user's cache.
        host: What to look at; None = this machine.
    """
    host = Host.this() if host is None else host
    compiler, problem = "", ""
    try:
        compiler = find_compiler(host).name
    except BuildError as error:
        problem = str(error)
    found = find_library(cache_dir=cache_dir, host=host, may_build=False)
    flags = set(host.cpu_flags.split())
    return MachineSurvey(
        threads=read_thread_limits(),
        system=f"{host.system} on {host.machine}",
        is_supported=host.is_supported,
        cpu_flags=tuple(flag for flag in _FLAGS_THAT_MATTER if flag in flags),
        compiler=compiler,
        compiler_problem=problem,
        library=found.path,
        library_problem=found.reason,
    )
