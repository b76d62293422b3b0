"""Chat template: the tokens that a tokenizer's own template puts around the text of a prompt, as
those of a single message of the user with the answer to be written.

The text stays plain text. Only the template's own words can be special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from magicdec.config.sections import CHAT, PLAIN
from magicdec.model.gguf.file import read_gguf
from magicdec.model.gguf.named import is_gguf
from magicdec.model.tokenizer import Tokenizer
from magicdec.output.files import exists, load_object, read_text

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
DEFAULT = "default"  # the name of a template among several
FLAG = f"--prompt_format {CHAT}"
WAY_OUT = f"use --prompt_format {PLAIN}"
# Stands for the text while the template is rendered. A template has no reason to change it.
STAND_IN = "TheTextOfThePrompt5f1d7c0e9b"


@dataclass(frozen=True)
class Frame:
    """The token ids before and after the text of a prompt."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, ids: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *ids, *self.after)

    def room(self, prefix_len: int) -> int:
        """The tokens of the text in a prompt of `prefix_len`. Raises ValueError if there are
        none."""
        if prefix_len <= self.num_tokens:
            raise ValueError(
                f"--prefix_len {prefix_len} is too short for {FLAG}, whose template has "
                f"{self.num_tokens} tokens; it must be at least {self.num_tokens + 1}"
            )
        return prefix_len - self.num_tokens


def chat_frame(tokenizer: Tokenizer) -> Frame:
    """The frame that the template beside a tokenizer's file makes. Raises ValueError, in one line,
    if there is none or if it does not leave the text as it is."""
    if is_gguf(tokenizer.path):
        config = _gguf_config(tokenizer)
        path, template = _find_template(tokenizer.path, config)
    else:
        config = _load_config(tokenizer.path.parent)
        path, template = _find_template(tokenizer.path.parent, config)
    tokens = _named_tokens(config)
    rendered = _render(path, template, tokens)
    before, *rest = rendered.split(STAND_IN)
    if len(rest) != 1:
        _refuse(path, f"has the text {len(rest)} times unchanged, not once")
    _check_special(tokenizer, path, config, tokens, (before, *rest))
    encode = tokenizer.encode_with_special
    return Frame(tuple(encode(before)), tuple(encode(rest[0])))


def _refuse(path: Path, what: str) -> NoReturn:
    raise ValueError(f"{FLAG}: the chat template in {path} {what}; {WAY_OUT}")


def _load_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not exists(path):
        return {}
    try:
        return load_object(path)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0]
        raise ValueError(f"{FLAG}: {path} cannot be read ({reason}); {WAY_OUT}") from error


def _gguf_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a GGUF file says of its template, by the names of a tokenizer_config.json."""
    metadata = read_gguf(tokenizer.path).metadata
    config: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for ours, theirs in GGUF_TOKENS.items():
        i = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token"] = tokenizer.pieces.get(i) if isinstance(i, int) else None
    return config


def _find_template(directory: Path, config: Mapping[str, Any]) -> tuple[Path, str]:
    """The template and its file. As in `transformers`, a file of its own comes first."""
    path = directory / TEMPLATE_FILE
    if not is_gguf(directory) and exists(path):
        try:
            return path, read_text(path)
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0]
            raise ValueError(f"{FLAG}: {path} cannot be read ({reason}); {WAY_OUT}") from error
    path = directory if is_gguf(directory) else directory / CONFIG_FILE
    template = config.get("chat_template")
    if template is None and is_gguf(directory):
        raise ValueError(
            f"{FLAG}: {path} has no tokenizer.chat_template; {WAY_OUT}, or a model that is made "
            "for chats"
        )
    if template is None:
        raise ValueError(
            f"{FLAG}: the tokenizer in {directory} has no chat template, neither {TEMPLATE_FILE} "
            f"nor a chat_template in {CONFIG_FILE}; {WAY_OUT}, or a model that is made for chats"
        )
    if isinstance(template, list):  # several, each with a name
        named = [each for each in template if isinstance(each, dict)]
        template = next((t.get("template") for t in named if t.get("name") == DEFAULT), None)
        if template is None:
            _refuse(path, f"is a list without one that is named {DEFAULT!r}")
    if not isinstance(template, str):
        _refuse(path, "is not a text")
    return path, template


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens by the names that templates have for them, such as `bos_token`."""
    tokens = dict[str, str | None]()
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and (content is None or isinstance(content, str)):
            tokens[name] = content
    return tokens


def _render(path: Path, template: str, tokens: Mapping[str, str | None]) -> str:
    """As `transformers` renders it: a token that is null is not defined."""
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that marks an answer for training; it leaves what is in it as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        used = meta.find_undeclared_variables(environment.parse(template))
        rendered = environment.from_string(template).render(
            messages=[{"role": "user", "content": STAND_IN}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **{name: token for name, token in tokens.items() if token is not None},
        )
    except Exception as error:  # whatever the code of a template may raise
        reason = (str(error).splitlines() or [""])[0]
        _refuse(path, f"cannot be rendered ({type(error).__name__}: {reason})")
    if unknown := sorted(n for n in used if n.endswith("_token") and n not in tokens):
        _refuse(path, f"uses {unknown[0]}, which {CONFIG_FILE} does not name (null: none)")
    return rendered


def _check_special(
    tokenizer: Tokenizer,
    path: Path,
    config: Mapping[str, Any],
    tokens: Mapping[str, str | None],
    texts: Sequence[str],
) -> None:
    """Raises ValueError unless each special token in the texts is one token of the tokenizer, with
    the id of the config if it says one."""
    added = config.get("added_tokens_decoder")
    expected: dict[str, str | None] = {token: None for token in tokens.values() if token}
    for number, entry in (added if isinstance(added, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            expected[entry["content"]] = str(number)
    for name, number in expected.items():
        if not name or not any(name in text for text in texts):
            continue
        ids = tokenizer.encode_with_special(name)
        if len(ids) != 1 or (number is not None and str(ids[0]) != number):
            as_id = "" if number is None else f" of id {number}"
            _refuse(
                path, f"names the token {name}, but {tokenizer.path.name} has no such one{as_id}"
            )
