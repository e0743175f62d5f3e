"""Resolves the user's name of a model to a folder on disk. The only file that uses huggingface_hub.

A local folder never touches the network: huggingface_hub is not even imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.gguf import GGUF_MAGIC, is_gguf

__all__ = ["local_folder", "resolve_model_folder", "resolve_tokenizer_folder"]

HUB_ID = re.compile(r"([A-Za-z0-9]([\w.-]*\w)?/)?[A-Za-z0-9]([\w.-]*\w)?")
NOT_IN_HUB_IDS = ("--", "..")
MAX_HUB_ID = 96
"""Characters of a repository's name."""

ADDRESS = re.compile(r"(https?://)?[^/]+\.[^/]+/(?P<rest>[^/]+/[^/]+)(/tree/.*|/)?")
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WANTED_FILES = (*TEXT_FILES, "*.safetensors")
GGUF_TAG = re.compile(r"(?P<repository>[^:]+):(?P<tag>[\w.-]+)")
UNWANTED_FILES = (
    "*[!g]/*.json", "*g/*[!g].json", "*/*.safetensors", "consolidated*", "*.bin.index.json"
)  # fmt: skip
"""Folders hold nothing wanted but `1_Pooling/config.json`. Patterns know no "but", so the first two
leave what ends as it does."""


def resolve_model_folder(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    more: Sequence[str] = (),
) -> Path:
    """The folder of `model`: a local folder or GGUF file as it is, else a Hugging Face id, fetched
    if needed. "organization/name:Q4_K_M" is the GGUF file of that type in a repository.

    revision: branch, tag or commit of a hub id. download_dir: cache folder in place of HF_HOME's.
    more: files to fetch beside those of a model.
    Raises ConfigError: no such path, unknown or gated repository, no network.
    """
    found = local_folder(model)
    if found is not None:
        return found
    tagged = GGUF_TAG.fullmatch(model)
    if tagged is None:
        return _fetch(model, revision, download_dir, (*WANTED_FILES, *more))
    tag = tagged["tag"].removesuffix(".gguf")
    spellings = dict.fromkeys((tag, tag.upper(), tag.lower()))
    patterns = [f"*{name}{rest}" for name in spellings for rest in (".gguf", "-*-of-*.gguf")]
    folder = _fetch(tagged["repository"], revision, download_dir, patterns, ("*mmproj*",))
    return _pick_gguf(folder, tagged["repository"], tag)


def resolve_tokenizer_folder(
    tokenizer: str, model: str | None, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder or GGUF file of a tokenizer that is named beside `model`: any local folder,
    or a Hugging Face id. No weights are fetched for an id unless it names a GGUF file.

    revision, download_dir, errors: same as in `resolve_model_folder`, but a revision applies to the
    model's repository alone; others are taken as they are now.
    """
    path = Path(tokenizer).expanduser()
    if path.is_dir():  # its reader says which file lacks
        return path
    repository = tokenizer.partition(":")[0]
    if model is None or repository != model.partition(":")[0]:
        revision = None
    if repository != tokenizer or local_folder(tokenizer) is not None:
        return resolve_model_folder(tokenizer, revision, download_dir)
    return _fetch(tokenizer, revision, download_dir, TEXT_FILES)


def _pick_gguf(folder: Path, repository: str, tag: str) -> Path:
    """The one model of type `tag` in a snapshot, by its first part."""
    name = re.compile(rf"(?:.*[-_.])?{re.escape(tag)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = sorted(
        path for path in folder.rglob("*.gguf") if name.fullmatch(path.name) and path.is_file()
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"{repository}:{tag}: the repository has no GGUF file whose name ends so; look up its "
            "files, and name the type of one, such as Q4_K_M"
        )
    names = ", ".join(str(path.relative_to(folder)) for path in found[:5])
    raise ConfigError(f"{repository}:{tag}: several files fit ({names}); name one of them whole")


def _starts_like_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def local_folder(model: str) -> Path | None:
    """The folder or GGUF file of `model` if there is one here, None if it is a Hugging Face id.

    Raises ConfigError if it can be neither, or the folder is none of a checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            if files:
                raise ConfigError(
                    f"{path}: has no config.json; give a GGUF file, such as {files[0]}"
                )
            raise ConfigError(
                f"{path}: has no config.json; give the folder of a Hugging Face style checkpoint"
            )
        return path
    if is_gguf(path):
        return path
    if path.is_file():
        if _starts_like_gguf(path):
            raise ConfigError(f"{path}: is a GGUF file; rename it so that it ends in .gguf")
        raise ConfigError(
            f"{path}: is a file, and no *.gguf one; give the folder that holds config.json"
        )
    tagged = GGUF_TAG.fullmatch(model)
    if tagged is None and path.suffix.lower() == ".gguf":
        raise ConfigError(f"{model}: no such file; give the path of a GGUF file that exists")
    repository = tagged["repository"] if tagged else model
    if not _is_hub_id(repository):
        raise ConfigError(
            f"{model}: no such folder; give an existing folder or a Hugging Face id like "
            f"{_likely_id(repository)!r}"
        )
    return None


def _is_hub_id(name: str) -> bool:
    """Return whether the hub could have a repository of that name."""
    return (
        HUB_ID.fullmatch(name) is not None
        and not any(part in name for part in NOT_IN_HUB_IDS)
        and not name.endswith(".git")
        and len(name.rpartition("/")[2]) <= MAX_HUB_ID
    )


def _likely_id(name: str) -> str:
    """Return the id that an address, a folder of the hub's cache or a slip stands for, if that can
    be seen; else an example."""
    address = ADDRESS.fullmatch(name)
    if address is not None:
        name = address["rest"]
    name = name.removeprefix("models--").replace("--", "/").removesuffix(".git").rstrip("-._/")
    return name if "/" in name and _is_hub_id(name) else "organization/name"


def _fetch(
    model: str,
    revision: str | None,
    download_dir: str | None,
    wanted: Sequence[str] = WANTED_FILES,
    unwanted: Sequence[str] = UNWANTED_FILES,
) -> Path:
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
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
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
    except Exception as error:  # each library of the client has errors of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{named}: not a local folder, not in the cache, and could not be fetched ({reason}); "
            "check the network and its proxy, or give a local folder"
        ) from error
    return Path(folder)
