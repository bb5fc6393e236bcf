"""What `align` says before it begins: from when a draft pays."""

from draftsmith.alignment.forecast import pays, step_costs
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.load import LoadedModels
from tests.tiny_models import stirred_head, tiny_llama


def test_it_says_from_when_a_draft_pays():
    cheap = {0.0: 1.4, 1.0: 1.5}
    assert pays(cheap) == (
        "pays: from 1.40 tokens per call at T = 0, 1.50 at T = 1, on chain:2 here (its step was "
        "timed)"
    )
    dear = {0.0: 3.4}
    assert pays(dear).endswith(": more than it can bring, so no draft pays on it")


def test_a_step_of_an_untrained_draft_is_timed():
    target = tiny_llama(0, layers=3)
    models = LoadedModels("target", target, None, {})  # type: ignore[arg-type]
    costs = step_costs(models, stirred_head("eagle", target), [3, 4, 5], [0.0, 1.0])
    assert list(costs) == [0.0, 1.0]
    assert all(ratio > 0 for ratio in costs.values())
    assert step_costs(models, MedusaHeads.fresh(target, num_heads=1), [3, 4, 5], [0.0]) == {}
