"""What the trainer reads, and the batches it makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.trainer.data import batch, load_corpus, validation_batch
from hyper_parallel.trainer.errors import UsageError

pytestmark = pytest.mark.once


def test_the_default_text_is_cpythons_documentation() -> None:
    corpus = load_corpus(None, 128)
    assert len(corpus.train) > 300_000
    assert b"statement" in corpus.train
    assert len(corpus.validation) == pytest.approx(len(corpus.train) / 19, rel=0.01)


def test_a_folder_is_read_whole_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two " * 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("three " * 100)
    (tmp_path / "a.txt").write_text("one " * 100)
    (tmp_path / ".hidden").write_bytes(b"\0")
    corpus = load_corpus(str(tmp_path), 16)
    assert (corpus.train + corpus.validation) == b"\n".join([b"one " * 100, b"two " * 100, b"three " * 100])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (b" \n \n", "is empty"),
        (b"text\0text" * 100, r"is binary \(a zero byte at position 4\): give text"),
        (b"caf\xe9 " * 100, r"is not UTF-8 text \(byte 3\)"),
        (
            b"short",
            r"has 5 bytes, too short: sequences of 16 need at least 68; give more text or a smaller --length",
        ),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_corpus(str(file), 16)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the folder holds no file"):
        load_corpus(str(tmp_path), 16)


def test_what_never_ends_is_refused() -> None:
    with pytest.raises(UsageError, match="--data /dev/zero: neither a file nor a folder"):
        load_corpus("/dev/zero", 16)


def test_a_name_that_the_system_refuses_is_told() -> None:
    with pytest.raises(UsageError, match="File name too long"):
        load_corpus("x" * 300, 16)


def test_targets_are_the_next_bytes_and_batches_depend_on_seed_and_step_alone() -> None:
    corpus = load_corpus(None, 32)
    inputs, targets = batch(corpus, seed=3, step=7, size=4, length=32)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == np.int64
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    for row in inputs:
        assert row.astype(np.uint8).tobytes() in corpus.train
    again, _ = batch(corpus, seed=3, step=7, size=4, length=32)
    np.testing.assert_array_equal(again, inputs)
    for other in (
        batch(corpus, seed=3, step=8, size=4, length=32),
        batch(corpus, seed=4, step=7, size=4, length=32),
    ):
        assert (other[0] != inputs).any()


def test_the_shortest_text_that_is_taken_makes_batches(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("x" * 68)
    corpus = load_corpus(str(file), 16)
    assert batch(corpus, seed=0, step=0, size=8, length=16)[1].shape == (8, 16)
    inputs, targets = validation_batch(corpus, length=16, multiple=3)
    assert inputs.shape == targets.shape == (66, 16)
