"""Load and save the weights of a model, sharded or not, tensor by tensor."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from weft.checkpoint.state import plain_name
from weft.comm.groups import broadcast_object
from weft.errors import ConversionError
from weft.models.hf.directory import INDEX, OURS, THEIRS, TensorWriter, make_directory, write_json
from weft.models.hf.families import config_of, family_for, opened
from weft.models.hf.family import differences, shapes_of
from weft.models.hf.fields import Raw
from weft.models.hf.origin import BESIDE, origin_of
from weft.models.hf.places import Place, Same, write
from weft.models.hf.spelling import Spelling, text_of
from weft.models.model import HybridModel
from weft.words import listed


@torch.no_grad()
def load(model: HybridModel, directory: str | Path, *, ignored: Collection[str] = ()) -> None:
    """Fill the weights of `model`, sharded or not, from a directory.

    Each rank reads only the rows that its shard needs. A few tensors, whose layout differs in weft, are read whole.
    Weights keep the dtype that they have in `model`. The other files (config.json, tokenizer, generation settings) are
    kept as `model.origin`. `ignored`: unknown fields of config.json to ignore.

    Raises `ConfigError` if the directory does not exist, and `TypeError` if `model` is not a `HybridModel`. Raises
    `ConversionError` if the directory holds a model of another configuration, lacks a tensor of the model, or has an
    unknown tensor. Also raises it for a tensor of another shape, for a weight that is not fp64, fp32, fp16 or bf16, and
    if the model has other tensors than its configuration describes, such as adapters. In all these cases, no weight has
    been filled. If copies of one tensor differ, `ConversionError` may be raised after some weights have been filled.
    """
    directory, tensors = Path(directory), _tensors(model)
    cfg = config_of(directory, ignored=ignored)
    if different := differences(model.cfg, cfg):
        raise ConversionError(f"{directory} holds another model: {'; '.join(different)}; build it with hf.config_of")
    places, files = opened(directory, model.cfg)
    check_fits({name: list(tensor.shape) for name, tensor in tensors.items()}, places, files)
    for name, tensor in tensors.items():
        for start, mine in _parts(name, tensor):
            rows = places[name].rows(files, start[0], start[0] + mine.shape[0])
            mine.copy_(rows[tuple(slice(at, at + size) for at, size in zip((0, *start[1:]), mine.shape))])
    model.origin = origin_of(directory, ignored)


@torch.no_grad()
def save(model: HybridModel, directory: str | Path, model_type: str | None = None) -> None:
    """Write `model`, sharded or not, as a directory of Hugging Face files. Collective.

    `model_type`: the family to write. Default: for a loaded model, the family of the files from which it was loaded.
    For any other model, the default is the first family that can represent it. All ranks gather one weight at a time,
    and rank 0 writes it.

    For a loaded model, rank 0 also writes the tokenizer and generation files. If the family is still the original one,
    rank 0 also writes the weights that the text model does not use. config.json is then the original, except for the
    dtype and the fields that describe what has changed in the configuration. For another family, config.json is new.

    Raises `TypeError` if `model` is not a `HybridModel`. Raises `ConversionError` in these cases:

    - The family to write is unknown or cannot represent the model, or no family can represent it.
    - The model has other tensors than its configuration describes, such as adapters.
    - The model is split over several pipeline ranks.
    - The directory cannot be created, or already contains a model: old files could be mistaken for new files.
    """
    tensors = _tensors(model)
    if model.cut is not None and model.cut.ranks > 1:
        raise ConversionError(
            f"this rank has stages of a model that is split over pp={model.cut.ranks} ranks, but a directory holds the "
            f"whole model: save a checkpoint, load it with pp=1, and save that model"
        )
    directory, origin = Path(directory), model.origin
    family, raw = family_for(model.cfg, model_type or (origin.family if origin else None))
    spelling = origin.spelling if origin and origin.family == family.model_type else Spelling()
    places = family.places(model.cfg, fused=spelling.fused)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    _prepare(directory)
    with TensorWriter(directory) if writes else _Nowhere() as writer:
        write(places, _whole(tensors), Renamed(writer, spelling))
        if origin and writes and origin.family == family.model_type:
            origin.copy_beside(writer)
    if writes:
        if origin:
            raw = origin.config_json(family, model.cfg, raw)
            origin.write_files(directory)
        write_json(directory / THEIRS, with_dtype(raw, next(model.parameters()).dtype))


def with_dtype(raw: Raw, dtype: torch.dtype) -> Raw:
    """Return a copy of the config.json `raw` with `dtype` as the dtype of the weights."""
    name = str(dtype).removeprefix("torch.")
    raw = {**raw, "torch_dtype" if "torch_dtype" in raw else "dtype": name}
    if text_of(raw) is not raw:
        raw["text_config"] = with_dtype(raw["text_config"], dtype)
    return raw


def check_complete(places: Mapping[str, Place], files: Any) -> None:
    """Raise `ConversionError` if `files` lacks a tensor of `places`, or has a tensor that is not in `places`.

    Copies of tensors and the weights of other parts of a larger model are allowed. `places`, `files`: as `opened`
    returns them.
    """
    wanted = {name for place in places.values() for name in place.names}
    complaints = []
    if missing := wanted - set(files):
        complaints.append(f"missing: {listed(sorted(missing))}")
    again = {name for place in places.values() if isinstance(place, Same) for name in (*place.copies, *place.repeats)}
    if unused := {name for name in set(files) - wanted - again if not name.startswith(BESIDE)}:
        complaints.append(f"unused: {listed(sorted(unused))}")
    if complaints:
        raise ConversionError(f"{files.directory} does not fit its configuration: {'; '.join(complaints)}")


def check_fits(shapes: Mapping[str, list[int]], places: Mapping[str, Place], files: Any) -> None:
    """Raise `ConversionError` as `check_complete` does, or if a tensor of this rank has a wrong shape or dtype on disk.

    A dtype is wrong if it is not fp64, fp32, fp16 or bf16, or if the parts of one tensor differ in dtype.
    `shapes`: the unsharded shapes of this rank's tensors. With pipeline stages, a rank has only a part of the tensors
    in `places`.
    """
    check_complete(places, files)
    for name, wanted in shapes.items():
        place = places[name]
        dtypes = {each: files.dtype(each) for each in place.names}
        if len(set(dtypes.values())) > 1:
            shown = ", ".join(f"{each}: {dtype}" for each, dtype in list(dtypes.items())[:3])
            raise ConversionError(f"{files.directory}: the parts of {name} differ in dtype ({shown})")
        try:
            shape = place.shape(files)
        except (ValueError, IndexError) as error:  # the tensor on disk has another number of dimensions
            found = files[place.names[0]].get_shape()
            reason = str(error) if isinstance(error, ConversionError) else f"{place.names[0]} has the shape {found}"
            raise ConversionError(f"{files.directory}: {reason}, but {name} is {wanted}") from error
        if shape != wanted:
            found = f"{listed(place.names, 3)} has the shape {shape}"
            raise ConversionError(f"{files.directory}: {found}, but {name} is {wanted}")


class Renamed:
    """Creates tensors in `writer`, under the names that `spelling` gives to the names in a family's tables."""

    def __init__(self, writer: TensorWriter, spelling: Spelling) -> None:
        self.writer, self.spelling = writer, spelling

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor that is memory-mapped to a file. `name`: the name in the family's tables."""
        return self.writer.room(self.spelling.theirs(name), shape, dtype)


