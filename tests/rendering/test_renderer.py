"""The front door: prompts, conversations and outputs of one model folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError, RequestError
from quire.protocol.sampling_params import SamplingParams
from quire.text.rendering import RenderedPrompt, Renderer, RequestRenderer

from .conftest import gpt2_like, llama2_like, llama3_like, t5_like, write_folder

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi 👋"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-3-like model folder with a chat template."""
    path = write_folder(
        tmp_path_factory.mktemp("model"),
        llama3_like(),
        tokenizer_config={"bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
    )
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    """The renderer of `folder`; the model has some more embeddings than tokens."""
    return Renderer.from_folder(folder, vocab_size=512)


def test_prompt_forms(renderer: Renderer) -> None:
    """Fault: one of the ways to give a prompt is refused, or changes the ids."""
    assert renderer.tokenizer is not None
    ids = renderer.tokenizer.encode("hello")
    assert renderer.render_prompt("hello") == RenderedPrompt(ids, "hello")
    assert renderer.render_prompt({"prompt": "hello"}) == RenderedPrompt(ids, "hello")
    for given in (ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}):
        assert renderer.render_prompt(given) == RenderedPrompt(ids)  # type: ignore[arg-type]
    both = {"prompt": "hello", "prompt_token_ids": ids}
    assert renderer.render_prompt(both) == RenderedPrompt(ids, "hello")
    assert renderer.render_prompt([511]).token_ids == [511]
    assert renderer.render_prompt("hello", add_special_tokens=False).token_ids == ids[1:]
    assert renderer.count("hello") == len(ids)


class BrokenIndex:
    def __index__(self) -> int:
        raise ValueError("no index")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ([1, 2, 512, 3], "512 at index 2 .* 512 tokens"),
        ([1, -1], "-1 at index 1"),
        ([1, 10**30], "at index 1"),
        ([1, True], "index 1 .* True"),
        ([1, 2.0], "index 1 .* 2.0"),
        ([1, "2"], "index 1 .* '2'"),
        ([1, None], "index 1"),
        ({"prompt": 3}, "must be a string"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "model takes text only"),
        ({}, "neither"),
        (None, "Send a string or a list"),
        (3, "list of integers"),
        (b"bytes", "list of integers"),
        ("\ud83d", "lone surrogate"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt.*half of a surrogate pair"),
        (torch.tensor([1.0]), "index 0 .* must be an integer"),
        (torch.ones(2, 2, dtype=torch.long), "index 0 .* must be an integer"),
        ([1, BrokenIndex()], "index 1 .* must be an integer"),
    ],
)
def test_refused_prompts(renderer: Renderer, prompt: Any, words: str) -> None:
    """Fault: a malformed prompt reaches the engine (an id outside the embeddings kills a GPU)."""
    with pytest.raises(RequestError, match=words):
        renderer.render_prompt(prompt)


def test_empty_text(folder: Path, tmp_path: Path) -> None:
    """Fault: a prompt without tokens reaches the engine."""
    plain = Renderer.from_folder(write_folder(tmp_path, gpt2_like()))
    with pytest.raises(RequestError, match="has no tokens"):
        plain.render_prompt("")
    beginning = Renderer.from_folder(folder)  # it adds BOS: a text from nothing
    assert len(beginning.render_prompt("").token_ids) == 1
    with pytest.raises(RequestError, match="has no tokens"):
        beginning.render_prompt("", add_special_tokens=False)


def test_tokenizer_larger_than_the_model(folder: Path) -> None:
    """Fault: text tokenizes to an id that the model has no embedding for."""
    small = Renderer.from_folder(folder, vocab_size=4)
    with pytest.raises(RequestError, match="outside the vocabulary of 4"):
        small.render_prompt("hello")


def test_chat_has_one_bos(renderer: Renderer, folder: Path, transformers: Any) -> None:
    """Fault: BOS twice, once from the template and once from the tokenizer."""
    found = renderer.render_chat(CHAT)
    assert found.token_ids.count(0) == 1
    assert found.text == "<|begin|><|im_start|>user\nHi 👋<|im_end|>\n<|im_start|>assistant\n"
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert found.token_ids == expected


