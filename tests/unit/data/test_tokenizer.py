"""Tokenizers: training, loading by name, and the files beside a corpus."""

import base64
import json

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from data.chosen_tokenizers import character_tokenizer, named_tokenizer, train_tokenizer
from data.errors import DataError
from data.sidecar import Sidecar, file_checksum
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_path

TEXTS = ["the cat sat on the mat\n", "the dog sat on the log\n"] * 20


def test_any_text_is_decoded_to_itself():
    tokenizer = train_tokenizer(TEXTS, 300)
    for text in ["the cat", " \n\t x  y", "Ψ × 漢字 🙂", "\x00\x7f", "<|endoftext|>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_is_deterministic_and_gives_the_size_asked_for():
    first, second = train_tokenizer(TEXTS, 270), train_tokenizer(TEXTS, 270)
    assert first.vocab_size == second.vocab_size == 270
    assert first.encode(TEXTS[0]) == second.encode(TEXTS[0])
    assert len(first.encode(TEXTS[0])) < len(TEXTS[0])


def test_a_text_cannot_end_its_document():
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_a_document_has_the_tokens_of_its_whole_text_and_no_others(tmp_path):
    plain = train_tokenizer(TEXTS, 300)
    plain.save(tmp_path / "tokenizer.json")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", plain.eod)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    assert backend.encode(TEXTS[0]).ids[0] == plain.eod, "the library itself adds it"
    assert len(backend.encode(TEXTS[0]).ids) == 99, "the library itself cuts and pads it"
    assert Tokenizer(backend, plain.eod).encode(TEXTS[0]) == plain.encode(TEXTS[0])
    assert Tokenizer(backend, plain.eod).encode_batch(TEXTS) == [plain.encode(text) for text in TEXTS]


def test_a_vocabulary_that_cannot_hold_the_bytes_is_reported():
    with pytest.raises(DataError, match=r"--train_vocab_size=256 .* use 257 or more"):
        train_tokenizer(TEXTS, 256)


def test_the_largest_vocabulary_is_trained_without_a_word_on_the_terminal(monkeypatch, capfd):
    monkeypatch.setattr("data.chosen_tokenizers.MAX_TRAINED_VOCAB_SIZE", 260)
    assert train_tokenizer(TEXTS, 260).vocab_size == 260
    assert tuple(capfd.readouterr()) == ("", "")
    with pytest.raises(DataError, match="--train_vocab_size=261 is above 260"):
        train_tokenizer(TEXTS, 261)


def test_a_word_of_a_megabyte_is_cut_in_training_and_encoded_as_a_whole(tmp_path):
    """Without the cut, the merges would go on doubling its tokens up to 2**20 bytes."""
    word = "a" * 2**20
    tokenizer = train_tokenizer([word], 300)
    assert max(len(tokenizer.decode([token])) for token in range(1, tokenizer.vocab_size)) == 512
    assert len(tokenizer.encode(word)) == 2**20 // 512
    tokenizer.save(tmp_path / "tokenizer.json")
    assert "FixedLength" not in (tmp_path / "tokenizer.json").read_text()


def test_a_tokenizer_whose_ids_do_not_fit_into_a_token_is_reported(tmp_path):
    for vocab, found in (({"</s>": 2**31}, 2**31 + 1), ({}, 0)):
        with pytest.raises(DataError, match=f"has ids below {found}; tokens are stored as 0 to 2147483647"):
            Tokenizer(Backend(models.WordLevel(vocab, unk_token="?")), 0)
    for id in (0, 2**31 - 1):
        assert Tokenizer(Backend(models.WordLevel({"</s>": id}, unk_token="?")), id).vocab_size == id + 1


def test_the_tokenizer_of_a_corpus_is_loaded_from_beside_it(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 270)
    tokenizer.save(tokenizer_path(tmp_path / "corpus"))
    sidecar = Sidecar(vocab_size=270, eod=tokenizer.eod, tokenizer="trained", documents=1, tokens=2, source=["x"])
    sidecar.save(tmp_path / "corpus")
    loaded = load_tokenizer(tmp_path / "corpus")
    assert Sidecar.load(tmp_path / "corpus") == sidecar
    path = Sidecar.path(tmp_path / "corpus")
    assert path.read_text().startswith('{\n  "vocab_size": 270,\n')
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))  # as another program may write it
    assert Sidecar.load(tmp_path / "corpus") == sidecar
    assert tokenizer_path(tmp_path / "corpus").read_text().startswith('{\n  "version"')
    assert (loaded.eod, loaded.vocab_size, loaded.encode("the cat")) == (0, 270, tokenizer.encode("the cat"))


