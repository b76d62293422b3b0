"""What is said when the Hugging Face hub refuses: one line that names the flag and says what to do.

Owns the errors of `huggingface_hub`. Never shows a token, nor the library's own message, which may
hold one and runs over many lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = "run the command again; files that are complete are kept"


@contextmanager
def explained(repo_id: str, revision: str, token: str | None) -> Iterator[None]:
    """Turn the library's errors into a ValueError of one line. Errors of the disk pass through."""
    from huggingface_hub import errors

    try:
        yield
    # hf_xet, which transfers large files, raises RuntimeError.
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        # What kept the library from the hub, if it then looked on the disk instead.
        is_local = isinstance(error, errors.LocalEntryNotFoundError)
        cause = (is_local and error.__cause__) or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise  # of the disk, not of the connection
        raise ValueError(f"--repo_id {repo_id}{_reason(cause, revision, token)}") from None


def _reason(error: BaseException, revision: str, token: str | None) -> str:
    """What follows the name of the repository."""
    from huggingface_hub import errors, get_token

    has_token = bool(token or get_token())
    # Specific errors before those that they derive from.
    if isinstance(error, errors.GatedRepoError):
        state = "this token may not read it" if has_token else "no token was found"
        return (
            f" is gated and {state}; accept its terms on its page, then give --hf_token, "
            "set HF_TOKEN or log in"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f" has no --revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        state = "or this token may not see it" if has_token else "or is private (no token)"
        return f" does not exist on the hub, {state}"
    if isinstance(error, errors.HFValidationError):
        return " is not a name on the hub; it looks like owner/model"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ": HF_HUB_OFFLINE is set; unset it to download"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        known = {401: "the token is not valid", 403: "this token may not read it"}
        return f": the hub answered {status}; {known.get(status, AGAIN)}"
    return f": the hub cannot be reached ({type(error).__name__}); {AGAIN}"
