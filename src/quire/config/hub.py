"""From what the user calls a model to a folder on disk. The only file that uses huggingface_hub.

A local folder never touches the network: huggingface_hub is not even imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.errors import ConfigError

__all__ = ["local_folder", "resolve_model_folder"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANTED_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
UNWANTED_FILES = ("*/*.json", "*/*.safetensors", "consolidated*", "*.bin.index.json")


def resolve_model_folder(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The folder of `model`: a local folder as it is, else a Hugging Face id, fetched if needed.

    revision: branch, tag or commit of a hub id. download_dir: cache folder in place of HF_HOME's.
    Raises ConfigError: no such path, unknown or gated repository, no network.
    """
    return local_folder(model) or _fetch(model, revision, download_dir)


def local_folder(model: str) -> Path | None:
    """The folder of `model` if there is one here, None if it is a Hugging Face id.

    Raises ConfigError if it can be neither, or the folder is none of a checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path}: has no config.json; give the folder of a Hugging Face style checkpoint"
            )
        return path
    if path.is_file():
        raise ConfigError(f"{path}: is a file; give the folder that holds config.json")
    if not HUB_ID.fullmatch(model) or model.startswith((".", os.sep, "~")):
        raise ConfigError(
            f"{model}: no such folder; give an existing folder or a Hugging Face id like "
            "'organization/name'"
        )
    return None


def _fetch(model: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors as hub_errors
    except ImportError as error:
        raise ConfigError(
            f"{model}: no such folder, and fetching it from the hub needs huggingface_hub; "
            "pip install huggingface_hub, or give a local folder"
        ) from error
    named = model if revision is None else f"{model}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(UNWANTED_FILES),
        )
    except hub_errors.GatedRepoError as error:
        raise ConfigError(
            f"{named}: the repository is gated; accept its terms on the hub and set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ConfigError(f"{named}: no such revision; check --revision") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{named}: neither a local folder nor a repository on the hub; check the spelling, "
            "or set HF_TOKEN if it is private"
        ) from error
    except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{named}: not a local folder, not in the cache, and could not be fetched ({reason}); "
            "check the network, or give a local folder"
        ) from error
    return Path(folder)
