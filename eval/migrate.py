"""results.json of earlier schema versions as the present one has it; what was not recorded is None, empty or false."""

from typing import Any

from eval.schema import SCHEMA_VERSION

OLDEST = 2


def migrate(document: dict[str, Any]) -> dict[str, Any]:
    """A results document of schema 2 or later with the keys that came since; the document itself is not changed.

    Since 3: headroom, remarks, the conditions of timing. Since 4: hashes of prompts, whether the machine was busy,
    alpha under the rules of other engines, predictions. Since 5: missing mass, what a step
    costs. A busy machine was a remark of schema 3 on the whole run, so that all of its timings are marked.
    """
    found = int(document["schema_version"])
    remarks = document.get("remarks", [])
    busy = any(remark["about"] == "busy_machine" for remark in remarks)
    speed = document["speed"]
    conditions = [{"busy": busy, **row} for row in speed.get("conditions", [])]
    decoding = {key: [{"headroom": None, **row} for row in document[key]] for key in ("decoding", "overall_decoding")}
    rules = dict.fromkeys(("alpha_greedy_draft", "alpha_match", "missing_mass"))
    alpha = {key: [{**rules, **row} for row in document[key]] for key in ("alpha", "overall_alpha")}
    return {
        "predictions": [],
        "diagnosis": None,
        **document,
        **alpha,
        **decoding,
        "schema_version": SCHEMA_VERSION,
        "migrated_from": document.get("migrated_from") if found == SCHEMA_VERSION else found,
        "remarks": remarks,
        "suites": [{"prompt_hashes": [], **row} for row in document["suites"]],
        "speed": {"costs": [], **speed, "conditions": conditions},
    }
