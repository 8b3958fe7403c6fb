//! Completion side of a queue pair: from its transport to completions for the caller.

use tenmil_base::{CompletionBatch, Instant, IoCompletion, IoStatus};

use super::{QueuePair, SlowPathState, SplitTracker, Transport};
use crate::queue_link::{LinkSignals, ResetReason};
use crate::slot_table::{EndedCommand, InvalidCompletion, SlotFlags, SlotTable};

/// Ends commands of a queue pair as their completions arrive, and collects the completions of requests.
pub struct CompletionSink<'a, P> {
    slots: &'a mut SlotTable,
    cold: &'a mut SlowPathState,
    link: &'a LinkSignals,
    places: &'a mut [IoCompletion],
    count: usize,
    parents: &'a mut P,
}

impl<T: Transport> QueuePair<T> {
    #[inline(always)]
    pub(crate) fn poll_with_tracker<P: SplitTracker>(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
        parents: &mut P,
    ) -> usize {
        self.polls += 1;
        let count = if self.link.state_word() == self.ordinary {
            if now >= self.scan_at {
                self.scan_deadlines(now);
            }
            completions.fill_with(|places| T::receive_completions(self, now, places, parents))
        } else {
            self.poll_slow(now, completions, parents)
        };
        self.idle_polls += u64::from(count == 0);
        count
    }

    /// Receives completions off the fast path.
    #[inline(never)]
    pub(super) fn take_completions_slow<P: SplitTracker>(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
        parents: &mut P,
    ) -> usize {
        completions.fill_with(|places| T::receive_completions(self, now, places, parents))
    }

    /// Has `receive` pass completions to a sink, for [`Transport::receive_completions`]. Returns the number of
    /// completions in `places`.
    #[inline(always)]
    pub fn receive_with<P: SplitTracker>(
        &mut self,
        places: &mut [IoCompletion],
        parents: &mut P,
        receive: impl FnOnce(&mut T, &mut CompletionSink<'_, P>),
    ) -> usize {
        let Self { transport, slots, cold, link, .. } = self;
        let link = link.signals();
        let mut sink = CompletionSink { slots, cold, link, places, count: 0, parents };
        receive(transport, &mut sink);
        sink.count
    }

    /// Handles a completion off the fast path: a command with flags, or an invalid completion.
    #[cold]
    pub(super) fn complete_slow_path<P: SplitTracker>(
        &mut self,
        (cid, status, result): (u16, IoStatus, u32),
        parents: &mut P,
    ) -> Option<IoCompletion> {
        let Self { slots, cold, link, .. } = self;
        complete_slow_path(slots, cold, link.signals(), (cid, status, result), parents)
    }

    /// Counts an invalid completion, which is skipped, and requests a controller reset.
    #[cold]
    pub(super) fn report_invalid_completion(&mut self, invalid_completion: InvalidCompletion) {
        report_invalid_completion(&mut self.cold, self.link.signals(), invalid_completion);
    }
}

impl<P: SplitTracker> CompletionSink<'_, P> {
    /// Whether there is no space for a completion.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.count == self.places.len()
    }

    /// Ends the command with this identifier.
    ///
    /// # Panics
    ///
    /// The sink [is full](Self::is_full).
    #[inline(always)]
    pub fn complete(&mut self, cid: u16, status: IoStatus, result: u32) {
        let place = &mut self.places[self.count];
        if let Some(token) = self.slots.complete_simple(cid) {
            *place = IoCompletion { token, status, result };
            self.count += 1;
            return;
        }
        let Self { slots, cold, link, parents, .. } = self;
        if let Some(completion) =
            complete_slow_path(slots, cold, link, (cid, status, result), *parents)
        {
            *place = completion;
            self.count += 1;
        }
    }
}

#[cold]
fn complete_slow_path<P: SplitTracker>(
    slots: &mut SlotTable,
    cold: &mut SlowPathState,
    link: &LinkSignals,
    (cid, status, result): (u16, IoStatus, u32),
    parents: &mut P,
) -> Option<IoCompletion> {
    match slots.complete(cid) {
        Ok(ended) => {
            let status = match &cold.injections {
                Some(injections) => {
                    injections.injected_status(slots.slot_index(cid), ended.mark, status)
                }
                None => status,
            };
            complete_flagged(ended, status, result, parents)
        }
        Err(invalid_completion) => {
            report_invalid_completion(cold, link, invalid_completion);
            None
        }
    }
}

#[cold]
fn report_invalid_completion(
    cold: &mut SlowPathState,
    link: &LinkSignals,
    invalid_completion: InvalidCompletion,
) {
    cold.invalid_completion_count += 1;
    cold.invalid_completion = Some(invalid_completion);
    link.request_reset(ResetReason::InvalidCompletion(invalid_completion));
}

/// Completion of a command with flags, if it is complete.
#[cold]
pub(super) fn complete_flagged<P: SplitTracker>(
    ended: EndedCommand,
    status: IoStatus,
    result: u32,
    parents: &mut P,
) -> Option<IoCompletion> {
    if ended.mark.has(SlotFlags::CHILD) {
        return parents.handle_child_completion(ended.token, status, result);
    }
    Some(IoCompletion { token: ended.token, status, result })
}
