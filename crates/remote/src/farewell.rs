//! The end of a connection whose memory the kernel still reads.
//!
//! What was sent by reference may leave the socket after its connection has ended: it waits to be sent
//! again, or lies in a card. Until the kernel has let go of it, nobody is told that the connection is
//! closed; so nothing that it carried is answered, and no buffer goes back to whoever lent it.

use base::{Instant, Span};

use crate::exchange::Exchange;

/// A connection that is over but for that.
pub(crate) struct Farewell {
    exchange: Exchange,
    next_look: Instant,
}

/// How often the kernel is asked.
const INTERVAL: Span = Span::from_ms(1);

impl Farewell {
    /// Ends a connection; `None` if it is over then. If something it has told may do harm
    /// (`may_linger`), or is still read, what the socket holds is thrown away, which a mere close would
    /// have the kernel deliver.
    pub(crate) fn begin(mut exchange: Exchange, may_linger: bool) -> Option<Self> {
        let is_read = exchange.is_read();
        if may_linger || is_read {
            exchange.abandon();
        }
        is_read.then_some(Self { exchange, next_look: Instant::default() })
    }

    /// Whether the kernel has let go of everything.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        if now < self.next_look {
            return false;
        }
        self.next_look = now.after(INTERVAL);
        !self.exchange.is_read()
    }

    /// When that is to be asked next.
    pub(crate) const fn wake_at(&self) -> Instant {
        self.next_look
    }
}
