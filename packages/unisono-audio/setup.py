"""The native core of `unisono_audio`: built where a C++ compiler is, left out where none is.

Everything else about the package is in pyproject.toml. The kernels are compiled once for each instruction set and
chosen at run time, so one wheel serves every CPU of an architecture.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/unisono_audio/native")
# Sums have one order on every CPU: nothing is fused, nothing reassociated.
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-g0"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
KERNELS = {"baseline": ["-DUNISONO_ISA=baseline", "-DUNISONO_LANES=4"]}
if X86:
    KERNELS |= {
        "x86_64_v2": ["-DUNISONO_ISA=x86_64_v2", "-DUNISONO_LANES=4", "-march=x86-64-v2"],
        "x86_64_v3": ["-DUNISONO_ISA=x86_64_v3", "-DUNISONO_LANES=8", "-march=x86-64-v3"],
        "x86_64_v4": ["-DUNISONO_ISA=x86_64_v4", "-DUNISONO_LANES=16", "-march=x86-64-v4", "-mprefer-vector-width=512"],
    }


class BuildNative(build_ext):
    """Compile the kernels several times; where anything is missing, say so and go on without."""

    def build_extension(self, ext: Extension) -> None:
        """Build, or tell why not."""
        try:
            self._build(ext)
        except Exception as error:  # no compiler, no headers, an old one: the NumPy path serves
            if os.environ.get("UNISONO_NATIVE") == "require":
                raise
            print(  # noqa: T201 - what pip shows of a build
                f"unisono: the native audio core was not built ({error}); unisono_audio runs on NumPy", file=sys.stderr
            )

    def copy_extensions_to_source(self) -> None:
        """Copy what was built into the source tree, as an editable install needs it."""
        self.extensions = [
            ext for ext in self.extensions if Path(self.get_ext_fullpath(ext.name)).exists() or self._there(ext)
        ]
        super().copy_extensions_to_source()

    def _there(self, ext: Extension) -> bool:
        return (Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(ext.name))).exists()

    def _build(self, ext: Extension) -> None:
        import nanobind

        compiler, package = self.compiler, Path(nanobind.__file__).parent
        compiler.compiler_so = [flag for flag in compiler.compiler_so if flag not in ("-g", "-O2", "-Wall")]
        include = [*self.include_dirs, str(package / "include"), str(package / "ext/robin_map/include")]
        objects = compiler.compile(
            [str(path) for path in sorted(NATIVE.glob("*.cpp")) if path.name != "kernels.cpp"],
            self.build_temp, include_dirs=include, extra_postargs=[*FLAGS, *(["-DUNISONO_X86"] if X86 else [])],
        )  # fmt: skip
        for name, flags in KERNELS.items():
            objects += compiler.compile(
                [str(NATIVE / "kernels.cpp")], str(Path(self.build_temp) / name), extra_postargs=[*FLAGS, *flags]
            )
        nanobind_flags = [*FLAGS, "-fno-strict-aliasing", "-O2"]
        source = package / "src/nb_combined.cpp"
        objects += compiler.compile([str(source)], self.build_temp, include_dirs=include, extra_postargs=nanobind_flags)
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        compiler.link_shared_object(objects, target, target_lang="c++", extra_postargs=["-pthread"])


setup(ext_modules=[Extension("unisono_audio._native", [])], cmdclass={"build_ext": BuildNative})
