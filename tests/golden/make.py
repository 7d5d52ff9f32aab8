"""Makes the files of this folder from the originals: `python -m tests.golden.make FOLDER_OF_ORIGINALS [OUTPUT]`.

The originals are `golden/*.safetensors`, written by the authors' code in double precision and rounded to single, and
`specs/*_keys.json`, the names and shapes in the released checkpoints. Files up to 250 KB are taken byte for byte; the
key lists are joined and compressed.
"""

import gzip
import json
import shutil
import sys
from pathlib import Path

LIMIT = 250_000  # bytes a file


def make(originals: Path, output: Path) -> None:
    for path in sorted((originals / "golden").glob("*.safetensors")):
        if path.stat().st_size <= LIMIT:
            shutil.copyfile(path, output / path.name)
    keys = {}
    for path in sorted((originals / "specs").glob("*_keys.json")):
        content = json.loads(path.read_text("utf-8"))
        keys[path.stem.removesuffix("_keys")] = content.get("keys", content)
    text = json.dumps(keys, separators=(",", ":"))
    (output / "keys.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
