"""Training data: text as tokens, and the order in which ranks see it."""

from weft.train.data.batches import Batches, Validation
from weft.train.data.corpus import Corpus, find_texts, load_corpora, load_corpus
from weft.train.data.sequences import Batch

__all__ = ["Batch", "Batches", "Corpus", "Validation", "find_texts", "load_corpora", "load_corpus"]
