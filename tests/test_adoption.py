"""Adopting a checkpoint's tokenizer: its ids stay, ours are added, and what would lose or change text is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.errors import ModelError
from pipeline.text import chat
from pipeline.text.tokenizer import ADDED, SPECIAL, Tokenizer, adopt
from tests import probes
from tests.checkpoints import CONTROL, bpe

SOURCE = (Path(__file__).parents[1] / "pipeline/text/tokenizer.py").read_text(encoding="utf-8")
TEXT = SOURCE.replace("<", "(") + " 1234567 it's é日🙂\r\n"  # without control tokens, which the library would find
FAMILIES = ("qwen2", "qwen3", "llama")
SAVED = {family: bpe(family, 500).to_str() for family in FAMILIES}


def written(folder: Path, family: str = "qwen3", change: Callable[[dict[str, Any]], None] = lambda state: None) -> Path:
    state = json.loads(SAVED[family])
    change(state)
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_id_keeps_its_meaning_and_text_its_ids(family: str, tmp_path: Path) -> None:
    adopted = adopt(written(tmp_path, family), 512)
    theirs = bpe(family, 500)
    assert adopted.tokenizer.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False).ids
    assert adopted.tokenizer.decode(adopted.tokenizer.encode(TEXT)) == TEXT
    assert adopted.known == tuple(range(500))
    assert {content: adopted.tokenizer.control_ids[content] for content in CONTROL[family]} == {
        content: theirs.token_to_id(content) for content in CONTROL[family]
    }


@pytest.mark.parametrize(("family", "missing", "size"), [("qwen2", 12, 512), ("qwen3", 8, 512), ("llama", 15, 576)])
def test_missing_control_tokens_take_the_first_free_ids_and_spares_fill_a_multiple_of_64(
    family: str, missing: int, size: int, tmp_path: Path
) -> None:
    adopted = adopt(written(tmp_path, family), 512)
    assert adopted.fresh == tuple(range(500, 500 + missing))
    assert adopted.tokenizer.vocab_size == size
    roles = SPECIAL | ADDED
    assert {getattr(adopted.tokenizer, role) for role in roles} >= set(adopted.fresh)
    assert len({getattr(adopted.tokenizer, role) for role in roles}) == len(roles)
    assert not any(adopted.tokenizer.token_bytes[500 + missing :])


def test_rows_of_the_model_that_no_token_has_become_spares(tmp_path: Path) -> None:
    assert adopt(written(tmp_path), 1000).tokenizer.vocab_size == 1024
    assert adopt(tmp_path, 1000).fresh == adopt(tmp_path, 512).fresh


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text_and_control_tokens_have_none(tmp_path: Path) -> None:
    tokenizer = adopt(written(tmp_path), 512).tokenizer
    ids = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == TEXT.encode()
    assert {tokenizer.token_bytes[getattr(tokenizer, role)] for role in SPECIAL} == {b""}  # fim_prefix was not special
    assert tokenizer.token_bytes[tokenizer.think] == b"<think>"  # decoding keeps it
    assert len(set(tokenizer.byte_ids)) == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_render_with_the_added_tokens_and_no_text_gives_one(family: str, tmp_path: Path) -> None:
    tokenizer = adopt(written(tmp_path, family), 512).tokenizer
    for messages, tools in probes.CONVERSATIONS:
        rendered = chat.render(tokenizer, messages, tools)
        assert tokenizer.decode(rendered.ids, skip_special=False) == chat.render_text(messages, tools)
    everything = "".join(tokenizer.control_ids)
    assert not set(tokenizer.encode(everything)) & set(tokenizer.control_ids.values())


def test_text_that_is_not_in_nfc_comes_back_as_it_was(tmp_path: Path) -> None:
    tokenizer = adopt(written(tmp_path, "qwen2"), 512).tokenizer
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"
    assert bpe("qwen2", 500).decode(bpe("qwen2", 500).encode("e\u0301").ids) == "é"  # which we remove


def test_a_tokenizer_of_ours_is_taken_in_as_it_is(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(tmp_path)
    adopted = adopt(tmp_path, 320)
    assert (adopted.tokenizer.hash, adopted.fresh) == (byte_tokenizer.hash, ())
    assert len(adopted.known) < 320  # spares are no part of the mean


def test_taking_in_twice_changes_nothing(tmp_path: Path) -> None:
    first = adopt(written(tmp_path / ".", "llama"), 512).tokenizer
    first.save(tmp_path / "again")
    again = adopt(tmp_path / "again", 576)
    assert (again.tokenizer.hash, again.fresh) == (first.hash, ())


def sentencepiece(state: dict[str, Any]) -> None:
    """As LLaMA 2's."""
    state["model"]["byte_fallback"] = True
    state["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    state["pre_tokenizer"] = None


def prefix_space(state: dict[str, Any]) -> None:
    state["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def lowercase(state: dict[str, Any]) -> None:
    state["normalizer"] = {"type": "Lowercase"}


def lost_bytes(state: dict[str, Any]) -> None:
    for character in "\u0100\u0101":
        state["model"]["vocab"][f"{character}{character}x"] = state["model"]["vocab"].pop(character)


def text_as_added_token(state: dict[str, Any]) -> None:
    state["added_tokens"].append({**state["added_tokens"][0], "id": 500, "content": "    ", "special": False})


def a_gap(state: dict[str, Any]) -> None:
    state["added_tokens"][-1]["id"] = 600


def split_that_drops(state: dict[str, Any]) -> None:
    state["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


def unigram(state: dict[str, Any]) -> None:
    state["model"] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}


def suffix(state: dict[str, Any]) -> None:
    state["model"]["end_of_word_suffix"] = "</w>"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (sentencepiece, r"SentencePiece-style.*byte_fallback True.*LLaMA 2.*Qwen2, Qwen3 or LLaMA 3"),
        (prefix_space, r"without add_prefix_space"),
        (lowercase, r"normalizer Lowercase changes text; expected no normalizer or NFC"),
        (lost_bytes, r"2 of the 256 bytes have no token"),
        (text_as_added_token, r"1 added tokens are ordinary text \('    '\)"),
        (a_gap, r"has id 600, but the library assigns 499: the ids have gaps"),
        (split_that_drops, r"text does not survive a round trip"),
        (unigram, r"expected BPE, found Unigram"),
        (suffix, r"model\.end_of_word_suffix = '</w>' is not supported"),
    ],
)
def test_what_would_lose_or_change_text_is_refused_by_name(
    fault: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        adopt(written(tmp_path, "qwen3", fault), 512)


def test_a_missing_or_broken_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is missing: continued training uses the checkpoint's tokenizer"
    ):
        adopt(tmp_path, 512)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"found only tokenizer\.model.*save_pretrained"):
        adopt(tmp_path, 512)
    for broken in ("{", "[]", '{"model": {}}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(ModelError, match=r"not a tokenizer\.json"):
            adopt(tmp_path, 512)
