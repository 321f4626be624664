"""Asks a hub what belongs to a model: the commit that a revision is now, and names, sizes and digests of its files.

By the huggingface_hub library, so that endpoints, tokens and errors are the hub's own: HF_ENDPOINT names a mirror,
HF_TOKEN or `hf auth login` a token. Only the list comes this way. The bytes are fetched by `transfer`, because a
library in a thread can neither be cancelled nor slowed down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote

from llmgw.node.weights.choose import chosen, entry_of
from llmgw.node.weights.errors import FetchFailed, Unreachable
from llmgw.node.weights.manifest import File, Manifest
from llmgw.node.weights.transfer import retry_after
from llmgw.sources import HubSource, safe

_WITHIN = 30.0


def endpoint(environ: Mapping[str, str] | None = None) -> str:
    """The hub's address, without a slash at its end."""
    return ((environ or os.environ).get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def url(base: str, source: HubSource, revision: str, name: str) -> str:
    """Where a file's bytes are. Not by the library: importing it takes longer than the agent's loop may stand still."""
    return f"{base}/{source.repository}/resolve/{quote(revision, safe='')}/{quote(name)}"


class NoRevision(FetchFailed):
    """The repository is there, and not at this commit, branch or tag."""


def listed(source: HubSource, text: str, base: str, commit: str = "") -> Manifest:
    """The manifest of a source as the hub has it now, or at a `commit` that it was once.

    Blocks; raises FetchFailed, Unreachable for what may pass.
    """
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi(endpoint=base).model_info(
            source.repository, revision=commit or source.revision, files_metadata=True, timeout=_WITHIN
        )
    except errors.OfflineModeIsEnabled:
        raise Unreachable(
            f"{text}: the agent's environment forbids the hub (HF_HUB_OFFLINE)", remedy="unset it, or use a path"
        ) from None
    except errors.GatedRepoError:
        raise FetchFailed(
            f"{text}: {base} gives this model only to those who accepted its terms",
            remedy="accept them on the hub and give the agent that account's token (HF_TOKEN)",
        ) from None
    except errors.RevisionNotFoundError:
        raise NoRevision(
            f"{text}: the repository has no revision {commit or source.revision!r}",
            remedy="see its branches, tags and commits",
        ) from None
    except errors.RepositoryNotFoundError:
        raise FetchFailed(
            f"{text}: {base} knows no model {source.repository!r}, or not for this account",
            remedy="check the name; for a private model give the agent a token (HF_TOKEN)",
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise FetchFailed(
                f"{text}: {base} refuses ({status})", remedy="check the agent's token (HF_TOKEN)"
            ) from None
        later = Unreachable(f"{text}: {base} answers {status}", remedy="see whether the hub or mirror works")
        later.after = retry_after(error.response.headers)
        raise later from None
    except errors.HFValidationError as error:
        raise FetchFailed(f"{text} names no repository of a hub: {error}") from None
    except Exception as error:  # the library's HTTP client, its proxies, a page that is not JSON
        words = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreachable(
            f"{text}: {base} cannot be asked ({words})", remedy="check network, proxy and HF_ENDPOINT"
        ) from None
    files = []
    for sibling in info.siblings or ():
        if sibling.size is None or not safe(sibling.rfilename):
            what = "without its size" if sibling.size is None else "with a name that cannot be one"
            raise FetchFailed(
                f"{text}: {base} lists {sibling.rfilename!r} {what}", remedy="use another mirror (HF_ENDPOINT)"
            )
        if sibling.lfs is not None:
            digest, size = f"sha256:{sibling.lfs.sha256}", sibling.lfs.size
        else:
            digest, size = f"git:{sibling.blob_id}" if sibling.blob_id else "", sibling.size
        files.append(File(name=sibling.rfilename, size=size, digest=digest))
    if not info.sha or not safe(info.sha) or "/" in info.sha:
        raise FetchFailed(f"{text}: {base} names no commit", remedy="use another mirror (HF_ENDPOINT)")
    kept = chosen(files, source.inside, text)
    return Manifest(
        source=text,
        folder=source.folder,
        revision=info.sha,
        files=kept,
        entry=entry_of(kept, source.inside),
        reference=source.revision,
    )
