"""Streams over token shards: each token is predicted once per epoch on any number of ranks, no target crosses
documents, and infilling can be undone.
"""

import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batches.batch import Piece, token_batch
from pipeline.batches.corpus import RESERVE, CorpusStream, infill, syntax_units
from pipeline.batches.packing import cut
from pipeline.run.errors import DataError, ModelError
from pipeline.text.tokenizer import Tokenizer
from tests.corpora import CONTEXT, SOURCE, STEP, TOKENIZER, documents, equal, stream, write_corpus
from tests.corpora import token_folder as token_folder

some = settings(max_examples=40, deadline=None)  # a shared machine may stall


def with_lead(tokens: np.ndarray, offsets: np.ndarray) -> list[tuple[int, ...]]:
    """Each document with the token before it, which is the previous document's end of text; the first has none."""
    return [tuple(tokens[max(0, a - 1) : b].tolist()) for a, b in itertools.pairwise(offsets)]


def token_file(folder: Path, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    return np.fromfile(folder / f"{split}.bin", "<u2"), np.fromfile(folder / f"{split}.idx", "<u8").astype(int)


def test_a_batch_is_the_one_worked_out_by_hand() -> None:
    rows = [[Piece(np.array([20, 21, 22, 0]), True), Piece(np.array([30, 31, 0]), np.array([False, True, True]))]]
    lengths = np.where(np.arange(64) < 16, 0, 2)
    batch = token_batch(rows, np.array([0]), packed=8, context=8, pad=1, byte_lengths=lengths)
    assert batch.input_ids.tolist() == [[20, 21, 22, 0, 30, 31, 0, 1]]
    assert batch.targets.tolist() == [[21, 22, 0, -100, 31, 0, -100, -100]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert (batch.num_targets, batch.num_bytes) == (5, 6)
    assert [t.dtype for t in (batch.input_ids, batch.targets, batch.documents, batch.positions)] == [
        torch.int64,
        torch.int64,
        torch.int32,
        torch.int64,
    ]
    short = token_batch(rows, np.array([1, 0]), packed=8, context=4, pad=1, byte_lengths=lengths)
    assert short.targets.tolist() == [[31, 0, -100, -100], [21, 22, 0, -100]]
    assert short.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert short.to("cpu").num_targets == 5


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_token_but_the_files_first_is_a_target_once_an_epoch(corpus: Path, world: int) -> None:
    batches = stream(corpus)
    tokens, _ = token_file(corpus)
    assert batches.num_tokens == len(tokens)
    assert batches.num_tokens / batches.tokens_per_epoch >= 0.95
    given: list[int] = []
    epoch = batches.at(np.arange(batches.rows_per_epoch), CONTEXT)
    for start in range(0, len(epoch), 4):
        step = epoch[start : start + 4]
        for rank in range(world):
            if len(step[rank::world]):
                batch = batches.batch(0, CONTEXT, step[rank::world])
                given += batch.targets[batch.targets >= 0].tolist()
    assert Counter(given) == Counter(tokens[1:].tolist())


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=12),
    context=st.sampled_from([8, 16, 64]),
    fim_rate=st.sampled_from([0.0, 1.0]),
)
def test_encoding_and_packing_lose_nothing_and_double_nothing(texts: list[str], context: int, fim_rate: float) -> None:
    """Each document can be recovered from an epoch's targets, plain or infilled, in pieces of a row's length."""
    expected: Counter[bytes | tuple[int, ...]] = Counter()
    for number, text in enumerate(texts):
        ids = [*TOKENIZER.encode(text), TOKENIZER.end_of_text]
        if fim_rate and number and 1 + len(ids) + RESERVE <= context:
            expected[text.encode()] += 1
        else:  # the first document's first token is read, never predicted
            ids = ids[not number :]
            expected.update(tuple(ids[start : start + context]) for start in range(0, len(ids), context))
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_corpus(Path(folder), texts, [])
        batches = stream(tokens, context=context, tokens_per_step=context, fim_rate=fim_rate)
        batch = batches.batch(0, context, batches.at(np.arange(batches.rows_per_epoch), context))
    found: Counter[bytes | tuple[int, ...]] = Counter()
    for targets, owners in zip(batch.targets, batch.documents, strict=True):
        for number in set(owners.tolist()) - {-1}:
            piece = targets[owners == number]
            ids = piece[piece >= 0].tolist()
            found[undo(ids) if ids[0] == TOKENIZER.fim_prefix else tuple(ids)] += 1
    assert found == expected


