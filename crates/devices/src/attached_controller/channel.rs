//! Namespace of an attached controller as a block device.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, IoStatus, Limits, Operation,
    Request, Segment, Span,
};
use tenmil_dma::RegionTable;
use tenmil_linux::StepTimer;

use super::{AttachedController, ControllerBus, QueueLease};
use tenmil_base::Error;

/// Namespace of an attached controller.
pub(super) struct AttachedDevice<B: ControllerBus> {
    /// Queue pair from which the limits were read; the first channel uses it.
    first: Mutex<Option<AttachedChannel<B>>>,
    attached: Arc<AttachedController<B>>,
    limits: Limits,
}

/// I/O channel: one queue pair.
struct AttachedChannel<B: ControllerBus> {
    leased: QueueLease<B>,
    /// Dropped after the queue pair.
    attached: Arc<AttachedController<B>>,
}

impl<B: ControllerBus> AttachedDevice<B> {
    pub(super) fn new(attached: AttachedController<B>) -> Result<Self, Error> {
        let attached = Arc::new(attached);
        let first = AttachedChannel::new(&attached)?;
        let limits = first.leased.queue.limits().clone();
        Ok(Self { attached, limits, first: Mutex::new(Some(first)) })
    }
}

impl<B: ControllerBus> AttachedChannel<B> {
    fn new(attached: &Arc<AttachedController<B>>) -> Result<Self, Error> {
        Ok(Self { leased: attached.create_queue_pair()?, attached: Arc::clone(attached) })
    }
}

impl<B: ControllerBus> AttachedController<B> {
    /// Reads the first block through a new queue pair and records each step. The data stay in
    /// memory allocated in `regions`.
    pub(crate) fn read_first(
        self,
        regions: &RegionTable,
        steps: &mut StepTimer,
    ) -> Result<(), Error> {
        let attached = Arc::new(self);
        let name = attached.shared.bus.name();
        let time_limit = attached.wanted.time_limit;
        let mut channel = AttachedChannel::new(&attached)?;
        let block = channel.limits().block_size;
        let memory = attached.shared.bus.allocate(regions, block as usize);
        let memory = memory.map_err(|error| {
            Error::environment(format!("read the first block of {name}: memory for it: {error}"))
        })?;
        steps.finish_step("create a queue pair");
        let read = Request {
            operation: Operation::Read,
            blocks: 1,
            segment_count: 1,
            ..Request::PLACEHOLDER
        };
        let data = [Segment { len_bytes: block, ..memory.segment() }];
        let mut completions = CompletionBatch::with_capacity(1);
        let end = steps.clock().now().after(time_limit);
        let mut is_in_flight = false;
        let status = loop {
            let now = steps.clock().now();
            is_in_flight = is_in_flight || channel.submit(now, &[read], &data) == 1;
            channel.flush_submissions();
            channel.poll(now, &mut completions);
            if let Some(completion) = completions.as_slice().first() {
                break completion.status;
            }
            if now >= end {
                let text =
                    format!("read the first block of {name}: no response within {time_limit}");
                // Dropping the channel waits for the completion, so the memory is not reused
                // before.
                drop(channel);
                return Err(Error::remote(text));
            }
            tenmil_linux::named_thread::yield_cpu();
        };
        steps.finish_step("read its first block");
        match status {
            IoStatus::SUCCESS => Ok(()),
            failed => Err(Error::remote(format!("read the first block of {name}: {failed}"))),
        }
    }
}

impl<B: ControllerBus> BlockDevice for AttachedDevice<B> {
    fn limits(&self) -> Limits {
        self.attached.size_watch.limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let channel = match first {
            Some(channel) => channel,
            None => AttachedChannel::new(&self.attached)
                .map_err(|refused| refused.text)
                .map_err(Error::environment)?,
        };
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.attached.queues_max()
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        Ok(self.attached.size_watch.block_count(&self.limits))
    }

    fn identity(&self) -> Option<String> {
        self.attached.identity()
    }

    fn failure_reason(&self) -> Option<String> {
        self.attached.failure_reason()
    }
}

