//! Drain of a closed connection whose memory the kernel still references (MSG_ZEROCOPY).
//!
//! Data sent by reference may leave the socket after the end of its connection: it is queued for
//! retransmission, or in a network card. The connection is not reported as closed before the kernel has
//! released it. So none of its commands complete, and no buffer returns to its owner, before that.

use tenmil_base::{Instant, Span};

use crate::queue_authentication::ExchangeBuffer;
use crate::queue_connection::QueueConnection;

/// A closed connection that is being drained.
pub(crate) struct ZeroCopyDrain {
    connection: QueueConnection,
    /// Buffer of an authentication that was in progress.
    buffer: Option<ExchangeBuffer>,
    next_check: Instant,
}

/// Interval of checks for released memory.
const INTERVAL: Span = Span::from_ms(1);

impl ZeroCopyDrain {
    /// Closes a connection; `None` if it is drained already. If an outstanding command may do harm
    /// (`may_execute_late`), or memory is still referenced, unsent data in the socket is discarded; a plain
    /// close would have the kernel deliver it.
    pub(crate) fn begin(mut connection: QueueConnection, may_execute_late: bool) -> Option<Self> {
        let is_referenced = connection.has_kernel_references();
        if may_execute_late || is_referenced {
            connection.discard_unsent();
        }
        let (buffer, next_check) = (None, Instant::default());
        is_referenced.then_some(Self { connection, buffer, next_check })
    }

    /// Like [`begin`](Self::begin), for a connection with an authentication in progress.
    pub(crate) fn begin_with_buffer(
        mut connection: QueueConnection,
        may_execute_late: bool,
        buffer: ExchangeBuffer,
    ) -> Option<Self> {
        let is_referenced = connection.has_unreleased_memory();
        if may_execute_late || is_referenced {
            connection.discard_unsent();
        }
        let (buffer, next_check) = (Some(buffer), Instant::default());
        is_referenced.then_some(Self { connection, buffer, next_check })
    }

    /// Whether the kernel has released everything.
    pub(crate) fn poll_drained(&mut self, now: Instant) -> bool {
        if now < self.next_check {
            return false;
        }
        self.next_check = now.after(INTERVAL);
        match self.buffer {
            Some(_) => !self.connection.has_unreleased_memory(),
            None => !self.connection.has_kernel_references(),
        }
    }

    /// Time of the next check.
    pub(crate) const fn wake_at(&self) -> Instant {
        self.next_check
    }
}
