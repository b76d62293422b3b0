"""The process in which a chat template is rendered: jinja2's sandbox, within limits of time and
memory. A template is a program from whoever made the checkpoint, and the sandbox alone
bounds neither how long it runs nor how much it writes.

Reads a request, as JSON, from its standard input, and writes the answer to its standard output. A
file of its own that imports nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, meta, nodes
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


def make_environment() -> Environment:
    """The environment in which `transformers` renders a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def limit(cpu_s: int, most_bytes: int) -> None:
    """From here on this process can write no file, and ends when it computes for longer or takes
    more memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The names that a template uses and, of each conversation, its `text` or why it has none
    (`error`). A conversation has its `messages`, its `tools`, and whether an answer begins behind
    them (`add_generation_prompt`)."""
    left = request["most_characters"]
    environment = make_environment()
    try:
        used = meta.find_undeclared_variables(environment.parse(request["template"]))
        template = environment.from_string(request["template"])
    except Exception as error:
        return {"error": described(error)}
    rendered = list[dict[str, str]]()
    for conversation in request["conversations"]:
        try:
            text = template.render(documents=None, **conversation, **request["tokens"])
        except Exception as error:  # whatever the code of a template may raise
            rendered.append({"error": described(error)})
            continue
        left -= len(text)
        if left < 0:
            return {"error": f"it writes more than {request['most_characters']} characters"}
        rendered.append({"text": text})
    return {"used": sorted(used), "rendered": rendered}


def described(error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


if __name__ == "__main__":
    whole_request = json.load(sys.stdin)
    limit(whole_request["cpu_s"], whole_request["most_bytes"])
    json.dump(answer(whole_request), sys.stdout)
