"""Load and save models as directories of Hugging Face files.

Files such as `llama.py` have tables of tensor names and of configuration fields, for one family of models or a few
related families. An unknown field that could change the result, or a value that weft does not support, raises an error
that names the field. A missing tensor, or an unknown tensor of the text model, raises an error that names the tensor.
"""

from weft.models.hf import directory
from weft.models.hf.convert import convert, refuse_used
from weft.models.hf.families import FAMILIES, config_of, family_for, family_of
from weft.models.hf.family import differences
from weft.models.hf.pretrained import from_pretrained, save_pretrained
from weft.models.hf.weights import load, save

__all__ = [
    "FAMILIES",
    "config_of",
    "convert",
    "differences",
    "directory",
    "family_for",
    "family_of",
    "from_pretrained",
    "load",
    "refuse_used",
    "save",
    "save_pretrained",
]
