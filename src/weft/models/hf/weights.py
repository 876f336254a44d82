"""Weights between a model, sharded or not, and a directory; tensor by tensor, each rank what it keeps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from weft.comm.groups import first_rank_s
from weft.errors import ConversionError
from weft.models.hf.directory import INDEX, OURS, THEIRS, TensorFiles, TensorWriter, make_directory, write_json
from weft.models.hf.errors import listed
from weft.models.hf.families import config_of, family_for, places_of
from weft.models.hf.family import differences
from weft.models.hf.places import Place, Same, write
from weft.models.model import HybridModel


@torch.no_grad()
def load(model: HybridModel, directory: str | Path) -> None:
    """Fill the weights of `model`, sharded or not, from a directory; each rank reads its part.

    Weights keep the dtype that they have in `model`. Raises `ConversionError` if the directory holds a model of another
    configuration, and if a tensor is missing, unused or of another shape.
    """
    directory = Path(directory)
    cfg = config_of(directory)
    if different := differences(model.cfg, cfg):
        raise ConversionError(f"{directory} holds another model: {'; '.join(different)}; build it with hf.config_of")
    files = TensorFiles(directory)
    places = places_of(directory, model.cfg)
    check_complete(places, files)
    for name, tensor in _tensors(model):
        place = places[name]
        if (shape := place.shape(files)) != list(tensor.shape):
            raise ConversionError(f"{listed(place.names, 3)} has the shape {shape}, {name} {list(tensor.shape)}")
        for start, mine in _parts(name, tensor):
            rows = place.rows(files, start[0], start[0] + mine.shape[0])
            mine.copy_(rows[tuple(slice(at, at + size) for at, size in zip((0, *start[1:]), mine.shape))])


@torch.no_grad()
def save(model: HybridModel, directory: str | Path, model_type: str | None = None) -> None:
    """Write `model`, sharded or not, as a Hugging Face directory of the family `model_type`, or of one that fits.

    All ranks call it, and hold one weight at a time; rank 0 writes. Raises `ConversionError` if no family can hold it,
    and if the directory cannot be made or holds a model already: what one left would be read as the other's.
    """
    if model.cut is not None and model.cut.ranks > 1:
        raise ConversionError(
            f"this rank has stages of a model that is cut over pp={model.cut.ranks} ranks, and a directory holds "
            "all of it: save a checkpoint, load it with pp=1, and write that"
        )
    directory = Path(directory)
    family, raw = family_for(model.cfg, model_type)
    places = family.places(model.cfg)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    _prepare(directory)
    with TensorWriter(directory) if writes else _Nowhere() as writer:
        write(places, _whole(model), writer)
    if writes:
        raw["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
        write_json(directory / THEIRS, raw)


def check_complete(places: Mapping[str, Place], files: TensorFiles) -> None:
    """Raise `ConversionError` unless `files` has exactly the tensors of `places`."""
    wanted = {name for place in places.values() for name in place.names}
    complaints = []
    if missing := wanted - set(files):
        complaints.append(f"missing: {listed(missing)}")
    copies = {copy for place in places.values() if isinstance(place, Same) for copy in place.copies}
    if unused := set(files) - wanted - copies:
        complaints.append(f"unused: {listed(unused)}")
    if complaints:
        raise ConversionError(f"{files.directory} does not fit its configuration: {'; '.join(complaints)}")


def _prepare(directory: Path) -> None:
    """Make it, or raise: on all ranks alike, by what the first one sees, which begins to write when others may not
    have looked yet."""
    refusal: ConversionError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            make_directory(directory)
            _refuse_another(directory)
        except ConversionError as error:
            refusal = error
    if dist.is_initialized():
        refusal = first_rank_s(refusal, what="whether the directory can be written to")
    if refusal is not None:
        raise refusal


def _refuse_another(directory: Path) -> None:
    files = (directory / INDEX, directory / THEIRS, directory / OURS, *sorted(directory.glob("*.safetensors")))
    if found := [path.name for path in files if path.exists()]:
        raise ConversionError(f"{directory} holds a model already ({listed(found, 3)}): save into a new directory")


class _Nowhere(TensorWriter):
    """Of ranks that do not write."""

    def __init__(self) -> None:
        super().__init__(Path())

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def __exit__(self, *error: Any) -> None:
        pass


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are saved, in the order of a state dict."""
    return iter(model.state_dict(keep_vars=True).items())


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _tensors(model):
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """What this rank has of `tensor`: where each piece starts in the whole, and the piece."""
    if not isinstance(tensor, DTensor):
        yield (0,) * max(tensor.dim(), 1), tensor
        return
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        if all(chunk.sizes):
            start = tuple(chunk.offsets)
            yield start, tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))  # type: ignore[attr-defined]
