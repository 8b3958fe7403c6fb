//! Closed streams whose buffers the kernel still references (MSG_ZEROCOPY).
//!
//! Memory sent by reference may be read after the connection has ended, because packets are queued
//! in a network card or held by a packet capture. It is not reused before the kernel has released
//! it. If that does not happen in time, the memory is leaked.

use tenmil_base::{Instant, Span, Stream};

use super::TargetConnection;
use crate::tcp::event::TargetEvent;

/// Closed stream with outstanding kernel references.
pub(super) struct ZeroCopyDrain {
    stream: Box<dyn Stream>,
    next_look: Instant,
    until: Instant,
}

/// Interval between checks.
const INTERVAL: Span = Span::from_ms(1);

impl TargetConnection {
    /// Closes the stream. If the kernel still references its memory, the drain starts.
    #[cold]
    pub(super) fn close_stream(&mut self, now: Instant) {
        let Some(mut stream) = self.stream.take() else { return };
        self.outgoing.handle_eof(&mut *stream, &mut self.end, &mut self.rooms);
        if self.outgoing.is_read() {
            stream.abort();
            let until = now.after(self.service.limits().time_limit);
            self.draining = Some(ZeroCopyDrain { stream, next_look: now, until });
            self.wait_for_release(now);
        }
    }

    /// Checks whether the kernel has released the memory. Returns the amount of work.
    pub(super) fn wait_for_release(&mut self, now: Instant) -> usize {
        let Some(draining) = &mut self.draining else { return 0 };
        if now < draining.next_look {
            return 0;
        }
        draining.next_look = now.after(INTERVAL);
        self.outgoing.handle_eof(&mut *draining.stream, &mut self.end, &mut self.rooms);
        if self.outgoing.is_read() && now < draining.until {
            return 0;
        }
        if self.outgoing.is_read() {
            self.keep_for_ever();
        }
        self.draining = None;
        1
    }

    /// Leaks the memory that the kernel still references.
    #[cold]
    pub(super) fn keep_for_ever(&mut self) {
        let bytes = self.rooms.keep_answers();
        let text = format!(
            "{}: the kernel still reads {bytes} bytes that were sent to it, expected it to let go of \
             them: they are used no more",
            self.peer
        );
        self.service.emit(TargetEvent::Trouble(text));
    }

    /// Time of the next check.
    pub(super) fn next_release(&self) -> Instant {
        self.draining.as_ref().map_or(Instant::NEVER, |draining| draining.next_look)
    }
}
