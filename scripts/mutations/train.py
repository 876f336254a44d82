"""Mutations of src/weft/train."""

from mutation import Mutation

RESUMED = "train/test_loop.py::test_on_the_same_ranks_a_run_resumes_bit_for_bit"
HABITS = "train/test_habits.py::"
SPIKES = HABITS + "test_a_step_with_a_spike_changes_no_weight_and_is_counted_and_a_resumed_run_knows"
BEST = HABITS + "test_a_run_ends_early_keeps_its_best_checkpoint_and_has_nothing_to_do_afterwards"
PACKED = "train/test_documents.py::"
OF_CONFIGURATIONS = "train/test_check.py::"

MUTATIONS = [
    # --- checking a configuration -------------------------------------------------------------------------------------
    Mutation(
        "gradients are not compared with those of one rank",
        "findings",
        "found + gradients",
        "found",
        OF_CONFIGURATIONS + "test_a_norm_whose_gradient_is_not_summed",
    ),
    Mutation(
        "parameters missing from the clipping norm are not detected",
        "_norm",
        "if all(_near(count, 1) for count in counts): ...",
        "...",
        OF_CONFIGURATIONS + "test_sinks_that_the_norm_for_clipping_leaves_out",
    ),
    Mutation(
        "a deadlock of ranks in threads is not detected",
        "Mailbox._look",
        "self.waits = {rank: said for rank, _, said in self._blocked.values()} | self.ended",
        "self.failed = True",
        OF_CONFIGURATIONS + "test_a_message_that_a_rank_does_not_send",
    ),
    Mutation(
        "train.check is ignored",
        "train.loop:Trainer.__init__",
        "if config.train.check: ...",
        "if False: ...",
        OF_CONFIGURATIONS + "test_a_run_with_a_fault_begins_on_no_rank",
    ),
    # --- documents in one row -----------------------------------------------------------------------------------------
    Mutation(
        "the trainer counts labels at document boundaries",
        "WholeDocuments.labels",
        "if self.apart: ...",
        "if False: ...",
        PACKED + "test_no_document_predicts_the_next_and_no_label_of_one_is_lost",
    ),
    Mutation(
        "a model that ignores document boundaries is trained on packed documents",
        "_require_documents",
        "if change > 0: ...",
        "if False: ...",
        PACKED + "test_a_model_that_ignores_document_boundaries_is_refused",
    ),
    Mutation(
        "a model of transformers uses a cache and ignores document boundaries",
        "_scores",
        "given['use_cache'] = False",
        "",
        PACKED + "test_a_model_of_transformers_receives_the_document_boundaries",
    ),
    # --- models -------------------------------------------------------------------------------------------------------
    Mutation(
        "a text is decoded without its prompt",
        "Source.added",
        "each[-CONTEXT:]",
        "each[:0]",
        "train/test_published_programs.py::test_a_text_is_continued_with_the_blank_between_words",
    ),
    Mutation(
        "the user's messages are labels too",
        "ConversationTokenizer.labelled",
        "(begins < end) & (ends > begin)",
        "True",
        "train/test_conversations.py::test_tokens_and_masks_of_forty_conversations_are_those_of_transformers[chatml]",
    ),
    # --- checkpoints --------------------------------------------------------------------------------------------------
    Mutation(
        "a damaged token file is trained on",
        "open_cache",
        "_shown(digest) != part.fingerprint",
        "False",
        "train/test_token_cache.py::test_a_damaged_token_file_of_the_right_length_is_made_anew[tokens]",
    ),
    Mutation(
        "code that a copied run directory names is imported",
        "require_trust",
        "trust or not code or _is_marked(directory, code)",
        "True",
        "train/test_trust_of_runs.py::test_own_directories_are_trusted_and_others_name_their_code",
    ),
    Mutation(
        "a file operation that hangs is not detected",
        "Watchdog._watch",
        "operations and time.monotonic() - operations[0].started > self.limit",
        "False",
        "train/test_hangs.py::test_a_file_operation_that_never_returns_is_named_on_all_ranks_though_nothing_else_is_watched[2]",
    ),
    Mutation(
        "buffers are not synchronised over ranks",
        "Buffers.after_step",
        "self.rule == 'own' or not self._buffers or dist.get_world_size() == 1",
        "True",
        "train/test_buffers.py::test_the_mean_is_that_of_all_ranks_and_counts_are_those_of_rank_0[2]",
    ),
    Mutation(
        "on another number of ranks, each rank skips the old number of microbatches",
        "Stream.load_from_other_ranks",
        "before // self.ranks",
        "before // known[0]",
        "train/test_trainer.py::test_a_position_in_own_data_that_another_number_of_ranks_cannot_have_is_refused",
    ),
    # --- the trainer --------------------------------------------------------------------------------------------------
    Mutation(
        "a restart ignores copies in memory",
        "Saves.load",
        "copied > newest",
        "copied < newest",
        "train/test_memory_copies.py::test_a_run_resumes_from_the_newer_copy_and_from_the_disk_where_that_is_damaged[intact]",
    ),
    Mutation(
        "the memory for copies is not checked",
        "Saves.check_room",
        "2 * needed > free",
        "False",
        "train/test_memory_copies.py::test_copies_without_a_place_or_without_room_are_refused_in_one_line",
    ),
    Mutation(
        "any process can report a failure to the ranks",
        "Peers._answer_all",
        "not secrets.compare_digest(str(message['secret']), self._secret)",
        "False",
        "train/test_safeguards.py::test_a_stranger_is_neither_heard_nor_answered",
    ),
    Mutation(
        "a run that was asked to stop is restarted",
        "launch",
        "code != FAILURE or requests.count or number == restarts or not run.directory.is_dir()",
        "code != FAILURE or number == restarts or not run.directory.is_dir()",
        "train/test_safeguards.py::test_there_is_no_restart_after_ctrl_c",
    ),
    Mutation(
        "a resumed run reads its text from the beginning",
        "train.data:Batches.load_state_dict",
        "self.position = int(state['position'])",
        "",
        RESUMED,
    ),
    Mutation(
        "a resumed run reads your own data from the beginning",
        "Stream.load_state_dict",
        "range(self.taken)",
        "()",
        "train/test_trainer.py::test_a_run_of_a_program_resumes_bit_for_bit[go_on]",
    ),
    Mutation(
        "the learning rate restarts after a resume",
        "Schedule.load_state_dict",
        "self.step = state['step']",
        "",
        RESUMED,
    ),
    Mutation(
        "the checkpoint's optimizer options override the configured ones",
        "Trainer._go_on",
        "group.update(configured)",
        "",
        "train/test_changes.py::test_a_changed_option_is_used_and_recorded",
    ),
    Mutation(
        "gradients are not clipped",
        "clip_gradients",
        "weft.optim.clip_grad_norm_(model, largest, error_if_nonfinite=True)",
        "weft.optim.grad_norm(model)",
        "train/test_trainer.py::test_training_one_s_own_model_is_the_plain_loop_in_one_process[1]",
    ),
    Mutation(
        "the moving average of the weights never changes",
        "WeightAverage.after_step",
        "torch._foreach_lerp_(averages, weights, 1 - self.decay)",
        "",
        "train/test_ema.py::test_the_average_on_any_ranks_is_that_of_one_process[1]",
    ),
    Mutation(
        "checkpoints omit the moving average of the weights",
        "Trainer.state",
        '{"ema": self.average} if self.average else {}',
        "{}",
        "train/test_ema.py::test_a_run_with_a_moving_average_resumes_bit_for_bit",
    ),
    Mutation(
        "a skipped step updates the moving average of the weights",
        "Trainer._step",
        "self.average and not skipped",
        "self.average",
        "train/test_ema.py::test_a_step_that_is_skipped_does_not_count_in_the_average",
    ),
    Mutation(
        "every rank draws the same random numbers",
        "seed_all",
        "(seed + 1) * 1000003 + rank",
        "(seed + 1) * 1000003",
        "train/test_trainer.py::test_each_rank_draws_random_numbers_that_no_other_rank_draws",
    ),
    Mutation(
        "labels at the cuts of long documents are lost",
        "train:_packed",
        "begin += room - 1",
        "begin += room",
        "train/test_documents.py::test_no_document_predicts_the_next_and_no_label_of_one_is_lost",
    ),
    Mutation(
        "validation uses the beginning of the text",
        "_split",
        "hashlib.sha256(b'%d' % i).digest()",
        "i",
        "train/test_data.py::test_validation_text_is_spread_over_the_whole_text",
    ),
    Mutation(
        "with stages, router losses are divided by the number of all ranks",
        "Trainer._step",
        "self.ranks // self.config.sharding.pp",
        "self.ranks",
        "train/test_stages.py::test_losses_of_routers_are_logged_apart_where_stages_have_them",
    ),
    Mutation(
        "microbatches are not weighted by their labels",
        "train.data:_weights",
        "each / each.mean()",
        "each / each",
        "train/test_kinds.py::test_every_label_of_a_step_counts_alike_however_sequences_meet_in_microbatches",
    ),
    Mutation(
        "validation of the moving average uses the weights",
        "WeightAverage._exchange",
        "weight.copy_(average)",
        "",
        "train/test_ema.py::test_the_average_on_any_ranks_is_that_of_one_process[1]",
    ),
    Mutation(
        "a step with a spike is not skipped",
        "Trainer._step",
        "if not skipped: ...",
        "if True: ...",
        SPIKES,
    ),
    Mutation(
        "a step with a spike moves the biases of experts",
        "ExpertBalance.after_step",
        "self._has_bias and not skipped",
        "self._has_bias",
        SPIKES,
    ),
    Mutation(
        "a resumed run forgets earlier gradient norms",
        "Spikes.load_state_dict",
        "self.norms = [float(norm) for norm in state['norms']]",
        "",
        SPIKES,
    ),
    Mutation(
        "old norms are never dropped from the spike median",
        "Spikes.is_one",
        "[*self.norms, norm][-_KNOWN:]",
        "[*self.norms, norm]",
        HABITS + "test_the_median_is_that_of_the_last_hundred_and_twenty_must_be_known",
    ),
    Mutation(
        "the best checkpoint is deleted like others",
        "Saves.save",
        "self.checkpoints.protected = {best_step}",
        "",
        BEST,
    ),
    Mutation(
        "train.stop_after is ignored",
        "Trainer._is_settled",
        "0 < self.config.train.stop_after <= self.position.worse",
        "False",
        BEST,
    ),
]
