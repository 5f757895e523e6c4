"""Push a dataset to the Hugging Face Hub: a thin call of huggingface_hub, which can be repeated.

Tested against a stand-in server of the hub's protocol; not tried on the real hub.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.dataset.layout import PRIVATE_FOLDER
from penstock.dataset.plan import LOCK_NAME
from penstock.dataset.reader import Dataset
from penstock.errors import MissingExtra, StorageError, UsageError

_LEFT_OUT = [f"{PRIVATE_FOLDER}/**", LOCK_NAME, "images/**", ".cache/**", "tmp*/**", "*.part"]


def push(path: Path | str, repository: str, *, private: bool = False) -> str:
    """Upload a dataset and tag it with its version, as lerobot looks for it.

    What was uploaded before is not sent again: after a failure, push again.

    Args:
        path: The dataset.
        repository: "user/name".
        private: Make a private repository, if it does not exist.

    Returns:
        The address of the dataset.

    Raises:
        MissingExtra: huggingface_hub is not installed.
        UsageError: That is no name of a repository.
        StorageError: The hub refuses, or cannot be reached.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ModuleNotFoundError as error:
        raise MissingExtra("huggingface_hub", "hub") from error
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repository):
        raise UsageError(f"{repository[:100]!r} is no name of a repository: write user/name")
    dataset = Dataset(path)  # or there is nothing to push
    api = hub.HfApi()
    common: dict[str, Any] = {"repo_id": repository, "repo_type": "dataset"}
    folder: dict[str, Any] = {"folder_path": str(dataset.path), "ignore_patterns": _LEFT_OUT}
    try:
        url = api.create_repo(**common, private=private or None, exist_ok=True)
        # Since huggingface_hub 2 upload_folder goes on where it stopped; before, only this did.
        large = getattr(api, "upload_large_folder", None)
        if large is not None:
            large(**common, **folder)
        else:
            api.upload_folder(**common, **folder)
        with suppress(HfHubHTTPError):
            api.delete_tag(repository, tag=dataset.version, repo_type="dataset")
        api.create_tag(repository, tag=dataset.version, repo_type="dataset")
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is no name of a repository: {error}") from error
    except (HfHubHTTPError, OSError, RuntimeError) as error:  # the last, of an upload
        reason = " ".join(str(error).split())[:300]
        raise StorageError(
            f"cannot push {dataset.path} to {repository}: {reason}; check the login (hf auth "
            "login) and the network, and push again: it goes on where it stopped"
        ) from error
    return str(url)
