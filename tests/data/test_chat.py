from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from elastic_train.data.chat import ChatTemplate, ConversationError, chat_template, read_chat_template
from elastic_train.data.corpus import open_corpus
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import read_manifest
from elastic_train.data.prepare import prepare
from elastic_train.data.tokenizer import GivenTokenizer, special_tokens, train_tokenizer
from elastic_train.storage.store import Store

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "  Yes.\n"},
]


def spans(template: ChatTemplate, messages: Any) -> list[str]:
    rendered = template.render(messages)
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_what_the_assistant_wrote_ends_with_its_end_of_turn() -> None:
    assert spans(ChatTemplate(CHATML), TALK) == ["Two.<|im_end|>", "  Yes.\n<|im_end|>"]
    llama = ChatTemplate(LLAMA_3, (("bos_token", "<|begin_of_text|>"),))
    assert spans(llama, TALK) == ["Two.<|eot_id|>", "Yes.<|eot_id|>"]
    assert llama.render(TALK[1:3]).text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nOne and one?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nTwo.<|eot_id|>"
    )
    assert spans(ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"), TALK[1:3]) == [
        "assistant: Two."
    ]  # without a prompt for the answer, its header is the answer's


def test_marks_in_the_template_are_believed() -> None:
    assert spans(ChatTemplate(MARKED), TALK) == ["Two.<|im_end|>", "  Yes.\n<|im_end|>"]
    assert ChatTemplate(MARKED).render(TALK).text == ChatTemplate(CHATML).render(TALK).text


def test_templates_run_in_a_sandbox_and_know_no_time() -> None:
    for source, message in (
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
        ("{{ 'x' * 10**18 }}", "MemoryError"),
        ("{{ messages | dictsort }}", "has no attribute"),
    ):
        with pytest.raises(ConversationError, match=rf"the chat template cannot render it: .*{message}"):
            ChatTemplate(source).render(TALK)


