"""Uploads to the Hugging Face Hub, with one clear line for whatever goes wrong."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.weights import one_line

# The HTTP client's base class, whichever client this release of huggingface_hub is built on.
_ClientError = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def check_repo_id(repo_id: str) -> None:
    """Raise UserError unless `repo_id` may name a Hub repository: `name` or `owner/name`."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo_id!r} is not a Hub id such as owner/name: {one_line(error)}") from error


def upload_folder(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a folder as one commit and return the repository's address.

    Args:
        folder: what to upload; it is left as it is, whatever happens.
        repo_id: `name` (of the token's owner) or `owner/name`; created if need be.
        private: whether a new repository is private; an existing one keeps its visibility.

    Raises:
        UserError: no token, no rights, no such owner, no network, or a refusal by the Hub.
    """
    try:
        if get_token() is None:
            raise LocalTokenNotFoundError
        api = HfApi()
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=url.repo_id, commit_message="Upload model with palimpsa-surgery")
    except (OSError, ValueError, _ClientError) as error:
        raise UserError(
            f"nothing was uploaded to {repo_id}: {_problem(error)}; the export is kept in {folder}"
        ) from error
    return str(url)


def _problem(error: Exception) -> str:
    """Say in a few words what went wrong."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return "no Hugging Face token was found (run `hf auth login`, or set HF_TOKEN)"
    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub is switched off (HF_HUB_OFFLINE)"
    if status == 401:
        return "the Hub did not accept the token (run `hf auth login` again, or set HF_TOKEN)"
    if status == 403:
        return "the token may not write there (it needs write rights, and you a role in that organisation)"
    if status == 404:
        return "there is no such user or organisation, or the token may not see it"
    if isinstance(error, BadRequestError):
        return f"the Hub refused it: {one_line(error)}"
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answered with an error: {one_line(error)}"
    if isinstance(error, (_ClientError, ConnectionError, TimeoutError)):
        return f"the Hub cannot be reached ({one_line(error)})"
    return one_line(error)