def test_inputs_and_targets_follow_each_other_in_one_document(corpus: Path) -> None:
    tokens, offsets = token_file(corpus)
    joined = {
        document[i : i + CONTEXT + 1]
        for document in with_lead(tokens, offsets)
        for i in range(0, len(document) - 1, CONTEXT)
    }
    batches = stream(corpus)
    for step in range(5):
        batch = batches.batch(step, CONTEXT, batches.rows(step, CONTEXT))
        for row in range(len(batch.input_ids)):
            for number in set(batch.documents[row].tolist()) - {-1}:
                here = batch.documents[row] == number
                inputs, targets = batch.input_ids[row][here].tolist(), batch.targets[row][here].tolist()
                assert inputs[1:] == targets[:-1]
                piece = (*inputs, targets[-1]) if targets[-1] >= 0 else tuple(inputs)
                assert piece in joined
                assert batch.positions[row][here].tolist() == list(range(len(inputs)))


def test_bytes_are_those_of_the_targets(corpus: Path) -> None:
    batches = stream(corpus)
    batch = batches.batch(0, CONTEXT, batches.rows(0, CONTEXT))
    text = TOKENIZER.decode(batch.targets[batch.targets >= 0].tolist())
    assert batch.num_bytes == len(text.encode()) > 100


@pytest.mark.parametrize("fim_rate", [0.0, 0.5])
def test_a_batch_depends_on_its_row_ids_alone(corpus: Path, fim_rate: float) -> None:
    one, two = stream(corpus, fim_rate=fim_rate), stream(corpus, fim_rate=fim_rate)
    for step in (0, 7, 400):
        rows = one.rows(step, CONTEXT)
        whole = two.batch(0, CONTEXT, rows)
        for place, row in enumerate(rows):
            single = one.batch(step, CONTEXT, np.array([row]))
            assert torch.equal(single.input_ids[0], whole.input_ids[place])
            assert torch.equal(single.targets[0], whole.targets[place])


