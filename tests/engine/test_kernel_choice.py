"""Choice of the kernels that compute 16-bit products: the engine's owner makes it once, and it is
kept."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from platform import machine
from typing import Any

import pytest

import quire
from quire.base.errors import ConfigError
from quire.base.platform import Platform, detect_platform
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.engine import kernel_choice
from quire.engine.build import build_engine
from quire.engine.kernel_choice import KernelChoices, choose_kernels
from quire.engine.supervision.host import EngineHost
from quire.entrypoints.bench import diagnosis
from quire.entrypoints.cli.main import main
from quire.ops import ALL_OPS
from quire.ops.compile import Isa
from quire.ops.kernel_timing import Product, Seconds, kernel_families
from quire.ops.native import binding
from quire.protocol.status import EngineState
from tests.config.specs import make_gpu_platform, make_platform
from tests.engine.process_harness import (
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_begun,
    until_state,
)
from tests.processors import PROCESSORS, on_each_processor, pretend_processor

FAMILIES = ("avx512_bf16", "avx512_vnni", "avx2")
FLAGS = {"linear_isa": "avx512_bf16", "attention_isa": "avx512_bf16"}
VNNI = {"linear_isa": "avx512_vnni", "attention_isa": "avx512_vnni"}
PLATFORM = make_platform(num_cores=4, features=("avx512f", "avx2"))


class Alternating:
    """A measurement that finds another family the fastest each time that an engine starts."""

    def __init__(self) -> None:
        self.asked: list[tuple[Product, tuple[str, ...], int]] = []

    def __call__(
        self, product: Product, families: Sequence[str], num_threads: int, platform: Platform
    ) -> Seconds:
        del platform
        turn = sum(earlier == product for earlier, _, _ in self.asked)
        self.asked.append((product, tuple(families), num_threads))
        winner = families[turn % len(families)]
        return {isa: (1.0, 1.0) if isa == winner else (2.0, 2.0) for isa in families}


def measured(seconds: Seconds | None) -> Any:
    return lambda *_: seconds


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("QUIRE_CPU_ISA", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "quire"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which three kinds of kernels run."""
    monkeypatch.setattr(kernel_choice, "kernel_families", lambda *_: FAMILIES)


def chosen(choices: KernelChoices) -> dict[str, str | None]:
    settings = choices.settings
    return {"linear_isa": settings.linear_isa, "attention_isa": settings.attention_isa}


@pytest.mark.parametrize(
    ("times", "isa"),
    [
        ({"avx512_bf16": (1, 1), "avx512_vnni": (1, 1), "avx2": (1, 1)}, "avx512_bf16"),
        # A Xeon with AVX512_BF16 and without AMX: 187 and 319 tokens/s of prefill.
        ({"avx512_bf16": (1.0, 1.7), "avx512_vnni": (1.0, 1), "avx2": (1, 1.9)}, "avx512_vnni"),
        ({"avx512_bf16": (1.7, 1.0), "avx512_vnni": (1, 1.05), "avx2": (2, 2)}, "avx512_vnni"),
        # One number of rows gains and the other loses.
        ({"avx512_bf16": (1.0, 9.0), "avx512_vnni": (1.06, 1), "avx2": (9, 9)}, "avx512_bf16"),
        ({"avx512_bf16": (1.2, 1.2), "avx512_vnni": (1, 1), "avx2": (1, 1)}, "avx512_bf16"),
        # The best of several that are much faster.
        ({"avx512_bf16": (2, 2), "avx512_vnni": (1.5, 1), "avx2": (1, 1)}, "avx2"),
    ],
)
@pytest.mark.usefixtures("families")
def test_others_are_taken_if_much_faster_and_never_slower(
    times: dict[str, tuple[float, float]], isa: str
) -> None:
    choices = choose_kernels(EngineSettings(), PLATFORM, measured(times))
    assert chosen(choices) == {"linear_isa": isa, "attention_isa": isa}
    for decision in choices.decisions:
        assert "measured" in decision.reason
        assert ("by processor flags" in decision.reason) == (isa == FAMILIES[0])


