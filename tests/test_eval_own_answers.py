"""Second questions of a suite are asked behind the target's own greedy answers."""

import torch

from draftsmith.core.models import eos_ids, load_model
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.loading import load
from draftsmith.eval.request import check
from tests.distilled import write_rows

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = [["The quick", "and then?"], ["Numbers such as", "why?"], ["word " * 200, "long?"]]
TOKENS = 12


def read(tmp_path, target, draft, **options):
    file = write_rows(tmp_path / "q.jsonl", *({"prompt": turns} for turns in QUESTIONS))
    config = EvalConfig(
        target=target,
        draft=[draft],
        id=[f"@mt-bench-own:{file}"],
        out=str(tmp_path / "out"),
        max_new_tokens=TOKENS,
        device="cpu",
        **options,
    )
    request = check(config)
    (suite,), _ = load(config, request.drafts, request.id_sets, {})
    return suite


def greedy_answer(target, ids):
    """The target's most probable token, one after another."""
    model = load_model(target, device="cpu")
    output: list[int] = []
    while len(output) < TOKENS and not set(output) & set(eos_ids(model)):
        logits = model(torch.tensor([ids + output])).logits
        output.append(int(logits[0, -1].argmax()))
    return output


def test_second_questions_follow_what_the_target_answers_to_the_first(
    tmp_path, target_dir, draft_dir
):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    suite = read(tmp_path, target_dir, draft_dir, chat_template=str(template))
    assert suite.name == "mt-bench-own" and suite.rows == 3
    assert [where for where, _ in suite.skipped] and len(suite.prompts) == 2
    tokenizer = load_tokenizer(target_dir)
    for (first, second), prompt in zip(QUESTIONS, suite.prompts, strict=False):
        asked = tokenizer.encode(f"<user>{first}\n<assistant>", add_special_tokens=False)
        answer = tokenizer.decode(greedy_answer(target_dir, asked), skip_special_tokens=True)
        talk = f"<user>{first}\n<assistant>{answer}\n<user>{second}\n<assistant>"
        assert list(prompt.ids) == tokenizer.encode(talk, add_special_tokens=False)
    again = read(tmp_path, target_dir, draft_dir, chat_template=str(template))
    assert again.digest == suite.digest


def test_a_target_without_a_chat_template_is_refused(tmp_path, target_dir, draft_dir, golden):
    with golden.raises():
        read(tmp_path, target_dir, draft_dir)


def test_max_prompts_limits_the_questions(tmp_path, target_dir, draft_dir):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    suite = read(tmp_path, target_dir, draft_dir, chat_template=str(template), max_prompts=1)
    assert len(suite.prompts) == 1 and suite.more
