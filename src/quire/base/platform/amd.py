"""AMD's GPUs, by what the kernel's driver writes of them (KFD topology and DRM, under /sys)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.base.platform.gpu_facts import GpuFacts, GpuSearch

__all__ = ["search_gpus"]

_SYS = Path("/sys")


def search_gpus(visible: str | None, system: Path = _SYS) -> GpuSearch:
    """Return the GPUs that a list of numbers such as "1,0" leaves; all of them if it is None.

    system: folder of the files of the driver.
    """
    nodes = (system / "class/kfd/kfd/topology/nodes").glob("*/properties")
    ordered = sorted(nodes, key=lambda path: int(path.parent.name))
    present = [gpu for path in ordered if (gpu := _facts(system, path)) is not None]
    chosen = present if visible is None else _named(visible, present)
    gpus = tuple(replace(gpu, num_visible=len(chosen)) for gpu in chosen)
    return GpuSearch(gpus, num_present=len(present))


def _named(visible: str, present: list[GpuFacts]) -> list[GpuFacts]:
    """Return the GPUs that the variable names. As in CUDA, the first invalid number ends the
    list."""
    chosen: list[GpuFacts] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name.isdecimal() or int(name) >= len(present):
            break
        chosen.append(present[int(name)])
    return chosen


def _facts(system: Path, properties: Path) -> GpuFacts | None:
    """None of a node that is a processor."""
    found = dict(line.split(maxsplit=1) for line in _text(properties).splitlines() if " " in line)
    target = int(found.get("gfx_target_version", 0))
    if target == 0:
        return None
    card = system / f"class/drm/renderD{found.get('drm_render_minor', '')}/device"
    total, used = (_number(card / f"mem_info_vram_{name}") for name in ("total", "used"))
    architecture = _architecture(target)
    return GpuFacts(
        vendor="amd",
        name=_text(card / "product_name") or f"AMD {architecture}",
        architecture=architecture,
        capability=None,
        memory_bytes=total,
        free_bytes=max(total - used, 0),
        driver=_text(system / "module/amdgpu/version"),
        driver_cuda=None,
    )


def _architecture(target: int) -> str:
    """ "gfx942" of 90402, "gfx90a" of 90010: major, minor and stepping, the last two in hex."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