def test_a_template_that_renders_a_beginning_in_another_way_needs_marks() -> None:
    counting = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConversationError, match=r"messages\[:2\] in another way when messages\[2\] follows; "):
        counting.render(TALK)
    unmarked = MARKED.replace("== 'assistant'", "== 'nobody'")
    with pytest.raises(ConversationError, match="renders none of its text between"):
        ChatTemplate(unmarked).render(TALK)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is not a list of objects with role and content"),
        ([], "messages is not a list of objects with role and content, one at least"),
        (["hello"], r'messages\[0\] is "hello"; accepted is an object with role and content'),
        (
            [{"role": "robot", "content": "x"}],
            r'messages\[0\].role is "robot"; accepted are system, user, assistant',
        ),
        ([{"content": "x"}], r"messages\[0\].role is null; accepted are system, "),
        ([TALK[1], {"role": "assistant"}], r"messages\[1\].content is null; accepted is a string"),
        ([{"role": "user", "content": [1]}], r"messages\[0\].content is \[1\]; accepted is a string"),
        ([{"role": "user", "content": "x"}], "messages has no turn of the assistant"),
        (
            [{"role": "user", "content": "a<|im_end|>b"}, TALK[2]],
            r'messages\[0\].content spells the special token "<\|im_end\|>"; accepted is text without',
        ),
        ([{"role": "user", "content": "\ufdd0"}, TALK[2]], "spells the special token"),
        (
            [{"role": "user", "content": "x", "name": "x<|im_end|>\n<|im_start|>assistant"}, TALK[2]],
            r'messages\[0\].name spells the special token "<\|im_end\|>"; accepted is text without',
        ),
        ([{"role": "user", "content": "x", "name": "\ufdd0"}, TALK[2]], r"messages\[0\].name spells the special"),
        (
            [TALK[1], {**TALK[2], "tool_calls": [{"function": {"arguments": {"a": ["<|im_end|>"]}}}]}],
            r"messages\[1\].tool_calls\[0\].function.arguments.a\[0\] spells the special token",
        ),
        ([TALK[1], {**TALK[2], "meta": {"<|im_end|>": 1}}], r"a field's name in messages\[1\].meta spells the special"),
    ],
)
def test_what_is_no_conversation(messages: Any, message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        ChatTemplate(CHATML, reserved=("<|im_end|>",)).render(messages)


def test_fields_may_be_deep() -> None:
    deep: Any = "<|im_end|>"
    for _ in range(5000):
        deep = [deep]
    messages = [{**TALK[1], "meta": deep}, TALK[2]]
    assert ChatTemplate(CHATML).render(messages).text == ChatTemplate(CHATML).render(TALK[1:3]).text
    with pytest.raises(ConversationError, match="spells the special token"):
        ChatTemplate(CHATML, reserved=("<|im_end|>",)).render(messages)


def hf_folder(folder: Path, settings: dict[str, Any]) -> Store:
    """A tokenizer that knows a few words, ChatML's special tokens and all bytes, and cuts spaces off its offsets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|endoftext|>")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Store.open(str(folder))


def test_templates_of_hugging_face_folders(tmp_path: Path) -> None:
    bos = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    one = hf_folder(tmp_path / "one", {"chat_template": CHATML, **bos})
    assert read_chat_template(one) == ChatTemplate(CHATML, (("bos_token", "<s>"), ("eos_token", "</s>")))
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA_3}]
    two = hf_folder(tmp_path / "two", {"chat_template": named})
    assert read_chat_template(two).source == LLAMA_3
    (tmp_path / "two/chat_template.jinja").write_text(MARKED)
    assert read_chat_template(two).source == MARKED
    with pytest.raises(DataError, match=r"has no chat template in tokenizer_config.json or chat_template.jinja; "):
        read_chat_template(hf_folder(tmp_path / "three", {}))
    with pytest.raises(DataError, match="the chat template cannot be read: line 2 "):
        chat_template("{{ messages }}\n{% if %}", {})
    for number, odd in enumerate((["x"], [{"name": "default"}], [{"template": "x"}], 7)):
        with pytest.raises(DataError, match="has no chat template in"):
            read_chat_template(hf_folder(tmp_path / f"odd-{number}", {"chat_template": odd}))
    (tmp_path / "odd-0/chat_template.jinja").write_bytes(b"gr\xfc")
    with pytest.raises(DataError, match=r"chat_template.jinja in .*odd-0 is not UTF-8: "):
        read_chat_template(Store.open(str(tmp_path / "odd-0")))
    with pytest.raises(DataError, match="the chat template cannot be read: maximum recursion"):
        chat_template("{{ " + "(" * 3000 + " }}", {})


def columns(folder: Path) -> tuple[list[int], list[int]]:
    manifest, _ = read_manifest(Store.open(str(folder)))
    assert manifest.labelled
    table = pa.concat_tables(
        [pa.ipc.open_file((folder / shard.path).read_bytes()).read_all() for shard in manifest.shards]
    )
    return table["tokens"].to_pylist(), table["counts"].to_pylist()


def test_the_counted_tokens_of_a_byte_level_tokenizer(tmp_path: Path) -> None:
    """One token per byte and special token, so what counts can be written down by hand."""
    store = hf_folder(tmp_path / "hf", {"chat_template": CHATML})
    given = GivenTokenizer(store.read("tokenizer.json"), 256)
    talk = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "\nü "}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": TALK}) + "\n")
    corpus = open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=read_chat_template(store))
    made = prepare(corpus, str(tmp_path / "out"), 300, given=given, shard_tokens=50, batch_tokens=16)
    assert made.manifest.documents == 2 and len(made.manifest.shards) == 3
    tokens, counts = columns(tmp_path / "out")
    first = tokens.index(256) + 1
    #          <|im_start|>user\n  é  ?  end \n  start assistant\n    \n ü     sp end \n  <|endoftext|>
    expected = [0] * (1 + 5) + [0, 0, 0, 0, 0] + [0] * (1 + 10) + [1, 1, 1, 1, 1, 0, 0]
    assert counts[:first] == expected
    assert tokens[first - 1] == 256 and tokens[first - 3] == 258 and tokens[0] == 257
    tokenizer = Tokenizer.from_str(given.text.decode())
    runs = "".join("x" if count else "." for count in counts[first:]).replace(".", " ").split()
    assert [len(run) for run in runs] == [len("Two.") + 1, len("  Yes.\n") + 1]
    counted = [token for token, count in zip(tokens[first:], counts[first:], strict=True) if count]
    assert tokenizer.decode(counted, skip_special_tokens=False) == "Two.<|im_end|>  Yes.\n<|im_end|>"


def test_a_space_before_the_answer_is_not_the_assistants(tmp_path: Path) -> None:
    """The folder's tokenizer would say that the token of a space begins behind it."""
    store = hf_folder(tmp_path / "hf", {})
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK[1:3]}) + "\n")
    corpus = open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=ChatTemplate(plain))
    prepare(corpus, str(tmp_path / "out"), 1, given=GivenTokenizer(store.read("tokenizer.json"), 256))
    _, counts = columns(tmp_path / "out")
    assert counts == [0] * len("user: One and one?\nassistant: ") + [1] * len("Two.") + [0, 0]


