"""The bar that `LLM.generate` shows."""

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from quire.protocol.outputs import PoolingRequestOutput, RequestOutput

__all__ = ["GenerationProgress"]


class GenerationProgress:
    """Counts finished prompts, with tokens per second beside them; silent where stderr is no
    terminal that could show a bar."""

    def __init__(self, num_prompts: int, *, shown: bool) -> None:
        self._bar: Any = None
        self._num_input = 0
        self._num_output = 0
        has_stream = sys.stderr is not None  # pyright: ignore[reportUnnecessaryComparison]  pythonw
        if shown and num_prompts and has_stream and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)

    def failed(self, count: int) -> None:
        """`count` prompts were refused at once."""
        if self._bar is not None:
            self._bar.update(count)

    def update(self, requests: Iterable[RequestOutput | PoolingRequestOutput]) -> None:
        """Requests that one step changed."""
        if self._bar is None:
            return
        finished = [request for request in requests if request.finished]
        for request in finished:
            self._num_input += len(request.prompt_token_ids)
            if isinstance(request, RequestOutput):
                self._num_output += sum(len(output.token_ids) for output in request.outputs)
        if finished:
            elapsed = max(float(self._bar.format_dict["elapsed"]), 1e-9)
            self._bar.set_postfix_str(
                f"input: {self._num_input / elapsed:.1f} tok/s, "
                f"output: {self._num_output / elapsed:.1f} tok/s",
                refresh=False,
            )
            self._bar.update(len(finished))

    def __enter__(self) -> "GenerationProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
