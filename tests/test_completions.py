"""What /v1/completions reports about tokens, tested apart from the server around it."""

from pipeline.serve.completions import Told, label
from pipeline.text.tokenizer import Tokenizer


def test_alternatives_that_are_half_a_character_stay_apart(byte_tokenizer: Tokenizer) -> None:
    halves = byte_tokenizer.encode("🚂")[:2]
    assert [byte_tokenizer.token_bytes[token] for token in halves] == [b"\xf0", b"\x9f"], "as text both are one sign"
    told = Told(byte_tokenizer)
    told.add(halves[0], -0.5, ((halves[0], -0.5), (halves[1], -1.5), (byte_tokenizer.encode("z")[0], -3.0)))
    assert told.fields["top_logprobs"] == [{"bytes:\\xf0": -0.5, "bytes:\\x9f": -1.5, "z": -3.0}]


def test_every_token_has_a_label_of_its_own(byte_tokenizer: Tokenizer) -> None:
    labels = [label(byte_tokenizer, token) for token in range(byte_tokenizer.vocab_size)]
    assert len(set(labels)) == byte_tokenizer.vocab_size
