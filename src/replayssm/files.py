"""Files that are whole or not there: written under another name beside the target, and renamed when complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, in the target's folder and with its suffix; it becomes `path` if the block ends well.

    Raises:
        ValueError: the target's folder is not there.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} can't be written: {path.parent} is not a folder.")
    part = path.with_name(f".{path.stem}.part{os.getpid()}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
