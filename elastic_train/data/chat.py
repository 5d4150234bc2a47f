"""Conversations as text: a Jinja chat template, and which characters of what it renders the assistant has written."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jinja2 import Template
    from jinja2.parser import Parser

    from elastic_train.storage.store import Store

ROLES = ("system", "user", "assistant", "tool")
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around the assistant's text while a template renders. Unicode keeps these for use inside of programs."""
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ConversationError(Exception):
    """What is wrong with a conversation; whoever reads the file adds where it is."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``spans``: [start, end) of the characters that the assistant has written, with the end of its turn."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """``tokens``: variables of the template such as ``bos_token``. ``reserved``: text that the tokenizer takes for a
    special token, which no message may spell: it would end the turn.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    reserved: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Of everything that decides what is rendered."""
        return hashlib.sha256(json.dumps([self.source, self.tokens, self.reserved]).encode()).hexdigest()

    def guarding(self, reserved: tuple[str, ...]) -> ChatTemplate:
        """The same with other ``reserved`` texts."""
        return replace(self, reserved=reserved)

    def render(self, messages: Any) -> Rendered:
        """A conversation: a list of objects with ``role`` and ``content``, one at least the assistant's.

        A template marks the assistant's text with ``{% generation %}``. Of one that does not, the text is what a
        further turn adds to the conversation so far and the prompt for the answer, up to its last character that is no
        space. Raises :class:`ConversationError` for what is no conversation, or cannot be rendered.
        """
        _check(messages, self.reserved)
        if _MARKED.search(self.source):
            return _split(self._text(messages))
        return self._grown(messages)

    def _grown(self, messages: list[dict[str, Any]]) -> Rendered:
        whole, spans = self._text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._text(messages[:number], prompt=True), self._text(messages[: number + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise ConversationError(
                    f"the chat template renders messages[:{number}] in another way when messages[{number}] follows; "
                    "accepted is one that marks the assistant's text with {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), max(len(after.rstrip()), len(before))))
        return Rendered(whole, tuple(spans))

    def _text(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        try:
            return _compiled(self.source).render(messages=messages, add_generation_prompt=prompt, **dict(self.tokens))
        except Exception as error:  # a template is a program of a stranger: it may fail in any way
            raise ConversationError(
                f"the chat template cannot render it: {str(error) or type(error).__name__}"
            ) from None


def read_chat_template(folder: Store) -> ChatTemplate:
    """That of a Hugging Face folder. Raises :class:`DataError` when it has none."""
    settings = tokenizer_settings(folder)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[-1].get("template") if named else None
    try:
        found = folder.read(TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{TEMPLATE} in {folder.uri} is not UTF-8: {error}") from None
    except NotFound:
        if not isinstance(found, str):
            raise DataError(
                f"{folder.uri} has no chat template in {SETTINGS} or {TEMPLATE}; give --chat-template"
            ) from None
    return chat_template(found, settings)


def chat_template(source: str, settings: dict[str, Any]) -> ChatTemplate:
    """A template with the special tokens that ``settings`` (of ``tokenizer_config.json``) names.

    Raises :class:`DataError` where ``source`` is no Jinja template.
    """
    tokens = []
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens.append((name, value))
    try:
        _compiled(source)
    except (TemplateError, RecursionError) as error:
        line = f" line {error.lineno}" if hasattr(error, "lineno") else ""
        raise DataError(f"the chat template cannot be read:{line} {error}") from None
    return ChatTemplate(source, tuple(tokens))


def tokenizer_settings(folder: Store) -> dict[str, Any]:
    """``tokenizer_config.json``, {} when there is none."""
    try:
        settings = json.loads(folder.read(SETTINGS))
    except NotFound:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{SETTINGS} in {folder.uri} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise DataError(f"{SETTINGS} in {folder.uri} is not a JSON object")
    return settings


def _check(messages: Any, reserved: tuple[str, ...]) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConversationError("messages is not a list of objects with role and content, one at least")
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ConversationError(f"{place} is {_shown(message)}; accepted is an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConversationError(f"{place}.role is {_shown(role)}; accepted are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ConversationError(f"{place}.content is {_shown(content)}; accepted is a string")
        for where, text in _strings(message, place):  # a template may render any field
            spelled = next((token for token in (*reserved, OPEN, CLOSE) if token in text), None)
            if spelled is not None:
                raise ConversationError(
                    f"{where} spells the special token {_shown(spelled)}; accepted is text without special tokens"
                )
    if not any(message["role"] == "assistant" for message in messages):
        raise ConversationError("messages has no turn of the assistant; accepted is a conversation with one at least")


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every string in a JSON value, the names of fields too."""
    todo = [(value, place)]  # no recursion: it may be as deep as Python can read
    while todo:
        value, place = todo.pop()
        if isinstance(value, str):
            yield place, value
        elif isinstance(value, list):
            todo += [(item, f"{place}[{number}]") for number, item in enumerate(value)]
        elif isinstance(value, dict):
            todo += [(item, f"{place}.{name}") for name, item in value.items()]
            yield from ((f"a field's name in {place}", name) for name in value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _split(marked: str) -> Rendered:
    """The text without the marks, and what was between them."""
    text, spans, start = "", [], 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            start = len(text)
        elif piece == CLOSE:
            spans.append((start, len(text)))
        else:
            text += piece
    if not any(end > start for start, end in spans):
        raise ConversationError(
            "the chat template renders none of its text between {% generation %} and {% endgeneration %}"
        )
    return Rendered(text, tuple(spans))


class _Generation(Extension):
    """``{% generation %}`` puts marks around what is rendered inside of it."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """In a sandbox: templates come from strangers. Without the time of day, or the tokens would depend on it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
