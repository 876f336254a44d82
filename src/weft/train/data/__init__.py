"""What is trained on: text as tokens, and the order in which ranks see it."""

from weft.train.data.batches import Batch, Batches, Validation
from weft.train.data.corpus import Corpus, load_corpus

__all__ = ["Batch", "Batches", "Corpus", "Validation", "load_corpus"]
