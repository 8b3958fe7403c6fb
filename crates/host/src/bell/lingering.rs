//! Descriptors for which nobody hurries: what comes to one may wait for others.
//!
//! A sleep that is ended for a thousand peers, each of whom says now and then that it is still there,
//! costs more than what is done for them. So these lie in an epoll instance of their own, which is one
//! descriptor among the prompt ones:
//!
//! ```text
//!   heard:      the first that is ready ends the sleep ──> it is taken, the instance is heard no more
//!   not heard:  taken by whatever else ends a sleep, and after LINGER ──> none: heard again
//! ```
//!
//! One that comes alone is seen at once; of many, all that come in LINGER are seen together.

use std::io;
use std::os::fd::AsFd;

use base::Span;
use rustix::event::epoll::EventFlags;

use super::epoll::{Epoll, Found};

/// How much later than others a sleep may be ended by what lingers.
pub const LINGER: Span = Span::from_ms(50);

#[derive(Debug)]
pub(super) struct Lingering(Epoll);

/// Reported once, and then not before it is asked for again.
const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

impl Lingering {
    /// Nobody lingers yet; whoever does is heard by `prompt`.
    pub(super) fn new(prompt: &Epoll, token: u64) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        prompt.add(epoll.as_descriptor(), token, ONCE)?;
        Ok(Self(epoll))
    }

    pub(super) fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.0.add(source, token, EventFlags::IN)
    }

    pub(super) fn remove(&self, source: impl AsFd) -> io::Result<()> {
        self.0.remove(source)
    }

    /// Appends the tokens of those that are ready. If there are none, or more than fit, they are
    /// heard by `prompt` again, and the next comes at once. Says whether they have to be taken again.
    pub(super) fn take(&self, prompt: &Epoll, token: u64, ready: &mut Vec<u64>) -> bool {
        let mut found = Found::nothing();
        self.0.wait(Span::default(), &mut found);
        ready.extend(found.tokens());
        let is_heard = found.is_empty() || found.is_full();
        // Who is not heard for once is looked for.
        !(is_heard && prompt.modify(self.0.as_descriptor(), token, ONCE).is_ok())
    }
}
