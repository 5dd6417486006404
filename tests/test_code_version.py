from __future__ import annotations

import subprocess

import pytest

from lsverify import code_version as module
from lsverify.code_version import code_version, committed, hash_of


@pytest.fixture
def checkout(tmp_path):
    """A repository with two folders, and how to run git in it."""

    def git(*arguments):
        named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    for name in ("code", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path, git


def folders(root):
    return root / "code", root / "data"


def test_a_clean_checkout_is_its_commit_whatever_lies_beside(checkout):
    root, git = checkout
    (root / "out").mkdir()
    (root / "out" / "curve").write_text("")
    assert committed(folders(root)) == git("rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("name", ["code/file", "data/file", "code/new"])
def test_what_was_changed_or_added_is_no_commit(checkout, name):
    root, _ = checkout
    (root / name).write_text("changed")
    assert committed(folders(root)) is None


def test_a_folder_that_git_ignores_or_does_not_know_is_no_commit(checkout, tmp_path_factory):
    root, _ = checkout
    (root / ".gitignore").write_text("installed/\n")
    (root / "installed").mkdir()
    (root / "installed" / "file").write_text("")
    assert committed((root / "installed",)) is None
    assert committed((tmp_path_factory.mktemp("elsewhere"),)) is None


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    root, _ = checkout
    monkeypatch.setenv("PATH", "")
    assert committed(folders(root)) is None


def test_a_hash_sees_names_and_contents_and_nothing_that_python_made(tmp_path):
    (tmp_path / "a").write_text("1")
    first = hash_of((tmp_path,))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("")
    assert hash_of((tmp_path,)) == first
    (tmp_path / "a").write_text("2")
    assert (second := hash_of((tmp_path,))) != first
    (tmp_path / "a").rename(tmp_path / "b")
    assert hash_of((tmp_path,)) not in (first, second)


def test_a_version_is_code_and_packages(monkeypatch):
    found = code_version()
    assert found == code_version()
    assert found.name.startswith(f"{found.code}-")
    assert set(found.packages) == {"numpy", "torch", "transformers"}
    monkeypatch.setattr(module, "committed", lambda folders: None)
    assert code_version().code.startswith("files-")
    monkeypatch.setattr(module, "version", lambda name: "0.1")
    assert code_version().name != found.name