def _prepare(directory: Path) -> None:
    """Create the directory, or raise `ConversionError` on all ranks.

    Only rank 0 checks the directory: another rank might check it after rank 0 has begun to write.
    """
    refusal: ConversionError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            make_directory(directory)
            _refuse_another(directory)
        except ConversionError as error:
            refusal = error
    if dist.is_initialized():
        refusal = broadcast_object(refusal, what="whether the directory can be written to")
    if refusal is not None:
        raise refusal


def _refuse_another(directory: Path) -> None:
    files = (directory / INDEX, directory / THEIRS, directory / OURS, *sorted(directory.glob("*.safetensors")))
    if found := [path.name for path in files if path.exists()]:
        raise ConversionError(f"{directory} already contains a model ({listed(found, 3)}): save into a new directory")


class _Nowhere(TensorWriter):
    """The writer of ranks that do not write."""

    def __init__(self) -> None:
        super().__init__(Path())

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def __exit__(self, *error: Any) -> None:
        pass


def _tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers, in the order of a state dict. Raise `ConversionError` if they
    are not those of a model of `model.cfg`, and `TypeError` if `model` is not a `HybridModel`."""
    if not isinstance(model, HybridModel):
        raise TypeError(f"got a {type(model).__name__}: pass the HybridModel, without a module around it")
    tensors = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    found = {name: [*each.shape] if isinstance(each, Tensor) else "an extra state" for name, each in tensors.items()}
    wanted = shapes_of(model.cfg)
    names = found if model.cut is not None and model.cut.ranks > 1 else found | wanted
    if strange := [name for name in names if found.get(name) != wanted.get(name)]:
        raise ConversionError(
            f"the model and its configuration differ in {listed(strange, 3)}: merge adapters, remove parametrizations "
            f"and state of your own, and build models of other sizes from a configuration with these sizes"
        )
    return tensors


def _whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield this rank's pieces of `tensor`, each with its offset in the whole tensor."""
    if not isinstance(tensor, DTensor):
        yield (0,) * max(tensor.dim(), 1), tensor
        return
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        if all(chunk.sizes):
            start = tuple(chunk.offsets)
            yield start, tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))  # type: ignore[attr-defined]
