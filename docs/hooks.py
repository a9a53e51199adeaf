"""MkDocs hooks: pages link as the repository needs it, to results/ and other folders beside docs/.

Files of results/ become part of the site. What else lies outside docs/ is no page: its name stays, without a link.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[1] / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of results/ to the site."""
    for path in sorted(RESULTS.iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """../results/ in the repository is results/ on the site."""
    inside = markdown.replace("](../results/", "](results/")
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", inside)