def test_a_tokenizer_that_is_not_the_one_that_was_written_is_noticed(tmp_path):
    train_tokenizer(TEXTS, 270).save(tokenizer_path(tmp_path / "corpus"))
    checksums = {".tokenizer.json": file_checksum(tokenizer_path(tmp_path / "corpus"))}
    Sidecar(**FACTS, checksums=checksums).save(tmp_path / "corpus")
    assert load_tokenizer(tmp_path / "corpus").vocab_size == 270
    train_tokenizer(TEXTS[:1], 270).save(tokenizer_path(tmp_path / "corpus"))
    with pytest.raises(DataError, match=r"corpus.tokenizer.json .*: its CRC-32 is"):
        load_tokenizer(tmp_path / "corpus")


def test_files_beside_the_tokens_that_are_too_large_are_refused(tmp_path, monkeypatch):
    Sidecar.path(tmp_path / "corpus").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"corpus.json, .* it has more than 16,777,216 bytes"):
        load_tokenizer(tmp_path / "corpus")
    monkeypatch.setattr("data.tokenizer.MAX_FILE_BYTES", 10)
    train_tokenizer(TEXTS, 270).save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer.json has more than 10 bytes; give another"):
        named_tokenizer(str(tmp_path))


def test_a_corpus_without_its_sidecar_is_reported(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*corpus.json"):
        load_tokenizer(tmp_path / "corpus")


def test_a_directory_of_another_format_is_opened_by_transformers(tmp_path):
    from transformers import GPT2Tokenizer

    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer.json")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    GPT2Tokenizer(tokenizer_object=backend, vocab=backend.get_vocab(), merges=[]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    backend.model.save(str(tmp_path))
    assert named_tokenizer(str(tmp_path)).decode(named_tokenizer(str(tmp_path)).encode("the cat")) == "the cat"


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        named_tokenizer(str(tmp_path))
    assert not marker.exists()


def test_the_end_of_document_token_must_be_known(tmp_path):
    backend = Backend(models.WordLevel({"a": 0, "</doc>": 7, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"has none of the tokens .*; name its own with --eod_token"):
        named_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="has none of the tokens <eod>"):
        named_tokenizer(str(tmp_path), "<eod>")
    tokenizer = named_tokenizer(str(tmp_path), "</doc>")
    assert (tokenizer.eod, tokenizer.vocab_size) == (7, 8)  # ids with a gap: the largest counts


def llama_2() -> Backend:
    """Return a BPE of characters, with bytes for others, whose vocabulary holds its special tokens."""
    special, merges = ["<unk>", "<s>", "</s>"], [("t", "h"), ("th", "e")]
    entries = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"\N{LOWER ONE EIGHTH BLOCK}</s>the", "th", "the"]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(special)
    return backend


def of_bytes(special: list[str], ignore_merges: bool) -> Backend:
    """Return a byte-level BPE with special tokens outside of its model's vocabulary, as Llama 3 and Qwen have."""
    content = json.loads(train_tokenizer(TEXTS, 300).text)
    content["added_tokens"], content["model"]["ignore_merges"] = [], ignore_merges
    del content["model"]["vocab"]["<|endoftext|>"]
    backend = Backend.from_str(json.dumps(content))
    backend.add_special_tokens(special)
    return backend


KNOWN_KINDS = {
    "gpt2": lambda: Backend.from_str(train_tokenizer(TEXTS, 300).text),
    "llama 2": llama_2,
    "llama 3": lambda: of_bytes(["<|begin_of_text|>", "<|end_of_text|>"], ignore_merges=True),
    "qwen": lambda: of_bytes(["<|endoftext|>", "<|im_end|>"], ignore_merges=False),
}


@pytest.mark.parametrize("kind", KNOWN_KINDS)
def test_tokenizers_that_encode_the_names_of_special_tokens_as_characters_are_taken(tmp_path, kind):
    KNOWN_KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    beginning = {"llama 2": "<s>", "llama 3": "<|begin_of_text|>"}.get(kind, "none")
    tokenizer = named_tokenizer(str(tmp_path), bos_token=beginning)
    for name in ("</s>", "<s>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>"):
        assert {tokenizer.eod, *tokenizer.beginning}.isdisjoint(tokenizer.encode(f"the {name}the {name} {name}"))


def backend_of(model: models.Model, pre_tokenizer: object = None) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    return backend


def bpe(entries: str, **options: object) -> models.BPE:
    return models.BPE({entry: number for number, entry in enumerate(["</s>", *entries])}, [], **options)


BYTES, BYTES_OF_U = pre_tokenizers.ByteLevel(add_prefix_space=False), "Ã¼"
LACKING = {  # tokenizers without ü: each with the message, and a text that it has whole
    "bytes": (backend_of(bpe("Grße "), BYTES), "drops it", "re"),
    "a byte of two": (backend_of(bpe("re" + BYTES_OF_U[:1]), BYTES), "no token for 'rü', and drops it", "re"),
    "bytes of a normalizer": (backend_of(bpe("re")), "drops it", "re"),
    "characters": (backend_of(bpe("re ")), "no token for 'rü e', and drops it", "re e"),
    "no fallback": (backend_of(bpe("re ", byte_fallback=True)), "drops it", "re e"),
    "unknown": (backend_of(bpe("re ?", unk_token="?")), r"has \? in its place", "re e"),
    "words": (backend_of(models.WordPiece({"r": 0, "[UNK]": 1}), pre_tokenizers.Whitespace()), "has .UNK. in", "r r"),
    "unigram": (backend_of(models.Unigram([("<unk>", 0.0), ("r", -1.0)], unk_id=0)), "has <unk> in its place", "rr"),
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_text_with_characters_that_the_tokenizer_lacks_is_refused(kind):
    backend, message, whole = LACKING[kind]
    if kind == "bytes of a normalizer":
        backend.normalizer = normalizers.ByteLevel()
    tokenizer = Tokenizer(backend, 0)
    assert len(tokenizer.encode(whole)) == len(whole.replace(" ", "" if kind == "words" else " "))
    with pytest.raises(DataError, match=rf"^the tokenizer .*{message}.*; give another tokenizer or text$"):
        tokenizer.encode_batch([whole, "rü e"])


def test_added_tokens_of_any_characters_are_decoded_as_they_are():
    """The alphabet of a byte-level tokenizer has letters, such as Ö for a byte."""
    backend = Backend.from_str(train_tokenizer(TEXTS, 300).text)
    backend.add_tokens(["ilÖveyou"])
    tokenizer, text = Tokenizer(backend, 0), "a č b\r ilÖveyou Ö 日"
    assert tokenizer.decode([*tokenizer.encode(text), 0]) == f"{text}<|endoftext|>"
    assert tokenizer.decode([]) == ""


def test_a_panic_of_the_library_is_an_error_of_one_line(tmp_path):
    """A damaged table of a normalizer makes it panic, when it is read or when it is used."""
    content = json.loads(llama_2().to_str())
    for table, refused in (
        (b"", r"^cannot read the tokenizer .*x\.json: .*; give another$"),
        (b"\0\0\0\0a", "^the tok"),
    ):
        encoded = base64.b64encode(table).decode()
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": encoded}
        (tmp_path / "x.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=refused):
            Tokenizer.from_file(tmp_path / "x.json", 2).encode("the")


def unigram() -> Backend:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("the", -3.0)], unk_id=0))
    backend.add_special_tokens(["</s>"])
    return backend


