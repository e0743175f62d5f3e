"""Bodies, lists of names and docs follow from the declarations of sampling parameters."""

from __future__ import annotations

import asyncio
from typing import Any, get_type_hints

import msgspec
import pytest
from tools.parameters_reference import REFERENCE, render_reference

from quire.base.errors import RequestError
from quire.protocol.parameters.declaration import Declared
from quire.protocol.parameters.foreign import FOREIGN_PARAMS
from quire.protocol.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from quire.server.http.body import BodyDecoder
from quire.server.openai.sampling import completion_params
from quire.server.requests.bodies import (
    ChatExtras,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ParametersOfOpenAI,
)
from quire.server.requests.errors import RefusedError
from quire.server.requests.foreign import IGNORED_FIELDS, NOT_OFFERED, OTHER_NAMES
from quire.server.requests.limits import Limits
from quire.server.requests.messages_bodies import MessagesRequest
from quire.server.requests.responses_bodies import ResponsesRequest

IN_BODIES = [each for each in SAMPLING_PARAMETERS.values() if each.facts.apis != "python"]


def test_the_page_of_parameters_is_up_to_date() -> None:
    assert REFERENCE.read_text() == render_reference(), "run python -m tools.parameters_reference"


def test_fields_that_the_server_reads_by_name_have_the_declared_types() -> None:
    """Fault: a body's field is written with another type than its parameter has."""
    made, written = get_type_hints(ParametersOfOpenAI), get_type_hints(GenerationRequest)
    assert {name: written[name] for name in made} == made
    assert GenerationRequest.__annotations__.keys() & made.keys()


@pytest.mark.parametrize("each", IN_BODIES, ids=lambda each: each.name)
def test_a_parameter_is_in_the_bodies_of_its_apis(each: Declared) -> None:
    everywhere = each.facts.apis == "all"
    for kind in (CompletionRequest, ChatRequest):
        assert each.name in kind.__struct_fields__
    for kind in (MessagesRequest, ResponsesRequest, ChatExtras):
        assert not everywhere or each.name in kind.__struct_fields__


NUMBERS = [each for each in IN_BODIES if each.kind in (int, float)]


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.name)
def test_a_number_passes_from_a_body_and_is_checked(each: Declared) -> None:
    """Fault: a declared parameter is dropped on its way, or has no bounds."""

    def params(value: Any) -> SamplingParams:
        body = msgspec.convert({"prompt": "x", each.name: value}, CompletionRequest)
        return completion_params(body, {}, Limits(max_n=128, max_logprobs=1024))

    value = each.facts.low + 1
    if each.name != "truncate_prompt_tokens":  # it is an argument of rendering
        assert getattr(params(value), each.name) == value
        with pytest.raises((RequestError, RefusedError), match=each.name):
            params(each.facts.low - 1)


def test_a_body_is_told_why_a_name_of_another_engine_has_no_counterpart() -> None:
    decoder = BodyDecoder(CompletionRequest, Limits())
    for value in ("false", "null"):
        body = asyncio.run(decoder.decode(b'{"prompt": "x", "flat_logprobs": %s}' % value.encode()))
        assert body.prompt == "x"
    with pytest.raises(RefusedError, match="one dict for each token"):
        asyncio.run(decoder.decode(b'{"prompt": "x", "flat_logprobs": true}'))


def test_names_of_other_engines_have_one_home() -> None:
    """Fault: a name is refused in two places with two reasons."""
    names = [*NOT_OFFERED, *OTHER_NAMES, *IGNORED_FIELDS]
    own = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert not (FOREIGN_PARAMS.keys() & set(names)) - own
    others = [name for each in SAMPLING_PARAMETERS.values() for name in each.facts.others]
    assert len({*others, *SAMPLING_PARAMETERS}) == len(others) + len(SAMPLING_PARAMETERS)
    with pytest.raises(RequestError, match="Did you mean max_tokens"):
        SamplingParams(n_predict=5)  # type: ignore[call-arg]
