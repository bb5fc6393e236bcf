"""Hidden states that vLLM writes beside its answers, taken into files for `train --states`.

vLLM drafts with `extract_hidden_states`, whose connector writes a file for each request:
`token_ids [T]` of all that was an input, which the last token never is, and `hidden_states
[T, L, H]`. Of n layers, layer n is the raw output of the last.

Legend: T tokens, L layers, H hidden size.
"""

import fcntl
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.errors import InputError, RunError, first_line
from draftsmith.core.io import JsonObject, make_dir
from draftsmith.core.model_configs import read_config
from draftsmith.core.models import load_model
from draftsmith.core.settings import loading
from draftsmith.core.state_store import StateFiles, checkpoint_digest
from draftsmith.distill.config import DistillConfig
from draftsmith.drafts.heads.eagle3 import aux_layers
from draftsmith.drafts.state_likelihood import StateLikelihood

CONNECTOR: JsonObject = {"kv_connector": "ExampleHiddenStatesConnector"}
# What a request says, so that the states of the answer are written too.
WITH_ANSWER = {"include_output_tokens": True}
# The likelihood costs a product with the output projection. So it is taken of the first rows, and
# of a row of so many tokens.
_FIRST = 16
_PER_ROW = 1024


class StateWriter:
    """Takes states into files.

    layers: of the states that the engine gives, ascending; the last is the raw last one. files:
    where they are kept; made for the engine's dtype, if they are not set. rows: the tokens of rows
    that are asked for their states alone, by the row of the request. taken: number of requests.
    probes: tokens and states of requests with a negative row, which are compared and not kept.
    """

    def __init__(self, config: DistillConfig) -> None:
        assert config.states is not None
        self._digest = checkpoint_digest(config.target, config.revision)
        whole = read_config(
            config.target, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        model = whole.get_text_config(decoder=True)
        last = int(model.num_hidden_layers)
        self.layers = sorted({*(config.states_layers or aux_layers(last)), last})
        if self.layers[-1] > last:
            raise InputError(f"states_layers: {self.layers[-1]} is beyond the {last} layers")
        self.taken = 0
        self.rows: dict[int, Sequence[int]] = {}
        self.probes: dict[int, tuple[Sequence[int], Tensor]] = {}
        on_cpu = loading(config) | {"device": "cpu"}
        self._likelihood = StateLikelihood(load_model(config.target, **on_cpu, layers=False))
        self._width = int(model.hidden_size)
        self._incoming = Path(config.states) / "incoming"
        make_dir(self._incoming, "states")
        self._place = config.states
        self._eight_bits = config.states_8bit
        self.files: StateFiles | None = None

    def engine_options(self) -> JsonObject:
        """What vLLM needs to write states."""
        drafting = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self.layers}},
        }
        extra = {"shared_storage_path": str(self._incoming.absolute())}
        transfer = {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
        return {"speculative_config": drafting, "kv_transfer_config": CONNECTOR | transfer}

    def open(self, dtype: torch.dtype) -> None:
        """Begin to keep states of this dtype."""
        if self.files is None:
            self.files = StateFiles(self._place, self._digest, dtype, eight_bits=self._eight_bits)

    def has(self, ids: Sequence[int]) -> bool:
        """Whether all states of a row are kept."""
        assert self.files is not None
        return self.files.layers_of(ids) >= set(self.layers)

    def take(self, path: str | None, row: int, ids: Sequence[int], drawn: int, server: str) -> None:
        """Take in and delete the file of a request. ids: prompt and answer. drawn: how many of the
        last ones the target drew at temperature 1 or below. Raise RunError for states that cannot
        be those of the tokens.
        """
        if path is None:
            raise RunError("states: the engine wrote none; docs/large-targets.md says how to serve")
        found = taken(Path(path))
        states_LTH = found["hidden_states"].transpose(0, 1).contiguous()
        if wrong := self._why_wrong(found["token_ids"].tolist(), states_LTH, ids):
            raise RunError(f"states: {server}: the file of {len(ids) - 1} tokens {wrong}")
        if row in self.rows:
            ids = self.rows.pop(row)
            drawn = 0
        self.taken += 1
        share = None
        if row < 0 or self.taken <= _FIRST or hash(tuple(ids)) % _PER_ROW < len(ids):
            share = self._likelihood.check(f"{server}: row {row}", states_LTH[-1], ids, drawn)
        if row < 0:
            self.probes[row] = (ids, states_LTH)
            return
        assert self.files is not None
        self.files.put(ids, self.layers, states_LTH, share)

    def _why_wrong(self, tokens: Sequence[int], states_LTH: Tensor, ids: Sequence[int]) -> str:
        layers, length, width = states_LTH.shape
        if length < len(tokens) or tokens != list(ids[:-1]):
            return f"holds {length}, or others: serve without the prefix cache, which shortens it"
        if (layers, width) != (len(self.layers), self._width):
            return (
                f"has {layers} states of {width} values a token, not {len(self.layers)} of "
                f"{self._width}; serve with eagle_aux_hidden_state_layer_ids {self.layers}"
            )
        if self.files is not None and states_LTH.dtype != self.files.dtype:
            dtype = str(states_LTH.dtype).removeprefix("torch.")
            return f"is in {dtype}; give --dtype {dtype}"
        low_LT, high_LT = states_LTH.aminmax(dim=-1)
        full_T = ((high_LT > low_LT) & (high_LT - low_LT).isfinite()).all(0)
        if empty := length - int(full_T.sum()):
            return (
                f"is empty or not finite at {empty}; serve in bfloat16, float32 or by another vLLM"
            )
        return ""


def taken(file: Path) -> dict[str, Tensor]:
    """Read and delete the file of a request. Raise RunError if it is not on this machine."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        if lock.exists():
            # The engine holds it until the file is whole.
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)
        found = load_file(file)
        file.unlink()
        lock.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"states: {file}: cannot be read ({first_line(error)}); the engine must write on "
            "this machine"
        ) from None
    return found
