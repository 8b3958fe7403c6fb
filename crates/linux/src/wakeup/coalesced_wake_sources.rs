//! Coalesced wake-up sources: descriptors whose wake-ups may be delayed and batched.
//!
//! Ending a sleep for each of a thousand peers that only send keep-alives costs more than the work
//! itself. Therefore such descriptors are in an epoll instance of their own, which is one
//! descriptor among the prompt ones:
//!
//! ```text
//!   armed:     the first ready descriptor ends the sleep ──> polled, the instance is disarmed
//!   disarmed:  polled whenever a sleep ends, and after COALESCE_DELAY ──> nothing ready: armed again
//! ```
//!
//! A single event is reported at once; of many, all that occur within `COALESCE_DELAY` are reported
//! together.

use std::io;
use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use tenmil_base::Span;

use super::epoll::{Epoll, ReadyList};

/// Longest delay of a wake-up by a coalesced descriptor.
pub const COALESCE_DELAY: Span = Span::from_ms(50);

#[derive(Debug)]
pub(super) struct CoalescedSources(Epoll);

/// One-shot: reported once, then disarmed until it is modified.
const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

impl CoalescedSources {
    /// Creates an empty set, armed in `prompt`.
    pub(super) fn new(prompt: &Epoll, token: u64) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        prompt.add(epoll.as_descriptor(), token, ONCE)?;
        Ok(Self(epoll))
    }

    pub(super) fn add_source(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.0.add(source, token, EventFlags::IN)
    }

    pub(super) fn remove_source(&self, source: impl AsFd) -> io::Result<()> {
        self.0.remove(source)
    }

    /// Appends the tokens of ready descriptors. If none is ready, or more than fit, the set is
    /// armed in `prompt` again. Returns whether the set must be polled again.
    pub(super) fn take_ready(&self, prompt: &Epoll, token: u64, ready: &mut Vec<u64>) -> bool {
        let mut found = ReadyList::empty();
        self.0.wait(Span::default(), &mut found);
        ready.extend(found.tokens());
        let is_heard = found.is_empty() || found.is_full();
        // If arming fails, the set is polled instead.
        !(is_heard && prompt.modify(self.0.as_descriptor(), token, ONCE).is_ok())
    }
}
