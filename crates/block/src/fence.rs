//! Fences: blocks that are closed to every channel of a device, because a client has gone while its
//! writes were in flight there.
//!
//! ```text
//!   old client     write A ──────────────── in the medium ───────────────▶ answered
//!                     │ gone: fence_writes()                                  │ fence removed
//!   new client        └────── write B of the same blocks waits ───────────────┴─▶ submitted
//!                                              or, after WAIT_MAX, is answered INTERRUPTED
//! ```
//!
//! Nobody hears any more how A ends, so whoever writes B takes A for done or lost. Were B to begin
//! before A has ended, A could land over it. Reads wait as well: what they would return could still
//! change without a write that anybody knows of.
//!
//! Why blocks are closed, and not clients refused: who writes B may be another host, another path of
//! the same host, or another protocol. And a medium that never answers costs those blocks, not the
//! whole device. A fence is in the table of its device and is found as holds are: see
//! [`lock`](crate::lock). A request costs nothing for it while there is none.

use core::ops::Range;

use base::{Instant, Request, Segment, Span};

/// Blocks that are closed.
#[derive(Clone, Debug)]
pub(crate) struct Fence {
    /// Which client's: several may have the same number.
    pub(crate) id: u64,
    pub(crate) blocks: Range<u64>,
}

/// A request that waits until its blocks are open again.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Its segments are counted from the first of `segments`.
    pub(crate) request: Request,
    pub(crate) segments: Box<[Segment]>,
    pub(crate) until: Instant,
}

/// How long a request waits for a fence: less than the 30 s after which hosts give up a command, so
/// that they are answered and try again.
pub(crate) const WAIT_MAX: Span = Span::from_secs(5);
