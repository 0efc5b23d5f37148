"""The made-up tokens follow their rule, whose entropy is known."""

import numpy as np
import pytest

from data.corpus import load_corpus, open_corpus
from data.errors import DataError
from data.synthetic import synthetic_documents
from tests.data.conftest import Configure


def test_the_rule_and_its_entropy() -> None:
    documents = synthetic_documents(1 << 19, 101, seed=0).astype(np.int64)
    assert documents.shape == (1024, 512)
    assert (documents[:, -1] == 100).all()
    inner = documents[:, :-1]
    assert 0 <= inner.min() <= inner.max() == 99
    noise = (inner[:, 1:] - 5 * inner[:, :-1] - 7) % 100
    shares = np.bincount(noise.ravel(), minlength=100) / noise.size
    assert shares[4:].sum() == 0
    entropy = -(shares[:4] * np.log(shares[:4])).sum()
    assert entropy == pytest.approx(np.log(4), abs=1e-4)
    assert np.bincount(inner[:, 0], minlength=100).max() < 40  # first tokens are spread out


def test_seeds() -> None:
    first = synthetic_documents(2000, 64, seed=1)
    assert (first == synthetic_documents(2000, 64, seed=1)).all()
    assert (first != synthetic_documents(2000, 64, seed=2)).any()


def test_the_smallest_vocabulary() -> None:
    assert synthetic_documents(1024, 5, seed=0).max() == 4
    with pytest.raises(DataError, match=r"model.vocab_size=4 is too small for data=synthetic; valid: 5 or more"):
        synthetic_documents(1024, 4, seed=0)


def test_as_a_corpus(configure: Configure) -> None:
    config = configure(source="synthetic", tokens=10_000)
    corpus = open_corpus(config, vocab_size=50, seed=7)
    assert corpus.tokenizer is None
    assert corpus.bytes_per_token(corpus.held_out) is None
    assert len(corpus.held_out) == 512
    assert corpus.num_train_tokens == 19 * 512
    everything = np.sort([*corpus.train.read(0, 19 * 512), *corpus.held_out])
    assert (everything == np.sort(synthetic_documents(10_000, 50, 7).ravel())).all()
    again = load_corpus(config, 50, 7, None)
    assert (again.train.read(5000, 9000) == corpus.train.read(5000, 9000)).all()
