//! Fetches commands from the rings into the executor, and posts their completions.

use tenmil_base::{
    AccessFault, AccessId, AccessProgress, CompletionEntry, Instant, IoCompletion, RingMemory,
};
use tenmil_wire::{Command, Status};

use super::ring::{CompletionQueue, SubmissionQueue};
use super::{Queue, QueueEvent, TICKET_FETCH, TICKET_POST};
use crate::controller::transport_interface::InvalidDoorbell;
use crate::executor::{
    CommandDataLocation, CommandTag, CountReleases, FinishedCommand, NotCounted, SlotTable,
    low_16_bits,
};

impl<H: RingMemory> Queue<H> {
    /// Fetches a burst of commands, if fetching is permitted now. Returns their number.
    #[inline(always)]
    pub(super) fn fetch_burst(&mut self, now: Instant) -> u32 {
        let is_stopped = self.executor.is_stopping() || self.is_paused;
        if self.executor.is_exclusivity_held() {
            self.fetch_during_exclusivity(now, is_stopped)
        } else if is_stopped {
            0
        } else {
            self.fetch_commands(now)
        }
    }

    /// Fetches the commands that may run while a queue of the subsystem holds exclusivity.
    #[cold]
    fn fetch_during_exclusivity(&mut self, now: Instant, is_stopped: bool) -> u32 {
        self.executor.bar_exclusive_namespace();
        let taken = if is_stopped { 0 } else { self.fetch_commands(now) };
        self.executor.unbar_and_acknowledge_exclusivity();
        taken
    }

    /// Fetches commands from every submission queue in turn. Returns their number.
    #[inline(always)]
    fn fetch_commands(&mut self, now: Instant) -> u32 {
        self.executor.begin_batch();
        let mut taken = 0;
        for index in 0..self.submissions.len() {
            if self.held.is_some() && !self.retry_held_command(now)
                || self.executor.has_started_fused_pair()
            {
                break;
            }
            taken += self.fetch_from_submission_queue(now, index);
        }
        taken
    }

