"""What the system of other programs' servers says of itself: servers that stream completions, to
which the same requests are sent. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from magicdec.config.masking import masked
from magicdec.config.run_config import RunConfig
from magicdec.config.setting import setting
from magicdec.names import OPENAI_API, SERVER_APIS
from magicdec.systems.declaration import Drafts, Mode, Ranks, SystemDeclaration, refuse_sampling
from magicdec.systems.row_settings import PrefixSettings, RowSettings
from magicdec.systems.servers.http_client import read_key

if TYPE_CHECKING:
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions

ENDPOINT = "endpoint"
NO_URL = "none"  # in `--endpoint_metrics`, of a server whose counters are not read
SERVER_SETTINGS = ("endpoint_model", "endpoint_prompts", "endpoint_api", "endpoint_metrics")


def parse_url(text: str) -> str:
    """The base URL of a server. Raises ValueError for another text."""
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an address or a port that is none
        is_url = False
    if not is_url:
        raise ValueError(f"{masked(text)} is no URL; give one such as http://127.0.0.1:8000/v1")
    return text


def parse_urls(words: str | Sequence[str]) -> list[str]:
    return [parse_url(word) for word in ([words] if isinstance(words, str) else words)]


def parse_metrics_urls(words: str | Sequence[str]) -> list[str]:
    """As `parse_urls`, where a server may have `NO_URL`."""
    texts = [words] if isinstance(words, str) else words
    return [word if word == NO_URL else parse_url(word) for word in texts]


def check_credentials(url: str, variable: str | None, option: str = "--endpoint") -> None:
    """Raises ValueError if the key is missing, or if the URL has credentials too."""
    if variable is None:
        return
    read_key(variable)
    if urlsplit(url).username is not None:
        raise ValueError(
            f"--endpoint_key_env {variable}: {option} {masked(url)} has a user already; leave one "
            "out"
        )


@dataclass(frozen=True)
class ServersSettings(RowSettings, PrefixSettings):
    endpoint: tuple[str, ...] | None = setting(
        None,
        "An OpenAI-compatible server, such as http://127.0.0.1:8000/v1: the one to audit, or to "
        "which the mode endpoint sends the same requests. With several, the later ones are "
        "endpoint2, endpoint3, ... in tables and records, and each other flag of endpoints has one "
        "value for all or one for each.",
        metavar="URL",
        parse=parse_urls,
    )
    endpoint_model: tuple[str, ...] | None = setting(
        None, "The model as the server names it. Default: the first that it has."
    )
    endpoint_prompts: tuple[str, ...] = setting(
        ("ids",),
        "Send prompts as token ids, or as text to a server that takes no ids.",
        choices=("ids", "text"),
        can_repeat=True,
    )
    endpoint_api: tuple[str, ...] = setting(
        (OPENAI_API,),
        "The interface by which the server is asked: OpenAI's completions, SGLang's /generate, "
        "which reports drafts, or llama.cpp's /completion, which says token ids.",
        choices=tuple(SERVER_APIS),
        can_repeat=True,
    )
    endpoint_metrics: tuple[str, ...] | None = setting(
        None,
        "Where the server shows its Prometheus counters, such as http://127.0.0.1:8000/metrics, "
        "for the acceptance of drafts that its answers do not report: read before and after the "
        f"requests, which nobody else may disturb; {NO_URL} for none.",
        metavar="URL",
        parse=parse_metrics_urls,
    )
    endpoint_timeout_s: float = setting(
        300.0, "Seconds without a new token of the server after which it has stalled.", above=0
    )
    endpoint_total_s: float = setting(
        3600.0, "Seconds that one answer of the server may take.", above=0
    )
    endpoint_key_env: str | None = setting(
        None,
        "The environment variable whose value is sent to the server as a key (Authorization: "
        "Bearer). It is never shown nor kept.",
        metavar="NAME",
    )

    @property
    def num_instances(self) -> int:
        return len(self.endpoint or ())

    def server_value(self, name: str, number: int) -> Any:
        """The value that a setting of `SERVER_SETTINGS` has for the server of that number."""
        values = getattr(self, name)
        return None if values is None else values[0 if len(values) == 1 else number]

    def describe(self) -> dict[str, Any]:
        values = super().describe()
        for name in ("endpoint", "endpoint_metrics"):
            values[name] = values[name] and [masked(url) for url in values[name]]
        return values

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        if self.endpoint is None:
            raise ValueError(f"--modes {ENDPOINT} needs --endpoint URL")
        self._check_servers()
        refuse_sampling(config, f"--modes {ENDPOINT}, whose server decodes greedily")

    def _check_servers(self) -> None:
        """Raises ValueError if a setting fits neither all servers nor each of them."""
        servers = self.endpoint or ()
        if len(set(servers)) < len(servers):
            raise ValueError("--endpoint names a server twice; name each once")
        for url in servers:
            check_credentials(url, self.endpoint_key_env)
        for name in SERVER_SETTINGS:
            values = getattr(self, name)
            if values is not None and len(values) not in (1, len(servers)):
                raise ValueError(
                    f"--{name} has {len(values)} values for {len(servers)} servers of --endpoint; "
                    "give one for all or one for each"
                )
        metrics_urls = [
            self.server_value("endpoint_metrics", number) for number in range(len(servers))
        ]
        urls = [url for url in metrics_urls if url not in (None, NO_URL)]
        if len(set(urls)) < len(urls):
            raise ValueError(
                "--endpoint_metrics has the same counters for several servers; give each its own, "
                f"or {NO_URL}"
            )


SERVERS = SystemDeclaration(
    name="servers",
    page="serving.md",
    system="magicdec.systems.servers.system:Servers",
    settings=ServersSettings,
    details="magicdec.systems.servers.details:ServersDetails",
    modes={ENDPOINT: Mode(Ranks.NONE, Drafts.NEVER, "the server at --endpoint")},
)
