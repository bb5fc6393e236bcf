"""Options that concern the target are one group, for every command that loads one and for
`load_pair`.
"""

from pathlib import Path

import pytest
from huggingface_hub import constants

import draftsmith as ds
from draftsmith.core.models import load_model
from draftsmith.drafts.load import draft_fingerprint
from tests.distilled import write_rows

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize(
    "command",
    [
        "init --method prune --out out",
        pytest.param("plan --draft {draft} --out out/plan.json", marks=pytest.mark.slow),
    ],
)
def test_init_and_plan_take_the_chat_template_that_they_ask_for(
    command, door, target_dir, draft_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(TEMPLATE)
    chats = [
        {"messages": [{"role": "user", "content": f"Who is {name}?"}]} for name in ("A", "B", "C")
    ]
    write_rows(Path("chats.jsonl"), *chats)
    words = [
        *command.format(draft=draft_dir).split(),
        "--target",
        target_dir,
        "--prompts",
        "chats.jsonl",
    ]
    door.refused(*words, "--max_new_tokens", 4)
    door.ok(*words, "--max_new_tokens", 4, "--chat_template", "chat.jinja")


def test_a_revision_is_the_targets_alone(door, target_dir, draft_dir, tmp_path, monkeypatch):
    repository = tmp_path / "models--owner--model"
    for directory in ("refs", "snapshots"):
        (repository / directory).mkdir(parents=True)
    for name, digit, source in (("main", "0", target_dir), ("older", "1", draft_dir)):
        (repository / "refs" / name).write_text(digit * 40)
        (repository / "snapshots" / (digit * 40)).symlink_to(source)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    pair = ds.load_pair("owner/model", draft=target_dir, revision="older", device="cpu")
    expected = [
        draft_fingerprint(load_model(name, device="cpu")) for name in (draft_dir, target_dir)
    ]
    assert [draft_fingerprint(model) for model in (pair.target, *pair.drafts.values())] == expected
    for words in ("decode --prompt The --max_new_tokens 4", f"doctor --draft {draft_dir}"):
        codes = [
            door(*words.split(), "--target", "owner/model", "--revision", name)[0]
            for name in ("older", "none")
        ]
        assert codes == [0, 2]
