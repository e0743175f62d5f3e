"""The manifests of examples/kubernetes start a server that takes what they ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.entrypoints.cli import serve
from quire.entrypoints.cli.flags.engine import read_settings
from quire.entrypoints.cli.parser import CommandParser

FILE = Path(__file__).parents[2] / "examples" / "kubernetes" / "server.yaml"
ROUTES = Path(__file__).parents[2] / "docs" / "operations.md"


def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


def container() -> dict[str, Any]:
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_the_server_takes_its_flags() -> None:
    """Turns red when a flag is renamed and the pod ends at once, again and again."""
    command, *arguments = container()["args"]
    assert command == "serve"
    parser = CommandParser(prog="quire serve")
    serve.add_arguments(parser)
    options = parser.parse_args(arguments)
    assert read_settings(options).tensor_parallel_size == 2
    assert f"--port={container()['ports'][0]['containerPort']}" in arguments


def test_probes_are_routes_of_the_server() -> None:
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        path = container()[probe]["httpGet"]["path"]
        assert f"`{path}`" in ROUTES.read_text(encoding="utf-8")


def test_streams_have_time_to_end() -> None:
    """Turns red when the pod is killed before the server gives up by itself."""
    (flag,) = (each for each in container()["args"] if each.startswith("--shutdown-timeout="))
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > int(flag.partition("=")[2])


def test_the_service_finds_the_pods() -> None:
    labels = documents()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents()["Service"]["spec"]["selector"].items() <= labels.items()


def test_the_manifests_are_what_kubernetes_publishes() -> None:
    """Turns red when a field is misspelled, which a server would ignore. The JSON schemas of a
    release come with the package kubernetes-validate, if it is installed."""
    validate: Any = pytest.importorskip("kubernetes_validate")
    for document in documents().values():
        validate.validate(document, validate.latest_version(), strict=True)
