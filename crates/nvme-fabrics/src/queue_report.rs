//! Report of an I/O queue to the controller thread: whether its connection is closed, and how it ended.
//!
//! | the queue thread | the controller thread |
//! |---|---|
//! | has closed its connection, or lost it: [`report`](QueueReport::report) | [`take_closed`](QueueReport::take_closed), [`take_loss`](QueueReport::take_loss) |
//! | is dropped while the kernel still reads memory: [`leave_undrained`](QueueReport::leave_undrained) | [`take_undrained`](QueueReport::take_undrained) |
//!
//! What the controller requests of a queue is the state of its link (`queue_link.rs` of
//! `tenmil_nvme_host`), with the connection as the attachment of `Running`. So the queue counts as closed
//! once the link is neither `Running` nor `Quiescing`, and the queue has reported it or is idle.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Mailbox;
use tenmil_nvme_host::LinkSignals;

use crate::zero_copy_drain::ZeroCopyDrain;

/// Report of one queue.
pub(crate) struct QueueReport {
    /// State and busy flag of the queue's link.
    link: LinkSignals,
    contents: Mutex<ReportContents>,
    events: Arc<EventMailbox>,
}

/// Reports that the controller thread has not taken.
#[derive(Default)]
struct ReportContents {
    /// The connection was closed or lost.
    closed: Option<ClosedQueue>,
    /// [`ClosedQueue::may_execute_late`] of any of them.
    may_execute_late: bool,
    /// A closed connection whose memory the kernel still reads, left by a dropped queue; with the report
    /// to deliver once it is released.
    undrained: Option<(ZeroCopyDrain, ClosedQueue)>,
}

/// Report on a closed connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClosedQueue {
    /// The cause, unless the controller requested it.
    pub(crate) lost: Option<String>,
    /// A command was outstanding that would do harm if it were executed late.
    pub(crate) may_execute_late: bool,
}

/// Announces reports of the queues to the controller thread.
pub(crate) type EventMailbox = Mailbox<()>;

impl ReportContents {
    /// Adds to `closed` what earlier reports stated that were not taken.
    fn with_earlier_reports(&mut self, closed: ClosedQueue) -> ClosedQueue {
        let may_execute_late = core::mem::take(&mut self.may_execute_late);
        ClosedQueue { may_execute_late, ..closed }
    }
}

impl QueueReport {
    pub(crate) fn new(link: LinkSignals, events: &Arc<EventMailbox>) -> Arc<Self> {
        Arc::new(Self { link, contents: Default::default(), events: Arc::clone(events) })
    }

    /// Controller thread: forgets the reports on earlier connections. The queue has none, and gets a new
    /// one after this.
    pub(crate) fn clear(&self) {
        *self.lock() = ReportContents::default();
    }

    /// Controller thread: the report of the close, once the queue may not send anymore, and has closed or
    /// is idle.
    pub(crate) fn take_closed(&self) -> Option<ClosedQueue> {
        // The state before the busy flag: see `queue_link.rs`.
        if self.link.may_send() {
            return None;
        }
        let mut contents = self.lock();
        let is_idle = self.link.is_idle();
        let closed = contents.closed.take().or_else(|| is_idle.then(ClosedQueue::default))?;
        Some(contents.with_earlier_reports(closed))
    }

    /// Controller thread: the report of a loss, if any.
    pub(crate) fn take_loss(&self) -> Option<ClosedQueue> {
        let mut contents = self.lock();
        let closed = contents.closed.take_if(|closed| closed.lost.is_some())?;
        Some(contents.with_earlier_reports(closed))
    }

    /// Controller thread: takes the connection that a dropped queue has left, which is to be
    /// [reported](Self::report) as closed once it is drained.
    pub(crate) fn take_undrained(&self) -> Option<(ZeroCopyDrain, ClosedQueue)> {
        self.lock().undrained.take()
    }

    /// Queue thread: from now on something is in flight. Returns whether it may be sent.
    #[must_use]
    pub(crate) fn set_busy(&self) -> bool {
        self.link.set_busy()
    }