    #[inline(always)]
    fn fetch_from_submission_queue(&mut self, now: Instant, index: usize) -> u32 {
        let queue = &mut self.submissions[index];
        let (waiting, invalid) = queue.read_doorbell(&self.doorbells);
        let is_open = waiting > 0 && !queue.is_closing;
        if invalid.is_some() {
            self.executor.push_event(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
        }
        if !is_open {
            return 0;
        }
        let mut left = self.fetch_budget(waiting.min(self.burst));
        let granted = left;
        while left > 0 {
            let Some(command) = self.next_slow_path_command(index, &mut left) else { break };
            if !self.start_command(now, index, command) {
                break;
            }
        }
        granted - left
    }

    /// Begins a fetched command, or holds it. Returns false if it is held; nothing more may be fetched
    /// then.
    #[cold]
    fn start_command(&mut self, now: Instant, index: usize, command: Command) -> bool {
        let tag = CommandTag { stream: low_16_bits(index as u64), id: command.cid() };
        let is_begun =
            self.executor.begin_command(now, tag, command, CommandDataLocation::Pointers);
        if is_begun {
            self.submissions[index].in_flight += 1;
        } else {
            self.held = Some((index, command));
        }
        is_begun
    }

    /// Retries the held command. Returns true if none is held anymore.
    #[cold]
    fn retry_held_command(&mut self, now: Instant) -> bool {
        let Some((index, command)) = self.held.take() else { return true };
        if self.submissions[index].is_closing {
            return true;
        }
        if self.executor.has_started_fused_pair() || self.fetch_budget(1) == 0 {
            self.held = Some((index, command));
            return false;
        }
        self.start_command(now, index, command)
    }

    /// Number of the `wanted` commands that may be fetched: each needs a slot and a completion entry.
    #[inline]
    pub(super) fn fetch_budget(&mut self, wanted: u32) -> u32 {
        let (taken, free_count) = (self.executor.in_flight_count(), self.executor.free_count());
        let mut free_entries = self.completion.free_count() as usize - taken;
        if free_entries < wanted as usize {
            if self.completion.read_doorbell(&self.doorbells).is_some() {
                self.executor.push_event(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
            }
            free_entries = self.completion.free_count() as usize - taken;
        }
        wanted.min(u32::try_from(free_count.min(free_entries)).unwrap_or(wanted))
    }

    /// Starts commands until one is not supported by the fast path, and returns that one. Returns `None`
    /// when `left` or the ring is exhausted.
    fn next_slow_path_command(&mut self, index: usize, left: &mut u32) -> Option<Command> {
        let queue = &mut self.submissions[index];
        if !queue.is_accessed_in_place() || !self.executor.can_begin_run() {
            return self.fetch_slow_path_command(index, left);
        }
        let first = queue.take_shared_entry();
        *left -= 1;
        let mut words = self.check_ring_access(first)?;
        loop {
            words = match self.begin_run(index, left, words) {
                RunStop::Ended(next) => next?,
                RunStop::NotBegun => return Some(Command(words)),
            };
        }
    }

    /// Starts the command in `words` and the following ones of its kind.
    #[inline(never)]
    fn begin_run(&mut self, index: usize, left: &mut u32, words: [u64; 8]) -> RunStop {
        let Self { executor, submissions, .. } = self;
        let begun = executor.begin_run(low_16_bits(index as u64), &words, |run| {
            submissions[index]
                .take_shared_run(*left, |simple_words| run.begin_command(simple_words))
        });
        let Some((count, taken)) = begun else { return RunStop::NotBegun };
        submissions[index].in_flight += count;
        let next = self.check_ring_access(taken).flatten();
        *left -= count - 1 + u32::from(next.is_some());
        RunStop::Ended(next)
    }

    /// Unwraps the result of a ring read; breaks the queue down and returns `None` if the ring is not
    /// accessible.
    #[inline]
    fn check_ring_access<T>(&mut self, result: Result<T, AccessFault>) -> Option<T> {
        result.map_err(|fault| self.stop_after_ring_fault(fault)).ok()
    }

    /// Fetches one command without the fast path.
    #[cold]
    fn fetch_slow_path_command(&mut self, index: usize, left: &mut u32) -> Option<Command> {
        let queue = &mut self.submissions[index];
        let taken = if queue.is_accessed_in_place() {
            queue.take_shared_entry().map(Some)
        } else {
            let ticket = AccessId(TICKET_FETCH | u32::from(queue.id));
            let was_open = queue.is_fetching();
            let taken = queue.take_remote_entry(&mut self.executor.host, ticket);
            self.ring_accesses += u32::from(queue.is_fetching() && !was_open);
            taken
        };
        match taken {
            Ok(Some(words)) => {
                *left -= 1;
                Some(Command(words))
            }
            Ok(None) => None,
            Err(fault) => {
                self.stop_after_ring_fault(fault);
                None
            }
        }
    }

    /// Handles completions of the block devices. Returns whether there were any.
    pub(super) fn poll_executor(&mut self, now: Instant) -> bool {
        let Self { executor, submissions, completion, .. } = self;
        let (mut posted, mut fault) = (0, None);
        let has_completions = executor.poll(now, |slots, counter, io_completions| {
            let released = (slots, io_completions);
            let count = match counter {
                Some(counter) => {
                    let counting = counter.runs();
                    post_fast_path_completions(
                        submissions,
                        completion,
                        released,
                        counting,
                        &mut fault,
                    )
                }
                None => post_fast_path_completions(
                    submissions,
                    completion,
                    released,
                    NotCounted,
                    &mut fault,
                ),
            };
            posted += count;
            count
        });
        self.posted += posted;
        if let Some(fault) = fault {
            self.stop_after_ring_fault(fault);
        }
        has_completions
    }

    /// Posts the completions of finished commands. A completion entry was reserved for each when it was
    /// fetched.
    #[inline]
    pub(super) fn post_finished(&mut self) {
        if self.executor.has_finished_commands() {
            self.post_all_finished();
        }
    }

    #[inline(never)]
    fn post_all_finished(&mut self) {
        let finished = self.executor.take_finished_commands();
        for command in &finished {
            if let Some(entry) = self.completion_entry(command) {
                let ticket = AccessId(TICKET_POST);
                let handle_store_result =
                    self.completion.store_completion(&mut self.executor.host, ticket, entry);
                self.handle_store_result(handle_store_result);
            }
        }
        self.executor.recycle_finished_list(finished);
    }

    /// Completion entry of a finished command, or `None` if the queue is stopping.
    fn completion_entry(&mut self, command: &FinishedCommand) -> Option<CompletionEntry> {
        let FinishedCommand { tag, status, result, .. } = *command;
        let queue = &mut self.submissions[usize::from(tag.stream)];
        queue.in_flight -= 1;
        if self.executor.is_stopping() {
            return None;
        }
        let (head, sqid) = (queue.head(), queue.id);
        if let Some(report) = command.error_report(sqid, tag.id) {
            self.executor.push_event(QueueEvent::Error(report));
        }
        Some([result.into(), second_completion_qword(head, sqid, tag.id, status)])
    }

    /// Handles the result of storing a completion entry.
    #[inline]
    pub(super) fn handle_store_result(
        &mut self,
        handle_store_result: Result<AccessProgress, AccessFault>,
    ) {
        match handle_store_result {
            Ok(AccessProgress::Done) => self.posted += 1,
            Ok(AccessProgress::Pending) => self.ring_accesses += 1,
            Err(fault) => self.stop_after_ring_fault(fault),
        }
    }
}

/// Posts successful fast-path commands, up to the first completion that is anything else. Returns their
/// number; `fault` is set if the ring is not accessible.
#[inline(never)]
fn post_fast_path_completions<E: tenmil_base::RingEntries, C: CountReleases>(
    submissions: &mut [SubmissionQueue<E>],
    completion: &mut CompletionQueue<E>,
    (slots, io_completions): (&mut SlotTable, &[IoCompletion]),
    counting: C,
    fault: &mut Option<AccessFault>,
) -> u32 {
    let [queue] = submissions else { return 0 };
    if !completion.is_accessed_in_place() {
        return 0;
    }
    completion.prefetch(u32::try_from(io_completions.len()).unwrap_or(u32::MAX));
    // Every entry has the same SQHD and SQID; only identifier and result differ.
    let same = second_completion_qword(queue.head(), queue.id, 0, Status::SUCCESS);
    let mut releasing = slots.release_cursor(counting);
    let (count, handle_store_result) =
        completion.post_completions(io_completions, |io_completion| {
            if !io_completion.status.is_success() {
                return None;
            }
            let cid = releasing.release(io_completion.token)?;
            Some([io_completion.result.into(), same | u64::from(cid) << 32])
        });
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    releasing.finish(count);
    queue.in_flight -= count;
    if handle_store_result.is_err() {
        *fault = handle_store_result.err();
    }
    count
}

/// Second qword of a completion entry without its phase.
fn second_completion_qword(head: u32, sqid: u16, cid: u16, status: Status) -> u64 {
    let low = u64::from(head & 0xffff) | u64::from(sqid) << 16;
    low | u64::from(cid) << 32 | u64::from(status.0) << 49
}

/// End of a run of commands.
enum RunStop {
    /// Exhausted, or stopped before this command, which is fetched and of another kind.
    Ended(Option<[u64; 8]>),
    /// Not started: its first command is not supported.
    NotBegun,
}
