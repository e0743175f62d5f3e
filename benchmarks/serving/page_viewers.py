"""Costs of the page: 64 streams with three viewers, and without any, by turns.

    python -m benchmarks.serving.page_viewers [--seconds 600] [--turns 9] [--output FILE]

`quire serve` runs the bundled model. Each turn has a part without viewers and a part with them, in
changing order, and gives processor seconds of the server's processes for each token. Viewers are
pages in headless Chromium (Playwright), which stay open while others look; after each turn a
collection of garbage shows what their heap keeps. The memory of the server and these heaps are
flat if the last third of the turns has no more than the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line, positive_number
from benchmarks.serving.streamed_load import Part, measure, served, usage_of
from tools.page_pictures import opened_browser, opened_page


@dataclass(frozen=True, slots=True)
class Turn:
    """resident_mib: memory of the server's processes after it. heap_mib: heaps of the viewers."""

    without: Part
    looked: Part
    resident_mib: float
    heap_mib: tuple[float, ...]


def heap_mib(page: Any) -> float:
    """Return the heap of a page after a collection of garbage."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return round(used / 2**20, 2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    part_s = options.seconds / options.turns / 2
    turns: list[Turn] = []
    with served() as (url, pid), opened_browser() as browser:
        pages = [opened_page(browser, (1280, 800), "light") for _ in range(options.viewers)]
        measure(url, pid, options.streams, min(5.0, part_s))  # warms up
        for number in range(options.turns):
            parts: dict[bool, Part] = {}
            heap: tuple[float, ...] = ()
            for is_looked in (number % 2 == 0, number % 2 == 1):
                for page in pages:
                    page.goto(f"{url}/ui#engine" if is_looked else "about:blank")
                    if is_looked:
                        page.wait_for_selector(".legend li")
                parts[is_looked] = measure(url, pid, options.streams, part_s)
                if is_looked:
                    heap = tuple(map(heap_mib, pages))
            turns.append(Turn(parts[False], parts[True], round(usage_of(pid)[1], 1), heap))
            sys.stderr.write(f"turn {number + 1}: {ratio_of(turns[-1]):.3f}\n")
    return result_of(turns, options)


def ratio_of(turn: Turn) -> float:
    """Return processor time per token with viewers, beside that without."""
    return turn.looked.cpu_us_per_token / turn.without.cpu_us_per_token


def result_of(turns: list[Turn], options: argparse.Namespace) -> dict[str, Any]:
    third = max(1, len(turns) // 3)
    heaps = [max(turn.heap_mib, default=0.0) for turn in turns]
    memory = [turn.resident_mib for turn in turns]
    return {
        "command": command_line(),
        "streams": options.streams,
        "viewers": options.viewers,
        "seconds": options.seconds,
        "cpu_ratio_median": round(statistics.median(map(ratio_of, turns)), 4),
        "cpu_us_per_token_without": round(
            statistics.median(turn.without.cpu_us_per_token for turn in turns), 1
        ),
        "heap_growth_mib": round(max(heaps[-third:]) - max(heaps[:-third] or heaps), 2),
        "memory_growth_mib": round(max(memory[-third:]) - max(memory[:-third] or memory), 1),
        "load_average": os.getloadavg(),
        "turns": [{**asdict(turn), "ratio": round(ratio_of(turn), 4)} for turn in turns],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=positive_number, default=600, help="of all turns")
    parser.add_argument("--turns", type=positive_number, default=9)
    parser.add_argument("--streams", type=positive_number, default=64)
    parser.add_argument("--viewers", type=positive_number, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    result = run(options)
    text = json.dumps(result, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
