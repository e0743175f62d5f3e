"""The package's version, its marker for type checkers, its Dockerfile, and CI's check of the wheel.

`tools/check_wheel.py` builds a wheel from what the Dockerfile copies, as its steps do, and serves
it. It compiles all kernels, so CI runs it once and these tests only look at files.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from tools.check_wheel import copied_into_the_image

import quire

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def steps(instruction: str) -> list[str]:
    """Arguments of each instruction of this name, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return re.findall(rf"^{instruction} (.+)$", joined, re.MULTILINE)


def test_the_version_has_one_place():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    place = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{quire.__version__}"' in place.read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == quire.__version__


def test_type_checkers_read_the_package():
    assert (ROOT / "src" / "quire" / "py.typed").is_file()


def test_the_dockerfile_needs_debian_and_pypi_alone():
    """Turns red when an image, an index or an address comes in from elsewhere."""
    assert all(re.match(r"debian:\w+-slim( AS \w+)?$", image) for image in steps("FROM"))
    assert not re.search(r"https?://|--index-url|--extra-index-url|ADD ", DOCKERFILE)
    allowed = {"apt-get", "rm", "python3", "/opt/quire/bin/pip", "useradd"}
    commands = [part.split()[0] for step in steps("RUN") for part in step.split("&&")]
    assert set(commands) <= allowed


def test_the_dockerfile_copies_files_that_exist():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for step in steps("COPY"):
        if step.startswith("--from="):
            continue
        sources = step.split()[:-1]
        assert sources and all((ROOT / source).exists() for source in sources)
        assert not set(sources) & set(ignored)


def test_the_wheel_of_ci_is_built_from_what_the_image_gets():
    """Turns red when CI would build from files that an image lacks, or from another list."""
    copied = copied_into_the_image()
    assert {"pyproject.toml", "hatch_build.py", "README.md", "src"} <= set(copied)
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_serves_as_a_user_without_rights():
    assert steps("USER") == ["quire"]
    assert steps("ENTRYPOINT") == ['["quire"]'] and steps("CMD") == ['["serve"]']


def test_ci_checks_the_wheel():
    assert "make --no-print-directory wheel" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "-m tools.check_wheel" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("checks", ["true", "false"])
@pytest.mark.parametrize("tests", ["true", "false"])
def test_checks_beside_tests_fail_a_run_as_tests_do(
    checks: str, tests: str, tmp_path: Path
) -> None:
    """Turns red when one outcome hides the other, or outputs mix."""
    for name, status in (("checks", checks), ("tests", tests)):
        script = tmp_path / name
        script.write_text(f"echo {name} begin\nsleep 0.2\necho {name} end\n{status}\n")
    commands = [f"sh {tmp_path / name}" for name in ("checks", "tests")]
    done = subprocess.run(
        [ROOT / ".ci" / "beside", *commands], capture_output=True, text=True, check=False
    )
    outcomes = {"true": "passed", "false": "FAILED"}
    assert done.stdout.splitlines() == [
        *("tests begin", "tests end", f"Beside it: {commands[0]}", "checks begin", "checks end"),
        *(f"{outcomes[checks]}: {commands[0]}", f"{outcomes[tests]}: {commands[1]}"),
    ]
    assert (done.returncode == 0) == (checks == tests == "true")
