"""What is said when the Hugging Face hub refuses: one line, with the flag, that says what to do.

Owns the library's errors. Never shows a token, nor the library's own words, which may hold one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained(repo_id: str, revision: str, token: str | None) -> Iterator[None]:
    """The hub's refusals as one line that says what to do. Errors of the library are not shown as
    they are: they run over many lines and may hold what was sent."""
    from huggingface_hub import errors

    named = f"--repo_id {repo_id}"
    try:
        yield
    except errors.GatedRepoError:
        state = "this token may not read it" if _has_token(token) else "no token was found"
        raise ValueError(
            f"{named} is gated and {state}; accept its terms on its page, then give --hf_token, "
            "set HF_TOKEN or log in"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{named} has no --revision {revision}") from None
    except errors.RepositoryNotFoundError:
        state = "or this token may not see it" if _has_token(token) else "or is private (no token)"
        raise ValueError(f"{named} does not exist on the hub, {state}") from None
    except errors.HFValidationError:
        raise ValueError(f"{named} is not a name on the hub; it looks like owner/model") from None
    except errors.OfflineModeIsEnabled:
        raise ValueError(f"{named}: HF_HUB_OFFLINE is set; unset it to download") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        known = {401: "the token is not valid", 403: "this token may not read it"}
        what = known.get(status, "run the command again; it continues where it stopped")
        raise ValueError(f"{named}: the hub answered {status}; {what}") from None
    except (errors.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the connection
        raise ValueError(
            f"{named}: the hub cannot be reached ({type(error).__name__}); run the command again, "
            "it continues where it stopped"
        ) from None


def _has_token(token: str | None) -> bool:
    from huggingface_hub import get_token

    return bool(token or get_token())
