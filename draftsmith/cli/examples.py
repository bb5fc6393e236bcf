"""Command lines for the help. Each runs on the files of `draftsmith demo`."""

ROAD = """\
The road, step by step or with `align` alone:
  draftsmith distill --target T --prompts P --out set             # what the target answers
  draftsmith train --data set --draft D --target T --objective jsd:beta=0.5 --out draft  # learn it
  draftsmith eval --target T --draft base=D draft --id P --out e  # is it worth serving?
  draftsmith decode --target T --draft draft --prompt TEXT        # use it
  draftsmith align --target T --prompts P --out mine              # all of this in one command"""

_PAIR = "--target out/demo/pair/target --draft out/demo/pair/base"
_ALIGNED = "--target out/demo/pair/target --draft out/demo/jsd-balanced"
_PROMPTS = "--prompts out/demo/prompts/prose.train.jsonl"

EXAMPLES = {
    "demo": "draftsmith demo --out out/demo",
    "align": f"draftsmith align {_PAIR} {_PROMPTS} --out out/mine",
    "init": "draftsmith init --target out/demo/pair/target --method prune --out out/pruned",
    "distill": f"draftsmith distill --target out/demo/pair/target {_PROMPTS} --out out/set",
    "train": f"draftsmith train --data out/demo/distilled {_PAIR} --objective fkl --out out/draft",
    "decode": f'draftsmith decode {_ALIGNED} --prompt "Return the"',
    "eval": f"draftsmith eval {_ALIGNED} --id out/demo/prompts/prose.jsonl --out out/eval",
    "doctor": f"draftsmith doctor {_ALIGNED}",
    "export": "draftsmith export --draft out/demo/jsd-balanced --format hf --out out/exported",
    "plan": f"draftsmith plan {_ALIGNED} {_PROMPTS} --out out/plan.json",
    "status": "draftsmith status out/demo",
}
