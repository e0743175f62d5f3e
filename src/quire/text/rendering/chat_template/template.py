"""Chat templates: messages to the text of a prompt, as transformers' `apply_chat_template`."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import ConfigError, RequestError, clipped
from quire.config.gguf import is_gguf
from quire.text.rendering.chat_template.instructions import ROLES, InstructionPlaces, find_places
from quire.text.rendering.folder import read_chat_templates
from quire.text.rendering.gguf import read_gguf_templates
from quire.text.rendering.messages import (
    REASONING_FIELDS,
    ArgumentsForm,
    ContentForm,
    Message,
    fit_messages,
    plain_data,
    plain_messages,
    without_null_contents,
    without_optional_nulls,
)

if TYPE_CHECKING:
    import jinja2

    from quire.text.rendering.chat_template.budget import RenderBudget
    from quire.text.rendering.chat_template.sandbox import ChatEnvironment, TemplateLimits

# Names that a request may not set through `chat_template_kwargs`: the arguments of `render`
# itself, and the options of `apply_chat_template` that would change what the caller gets back.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "namespace",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "template_name",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# The trailing space shows whether the template trims the end of the message.
_END_MARK = "\ue000quire end of message\ue001 "
_LONGEST_QUOTE = 500
_PROBE_STEPS = 500_000
_PROBE = "quireprobe"
_PROBE_OBJECT = {_PROBE: 1}
_PROBE_TEXT = f'{{"{_PROBE}": 1}}'
# A value that is printed as a whole shows its own keys; a form that the template knows does not.
_PRINTED_PARTS = '"type": "text"'
_CALL_ID = "abcdefghi"
_ANY_OTHER_ROLE = "quirerole"
_API_ROLES = ("system", "user", "assistant", "developer", "tool")
_PROBED_ROLES = ("user", "system", "developer", "tool", "function", _ANY_OTHER_ROLE)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """content: form by (role, message has tool calls). roles: all roles that it knows."""

    template: "jinja2.Template"
    source: str
    content: Mapping[tuple[str, bool], ContentForm]
    arguments: ArgumentsForm
    instructions: InstructionPlaces
    roles: frozenset[str]

    def content_form(self, role: str, has_calls: bool = False) -> ContentForm:
        """Return the form of `content` that the template's branch for such a message accepts."""
        found = self.content.get((role, has_calls)) or self.content.get((role, False))
        return found or self.content[_ANY_OTHER_ROLE, False]

    def fitted(self, messages: list[Message], *, keeps_last: bool) -> list[Message]:
        """Return messages as the template shows them. keeps_last: the last one is to be continued,
        so it stays where it is."""
        last: list[Message] = []
        if keeps_last and messages[-1]["role"] in ROLES:
            messages, last = messages[:-1], messages[-1:]
        placed = [*self.instructions.placed(messages), *last]
        return fit_messages(placed, self.content_form, self.arguments)


