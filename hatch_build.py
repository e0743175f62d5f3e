"""Build hook: compile the C++ kernels at install. Kernels that cannot be compiled do not stop it;
without any, the package is pure Python and computes with plain torch."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD_FILE = "src/quire/ops/compile/build.py"
_PLATFORM_FILES = ("cgroups", "cpu")  # that it imports, each after those before it
_LIBRARY_FOLDER = "src/quire/ops/_lib"


class KernelBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to the wheel, which then is for this platform only."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the package's own folder, so that an editable install finds them too."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        for name in _PLATFORM_FILES:
            _load(f"quire.base.platform.{name}", root / f"src/quire/base/platform/{name}.py")
        build = _load("quire_kernel_build", root / _BUILD_FILE)
        try:
            libraries = build.compile_kernels(
                root / _LIBRARY_FOLDER, keep_current=True, report=self.app.display_info
            )
        except build.CompileError as error:
            libraries = error.libraries
            self.app.display_warning(_warning(str(error), has_some=bool(libraries)))
        if not libraries or version == "editable":
            return  # an editable one is imported from the source tree, where the libraries are
        build_data["pure_python"] = False
        # The libraries are loaded by ctypes: they are bound to the platform, not to a Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        for library in libraries:
            inside = library.relative_to(root / "src")
            build_data["force_include"][str(library)] = str(inside)


def _warning(reason: str, *, has_some: bool) -> str:
    """Return what an installation without all kernels means, and the way out."""
    lack = (
        "some of its C++ kernels ({}); processors that have these sets compute with narrower ones"
        if has_some
        else "its C++ kernels ({}); plain torch computes, several times slower"
    )
    return f"quire is installed without {lack.format(reason)}. Later: python -m quire.ops.compile"


def _load(name: str, path: Path) -> ModuleType:
    """Return the module at `path`, loaded without its package, which needs packages that are not
    installed yet."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"The build hook cannot read {path}; the source tree is incomplete.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and imports look it up by name
    spec.loader.exec_module(module)
    return module
