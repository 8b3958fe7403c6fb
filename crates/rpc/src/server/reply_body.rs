//! Body of a response: bytes, or a stream of events.

use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::admission::ConnectionState;
use super::event_stream::EventQueue;

/// Body of a response.
pub(super) enum ReplyBody {
    /// Bytes, until they are sent.
    Whole { bytes: Option<Bytes>, _guard: RequestGuard },
    /// Events.
    Events(EventBody),
}

/// Stream of events.
pub(super) struct EventBody {
    queue: Rc<EventQueue>,
    /// Ends when a comment is due, which shows that the connection is alive.
    keep_alive: Pin<Box<Sleep>>,
    is_begun: bool,
    _guard: RequestGuard,
}

/// Request in progress. It ends when its response is sent or given up.
pub(super) struct RequestGuard(Rc<ConnectionState>);

/// Interval of comments in a stream without events.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Comments (HTML, section 9.2.5).
const BEGIN: &[u8] = b": subscribed\n\n";
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

impl ReplyBody {
    pub(super) fn whole(bytes: Vec<u8>, guard: RequestGuard) -> Self {
        Self::Whole { bytes: Some(bytes.into()), _guard: guard }
    }

    pub(super) fn events(queue: Rc<EventQueue>, guard: RequestGuard) -> Self {
        let keep_alive = Box::pin(tokio::time::sleep(KEEP_ALIVE_INTERVAL));
        Self::Events(EventBody { queue, keep_alive, is_begun: false, _guard: guard })
    }
}

impl RequestGuard {
    pub(super) fn new(state: Rc<ConnectionState>) -> Self {
        state.begin_request();
        Self(state)
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.end_request();
    }
}

impl EventBody {
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if !std::mem::replace(&mut self.is_begun, true) {
            return Poll::Ready(Some(Bytes::from_static(BEGIN)));
        }
        if let Poll::Ready(next) = self.queue.poll_next(context) {
            return Poll::Ready(next);
        }
        ready!(self.keep_alive.as_mut().poll(context));
        self.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE_INTERVAL);
        Poll::Ready(Some(Bytes::from_static(KEEP_ALIVE)))
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match self.get_mut() {
            Self::Whole { bytes, .. } => bytes.take(),
            Self::Events(events) => ready!(events.poll_bytes(context)),
        };
        Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole { bytes, .. } => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole { bytes, .. } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Events(_) => SizeHint::default(),
        }
    }
}