    /// Queue thread: nothing is in flight.
    #[inline]
    pub(crate) fn set_idle(&self) {
        self.link.set_idle();
    }

    /// Queue thread: reports that the connection is closed.
    pub(crate) fn report(&self, closed: ClosedQueue) {
        let mut contents = self.lock();
        contents.may_execute_late |= closed.may_execute_late;
        contents.closed = Some(closed);
        drop(contents);
        self.link.set_idle();
        self.events.send(|()| {});
    }

    /// Queue thread: on drop, leaves a connection that is not drained to the controller thread. The queue
    /// remains busy.
    pub(crate) fn leave_undrained(&self, undrained: (ZeroCopyDrain, ClosedQueue)) {
        self.lock().undrained = Some(undrained);
        self.events.send(|()| {});
    }

    fn lock(&self) -> MutexGuard<'_, ReportContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_nvme_host::{ControllerLinkEnd, QueueState, create_link};

    use super::{ClosedQueue, EventMailbox, QueueReport};

    /// The report of a queue whose link is running.
    fn running() -> (ControllerLinkEnd<()>, Arc<EventMailbox>, Arc<QueueReport>) {
        let (controller, queue) = create_link(1);
        controller.run(None);
        let events = Arc::<EventMailbox>::default();
        let report = QueueReport::new(queue.signals().clone(), &events);
        (controller, events, report)
    }

    #[test]
    fn queue_counts_as_closed_once_it_may_not_send_and_is_idle_or_has_reported_it() {
        for state in [QueueState::Frozen, QueueState::Released, QueueState::Dead] {
            let (controller, events, report) = running();
            assert_eq!(report.take_closed(), None, "it is idle, and may begin to send");
            assert!(report.set_busy());
            controller.set_state(QueueState::Quiescing);
            assert_eq!(report.take_closed(), None);
            controller.set_state(state);
            assert_eq!(report.take_closed(), None, "it is busy");
            assert!(events.take().is_none());
            report.report(ClosedQueue { lost: None, may_execute_late: true });
            assert!(events.take().is_some());
            let expected = ClosedQueue { lost: None, may_execute_late: true };
            assert_eq!(report.take_closed(), Some(expected));
            assert_eq!(report.take_closed(), Some(ClosedQueue::default()), "it is idle");
        }
    }

    #[test]
    fn queue_that_becomes_busy_after_it_was_frozen_is_waited_for() {
        let (controller, _events, report) = running();
        controller.set_state(QueueState::Frozen);
        assert!(!report.set_busy());
        assert_eq!(report.take_closed(), None);
        report.report(ClosedQueue::default());
        assert_eq!(report.take_closed(), Some(ClosedQueue::default()));
    }

    /// The queue thread and the controller thread notice the same loss, in either order.
    #[test]
    fn late_execution_is_reported_once_whichever_report_comes_last() {
        let lost = ClosedQueue { lost: Some("it was cut".into()), may_execute_late: true };
        for is_last in [false, true] {
            let (controller, _events, report) = running();
            assert!(report.set_busy());
            controller.set_state(QueueState::Frozen);
            let mut reports = [lost.clone(), ClosedQueue::default()];
            if is_last {
                reports.reverse();
            }
            reports.into_iter().for_each(|closed| report.report(closed));
            assert!(report.take_closed().is_some_and(|closed| closed.may_execute_late));
            assert_eq!(report.take_closed(), Some(ClosedQueue::default()), "{is_last}");
        }
    }

    #[test]
    fn loss_is_taken_while_the_queue_runs_and_a_requested_close_is_none() {
        let (_controller, _events, report) = running();
        report.report(ClosedQueue { lost: None, may_execute_late: true });
        assert_eq!(report.take_loss(), None);
        report.report(ClosedQueue { lost: Some("it was cut".into()), may_execute_late: false });
        let expected = ClosedQueue { lost: Some("it was cut".into()), may_execute_late: true };
        assert_eq!((report.take_loss(), report.take_loss()), (Some(expected), None));
        report.report(ClosedQueue { lost: Some("again".into()), may_execute_late: true });
        report.clear();
        assert_eq!(report.take_loss(), None, "of a connection before the last");
    }
}
