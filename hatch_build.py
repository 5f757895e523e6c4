"""What the package says about itself where it is published.

The address of the repository is not known to the source: a release gives it as PENSTOCK_URL. Then
the project's links are filled in, and links of the README to other files become absolute, so that
they work on the page of a package index. Without it, the README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, url: str) -> str:
    """Return a README whose links to files of the repository are absolute."""

    def link(match: re.Match[str]) -> str:
        picture, label, target = match[1], match[2], match[3]
        if "://" in target or target.startswith("#"):
            return match[0]
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({url}/{kind}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


class Metadata(MetadataHookInterface):
    """Fills in readme and urls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml calls dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        url = os.environ.get("PENSTOCK_URL", "").rstrip("/")
        if url:
            text = absolute(text, url)
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{url}/blob/main/docs",
                "Changelog": f"{url}/blob/main/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
