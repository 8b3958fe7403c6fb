//! The end of a stream whose memory the kernel still reads.
//!
//! Memory that was sent by reference may be read after its connection has ended: packets lie in a
//! card, or in somebody's capture. It is nobody else's before the kernel has said that it has let go;
//! if it does not say so in time, nobody ever uses that memory again.

use base::{Instant, Span, Stream};

use super::Guest;
use crate::tcp::news::News;

/// A stream that is over but for that.
pub(super) struct Farewell {
    stream: Box<dyn Stream>,
    next_look: Instant,
    until: Instant,
}

/// How often it is asked.
const INTERVAL: Span = Span::from_ms(1);

impl Guest {
    /// The stream is over, but for what the kernel reads of its memory.
    #[cold]
    pub(super) fn part(&mut self, now: Instant) {
        let Some(mut stream) = self.stream.take() else { return };
        self.outgoing.tell(&mut *stream, &mut self.end, &mut self.rooms);
        if self.outgoing.is_read() {
            stream.abandon();
            let until = now.after(self.service.limits().patience);
            self.farewell = Some(Farewell { stream, next_look: now, until });
            self.wait_for_release(now);
        }
    }

    /// Looks whether the kernel has let go. How many things were done.
    pub(super) fn wait_for_release(&mut self, now: Instant) -> usize {
        let Some(farewell) = &mut self.farewell else { return 0 };
        if now < farewell.next_look {
            return 0;
        }
        farewell.next_look = now.after(INTERVAL);
        self.outgoing.tell(&mut *farewell.stream, &mut self.end, &mut self.rooms);
        if self.outgoing.is_read() && now < farewell.until {
            return 0;
        }
        if self.outgoing.is_read() {
            self.keep_for_ever();
        }
        self.farewell = None;
        1
    }

    /// What the kernel may still read stays as it is.
    #[cold]
    pub(super) fn keep_for_ever(&mut self) {
        let bytes = self.rooms.keep_answers();
        let text = format!(
            "{}: the kernel still reads {bytes} bytes that were sent to it, expected it to let go of \
             them: they are used no more",
            self.peer
        );
        self.service.tell(News::Trouble(text));
    }

    /// When that is to be looked at.
    pub(super) fn next_release(&self) -> Instant {
        self.farewell.as_ref().map_or(Instant::NEVER, |farewell| farewell.next_look)
    }
}