impl<B: ControllerBus> IoChannel for AttachedChannel<B> {
    fn limits(&self) -> &Limits {
        self.leased.queue.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.leased.queue.submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.leased.queue.poll(now, completions)
    }
}

impl<B: ControllerBus> ChannelWakeup for AttachedChannel<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.leased.queue)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.leased.queue)
    }
}

impl<B: ControllerBus> Drop for AttachedChannel<B> {
    /// Waits until the controller can access no buffer of a request: either it completes all
    /// commands, or the admin thread finds it lost and revokes its DMA access. No buffer is
    /// returned before, however long it takes; a warning names the controller.
    fn drop(&mut self) {
        let Self { leased, attached } = self;
        let name = attached.shared.bus.name();
        let mut time_limit = WaitBackoff::new(attached.clock.now());
        loop {
            let now = attached.clock.now();
            if leased.queue.drain_discarding_completions(now) {
                break;
            }
            match time_limit.next(now) {
                WaitAction::Spin => tenmil_linux::named_thread::yield_cpu(),
                WaitAction::Sleep => tenmil_linux::named_thread::sleep(SLEEP),
                WaitAction::Warn => {
                    let lost = attached.shared.lock().lost.as_ref().map(|lost| lost.text.clone());
                    tracing::warn!(cause = %name, "{}", overdue_message(name, lost.as_deref()));
                }
            }
        }
        if let Some(vector) = self.leased.vector {
            self.attached.release_vector(vector);
        }
    }
}

/// Back-off of a loop that waits for another thread.
struct WaitBackoff {
    since: Instant,
    has_reported: bool,
}

/// Next action of the wait loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitAction {
    /// Poll again at once: completion is expected within microseconds.
    Spin,
    /// Sleep for `SLEEP`.
    Sleep,
    /// Log which controller is waited for.
    Warn,
}

/// Time of polling without sleeping.
const SPIN_MAX: Span = Span::from_ms(1);
/// Duration of a sleep.
const SLEEP: Span = Span::from_us(500);
/// Time after which the wait is logged.
const WARN_AFTER: Span = Span::from_secs(5);

impl WaitBackoff {
    fn new(now: Instant) -> Self {
        Self { since: now, has_reported: false }
    }

    fn next(&mut self, now: Instant) -> WaitAction {
        let waited = now.since(self.since);
        if waited >= WARN_AFTER && !self.has_reported {
            self.has_reported = true;
            return WaitAction::Warn;
        }
        if waited < SPIN_MAX { WaitAction::Spin } else { WaitAction::Sleep }
    }
}

/// Log message about an overdue controller, with the reason for which it was lost, if it was.
fn overdue_message(name: &str, lost: Option<&str>) -> String {
    let kept = "its memory is not freed";
    match lost {
        // The reason begins with the name.
        Some(why) => {
            format!(
                "{why}; it may still reach memory after {WARN_AFTER}: until it does not, {kept}"
            )
        }
        None => {
            format!(
                "{name}: a queue has commands in flight after {WARN_AFTER}: until they end, {kept}"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{WaitAction, WaitBackoff, overdue_message};

    #[test]
    fn long_wait_backs_off_and_is_logged_once() {
        let (begin, mut reported, mut looks) = (Instant { ns: 1 }, Vec::new(), 0);
        let mut time_limit = WaitBackoff::new(begin);
        for ms in 0..60_000 {
            let now = begin.after(Span::from_ms(ms));
            match time_limit.next(now) {
                WaitAction::Warn => reported.push(ms),
                WaitAction::Spin => looks += 1,
                WaitAction::Sleep => {}
            }
        }
        assert_eq!((reported, looks), (vec![5_000], 1));
    }

    #[test]
    fn overdue_message_names_controller_and_reason() {
        assert_eq!(
            overdue_message("pcie:0000:01:00.0", None),
            "pcie:0000:01:00.0: a queue has commands in flight after 5 s: until they end, its memory is \
             not freed"
        );
        let reported = overdue_message(
            "pcie:0000:01:00.0",
            Some("pcie:0000:01:00.0: the controller was removed"),
        );
        assert!(
            reported.starts_with("pcie:0000:01:00.0: the controller was removed; it may still"),
            "{reported}"
        );
    }
}
