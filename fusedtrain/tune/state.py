"""What was measured so far, kept in a file after every measurement, so that a killed search goes on."""

import hashlib
import json
from pathlib import Path

from fusedtrain import _files


class State:
    """Results by name, for one question.

    Args:
        kind: of the question, "batch-size" for instance.
        key: what the results are valid for; another key has another file.
        fresh: forget what is there.
    """

    def __init__(self, kind: str, key: dict, *, fresh: bool = False):
        self.key = json.loads(json.dumps(key))
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path: Path = _files.cache_folder("tune") / f"{kind}-{digest}.json"
        if fresh:  # at once: a search that is killed before its first result goes on as what it is
            self.path.unlink(missing_ok=True)
        known = _files.read_json(self.path)
        self.results: dict = known["results"] if known is not None and known.get("key") == self.key else {}

    def add(self, name, result) -> None:
        """Keeps a result; names are strings in the file."""
        self.results[str(name)] = result
        _files.write_json(self.path, {"key": self.key, "results": self.results})

    def get(self, name):
        return self.results.get(str(name))
