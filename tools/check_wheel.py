"""Build a wheel, install it in an environment of its own, and let it serve one chat answer.

    python -m tools.check_wheel

The wheel is built in isolation from a copy of the tracked files that the Dockerfile copies. These
files are enough, and nothing else of the checkout can leak in but compiled kernels, of which the
build keeps those that are of these sources. It serves as the image does, by `quire serve`. The
dependencies are those of the interpreter that runs this; quire itself is the wheel's. Costs one
start of a server, and a compilation where the checkout has none. Exit status 1 with the
reason if something is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
PAGE = "quire/server/ui"
UI = ROOT / "src" / PAGE
FILES = (
    *("quire/py.typed", "quire/bundled/MODEL_CARD.md", "quire/entrypoints/cli/main.py"),
    *(f"{PAGE}/{path.relative_to(UI)}" for path in sorted(UI.rglob("*.*"))),
)
KERNELS = "src/quire/ops/_lib"
START_S = 180.0
QUESTION = {"messages": [{"role": "user", "content": "What is your name?"}], "temperature": 0}


def copied_into_the_image() -> tuple[str, ...]:
    """Return the files and folders of the checkout from which the Dockerfile builds."""
    steps = re.findall(r"^COPY (?!--from=)(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return tuple(source for step in steps for source in step.split()[:-1])


def copy_of_tracked_files(folder: Path) -> Path:
    """Return a folder with the files of the image that git knows or does not ignore, as they are
    now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    copy, copied = folder / "source", copied_into_the_image()
    for name in filter(None, names):
        if (ROOT / name).is_file() and (name in copied or name.split("/")[0] in copied):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    if (ROOT / KERNELS).is_dir():
        shutil.copytree(ROOT / KERNELS, copy / KERNELS)
    return copy


def build(source: Path, folder: Path) -> Path:
    """Return the wheel of `source`, built by pip in isolation."""
    make_environment(folder / "builder", with_dependencies=False)
    pip = [folder / "builder" / "bin" / "python", "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, source], check=True)
    (wheel,) = folder.glob("quire-*.whl")
    return wheel


def make_environment(folder: Path, *, with_dependencies: bool) -> None:
    """Make a virtual environment; its dependencies are those of this interpreter, if asked for."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if with_dependencies:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = folder / "lib" / version / "site-packages"
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    absent = [name for name in FILES if name not in names]
    if absent:
        raise SystemExit(f"{wheel.name} lacks {', '.join(absent)}")
    foreign = sorted(name for name in names if not name.startswith("quire"))
    if foreign:
        raise SystemExit(f"{wheel.name} has files beside quire: {foreign[:5]}")


def answer_of(python: Path, folder: Path) -> str:
    """Start `quire serve` with the bundled model, ask one question, and return the answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python.parent / "quire", "serve", "--port", str(port)]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, cwd=folder, env=environment) as server:
        try:
            wait_until_ready(url, server)
            request = Request(
                f"{url}/v1/chat/completions",
                data=json.dumps(QUESTION).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        finally:
            server.terminate()


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"quire serve ended with {server.returncode}")
        try:
            urlopen(f"{url}/readyz", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"quire serve was not ready after {START_S:.0f} s")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as name:
        folder = Path(name)
        wheel = build(copy_of_tracked_files(folder), folder)
        check_contents(wheel)
        make_environment(folder / "clean", with_dependencies=True)
        python = folder / "clean" / "bin" / "python"
        install = [python, "-m", "pip", "--quiet", "install", "--no-deps", wheel]
        subprocess.run(install, check=True)
        version = subprocess.run(
            [python.parent / "quire", "--version"],
            cwd=folder, check=True, capture_output=True, text=True,
            env={key: text for key, text in os.environ.items() if key != "PYTHONPATH"},
        ).stdout.split()[-1]  # fmt: skip
        if f"quire-{version}-" not in wheel.name:
            raise SystemExit(f"{wheel.name} calls itself {version}")
        print(f"{wheel.name} answers: {answer_of(python, folder)!r}")


if __name__ == "__main__":
    main()
