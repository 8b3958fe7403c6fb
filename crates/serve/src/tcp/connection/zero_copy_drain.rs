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
    next_check: Instant,
    until: Instant,
}

/// Interval between checks.
const INTERVAL: Span = Span::from_ms(1);

impl TargetConnection {
    /// Closes the stream. If the kernel still references its memory, the drain starts.
    #[cold]
    pub(super) fn close_stream(&mut self, now: Instant) {
        let Some(mut stream) = self.stream.take() else { return };
        self.send_state.release_sent(&mut *stream, &mut self.end, &mut self.commands);
        if self.send_state.has_kernel_references() {
            stream.abort();
            let until = now.after(self.service.limits().time_limit);
            self.zero_copy_drain = Some(ZeroCopyDrain { stream, next_check: now, until });
            self.poll_kernel_release(now);
        }
    }

    /// Checks whether the kernel has released the memory. Returns the amount of work.
    pub(super) fn poll_kernel_release(&mut self, now: Instant) -> usize {
        let Some(zero_copy_drain) = &mut self.zero_copy_drain else { return 0 };
        if now < zero_copy_drain.next_check {
            return 0;
        }
        zero_copy_drain.next_check = now.after(INTERVAL);
        self.send_state.release_sent(
            &mut *zero_copy_drain.stream,
            &mut self.end,
            &mut self.commands,
        );
        if self.send_state.has_kernel_references() && now < zero_copy_drain.until {
            return 0;
        }
        if self.send_state.has_kernel_references() {
            self.leak_referenced_memory();
        }
        self.zero_copy_drain = None;
        1
    }

    /// Leaks the memory that the kernel still references.
    #[cold]
    pub(super) fn leak_referenced_memory(&mut self) {
        let bytes = self.commands.leak_response_memory();
        let text = format!(
            "{}: the kernel still references {bytes} bytes of sent data, expected it to release them: \
             this memory is not used again",
            self.peer
        );
        self.service.emit(TargetEvent::Error(text));
    }

    /// Time of the next check.
    pub(super) fn next_release_check(&self) -> Instant {
        self.zero_copy_drain
            .as_ref()
            .map_or(Instant::NEVER, |zero_copy_drain| zero_copy_drain.next_check)
    }
}
