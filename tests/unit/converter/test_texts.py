"""Tokenizer, chat template, special tokens and generation defaults, in the spellings found in the wild."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    found = read_config(json.dumps(CONFIG | (config or {})).encode())
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
    )


def test_generation_config_says_which_tokens_end_a_text(tmp_path: Path) -> None:
    texts = read(tmp_path, generation_config={"eos_token_id": [128, 130, 131], "bos_token_id": 3})
    assert texts.eos_ids == (128, 130, 131)
    assert texts.bos_id == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_new_tokens": 99},
            GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, max_tokens=99),
        ),
        ({"temperature": 0.7}, GenerationDefaults(temperature=0.7)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, GenerationDefaults(temperature=0.0)),
    ],
)
def test_the_authors_sampling_parameters_become_the_defaults(
    given: dict[str, Any], expected: GenerationDefaults, tmp_path: Path
) -> None:
    assert read(tmp_path, generation_config=given).generation == expected


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


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    texts = read(tmp_path, tokenizer_config=settings)
    assert (texts.bos_token, texts.eos_token) == ("<s>", "</s>")
    assert read(tmp_path, tokenizer_config={"bos_token": None}).bos_token is None


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
    assert texts.special_tokens == (("cls_token", "<cls>"), ("image_token", "<image>"), ("pad_token", "<pad>"))


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
        ({"generation_config": []}, "generation_config.json: expected an object"),
        ({"tokenizer_config": {"chat_template": 1}}, "tokenizer_config.json: chat_template must be a string"),
        ({"tokenizer_config": {"bos_token": 7}}, "tokenizer_config.json: bos_token must be a string"),
        ({"tokenizer_config": {"chat_template": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}"}}, "nested too deeply"),
        ({"tokenizer": {"version": "9"}}, "tokenizer.json cannot be read"),
    ],
)
def test_a_wrong_field_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, **files)
    assert message in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    assert read(tmp_path).tokenizer == (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="has token 399, outside the model's vocabulary of 399"):
        read(tmp_path, config={"vocab_size": 399})
