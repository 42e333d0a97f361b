"""The documents: what they lead to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path):
    sources = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", sources))
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert named <= defined
