"""Result files are whole or absent."""

import json
import os

import pytest

from dprc.results import write_json_atomic, write_result, write_text_atomic


def test_a_result_has_the_five_sections(tmp_path):
    write_result(tmp_path / "a" / "r.json", config={"x": 1}, metrics={"y": 2}, privacy=None)
    result = json.loads((tmp_path / "a" / "r.json").read_text())
    assert list(result) == ["config", "metrics", "privacy", "environment", "valid"]
    assert result["environment"]["versions"]["torch"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_text_atomic(tmp_path / "r", "old")

    def full_disk(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_text_atomic(tmp_path / "r", "new")
    assert (tmp_path / "r").read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["r"]


def test_a_number_that_json_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(tmp_path / "r", {"x": float("nan")})
    assert not list(tmp_path.iterdir())
