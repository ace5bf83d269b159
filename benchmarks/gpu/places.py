"""Files of the repository that the check reads. Standard library only."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "docs" / "recipes" / "en-de-gpu.toml"
CORPUS = ROOT / "build" / "data" / "libreoffice-help" / "de"
"""Where docs/recipes/en-de.md has the corpus put."""
SAMPLE = ROOT / "tests" / "data" / "libreoffice-help-de.po"
"""Two thousand messages, for where the whole corpus was not fetched."""
