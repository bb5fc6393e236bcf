"""How other engines serve a target with a draft, by kind of draft (their sources and documentation, November 2026)."""

from dataclasses import dataclass

_VLLM = (
    'vllm serve {target} --speculative-config \'{{"method": "%s", "model": "{draft}", "num_speculative_tokens": {n}}}\''
)
_SGLANG = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm %s "
    "--speculative-draft-model-path {draft} --speculative-num-steps {n} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {n_and_root}"
)
_LLAMA = "llama-server -m {target}/model.gguf -md {draft}/model.gguf --spec-type %s --spec-draft-n-max {n}"
# Formats that an engine's own tool writes, and not `draftsmith export`.
_TOOLS = {
    "openvino": "optimum-cli export openvino --model {name} --task text-generation-with-past --weight-format fp32 {out}"
}
_AUTHORS = "EaModel.from_pretrained(base_model_path={target}, ea_model_path={draft}%s)"


@dataclass(frozen=True)
class Serving:
    """The command, and the formats of `draftsmith export` that it reads; None where it reads the models' own."""

    command: str
    draft_format: str | None = None
    target_format: str | None = None

    def commands(self, kind: str, target: str, draft: str, tokens: int) -> tuple[tuple[str, ...], str]:
        """What writes what it reads, in order, and what serves the pair with `tokens` drafted at a time."""
        exports = []
        named = {"draft": draft, "target": target}
        for role, form in (("draft", self.draft_format), ("target", self.target_format)):
            if form is None:
                continue
            name = named[role]
            named[role] = f"{name.rstrip('/').rsplit('/', 1)[-1]}.{form}"
            own = f" --target {target}" if role == "draft" and kind != "draft" else ""
            line = _TOOLS.get(form, f"draftsmith export --draft {{name}}{own} --format {form} --out {{out}}")
            exports.append(line.format(name=name, out=named[role]))
        return tuple(exports), self.command.format(**named, n=tokens, n_and_root=tokens + 1)


# Engine -> kind of draft ("draft" for a language model) -> how it is served.
SERVING: dict[str, dict[str, Serving]] = {
    "SafeAILab/EAGLE": {
        "eagle": Serving(_AUTHORS % "", "eagle"),
        "eagle3": Serving(_AUTHORS % ", use_eagle3=True", "eagle"),
    },
    "transformers": {
        "draft": Serving(
            'draft.generation_config.update(num_assistant_tokens={n}, num_assistant_tokens_schedule="constant", '
            "assistant_confidence_threshold=0); target.generate(..., assistant_model=draft)"
        )
    },
    "vllm": {
        "draft": Serving(_VLLM % "draft_model"),
        "eagle": Serving(_VLLM % "eagle", "eagle"),
        "eagle3": Serving(_VLLM % "eagle3", "speculators"),
        "medusa": Serving(_VLLM % "medusa", "medusa"),
    },
    "sglang": {
        "draft": Serving(_SGLANG % "STANDALONE"),
        "eagle": Serving(_SGLANG % "EAGLE", "sglang"),
        "eagle3": Serving(_SGLANG % "EAGLE3", "sglang"),
    },
    "llama.cpp": {
        "draft": Serving(_LLAMA % "draft-simple", "gguf", "gguf"),
        "eagle3": Serving(_LLAMA % "draft-eagle3", "gguf", "gguf"),
    },
    "openvino": {
        "draft": Serving(
            'LLMPipeline("{target}", "CPU", draft_model=draft_model("{draft}", "CPU"))'
            "  # config.num_assistant_tokens = {n}",
            "openvino",
            "openvino",
        )
    },
    "onnxruntime-genai": {
        "draft": Serving(
            "python -m onnxruntime_genai.models.builder -m {target} -o onnx -p fp32 -e cpu  # and {draft}; then its "
            'genai_config: "type": "speculative", "draft": ..., "max_draft_tokens": {n}'
        )
    },
}