def test_chat_options(renderer: Renderer) -> None:
    """Fault: options do not reach the template, or a request replaces what the engine sets."""
    ended = renderer.render_chat(CHAT, add_generation_prompt=False).text
    assert ended is not None
    assert ended.endswith("<|im_end|>\n")
    open_chat = renderer.render_chat(
        [*CHAT, {"role": "assistant", "content": "Sure"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert open_chat.text is not None
    assert open_chat.text.endswith("assistant\nSure")
    for name in ("messages", "tools", "chat_template", "tokenize", "self", "bos_token"):
        with pytest.raises(RequestError, match=name):
            renderer.render_chat(CHAT, chat_template_kwargs={name: "x"})


@pytest.mark.parametrize("form", ["string", "list", "dict", "json", "jinja", "named"])
def test_sources_of_the_template(form: str, tmp_path: Path) -> None:
    """Fault: a model that keeps its template in another place has none."""
    config: dict[str, Any] = {"bos_token": "<|begin|>"}
    tool_use = "{{ bos_token }}tools"
    if form == "string":
        config["chat_template"] = TEMPLATE
    elif form == "list":
        config["chat_template"] = [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": tool_use},
        ]
    elif form == "dict":
        config["chat_template"] = {"default": TEMPLATE, "tool_use": tool_use}
    elif form in ("jinja", "named"):
        config["chat_template"] = "{{ bos_token }}the file comes first"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8-sig")
    if form == "named":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(tool_use)
    write_folder(tmp_path, llama3_like(), tokenizer_config=config)
    if form == "json":
        text = json.dumps({"chat_template": TEMPLATE})
        (tmp_path / "chat_template.json").write_text(text, encoding="utf-8-sig")
    renderer = Renderer.from_folder(tmp_path)
    assert "user\nHi" in str(renderer.render_chat(CHAT).text)
    assert "\ufeff" not in str(renderer.render_chat(CHAT).text)
    if form in ("list", "dict", "named"):
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert renderer.render_chat(CHAT, tools).text == "<|begin|>tools"


def test_template_of_the_operator(folder: Path, tmp_path: Path) -> None:
    """Fault: --chat-template is ignored, or a wrong path is found by the first user."""
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}mine", encoding="utf-8-sig")
    for source in (tmp_path / "mine.jinja", str(tmp_path / "mine.jinja"), "{{ bos_token }}mine"):
        renderer = Renderer.from_folder(folder, chat_template=source)
        assert renderer.render_chat(CHAT).text == "<|begin|>mine"
        assert renderer.chat_template is not None and renderer.chat_template.is_given
    with pytest.raises(ConfigError, match="cannot be read"):
        Renderer.from_folder(folder, chat_template=tmp_path / "none.jinja")


def test_template_of_the_request(renderer: Renderer) -> None:
    """Fault: a request's own template is not used, or a broken one is an internal error."""
    mine = renderer.request_template("{{ bos_token }}{{ messages[0].content | upper }}")
    assert renderer.render_chat(CHAT, chat_template=mine).text == "<|begin|>HI 👋"
    with pytest.raises(RequestError, match="has an error"):
        renderer.request_template("{% if %}")


def test_without_template(tmp_path: Path) -> None:
    """Fault: a base model answers a chat with an internal error."""
    renderer = Renderer.from_folder(write_folder(tmp_path, gpt2_like()))
    assert renderer.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        renderer.render_chat(CHAT)


NESTED_LOOPS = "{% for a in [1] %}" * 25 + "{% endfor %}" * 25
IN_BRANCH = "{% for m in messages %}{% if m.role == 'user' %}USE{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n{{ messages | nope }}", "in line 2: No filter named 'nope'"),
        ("{{ messages is nope }}", "in line 1: No test named 'nope'"),
        ("{{ nope(messages) }}", "the unknown function 'nope'"),
        ("{% if messages %}", "in line 1: Unexpected end of template"),
        ("{% nope %}", "unknown tag 'nope'"),
        (NESTED_LOOPS, "too many statically nested blocks"),
        ("{% if 1 %}" * 120 + "{% endif %}" * 120, "too many levels of indentation"),
        ("{{ " + "(" * 400 + ")" * 400 + " }}", "nested too deep"),
        ("{% break %}", "outside loop"),
        ("{% macro f(a, a) %}{% endmacro %}", "duplicate argument"),
        ("{% include 'other' %}", "another template"),
        (IN_BRANCH.replace("USE", "{{ m.content | nope }}"), "the unknown filter 'nope'"),
        (IN_BRANCH.replace("USE", "{{ m.content is nope }}"), "the unknown test 'nope'"),
        (IN_BRANCH.replace("USE", "{{ nope() }}"), "the unknown function 'nope'"),
        ("{{ messages | map('nope') | join }}", "the unknown filter 'nope'"),
        ("{{ messages | selectattr('role', 'nope') | list }}", "the unknown test 'nope'"),
        ("{% if add_generation_prompt %}{{ '' | nope }}{% endif %}", "the unknown filter 'nope'"),
    ],
)
def test_a_broken_template_disables_chat_only(source: str, words: str, tmp_path: Path) -> None:
    """Fault: the model serves no completions for want of a template that they do not need."""
    folder = write_folder(tmp_path, gpt2_like())
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    renderer = Renderer.from_folder(folder)
    assert renderer.render_prompt("hello").token_ids
    with pytest.raises(RequestError, match=f"Chat is disabled.*'default'.*{words}.*--chat-templ"):
        renderer.render_chat(CHAT)
    with pytest.raises(ConfigError, match=words):  # the operator's own is told at start
        Renderer.from_folder(folder, chat_template=folder / "chat_template.jinja")


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools %}{{ tools | nope }}{% endif %}{{ messages[0].content }}",
        "{% if nope is defined %}{{ nope() }}{% endif %}{{ messages[0].content }}",
        "{% if messages[0].role == 'tool' %}{% include 'x' %}{% endif %}{{ messages[0].content }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{{ messages[0].content }}",
        "{% set f = cycler('a') %}{{ f.next() }}{{ messages[0].content }}",
        "{% for g in [namespace] %}{{ g() is defined }}{% endfor %}{{ messages[0].content }}",
    ],
)
def test_what_a_chat_does_not_meet_disables_nothing(source: str, tmp_path: Path) -> None:
    """Fault: chat is disabled for a branch that is never taken."""
    folder = write_folder(tmp_path, gpt2_like())
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    renderer = Renderer.from_folder(folder)
    assert str(renderer.render_chat(CHAT).text).endswith("Hi 👋")
    if "tools" in source:
        with pytest.raises(RequestError, match=r"No filter named 'nope'.*Completions still work"):
            renderer.render_chat(CHAT, [{"type": "function", "function": {"name": "f"}}])


