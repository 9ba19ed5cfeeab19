"""Builds the C++ kernels into the package, where there is a compiler. All else is pyproject.toml's."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent))


class BuildWithKernels(build_py):
    """Puts the library beside its sources. Without it the first start builds it, or torch computes."""

    def run(self) -> None:
        super().run()
        # An editable install's sources may change: `make setup` and the first start build from those that are there.
        if self.editable_mode:
            return
        from kernels.cpu_build import INSTALLED, SOURCES, install_library

        reason = install_library(Path(self.build_lib) / "kernels" / "csrc" / INSTALLED.relative_to(SOURCES))
        if reason:
            print(f"The CPU kernels are not built now: {reason}")


class BinaryDistribution(Distribution):
    """A wheel that holds the library is for this kind of machine alone."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=BinaryDistribution)
