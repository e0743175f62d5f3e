"""Build hook: compile the C++ kernels at install. Without a compiler the install still succeeds,
as a pure Python package that computes with plain torch."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD_FILE = Path("src/quire/ops/compile/build.py")
_LIBRARY_FOLDER = "src/quire/ops/_lib"


class KernelBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to the wheel, which then is for this platform only."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the package's own folder, so that an editable install finds them too."""
        if self.target_name != "wheel":
            return
        build = _load(Path(self.root) / _BUILD_FILE)
        try:
            folder = Path(self.root) / _LIBRARY_FOLDER
            libraries = build.compile_kernels(
                folder, keep_current=True, report=self.app.display_info
            )
        except build.CompileError as error:
            self.app.display_warning(
                f"quire is installed without its C++ kernels ({error}); it computes with plain "
                "torch, several times slower. Install a C++ compiler and run: "
                "python -m quire.ops.compile"
            )
            return
        if version == "editable":
            return  # imported from the source tree, where the libraries already are
        build_data["pure_python"] = False
        # The libraries are loaded by ctypes: they are bound to the platform, not to a Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        for library in libraries:
            inside = library.relative_to(Path(self.root) / "src")
            build_data["force_include"][str(library)] = str(inside)


def _load(path: Path) -> ModuleType:
    """Return the module at `path`, loaded without its package, which needs packages that are not
    installed yet."""
    spec = importlib.util.spec_from_file_location("quire_kernel_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"The build hook cannot read {path}; the source tree is incomplete.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
