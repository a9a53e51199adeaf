"""MkDocs hooks: pages show the pictures of results/, which lie beside docs/, by the links that the repository needs."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[1] / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add results/*.png to the site."""
    for path in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """../results/ in the repository is results/ on the site."""
    return markdown.replace("](../results/", "](results/")
