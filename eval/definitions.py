"""What every word in results.json, in the report and in the docs means. Imports nothing."""

DEFINITIONS: dict[str, str] = {
    "alpha": (
        "Expected acceptance of one draft token: the mean over the positions of the target's own continuations (up to "
        "and including the end token) of sum_x min(p(x), q(x)), where p and q are what target and draft would sample "
        "from at the decoding temperature. Needs no decoding loop; at temperature 0 it is how often the two most "
        "probable tokens agree. Pooled over positions. Of a head it is the first token it drafts, from the target's "
        "own states. A token that the draft does not have counts as q = 0."
    ),
    "alpha_greedy_draft": (
        "The same where the draft takes its most probable token and the target samples: the mean of p(argmax q). What "
        "llama.cpp accepts, and vLLM where it keeps no draft probabilities."
    ),
    "alpha_match": (
        "The same where the draft samples and a token is kept when the target samples the same: the mean of sum_x "
        "p(x) q(x)."
    ),
    "missing_mass": (
        "The target's probability on tokens that the draft cannot draft, the mean over the positions of alpha: those "
        "that it does not share (another tokenizer) or has no output row for (a draft vocabulary). alpha is at most "
        "1 minus it."
    ),
    "accept@d": (
        "Measured: how often depth d of the draft was accepted, among the steps in which depth d-1 was accepted and a "
        "token at depth d was on offer and could still be emitted. accept@1 is not alpha: alpha is a mean over all "
        "positions of the text, accept@1 over those at which steps begin, and steps begin more often where the draft "
        "was just refused. `accept_predicted` weighs positions as decoding visits them."
    ),
    "tau, predicted": (
        "Without a decoding loop: tokens of the target's own continuations over the target calls that decoding them "
        "would be expected to take, from the acceptance of every token of the text at every depth (eval/predict.py). "
        "`tau_predicted`: low and high are the 95 % bootstrap interval of the expectation. `tau_run`: low and high are "
        "where tau of one decoding run over as many prompts falls in at least 95 % of cases. `tau_independent`: 1 + "
        "alpha + alpha^2 + ..., as if tokens of a chain were accepted independently."
    ),
    "tau": (
        "Block efficiency, measured: tokens emitted per call of the target, the target's own extra token included; 1 "
        "for the target alone. Tokens after the end token or past the length limit do not count."
    ),
    "alpha_mcsd": (
        "Accepted depth over offered depth, summed over steps, as the MCSD paper defines its acceptance rate. It "
        "falls as trees deepen even with an unchanged draft; compare it only between equal trees."
    ),
    "headroom": (
        "How much more often a candidate at the root of the tree could be accepted: the optimal-transport bound on "
        "the acceptance of that many candidates, over how often the verifier accepts one, simulated with the same p "
        "and q at the same positions (up to 16 per prompt, spread evenly over the target's own continuation). 1 is "
        "optimal. About the root only; not given at temperature 0, where every lossless verifier reaches the bound, "
        "for lossy verifiers, and for trees whose shape depends on what was drafted."
    ),
    "speedup": (
        "Tokens per second over those of the target alone, on the same engine, in the same process, at batch 1, on "
        "the same prompts, runs interleaved in rotating order after a warm-up. The prefill is not included."
    ),
    "cost of a step": (
        "What one forward of the draft (`draft_call`) and verifying a tree (`verify`) take, in steps of the target "
        "alone. They are told apart by timing a step on as many nodes in a single level, which needs one forward of "
        "the draft. The speedup is tau over (forwards of the draft x draft_call + verify)."
    ),
    "gain": "A draft's figure minus the base draft's on the same prompts, paired by prompt.",
    "transfer": (
        "Gain in alpha out of distribution over gain in alpha in distribution (all ID sets pooled). Undefined unless "
        "the interval of the gain in distribution lies above zero."
    ),
    "calibration": (
        "Whether a draft is as sure as it should be: of the tokens drafted with one confidence (the draft's "
        "probability; at temperature 0, that at temperature 1), the share that is accepted. ECE is the mean distance "
        "of the two over ten bins. Of a calibrated draft the acceptance equals the confidence, and trees that grow by "
        "it suit. A draft's 64 most probable tokens at each position are counted."
    ),
    "candidates": (
        "Acceptance of the first drafted token when the verifier has k of them: the draft's k most probable (the mass "
        "of p on them, which a lossless rule for a fixed set accepts), or k drawn from q without replacement and "
        "tried in turn (MCSD), at up to 4 positions per prompt."
    ),
    "interval": (
        "95 % bootstrap over prompts: prompts are drawn with replacement and every figure is computed again from "
        "per-prompt sums, divided last. The percentiles are moved away from the median by what they are too narrow by "
        "for so few prompts (Student's t; 1.29 times as far with 8, 1.03 with 64). Differences and ratios use the "
        "same draw on both sides. Several sets are each resampled on their own. None when a set has a single prompt."
    ),
    "identical": (
        "At temperature 0: how many of the n prompts got, token for token, the output of the target decoding alone. "
        "`largest_gap`: over the others, the largest difference of the target's two logits at the first token that "
        "differs."
    ),
    "lossless": (
        "The verifier leaves the target's output distribution unchanged. With lossless: false the outputs follow "
        "another distribution, and tokens per call or per second are not comparable as they stand."
    ),
    "tokens/s, latency": (
        "Tokens per second of decoding, and its inverse, seconds per token, at batch 1; the prefill is left out."
    ),
    "memory": (
        "Of a model: its parameters, buffers and quantisation scales as they are loaded. Peak memory: the most that "
        "PyTorch held on the GPU during the run; on a CPU, the most that the whole process held."
    ),
}
