"""Tokenizer, chat template, special tokens and generation defaults, in the spellings found in the wild."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.errors import UsageError
from blockrelay.text.text_assets import Texts, read_texts
from blockrelay_converter.checkpoint.config import read_config
from tests.support.models.checkpoints import write_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(folder: Path, *, config: dict[str, Any] | None = None, **files: Any) -> Texts:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = read_config(json.dumps(CONFIG | (config or {})).encode()).model
    return read_texts(folder, vocab_size=found.vocab_size, eos_ids=found.eos_ids, bos_id=found.bos_id)


def test_a_folder_without_text_files_takes_its_ids_from_config_json(tmp_path: Path) -> None:
    assert read(tmp_path) == Texts(
        tokenizer=None,
        chat_template=None,
        bos_token=None,
        eos_token=None,
        bos_id=1,
        eos_ids=(2,),
        generation=GenerationDefaults(),
        notes=("no tokenizer.json: prompts are token ids, and answers too",),
    )


def test_generation_config_says_which_tokens_end_a_text(tmp_path: Path) -> None:
    texts = read(tmp_path, generation_config={"eos_token_id": [128, 130, 131], "bos_token_id": 3})
    assert texts.eos_ids == (128, 130, 131)
    assert texts.bos_id == 3


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 7], 6, (5, 7, 2)),  # another one: ends at either
        (5, 2, (5, 2)),
        ([2, 5], 6, (2, 5)),  # the same one: once
        (None, 6, (6, 2)),
        (None, None, (2,)),
    ],
)
def test_a_text_also_ends_at_the_eos_token_of_the_tokenizer(
    generation: object, config: int | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    texts = read(tmp_path, config={"eos_token_id": config}, generation_config={"eos_token_id": generation})
    assert texts.eos_ids == expected
    said = ("no eos_token_id: answers end at </s> (2), the tokenizer's eos_token",)
    assert texts.notes == (said if generation is config is None else ())


def test_what_no_file_says_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    texts = read(tmp_path, config={"eos_token_id": None}, tokenizer_config={"eos_token": "[unknown]"})
    chats, ends = texts.notes
    assert texts.eos_ids == ()
    assert chats.startswith("no chat template") and ends.startswith("no end tokens")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_new_tokens": 99},
            GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, max_tokens=99),
        ),
        ({"repetition_penalty": 1.1}, GenerationDefaults(repetition_penalty=1.1)),
        ({"repetition_penalty": 1.0}, GenerationDefaults()),
        (
            {"repetition_penalty": 1.1, "do_sample": False, "top_k": 5},
            GenerationDefaults(temperature=0.0, repetition_penalty=1.1),
        ),
        ({"temperature": 0.7}, GenerationDefaults(temperature=0.7)),
        ({"top_k": -1}, GenerationDefaults(top_k=0)),
        ({"do_sample": False, "temperature": 3.0, "top_p": 0}, GenerationDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, GenerationDefaults(temperature=0.0)),
    ],
)
def test_the_authors_sampling_parameters_become_the_defaults(
    given: dict[str, Any], expected: GenerationDefaults, tmp_path: Path
) -> None:
    assert read(tmp_path, generation_config=given).generation == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 3.0}, "temperature must be between 0 and 2, not 3.0"),
        ({"temperature": -1}, "temperature must be between 0 and 2, not -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, not 1.5"),
        ({"min_p": 2}, "min_p must be between 0 and 1, not 2"),
        ({"top_k": -2}, "top_k must be between 0 and 2147483647, not -2"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be between 0 and 10, not -1"),
        ({"repetition_penalty": 11}, "repetition_penalty must be between 0 and 10, not 11"),
        ({"repetition_penalty": "high"}, "repetition_penalty must be a finite number"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be between 0 and 2147483647, not 2147483648"),
    ],
)
def test_defaults_that_requests_would_be_refused_for_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, generation_config={"do_sample": True, **given})
    assert str(caught.value).startswith(f"generation_config.json: {message}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"encoder_repetition_penalty": 1.1, "do_sample": False}, {"encoder_repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {}),
        ({"no_repeat_ngram_size": 3, "temperature": 0.5}, {"no_repeat_ngram_size": 3}),
        ({"suppress_tokens": [1, 2], "stop_strings": ["x"]}, {"stop_strings": ["x"], "suppress_tokens": [1, 2]}),
        ({"frequency_penalty": 0.5, "max_window_size": 6144}, {"frequency_penalty": 0.5, "max_window_size": 6144}),
        ({"bad_words_ids": [list(range(100))]}, {"bad_words_ids": f"[{list(range(100))}"[:200] + "..."}),
        ({"typical_p": 0}, {"typical_p": 0}),
        # What changes nothing is not worth a line: neutral values, and how transformers goes about its work.
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": []}, {}),
        ({"max_length": 20, "stop_strings": None, "renormalize_logits": False, "early_stopping": True}, {}),
        ({"_from_model_config": True, "transformers_version": "4.40.0", "pad_token_id": 7, "use_cache": False}, {}),
    ],
)
def test_what_the_author_generates_with_and_we_do_not_apply_is_named(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    texts = read(tmp_path, generation_config=given)
    assert texts.ignored_defaults == expected
    (named,) = [note for note in texts.notes if note.startswith("generation_config.json")] or [""]
    assert named.count("\n") == 0 and all(name in named for name in expected)
    assert bool(named) == bool(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"chat_template": "A"}, "A"),
        ({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}, "D"),
        ({"chat_template": [{"name": "tools", "template": "T"}]}, None),
        ({"chat_template": None}, None),
        ({}, None),
    ],
)
def test_the_chat_template_is_found_in_the_tokenizer_config(
    given: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    assert read(tmp_path, tokenizer_config=given).chat_template == expected


def test_a_chat_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    assert read(tmp_path, tokenizer_config={"chat_template": "config"}).chat_template == "file ü"


def test_templates_of_other_names_are_named(tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in ("tool_use", "default", "rag")]
    write_tokenizer(tmp_path, vocab_size=400)
    texts = read(tmp_path, tokenizer_config={"chat_template": named})
    assert (texts.chat_template, texts.notes) == ("default", ("not applied: chat templates named rag, tool_use",))
    (tmp_path / "chat_template.jinja").write_text("own")
    texts = read(tmp_path)
    assert (texts.chat_template, texts.notes) == ("own", ())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    texts = read(tmp_path)
    assert (texts.chat_template, texts.notes) == ("own", ("not applied: chat templates named tool_use",))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(UsageError, match=r"chat_template\.jinja is not UTF-8 \(byte 3\)"):
        read(tmp_path)


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    texts = read(tmp_path, tokenizer_config=settings)
    assert (texts.bos_token, texts.eos_token) == ("<s>", "</s>")
    assert read(tmp_path, tokenizer_config={"bos_token": None}).bos_token is None


def test_special_tokens_of_the_older_file_count_as_well(tmp_path: Path) -> None:
    """tests/parity compares more such folders with what transformers reads."""
    older = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    write_tokenizer(tmp_path, vocab_size=400)
    texts = read(tmp_path, tokenizer_config={}, special_tokens_map=older, generation_config={"eos_token_id": 7})
    assert (texts.bos_token, texts.eos_token, texts.eos_ids) == ("<s>", "</s>", (7, 2))


def test_other_special_tokens_are_those_that_the_template_names(tmp_path: Path) -> None:
    settings = {
        "chat_template": "{{ pad_token + image_token + cls_token + my_unk_token }}{{ add_bos_token }}",
        "pad_token": {"content": "<pad>", "lstrip": False},
        "unk_token": "<unk>",
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<image>"},
    }
    older = {"pad_token": "<old>", "cls_token": {"content": "<cls>"}, "eos_token": "</s>"}
    texts = read(tmp_path, tokenizer_config=settings, special_tokens_map=older)
    assert texts.special_tokens == (("cls_token", "<cls>"), ("image_token", "<image>"), ("pad_token", "<old>"))


def test_a_template_with_the_tags_of_transformers_is_taken(tmp_path: Path) -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{% break %}"
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}" + template + "{% endfor %}")
    assert read(tmp_path).chat_template is not None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"eos_token_id": [2, 512]}}, "eos_token_id 512 is outside the vocabulary of 512"),
        ({"generation_config": {"bos_token_id": 600}}, "bos_token_id 600 is outside"),
        ({"generation_config": {"temperature": "hot"}}, "generation_config.json: temperature must be a finite number"),
        ({"generation_config": {"repetition_penalty": float("inf")}}, "repetition_penalty must be a finite number"),
        ({"generation_config": {"typical_p": float("inf")}}, "typical_p holds a number that is not"),
        ({"generation_config": []}, "generation_config.json: expected an object"),
        ({"tokenizer_config": {"chat_template": 1}}, "tokenizer_config.json: chat_template must be a string"),
        ({"special_tokens_map": {"eos_token": [1]}}, "special_tokens_map.json: eos_token must be a string: [1]"),
        ({"tokenizer_config": {"bos_token": 7}}, "tokenizer_config.json: bos_token must be a string"),
        ({"tokenizer_config": {"chat_template": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}"}}, "nested too deeply"),
        ({"tokenizer": {"version": "9"}}, "tokenizer.json cannot be read"),
    ],
)
def test_a_wrong_field_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, **files)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "tokenizer.json has no decoder"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "tokenizer.json has a decoder of type BPEDecoder"),
    ],
)
def test_a_tokenizer_that_gateways_would_refuse_is_refused(decoder: object, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(UsageError) as caught:
        read(tmp_path, tokenizer=definition | {"decoder": decoder})
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("; without the file the model takes and gives token ids")


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer.model.v3", "spiece.model", "vocab.json", "qwen.tiktoken"]
)
def test_a_tokenizer_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    (note,) = read(tmp_path).notes
    assert f"no tokenizer.json ({name} is not read: AutoTokenizer.from_pretrained(FOLDER)" in note
    write_tokenizer(tmp_path, vocab_size=400)
    assert read(tmp_path).notes == ()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    assert read(tmp_path).tokenizer == (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="has token 399, outside the model's vocabulary of 399"):
        read(tmp_path, config={"vocab_size": 399})


@pytest.mark.parametrize(("added", "named"), [(["[PAD]"], "[PAD] (400)"), (["[PAD]", "<x>"], "[PAD] (400) and 1 more")])
def test_added_tokens_beyond_the_embedding_are_named(added: list[str], named: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(added)
    library.save(str(tmp_path / "tokenizer.json"))
    texts = read(tmp_path, config={"vocab_size": 400})
    assert texts.tokenizer == (tmp_path / "tokenizer.json").read_bytes()
    (note,) = texts.notes
    assert note.startswith(f"tokenizer.json has {named} beyond the model's vocabulary of 400: prompts with them are")
    assert read(tmp_path, config={"vocab_size": 402}).notes == ()
