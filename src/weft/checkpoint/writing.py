"""The files of a checkpoint, written by Distributed Checkpoint."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import WriteResult
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future


class Writer(dcp.FileSystemWriter):
    """Says why writing failed: torch's archive only says that it is not as long as it should be."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None
