"""--push=USER/NAME: an export goes to the Hugging Face hub, as a repository that was not there before."""

from pathlib import Path

from nanonorm.errors import BadInput, needed
from nanonorm.hub import HUB_TIMEOUT_S


def check_repository(name: str):
    """Ask all that can be asked before the work is done. Raises: BadInput."""
    hub = needed("huggingface_hub")
    try:
        hub.utils.validate_repo_id(name)
    except hub.errors.HFValidationError as e:
        raise BadInput(f"--push={name} names no repository: {' '.join(str(e).split()):.200}") from None
    if "/" not in name:
        raise BadInput(f"--push={name} lacks the account: --push=USER/NAME")
    if hub.get_token() is None:
        raise BadInput("--push needs a token that may write: run `hf auth login`, or set HF_TOKEN")
    api, none = hub.HfApi(), hub.errors.RepositoryNotFoundError
    if asked(name, api.model_info, none, repo_id=name, timeout=HUB_TIMEOUT_S) is not None:
        remedy = "name another, or update it yourself: hf upload USER/NAME DIR"
        raise BadInput(f"--push={name} is on the hub already; {remedy}")
    asked(name, api.whoami)


def push(folder: Path, name: str, private: bool) -> str:
    """Make the repository and upload the folder to it; returns its address. Raises: BadInput."""
    api = needed("huggingface_hub").HfApi()
    url = asked(name, api.create_repo, repo_id=name, private=private or None)  # None: as the account has it
    asked(name, api.upload_folder, repo_id=name, folder_path=folder, commit_message="Exported by nanonorm")
    return str(url)


def asked(name: str, question, none=(), **more):
    """What the hub answers, or None for an error that is `none`. Raises: BadInput for any other."""
    try:
        return question(**more)
    except none:
        return None
    except Exception as e:  # its type depends on the client's version and on the network in between
        said = f"{type(e).__name__}: {' '.join(str(e).split()):.200}"
        raise BadInput(f"--push={name}: the Hugging Face hub does not take it ({said})") from None