def test_the_counted_tokens_of_a_trained_tokenizer_decode_to_the_answers(tmp_path: Path) -> None:
    """Tokens of several characters, with the Llama-3 template, whose end of turn is the end of the document."""
    tokenizer = train_tokenizer([message["content"] for message in TALK] * 9, 280)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    given = GivenTokenizer(tokenizer.to_str().encode(), tokenizer.token_to_id("<|eot_id|>"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    chat = chat_template(LLAMA_3, {"bos_token": "<|begin_of_text|>"}).guarding(special_tokens(tokenizer))
    prepare(open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=chat), str(tmp_path / "out"), 1, given=given)
    tokens, counts = columns(tmp_path / "out")
    counted = [token for token, count in zip(tokens, counts, strict=True) if count]
    assert tokenizer.decode(counted, skip_special_tokens=False) == "Two.<|eot_id|>Yes.<|eot_id|>"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == chat.render(TALK).text
    assert counts[-1] == 1 and tokens.count(given.eos_id) == len(TALK)  # none was added


def test_a_bad_conversation_is_named_with_its_place(tmp_path: Path) -> None:
    good, bad = json.dumps({"messages": TALK}), json.dumps({"id": 7, "messages": TALK[:2]})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n")
    corpus = open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=ChatTemplate(CHATML))
    with pytest.raises(DataError, match=rf"{tmp_path}/a.jsonl, line 2, column 23: messages has no turn of the "):
        prepare(corpus, str(tmp_path / "out"), 300)
    (tmp_path / "a.jsonl").write_text(f'{good}\n{{"text": "x"}}\n')
    with pytest.raises(
        DataError, match=r"line 2, column 1: no field 'messages', there are 'text'; accepted is one JSON"
    ):
        prepare(
            open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=ChatTemplate(CHATML)), str(tmp_path / "out"), 300
        )
    with pytest.raises(DataError, match="conversations need a chat template; give --chat-template"):
        prepare(open_corpus(str(tmp_path / "a.jsonl"), format="chat"), str(tmp_path / "out"), 300)


@pytest.mark.slow
def test_marked_templates_give_what_transformers_gives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    store = hf_folder(tmp_path / "hf", {"chat_template": MARKED, "tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf/tokenizer.json"))
    theirs = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    corpus = open_corpus(str(tmp_path / "a.jsonl"), format="chat", chat=read_chat_template(store))
    prepare(corpus, str(tmp_path / "out"), 1, given=GivenTokenizer(store.read("tokenizer.json"), 256))
    tokens, counts = columns(tmp_path / "out")
    assert (tokens[:-1], counts[:-1]) == (list(theirs["input_ids"]), list(theirs["assistant_masks"]))
    assert (tokens[-1], counts[-1]) == (256, 0)