def not_special() -> Backend:
    backend = Backend.from_str(train_tokenizer(TEXTS, 300).text)
    backend.add_tokens([AddedToken("</s>", special=False)])
    return backend


def whole_words() -> Backend:
    backend = Backend(models.BPE({entry: number for number, entry in enumerate(["</s>", *"</s>the"])}, []))
    backend.model.ignore_merges = True
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    return backend


@pytest.mark.parametrize("backend", [unigram, not_special, whole_words])
def test_a_tokenizer_with_which_a_text_can_end_its_document_is_refused(tmp_path, backend):
    backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"^tokenizer .* encodes </s> in a text as the token that begins or ends a doc"):
        named_tokenizer(str(tmp_path), eod_token="</s>")


FACTS = {"vocab_size": 270, "eod": 0, "tokenizer": "trained", "documents": 1, "tokens": 2, "source": ["x"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "270"}, "vocab_size is '270', not a number"),
        ({"tokens": -1}, "tokens is '-1', not a number"),
        ({"checksums": {".bin": 1, ".idx": None}}, r".idx is 'None', not a number"),
        ({"checksums": 3}, "checksums is '3', not an object of numbers"),
        ({"checksums": []}, r"checksums is '\[\]', not an object of numbers"),
        ({"eod": 270}, "eod=270 is not below vocab_size=270"),
        ({"vocabulary": 1}, "unexpected keyword argument 'vocabulary'"),
        ({"crc32": 1}, "it was changed since it was written"),
        ({"crc32": None}, "it was changed since it was written"),
        (None, "it is a JSON list, not an object"),
    ],
    ids=str,
)
def test_a_wrong_sidecar_is_reported_with_the_key(tmp_path, change, message):
    """A file without checksums, as an older version wrote it, is accepted if its types are right."""
    Sidecar.path(tmp_path / "corpus").write_text(json.dumps(FACTS))
    assert Sidecar.load(tmp_path / "corpus") == Sidecar(**FACTS)
    Sidecar.path(tmp_path / "corpus").write_text(json.dumps([] if change is None else FACTS | change))
    with pytest.raises(DataError, match=rf"cannot read .*corpus.json, .*{message}.*; prepare the data again"):
        Sidecar.load(tmp_path / "corpus")


def test_a_character_tokenizer_has_an_entry_for_each_character_of_its_texts():
    tokenizer = character_tokenizer(["hello\nworld <|endoftext|>", "\r é 日本"])
    text = "hold\n<|endoftext|>\r日é"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 1 + len(set("hello\nworld <|endoftext|>\r é 日本"))
    assert (len(ids), tokenizer.eod in ids, tokenizer.decode(ids)) == (len(text), False, text)
    with pytest.raises(DataError, match="cannot encode a text"):
        tokenizer.encode("Hello")
    with pytest.raises(DataError, match="holds no text"):
        character_tokenizer([])
