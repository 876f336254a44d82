"""Mutations of src/weft/checkpoint."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a checkpoint of another run is loaded",
        "require_own",
        "own and manifest.run and manifest.run != own",
        "False",
        "checkpoint/test_trust.py::test_a_checkpoint_of_another_run_is_passed_over_and_named",
    ),
    Mutation(
        "data in the legacy format before a harmless archive is read",
        "unpack",
        "stream.read(4) != _ZIP",
        "False",
        "checkpoint/test_trust.py::test_the_legacy_format_in_front_of_a_harmless_archive_is_refused",
    ),
    Mutation(
        "a tensor with a missing part is loaded",
        "checkpoint:_check",
        "held == math.prod(entry.size)",
        "True",
        "checkpoint/test_crafted.py::test_each_rule_that_the_metadata_breaks_is_an_error",
    ),
    Mutation(
        "many small storages can use unlimited memory",
        "_check_names",
        "calls * largest",
        "largest",
        "checkpoint/test_crafted.py::test_storages_without_tensors_that_would_take_memory_are_refused",
    ),
    Mutation(
        "a run continues to save after it lost its lease",
        "CheckpointManager._prepare.prepare",
        "self._lock.check()",
        "",
        "checkpoint/test_leases.py::test_a_run_that_lost_its_lease_saves_no_more",
    ),
    Mutation(
        "a checkpoint is renamed before its folder is flushed",
        "checkpoint:commit",
        "flush_directory(temporary)",
        "",
        "checkpoint/test_storage.py::"
        "test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_save_ends",
    ),
    Mutation(
        "a directory that other ranks do not see is accepted",
        "sees",
        "return False",
        "return True",
        "checkpoint/test_storage.py::test_a_folder_that_not_all_ranks_see_is_refused_when_a_run_is_claimed[2]",
    ),
    Mutation(
        "an error of fsync is ignored",
        "flush_descriptor",
        "error.errno not in UNSUPPORTED | {errno.EACCES, errno.EPERM}",
        "False",
        "checkpoint/test_storage.py::test_what_the_disk_does_not_take_ends_the_claim_or_the_save",
    ),
    Mutation(
        "a file of a checkpoint is read into memory as a whole",
        "CheckedFile._load",
        "if len(self._blocks) == _KEPT: ...",
        "if False: ...",
        "checkpoint/test_damage.py::test_every_block_that_is_read_is_checked_and_no_other",
    ),
    Mutation(
        "dictionaries in an optimizer's state cannot be loaded",
        "OptimizerState.prepare_load",
        "target = target.setdefault(each, {})",
        "pass",
        "checkpoint/test_manager.py::test_dictionaries_in_an_optimizer_s_state_come_back",
    ),
    Mutation(
        "a rank saves step counts of parameters of which it has no part",
        "OptimizerState.state_dict",
        "name in own and not _is_empty_here(p)",
        "name in own",
        "checkpoint/test_resharding.py::test_a_rank_saves_no_step_count_of_a_parameter_of_which_it_has_no_part",
    ),
    Mutation(
        "AdamW loads a checkpoint of Adam",
        "OptimizerState._loaded_options",
        "then != own",
        "False",
        "checkpoint/test_manager.py::test_another_optimizer_is_an_error",
    ),
    Mutation(
        "optimizer state is cast to the dtype of its parameter",
        "OptimizerState.load_state_dict",
        "_keep_dtypes(stored, self.optimizer.state.get(parameter, {}))",
        "pass",
        "checkpoint/test_manager.py::test_optimizer_state_keeps_its_dtype",
    ),
    Mutation(
        "a run that went back to an older checkpoint deletes what it saves",
        "CheckpointManager.load",
        "step < steps[-1]",
        "False",
        "checkpoint/test_manager.py::test_a_run_that_went_back_to_an_older_checkpoint_deletes_none_of_the_existing",
    ),
    Mutation(
        "an intact checkpoint is renamed like the damaged one before it",
        "CheckpointManager._prepare.prepare",
        "self._replaceable.discard(step)",
        "",
        "checkpoint/test_damage.py::test_a_run_that_found_damage_deletes_no_existing_checkpoint",
    ),
    Mutation(
        "an error of one rank's state leaves the other ranks waiting",
        "Ranks.on_first",
        "self._told(error)",
        "error",
        "checkpoint/test_manager.py::test_an_error_of_an_own_function_on_one_rank_is_raised_on_every_rank",
    ),
]
