"""What the documents promise: their links lead somewhere, their code runs."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SNIPPETS = [code for path in DOCUMENTS for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("module", ["nn", "ops", "optim", "train", "data", "tune"])
def test_every_public_name_is_in_the_documents(module):
    text = " ".join(path.read_text() for path in DOCUMENTS)
    names = importlib.import_module(f"fusedtrain.{module}").__all__
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_training_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (snippet,) = (code for code in SNIPPETS if "Trainer(" in code)
    exec(snippet.replace("epochs=5", "epochs=1"), {})
    assert (tmp_path / "weights.pt").exists()


def test_the_swapping_snippet_runs(zoo):
    (snippet,) = (code for code in SNIPPETS if "old.state_dict()" in code)
    names = {}
    exec(snippet, names)
    assert type(names["model"].blocks[1][0].se).__module__.startswith("fusedtrain.nn")


def test_the_fuse_snippet_runs(zoo):
    (snippet,) = (code for code in SNIPPETS if "fusedtrain.fuse(" in code)
    names = {}
    exec(snippet, names)
    assert "SqueezeExcite" in str(names["report"])


def test_the_optimizer_snippet_runs():
    (snippet,) = (code for code in SNIPPETS if "swap_ema" in code)
    names = {}
    exec(snippet, names)
    assert names["optimizer"].grad_norm > 0
