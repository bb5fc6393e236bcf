"""Which option somebody means who types a name that no option has: a name of another tool, or a
typing error.
"""

import difflib
from collections.abc import Sequence

# What other tools call an option, by our names for it, the likeliest first.
CALLED: list[tuple[Sequence[str], str]] = [
    (
        ("epochs", "steps"),
        "num_train_epochs num_epochs n_epochs train_epochs max_epochs epochs",
    ),
    (
        ("steps",),
        "max_steps num_steps total_steps train_steps training_steps max_train_steps "
        "num_training_steps iterations max_iters",
    ),
    (("optim.lr",), "learning_rate"),
    (("optim.schedule",), "lr_scheduler_type lr_scheduler lr_schedule scheduler"),
    (("optim.warmup_steps",), "warmup warmup_ratio num_warmup_steps"),
    (("optim.name",), "optimizer optim"),
    (("optim.clip_norm",), "max_grad_norm gradient_clipping grad_clip clip_grad_norm"),
    (("optim.beta1",), "adam_beta1"),
    (("optim.beta2",), "adam_beta2"),
    (
        ("train.batch_size", "batch_size"),
        "per_device_train_batch_size train_batch_size micro_batch_size",
    ),
    (("batch_size",), "batch bs"),
    (("eval.batch_size", "batch_size"), "per_device_eval_batch_size eval_batch_size"),
    (("rows_per_step", "accumulation"), "gradient_accumulation_steps grad_accum"),
    (("rows_per_step", "batch_size"), "global_batch_size total_batch_size"),
    (("gradient_checkpointing",), "activation_checkpointing recompute"),
    (
        ("max_length", "max_new_tokens"),
        "max_seq_length max_seq_len seq_length seq_len model_max_length cutoff_len max_length",
    ),
    (
        ("max_new_tokens", "max_length"),
        "max_tokens max_completion_length max_response_length max_output_tokens new_tokens",
    ),
    (("num_samples",), "n num_return_sequences num_generations samples_per_prompt best_of"),
    (
        ("out",),
        "output_dir output output_path output_file output_directory out_dir save_dir save_path o",
    ),
    (
        ("target",),
        "model model_name model_path model_id model_name_or_path target_model teacher "
        "teacher_model teacher_model_name_or_path",
    ),
    (("target", "base"), "base_model"),
    (
        ("draft",),
        "draft_model draft_model_name_or_path drafts drafter assistant assistant_model "
        "speculative_model speculative_draft_model_path student student_model",
    ),
    (
        ("data", "prompts", "id"),
        "dataset dataset_name dataset_path train_file train_data train_dataset training_data "
        "data_path data_files input input_file",
    ),
    (("prompts", "id", "data"), "data prompts prompt prompt_file prompts_file questions"),
    (("id",), "id_prompts eval_prompts"),
    (("ood",), "ood_prompts"),
    (("heldout", "id"), "validation_file eval_file eval_data eval_dataset test_file"),
    (
        ("heldout_fraction", "heldout_prompts"),
        "val_split validation_split validation_split_percentage test_size heldout",
    ),
    (
        ("max_prompts",),
        "limit num_prompts n_prompts num_examples max_examples max_samples max_rows "
        "max_train_samples",
    ),
    (("eval.max_prompts", "max_prompts"), "max_eval_samples"),
    (("replay_fraction",), "replay_ratio"),
    (("eval_every",), "eval_steps evaluation_steps eval_interval"),
    (("save_every",), "save_steps save_interval"),
    (("keep",), "save_total_limit"),
    (("patience",), "early_stopping early_stopping_patience"),
    (("precision", "dtype"), "bf16 fp16 mixed_precision amp"),
    (("dtype",), "torch_dtype precision"),
    (("quantize",), "load_in_4bit load_in_8bit quantization"),
    (("device",), "device_map cuda gpu gpus"),
    (("temperature",), "temp t"),
    (("stop",), "stop_strings stop_words"),
    (
        ("tree",),
        "num_speculative_tokens num_draft_tokens num_assistant_tokens speculative_num_steps "
        "speculative_num_draft_tokens draft_tokens draft_length draft_len depth gamma k",
    ),
    (("objective",), "loss loss_type loss_fn loss_function criterion divergence"),
    (("tracker",), "report_to logger log_with wandb use_wandb"),
    (("project",), "wandb_project project_name"),
    (("push_to_hub",), "hub_model_id hub_repo_id repo_id"),
    (("num_layers",), "layers n_layers num_hidden_layers"),
    (("draft_vocab_size",), "vocab_size draft_vocab"),
    (("base",), "baseline reference"),
    (("proposer", "method", "kind"), "method algorithm kind"),
    (("endpoint", "served"), "base_url api_base server server_url url"),
    (("concurrency",), "max_concurrency"),
    (("tensor_parallel_size",), "tp tensor_parallel tp_size"),
    (("seed",), "random_seed"),
    (("tokenizer",), "tokenizer_name"),
    (("config",), "config_file yaml recipe"),
]
_MEANT = {name: ours for ours, names in CALLED for name in names.split()}
# How alike an unknown name and the suggested one are.
_ALIKE = 0.7


def nearest_option(key: str, known: Sequence[str], dashes: str = "") -> str | None:
    """Return the known dotted keys nearest to an unknown one, each after `dashes`, in words; None
    if none is near.

    A name of another tool stands for its meaning. Otherwise the spelling decides.
    """
    return " or ".join(f"{dashes}{name}" for name in _nearest_options(key, known)) or None


def _nearest_options(key: str, known: Sequence[str]) -> list[str]:
    # `lrr` means `optim.lr`: the part behind the dot is what people remember.
    last = _last(key).lower()
    if same := [name for name in known if _last(name) == last]:
        return difflib.get_close_matches(key, same, n=1) if "." in key else same
    for ours in _MEANT.get(last, ()):
        if ours in known:
            return [ours]
        if inner := [name for name in known if name.endswith(f".{ours}")]:
            return inner
    if last in _MEANT:
        return []
    near = difflib.get_close_matches(last, [_last(name) for name in known], n=1, cutoff=_ALIKE)
    if near:
        return [name for name in known if _last(name) == near[0]]
    return difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