class ChatTemplate:
    """The chat templates of one model, compiled and ready; safe to share between threads.

    `templates` maps names to sources; the main one is `default`, and one called `tool_use` serves
    requests with tools. `special_tokens` are the variables `bos_token`, `eos_token`, ...
    Raises ConfigError for a template that cannot work: a syntax error, or a filter, test or
    function that there is none of. keep_broken: only what needs such a template is refused.
    is_given: somebody brought it in place of the model's.
    """

    def __init__(
        self,
        templates: Mapping[str, str] | str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: "TemplateLimits | None" = None,
        now: Callable[[], datetime] = datetime.now,
        keep_broken: bool = False,
        is_given: bool = False,
    ) -> None:
        from quire.text.rendering.chat_template.sandbox import ChatEnvironment, TemplateLimits

        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        if not sources:
            raise ConfigError(
                "A ChatTemplate needs at least one template, got none. "
                "Pass the text of a Jinja template."
            )
        self._special_tokens = dict(special_tokens or {})
        limits = limits or TemplateLimits()
        self._environment = ChatEnvironment(limits, now)
        self._probe_limits = replace(
            limits,
            max_steps=min(limits.max_steps, _PROBE_STEPS),
            # A template of a request is probed and rendered within twice the limit.
            max_seconds=limits.max_seconds / 2,
        )
        self.is_given = is_given
        self._sources = sources
        self._compiled: dict[str, _Compiled] = {}
        self._broken: dict[str, str] = {}
        for name, text in sources.items():
            try:
                self._compiled[name] = self._compile(name, text)
            except ConfigError as error:
                if not keep_broken:
                    raise
                self._disable(name, error)

    @classmethod
    def from_folder(
        cls, path: str | Path, special_tokens: Mapping[str, str] | None = None
    ) -> "ChatTemplate | None":
        """The templates of a model folder, None when it has none. Broken ones are kept: the model
        can do without them, and `why_broken` tells."""
        try:
            templates = _templates_of(path)
        except ConfigError as error:
            unreadable = cls("")
            unreadable._disable("default", error)
            return unreadable
        return cls(templates, special_tokens, keep_broken=True) if templates else None

    @property
    def why_broken(self) -> Mapping[str, str]:
        """Messages about each template that cannot be used, by name."""
        return self._broken

    def _disable(self, name: str, error: ConfigError) -> None:
        what = "Chat" if name == "default" else f"Chat with the template {name!r}"
        self._broken[name] = f"{what} is disabled. {error} Completions still work."

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates."""
        return tuple(self._sources)

    def source(self, template_name: str = "default") -> str:
        """The text of a template."""
        return self._sources[template_name]

    def content_form(self, template_name: str = "default", role: str = "user") -> ContentForm:
        """Return the form of `content` that the template accepts in a message without tool
        calls."""
        return self._compiled[template_name].content_form(role)

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        template_name: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        `continue_final_message` leaves the last message open; a string names the field to
        continue. Further `kwargs` are variables for the template (`enable_thinking`, ...); those
        it does not know have no effect. Raises RequestError when an argument is refused, or when
        the template itself refuses the conversation (with the template's own words).
        """
        self.check_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` are both true. Set "
                "`add_generation_prompt` to false to continue the last message."
            )
        chosen = self._choose(template_name, bool(tools))
        chat = chosen.fitted(plain_messages(messages), keeps_last=bool(continue_final_message))
        last_text = ""
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            last_text = _mark_end(chat, field, chosen.source)
        variables = {
            **self._special_tokens,
            **plain_data(kwargs),
            "messages": chat,
            "tools": _plain_list("tools", tools),
            "documents": _plain_list("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(chosen, variables)
        return _cut_at_mark(text, last_text) if continue_final_message else text

    def arguments_form(
        self, tools: Sequence[Any] | None = None, *_: Any, **_kwargs: Any
    ) -> ArgumentsForm:
        """Return the form of tool-call arguments that `render` gives to the template. Its other
        arguments do not matter."""
        return self._choose(None, bool(tools)).arguments

    def _run(self, chosen: _Compiled, variables: dict[str, Any]) -> str:
        """Render with all nulls; if the template can't take those of optional fields, without, and
        if it can't take those of contents, with empty texts."""
        budget = self._environment.budget()
        fewer = without_optional_nulls(variables["messages"])
        if fewer is not None:
            try:
                return _run(
                    self._environment, chosen.template, variables, budget, refuses_null=True
                )
            except RequestError as error:
                if _is_over_limits(error):
                    raise
            variables = {**variables, "messages": fewer}
        try:
            return _run(self._environment, chosen.template, variables, budget)
        except RequestError as error:
            filled = without_null_contents(variables["messages"])
            if filled is None or _is_over_limits(error):
                raise
            with contextlib.suppress(RequestError):  # the first error tells more
                variables = {**variables, "messages": filled}
                return _run(self._environment, chosen.template, variables, budget)
            raise

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """RequestError when a request sets a variable that is the engine's to set."""
        for name in kwargs:
            if name in RESERVED_KWARGS or name in self._special_tokens or not name.isidentifier():
                raise RequestError(
                    f"`chat_template_kwargs` may not set {name!r}, which the engine sets itself. "
                    "Remove it, or use the request field of that name if there is one."
                )

    def check_roles(self, messages: object) -> None:
        """RequestError for a role that no template here knows. One that writes any role into the
        prompt knows those that it names, and those of the API."""
        known = frozenset[str]().union(*(each.roles for each in self._compiled.values()))
        for message in cast("list[object]", messages) if isinstance(messages, list) else []:
            role: object = cast("Message", message).get("role") if isinstance(message, dict) else ""
            if self._compiled and isinstance(role, str) and role and role not in known:
                raise RequestError(
                    f"messages has one of the role {role[:80]!r}, which the chat template of this "
                    f"model does not know. Send one of {', '.join(_API_ROLES)}."
                )

    def _compile(self, name: str, source: str) -> _Compiled:
        try:
            template, unknown = self._environment.compiled(source)
        except Exception as error:
            # Jinja raises its own errors, and those of Python's compiler and of its recursion.
            raise _broken_template(name, f"has an error{_what_is_wrong(error)}") from error
        probe = _Probe(self._environment, template, self._special_tokens, self._probe_limits)
        if unknown and not probe.renders_any():
            raise _broken_template(name, f"has an error: it uses {', '.join(unknown)}")
        arguments = probe.arguments_form()
        forms = probe.content_forms(arguments)
        roles = {*_API_ROLES, *self._environment.texts(source)}
        if ("function", False) in forms:
            roles.add("function")
        places = probe.instruction_places()
        return _Compiled(template, source, forms, arguments, places, frozenset(roles))

    def _choose(self, name: str | None, has_tools: bool) -> _Compiled:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name in self._broken:
            raise RequestError(self._broken[name])
        chosen = self._compiled.get(name)
        if chosen is None:
            raise RequestError(
                f"There is no chat template named {name!r}. "
                f"This model has: {', '.join(sorted(self._sources))}."
            )
        return chosen


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return ": it is nested too deep"
    # The lines of Python's errors are those of the code that Jinja made.
    line = None if isinstance(error, SyntaxError) else getattr(error, "lineno", None)
    words: object = getattr(error, "message", None) or getattr(error, "msg", None) or error
    return f"{'' if line is None else f' in line {line}'}: {_clipped(words).rstrip('.')}"


def _broken_template(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"The chat template {name!r} {why}. Correct the template, or give another with "
        "--chat-template."
    )


class _Probe:
    """Finds out by small renders which forms a template accepts. One that fails both ways (it
    wants another conversation than the probe) counts as one that takes text and objects."""

    def __init__(
        self,
        environment: "ChatEnvironment",
        template: "jinja2.Template",
        special_tokens: Mapping[str, str],
        limits: "TemplateLimits",
    ) -> None:
        self._environment = environment
        self._template = template
        self._special_tokens = special_tokens
        self._budget = environment.budget(limits)
        self._gave_up = False

    def renders_any(self) -> bool:
        """Return whether the template can render the simplest conversations."""
        asks: list[Message] = [
            {"role": "user", "content": _PROBE},
            {"role": "user", "content": [{"type": "text", "text": _PROBE}]},
        ]
        system = {"role": "system", "content": _PROBE}
        has_rendered = any(
            self._rendered([*before, ask], add_generation_prompt=True) is not None
            for ask in asks
            for before in ([], [system])
        )
        return has_rendered or self._gave_up

    def content_forms(
        self, arguments_form: ArgumentsForm
    ) -> Mapping[tuple[str, bool], ContentForm]:
        """Return by role and tool calls whether `content` may be text, a list of parts, or both.

        Roles whose messages the template does not show are left out, but for one that stands for
        all others.
        """
        calls = {"tool_calls": [_call(_PROBE_TEXT if arguments_form == "string" else {})]}
        ask = {"role": "user", "content": "question"}
        call: Message = {"role": "assistant", "content": "", **calls}
        result = {"role": "tool", "content": "4", "tool_call_id": _CALL_ID, "name": "call"}
        places: dict[tuple[str, bool], list[_Place]] = {
            (role, False): [_Place(role), _Place(role, [ask]), _Place(role, [], [ask])]
            for role in _PROBED_ROLES
        }
        places["assistant", False] = [_Place("assistant", [ask], after) for after in ([], [ask])]
        places["assistant", True] = [
            _Place("assistant", [ask], after, calls) for after in ([], [result])
        ]
        fields = {"tool_call_id": _CALL_ID, "name": "call"}
        places["tool", False] = [
            _Place("tool", [ask, call], after, fields) for after in ([], [ask])
        ]
        forms: dict[tuple[str, bool], ContentForm] = {
            key: form
            for key, candidates in places.items()
            if (form := self._content_form(candidates)) is not None
        }
        usual = forms.get(("user", False), "string")
        return {(_ANY_OTHER_ROLE, False): usual, **forms}

    def arguments_form(self) -> ArgumentsForm:
        """Return whether `arguments` of a tool call may be an object, its JSON text, or both."""
        as_object = self._shows_call(_PROBE_OBJECT, _PROBE)
        # A text that is encoded once more shows escaped quotes.
        as_text = self._shows_call(_PROBE_TEXT, _PROBE_TEXT)
        if as_text:
            return "either" if as_object else "string"
        return "object"

    def instruction_places(self) -> InstructionPlaces:
        """Return where instructions are shown."""
        found = find_places(self._rendered)
        return InstructionPlaces() if self._gave_up else found

    def _content_form(self, places: list["_Place"]) -> ContentForm | None:
        """None if the template does not show such a message anywhere."""
        two_parts = [{"type": "text", "text": text} for text in (_PROBE, _PROBE[::-1])]
        shown: list[tuple[bool, bool]] = []
        is_one_part = False
        for place in places:
            as_text = self._shows(place.filled(_PROBE), [_PROBE])
            as_parts = self._shows(place.filled(two_parts), [_PROBE, _PROBE[::-1]])
            if not as_parts and not as_text:  # it may read the first part only
                as_parts = self._shows(place.filled(two_parts[:1]), [_PROBE])
                is_one_part = is_one_part or as_parts
            if as_text or as_parts:
                shown.append((as_text, as_parts))
        if not shown:
            return None
        if is_one_part and all(as_parts for _, as_parts in shown):
            return "part"
        if all(as_parts for _, as_parts in shown):
            return "either" if all(as_text for as_text, _ in shown) else "parts"
        return "string"

    def _shows_call(self, arguments: object, sign: str) -> bool:
        user = {"role": "user", "content": "question"}
        calls = {"tool_calls": [_call(arguments)]}
        contents: list[Message] = [{}, {"content": ""}, {"content": None}]
        return any(
            self._shows([user, {"role": "assistant", **content, **calls}], [sign])
            for content in contents
        )

    def _shows(self, messages: list[Message], signs: list[str]) -> bool:
        """Return whether all of `signs` stand in the prompt, and no part of a content as a
        whole."""
        text = self._rendered(messages)
        if text is None or _PRINTED_PARTS in text:
            return False
        return all(sign in text for sign in signs)

    def _rendered(
        self, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> str | None:
        """The prompt, None if the template refuses."""
        if self._gave_up:
            return None
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _run(self._environment, self._template, variables, self._budget)
        except RequestError as error:
            self._gave_up = _is_over_limits(error)
            return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Place in a conversation where a message of a role may stand."""

    role: str
    before: Sequence[Message] = ()
    after: Sequence[Message] = ()
    fields: Message = field(default_factory=dict[str, Any])

    def filled(self, content: object) -> list[Message]:
        """The conversation, with `content` in its place."""
        message: Message = {"role": self.role, "content": content, **self.fields}
        return [*self.before, message, *self.after]


def _call(arguments: object) -> Message:
    function = {"name": "call", "arguments": arguments}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _is_over_limits(error: RequestError) -> bool:
    from quire.text.rendering.chat_template.sandbox import TemplateLimitError

    return isinstance(error.__cause__, TemplateLimitError)


def _run(
    environment: "ChatEnvironment",
    template: "jinja2.Template",
    variables: Mapping[str, Any],
    budget: "RenderBudget",
    *,
    refuses_null: bool = False,
) -> str:
    """Render; whatever goes wrong inside the template is the request's failure alone."""
    import jinja2

    try:
        return environment.render(template, variables, budget, refuses_null=refuses_null)
    except jinja2.UndefinedError as error:
        raise RequestError(
            f"The chat template of this model needs something that the request lacks: "
            f"{_clipped(error)}. Check the fields of the messages."
        ) from error
    except jinja2.TemplateError as error:
        if type(error) is jinja2.TemplateRuntimeError:  # an unknown filter or test
            raise RequestError(
                f"The chat template of this model has an error that this conversation meets: "
                f"{_clipped(error)} Completions still work; the operator can give another template "
                "with --chat-template."
            ) from error
        raise RequestError(
            f"The chat template of this model refused the conversation: {_clipped(error)}"
        ) from error
    except RecursionError as error:
        raise RequestError(
            "The chat template of this model went too deep (RecursionError). "
            "Send messages and tools that are nested less."
        ) from error
    # Templates are code: any exception can come out of one, and it must not leave the request.
    except Exception as error:
        raise RequestError(
            f"The chat template of this model failed: {type(error).__name__}: {_clipped(error)}. "
            "Check the types of the fields of the messages and tools."
        ) from error


def _clipped(error: object) -> str:
    """The words of `error`; a template can put a whole conversation into them."""
    return clipped(str(error), _LONGEST_QUOTE)


def _plain_list(name: str, values: Sequence[Any] | None) -> list[Any] | None:
    if not values:
        return None
    data = [plain_data(value) for value in values]
    for index, value in enumerate(data):
        if not isinstance(value, dict):
            raise RequestError(
                f"`{name}[{index}]` is a {type(values[index]).__name__}. It must be an object."
            )
    return data


def _mark_end(chat: list[Message], field: str, source: str) -> str:
    """Put the end mark into the last message; returns the text that the mark follows."""
    last = chat[-1]
    value: Any = last.get(field)
    if value is None:
        raise RequestError(
            f"`continue_final_message` is set, but the last message has no {field!r} to continue. "
            "Add it, or turn `continue_final_message` off."
        )
    names = [field]
    if field in REASONING_FIELDS:
        names = [name for name in REASONING_FIELDS if last.get(name) == value]
    if not any(name in source for name in names):
        raise RequestError(
            f"`continue_final_message` names {field!r}, which the chat template of this model "
            "does not read. Continue `content` instead."
        )
    if isinstance(value, list):
        for part in reversed(cast("list[Any]", value)):
            fields = cast("Message", part) if isinstance(part, dict) else {}
            if isinstance(fields.get("text"), str):
                text: str = fields["text"]
                fields["text"] = text + _END_MARK
                return text
        raise RequestError(
            "`continue_final_message` is set, but the last message has no text part to continue. "
            "Add one, or turn `continue_final_message` off."
        )
    if not isinstance(value, str):
        raise RequestError(
            f"`continue_final_message` is set, but the field {field!r} of the last message is a "
            f"{type(value).__name__}, not a text. Turn `continue_final_message` off."
        )
    for name in names:
        last[name] = value + _END_MARK
    return value


def _cut_at_mark(text: str, last_text: str) -> str:
    mark = _END_MARK.strip()
    start = text.rfind(mark)
    if start < 0 or last_text.strip() not in text:
        raise RequestError(
            "`continue_final_message` is set, but the chat template of this model changes or "
            "drops the last message, so there is nothing to continue. Turn it off."
        )
    kept = text[:start]
    # A template that trims the message took the mark's space too; so would it trim the text's own.
    return kept if text.startswith(_END_MARK, start) else kept.rstrip()


def _templates_of(path: str | Path) -> dict[str, str]:
    """Return the templates of a model folder or a GGUF file, by name."""
    return read_gguf_templates(Path(path)) if is_gguf(Path(path)) else read_chat_templates(path)