@pytest.mark.usefixtures("families")
def test_a_measurement_is_kept_under_all_that_it_depends_on(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a second start may choose otherwise, or a measurement serves another machine,
    number of threads, kind of cache or version."""
    measure = Alternating()
    settings, others = EngineSettings(), make_platform(num_cores=4, features=("avx2",))
    assert chosen(choose_kernels(settings, PLATFORM, measure)) == FLAGS
    assert [product for product, _, _ in measure.asked] == ["linear", "attention"]
    assert chosen(choose_kernels(settings, PLATFORM, measure)) == FLAGS
    assert len(measure.asked) == len(list(own_cache.iterdir())) == 2
    choose_kernels(EngineSettings(kv_cache_dtype="int8"), PLATFORM, measure)
    assert [product for product, _, _ in measure.asked[2:]] == ["int8_attention"]
    assert chosen(choose_kernels(EngineSettings(num_threads=1), PLATFORM, measure)) == VNNI
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_kernels(settings, PLATFORM, measure)
    assert [threads for _, _, threads in measure.asked] == [4, 4, 4, 1, 1, 3, 3]
    monkeypatch.delenv("OMP_NUM_THREADS")
    choose_kernels(settings, others, measure)
    monkeypatch.setattr(quire, "__version__", "9.9")
    choose_kernels(settings, PLATFORM, measure)
    assert len(measure.asked) == 11


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"environment": ENVIRONMENT, "seconds": {"avx2": [1, 1]}}',
        '{"environment": ENVIRONMENT, "seconds": 5}',
        '{"environment": ENVIRONMENT, "seconds": {"avx512_bf16": [1, 0], "avx512_vnni": [1, 1],'
        ' "avx2": [1, 1]}}',
        '{"environment": {}, "seconds": {}}',
    ],
)
def test_a_file_that_cannot_be_read_is_written_anew(own_cache: Path, text: str) -> None:
    """Turns red when a broken file stops a start, or is believed."""
    measure = Alternating()
    choose_kernels(EngineSettings(), PLATFORM, measure)
    for path in own_cache.iterdir():
        environment = json.loads(path.read_text())["environment"]
        path.write_text(text.replace("ENVIRONMENT", json.dumps(environment)))
    for _ in range(2):
        assert chosen(choose_kernels(EngineSettings(), PLATFORM, measure)) == VNNI
    assert len(measure.asked) == 4
    assert len(list(own_cache.iterdir())) == 2


@pytest.mark.usefixtures("families")
def test_engines_that_start_at_once_agree(own_cache: Path) -> None:
    """Turns red when the last of two that measured at the same time has other kernels than the
    first."""
    inner, outer = Alternating(), Alternating()

    def measure_beside_another(*arguments: Any) -> Seconds:
        outer(*arguments)
        if not own_cache.exists() or len(list(own_cache.iterdir())) < 2:
            choose_kernels(EngineSettings(), PLATFORM, inner)
        return outer(*arguments)  # would be avx512_vnni

    assert chosen(choose_kernels(EngineSettings(), PLATFORM, measure_beside_another)) == FLAGS
    assert len(inner.asked) == 2


@pytest.mark.usefixtures("families")
def test_a_busy_machine_keeps_to_flags_and_keeps_nothing(own_cache: Path) -> None:
    choices = choose_kernels(EngineSettings(), PLATFORM, measured(None))
    assert chosen(choices) == FLAGS
    assert "too busy" in choices.decisions[0].reason
    assert not own_cache.exists()


def test_nothing_is_measured_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a start pays for a measurement that changes nothing."""
    measure = Alternating()
    both = EngineSettings(**VNNI)
    monkeypatch.setattr(kernel_choice, "native_unavailable", lambda *_: None)
    monkeypatch.setattr(kernel_choice, "kernel_families", lambda *_: FAMILIES)
    assert chosen(choose_kernels(both, PLATFORM, measure)) == VNNI
    gpu = make_gpu_platform()
    nothing = dict.fromkeys(VNNI)
    assert chosen(choose_kernels(EngineSettings(), gpu, measure)) == nothing
    assert chosen(choose_kernels(EngineSettings(device="cuda"), PLATFORM, measure)) == nothing
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    assert chosen(choose_kernels(EngineSettings(), PLATFORM, measure)) == nothing
    monkeypatch.delenv("QUIRE_CPU_ISA")
    for found, isa in ((("avx2",), "avx2"), ((), None)):
        monkeypatch.setattr(kernel_choice, "kernel_families", lambda *_, found=found: found)
        assert chosen(choose_kernels(EngineSettings(), PLATFORM, measure)) == dict.fromkeys(
            VNNI, isa
        )
    assert measure.asked == []
    monkeypatch.setattr(kernel_choice, "kernel_families", lambda *_: FAMILIES)
    choose_kernels(EngineSettings(attention_backend="reference"), PLATFORM, measure)
    choose_kernels(EngineSettings(device="cpu", linear_isa="avx2"), gpu, measure)
    assert [product for product, _, _ in measure.asked] == ["linear", "attention"]


def test_kernels_that_cannot_run_here_are_refused() -> None:
    """Turns red when the setting is followed into an illegal instruction, or in silence not."""
    bare = make_platform(features=())
    for name in VNNI:
        with pytest.raises(ConfigError, match=rf"{name} cannot be 'avx2' here: .*lacks avx2"):
            choose_kernels(EngineSettings(**{name: "avx2"}), bare)


def test_no_kernel_is_timed_with_threads_that_are_refused(families: None) -> None:
    """Turns red when so many threads are started before anybody counts them."""
    measure = Alternating()
    with pytest.raises(ConfigError, match=r"num_threads=100000 is far more than .* Give 4, and"):
        choose_kernels(EngineSettings(num_threads=100_000), PLATFORM, measure)
    assert measure.asked == []


# --- engines -------------------------------------------------------------------------------------

REAL = detect_platform().cpu
BEST = [name for name, flags in PROCESSORS.items() if REAL.features >= flags][-1:]


@pytest.fixture
def pretended(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with these flags, on which products have kernels to choose between."""
    pretend_processor(processor, REAL, monkeypatch)
    if len(kernel_families("linear", detect_platform())) < 2:
        pytest.skip("one kind of kernels runs there")


SETTINGS = {
    "model": str(bundled_model_path()),
    "dtype": "bfloat16",
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_threads": 2,
    "quiet": True,
}
KINDS = ({"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "seed": 7, "logprobs": 2})
PROMPTS = [[5, 17, 301, 42, 8] * 4, [9, 11, 200] * 5]
LENGTH = 24


async def _streams(host: EngineHost) -> tuple[list[asyncio.Task[Collected]], list[Collected]]:
    founds = [Collected() for _ in KINDS]
    tasks = [
        asyncio.ensure_future(
            collect(await ask(host.client, prompt, max_tokens=LENGTH, **kind), found)
        )
        for prompt, kind, found in zip(PROMPTS, KINDS, founds, strict=True)
    ]
    return tasks, founds


def _bits(found: Collected) -> list[Any]:
    entries = [[(e.token_id, e.logprob) for e in row] for row in found.logprobs.values()]
    return [found.tokens, entries]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("processor", "cache"),
    [*((each, "read-only") for each in PROCESSORS), *((each, "kept") for each in BEST)],
)
def test_killed_streams_continue_to_the_bit_whatever_the_next_measurement_finds(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the core that replaces a killed one measures anew and rounds otherwise."""
    if cache == "read-only":  # no folder can be made below a file, by root neither
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measure = Alternating()
    runs: list[tuple[str, list[Any]]] = []

    async def work() -> None:
        for number in range(2):
            async with hosted(settings=SETTINGS, measure=measure, max_replays=5) as host:
                kernels = host.client.status.capacity.description
                tasks, _ = await _streams(host)
                uncut = [_bits(await task) for task in tasks]
                runs.append((kernels, uncut))
                if cache == "kept" and number == 0:
                    continue
                tasks, founds = await _streams(host)
                await until_begun(founds, 5)
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(host.client, EngineState.RESTARTING)
                assert [_bits(await task) for task in tasks] == uncut
                await until_state(host.client, EngineState.READY)
                assert host.client.status.capacity.description == kernels

    run(work())
    is_kept = cache == "kept"
    assert len(measure.asked) == (2 if is_kept else 4)
    assert (runs[0] == runs[1]) == is_kept
    # Each product has candidates of its own: a processor may know more of one than of the other.
    candidates = {product: families for product, families, _ in measure.asked[:2]}
    linear, attention = (
        candidates[product][0 if is_kept else 1] for product in ("linear", "attention")
    )
    assert products_by(linear).search(runs[1][0]) or is_kept
    assert f"attention: cpu_{attention} " in runs[1][0]


def products_by(family: str) -> re.Pattern[str]:
    """Find the products among the operations that an engine names, with those beside them."""
    return re.compile(rf"\blinear(, \w+)* by cpu_{family}\b")


@pytest.mark.usefixtures("pretended")
@on_each_processor
def test_an_engine_in_this_process_chooses_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red when `LLM` leaves the choice to flags, or does not say what it chose."""
    measure = Alternating()
    settings = EngineSettings(**{**SETTINGS, "quiet": False})
    choose_kernels(settings, detect_platform(), measured(None))
    families = kernel_families("linear", detect_platform())
    measure("linear", families, 0, detect_platform())
    engine = build_engine(settings, measure)
    engine.client.shutdown()
    said = capsys.readouterr().err
    assert engine.resolved.settings.linear_isa == families[1]
    assert products_by(families[1]).search(said)
    assert "measured: 2.00 and 2.00 times as fast as" in said


def test_plan_says_that_kernels_were_not_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a plan follows the processor's flags to kernels that are not there."""
    missing = "the kernels were not compiled at install; run python -m quire.ops.compile"
    monkeypatch.setattr(binding, "_open", lambda _: missing)
    monkeypatch.setattr(binding, "_isa", lambda _: Isa("any", (machine(),), (), ()))
    assert main(["plan", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    isas = [line.split(maxsplit=2) for line in lines if "_isa " in line]
    assert isas == [[name, "none", f"plain torch: {missing}"] for name in VNNI]
    assert not any("AMX is fast" in line for line in lines)


@pytest.mark.usefixtures("pretended")
@on_each_processor
def test_plan_and_doctor_say_which_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when an operator cannot see what an engine would choose."""
    platform = detect_platform()
    best, other = kernel_families("linear", platform)[:2]
    times = dict.fromkeys(kernel_families("linear", platform), (2.0, 2.0))
    monkeypatch.setattr(diagnosis, "ALL_OPS", {"linear": replace(ALL_OPS["linear"], providers=())})
    choose_kernels(
        EngineSettings(attention_backend="reference"),
        platform,
        measured({**times, other: (1.0, 1.0)}),
    )
    assert main(["plan"]) == 0
    assert f"{other}  measured: 2.00 and 2.00 times as fast as {best}" in capsys.readouterr().out
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["products"][0]["value"] == other
    assert report["ops"][0]["chosen"] == f"cpu_{other}"
    main(["doctor"])
    assert f"linear_isa    {other}: measured: 2.00 and 2.00 times" in capsys.readouterr().out
    monkeypatch.setenv("QUIRE_CPU_ISA", best)
    assert main(["plan"]) == 0
    assert f"{best}  by QUIRE_CPU_ISA" in capsys.readouterr().out