def test_one_broken_template_of_several(tmp_path: Path) -> None:
    """Fault: chats without tools are refused for the broken template of those with tools."""
    named = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | nope }}"}
    folder = write_folder(tmp_path, gpt2_like(), tokenizer_config={"chat_template": named})
    renderer = Renderer.from_folder(folder)
    assert renderer.render_chat(CHAT).text == "Hi 👋"
    with pytest.raises(
        RequestError, match=r"^Chat with the template 'tool_use' is disabled.*'nope'"
    ):
        renderer.render_chat(CHAT, [{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize("config", [{"chat_template": [{"name": "default"}]}, {"chat_template": 5}])
def test_malformed_template_entry(config: dict[str, Any], tmp_path: Path) -> None:
    """Fault: a broken `chat_template` entry is a traceback at start."""
    write_folder(tmp_path, gpt2_like(), tokenizer_config=config)
    renderer = Renderer.from_folder(tmp_path)
    assert renderer.render_prompt("hello").token_ids
    with pytest.raises(RequestError, match=r"Chat is disabled.*unknown form"):
        renderer.render_chat(CHAT)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_unreadable_template(name: str, tmp_path: Path) -> None:
    """Fault: bytes that are no text are a traceback at start."""
    write_folder(tmp_path, gpt2_like())
    (tmp_path / name).write_bytes(b"\xff\xfe{{")
    renderer = Renderer.from_folder(tmp_path)
    assert renderer.render_prompt("hello").token_ids
    with pytest.raises(RequestError, match=f"Chat is disabled.*{name}"):
        renderer.render_chat(CHAT)


def test_without_tokenizer(tmp_path: Path) -> None:
    """Fault: skip_tokenizer_init still wants the tokenizer, or takes text."""
    renderer = Renderer.from_folder(tmp_path, vocab_size=100, skip_tokenizer_init=True)
    assert renderer.render_prompt([1, 99]).token_ids == [1, 99]
    for call in (lambda: renderer.render_prompt("x"), lambda: renderer.render_chat(CHAT)):
        with pytest.raises(RequestError, match="without a tokenizer"):
            call()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        renderer.render_prompt([100])
    output = renderer.output_of([1], SamplingParams())
    assert output.append([5, 6]).text == ""
    with pytest.raises(ConfigError, match="vocab_size"):
        Renderer.from_folder(tmp_path, skip_tokenizer_init=True)


def test_output(renderer: Renderer) -> None:
    """Fault: options of a request do not reach the output's text."""
    assert renderer.tokenizer is not None
    ids = renderer.tokenizer.encode("one two<|im_end|>", add_special_tokens=False)
    assert renderer.output_of([], SamplingParams()).append(ids).text == "one two"
    shown = renderer.output_of([], SamplingParams(skip_special_tokens=False))
    assert shown.append(ids).text == "one two<|im_end|>"
    stopped = renderer.output_of([], SamplingParams(stop=["two"], include_stop_str_in_output=True))
    assert stopped.append(ids).text == "one two"
    assert renderer.output_of([], SamplingParams(detokenize=False)).append(ids).text == ""


@pytest.mark.parametrize("make", [gpt2_like, llama3_like, llama2_like, t5_like])
def test_tokens_that_break_repetitions(make: Callable[[], Any], tmp_path: Path) -> None:
    """Fault: a token that holds a breaker among other characters, or a breaker of several tokens,
    breaks nothing."""
    renderer = Renderer.from_folder(write_folder(tmp_path, make()))
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    prompt, rendering = renderer.render_prompt("hello"), RequestRenderer(renderer, frozenset())

    def breakers(**how: Any) -> set[Any]:
        params = SamplingParams(**how)
        found = rendering.render("0", 0, prompt, params, 0.0).params
        again = rendering.render("0", 0, prompt, found, 0.0).params
        assert again == found
        return set(found.dry_breaker_token_ids or ())

    holding = {i for i in range(tokenizer.vocab_size) if b"e" in tokenizer.token_bytes(i)}
    assert len(holding) > 1
    assert breakers(dry_multiplier=1, dry_sequence_breakers=["e"]) == holding
    long = tuple(tokenizer.encode("quick brown", add_special_tokens=False))
    assert long in breakers(dry_multiplier=1, dry_sequence_breakers=["quick brown"])
    assert breakers(dry_multiplier=1, dry_sequence_breakers=[]) == set()
    assert breakers(dry_multiplier=1, dry_breaker_token_ids=[3]) == {3}
    assert breakers() == set()


def test_breakers_need_a_tokenizer() -> None:
    rendering = RequestRenderer(Renderer(None, None, 10), frozenset())
    prompt = RenderedPrompt([1])
    with pytest.raises(RequestError, match="dry_breaker_token_ids"):
        rendering.render("0", 0, prompt, SamplingParams(dry_multiplier=1), 0.0)
    params = SamplingParams(dry_multiplier=1, dry_breaker_token_ids=[])
    assert rendering.render("0", 0, prompt, params, 0.0).params == params


@pytest.mark.parametrize("make", [gpt2_like, llama3_like, llama2_like, t5_like])
def test_what_bad_words_ban(make: Callable[[], Any], tmp_path: Path) -> None:
    """Fault: a word that is given with its space is not banned at the start of a text."""
    renderer = Renderer.from_folder(write_folder(tmp_path, make()))
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    prompt = renderer.render_prompt("hello")

    def banned(*words: str) -> set[tuple[int, ...]]:
        params = SamplingParams(bad_words=words)
        rendered = RequestRenderer(renderer, frozenset()).render("0", 0, prompt, params, 0.0)
        return set(rendered.params.bad_words_token_ids or ())

    def spelled(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    both = {spelled("quick"), spelled(" quick")}
    for given in ("quick", " quick", "  quick", "\tquick", "\nquick"):
        assert banned(given) == both
    assert banned("quick", " quick") == both
    assert not banned("Quick") & both, "the case counts"
    for blank in (" ", "\n"):
        assert banned(blank) == {spelled(blank)} - {()}
    assert banned("quick brown") == {spelled("quick brown"), spelled(" quick brown")}