@pytest.mark.parametrize("context", [32, 16])
def test_a_shorter_context_splits_the_same_rows_and_keeps_every_target(corpus: Path, context: int) -> None:
    batches = stream(corpus, fim_rate=0.5)
    for step in (0, 90):
        long = batches.batch(step, CONTEXT, batches.rows(step, CONTEXT))
        short = batches.batch(step, context, batches.rows(step, context))
        assert short.input_ids.shape == (STEP // context, context)
        assert torch.equal(short.input_ids.reshape(-1, CONTEXT), long.input_ids)
        assert torch.equal(short.targets.reshape(-1, CONTEXT), long.targets)
        assert short.num_bytes == long.num_bytes
        assert short.positions.max() < context and not short.positions[:, 0].any()


def test_evaluation_reads_the_val_split_in_one_order_for_every_seed(corpus: Path) -> None:
    tokens, _ = token_file(corpus, "val")
    one = list(stream(corpus).evaluation(10**9))
    two = list(stream(corpus, seed=9, fim_rate=1.0).evaluation(10**9))
    assert len(one) == len(two) and all(map(equal, one, two))
    given = Counter(t for batch in one for t in batch.targets[batch.targets >= 0].tolist())
    assert given == Counter(tokens[1:].tolist())
    few = list(stream(corpus).evaluation(300))
    assert all(map(equal, few, one)) and sum(b.num_targets for b in few[:-1]) < 300 <= sum(b.num_targets for b in few)


def test_without_the_document_mask_a_row_is_one_segment_but_targets_stay_within_documents(corpus: Path) -> None:
    masked, open_ = stream(corpus), stream(corpus, document_mask=False)
    rows = masked.rows(0, CONTEXT)
    a, b = masked.batch(0, CONTEXT, rows), open_.batch(0, CONTEXT, rows)
    assert torch.equal(a.targets, b.targets) and not b.documents.any()
    assert b.positions.tolist() == [list(range(CONTEXT))] * len(rows)
    assert masked.fingerprint != open_.fingerprint


# Infilling


def undo(ids: list[int]) -> bytes:
    """The document's bytes from PRE p SUF s MID m END or PRE SUF s MID p m END."""
    pre, suf, mid = TOKENIZER.fim_prefix, TOKENIZER.fim_suffix, TOKENIZER.fim_middle
    assert ids[0] == pre and ids[-1] == TOKENIZER.end_of_text
    p, rest = ids[1 : ids.index(suf)], ids[ids.index(suf) + 1 : -1]
    s, m = rest[: rest.index(mid)], rest[rest.index(mid) + 1 :]
    parts = p + m + s  # in both orders: with the suffix first, p is empty and m holds prefix and middle
    assert not {pre, suf, mid} & set(parts)
    return b"".join(TOKENIZER.token_bytes[i] for i in parts)


@some
@given(st.text(min_size=1, max_size=60), st.integers(0, 2**63))
def test_infilling_undone_is_the_document(text: str, key: int) -> None:
    ids = np.array([*TOKENIZER.encode(text), TOKENIZER.end_of_text])
    out = infill(ids, key, TOKENIZER)
    assert undo(out.tolist()) == text.encode()
    assert len(out) <= len(ids) + RESERVE
    assert np.array_equal(out, infill(ids, key, TOKENIZER))


def test_cuts_are_uniform_over_characters_and_both_orders_occur() -> None:
    text = "abcdefgh" * 8
    ids = np.array([*TOKENIZER.encode(text), TOKENIZER.end_of_text])
    cuts, psm = [], 0
    for key in range(2000):
        out = infill(ids, key * 7919, TOKENIZER).tolist()
        suffix = out[out.index(TOKENIZER.fim_suffix) + 1 : out.index(TOKENIZER.fim_middle)]
        cuts.append(len(TOKENIZER.decode(suffix)) / len(text))
        psm += out[1] != TOKENIZER.fim_suffix
    assert abs(np.mean(cuts) - 1 / 3) < 0.02  # what follows the later of two uniform cuts
    assert 900 < psm < 1100  # (an empty prefix counts as suffix first: 1 in 65)


def test_a_document_whose_cut_tokens_take_too_much_room_is_cut_at_token_borders() -> None:
    wide = Tokenizer.train(iter([" ".join(["pneumonoultramicroscopic"] * 300)]), 320)
    ids = np.array([*wide.encode("pneumonoultramicroscopic"), wide.end_of_text])
    assert len(ids) == 2
    lengths = [len(infill(ids, key * 7919, wide)) for key in range(300)]
    assert max(lengths) <= len(ids) + RESERVE and min(lengths) == 5


PYTHON = "def f(x):\n    y = 1\n    return x\n\nz = 'é'\n"


def test_units_of_syntax_are_bodies_statements_and_whole_lines() -> None:
    raw = PYTHON.encode()
    bodies, statements, lines = ([raw[a:b].decode() for a, b in spans] for spans in syntax_units(raw))
    assert bodies == ["y = 1\n    return x"]
    assert sorted(statements) == ["def f(x):\n    y = 1\n    return x", "return x", "y = 1", "z = 'é'"]
    assert lines[:3] == ["def f(x):", "def f(x):\n    y = 1", "def f(x):\n    y = 1\n    return x"]
    assert "return x" in lines and "return x\n\nz = 'é'" in lines and "" not in lines


def test_methods_without_their_class_have_units_and_what_does_not_parse_has_lines() -> None:
    methods = b"    def m(self):\n        return 1\n"
    assert [methods[a:b] for a, b in syntax_units(methods)[0]] == [b"return 1"]
    assert syntax_units(b"def (:\n") == [[(0, 6)]]
    assert syntax_units("é".encode()[:1]) == syntax_units(b"") == []


@some
@given(st.integers(0, 2**63))
def test_a_middle_of_syntax_undone_is_the_document_and_the_middle_is_a_unit(key: int) -> None:
    ids = np.array([*TOKENIZER.encode(PYTHON), TOKENIZER.end_of_text])
    out = infill(ids, key, TOKENIZER, 1.0).tolist()
    assert undo(out) == PYTHON.encode()
    middle = TOKENIZER.decode(out[out.index(TOKENIZER.fim_middle) + 1 : -1])
    units = {PYTHON.encode()[a:b].decode() for spans in syntax_units(PYTHON.encode()) for a, b in spans}
    suffix_first = out[1] == TOKENIZER.fim_suffix  # then the prefix comes right before the middle
    assert any(middle.endswith(unit) for unit in units) if suffix_first else middle in units
    assert np.array_equal(infill(ids, key, TOKENIZER, 0.0), infill(ids, key, TOKENIZER))


def test_of_a_context_as_much_stays_as_fits_and_the_document_is_not_cut() -> None:
    """Documents of 4 and 9 tokens in rows of 6; of the second one's 5 of context, 2 fit, or none with 2 kept free."""
    offsets, leads = np.array([0, 4, 13]), np.array([0, 5])
    pieces = cut(offsets, 6, leads)
    assert (pieces.starts.tolist(), pieces.lengths.tolist()) == ([0, 6], [4, 6])
    assert pieces.leads.tolist() == [0, 3] and pieces.whole.all()
    assert cut(offsets, 6, leads, 2).starts.tolist() == [0, 8]
    assert cut(offsets, 3, leads).lengths.tolist() == [3, 3, 2]  # the context is dropped, the rest is cut as usual


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_of_syntax_is_a_share(corpus: Path, share: float) -> None:
    with pytest.raises(ValueError, match=r"fim\.syntax: expected a share"):
        stream(corpus, fim_syntax=share)
    assert stream(corpus, fim_rate=1.0).fingerprint != stream(corpus, fim_rate=1.0, fim_syntax=0.5).fingerprint


def test_half_of_the_documents_that_have_room_are_infilled_and_trained_between_two_ends_of_text(corpus: Path) -> None:
    tokens, offsets = token_file(corpus)
    whole = Counter(TOKENIZER.decode(tokens[a:b]).encode() for a, b in itertools.pairwise(offsets))
    infilled = 0
    for seed in range(4):
        batches = stream(corpus, fim_rate=0.5, seed=seed)
        for row in batches.at(np.arange(batches.rows_per_epoch), CONTEXT):
            batch = batches.batch(0, CONTEXT, np.array([row]))
            for number in set(batch.documents[0].tolist()) - {-1}:
                ids = batch.input_ids[0][batch.documents[0] == number].tolist()
                assert TOKENIZER.fim_prefix not in (ids[0], *ids[2:])
                if ids[1] == TOKENIZER.fim_prefix:
                    infilled += 1
                    assert ids[0] == TOKENIZER.end_of_text and whole[undo(ids[1:])] == 1
                    assert batch.targets[0][batch.documents[0] == number].tolist() == [*ids[1:], -100]
    room = sum(a > 0 and 1 + b - a + RESERVE <= CONTEXT for a, b in itertools.pairwise(offsets))
    assert room > 10 and 0.3 * 4 * room < infilled < 0.7 * 4 * room


@pytest.mark.parametrize("first", ["", "x"])
def test_the_first_document_has_no_lead_and_is_never_infilled(tmp_path: Path, first: str) -> None:
    """Even where the tokenizer leaves only its end of text, the second one still begins with that token."""
    end, texts = TOKENIZER.end_of_text, [first, "y z", "u v w"]
    encoded = [[*TOKENIZER.encode(text), end] for text in texts]
    folder = write_corpus(tmp_path, ["filler"], [])
    ids = np.array(list(itertools.chain(*encoded)), dtype="<u2")
    ids.tofile(folder / "train.bin")
    np.cumsum([0, *map(len, encoded)]).astype("<u8").tofile(folder / "train.idx")
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["train"] |= {"tokens": len(ids), "sha256": "made by hand"}
    (folder / "meta.json").write_text(json.dumps(meta))
    batches = stream(folder, fim_rate=1.0, tokens_per_step=CONTEXT)
    batch = batches.batch(0, CONTEXT, np.array([0]))
    read = [batch.input_ids[0][batch.documents[0] == n].tolist() for n in range(int(batch.documents.max()) + 1)]
    plain = [encoded[0]] if first else [[end, *encoded[1]]]
    assert [ids for ids in read if TOKENIZER.fim_prefix not in ids] == plain
    infilled = {undo(ids[1:]).decode() for ids in read if ids[1] == TOKENIZER.fim_prefix and ids[0] == end}
    assert infilled == set(texts[1:] if first else texts[2:])


def test_the_second_epoch_is_cut_elsewhere(corpus: Path) -> None:
    batches = stream(corpus, fim_rate=1.0)
    per_epoch = batches.rows_per_epoch
    same = changed = 0
    for row in range(per_epoch):
        a = batches.batch(0, CONTEXT, np.array([row])).input_ids
        b = batches.batch(0, CONTEXT, np.array([row + per_epoch])).input_ids
        if TOKENIZER.fim_prefix in a:
            same, changed = same + torch.equal(a, b), changed + (not torch.equal(a, b))
    assert changed > same


# Errors


def test_too_few_tokens_for_one_batch_names_what_works(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, ["abc " * 40, "x"], ["y"])
    with pytest.raises(DataError, match="too few tokens for one batch: got") as error:
        stream(folder, tokens_per_step=1024)
    text = str(error.value)
    assert "but tokens_per_step=1024" in text
    works = int(text.split("largest tokens_per_step that works: ")[1].split(".")[0])
    assert stream(folder, tokens_per_step=works).rows_per_epoch * CONTEXT == works
    with pytest.raises(DataError, match="too few"):
        stream(folder, tokens_per_step=works + CONTEXT)


def test_tokens_of_another_tokenizer_are_refused_with_both_hashes_and_paths(corpus: Path) -> None:
    other = Tokenizer.train(iter([SOURCE]), 576)
    with pytest.raises(ModelError) as error:
        CorpusStream(corpus, other, context=64, tokens_per_step=256, seed=1, cache=corpus.parent / "cache")
    for expected in (str(corpus / "meta.json"), TOKENIZER.hash[:16], other.hash[:16], "this tokenizer", "stage_encode"):
        assert expected in str(error.value)


def test_missing_and_cut_off_token_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stage_encode"):
        stream(tmp_path / "tokens")
    folder = write_corpus(tmp_path, documents(30), ["y"])
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"train\.bin: expected a file of \d+ tokens"):
        stream(folder)


def test_a_corpus_without_val_says_so_when_it_is_evaluated(tmp_path: Path) -> None:
    batches = stream(write_corpus(tmp_path, documents(40), [""]))
    with pytest.raises(DataError, match="val split is empty"):
        next(batches.evaluation(10))
