"""Token ids of documents: what is cut, what is kept, what carries a label."""

import pytest
import torch

from dprc.examples import PromptedExamples, TokenisedExamples
from dprc.losses import causal_lm_loss
from dprc.tasks import Example, Prompt
from tests.tiny import byte_tokenizer, causal_lm

PROMPT = Prompt(before="Read:", after="|Ask {question}?|Answer:")
EXAMPLES = (
    Example("short", "abc", question="who", answers=("me", "you")),
    Example("long", "0123456789" * 30, question="{what}", answers=("forty two",)),
)
# "Read:|Ask {what}?|Answer:" has 25 bytes, so 55 of 80 are left.
# Bytes of "Read:", "|Ask who?|Answer:", " me" and one end token.
FIXED = 5 + 17 + 3 + 1


def prompted(max_tokens=80, examples=EXAMPLES, **tokenizer):
    return PromptedExamples(examples, byte_tokenizer(**tokenizer), PROMPT, max_tokens)


class TestPromptedExamples:
    def test_a_short_example_is_prompt_answer_and_end(self):
        tokenizer = byte_tokenizer()
        ids, prompt = prompted()[0]
        assert tokenizer.decode(ids) == "Read:abc|Ask who?|Answer: me</s>"
        assert tokenizer.decode(ids[:prompt]) == "Read:abc|Ask who?|Answer:"

    def test_only_the_document_is_cut(self):
        tokenizer = byte_tokenizer()
        ids, prompt = prompted(max_tokens=80)[1]
        text = tokenizer.decode(ids)
        assert len(ids) == 80
        assert text.startswith("Read:0123456789")
        assert text.endswith("|Ask {what}?|Answer: forty two</s>")
        document = text.removeprefix("Read:").split("|")[0]
        assert EXAMPLES[1].text.startswith(document)
        assert tokenizer.decode(ids[prompt:]) == " forty two</s>"

    @pytest.mark.parametrize("max_tokens", [FIXED, FIXED + 1, 4096])
    def test_the_context_is_filled_and_never_exceeded(self, max_tokens):
        example = Example("x", "y" * 5000, question="who", answers=("me",))
        ids, _ = prompted(max_tokens, [example])[0]
        assert len(ids) == max_tokens

    def test_no_room_for_the_words_around_is_refused_by_document(self):
        message = rf"task.max_tokens: .*'short' need {FIXED} tokens or more, got {FIXED - 1}"
        with pytest.raises(ValueError, match=message):
            prompted(FIXED - 1, EXAMPLES[:1])

    def test_a_very_long_answer_is_refused_rather_than_cut(self):
        with pytest.raises(ValueError, match="document 'x' need"):
            prompted(80, [Example("x", "y", answers=("z" * 500,))])

    def test_a_start_token_is_used_where_the_tokenizer_has_one(self):
        ids, prompt = prompted(bos=True)[0]
        assert ids[0] == 1
        assert ids.count(1) == 1
        assert prompt == FIXED - 4 + 3 + 1
        assert len(prompted(bos=True)[1][0]) == 80

    def test_prompt_of_a_test_document_leaves_room_for_the_answer(self):
        examples = prompted(max_tokens=80)
        assert len(examples.prompt_ids(1, 30)) == 50
        assert byte_tokenizer().decode(examples.prompt_ids(1, 30)).endswith("|Answer:")
        with pytest.raises(ValueError, match=r"task.max_new_tokens: 70 .*; at most 55 do"):
            examples.prompt_ids(1, 70)

    def test_labels_are_the_answer_and_the_end_alone(self):
        examples = prompted()
        batch = examples.collate([examples[0], examples[1]])
        ids, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"]
        assert ids.shape == labels.shape == mask.shape == (2, 80)
        tokenizer = byte_tokenizer()
        for row, answer in enumerate((" me</s>", " forty two</s>")):
            kept = labels[row] != -100
            assert tokenizer.decode(labels[row][kept]) == answer
            assert torch.equal(labels[row][kept], ids[row][kept])
        assert mask.sum(1).tolist() == [len(examples[0][0]), 80]

    def test_the_loss_is_the_mean_over_the_samples_own_answer(self):
        examples, model = prompted(), causal_lm()
        items = [examples[0], examples[1]]
        together = causal_lm_loss(model, examples.collate(items), chunk_tokens=7)
        for loss, (ids, prompt) in zip(together, items, strict=True):
            logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            terms = [-logits[t - 1, ids[t]] for t in range(prompt, len(ids))]
            torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-4, atol=1e-5)

    def test_what_becomes_of_an_example_depends_on_it_alone(self):
        together, alone = prompted(), prompted(examples=EXAMPLES[1:])
        assert together[1] == alone[0]
        assert len(together) == 2


class TestTokenisedExamples:
    def test_the_end_of_a_document_is_cut(self):
        examples = [Example("a", "abcdef", 1), Example("b", "ab", 0)]
        cut = TokenisedExamples(examples, byte_tokenizer(), 4)
        assert [byte_tokenizer().decode(cut[i][0]) for i in range(2)] == ["abcd", "ab"]
        batch = cut.collate([cut[0], cut[1]])
        assert batch["labels"].tolist() == [1, 0]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
