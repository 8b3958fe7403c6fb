//! A namespace of an attached controller as a medium.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Operation, Outcome, Request,
    Segment, Span, WakeSource,
};
use dma::Regions;
use host::Steps;

use super::{Attached, Bus, Lent};
use crate::Refused;

/// The namespace.
pub(super) struct AttachedMedium<B: Bus> {
    /// The queue pair that told what all are like, until somebody wants it.
    first: Mutex<Option<AttachedChannel<B>>>,
    attached: Arc<Attached<B>>,
    limits: Limits,
}

/// A queue pair of it.
struct AttachedChannel<B: Bus> {
    lent: Lent<B>,
    /// Dropped after the queue pair.
    attached: Arc<Attached<B>>,
}

impl<B: Bus> AttachedMedium<B> {
    pub(super) fn new(attached: Attached<B>) -> Result<Self, Refused> {
        let attached = Arc::new(attached);
        let first = AttachedChannel::new(&attached)?;
        let limits = first.lent.queue.limits().clone();
        Ok(Self { attached, limits, first: Mutex::new(Some(first)) })
    }
}

impl<B: Bus> AttachedChannel<B> {
    fn new(attached: &Arc<Attached<B>>) -> Result<Self, Refused> {
        Ok(Self { lent: attached.queue()?, attached: Arc::clone(attached) })
    }
}

impl<B: Bus> Attached<B> {
    /// Reads the first block, by a queue pair made for that, and notes each step. It is left in the
    /// memory of `regions` that it was read into.
    pub(crate) fn read_first(self, regions: &Regions, steps: &mut Steps) -> Result<(), Refused> {
        let attached = Arc::new(self);
        let name = attached.shared.bus.name();
        let patience = attached.wanted.patience;
        let mut channel = AttachedChannel::new(&attached)?;
        let block = channel.limits().block_size;
        let memory = attached.shared.bus.allocate(regions, block as usize);
        let memory = memory.map_err(|error| {
            Refused::machine(format!("read the first block of {name}: memory for it: {error}"))
        })?;
        steps.done("create a queue pair");
        let read =
            Request { operation: Operation::Read, blocks: 1, segment_count: 1, ..Request::NOTHING };
        let data = [Segment { len_bytes: block, ..memory.segment() }];
        let mut answers = Answers::with_capacity(1);
        let end = steps.clock().now().after(patience);
        let mut is_under_way = false;
        let outcome = loop {
            let now = steps.clock().now();
            is_under_way = is_under_way || channel.submit(now, &[read], &data) == 1;
            channel.flush();
            channel.poll(now, &mut answers);
            if let Some(answer) = answers.as_slice().first() {
                break answer.outcome;
            }
            if now >= end {
                let text = format!("read the first block of {name}: no answer within {patience}");
                // It is answered before anybody else has the memory.
                drop(channel);
                return Err(Refused::peer(text));
            }
            host::thread::give_way();
        };
        steps.done("read its first block");
        match outcome {
            Outcome::SUCCESS => Ok(()),
            failed => Err(Refused::peer(format!("read the first block of {name}: {failed}"))),
        }
    }
}

impl<B: Bus> Medium for AttachedMedium<B> {
    fn limits(&self) -> Limits {
        self.attached.growth.limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let channel = match first {
            Some(channel) => channel,
            None => AttachedChannel::new(&self.attached).map_err(|refused| refused.text)?,
        };
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.attached.queues_max()
    }

    fn notice_size(&self) -> Result<u64, String> {
        Ok(self.attached.growth.block_count(&self.limits))
    }

    fn identity(&self) -> Option<String> {
        self.attached.identity()
    }

    fn lost(&self) -> Option<String> {
        self.attached.lost()
    }
}

impl<B: Bus> Backend for AttachedChannel<B> {
    fn limits(&self) -> &Limits {
        self.lent.queue.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.lent.queue.submit(now, requests, segments)
    }

    fn flush(&mut self) {
        self.lent.queue.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.lent.queue.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.lent.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.lent.queue.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.lent.queue.wake_source()
    }

    fn arm(&mut self) -> bool {
        self.lent.queue.arm()
    }

    fn disarm(&mut self) {
        self.lent.queue.disarm();
    }
}

impl<B: Bus> Drop for AttachedChannel<B> {
    /// Waits until the controller touches no memory of a request any more: it answers what it has, or
    /// is found lost by the thread that tends it and is kept from all memory. Until then nothing is
    /// given back, however long it takes; who is waited for is told.
    fn drop(&mut self) {
        let Self { lent, attached } = self;
        let name = attached.shared.bus.name();
        let mut patience = Patience::new(attached.clock.now());
        loop {
            let now = attached.clock.now();
            if lent.queue.abandon(now) {
                break;
            }
            match patience.next(now) {
                Next::Look => host::thread::give_way(),
                Next::Rest => host::thread::rest(REST),
                Next::Tell => {
                    let lost = attached.shared.lock().lost.as_ref().map(|lost| lost.text.clone());
                    tracing::warn!(cause = %name, "{}", overdue(name, lost.as_deref()));
                }
            }
        }
        if let Some(vector) = self.lent.vector {
            self.attached.release_vector(vector);
        }
    }
}

/// How whoever must wait for somebody else passes the time.
struct Patience {
    since: Instant,
    has_told: bool,
}

/// What is done until the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Nothing: it is a matter of microseconds.
    Look,
    /// Leave the processor to others for a while.
    Rest,
    /// Say who is waited for.
    Tell,
}

/// So long is looked without a rest.
const LOOKED: Span = Span::from_ms(1);
/// A rest.
const REST: Span = Span::from_us(500);
/// After so long somebody is told.
const TOLD: Span = Span::from_secs(5);

impl Patience {
    fn new(now: Instant) -> Self {
        Self { since: now, has_told: false }
    }

    fn next(&mut self, now: Instant) -> Next {
        let waited = now.since(self.since);
        if waited >= TOLD && !self.has_told {
            self.has_told = true;
            return Next::Tell;
        }
        if waited < LOOKED { Next::Look } else { Next::Rest }
    }
}

/// What is told of a controller that is waited for, with the reason for which it was lost, if it was.
fn overdue(name: &str, lost: Option<&str>) -> String {
    let kept = "its memory is not given back";
    match lost {
        // It begins with the name.
        Some(why) => {
            format!("{why}; it may still reach memory after {TOLD}: until it does not, {kept}")
        }
        None => {
            format!("{name}: a queue has commands in flight after {TOLD}: until they end, {kept}")
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};

    use super::{Next, Patience, overdue};

    #[test]
    fn a_long_wait_rests_and_is_told_of_once() {
        let (begin, mut told, mut looks) = (Instant { ns: 1 }, Vec::new(), 0);
        let mut patience = Patience::new(begin);
        for ms in 0..60_000 {
            let now = begin.after(Span::from_ms(ms));
            match patience.next(now) {
                Next::Tell => told.push(ms),
                Next::Look => looks += 1,
                Next::Rest => {}
            }
        }
        assert_eq!((told, looks), (vec![5_000], 1));
    }

    #[test]
    fn what_is_told_names_the_controller_and_the_reason() {
        assert_eq!(
            overdue("pcie:0000:01:00.0", None),
            "pcie:0000:01:00.0: a queue has commands in flight after 5 s: until they end, its memory is \
             not given back"
        );
        let told = overdue("pcie:0000:01:00.0", Some("pcie:0000:01:00.0: the controller is gone"));
        assert!(
            told.starts_with("pcie:0000:01:00.0: the controller is gone; it may still"),
            "{told}"
        );
    }
}
