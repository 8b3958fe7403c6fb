//! What the owner of a socket does with an end, whichever of the two it is.

use base::Instant;

use crate::Payloads;
use crate::body::{Body, Place};
use crate::events::Events;
use crate::line::{Cause, Line};
use crate::outbox::Piece;

/// An end of a connection, as its socket sees it.
pub trait Connection {
    /// What may happen at it.
    type Event: From<Cause>;

    /// What it has in common with the other end.
    fn line(&self) -> &Line;

    /// The same, to be changed: by this crate alone.
    fn line_mut(&mut self) -> &mut Line;

    /// Reads what has come, as far as units are whole, there are places for commands and `events`
    /// has room. Returns how many bytes were taken; the others are given again, with more behind
    /// them.
    fn receive(&mut self, now: Instant, bytes: &[u8], events: &mut Events<Self::Event>) -> usize;

    /// Queues what is to be sent, as far as there is room.
    fn fill(&mut self, payloads: &impl Payloads);

    /// Whether more is waiting for room behind the pieces: worth telling the socket, which then does
    /// not send what it has as a packet of its own.
    #[must_use]
    fn has_more(&self) -> bool;

    /// So many bytes of the pieces are with the socket, which no longer reads them. Tells of
    /// commands that this ends as far as `events` has room; none sent again goes on with them.
    ///
    /// # Panics
    ///
    /// If there were not so many.
    fn sent(&mut self, count: usize, events: &mut Events<Self::Event>);

    /// The tags of commands that have not ended. Their buffers are the owner's again once the socket
    /// is closed; until then some of them may still end, as [`sent`](Self::sent) tells.
    fn outstanding(&self) -> impl Iterator<Item = u16> + '_;

    /// What is to be sent now, oldest first.
    #[inline]
    #[must_use]
    fn pieces(&self) -> &[Piece] {
        self.line().out.pieces()
    }

    /// Where headers lie that pieces name.
    #[inline]
    #[must_use]
    fn headers(&self) -> &[u8] {
        self.line().out.headers()
    }

    /// Where the next bytes of the stream belong, if they can be read straight to there. Asked when
    /// all bytes that were received have been taken; answered with [`placed`](Self::placed).
    #[must_use]
    fn direct(&self) -> Option<Place> {
        let line = self.line();
        line.body.as_ref().filter(|_| line.is_open()).and_then(Body::direct)
    }

    /// So many bytes lie where [`direct`](Self::direct) said that they belong.
    ///
    /// # Panics
    ///
    /// If it did not name so many.
    fn placed(&mut self, now: Instant, count: u32, events: &mut Events<Self::Event>) {
        let body = self.line_mut().body.as_mut().expect("data are placed where direct() said");
        body.advance(count);
        self.receive(now, &[], events);
        let is_within = self.line().body.is_some();
        self.line_mut().note(now, is_within, true);
    }

    /// Whether the connection has been opened, and has not ended.
    #[must_use]
    fn is_open(&self) -> bool {
        self.line().is_open()
    }

    /// Whether the socket can be closed: nothing more will be read or sent.
    #[must_use]
    fn is_over(&self) -> bool {
        self.line().is_over()
    }

    /// Whether nothing more will ever be sent: the sending half of the socket can be shut down.
    #[must_use]
    fn is_spent(&self) -> bool {
        self.line().is_spent()
    }

    /// When [`expired`](Self::expired) is to be called; never, if that is [`Instant::NEVER`].
    #[must_use]
    fn deadline(&self) -> Instant {
        self.line().deadline()
    }

    /// Ends the connection if the deadline has passed.
    fn expired(&mut self, now: Instant, events: &mut Events<Self::Event>) {
        if let Some(cause) = self.line_mut().expired(now) {
            events.push_end(cause.into());
        }
    }

    /// The stream has ended: nothing comes any more. `rest_bytes` were not taken.
    fn receive_end(&mut self, rest_bytes: usize, events: &mut Events<Self::Event>) {
        let is_within = rest_bytes > 0 || self.line().body.is_some();
        if let Some(cause) = self.line_mut().closed(is_within) {
            events.push_end(cause.into());
        }
    }
}
