"""`doctor --served` asks what a row asks, and neither hangs on a reply nor repeats the key."""

from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

from draftsmith.core.chats import Chat
from draftsmith.core.errors import InputError
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling
from draftsmith.distill.engines.server import Completion
from draftsmith.serving.running_server import RunningServer
from tests.serving import JsonHandler, running

KEY = "sk-Secret+12/34=abcXYZ"
ANSWER = {"choices": [{"token_ids": [5], "finish_reason": "length"}]}


@contextmanager
def replying(reply):
    """A vLLM server that replies so to a POST; yield its address."""

    class Handler(JsonHandler):
        def do_GET(self):
            models = {"data": [{"id": "target", "owned_by": "vllm"}]}
            self.send(200, models if self.path == "/v1/models" else "")

        def do_POST(self):
            reply(self, self.body())

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def completion(tokenizer):
    return Completion(
        model="target",
        tokenizer=tokenizer,
        sampling=Sampling(),
        max_new_tokens=1,
        eos_ids=(1,),
        ignore_eos=True,
        vocabulary=len(tokenizer),
    )


def test_what_a_row_asks_of_the_template_is_in_the_request(completion):
    bodies = []

    def reply(handler, body):
        bodies.append(body)
        handler.send(200, ANSWER)

    turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"})
    arguments = {"reasoning_effort": "high", "continue_final_message": True, "persona": "a pirate"}
    with replying(reply) as url:
        server = RunningServer(url)
        for given in (arguments, {}):
            prompt = Prompt("p", "d", (5,), chat=Chat(turns, None, given))
            server.answers([prompt], completion, True)[0]
    asked, plain = bodies
    assert asked["messages"] == list(turns) and asked["chat_template_kwargs"] == arguments
    assert (asked["reasoning_effort"], asked["continue_final_message"]) == ("high", True)
    # vLLM refuses both, and begins an answer unless it is told not to.
    assert asked["add_generation_prompt"] is False
    assert plain["messages"] == [turns[0]]
    assert not {"chat_template_kwargs", "add_generation_prompt"} & plain.keys()


def test_what_a_server_tells_is_kept_without_secrets(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    told = {
        "build_info": "b8681-Debian",
        "api_key": "other",
        "default_generation_settings": {"n_ctx": 512, "params": {"hf_token": "t", "note": KEY}},
        "chat_template": "x" * 300,
        "internal_states": [{"load": 1}],
    }

    class Handler(JsonHandler):
        def do_GET(self):
            listed = {"id": "m", "owned_by": "llamacpp", "created": 7, "meta": {"n_ctx_train": 9}}
            self.send(200, {"data": [listed]} if self.path == "/v1/models" else told)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as served:
        facts = RunningServer(f"http://127.0.0.1:{served.server_address[1]}").facts
    assert facts["build_info"] == "b8681-Debian" and facts["model.meta.n_ctx_train"] == 9
    assert facts["default_generation_settings.n_ctx"] == 512
    assert len(facts["chat_template"]) < 100 and KEY not in str(facts)
    kept = {"model.id", "model.owned_by", "model.created", "model.meta.n_ctx_train"}
    kept |= {"build_info", "chat_template"}
    kept |= {f"default_generation_settings.{name}" for name in ("n_ctx", "params.note")}
    assert set(facts) == kept


def test_a_server_without_these_addresses_tells_its_model():
    with replying(lambda handler, body: None) as url:
        assert RunningServer(url).facts == {"model.id": "target", "model.owned_by": "vllm"}


def test_steps_without_drafts_are_target_calls(completion, monkeypatch):
    """vLLM drafts nothing beyond the draft's own context, and counts no such step."""
    counts = {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 3}
    places = {0: 2, 1: 1, 2: 0}
    answered: list[int] = []

    class Handler(JsonHandler):
        def do_GET(self):
            if self.path == "/v1/models":
                self.send(200, {"data": [{"id": "target", "owned_by": "vllm"}]})
                return
            factor = len(answered)
            lines = [
                f"vllm:spec_decode_num_{name}_total {n * factor}" for name, n in counts.items()
            ]
            for place, count in places.items():
                name = f'accepted_tokens_per_pos_total{{position="{place}"}}'
                lines.append(f"vllm:spec_decode_num_{name} {count * factor}")
            lines += [f"vllm:generation_tokens_total {10 * factor}"]
            self.send(200, "\n".join(lines))

        def do_POST(self):
            self.body()
            answered.append(1)
            self.send(200, {"choices": [{"token_ids": [5] * 10, "finish_reason": "length"}]})

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as served:
        server = RunningServer(f"http://127.0.0.1:{served.server_address[1]}")
        prompt = Prompt("p", "d", (5, 6, 7, 8, 9))
        (answer,) = server.answers([prompt], completion, True)
    # Two steps emit five tokens, and four more steps one token each.
    assert (answer.calls, answer.drafted) == (6, 6)
    assert answer.accepted_by_depth == [2, 1, 0] and answer.reached_by_depth == [2, 2, 1]


def test_a_server_that_repeats_the_key(completion, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    spelled = [KEY, KEY.upper()]

    def refuses(handler, body):
        handler.send(400, {"error": f"{handler.headers['authorization']} {spelled} is unknown"})

    prompt = Prompt("p", "d", (5,))
    with replying(refuses) as url, pytest.raises(InputError, match="400 .* is unknown") as error:
        RunningServer(url).answers([prompt], completion, True)
    assert not any(each in str(error.value) for each in (*spelled, KEY[:12]))
